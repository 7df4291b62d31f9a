"""What every process of a run shares (runtime, families), and what an operator touches (all other rooms)."""
