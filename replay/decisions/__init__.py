"""Policy without I/O: what becomes of prompts, leases, groups and batches. Time is an argument."""
