"""One file a library: what its user writes, a function a strategy, and `LINES`, the functions whose
lines are counted.
"""
