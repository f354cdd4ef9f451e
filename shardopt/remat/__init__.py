"""Rematerialisation: which residuals a backward pass keeps of the forward pass, and what it computes again."""
