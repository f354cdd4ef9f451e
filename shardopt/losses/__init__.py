"""The loss on a piece of the batch: its rows, its parts, the proof that it may run per device, the
global view.
"""
