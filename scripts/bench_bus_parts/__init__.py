"""Parts of scripts/bench_bus.py: the versions, a receiver with its engine, what came out."""
