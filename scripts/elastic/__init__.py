"""Rollout servers that join and leave one training run, and a judge of what came of it: `python -m scripts.elastic`."""
