"""The table of rules: the effect of each primitive of jax on relations.

A primitive that is not in the table is unknown.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from shardopt.separability import _draws as draws
from shardopt.separability import _lookups as lookups
from shardopt.separability import _moves as moves
from shardopt.separability import _reductions as reductions
from shardopt.separability._elementwise import (
    elementwise,
    first_unknown,
    not_linear,
    resolve_numbers,
    unify,
    unknown_results,
)
from shardopt.separability._numbers import fold_constants
from shardopt.separability._relations import (
    Columns,
    EquationPair,
    Extreme,
    Relation,
    Same,
    Shifted,
    Split,
    Total,
    as_drawn,
    differing_dims,
    is_drawn,
)
from shardopt.trace._jaxprs import jaxpr_params, open_jaxpr
from shardopt.trace._primitives import ARITHMETIC, IDENTITIES, SPECIAL, library_name, words


class Rule(NamedTuple):
    """The rule of a primitive.

    Attributes:
      results: `results(site, relations)` returns the relations of the results from the relations of
        the operands.
      size_params: the parameters that may differ between the two traces, because `results` checks
        them.
      accepts: the relations that `results` can handle. With any other operand the result is
        unknown. Not used if `raw`.
      raw: whether `results` gets all relations, `Known` and `Unrelated` included. If False, known
        numbers are replaced by the relation that follows from them, and only relations that
        `results` accepts reach it.
      draws: whether `results` says itself which results are `drawn`. If False, all are if an
        operand is.
    """

    results: Callable[[EquationPair, Sequence[Relation]], list[Relation]]
    size_params: frozenset[str] = frozenset()
    accepts: tuple[type, ...] = (Same, Split, Total)
    raw: bool = False
    draws: bool = False


PLACEMENT_PARAMS = words(
    "sharding out_sharding device devices srcs dst_sharding src_sharding layout"
)
"""Parameters that place values on devices, and do not change the values."""


def apply_rule(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Return the relations of the results of an equation, from the relations of its operands."""
    rule = TABLE.get(site.name)
    if rule is None or not all(map(_combines_by_name, (site.whole_eqn, site.piece_eqn))):
        return unknown_results(site, relations, "primitive")
    numbers = fold_constants(site, relations)
    if numbers is not None:
        return [numbers]
    results = [
        checked(site, i, relation) for i, relation in enumerate(_results(site, rule, relations))
    ]
    if rule.draws or not any(map(is_drawn, relations)):
        return results
    return list(map(as_drawn, results))


def _results(site: EquationPair, rule: Rule, relations: Sequence[Relation]) -> list[Relation]:
    params = fixed_params(site.whole_eqn)
    if not equal_params(params, fixed_params(site.piece_eqn)):
        return unknown_results(site, relations, "count")
    if any(isinstance(relation, Shifted) for relation in relations):
        return [_apply_to_parts(site, rule, relations)] * site.num_results
    if not rule.raw:
        relations = resolve_numbers(site, relations)
        unknown = first_unknown(relations)
        if unknown:
            return [unknown] * site.num_results
        for relation in relations:
            if not isinstance(relation, rule.accepts):
                return [not_linear(site, relation)] * site.num_results
    return rule.results(site, relations)


def _combines_by_name(eqn: JaxprEqn) -> bool:
    """Return whether an equation has no function, or is a `scatter-add` that adds."""
    functions = jaxpr_params(eqn)
    if not functions:
        return eqn.primitive.name != "scatter-add"
    inner = open_jaxpr(functions[0])
    names = [library_name(update.primitive) for update in inner.eqns]
    return (
        len(functions) == 1
        and (eqn.primitive.name, names) == ("scatter-add", ["add"])
        and inner.eqns[0].invars == inner.invars
        and inner.eqns[0].outvars == inner.outvars
    )


WRAPPING = words(
    "mul neg sub cumsum reduce_window_sum dot_general conv_general_dilated reduce_max reduce_min"
)
"""Primitives whose integers may wrap although a sum of rows does not. An extreme of no entries is
the limit of the dtype.
"""


