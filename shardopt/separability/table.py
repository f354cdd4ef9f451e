"""The table of rules: what each primitive of jax does to relations. A primitive that is not in the table is unknown."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.core.primitives import ARITHMETIC, DECOMPOSITIONS, IDENTITIES, SPECIAL
from shardopt.separability import lookups, moves, reductions
from shardopt.separability.elementwise import elementwise, first_unknown, not_linear, related, unify
from shardopt.separability.numbers import fold
from shardopt.separability.relations import (
    Columns,
    Extreme,
    Known,
    Same,
    Shifted,
    Site,
    Split,
    Total,
    Value,
    differing,
    growth,
)


class Rule(NamedTuple):
    """What is known of a primitive.

    Attributes:
      results: `results(site, operands)`, the relations of its results.
      sizes: the parameters that may differ between the whole and a piece, because `results` looks at them.
      takes: the relations that `results` may be given; of an operand with another nothing is known.
      raw: whether `results` is given operands as they are; else known numbers by their relation, and what it takes only.
    """

    results: Callable[[Site, Sequence[Value]], list[Value]]
    sizes: frozenset[str] = frozenset()
    takes: tuple[type, ...] = (Same, Split, Total)
    raw: bool = False


PLACES = frozenset(["sharding", "out_sharding", "device", "devices", "srcs", "dst_sharding", "src_sharding", "layout"])
"""Parameters that say where values live, not what they are."""


def results_of(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return the relations of the results of an equation, from those of its operands."""
    if (numbers := fold(site, values)) is not None:
        return [numbers]
    rule = TABLE.get(site.name)
    if rule is None:
        return [first_unknown(values) or site.unknown("primitive")] * site.num_results
    if not all(name in rule.sizes | PLACES or equal_params(*site.params_of(name)) for name in site.params):
        return [first_unknown(values) or site.unknown("count")] * site.num_results
    if any(isinstance(value, Shifted) for value in values):
        return [_of_parts(site, rule, values)] * site.num_results
    if not rule.raw:
        values = related(site, values)
        if unknown := first_unknown(values):
            return [unknown] * site.num_results
        for value in values:
            if not isinstance(value, rule.takes):
                return [not_linear(site, value)] * site.num_results
    return rule.results(site, values)


LINEAR_IN_ONE = frozenset(
    [
        "neg",
        "mul",
        "div",
        "convert_element_type",
        "reduce_precision",
        "copy",
        "name",
        "sharding_constraint",
        "stop_gradient",
        "reduce_sum",
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "broadcast_in_dim",
    ]
)
"""What is linear in an operand, the others being numbers that are the same for all rows."""


def _of_parts(site: Site, rule: Rule, values: Sequence[Value]) -> Value:
    """f(Q + T) = f(Q) + f(T) if f is linear: each part has the relation that it would have alone."""
    if unknown := first_unknown(values):
        return unknown
    others = [value for value in related(site, values) if not isinstance(value, Shifted)]
    if len(others) != len(values) - 1 or (site.name == "div" and not isinstance(values[0], Shifted)):
        return site.unknown("mixes")
    shifted = next(value for value in values if isinstance(value, Shifted))
    parts: list[Value] = []
    for part in (shifted.split, shifted.total):
        operands = [part if isinstance(value, Shifted) else value for value in values]
        if site.name in ("add", "sub", "add_any"):  # what is added belongs to one of the parts
            total = isinstance(others[0], Total)
            parts.append(rule.results(site, operands)[0] if isinstance(part, Total) == total else part)
        elif site.name in LINEAR_IN_ONE and all(isinstance(value, Same) for value in others):
            parts.append(rule.results(site, operands if rule.raw else related(site, operands))[0])
    if len(parts) == 2 and isinstance(parts[0], Split) and isinstance(parts[1], Total):
        return Shifted(parts[0], parts[1])
    if len(parts) == 2 and isinstance(parts[0], Total):
        return unify(site, parts)
    return first_unknown(parts) or not_linear(site, shifted.total)


