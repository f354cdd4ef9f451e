"""Rematerialisation: which residuals of the forward pass are stored, and what the backward pass computes again."""
