"""Mixtures of experts: router, grouped products, auxiliary loss, given routing, experts divided over ranks."""
