"""Convolutions of XLA:TPU that are inner products: every spatial dim is free, contracted or common
to both operands.
"""

import re
from collections.abc import Sequence

from shardopt.hlo._hlo_text import WindowDim, window_dims
from shardopt.hlo.proof._lines import Line
from shardopt.hlo.proof._rules import product
from shardopt.hlo.proof._value import DerivedValue, Unproved


def convolution(line: Line, values: Sequence[DerivedValue]) -> DerivedValue:
    """Return the rule of a convolution that is an inner product."""
    lhs, rhs = values
    left, right, result = re.split("_|->", line.attributes["dim_labels"])
    # one label for each dim, in all three arrays: HLO writes "f" for the features of the left side
    # and of the result, which are the dims "i" and "o" of the right side
    right = right.replace("i", "f")
    result = result.replace("f", "o")
    if any(line.attributes.get(f"{kind}_group_count", "1") != "1" for kind in ("feature", "batch")):
        raise Unproved("no rule covers a convolution in groups.")
    labels = {"batch": [], "contracting": ["f"], "left": [], "right": []}
    windows = window_dims(line.attributes)
    for label in sorted(set(result) - set("bo")):
        sizes = lhs.shape[left.index(label)], rhs.shape[right.index(label)]
        size = line.dims[result.index(label)]
        labels[_role(windows[int(label)], *sizes, size)].append(label)
    # a dim that is free in one operand has one element in the other
    lhs, left = _without(lhs, left, labels["right"])
    rhs, right = _without(rhs, right, labels["left"])
    batch, contracting = (
        [(left.index(label), right.index(label)) for label in labels[role]]
        for role in ("batch", "contracting")
    )
    inner = product(line, lhs, rhs, batch, contracting)
    order = list(dict.fromkeys([*labels["batch"], *left, *right]))
    order = [label for label in order if label not in labels["contracting"]]
    dims = tuple(inner.dims[order.index(label)] if label in order else () for label in result)
    return DerivedValue(line.dims, dims, inner.hidden, fill=inner.fill)


def _role(window: WindowDim, left: int, right: int, result: int) -> str:
    """Return the role of a spatial dim in an inner product, from its sizes: it is free in the
    `left` or `right` side, or common to both: `contracting` or `batch`.
    """
    plain = WindowDim(window.size, stride=1, low=0, high=0, spread=1, dilation=1, reverse=0)
    if window == plain and right == 1 and result == left:
        return "left"
    if window == plain and left == right and result == 1:  # the window covers the dim
        return "contracting"
    _, stride, low, high, spread, _, reverse = window
    # from behind, the window passes over a single element
    if reverse and (left, result, stride, low, high) == (1, right, 1, right - 1, right - 1):
        return "right"
    # with n - 1 zeros after each element, a window of size n that steps over n - 1 places meets
    # element i with its own element i
    one_element_a_step = (stride, low, high, reverse) == (max(result - 1, 1), 0, 0, 0)
    if left == right == result == spread and one_element_a_step:
        return "batch"
    raise Unproved("no rule covers a convolution that is no inner product.")


def _without(value: DerivedValue, labels: str, removed: Sequence[str]) -> tuple[DerivedValue, str]:
    """Return a value and its labels without some dims of one element."""
    remaining = [i for i, label in enumerate(labels) if label not in removed]
    shape = tuple(value.shape[i] for i in remaining)
    dims = tuple(value.dims[i] for i in remaining)
    return value._replace(shape=shape, dims=dims, data=None), "".join(labels[i] for i in remaining)
