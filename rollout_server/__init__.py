"""Rollout server: lease a prompt, generate, score, send the group. One process per engine."""
