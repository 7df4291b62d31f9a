"""The parts of scripts/bench_replay.py: simulated producers and learner around the real replay process."""
