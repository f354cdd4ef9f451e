"""Is a step right: a comparison with one device, the origin of a NaN, and steps that are computed
twice.
"""
