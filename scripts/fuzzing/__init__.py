"""Mutated messages through real sockets: what scripts/fuzz.py is made of."""
