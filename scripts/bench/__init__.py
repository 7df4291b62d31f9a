"""Parts of scripts/bench_pipeline.py: the model, the phases, the learner that runs them, and the numbers."""
