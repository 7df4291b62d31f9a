"""Moved to `python -m scripts.chaos weights flips`."""

import sys

sys.exit("scripts.bus_corruption has moved: python -m scripts.chaos weights flips")
