"""Flipped bits in weight updates, and who serves them: see __main__.py."""
