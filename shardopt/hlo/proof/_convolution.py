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
    left_labels, right_labels, result_labels = re.split("_|->", line.attributes["dim_labels"])
    # one label for each dim, in all three arrays: HLO writes "f" for the features of the left side
    # and of the result, which are the dims "i" and "o" of the right side
    right_labels = right_labels.replace("i", "f")
    result_labels = result_labels.replace("f", "o")
    if any(line.attributes.get(f"{kind}_group_count", "1") != "1" for kind in ("feature", "batch")):
        raise Unproved("no rule covers a convolution in groups.")
    labels_of_role = {"batch": [], "contracting": ["f"], "left": [], "right": []}
    windows = window_dims(line.attributes)
    for label in sorted(set(result_labels) - set("bo")):
        sizes = lhs.shape[left_labels.index(label)], rhs.shape[right_labels.index(label)]
        size = line.dims[result_labels.index(label)]
        labels_of_role[_role(windows[int(label)], *sizes, size)].append(label)
    # a dim that is free in one operand has one element in the other
    lhs, left_labels = _without(lhs, left_labels, labels_of_role["right"])
    rhs, right_labels = _without(rhs, right_labels, labels_of_role["left"])
    batch, contracting = (
        [(left_labels.index(label), right_labels.index(label)) for label in labels_of_role[role]]
        for role in ("batch", "contracting")
    )
    inner = product(line, lhs, rhs, batch, contracting)
    # `product` returns the dims in this order: batch, then the left side's, then the right side's.
    order = list(dict.fromkeys([*labels_of_role["batch"], *left_labels, *right_labels]))
    order = [label for label in order if label not in labels_of_role["contracting"]]
    dims = tuple(
        inner.dims[order.index(label)] if label in order else () for label in result_labels
    )
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
