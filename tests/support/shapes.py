"""The checker of annotated shapes: beartype, for the functions of a module and its classes."""

import beartype


def check_outer(function):
    """Check the types of a function of a module. A function within another stays as it is.

    No inner function annotates a shape, and each call of the outer one would generate its checks
    anew: 5% of the CPU time of the contract tests.
    """
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
