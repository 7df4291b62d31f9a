"""Mutated messages through real sockets: what the command beside it is made of."""
