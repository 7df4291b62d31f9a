"""Tasks: rows, prompts, rewards, environments and agents. Imports nothing: processes of user code start below it."""
