"""Doctor: what would stop a run or spoil it on these machines, and what mends it."""
