"""Convolutions of XLA:TPU that are inner products: every spatial dim is free, contracted or common
to both operands.
"""

import re
from collections.abc import Sequence

from shardopt.hlo._hlo_text import window_dims
from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._rules import product
from shardopt.hlo.proof._value import DerivedValue, Unproved


def convolution(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a convolution that is an inner product.

    A spatial dim of n elements is common to both operands if the window of size n steps over a left
    side that is spread by n. It is contracted if the window covers it whole, and free if one of the
    operands has one element.
    """
    lhs, rhs = values
    left_labels, right_labels, result_labels = re.split("_|->", line.attributes["dim_labels"])
    windows = window_dims(line.attributes)
    if any(line.attributes.get(f"{kind}_group_count", "1") != "1" for kind in ("feature", "batch")):
        raise Unproved("no rule covers a convolution in groups.")
    batch = []
    contracting = [("f", "i")]
    free_left = ["b"]
    free_right = ["o"]
    for label in sorted(set(result_labels) - set("bf")):
        index = int(label)
        size = lhs.shape[left_labels.index(label)], rhs.shape[right_labels.index(label)]
        result = line.dims[result_labels.index(label)]
        _, stride, low, high, spread, dilation, reverse = windows[index]
        plain = (stride, spread, dilation, low, high, reverse) == (1, 1, 1, 0, 0, 0)
        if plain and size[1] == 1 and result == size[0]:
            free_left.append(label)
        elif plain and size[0] == size[1] and result == 1:
            contracting.append((label, label))
        elif (
            size[0] == 1
            and (low, high) == (size[1] - 1,) * 2
            and reverse
            and result == size[1]
            and stride == 1
        ):
            free_right.append(label)
        elif (
            size[0] == size[1] == result == spread
            and stride == max(result - 1, 1)
            and (low, high, reverse) == (0, 0, 0)
        ):
            batch.append((label, label))
        else:
            raise Unproved("no rule covers a convolution that is no inner product.")
    lhs, left_labels = _without(lhs, left_labels, free_right)
    rhs, right_labels = _without(rhs, right_labels, free_left)
    pairs = [
        [(left_labels.index(a), right_labels.index(b)) for a, b in labels]
        for labels in (batch, contracting)
    ]
    result = product(line, lhs, rhs, *pairs)
    taken = {i for pair in pairs for i, _ in pair}, {j for pair in pairs for _, j in pair}
    order = [label for label, _ in batch]
    order += [label for i, label in enumerate(left_labels) if i not in taken[0]]
    order += [
        {"o": "f"}.get(label, label) for j, label in enumerate(right_labels) if j not in taken[1]
    ]
    dims = tuple(
        result.dims[order.index(label)] if label in order else () for label in result_labels
    )
    return DerivedValue(line.dims, dims, result.hidden, fill=result.fill)


def _without(value: DerivedValue, labels: str, removed: Sequence[str]) -> tuple[DerivedValue, str]:
    """Drop the spatial dims of one element that are free in the other operand."""
    remaining = [i for i, label in enumerate(labels) if not (label in removed and label.isdigit())]
    shape = tuple(value.shape[i] for i in remaining)
    dims = tuple(value.dims[i] for i in remaining)
    return value._replace(shape=shape, dims=dims, data=None), "".join(labels[i] for i in remaining)
