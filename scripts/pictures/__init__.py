"""The drawn pictures of the documentation: `python -m scripts.pictures` writes docs/pictures/."""