def checked(site: EquationPair, i: int, relation: Relation) -> Relation:
    """Return the relation of a result; `Unrelated` if its numbers may wrap, or are rounded coarsely.

    Integers wrap, and floats of 8 bits have few digits. So sums and ratios do not hold for them.
    Sums of integers of 32 or 64 bits are taken to fit, see docs/proof.md.
    """
    is_scaled = isinstance(relation, Total | Shifted) or (
        isinstance(relation, Same | Split) and relation.ratio != 1
    )
    dtype = site.whole_eqn.outvars[i].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if not is_scaled or (jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1):
        return relation
    is_sum = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return relation if is_sum and site.name not in WRAPPING else site.unknown("count")


LINEAR_IN_ONE = words(
    "neg mul div convert_element_type reduce_precision copy name sharding_constraint stop_gradient"
    " reduce_sum reshape squeeze expand_dims transpose broadcast_in_dim"
)
"""Primitives that are linear in one operand if all other operands are the same in all pieces."""


def _apply_to_parts(site: EquationPair, rule: Rule, relations: Sequence[Relation]) -> Relation:
    """Return the relation of f(Q + T) for rows Q and a total T.

    If f is linear, it is f(Q) + f(T).
    """
    unknown = first_unknown(relations)
    if unknown:
        return unknown
    added_relations = [
        relation
        for relation in resolve_numbers(site, relations)
        if not isinstance(relation, Shifted)
    ]
    if len(added_relations) != len(relations) - 1 or (
        site.name == "div" and not isinstance(relations[0], Shifted)
    ):
        return site.unknown("mixes")
    shifted = next(relation for relation in relations if isinstance(relation, Shifted))
    parts: list[Relation] = []
    for part in (shifted.split, shifted.total):
        operands = [part if isinstance(relation, Shifted) else relation for relation in relations]
        if site.name in ("add", "sub", "add_any"):  # the other operand is added to Q or to T
            adds_total = isinstance(added_relations[0], Total)
            parts.append(
                rule.results(site, operands)[0] if isinstance(part, Total) == adds_total else part
            )
        elif site.name in LINEAR_IN_ONE and all(
            isinstance(relation, Same) for relation in added_relations
        ):
            parts.append(
                rule.results(site, operands if rule.raw else resolve_numbers(site, operands))[0]
            )
    if len(parts) == 2 and isinstance(parts[0], Split) and isinstance(parts[1], Total):
        return Shifted(parts[0], parts[1])
    if len(parts) == 2 and isinstance(parts[0], Total):
        return unify(site, parts)
    return first_unknown(parts) or not_linear(site, shifted.total)


