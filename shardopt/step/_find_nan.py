"""`find_nan`: name the operation, line, leaf, row and device of the first value of a step that is
not finite.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, make_layout
from shardopt.core._block_model import as_block_model, call, run_blocks, takes_rng
from shardopt.core._errors import calling, error_text
from shardopt.core._trace_context import RowContext
from shardopt.core._tracebacks import api_boundary
from shardopt.core._types import PyTree, TrainState, Weighted, abstract, leaves_with_paths
from shardopt.losses._batch_dims import map_rows, num_rows, row_counts
from shardopt.losses._global_view import num_micro_batches
from shardopt.losses._loss import step_key
from shardopt.losses._metrics import added, value_of
from shardopt.losses._parts import LossParts, loss_parts
from shardopt.losses._rows import RowsNotSeenError, with_rows
from shardopt.losses._sums import leaf_wire
from shardopt.losses._view import Views
from shardopt.runtime._processes import gather_to_host
from shardopt.step._batches import as_arrays
from shardopt.step._inputs import check_batch, check_state, place_batch
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy
from shardopt.trace._nonfinite import Origin, first_origin, quick_compilation

_MOST_ROWS = 8
"""The search for rows ends after this many."""

_CANNOT_SEE = (
    "find_nan runs the rows of each device apart, each with the key of its device",
    "search in the global view, as by so.ddp(tx, mesh, loss_fn, view='global')",
)
"""Why a loss with a random key does not see the whole batch, and the remedy."""

_QUOTIENT = "so.Weighted: the total of all rows / their weight"
"""The line of an operation that stands in no file of the user."""


class NonFinite(NamedTuple):
    """The result of `find_nan`; printed, it has one line for each fact.

    Attributes:
      kind: "NaN" or "infinite".
      direction: "forward" or "backward".
      operation: the name of the first operation whose result is not finite; "argument" if the leaf
        itself is not finite; "" if the values are finite operation by operation, and only the
        compiled program has others.
      line: its source line, `file:line (function)`; "" for an argument.
      became_nan: operation and line where an infinity became NaN; "" if `operation` made NaN
        itself.
      turns: (turn, number of turns) of each loop around the operation, the outermost first: the
        number of a block is a turn. The number is 0 for a `while` loop.
      leaf: the key path of the parameter that was read last before the operation, or of the
        argument.
      gradients: key paths of the leaves whose gradients are not finite; in the forward pass none.
      rows: up to eight rows of the batch whose loss or gradient is not finite without the other
        rows; empty if no row alone is.
      num_rows: the number of rows of the batch.
      devices: the devices that hold the first of these rows.
      micro_batch: the micro-batch of this row.
    """

    kind: str
    direction: str
    operation: str
    line: str
    became_nan: str
    turns: tuple[tuple[int, int], ...]
    leaf: str
    gradients: tuple[str, ...]
    rows: tuple[int, ...]
    num_rows: int
    devices: tuple[Any, ...]
    micro_batch: int

    def __str__(self) -> str:
        at = f"{self.operation}, {self.line}" if self.line else self.operation
        all_rows = self.num_rows <= len(self.rows)
        row_text = "every row" if all_rows else ", ".join(map(str, self.rows)) or "no row alone"
        devices = ", ".join(map(str, self.devices[:_MOST_ROWS])) or "all"
        facts = {
            "operation": at or "none: only the compiled program has such values",
            "became NaN in": self.became_nan,
            "loops": ", ".join(
                f"turn {turn}" + f" of {total}" * bool(total) for turn, total in self.turns
            ),
            "leaf": self.leaf,
            "gradients": ", ".join(self.gradients[:_MOST_ROWS]),
            "rows": f"{row_text} (of {self.num_rows})",
            "device": devices + f", micro-batch {self.micro_batch}" * bool(self.rows),
        }
        lines = [f"  {name}: {text}" for name, text in facts.items() if text]
        return "\n".join([f"{self.kind} in the {self.direction} pass", *lines])


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
      The finding; None if the loss, the values of `so.Updated` and all gradients are finite. Then
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
    other devices, by `so.batch_mean` or `jax.lax.pmean`, runs for the whole batch. With a random
    key it is refused: search in the global view.

    **Memory**: parameters, gradients and the activations of a piece, on the first device of each
    process. If no piece is bad, the whole batch runs at once too.

    **jax_debug_nans**: with `jax.config.update("jax_debug_nans", True)`, `opt.step` and
    `opt.evaluate` raise a FloatingPointError in the per-device view too, if a result of the program
    is NaN. The traceback ends at the line of the loss. It names no operation, row or device, and
    infinities pass. `find_nan` turns it off while it searches.
    """
    check_is_strategy(opt)
    config = opt.config
    check_state(config, state)
    batch = as_arrays("find_nan", batch)
    check_batch(config, batch)
    if config.per_replica:
        problem = "replicas of this strategy train apart, each with its own parameters."
        raise ValueError(error_text(problem, fix="search in the strategy that was combined."))
    layout = make_layout(config, abstract(state.params))
    cuts = _cuts(config, layout, batch)
    pieces = list(_pieces(config, state, cuts))
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.set_mesh(None),
        jax.default_device(jax.local_devices()[0]),
    ):
        return _Search(
            config, layout, cuts, jax.tree.map(_values, state.params), jax.tree.map(_values, batch)
        ).run(pieces)


