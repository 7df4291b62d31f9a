"""Whole runs around the real state machines of replay and its peers, with every kind of fault.

`world` drives the replay service, rollout servers (`servers`: real HeldLeases and Subscriptions) and ranks (`learners`:
real Dialogs) over `network`, `journal` and `bus`, which lose what dying processes lose; `books` holds the outcome
against what only the peers have seen.
"""
