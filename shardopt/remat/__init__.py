"""Rematerialisation: store some residuals of the forward pass, and compute the others again in the
backward pass.
"""
