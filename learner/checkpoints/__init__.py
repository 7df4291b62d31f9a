"""Checkpoints: DCP state and a Hugging Face folder, written and found again."""
