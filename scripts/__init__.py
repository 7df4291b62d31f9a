"""Commands for people who work on a clone; the wheel has none of them."""
