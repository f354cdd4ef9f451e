"""The proof: one walk over the trace of the whole batch and that of a piece, equation by equation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from shardopt.core.jaxprs import CHECKPOINTS
from shardopt.separability import derivatives, loops
from shardopt.separability.elementwise import first_unknown, related, unify
from shardopt.separability.numbers import as_numbers
from shardopt.separability.relations import Extreme, Known, Same, Site, Split, Total, Unknown, Value, differing
from shardopt.separability.scope import DifferentTracesError, Scope, opened
from shardopt.separability.single_rows import batched_product
from shardopt.separability.table import equal_params, results_of

POSITIONS, ATTENTION = "shardopt_positions", "shardopt_attention"
"""Names of jitted functions that know where in a sequence the positions of a piece are, and mix them as on one device."""

CALLS = frozenset(["pjit", "jit", "closed_call", "core_call", "remat", "named_call", "custom_lin", *CHECKPOINTS])
CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])


def prove(
    whole: Any,
    piece: Any,
    values: Sequence[Value],
    *,
    pieces: int,
    row_axes: frozenset[str] = frozenset(),
    other_axes: frozenset[str] = frozenset(),
    positions: bool = False,
    training: bool = False,
) -> list[Value]:
    """Return the relations of the results of a loss, traced on the whole batch and on one of n pieces of it.

    Args:
      whole: the jaxpr on the whole batch.
      piece: the jaxpr on a piece.
      values: the relations of the arguments.
      pieces: n; the other arguments are described in `Scope`.
      row_axes: mesh axes along which the pieces are.
      other_axes: mesh axes along which each piece is cut alike.
      positions: whether the pieces are pieces of sequences.
      training: whether the loss is differentiated.

    Raises:
      DifferentTracesError: if the traces are not the same equations.
    """
    return relate(Scope(relate, pieces, row_axes, other_axes, positions, training), whole, piece, values)


def relate(scope: Scope, whole: Any, piece: Any, values: Sequence[Value]) -> list[Value]:
    """Return the relations of the results of two traces of one function.

    Args:
      scope: what holds in the whole proof.
      whole: the jaxpr on the whole batch.
      piece: the jaxpr on a piece.
      values: the relations of the arguments.

    Raises:
      DifferentTracesError: if the traces are not the same equations.
    """
    jaxprs = opened(whole), opened(piece)
    known: dict[Any, Value] = dict(zip(jaxprs[0].invars, values, strict=True))
    consts = _consts(whole), _consts(piece)
    if len(consts[0]) != len(consts[1]):
        raise DifferentTracesError(None)
    for var, *pair in zip(jaxprs[0].constvars, *consts, strict=True):
        known[var] = _closed_over(*pair)

    def read(whole_atom: Any, piece_atom: Any) -> Value:
        if isinstance(whole_atom, Literal) != isinstance(piece_atom, Literal):
            raise DifferentTracesError(None)
        if isinstance(whole_atom, Literal):
            return _closed_over(whole_atom.val, piece_atom.val)
        return known[whole_atom] if twin[whole_atom] is piece_atom else Unknown("traces")

    twin: dict[Any, Any] = dict(zip((*jaxprs[0].invars, *jaxprs[0].constvars), (*jaxprs[1].invars, *jaxprs[1].constvars), strict=True))  # fmt: skip
    for eqns in _pairs(jaxprs[0].eqns, jaxprs[1].eqns):
        site = Site(*eqns, scope.pieces, scope.callers)
        operands = [read(*atoms) for atoms in zip(eqns[0].invars, eqns[1].invars, strict=True)]
        results = _results(scope, site, operands)
        known.update(zip(eqns[0].outvars, results, strict=True))
        twin.update(zip(eqns[0].outvars, eqns[1].outvars, strict=True))
    return [read(*atoms) for atoms in zip(jaxprs[0].outvars, jaxprs[1].outvars, strict=True)]


def _pairs(whole: Sequence[JaxprEqn], piece: Sequence[JaxprEqn]) -> Iterator[tuple[JaxprEqn, JaxprEqn]]:
    """Yield equations that belong together.

    Raises:
      DifferentTracesError: at the first that do not.
    """
    at = 0
    for eqn in whole:
        if at < len(piece) and _alike(eqn, piece[at]):
            yield eqn, piece[at]
            at += 1
        elif (product := batched_product(eqn, piece[at : at + 4])) is not None:
            yield eqn, product
            at += 4
        else:
            raise DifferentTracesError(eqn)
    if at < len(piece):
        raise DifferentTracesError(piece[at])


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if hasattr(jaxpr, "consts") else ()


def _alike(whole: JaxprEqn, piece: JaxprEqn) -> bool:
    def kind(eqn: JaxprEqn) -> tuple[Any, ...]:
        types = [
            (getattr(var.aval, "dtype", None), len(getattr(var.aval, "shape", ())))
            for var in (*eqn.invars, *eqn.outvars)
        ]
        return eqn.primitive.name, len(eqn.invars), len(eqn.outvars), types

    return kind(whole) == kind(piece)


def _closed_over(whole: Any, piece: Any) -> Value:
    """Return the relation of constants of the traces: of one array, or of the numbers of two."""
    shapes = np.shape(whole), np.shape(piece)
    if whole is piece and shapes[0] != ():
        return Same()
    if (
        all(isinstance(one, np.ndarray) for one in (whole, piece))
        and shapes[0] == shapes[1] != ()
        and np.array_equal(whole, piece)
    ):
        return Same()
    local = all(not isinstance(one, jax.Array) or one.is_fully_addressable for one in (whole, piece))
    numbers = [as_numbers(one) for one in (whole, piece)] if local else [None]
    if any(one is None for one in numbers):
        return Same() if whole is piece else Unknown("traces")
    known = Known(*numbers)  # pyright: ignore[reportArgumentType]
    return Same() if shapes[0] == shapes[1] != () and known.equal else known


def _results(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    if site.name == "scan":
        return loops.scan(scope, site, values)
    if site.name == "while":
        return loops.while_loop(scope, site, values)
    if site.name == "cond":
        return loops.cond(scope, site, values)
    if site.name in COLLECTIVES:
        return _collective(scope, site, values)
    if site.name == "custom_linear_solve":
        return _linear_solve(scope, site, values)
    if site.name in CUSTOM:
        return _custom(scope, site, values)
    if site.name in CALLS:
        return _call(scope, site, values)
    return results_of(site, values)


def _called(site: Site) -> str | None:
    """Return the parameter that holds what an equation calls."""
    return next((key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in site.params), None)


def _call(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow what is called; a few functions are known by their names."""
    name = site.params.get("name")
    if scope.positions and name == POSITIONS:
        return [Split(0)]
    if scope.positions and name == ATTENTION:
        return [_attention(site, values)]
    key = _called(site)
    if key is None or len(opened(site.params[key]).invars) != len(values):
        return [first_unknown(values) or site.unknown("primitive")] * site.num_results
    try:
        return scope.relate(site, *site.params_of(key), values)
    except DifferentTracesError:
        if name == "take_along_axis" and _written_by_jax(site):
            return [_along_axis(site, values)]
        return [first_unknown(values) or site.unknown("traces")] * site.num_results


