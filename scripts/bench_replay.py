import sys

from scripts.bench.__main__ import moved

sys.exit(moved("bench_replay", "replay"))
