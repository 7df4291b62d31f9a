"""Weight updates as changes, under lost, repeated and reordered messages and over a slow link: see __main__.py."""
