"""What users do, as programs that do it: the first ten minutes, a run that hangs, a reward that collapses."""
