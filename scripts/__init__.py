"""Commands around a run: data, summaries, checks. Each says in its docstring how to call it."""