def _written_by_jax(site: Site) -> bool:
    """Return whether all that is called stands in jax's own numpy, rather than in a function of the user's of the same name."""
    folder = str(Path(jax.__file__).parent / "_src" / "numpy")
    for jaxpr in site.params_of("jaxpr"):
        for eqn in opened(jaxpr).eqns:
            traceback = eqn.source_info.traceback
            files = [frame.file_name for frame in traceback.frames] if traceback is not None else [""]
            if not any(name.startswith(folder) for name in files[:12]):
                return False
    return True


def _along_axis(site: Site, values: Sequence[Value]) -> Value:
    """Return what `jnp.take_along_axis` gives, which is written in another way for dims of size 1.

    Dims lie where they were, and one of size 1 is repeated. So along all but the axis each index looks up at its own place.
    """
    gathers = [
        [eqn for eqn in opened(jaxpr).eqns if eqn.primitive.name == "gather"] for jaxpr in site.params_of("jaxpr")
    ]
    if any(len(one) != 1 for one in gathers):
        return site.unknown("traces")
    (whole,), (piece,) = gathers
    axes = [eqn.params["dimension_numbers"].start_index_map for eqn in (whole, piece)]
    same = all(equal_params(whole.params[name], piece.params[name]) for name in ("mode", "fill_value"))
    operands = related(site, values)
    if axes[0] != axes[1] or len(axes[0]) != 1 or not same or first_unknown(operands):
        return first_unknown(operands) or site.unknown("traces")
    (axis,) = axes[0]
    if axis in differing(site.operand(0)) or not all(
        isinstance(one, Same | Split) and one.ratio == 1.0 for one in operands
    ):
        return site.unknown("mixes")
    for i, value in enumerate(operands):
        if isinstance(value, Split):
            sizes = [shape[value.dim] for shape in (*site.operand(i), *site.result())]
            if sizes[:2] != sizes[2:]:
                return site.unknown("position")
    return unify(site, operands)


