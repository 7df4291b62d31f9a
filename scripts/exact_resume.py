"""Moved to `python -m scripts.chaos resume`."""

import sys

sys.exit("scripts.exact_resume has moved: python -m scripts.chaos resume")