def _values(leaf: PyTree) -> PyTree:
    """Return all values of a leaf on the host; a random key stays an array of keys."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _values(jax.random.key_data(leaf)), impl=str(jax.random.key_impl(leaf))
        )
    return gather_to_host(leaf)


class _Piece(NamedTuple):
    """Rows that the loss gets at once, all as None, and its random key."""

    rows: np.ndarray | None
    key: jax.Array | None


_WHOLE = _Piece(None, None)


class _Cuts(NamedTuple):
    """How a step cuts a batch.

    Attributes:
      per_device: whether each device runs its rows apart.
      rows: int[devices, micro-batches, rows of a piece], the rows of each piece; None if the batch
        is not cut.
    """

    per_device: bool
    rows: np.ndarray | None

    @property
    def hide_rows(self) -> bool:
        """Whether a piece has the rows of one device of several."""
        return self.per_device and self.rows is not None and len(self.rows) > 1


def _cuts(config: StrategyConfig, layout: Layout, batch: PyTree) -> _Cuts:
    shares, count = config.axes.num_row_shares, config.loss.micro_batches
    with warnings.catch_warnings():
        # the step warns of the global view, and of micro-batches that are not cut
        warnings.simplefilter("ignore")
        placed = place_batch(config, batch)
        per_device = Views(config, training=True).of(layout, placed) == "per_device"
        if not per_device:
            count = num_micro_batches(config, layout, placed, training=True)
    cannot_cut = len(row_counts(config, batch)) != 1 or num_rows(config, batch) % (shares * count)
    return _Cuts(
        per_device,
        None if cannot_cut else np.arange(num_rows(config, batch)).reshape(shares, count, -1),
    )


def _pieces(config: StrategyConfig, state: TrainState, cuts: _Cuts) -> Iterator[_Piece]:
    """Yield the pieces of a step: the rows of each device and micro-batch.

    All rows if the loss sees all at once.
    """
    takes_key, rows, per_device = takes_rng(config.loss.loss_fn), cuts.rows, cuts.per_device
    if not takes_key and (rows is None or not per_device):
        yield _WHOLE
        return
    step, rng = _values(state.step), _values(state.rng)
    for d in range(config.axes.num_row_shares if per_device else 1):
        for m in range(1 if rows is None else rows.shape[1]):
            key = (
                step_key(config, step, rng, m, device=d * config.axes.num_position_shares)
                if takes_key
                else None
            )
            yield _Piece(
                None if rows is None else rows[d, m] if per_device else rows[:, m].reshape(-1), key
            )


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search in one step.

    Attributes:
      config: of the strategy.
      layout: of its parameters.
      cuts: how the step cuts the batch.
      params: the parameters, on the host.
      batch: the whole batch, on the host.
    """

    config: StrategyConfig
    layout: Layout
    cuts: _Cuts
    params: PyTree
    batch: PyTree

    def run(self, pieces: Sequence[_Piece]) -> NonFinite | None:
        """Return the finding: in the forward pass of the first bad piece, else in its gradients.

        None if all is finite.
        """
        without_key = pieces[0].key is None
        if without_key and len(pieces) > 1 and self.reads_other_rows(pieces[0]):
            pieces = [_WHOLE]
        for direction, flags in (("forward", self.bad_values), ("backward", self.bad_gradients)):
            program = jax.jit(flags, compiler_options=quick_compilation())
            flags_by_piece = [(piece, self.flags_of(program, piece)) for piece in pieces]
            if (
                not any(flags.any() for _, flags in flags_by_piece)
                and without_key
                and len(pieces) > 1
            ):
                # The sum over the pieces may overflow, and their weight may be 0.
                flags_by_piece = [(_WHOLE, self.flags_of(program, _WHOLE))]
            if bad_pieces := [piece for piece, flags in flags_by_piece if flags.any()]:
                is_bad = np.any([flags for _, flags in flags_by_piece], axis=0)
                return self.in_pieces(direction, program, bad_pieces, is_bad)
        return None if without_key else self.of_quotient(pieces)

    def reads_other_rows(self, piece: _Piece) -> bool:
        """Return whether the loss of a piece reads the rows of other devices."""
        try:
            jax.eval_shape(self.loss_of, self.leaves, self.select(piece.rows), piece.key)
        except RowsNotSeenError:
            return True
        return False

    def of_quotient(self, pieces: Sequence[_Piece]) -> NonFinite | None:
        """Return the finding in the division of the totals of all pieces by their weights.

        None if it is finite.
        """
        program = jax.jit(self.weighted_loss, compiler_options=quick_compilation())
        losses = [program(self.leaves, self.select(piece.rows), piece.key) for piece in pieces]
        with np.errstate(all="ignore"):
            value = float(value_of(jax.tree.map(np.asarray, functools.reduce(added, losses))))
        if math.isfinite(value):
            return None
        kind = "NaN" if math.isnan(value) else "infinite"
        count = num_rows(self.config, self.batch)
        return NonFinite(kind, "forward", "div", _QUOTIENT, "", (), "", (), (), count, (), 0)

    def flags_of(
        self, program: Callable[..., jax.Array], piece: _Piece, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the flags of a program for a piece, or for a piece of other rows."""
        batch = self.select(piece.rows if rows is None else rows)
        return np.asarray(program(self.leaves, batch, piece.key))

    def in_pieces(
        self,
        direction: str,
        program: Callable[..., jax.Array],
        pieces: Sequence[_Piece],
        is_bad: np.ndarray,
    ) -> NonFinite:
        """Return the finding in the first of some bad pieces, with rows of all of them."""
        gradients: tuple[str, ...] = ()
        if direction == "backward":
            gradients = tuple(
                plan.path for plan, bad in zip(self.layout.trained, is_bad, strict=True) if bad
            )
        batch, function = (
            self.select(pieces[0].rows),
            self.loss_of if direction == "forward" else self.gradients_of,
        )
        args = jax.tree.map(jnp.asarray, (self.leaves, batch, pieces[0].key))
        origin = first_origin(
            jax.make_jaxpr(function)(*args), jax.tree.leaves(args), len(self.leaves)
        )
        paths = [plan.path for plan in self.layout.plans]
        paths += [f"batch/{path}".rstrip("/") for path, _ in leaves_with_paths(batch)]
        bad_rows: list[int] = []
        for piece in pieces if len(row_counts(self.config, batch)) == 1 else ():
            bad_rows += self.bad_rows(program, piece, _MOST_ROWS - len(bad_rows))
        return self.finding(origin, paths, direction, gradients, tuple(bad_rows))

    def bad_rows(self, program: Callable[..., jax.Array], piece: _Piece, limit: int) -> list[int]:
        """Return up to `limit` rows of a bad piece that are bad alone, in a piece that is filled
        with copies of them.
        """
        rows = np.arange(num_rows(self.config, self.batch)) if piece.rows is None else piece.rows

        def is_bad(suspects: np.ndarray) -> bool:
            return bool(self.flags_of(program, piece, np.resize(suspects, rows.size)).any())

        return _smallest_parts(is_bad, rows, limit)

    def finding(
        self,
        origin: Origin | None,
        paths: Sequence[str],
        direction: str,
        gradients: tuple[str, ...],
        rows: tuple[int, ...],
    ) -> NonFinite:
        """Return the finding in words, with the devices of the first row."""
        first = origin if origin is None or origin.cause is None else origin.cause
        became_nan = ""
        if origin is not None and first is not origin and origin.eqn is not None:
            became_nan = f"{origin.eqn.primitive.name}, {_line_of(origin.eqn)}"
        eqn, leaf = (None, None) if first is None else (first.eqn, first.leaf)
        operation = "" if first is None else "constant"
        if eqn is not None:
            operation = eqn.primitive.name
        elif first is not None and first.argument is not None:
            operation, leaf = "argument", first.argument
        count, share = (
            num_rows(self.config, self.batch),
            max(1, num_rows(self.config, self.batch) // self.num_shares),
        )
        return NonFinite(
            kind="NaN" if first is not None and first.is_nan else "infinite",
            direction=direction,
            operation=operation,
            line="" if eqn is None else _line_of(eqn),
            became_nan=became_nan,
            turns=() if first is None else first.turns,
            leaf="" if leaf is None else paths[leaf],
            gradients=gradients,
            rows=rows,
            num_rows=count,
            devices=self.devices_of(rows[0], count) if rows else (),
            micro_batch=rows[0] % share * self.config.loss.micro_batches // share if rows else 0,
        )

    @property
    def leaves(self) -> list[jax.Array]:
        return self.layout.treedef.flatten_up_to(self.params)

    @property
    def num_shares(self) -> int:
        return self.config.axes.num_row_shares

    def devices_of(self, row: int, count: int) -> tuple[Any, ...]:
        """Return the devices that hold a row; all if the devices do not divide the rows."""
        if count % self.num_shares:
            return tuple(self.config.mesh.devices.flat)
        rows = NamedSharding(self.config.mesh, PartitionSpec(self.config.axes.rows))
        bounds = {
            device: index[0].indices(count)
            for device, index in rows.devices_indices_map((count,)).items()
        }
        return tuple(device for device, (start, stop, _) in bounds.items() if start <= row < stop)

    def select(self, rows: np.ndarray | None) -> PyTree:
        """Return the batch with these rows."""
        if rows is None:
            return self.batch
        return map_rows(
            self.config, lambda leaf, dim: leaf[(slice(None),) * dim + (rows,)], self.batch
        )

    def loss_of(
        self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        """Return the loss of some rows, and the new values of frozen leaves."""
        parts = self.parts_of(leaves, batch, key)
        if self.is_whole(batch, key):
            return value_of(parts.loss), parts.updates
        # the weight of a piece may be 0: the step divides by the weight of all pieces
        return jnp.sum(jnp.stack(jax.tree.leaves(parts.loss.total))), parts.updates

    def weighted_loss(
        self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None
    ) -> Weighted:
        """Return the loss of some rows as a total and a weight."""
        return self.parts_of(leaves, batch, key).loss

    def parts_of(self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None) -> LossParts:
        """Return the parts of the loss of some rows."""
        wires = [leaf_wire(self.config.wire, plan) for plan in self.layout.plans]
        leaves = [
            x if wire.gather_dtype is None else x.astype(wire.gather_dtype)
            for x, wire in zip(leaves, wires, strict=True)
        ]
        returned = self.returned(self.layout.treedef.unflatten(leaves), batch, key)
        return loss_parts(self.config.strategy, returned, num_rows(self.config, batch))

    def is_whole(self, batch: PyTree, key: jax.Array | None) -> bool:
        """Return whether these are all rows, for a loss without a random key: no other rows have a
        part in its value.
        """
        return key is None and num_rows(self.config, batch) == num_rows(self.config, self.batch)

    def returned(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
        """Return the result of the loss.

        If it names mesh axes, one device stands for all: each axis has size 1.
        """
        loss_fn = self.config.loss.loss_fn
        hides_rows = self.cuts.hide_rows and not self.is_whole(batch, key)
        if hides_rows:
            axes = self.config.axes
            loss_fn = with_rows(
                RowContext(axes.summed, axes.num_shares, refused=_CANNOT_SEE), loss_fn
            )
        model = as_block_model(loss_fn)

        def run(params: PyTree, batch: PyTree, key: jax.Array | None) -> PyTree:
            return (
                call(loss_fn, key, 0, params, batch)
                if model is None
                else run_blocks(model, params, batch, key)
            )

        try:
            return run(params, batch, key)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            if hides_rows:
                problem, fix = _CANNOT_SEE
                text = error_text(
                    f"the loss names a mesh axis, and {problem}.",
                    fix=f"use so.batch_mean; and {fix}.",
                )
                raise RowsNotSeenError(text) from error
        for axis in self.config.mesh.axis_names:
            run = _with_axis(run, axis)
        return run(params, batch, key)

    def gradients_of(
        self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None
    ) -> list[jax.Array]:
        """Return the gradients of the trained leaves."""

        def loss(trained):
            merged = self.layout.treedef.flatten_up_to(self.layout.merge(leaves, trained))
            return self.loss_of(merged, batch, key)[0]

        return jax.grad(loss)(self.layout.trained_leaves(leaves))

    def bad_values(
        self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None
    ) -> jax.Array:
        """Return for each value of the forward pass whether it is not finite."""
        return _bad(self.loss_of(leaves, batch, key))

    def bad_gradients(
        self, leaves: list[jax.Array], batch: PyTree, key: jax.Array | None
    ) -> jax.Array:
        """Return for each gradient whether it is not finite."""
        return _bad(self.gradients_of(leaves, batch, key))


def _with_axis(run: Callable[..., PyTree], axis: str) -> Callable[..., PyTree]:
    """Return the function with an axis of size 1, which its collectives may name."""
    run_on_axis = jax.vmap(run, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
    return lambda *args: jax.tree.map(lambda x: x[0], run_on_axis(*args))


def _bad(tree: PyTree) -> jax.Array:
    return jnp.stack([~jnp.isfinite(x).all() for x in jax.tree.leaves(tree)])


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


_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))


def _line_of(eqn: JaxprEqn) -> str:
    """Return the user's line that an operation comes from: `file:line (function)`."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        in_models = "/shardopt/models/" in frame.file_name
        if in_models or not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    line = source_info_util.summarize(eqn.source_info)
    return _QUOTIENT if line.endswith(f"({value_of.__name__})") else line
