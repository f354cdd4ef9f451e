"""Kernels for accelerators: attention, norms, rotations and products of groups, in Pallas and plain XLA.

Layers decide when a kernel runs; a kernel knows nothing of layers.
"""
