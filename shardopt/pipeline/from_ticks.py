"""A schedule of one's own from tables of ticks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardopt.core.errors import complaint
from shardopt.pipeline.arguments import check_cells, check_sizes
from shardopt.pipeline.check import check
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.slots import color
from shardopt.pipeline.ticks import Ticks, as_table


def from_ticks(
    num_stages: int,
    forward: Any,
    backward: Any,
    weight: Any = None,
    *,
    stage_of: Sequence[int] | None = None,
    name: str = "from_ticks",
) -> Schedule:
    """Make a schedule of tables that say at which tick each pass runs.

    Args:
      num_stages: S.
      forward: [V, M] integers, one row a virtual stage, one column a micro-batch: the tick of the forward pass.
      backward: [V, M] integers: the tick of the backward pass.
      weight: [V, M] integers: the tick of the weight gradient; by default the backward pass computes it.
      stage_of: [V] integers: where each virtual stage lives; by default v on stage v % S.
      name: what to call it in messages, prints and plots.

    Returns:
      A valid `Schedule`, with slots chosen.

    Raises:
      TypeError: if a table does not consist of integers.
      ValueError: if `num_stages` is below 1, the table too large, or for what `Schedule.validate` refuses.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.from_ticks(2, forward=[[0, 1], [1, 2]], backward=[[4, 6], [3, 5]], name="mine"))
      mine: 2 stages, 2 micro-batches, 1 chunk
      7 ticks, bubble 33.3%, as a lockstep program 45.5%, at most 2 activations a stage (2, 2)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6
      stage 0  F0  F1  .   .   B0  .   B1
      stage 1  .   F0  F1  B0  .   B1  .
    """
    check_sizes(name, num_stages=num_stages)
    tables = {"forward": forward, "backward": backward, "weight": weight}
    given = [kind for kind, table in tables.items() if kind != "weight" or table is not None]
    arrays = {kind: integers(name, kind, tables[kind], 2) for kind in given}
    homes = np.arange(len(arrays["forward"])) % num_stages
    if stage_of is not None:
        homes = integers(name, "stage_of", stage_of, 1)
    check_cells(
        name, int(num_stages), max((1 + int(array.max()) for array in arrays.values() if array.size), default=0)
    )
    whole = {kind: as_table(array) for kind, array in arrays.items()}
    ticks = Ticks(int(num_stages), tuple(homes.tolist()), **whole)
    check(name, ticks)
    return Schedule(name, ticks, color(ticks))


def integers(who: str, what: str, values: Any, ndim: int) -> np.ndarray:
    """Return an array of integers with so many dims, or raise TypeError."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        array = np.empty(0, object)
    if array.dtype.kind in "iu" and array.ndim == ndim:
        return array
    found = f"shape {array.shape} and dtype {array.dtype}" if array.size else "rows of unequal length, or nothing"
    wanted = ("[V]: one a virtual stage", "[V, M]: one a virtual stage and micro-batch")[ndim - 1]
    raise TypeError(complaint(who, f"{what} must be integers {wanted}; got {found}."))