def _attention(site: Site, values: Sequence[Value]) -> Value:
    """Return what `so.nn.attention` gives of query, key, value [B, T, ...] and numbers of positions [B, T] or [T].

    It speaks to all devices along context, so a position's result is that of one device.
    """
    if unknown := first_unknown(values):
        return unknown
    for i, value in enumerate(related(site, values)):
        positions = min(1, len(site.operand(i)[0]) - 1)
        if value != Split(positions) and not (i > 2 and value == Same()):
            return site.unknown("shape")
    return Split(1)


# --- derivative rules -------------------------------------------------------------------------------------------------


def _custom(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow a function that has a derivative rule of its own: the function, and where the loss is differentiated the rule."""
    key = _called(site)
    if key is None:
        return [first_unknown(values) or site.unknown("primitive")] * site.num_results
    results = scope.relate(site, *site.params_of(key), values)
    if not scope.training or all(isinstance(value, Known) for value in values):
        return results
    if site.name == "custom_jvp_call":
        return derivatives.follow_jvp(scope, site, values, results)
    return derivatives.follow_vjp(scope, site, values, results)


def _linear_solve(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow all functions of a linear solver on what is solved for: then so do those that the derivative needs."""
    lengths = site.params["const_lengths"]
    functions = {name: [getattr(one, name) for one in site.params_of("jaxprs")] for name in lengths._fields}
    start, consts = 0, {}
    for name in lengths._fields:
        consts[name] = values[start : start + getattr(lengths, name)]
        start += getattr(lengths, name)
    right = values[start:]
    solution = scope.relate(site, functions["solve"][0], functions["solve"][1], [*consts["solve"], *right])
    for name, pair in functions.items():
        if name == "solve" or pair[0] is None:
            continue
        results = scope.relate(site, pair[0], pair[1], [*consts[name], *solution])
        if any(result != one for result, one in zip(results, solution, strict=False)):
            return [first_unknown(results) or site.unknown("mixes")] * site.num_results
    return solution


# --- collectives ------------------------------------------------------------------------------------------------------

COLLECTIVES = frozenset(
    [
        *(
            "psum",
            "psum2",
            "psum_invariant",
            "pmax",
            "pmin",
            "all_gather",
            "all_gather_invariant",
            "all_gather_reduced",
        ),
        *("reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "pgather", "unreduced_psum", "axis_index"),
        *("pbroadcast", "ragged_all_to_all"),
    ]
)
SUMS = frozenset(["psum", "psum2", "psum_invariant"])


def _collective(scope: Scope, site: Site, values: list[Value]) -> list[Value]:
    """Follow a collective that the loss itself calls.

    Over the axes of all pieces, in the whole over axes of size 1: a sum over devices gives each piece the sum of all P_i, which
    is W / c; gathered rows are those of the whole batch. Over other axes each piece does the same.
    """
    if unknown := first_unknown(values):
        return [unknown] * site.num_results
    named = site.params.get("axes", site.params.get("axis_name", ()))
    axes = set(named) if isinstance(named, tuple | list | frozenset) else {named}
    values = related(site, values)
    grouped = site.params.get("axis_index_groups") is not None
    if axes <= scope.other_axes and not grouped and (site.name in SUMS or site.name == "ppermute"):
        return [value if isinstance(value, Same | Split | Total) else site.unknown("mixes") for value in values]
    if axes != scope.row_axes or not axes or grouped:
        return [site.unknown("primitive")] * site.num_results
    return [_over_pieces(site, value, i) for i, value in enumerate(values)] or [site.unknown("position")]


def _over_pieces(site: Site, value: Value, i: int) -> Value:
    if site.name in SUMS and isinstance(value, Total):
        return Same(value.ratio)
    if site.name in SUMS and isinstance(value, Same) and not value.drawn:
        return Same(value.ratio / site.pieces)
    if site.name in ("pmax", "pmin") and isinstance(value, Extreme) and site.name[1:] == value.kind:
        return Same()
    if site.name in ("pmax", "pmin") and isinstance(value, Same) and value.ratio == 1.0:
        return Same()
    if site.name == "all_gather" and isinstance(value, Split) and site.params["tiled"]:
        whole, piece = site.result(i)
        if whole == piece and value.place == (site.params["all_gather_dimension"], 1, None):
            return Same(value.ratio)
    return site.unknown("mixes")
