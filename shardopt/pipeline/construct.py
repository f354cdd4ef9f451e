"""Schedules of one's own: from tables of ticks, or from the order in which each stage works."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardopt.core.errors import format_error, plural
from shardopt.pipeline.check import check, check_cells, check_sizes
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.ticks import LETTERS, Ticks, as_table, assign_slots, source


def from_ticks(
    num_stages: int,
    forward: ArrayLike,
    backward: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    stage_of: ArrayLike | None = None,
    message_ticks: int = 1,
    name: str = "from_ticks",
) -> Schedule:
    """Make a schedule of tables that say at which tick each pass runs.

    Args:
      num_stages: S.
      forward: [V, M] integers, one row per virtual stage, one column per micro-batch: the tick of the forward pass.
      backward: [V, M] integers: the tick of the backward pass.
      weight: [V, M] integers: the tick of the weight gradient; by default the backward pass computes it.
      stage_of: [V] integers: where each virtual stage lives; by default v on stage v % S.
      message_ticks: after how many ticks a message can be used on another stage, 1 or 2; see `send_ahead`.
      name: what to call it in messages, prints and plots.

    Returns:
      A valid `Schedule`, with slots chosen.

    Raises:
      TypeError: if a table does not consist of integers.
      ValueError: if `num_stages` is below 1, `message_ticks` neither 1 nor 2, the table too large, or for what `Schedule.validate` refuses.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.from_ticks(2, forward=[[0, 1], [1, 2]], backward=[[4, 6], [3, 5]], name="mine"))
      mine: 2 stages, 2 micro-batches, 1 chunk
      7 ticks, bubble 33.3%, as a lockstep program 45.5%, at most 2 activations per stage (2, 2)
      <BLANKLINE>
      tick     0   1   2   3   4   5   6
      stage 0  F0  F1  .   .   B0  .   B1
      stage 1  .   F0  F1  B0  .   B1  .
    """
    check_sizes(name, num_stages=num_stages)
    given = {"forward": forward, "backward": backward} | ({} if weight is None else {"weight": weight})
    arrays = {kind: _integers(name, kind, table, 2) for kind, table in given.items()}
    homes = np.arange(len(arrays["forward"])) % num_stages
    if stage_of is not None:
        homes = _integers(name, "stage_of", stage_of, 1)
    num_ticks = max((1 + int(array.max()) for array in arrays.values() if array.size), default=0)
    check_cells(name, int(num_stages), num_ticks)
    if message_ticks not in (1, 2):
        raise ValueError(format_error(name, f"message_ticks must be 1 or 2, got {message_ticks!r}."))
    tables = {kind: as_table(array) for kind, array in arrays.items()}
    ticks = Ticks(int(num_stages), tuple(homes.tolist()), **tables, message_ticks=message_ticks)
    check(name, ticks)
    return Schedule(name, ticks, assign_slots(ticks))


def _integers(who: str, what: str, values: ArrayLike, ndim: int) -> np.ndarray:
    """Return an array of integers with so many dims, or raise TypeError."""
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        array = np.empty(0, object)
    if array.dtype.kind in "iu" and array.ndim == ndim:
        return array
    found = f"shape {array.shape} and dtype {array.dtype}" if array.size else "rows of unequal length, or nothing"
    wanted = ("[V]: one per virtual stage", "[V, M]: one per virtual stage and micro-batch")[ndim - 1]
    raise TypeError(format_error(who, f"{what} must be integers {wanted}; got {found}."))


_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_ACTION = re.compile(r"([FBW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_WORD = re.compile(rf"\.|(?:{_ACTION.pattern})+")


class _Action(NamedTuple):
    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.micro_batch}.{self.chunk}"


def from_order(
    orders: Sequence[str], *, stage_of: ArrayLike | None = None, message_ticks: int = 1, name: str = "from_order"
) -> Schedule:
    """Make a schedule in which every stage does one thing per tick, in a given order, as soon as it can.

    Args:
      orders: for each stage what it does, in the words of a printed schedule: `F3` is the forward of micro-batch
        3, `B3` its backward, `W3` its weight gradient (where one is split off, all are); `F3.1` that of chunk 1.
        Idle dots are skipped.
      stage_of: [V] integers: where each virtual stage lives; by default v on stage v % S.
      message_ticks: after how many ticks a message can be used on another stage, 1 or 2; see `send_ahead`.
      name: what to call it in messages, prints and plots.

    Returns:
      A valid `Schedule`.

    Raises:
      TypeError: if `orders` is not a sequence of strings, or `stage_of` not one of integers.
      ValueError: if a word cannot be read, an action is missing or listed twice, `stage_of` does not spread the
        chunks evenly, or stages wait for one another.

    Example:
      >>> import shardopt as so
      >>> schedule = so.schedules.from_order(["F0 F1 B0 B1", "F0 B0 F1 B1"])
      >>> print(schedule)
      from_order: 2 stages, 2 micro-batches, 1 chunk
      6 ticks, bubble 33.3%, as a lockstep program 40.0%, at most 2 activations per stage (2, 1)
      <BLANKLINE>
      tick     0   1   2   3   4   5
      stage 0  F0  F1  .   B0  .   B1
      stage 1  .   F0  B0  F1  B1  .
    """
    listed = isinstance(orders, Sequence) and not isinstance(orders, str)
    if not listed or not all(isinstance(order, str) for order in orders):
        raise TypeError(format_error(name, f"orders must be one string per stage, got {orders!r:.80}."))
    lists = _read(name, orders)
    _check_complete(name, lists)
    chunks = 1 + max(action.chunk for line in lists for action in line)
    homes = [v % len(orders) for v in range(chunks * len(orders))]
    if stage_of is not None:
        homes = _integers(name, "stage_of", stage_of, 1).tolist()
    if Counter(homes) != Counter([*range(len(orders))] * chunks):
        what = f"stage_of must name each of {plural(len(orders), 'stage')} once per chunk ({chunks}), got {homes}."
        raise ValueError(format_error(name, what))
    tables = _as_soon_as_possible(name, lists, homes, message_ticks)
    return from_ticks(len(orders), **tables, stage_of=homes, message_ticks=message_ticks, name=name)


def _read(who: str, orders: Sequence[str]) -> list[list[_Action]]:
    words = [(stage, word) for stage, order in enumerate(orders) for word in order.split()]
    if bad := [f"stage {stage}: {word!r}" for stage, word in words if not _WORD.fullmatch(word)]:
        fix = "write F, B or W and the number of a micro-batch, then a dot and the chunk where there are several."
        raise ValueError(format_error(who, f"{plural(len(bad), 'word')} cannot be read.", bad, fix))
    lists: list[list[_Action]] = [[] for _ in orders]
    for stage, word in words:
        lists[stage] += [_Action(_KINDS[kind], int(chunk or 0), int(m)) for kind, m, chunk in _ACTION.findall(word)]
    return lists


def _check_complete(who: str, lists: list[list[_Action]]) -> None:
    everything = {action for line in lists for action in line}
    if not everything:
        raise ValueError(format_error(who, f"orders must list something to do, got {plural(len(lists), 'stage')}."))
    micro_batches = 1 + max(action.micro_batch for action in everything)
    chunks = 1 + max(action.chunk for action in everything)
    sizes = f"{plural(micro_batches, 'micro-batch')} in {plural(chunks, 'chunk')}"
    if max(micro_batches, chunks) > sum(map(len, lists)):  # as many are missing: they need not all be listed
        raise ValueError(
            format_error(who, f"orders list {plural(sum(map(len, lists)), 'action')}, too few for {sizes}.")
        )
    split = any(action.kind == "weight" for action in everything)
    kinds = [kind for kind in LETTERS if split or kind != "weight"]
    wanted = [_Action(kind, chunk, m) for kind in kinds for chunk in range(chunks) for m in range(micro_batches)]
    faults = [
        f"stage {stage} lists {action} {plural(count, 'time')}"
        for stage, line in enumerate(lists)
        for counts in [Counter(line)]
        for action in wanted
        for count in [counts[action]]
        if count != 1
    ]
    if faults:
        what = f"every stage must list {', '.join(kinds)} of {sizes} once."
        raise ValueError(format_error(who, what, faults))


def _as_soon_as_possible(
    who: str, lists: list[list[_Action]], homes: list[int], message_ticks: int
) -> dict[str, list[list[int]]]:
    """Return tables [V, M] of the ticks at which the actions run, one per stage and tick."""
    virtual = [[v for v, home in enumerate(homes) if home == stage] for stage in range(len(lists))]
    todo = [[(kind, virtual[s][chunk], m) for kind, chunk, m in reversed(line)] for s, line in enumerate(lists)]
    done: dict[tuple[str, int, int], int] = {}
    tick, last = 0, 0  # the last on which something ran

    def is_there(stage: int, needed: tuple[str, int, int] | None) -> bool:
        if needed is None:
            return True
        return needed in done and tick >= done[needed] + (message_ticks if homes[needed[1]] != stage else 1)

    while any(todo):
        waits = {stage: source(*line[-1], len(homes)) for stage, line in enumerate(todo) if line}
        ready = [stage for stage, needed in waits.items() if is_there(stage, needed)]
        if not ready and tick > last + message_ticks:  # nothing is on its way either, so nothing ever will be
            stuck = [f"stage {s}: {_name(todo[s][-1])} needs {_name(needed)}" for s, needed in waits.items() if needed]
            raise ValueError(format_error(who, f"the stages wait for one another from tick {last + 1} on.", stuck))
        for stage in ready:
            done[todo[stage].pop()] = last = tick
        tick += 1
    width = 1 + max(m for _, _, m in done)
    kinds = {kind for kind, _, _ in done}
    return {kind: [[done[kind, v, m] for m in range(width)] for v in range(len(homes))] for kind in kinds}


def _name(action: tuple[str, int, int]) -> str:
    kind, v, m = action
    return f"{kind} of micro-batch {m} at virtual stage {v}"
