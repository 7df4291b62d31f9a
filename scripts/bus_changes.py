"""Moved to `python -m scripts.chaos weights changes`, and `--link-mb-s` to `python -m scripts.bench link`."""

import sys

sys.exit("scripts.bus_changes has moved: python -m scripts.chaos weights changes; a link: python -m scripts.bench link")
