"""The search of `find_nan`: the first bad piece of a step, its first operation, and the rows that
suffice.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core._types import leaves_with_paths
from shardopt.diagnose._finding import MOST_ROWS, QUOTIENT, NonFinite, finding_of
from shardopt.diagnose._origin import first_origin, quick_compilation
from shardopt.diagnose._piece_loss import PieceLoss
from shardopt.diagnose._pieces import WHOLE, Piece
from shardopt.losses._batch_dims import row_counts
from shardopt.losses._metrics import added, value_of

Function = Callable[..., Any]
"""`PieceLoss.loss_of` or `PieceLoss.gradients_of`."""
FlagsOf = Callable[[Piece], np.ndarray]


def search(loss: PieceLoss, pieces: Sequence[Piece]) -> NonFinite | None:
    """Return the finding: in the forward pass of the first bad piece, else in its gradients.

    None if all is finite.
    """
    without_key = pieces[0].key is None
    if without_key and len(pieces) > 1 and loss.reads_other_rows(pieces[0]):
        pieces = [WHOLE]
    for direction, function in (("forward", loss.loss_of), ("backward", loss.gradients_of)):
        flags_of = _flags_of(loss, function)
        flags_by_piece = [(piece, flags_of(piece)) for piece in pieces]
        all_finite = not any(flags.any() for _, flags in flags_by_piece)
        if all_finite and without_key and len(pieces) > 1:
            # The sum over the pieces may overflow, and their weight may be 0.
            flags_by_piece = [(WHOLE, flags_of(WHOLE))]
        if bad_pieces := [piece for piece, flags in flags_by_piece if flags.any()]:
            is_bad = np.any([flags for _, flags in flags_by_piece], axis=0)
            return _in_pieces(loss, direction, function, flags_of, bad_pieces, is_bad)
    return None if without_key else _in_quotient(loss, pieces)


def _flags_of(loss: PieceLoss, function: Function) -> FlagsOf:
    """Return a function of a piece: for each value or gradient, whether it is not finite."""

    def flags(*args):
        return jnp.stack([~jnp.isfinite(x).all() for x in jax.tree.leaves(function(*args))])

    program = jax.jit(flags, compiler_options=quick_compilation())
    return lambda piece: np.asarray(program(loss.leaves, loss.select(piece.rows), piece.key))


def _in_pieces(
    loss: PieceLoss,
    direction: str,
    function: Function,
    flags_of: FlagsOf,
    pieces: Sequence[Piece],
    is_bad: np.ndarray,
) -> NonFinite:
    """Return the finding in the first of some bad pieces, with rows of all of them."""
    gradients: tuple[str, ...] = ()
    if direction == "backward":
        trained = zip(loss.layout.trained, is_bad, strict=True)
        gradients = tuple(plan.path for plan, bad in trained if bad)
    batch = loss.select(pieces[0].rows)
    args = jax.tree.map(jnp.asarray, (loss.leaves, batch, pieces[0].key))
    trace = jax.make_jaxpr(function)(*args)
    origin = first_origin(trace, jax.tree.leaves(args), len(loss.leaves))
    paths = [plan.path for plan in loss.layout.plans]
    paths += [f"batch/{path}".rstrip("/") for path, _ in leaves_with_paths(batch)]
    rows: list[int] = []
    if len(row_counts(loss.config, batch)) == 1:
        for piece in pieces:
            rows += _bad_rows(loss, flags_of, piece, MOST_ROWS - len(rows))
    return finding_of(loss.config, origin, paths, direction, gradients, tuple(rows), loss.num_rows)


def _bad_rows(loss: PieceLoss, flags_of: FlagsOf, piece: Piece, limit: int) -> list[int]:
    """Return up to `limit` rows of a bad piece that are bad alone, in a piece that is filled with
    copies of them.
    """
    rows = np.arange(loss.num_rows) if piece.rows is None else piece.rows

    def is_bad(suspects: np.ndarray) -> bool:
        filled = piece._replace(rows=np.resize(suspects, rows.size))
        return bool(flags_of(filled).any())

    return _smallest_parts(is_bad, rows, limit)


def _smallest_parts(
    is_bad: Callable[[np.ndarray], bool], rows: np.ndarray, limit: int
) -> list[int]:
    """Return up to `limit` rows that are bad alone, by halving; `rows` together are bad."""
    if rows.size == 1:
        return [int(rows[0])][:limit]
    bad_rows: list[int] = []
    for half in np.array_split(rows, 2):
        if len(bad_rows) < limit and is_bad(half):
            bad_rows += _smallest_parts(is_bad, half, limit - len(bad_rows))
    return bad_rows


def _in_quotient(loss: PieceLoss, pieces: Sequence[Piece]) -> NonFinite | None:
    """Return the finding in the division of the totals of all pieces by their weights.

    None if it is finite.
    """
    program = jax.jit(loss.parts_of, compiler_options=quick_compilation())
    losses = [program(loss.leaves, loss.select(piece.rows), piece.key).loss for piece in pieces]
    with np.errstate(all="ignore"):
        value = float(value_of(jax.tree.map(np.asarray, functools.reduce(added, losses))))
    if math.isfinite(value):
        return None
    kind = "NaN" if math.isnan(value) else "infinite"
    return NonFinite(kind, "forward", "div", QUOTIENT, "", (), "", (), (), loss.num_rows, (), 0)
