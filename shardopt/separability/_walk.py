"""The proof: one walk over the whole trace and the piece trace, equation by equation."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from shardopt.separability import _derivatives as derivatives
from shardopt.separability import _draws as draws
from shardopt.separability import _loops as loops
from shardopt.separability._elementwise import (
    first_unknown,
    resolve_numbers,
    unify,
    unknown_results,
)
from shardopt.separability._moves import as_split
from shardopt.separability._numbers import as_numbers
from shardopt.separability._proof import DifferentTracesError, ProofSettings
from shardopt.separability._relations import (
    EquationPair,
    Extreme,
    Known,
    Relation,
    Same,
    Shapes,
    Split,
    Total,
    Unrelated,
    differing_dims,
    growth,
    is_drawn,
    is_exactly_same,
    is_unscaled,
    sizes_of_dim,
)
from shardopt.separability._single_rows import batched_product, omitted_broadcast
from shardopt.separability._table import apply_rule, checked, equal_params, fixed_params
from shardopt.trace._jaxprs import (
    COLLECTIVES,
    CUSTOM,
    SUMS,
    constants_of,
    equations,
    open_jaxpr,
    shape_of,
)
from shardopt.trace._marks import ATTENTION, POSITIONS, ROW_MAXIMUM, Kind, has_mark
from shardopt.trace._parts import abstract_value
from shardopt.trace._primitives import library_name


def relate_jaxprs(
    proof: ProofSettings, whole_jaxpr: Any, piece_jaxpr: Any, relations: Sequence[Relation]
) -> list[Relation]:
    """Return the relations of the results of two traces of one function.

    Args:
      proof: the settings of the proof.
      whole_jaxpr: the trace on the whole batch.
      piece_jaxpr: the trace on a piece.
      relations: the relations of the arguments.

    Raises:
      DifferentTracesError: if the traces do not have the same equations.
    """
    jaxprs = open_jaxpr(whole_jaxpr), open_jaxpr(piece_jaxpr)
    relation_of: dict[Any, Relation] = dict(zip(jaxprs[0].invars, relations, strict=True))
    consts = constants_of(whole_jaxpr), constants_of(piece_jaxpr)
    counts = [(len(x.invars), len(x.constvars), len(x.outvars)) for x in jaxprs]
    if counts[0] != counts[1]:
        raise DifferentTracesError(None)
    for var, *values in zip(jaxprs[0].constvars, *consts, strict=True):
        relation_of[var] = _relation_of_constants(*values)

    def read(whole_atom: Any, piece_atom: Any) -> Relation:
        if isinstance(whole_atom, Literal) != isinstance(piece_atom, Literal):
            raise DifferentTracesError(None)
        if isinstance(whole_atom, Literal):
            return _relation_of_constants(whole_atom.val, piece_atom.val)
        return (
            relation_of[whole_atom]
            if piece_var_of[whole_atom] is piece_atom
            else Unrelated("traces")
        )

    piece_var_of: dict[Any, Any] = dict(zip((*jaxprs[0].invars, *jaxprs[0].constvars), (*jaxprs[1].invars, *jaxprs[1].constvars), strict=True))  # fmt: skip
    for eqns in _matching_equations(jaxprs[0].eqns, jaxprs[1].eqns, piece_var_of):
        site = EquationPair(*eqns, proof.num_pieces, proof.callers)
        operands = [read(*atoms) for atoms in zip(eqns[0].invars, eqns[1].invars, strict=True)]
        results = [
            site.unknown("count") if _is_empty(site.result_shapes(i)) else result
            for i, result in enumerate(_relate_equation(proof, site, operands))
        ]
        relation_of.update(zip(eqns[0].outvars, results, strict=True))
        piece_var_of.update(zip(eqns[0].outvars, eqns[1].outvars, strict=True))
    return [read(*atoms) for atoms in zip(jaxprs[0].outvars, jaxprs[1].outvars, strict=True)]


def _matching_equations(
    whole_eqns: Sequence[JaxprEqn], piece_eqns: Sequence[JaxprEqn], piece_var_of: Mapping[Any, Any]
) -> Iterator[tuple[JaxprEqn, JaxprEqn]]:
    """Yield each equation of the whole trace with the same equation of the piece trace.

    Args:
      whole_eqns: the equations of the whole trace.
      piece_eqns: the equations of the piece trace.
      piece_var_of: the variable of the piece trace for each that the equations before have made.

    Raises:
      DifferentTracesError: at the first equation without a partner.
    """
    position = 0
    for whole_eqn in whole_eqns:
        next_eqns = piece_eqns[position : position + 1]
        broadcast = omitted_broadcast(whole_eqn, next_eqns, piece_var_of)
        if broadcast is not None:
            yield whole_eqn, broadcast
        elif position < len(piece_eqns) and _same_kind(whole_eqn, piece_eqns[position]):
            yield whole_eqn, piece_eqns[position]
            position += 1
        elif (
            product := batched_product(whole_eqn, piece_eqns[position : position + 4])
        ) is not None:
            yield whole_eqn, product
            position += 4
        else:
            raise DifferentTracesError(whole_eqn)
    if position < len(piece_eqns):
        raise DifferentTracesError(piece_eqns[position])


def _same_kind(whole_eqn: JaxprEqn, piece_eqn: JaxprEqn) -> bool:
    """Return whether two equations have one primitive, and operands and results of the same dtypes
    and ranks. Both call a marked function, or none.
    """

    def kind(eqn: JaxprEqn) -> tuple[Any, ...]:
        types = [
            (getattr(var.aval, "dtype", None), len(shape_of(var)))
            for var in (*eqn.invars, *eqn.outvars)
        ]
        name = eqn.params.get("name")
        mark = name if isinstance(name, Kind) else None
        return eqn.primitive, mark, len(eqn.invars), len(eqn.outvars), types

    return kind(whole_eqn) == kind(piece_eqn)


def _is_empty(shapes: Shapes) -> bool:
    """Return whether a value has entries only in the whole trace, or only in the piece trace."""
    return any(0 in sizes_of_dim(shapes, dim) for dim in differing_dims(shapes))


def _relation_of_constants(whole_value: Any, piece_value: Any) -> Relation:
    """Return the relation of a literal or constant of both traces: `Same` for one array in both,
    else its numbers.
    """
    shapes = np.shape(whole_value), np.shape(piece_value)
    if whole_value is piece_value and shapes[0] != ():
        return Same()
    whole_numbers, piece_numbers = map(as_numbers, (whole_value, piece_value))
    if whole_numbers is None or piece_numbers is None:
        return Same() if whole_value is piece_value else Unrelated("traces")
    known = Known(whole_numbers, piece_numbers)
    return Same() if shapes[0] == shapes[1] != () and known.same_numbers else known


def _relate_equation(
    proof: ProofSettings, site: EquationPair, relations: list[Relation]
) -> Sequence[Relation]:
    if site.name == "scan":
        return loops.scan(proof, site, relations)
    if site.name == "while":
        return loops.while_loop(proof, site, relations)
    if site.name == "cond":
        return loops.cond(proof, site, relations)
    if site.name in COLLECTIVES:
        return _collective(proof, site, relations)
    if site.name == "custom_linear_solve":
        return _linear_solve(proof, site, relations)
    if site.name in CUSTOM:
        return _custom(proof, site, relations)
    if site.name in loops.CALLS:
        return _call(proof, site, relations)
    return draws.follow_keys(proof, site, relations, apply_rule(site, relations))


def _call(proof: ProofSettings, site: EquationPair, relations: list[Relation]) -> list[Relation]:
    """Follow the function that an equation calls. A few functions have rules of their own."""
    if proof.positions and has_mark(site.whole_eqn, POSITIONS):
        grows = growth(site.result_shapes(), [0]) == site.num_pieces
        return [Split(0) if grows else site.unknown("position")]
    for kind, rule in ((ATTENTION, _attention), (ROW_MAXIMUM, _row_maximum)):
        if proof.positions and has_mark(site.whole_eqn, kind):
            unknown = first_unknown(relations)
            # a derivative has several results, and devices that wait for others must all come here
            if site.num_results > 1 or proof.alone or not _calls_one_function(site):
                unknown = unknown or site.unknown("count")
            return [unknown or rule(site, resolve_numbers(site, relations))] * site.num_results
    try:
        return proof.relate(site, *site.both_params("jaxpr"), relations)
    except DifferentTracesError:
        axis = _looked_up_axis(site)
        if axis is None:
            return unknown_results(site, relations, "traces")
        results = [_take_along_axis(site, relations, axis)]
        return list(draws.follow_keys(proof, site, relations, results))


def _looked_up_axis(site: EquationPair) -> int | None:
    """Return the axis of the `jnp.take_along_axis` that both equations call.

    None if they call anything else: jax must trace this function to the same equations.
    """
    eqns = site.whole_eqn, site.piece_eqn
    ndim = len(site.operand_shapes()[0])
    for axis, mode in itertools.product(range(ndim), ("fill", "clip", "promise_in_bounds")):
        look_up = functools.partial(jnp.take_along_axis, axis=axis, mode=mode)
        if all(_calls(eqn, look_up) for eqn in eqns):
            return axis
    return None


def _calls(eqn: JaxprEqn, function: Callable[..., jax.Array]) -> bool:
    """Return whether an equation calls what jax traces a jitted function to."""
    try:
        calls = jax.make_jaxpr(function)(*map(abstract_value, eqn.invars)).eqns
    except (TypeError, ValueError):  # it takes other operands
        return False
    if [str(call.params.get("jaxpr")) for call in calls] != [str(eqn.params["jaxpr"])]:
        return False
    # a primitive of the user may have the name of one of jax
    return all(library_name(called.primitive) for called in equations(eqn.params["jaxpr"]))


def _take_along_axis(site: EquationPair, relations: Sequence[Relation], axis: int) -> Relation:
    """Return the relation of the result of `jnp.take_along_axis`, which jax writes in another way
    for dims of size 1.

    The result has the dims of the operands, and dims of size 1 are broadcast. So an index looks up
    an entry at its own place along all dims but one.
    """
    operands = resolve_numbers(site, relations)
    unknown = first_unknown(operands)
    if unknown:
        return unknown
    if axis in differing_dims(site.operand_shapes(0)) or not all(map(is_unscaled, operands)):
        return site.unknown("mixes")
    for i, relation in enumerate(operands):
        if isinstance(relation, Split):
            sizes = [
                shape[relation.dim] for shape in (*site.operand_shapes(i), *site.result_shapes())
            ]
            if sizes[:2] != sizes[2:]:
                return site.unknown("position")
    return unify(site, operands)


def _calls_one_function(site: EquationPair) -> bool:
    """Return whether the functions that both traces call differ in sizes only.

    A scale or a window of attention is a number or a parameter in its function.
    """
    operations = [
        [
            (
                eqn.primitive,
                fixed_params(eqn),
                [x.val for x in eqn.invars if isinstance(x, Literal)],
            )
            for eqn in equations(jaxpr)
        ]
        for jaxpr in site.both_params("jaxpr")
    ]
    return equal_params(*operations)


def _row_maximum(site: EquationPair, relations: Sequence[Relation]) -> Relation:
    """Return the relation of the largest absolute numbers over positions.

    Devices along context take their maximum.
    """
    (operand,) = relations
    if is_drawn(operand):  # devices draw other numbers, and all would see their maximum
        return site.unknown("drawn")
    if isinstance(operand, Same | Split) and not differing_dims(site.result_shapes()):
        return Same(operand.ratio)
    return site.unknown("mixes")


def _attention(site: EquationPair, relations: Sequence[Relation]) -> Relation:
    """Return the relation of the result of `so.nn.attention`.

    The operands are query, key and value [B, T, H, D], and position numbers [B, T] or [T]. The
    attention combines the positions of all devices along context, so its result for a position is
    the same as on one device. `vmap` adds a dim, and may move the others.
    """
    for i, relation in enumerate(relations):
        ndim = len(site.operand_shapes(i)[0])
        fits = relation == Split(min(1, ndim - 1))
        if i < 3:  # query, key and value
            fits &= ndim == 4
        else:
            fits |= relation == Same()
        if not fits:
            return site.unknown("shape")
    if differing_dims(site.result_shapes()) != (1,):
        return site.unknown("shape")
    return Split(1)


# --- derivative rules -----------------------------------------------------------------------------


def _custom(proof: ProofSettings, site: EquationPair, relations: list[Relation]) -> list[Relation]:
    """Follow a function with a custom derivative rule.

    Follow the rule too if the loss is differentiated.
    """
    results = proof.relate(site, *site.both_params("call_jaxpr"), relations)
    eqn = site.whole_eqn
    differentiable = derivatives.floating(eqn.invars) and derivatives.floating(eqn.outvars)
    if not (proof.training and differentiable) or all(
        isinstance(relation, Known) for relation in relations
    ):
        return results
    follow = derivatives.follow_jvp if site.name == "custom_jvp_call" else derivatives.follow_vjp
    if any(site.both_params("symbolic_zeros")):
        return unknown_results(site, results, "symbolic")
    return follow(proof, site, relations, results)


def _linear_solve(
    proof: ProofSettings, site: EquationPair, relations: list[Relation]
) -> list[Relation]:
    """Follow `custom_linear_solve`: first its solver, then its other functions on the solution.

    The derivative needs these other functions. A product must give the relation of the solution
    again, and the relation of the right side: jax does not check the result of the solver. The
    transposed solver maps cotangents, and an iteration that stops early is not linear.
    """
    consts = {}
    start = 0
    for name, count in site.params["const_lengths"]._asdict().items():
        consts[name] = relations[start : start + count]
        start += count
    right_sides = relations[start:]

    def follow(name: str, operands: Sequence[Relation]) -> list[Relation]:
        jaxprs = [getattr(functions, name) for functions in site.both_params("jaxprs")]
        if None in jaxprs:
            return list(operands)
        return proof.relate(site, jaxprs[0], jaxprs[1], [*consts[name], *operands])

    solution = follow("solve", right_sides)
    # rows of a product may stand for equal rows of a right side
    sides = [
        as_split(site, side, start + i)
        for i, side in enumerate(resolve_numbers(site, relations)[start:])
    ]
    for name in ("matvec", "vecmat"):
        products = follow(name, solution)
        solves = all(derivatives.implies(site, *pair) for pair in zip(products, sides, strict=True))
        # tangents have the relation of products, where a right side may be known numbers
        if not solves or not products == solution == follow("solve", products):
            return unknown_results(site, products)

    # Jax transposes the tangents of products. It also transposes the tangents of a jvp rule, so this
    # does not depend on `proof.training`.
    def cotangents(values: list[Relation]) -> list[Relation]:
        return [
            derivatives.derivative_relation(site, value, site.result_shapes(i))
            for i, value in enumerate(values)
        ]

    results = follow("transpose_solve", cotangents(solution))
    if not all(
        derivatives.implies(site, *pair) for pair in zip(results, cotangents(sides), strict=True)
    ):
        return unknown_results(site, results, "backward")
    return solution


# --- collectives ----------------------------------------------------------------------------------


def _collective(
    proof: ProofSettings, site: EquationPair, relations: list[Relation]
) -> list[Relation]:
    """Follow a collective that the loss calls.

    Over the axes of the pieces, which have size 1 in the whole trace, a collective combines all
    pieces:

    - A sum over devices gives every piece the sum of all P_i, which is W / c.
    - A gather gives every piece the rows of the whole batch, if it names the axes in the order of
      the pieces.

    Over other axes the collective does the same for every piece.
    """
    grouped = site.params.get("axis_index_groups") is not None
    equal = equal_params(*map(fixed_params, (site.whole_eqn, site.piece_eqn)))
    if proof.alone or grouped or not equal or first_unknown(relations):
        return unknown_results(site, relations, "primitive")
    axes = tuple(site.params.get("axes", site.params.get("axis_name", ())))
    relations = resolve_numbers(site, relations)
    if proof.other_axes.issuperset(axes) and (site.name in SUMS or site.name == "ppermute"):
        return [
            relation if isinstance(relation, Same | Split | Total) else site.unknown("mixes")
            for relation in relations
        ]
    if set(axes) != set(proof.row_axes) or not axes:
        return unknown_results(site, relations, "primitive")
    if site.name == "all_gather" and axes != proof.row_axes:
        return [site.unknown("position")]
    return [
        checked(site, i, _collective_over_pieces(site, relation, i))
        for i, relation in enumerate(relations)
    ] or [site.unknown("position")]


def _collective_over_pieces(site: EquationPair, relation: Relation, i: int) -> Relation:
    if is_drawn(relation):  # each piece would see the draws of all pieces
        return site.unknown("drawn")
    if site.name in SUMS and isinstance(relation, Total):
        return Same(relation.ratio)
    if site.name in SUMS and isinstance(relation, Same):
        return Same(relation.ratio / site.num_pieces)
    if site.name in ("pmax", "pmin") and (
        is_exactly_same(relation)
        or (isinstance(relation, Extreme) and site.name[1:] == relation.kind)
    ):
        return Same()
    if site.name == "all_gather" and isinstance(relation, Split) and site.params["tiled"]:
        whole_shape, piece_shape = site.result_shapes(i)
        if whole_shape == piece_shape and relation.place == (
            site.params["all_gather_dimension"],
            1,
        ):
            return Same(relation.ratio)
    return site.unknown("mixes")
