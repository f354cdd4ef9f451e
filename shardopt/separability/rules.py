"""What is known of the results of an equation: the rule of each primitive."""

import math
from collections.abc import Sequence

from shardopt.core.primitives import DECOMPOSITIONS
from shardopt.separability.arithmetic import ENTRYWISE, elementwise, known, not_linear
from shardopt.separability.contractions import along, conv, dot_general, reduce, reduce_sum, top_k, window
from shardopt.separability.folding import fold
from shardopt.separability.lookups import dynamic_update_slice, gather, scatter
from shardopt.separability.moves import (
    broadcast,
    concatenate,
    dynamic_slice,
    pad,
    reshape,
    rows_of_constant,
    slice_rows,
    split,
    squeeze,
    stack,
    transpose,
)
from shardopt.separability.rule_parts import As, Rule, linear_in_first, on_rows, opaque, uniform
from shardopt.separability.values import Clean, Const, Mixed, Rows, Site, Sum, Value, first_mixed


def apply(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return what is known of the results of an equation, from what is known of its operands."""
    if (rows := rows_of_constant(site, values)) is not None:
        values = rows
    elif site.num_outs == 1 and (numbers := fold(site, values)) is not None:
        return [known(site, numbers, next((one.op for one in values if isinstance(one, Const) and one.varies), None))]
    if site.name in ENTRYWISE:
        return elementwise(site, values)
    if mixed := first_mixed(values):
        return [mixed] * site.num_outs
    clean = [value for value in values if not isinstance(value, Mixed)]
    rule = RULES.get(site.name)
    if rule is not None:
        return [
            site.mixed("count") if isinstance(one, Rows) and math.isnan(sum(one.degree)) else one
            for one in rule(site, clean)
        ]
    if all(isinstance(value, Const) for value in clean):
        return opaque(site, clean)
    return [site.mixed("unknown")] * site.num_outs


def _random(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Random numbers of a key for each row belong to that row; those of one key differ by position."""
    value = values[0]
    if isinstance(value, Rows):
        return [value] * site.num_outs
    return opaque(site, values)


def _batched(site: Site, values: Sequence[Clean]) -> list[Value]:
    """Linear algebra on the last two dims."""
    rows = [value for value in values if isinstance(value, Rows)]
    if any(isinstance(value, Sum) or (isinstance(value, Rows) and value.plus) for value in values):
        return [not_linear(site, values)] * site.num_outs
    if not rows:
        return uniform(site, values)
    joint = elementwise(As(site, "select_all"), values)[0]
    if isinstance(joint, Rows) and joint.dim is not None:
        leading = min(len(site.ins(i)[0]) for i in range(len(values))) - 2
        if joint.dim >= leading and not (site.name == "lu_pivots_to_permutation" and joint.dim == 0):
            return [site.mixed()] * site.num_outs
    return [joint] * site.num_outs


def _fft(site: Site, values: Sequence[Clean]) -> list[Value]:
    value = values[0]
    if isinstance(value, Rows):
        transformed = len(site.params["fft_lengths"])
        if value.plus or (value.dim is not None and value.dim >= len(site.ins()[0]) - transformed):
            return [site.mixed()]
    return [value] if not isinstance(value, Const) else uniform(site, values)


def _keep(site: Site, values: Sequence[Clean]) -> list[Value]:
    """An identity of each operand."""
    return list(values)


def _iota(site: Site, values: Sequence[Clean]) -> list[Value]:
    return opaque(site, values)


RULES: dict[str, Rule] = {
    "reshape": reshape,
    "broadcast_in_dim": broadcast,
    "transpose": transpose,
    "squeeze": squeeze,
    "slice": linear_in_first(slice_rows),
    "dynamic_slice": linear_in_first(dynamic_slice),
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "reduce_sum": reduce_sum,
    **dict.fromkeys(["reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"], reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], along("axis")),
    "sort": along("dimension"),
    "rev": along("dimensions"),
    "top_k": top_k,
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add", "select_and_gather_add"], on_rows(window)),
    "dot_general": dot_general,
    "conv_general_dilated": conv,
    "gather": gather,
    **dict.fromkeys(["scatter", "scatter-add", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max"], scatter),
    "dynamic_update_slice": dynamic_update_slice,
    **dict.fromkeys(["random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed", "random_clone"], _random),
    **dict.fromkeys([*DECOMPOSITIONS, "lu_pivots_to_permutation"], _batched),
    "fft": _fft,
    **dict.fromkeys(["optimization_barrier", "device_put"], _keep),
    "iota": _iota,
}  # fmt: skip