def equal_params(a: Any, b: Any) -> bool:
    """Return whether a parameter of an equation is the same in both traces."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:  # both NaN
        return True
    try:
        return bool(a == b)
    except Exception:
        return False


def _random(site: Site, values: Sequence[Value]) -> list[Value]:
    """Draw numbers from a key.

    The key of the loss is each piece's own, so numbers for rows are those of the pieces, one after the other. Any other key
    gives the rows of each piece the same numbers, but not the whole batch.
    """
    key = values[0]
    shapes = site.result()
    dims = differing(shapes)
    if isinstance(key, Split):
        return [Split(key.dim, key.blocks, 1.0, key.order) if dims == (key.dim,) else site.unknown("shape")]
    if not isinstance(key, Same):
        return [site.unknown("mixes")]
    if not dims:
        return [key]
    if not key.drawn:
        return [site.unknown("position")]
    return [Split(dims[0]) if len(dims) == 1 and growth(shapes, dims) == site.pieces else site.unknown("shape")]


def _fold_in(site: Site, values: Sequence[Value]) -> list[Value]:
    """Make a key of a key and a number; of the loss's own key and any numbers that is a key of the piece's own."""
    key = values[0]
    if isinstance(key, Same) and key.drawn and isinstance(values[1], Known):
        return _random(site, [key])
    return elementwise(site, values)


def _threefry(site: Site, values: Sequence[Value]) -> list[Value]:
    """Make bits of a key and a counter, as `_fold_in`."""
    if any(isinstance(key, Same) and key.drawn for key in values[:2]):
        return _random(site, [Same(1.0, True)]) * site.num_results
    return elementwise(site, values)


def _iota(site: Site, values: Sequence[Value]) -> list[Value]:
    """Count along a dim: equal along all others, and along this one no part of the whole is counted like the whole."""
    del values
    return [site.unknown("position") if site.params["dimension"] in differing(site.result()) else Same()]


def _identities(site: Site, values: Sequence[Value]) -> list[Value]:
    """Return each operand as it is."""
    del site
    return list(values)


def _no_results(site: Site, values: Sequence[Value]) -> list[Value]:
    """Print, and return nothing."""
    del site, values
    return []


def _bitcast(site: Site, values: Sequence[Value]) -> list[Value]:
    """Read the bits of each entry as another dtype of the same width."""
    if len(site.operand()[0]) != len(site.result()[0]):
        return [first_unknown(values) or site.unknown("shape")]
    return elementwise(site, values)


def _any_of_all(site: Site, values: Sequence[Value]) -> list[Value]:
    """`equinox` asks whether any is true, of what is one number already."""
    return list(values) if not site.operand()[0] else [site.unknown("primitive")]


def _attention_kernel(site: Site, values: Sequence[Value]) -> list[Value]:
    """CuDNN's attention: operands [rows, ...], each row's result from that row alone, and of its bias if it has rows."""
    dims = {dim for shapes in map(site.operand, range(len(values))) for dim in differing(shapes)}
    dims |= {dim for shapes in map(site.result, range(site.num_results)) for dim in differing(shapes)}
    splits = {value.place for value in values if isinstance(value, Split)}
    fine = dims <= {0} and all(isinstance(value, Same | Split) and site.equal(value.ratio, 1.0) for value in values)
    if not fine or splits != {(0, 1, None)}:
        return [site.unknown("mixes")] * site.num_results
    rows = [0 in differing(site.result(i)) for i in range(site.num_results)]
    return [Split(0) if one else site.unknown("mixes") for one in rows]


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


MOVED = (Same, Split, Total, Extreme)
"""The relations that survive wherever entries are moved to."""

_ENTRY_BY_ENTRY = (ARITHMETIC | SPECIAL | IDENTITIES) - {"bitcast_convert_type"}

TABLE: dict[str, Rule] = {
    **dict.fromkeys(_ENTRY_BY_ENTRY, Rule(elementwise, raw=True)),
    **_rules(Rule(_bitcast), "bitcast_convert_type"),
    **_rules(Rule(moves.reshape, frozenset(["new_sizes"]), takes=MOVED), "reshape"),
    **_rules(Rule(moves.broadcast, frozenset(["shape"]), takes=MOVED), "broadcast_in_dim"),
    **_rules(Rule(moves.transpose, takes=MOVED), "transpose"),
    **_rules(Rule(moves.squeeze, takes=MOVED), "squeeze"),
    **_rules(Rule(moves.expand_dims, takes=MOVED), "expand_dims"),
    **_rules(Rule(moves.slice_entries, frozenset(["start_indices", "limit_indices", "strides"]), takes=(*MOVED, Columns)), "slice"),
    **_rules(Rule(moves.rev, takes=MOVED), "rev"),
    **_rules(Rule(moves.tile, frozenset(["reps"]), takes=MOVED), "tile"),
    **_rules(Rule(moves.pad, raw=True), "pad"),
    **_rules(Rule(moves.concatenate, raw=True), "concatenate"),
    **_rules(Rule(moves.split, frozenset(["sizes"]), takes=MOVED), "split"),
    **_rules(Rule(moves.stack, raw=True), "stack"),
    **_rules(Rule(moves.unstack, takes=MOVED), "unstack"),
    **_rules(Rule(reductions.reduce_sum), "reduce_sum"),
    **_rules(Rule(reductions.reduce_extreme, takes=MOVED), "reduce_max reduce_min reduce_or reduce_and"),
    **_rules(Rule(reductions.reduce_other), "reduce_prod reduce_xor"),
    **_rules(Rule(reductions.argmax), "argmax argmin"),
    **_rules(Rule(reductions.along("axis", linear=True)), "cumsum"),
    **_rules(Rule(reductions.along("axis")), "cumprod cummax cummin cumlogsumexp"),
    **_rules(Rule(reductions.along("dimension")), "sort"),
    **_rules(Rule(reductions.top_k), "top_k"),
    **_rules(
        Rule(reductions.window),
        "reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add",
    ),
    **_rules(Rule(reductions.dot_general), "dot_general"),
    **_rules(Rule(reductions.convolution, frozenset(["lhs_shape", "rhs_shape"])), "conv_general_dilated"),
    **_rules(Rule(reductions.fft), "fft"),
    **dict.fromkeys([*DECOMPOSITIONS, "lu_pivots_to_permutation"], Rule(reductions.batched)),
    **_rules(Rule(lookups.gather, frozenset(["slice_sizes"]), raw=True), "gather"),
    **_rules(
        Rule(lookups.scatter, frozenset(["update_jaxpr"]), raw=True),
        "scatter scatter-add scatter_add scatter_sub scatter_mul scatter_min scatter_max",
    ),
    **_rules(Rule(lookups.dynamic_slice, frozenset(["slice_sizes"]), raw=True), "dynamic_slice"),
    **_rules(Rule(lookups.dynamic_update_slice, raw=True), "dynamic_update_slice"),
    **_rules(Rule(_random, frozenset(["shape"])), "random_bits random_split"),
    **_rules(Rule(_random), "random_wrap random_unwrap random_clone random_seed"),
    **_rules(Rule(_fold_in, raw=True), "random_fold_in"),
    **_rules(Rule(_threefry, raw=True), "threefry2x32"),
    **_rules(Rule(_iota, frozenset(["shape"])), "iota"),
    **_rules(Rule(_identities, raw=True), "optimization_barrier device_put"),
    **_rules(Rule(_no_results, frozenset(["callback", "effect"]), raw=True), "debug_callback debug_print"),
    **_rules(Rule(_any_of_all, takes=MOVED), "unvmap_any unvmap_all"),
    **_rules(
        Rule(_attention_kernel), "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"
    ),
}  # fmt: skip
