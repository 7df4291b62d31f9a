"""Starting a run: checks before it, child processes, watching over them. Imports no torch."""
