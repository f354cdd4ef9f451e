"""Weights and products in 8 bits: how they are rounded, gathered and multiplied."""
