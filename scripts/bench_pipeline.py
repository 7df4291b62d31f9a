import sys

from scripts.bench.__main__ import moved

sys.exit(moved("bench_pipeline", "pipeline"))
