"""`find_nan`: name the operation, line, leaf, row and device of the first value of a step that is
not finite.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.config._layout import make_layout
from shardopt.core import PyTree, TrainState, abstract, calling, leaves_with_paths
from shardopt.core._tracebacks import api_boundary
from shardopt.diagnose._finding import MOST_ROWS, QUOTIENT, NonFinite, finding_of
from shardopt.diagnose._origin import first_origin, quick_compilation
from shardopt.diagnose._piece_loss import PieceLoss
from shardopt.diagnose._pieces import (
    WHOLE,
    Piece,
    checked_batch,
    cuts_of,
    pieces_of,
    values_on_host,
)
from shardopt.losses._batch_dims import row_counts
from shardopt.losses._metrics import added, value_of
from shardopt.mesh import without_mesh
from shardopt.step._optimizer import ShardedOptimizer


@api_boundary
@calling("find_nan")
def find_nan(opt: ShardedOptimizer, state: TrainState, batch: PyTree) -> NonFinite | None:
    """Find the first operation of a step with a NaN or infinite result, and the leaf, row and
    device that it belongs to.

    Args:
      opt: a synchronous strategy; for `local_sgd` and `diloco`, the strategy inside.
      state: the train state before the bad step. It is not donated.
      batch: the global batch of this step.

    Returns:
      The finding; None if the loss, the values of `so.losses.Updated` and all gradients are finite. Then
      the optimizer made the value.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`.
      ValueError: if each replica of the strategy trains by itself, the batch does not fit, or a
        loss with a random key reads the rows of other devices.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> def loss_fn(params, batch):
      ...     return jnp.mean(jnp.log(batch @ params["w"]))
      >>> opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), loss_fn)
      >>> batch = np.ones((16, 8), np.float32)
      >>> batch[5] = -1
      >>> found = so.find_nan(opt, opt.init({"w": jnp.ones(8)}), batch)
      >>> found.kind, found.direction, found.operation, found.leaf, found.rows, len(found.devices)
      ('NaN', 'forward', 'log', 'w', (5,), 1)

    The loss runs on one device: for the rows of each device and micro-batch, with the key of the
    step. In the global view it runs for the whole batch. Then its gradient does. The first bad
    piece runs operation by operation. Loops and calls are opened where they give such a value, so
    the search names a single operation, with the turns of the loops around it. An infinity that
    does not reach the loss or a gradient is no finding, such as the -inf of a mask. Then bad pieces
    are filled with copies of some of their rows, to find the rows that suffice.

    Aux metrics are not searched: to find the cause of one, search with a loss that returns it.

    On a context axis all positions get the key of the first device. A loss that reads the rows of
    other devices, by `so.losses.batch_mean` or `jax.lax.pmean`, runs for the whole batch. With a random
    key it is refused: search in the global view.

    **Memory**: parameters, gradients and the activations of a piece, on the first device of each
    process. If no piece is bad, the whole batch runs at once too.

    **jax_debug_nans**: with `jax.config.update("jax_debug_nans", True)`, `opt.step` and
    `opt.evaluate` raise a FloatingPointError in the per-device view too, if a result of the program
    is NaN. The traceback ends at the line of the loss. It names no operation, row or device, and
    infinities pass. `find_nan` turns it off while it searches.
    """
    batch = checked_batch("find_nan", opt, state, batch)
    config = opt.config
    layout = make_layout(config, abstract(state.params))
    cuts = cuts_of(config, layout, batch)
    pieces = list(pieces_of(config, state, batch, cuts))
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        without_mesh(),
        jax.default_device(jax.local_devices()[0]),
    ):
        params, whole_batch = jax.tree.map(values_on_host, (state.params, batch))
        return search(PieceLoss(config, layout, cuts.hide_rows, params, whole_batch), pieces)


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
        bad_pieces = [piece for piece, flags in flags_by_piece if flags.any()]
        if bad_pieces:
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
