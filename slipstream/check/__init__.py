"""What would stop or spoil a run, before it starts: one list of checks for every start, dry runs and doctor."""
