"""Commands for people who work on a clone; the wheel has none of them."""

from scripts import moved

__all__ = ["moved"]
