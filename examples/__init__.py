"""Runnable examples: models and prompts of the presets, and the learner under TRL."""
