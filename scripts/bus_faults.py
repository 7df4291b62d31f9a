"""Moved to `python -m scripts.chaos bus`."""

import sys

sys.exit("scripts.bus_faults has moved: python -m scripts.chaos bus")