def fixed_params(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the parameters that must be equal in both traces: all but sizes and placements."""
    rule = TABLE.get(eqn.primitive.name)
    sizes = rule.size_params if rule else {"jaxpr", "axis_size"}
    return {name: eqn.params[name] for name in eqn.params.keys() - sizes - PLACEMENT_PARAMS}


def equal_params(whole_param: Any, piece_param: Any) -> bool:
    """Return whether parameters of an equation are the same in both traces: 0.0 is not -0.0."""
    (whole_leaves, whole_tree), (piece_leaves, piece_tree) = map(
        jax.tree.flatten, (whole_param, piece_param)
    )
    return whole_tree == piece_tree and all(
        a is b or (np.array_equal(a, b) and repr(a) == repr(b))
        for a, b in zip(whole_leaves, piece_leaves, strict=True)
    )


def _iota(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Count along a dim.

    Along a dim of rows, all pieces but the first count other numbers than the whole batch.
    """
    del relations
    return [
        (
            site.unknown("position")
            if site.params["dimension"] in differing_dims(site.result_shapes())
            else Same()
        )
    ]


def _identities(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Return each operand unchanged."""
    del site
    return list(relations)


def _no_results(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Print, and return nothing."""
    del site, relations
    return []


def _bitcast(site: EquationPair, relations: Sequence[Relation]) -> list[Relation]:
    """Read the bits of each entry as another dtype of the same width."""
    if len(site.operand_shapes()[0]) != len(site.result_shapes()[0]):
        return unknown_results(site, relations, "shape")
    return elementwise(site, relations)


MOVABLE = (Same, Split, Total, Extreme)
"""The relations that hold for moved entries as well."""

# pvary is for shard_map only; all pieces run on one platform
_ENTRY_BY_ENTRY = (ARITHMETIC | SPECIAL | IDENTITIES | {"platform_index"}) - {"pvary"}

_ROWS: list[tuple[Rule, str]] = [
    (Rule(_bitcast), "bitcast_convert_type"),
    (Rule(moves.reshape, words("new_sizes"), accepts=MOVABLE), "reshape"),
    (Rule(moves.broadcast, words("shape"), accepts=MOVABLE), "broadcast_in_dim"),
    (Rule(moves.transpose, accepts=MOVABLE), "transpose"),
    (Rule(moves.squeeze, accepts=MOVABLE), "squeeze"),
    (Rule(moves.expand_dims, accepts=MOVABLE), "expand_dims"),
    (Rule(moves.slice_entries, words("start_indices limit_indices strides"), accepts=(*MOVABLE, Columns)), "slice"),
    (Rule(moves.rev, accepts=MOVABLE), "rev"),
    (Rule(moves.tile, words("reps"), accepts=MOVABLE), "tile"),
    (Rule(moves.pad, raw=True), "pad"),
    (Rule(moves.concatenate, raw=True), "concatenate"),
    (Rule(moves.split, words("sizes"), accepts=MOVABLE), "split"),
    (Rule(moves.stack, raw=True), "stack"),
    (Rule(moves.unstack, accepts=MOVABLE), "unstack"),
    (Rule(reductions.reduce_sum), "reduce_sum"),
    (Rule(reductions.reduce_extreme, accepts=MOVABLE), "reduce_max reduce_min reduce_or reduce_and"),
    (Rule(reductions.reduce_other), "reduce_prod reduce_xor argmax argmin"),
    (Rule(reductions.rule_along("axis", linear=True)), "cumsum"),
    (Rule(reductions.rule_along("axis")), "cumprod cummax cummin cumlogsumexp top_k"),
    (Rule(reductions.rule_along("dimension")), "sort"),
    (
        Rule(reductions.window),
        "reduce_window_sum reduce_window_max reduce_window_min",
    ),
    (Rule(reductions.dot_general), "dot_general"),
    (Rule(reductions.convolution, words("lhs_shape rhs_shape feature_group_count")), "conv_general_dilated"),
    (Rule(_identities), "fft"),  # its lengths are parameters, so no transformed dim has rows
    (Rule(reductions.batched), "cholesky eig eigh lu lu_pivots_to_permutation qr svd"),
    (Rule(reductions.triangular_solve), "triangular_solve"),
    (Rule(lookups.gather, words("slice_sizes"), raw=True), "gather"),
    (
        Rule(lookups.scatter, words("update_jaxpr"), raw=True),
        "scatter scatter-add",
    ),
    (Rule(lookups.dynamic_slice, words("slice_sizes"), raw=True), "dynamic_slice dynamic_update_slice"),
    (Rule(draws.draw, words("shape"), draws=True), "random_bits random_split"),
    (Rule(draws.change_key), "random_wrap random_unwrap random_seed"),
    (Rule(draws.fold_in, raw=True, draws=True), "random_fold_in"),
    (Rule(_iota, words("shape")), "iota"),
    (Rule(_identities, raw=True), "optimization_barrier device_put"),
    (Rule(_no_results, words("callback effect"), raw=True), "debug_callback debug_print"),
]  # fmt: skip
TABLE: dict[str, Rule] = {
    **dict.fromkeys(_ENTRY_BY_ENTRY, Rule(elementwise, raw=True)),
    **{name: rule for rule, names in _ROWS for name in names.split()},
}
