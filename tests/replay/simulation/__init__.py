"""Whole runs around the pure replay service: simulated peers, clock, network and disk, and every kind of fault.

`world` drives, `servers` and `learners` do what the real peers do when messages are lost or processes die, `network`
and `journal` lose what a dying process loses, and `books` holds the outcome against what only the peers have seen.
"""
