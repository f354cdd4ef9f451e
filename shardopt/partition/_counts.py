"""How many blocks of a model each virtual stage of a pipeline runs."""

Counts = tuple[int, ...]
"""[V]: how many blocks each virtual stage runs, in the order of the model; () without a pipeline."""


def is_even(counts: Counts) -> bool:
    """Return whether all virtual stages run equally many blocks, so that each stage can store its
    share of the stack.
    """
    return len(set(counts)) == 1
