"""Versions as what has changed since the one before: how it is coded, and when it travels."""
