"""Traces: walks over the equations of jaxprs, the marks that layers leave in them, and functions
cut out of them.
"""
