"""A run for hours or days with planted restarts, and whether it keeps what it promises: `python -m scripts.soak`."""
