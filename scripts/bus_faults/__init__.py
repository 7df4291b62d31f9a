"""Faults at every moment of a weight update, against real processes: see __main__.py."""
