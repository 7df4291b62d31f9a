"""Campaigns, a module each: `main(arguments)` returns the exit code."""
