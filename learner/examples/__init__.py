"""Small tasks to start with; their models and prompts are made here."""
