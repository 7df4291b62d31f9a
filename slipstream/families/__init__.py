"""Facts of model families, which both ends ask for. No torch."""
