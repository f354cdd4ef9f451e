"""How a step cuts its batch: the rows and the random key of each evaluation of the loss."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import PyTree, TrainState, is_key, value_error
from shardopt.core._block_model import takes_rng
from shardopt.losses._batch_dims import num_rows, row_counts
from shardopt.losses._global_view import num_micro_batches
from shardopt.losses._loss import step_key
from shardopt.losses._view import Views
from shardopt.runtime._processes import gather_to_host
from shardopt.step._global_rows import rows_of
from shardopt.step._inputs import check_batch, check_state, place_batch
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy


def checked_batch(caller: str, opt: ShardedOptimizer, state: TrainState, batch: PyTree) -> PyTree:
    """Return the rows of all processes, for a function that looks into one step.

    Raises:
      TypeError: if `opt` is not a strategy, or `state` not a train state.
      ValueError: if the state was donated, the batch does not fit, or replicas train apart.
    """
    check_is_strategy(opt)
    check_state(opt.config, state)
    batch = rows_of(opt.config, caller).join(batch)
    check_batch(opt.config, batch)
    if opt.config.per_replica:
        problem = "replicas of this strategy train apart, each with its own parameters."
        raise value_error(problem, fix="pass the strategy that was combined.")
    return batch


class Piece(NamedTuple):
    """Rows that the loss gets at once, all as None, and its random key."""

    rows: np.ndarray | None
    key: jax.Array | None


WHOLE = Piece(None, None)


class Cuts(NamedTuple):
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


def cuts_of(config: StrategyConfig, layout: Layout, batch: PyTree) -> Cuts:
    shares = config.axes.num_row_shares
    count = config.loss.micro_batches
    with warnings.catch_warnings():
        # the step warns of the global view, and of micro-batches that are not cut
        warnings.simplefilter("ignore")
        placed = place_batch(config, batch)
        per_device = Views(config, training=True).of(layout, placed) == "per_device"
        if not per_device:
            count = num_micro_batches(config, layout, placed, training=True)
    cannot_cut = len(row_counts(config, batch)) != 1 or num_rows(config, batch) % (shares * count)
    return Cuts(
        per_device,
        None if cannot_cut else np.arange(num_rows(config, batch)).reshape(shares, count, -1),
    )


def pieces_of(
    config: StrategyConfig, state: TrainState, batch: PyTree, cuts: Cuts
) -> Iterator[Piece]:
    """Yield the pieces of a step: the rows of each device and micro-batch.

    All rows if the loss sees all at once.
    """
    takes_key = takes_rng(config.loss.loss_fn)
    rows = cuts.rows
    per_device = cuts.per_device
    if not takes_key and (rows is None or not per_device):
        yield WHOLE
        return
    step = values_on_host(state.step)
    rng = values_on_host(state.rng)
    for d in range(config.axes.num_row_shares if per_device else 1):
        for m in range(1 if rows is None else rows.shape[1]):
            piece_rows = _rows_of_piece(cuts, d, m)
            numbers = np.arange(num_rows(config, batch)) if piece_rows is None else piece_rows
            device = d * config.axes.num_position_shares
            key = None
            if takes_key:
                key = step_key(config, step, rng, m, device, row_numbers=lambda: numbers)  # noqa: B023
            yield Piece(piece_rows, key)


def _rows_of_piece(cuts: Cuts, device: int, micro_batch: int) -> np.ndarray | None:
    if cuts.rows is None:
        return None
    if cuts.per_device:
        return cuts.rows[device, micro_batch]
    return cuts.rows[:, micro_batch].reshape(-1)


def values_on_host(leaf: PyTree) -> PyTree:
    """Return all values of a leaf on the host; a random key stays an array of keys."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        return jax.random.wrap_key_data(
            values_on_host(jax.random.key_data(leaf)), impl=str(jax.random.key_impl(leaf))
        )
    return gather_to_host(leaf)
