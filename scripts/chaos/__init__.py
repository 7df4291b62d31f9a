"""Seeded faults against real runs, and a checker of what became of every group: `python -m scripts.chaos`."""
