"""The request to a strategy, checked: its options, its mesh, its optimizer and the layout of its
state.
"""
