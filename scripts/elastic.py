"""Moved to `python -m scripts.chaos elastic`."""

import sys

sys.exit("scripts.elastic has moved: python -m scripts.chaos elastic")
