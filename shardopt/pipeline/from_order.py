"""A schedule of one's own from the order in which each stage works."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shardopt.core.errors import complaint, plural
from shardopt.pipeline.from_ticks import from_ticks, integers
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.text import LETTERS
from shardopt.pipeline.ticks import source

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_ACTION = re.compile(r"([FBW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_WORD = re.compile(rf"\.|(?:{_ACTION.pattern})+")


class _Action(NamedTuple):
    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.micro_batch}.{self.chunk}"


def from_order(orders: Sequence[str], *, stage_of: Sequence[int] | None = None, name: str = "from_order") -> Schedule:
    """Make a schedule in which every stage does one thing a tick, in a given order, as soon as it can.

    Args:
      orders: for each stage what it does, in the words of a printed schedule: `F3` is the forward of micro-batch
        3, `B3` its backward, `W3` its weight gradient (where one is split off, all are); `F3.1` that of chunk 1.
        Idle dots are skipped.
      stage_of: [V] integers: where each virtual stage lives; by default v on stage v % S.
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
      6 ticks, bubble 33.3%, as a lockstep program 40.0%, at most 2 activations a stage (2, 1)
      <BLANKLINE>
      tick     0   1   2   3   4   5
      stage 0  F0  F1  .   B0  .   B1
      stage 1  .   F0  B0  F1  B1  .
    """
    listed = isinstance(orders, Sequence) and not isinstance(orders, str)
    if not listed or not all(isinstance(order, str) for order in orders):
        raise TypeError(complaint(name, f"orders must be one string a stage, got {orders!r:.80}."))
    lists = _read(name, orders)
    _check_complete(name, lists)
    chunks = 1 + max(action.chunk for line in lists for action in line)
    homes = [v % len(orders) for v in range(chunks * len(orders))]
    if stage_of is not None:
        homes = integers(name, "stage_of", stage_of, 1).tolist()
    if Counter(homes) != Counter([*range(len(orders))] * chunks):
        what = f"stage_of must name each of {plural(len(orders), 'stage')} once a chunk ({chunks}), got {homes}."
        raise ValueError(complaint(name, what))
    return from_ticks(len(orders), **_as_soon_as_possible(name, lists, homes), stage_of=homes, name=name)


def _read(who: str, orders: Sequence[str]) -> list[list[_Action]]:
    words = [(stage, word) for stage, order in enumerate(orders) for word in order.split()]
    if bad := [f"stage {stage}: {word!r}" for stage, word in words if not _WORD.fullmatch(word)]:
        fix = "write F, B or W and the number of a micro-batch, then a dot and the chunk where there are several."
        raise ValueError(complaint(who, f"{plural(len(bad), 'word')} cannot be read.", bad, fix))
    lists: list[list[_Action]] = [[] for _ in orders]
    for stage, word in words:
        lists[stage] += [_Action(_KINDS[kind], int(chunk or 0), int(m)) for kind, m, chunk in _ACTION.findall(word)]
    return lists


def _check_complete(who: str, lists: list[list[_Action]]) -> None:
    everything = {action for line in lists for action in line}
    if not everything:
        raise ValueError(complaint(who, f"orders must list something to do, got {plural(len(lists), 'stage')}."))
    micro_batches = 1 + max(action.micro_batch for action in everything)
    chunks = 1 + max(action.chunk for action in everything)
    if max(micro_batches, chunks) > sum(map(len, lists)):  # as many are missing: they need not all be listed
        what = (
            f"orders list {plural(sum(map(len, lists)), 'action')}, too few for {plural(micro_batches, 'micro-batch')}"
        )
        raise ValueError(complaint(who, f"{what} in {plural(chunks, 'chunk')}."))
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
        sizes = f"{plural(micro_batches, 'micro-batch')} in {plural(chunks, 'chunk')}"
        what = f"every stage must list {', '.join(kinds)} of {sizes} once."
        raise ValueError(complaint(who, what, faults))


def _as_soon_as_possible(who: str, lists: list[list[_Action]], homes: list[int]) -> dict[str, list[list[int]]]:
    """Return tables [V, M] of the ticks at which the actions run, one a stage and tick."""
    virtual = [[v for v, home in enumerate(homes) if home == stage] for stage in range(len(lists))]
    todo = [[(kind, virtual[s][chunk], m) for kind, chunk, m in reversed(line)] for s, line in enumerate(lists)]
    done: dict[tuple[str, int, int], int] = {}
    tick = 0
    while any(todo):
        waits = {stage: source(*line[-1], len(homes)) for stage, line in enumerate(todo) if line}
        ready = [stage for stage, needed in waits.items() if needed is None or needed in done]
        if not ready:  # nothing is on its way either, so nothing ever will be
            stuck = [f"stage {s}: {_name(todo[s][-1])} needs {_name(needed)}" for s, needed in waits.items() if needed]
            raise ValueError(complaint(who, f"the stages wait for one another from tick {tick} on.", stuck))
        for stage in ready:
            done[todo[stage].pop()] = tick
        tick += 1
    width = 1 + max(m for _, _, m in done)
    kinds = {kind for kind, _, _ in done}
    return {kind: [[done[kind, v, m] for m in range(width)] for v in range(len(homes))] for kind in kinds}


def _name(action: tuple[str, int, int]) -> str:
    kind, v, m = action
    return f"{kind} of micro-batch {m} at virtual stage {v}"
