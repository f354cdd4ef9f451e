"""Schedules that a user writes: from tables of ticks, or from the order of passes of each stage."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardopt.core import calling, plural, type_error, value_error
from shardopt.pipeline._check import check_cells, check_sizes
from shardopt.pipeline._schedule import Schedule
from shardopt.pipeline._ticks import LETTERS, Ticks, as_table, input_pass_of


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
    """Make a schedule from tables with the tick of each pass.

    Args:
      num_stages: S.
      forward: [V, M] integers, one row per virtual stage, one column per micro-batch: the tick of
        the forward pass.
      backward: [V, M] integers: the tick of the backward pass.
      weight: [V, M] integers: the tick of the weight gradient; by default the backward pass
        computes the weight gradient.
      stage_of: [V] integers: the stage that runs each virtual stage; by default v % S.
      message_ticks: the number of ticks after which another stage can use a message, 1 or 2; see
        `send_ahead`.
      name: the name of the schedule in messages and prints.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a table does not consist of integers.
      ValueError: if `num_stages` is below 1, `message_ticks` is neither 1 nor 2, the table is too
        large, or `Schedule` refuses it.

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
    with calling(name):
        check_sizes(num_stages=num_stages)
        tables_by_kind = {"forward": forward, "backward": backward}
        if weight is not None:
            tables_by_kind["weight"] = weight
        arrays = {kind: _integers(kind, table, 2) for kind, table in tables_by_kind.items()}
        stage_of_virtual = np.arange(len(arrays["forward"])) % num_stages
        if stage_of is not None:
            stage_of_virtual = _integers("stage_of", stage_of, 1)
        num_ticks = max(
            (1 + int(array.max()) for array in arrays.values() if array.size), default=0
        )
        check_cells(int(num_stages), num_ticks)
        if message_ticks not in (1, 2):
            raise value_error(f"message_ticks must be 1 or 2, got {message_ticks!r}.")
        tables = {kind: as_table(array) for kind, array in arrays.items()}
        ticks = Ticks(
            int(num_stages), tuple(stage_of_virtual.tolist()), **tables, message_ticks=message_ticks
        )
    return Schedule(name, ticks)


def _integers(argument: str, values: ArrayLike, ndim: int) -> np.ndarray:
    """Return the values as an array of integers with `ndim` dims, or raise TypeError."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        array = np.empty(0, object)
    if array.dtype.kind in "iu" and array.ndim == ndim:
        return array
    actual = (
        f"shape {array.shape} and dtype {array.dtype}"
        if array.size
        else "rows of unequal length, or nothing"
    )
    expected_shape = "[V]: one per virtual stage"
    if ndim == 2:
        expected_shape = "[V, M]: one per virtual stage and micro-batch"
    raise type_error(f"{argument} must be integers {expected_shape}; got {actual}.")


_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_ACTION = re.compile(r"([FBW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_WORD = re.compile(rf"\.|(?:{_ACTION.pattern})+")


_Pass = tuple[str, int, int]
"""The kind, virtual stage and micro-batch of a pass."""


class _Action(NamedTuple):
    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.micro_batch}.{self.chunk}"


def from_order(
    orders: Sequence[str],
    *,
    stage_of: ArrayLike | None = None,
    message_ticks: int = 1,
    name: str = "from_order",
) -> Schedule:
    """Make a schedule from the order of passes on each stage.

    Each pass runs as early as it can, one per tick.

    Args:
      orders: one string per stage that lists its passes, as in a printed schedule. `F3` is the
        forward of micro-batch 3, `B3` its backward, `W3` its weight gradient. `F3.1` is the forward
        in chunk 1. Either all weight gradients are listed or none. Idle dots are skipped.
      stage_of: [V] integers: the stage that runs each virtual stage; by default v % S.
      message_ticks: the number of ticks after which another stage can use a message, 1 or 2; see
        `send_ahead`.
      name: the name of the schedule in messages and prints.

    Returns:
      A valid `Schedule`.

    Raises:
      TypeError: if `orders` is not a sequence of strings, or `stage_of` not a sequence of integers.
      ValueError: if a word cannot be read, an action is missing or listed twice, `stage_of` does
        not spread the chunks evenly, or stages wait for one another.

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
    is_sequence = isinstance(orders, Sequence) and not isinstance(orders, str)
    with calling(name):
        if not is_sequence or not all(isinstance(order, str) for order in orders):
            raise type_error(f"orders must be one string per stage, got {orders!r:.80}.")
        actions_by_stage = _parse_orders(orders)
        _check_complete(actions_by_stage)
        chunks = 1 + max(action.chunk for actions in actions_by_stage for action in actions)
        stage_of_virtual = [v % len(orders) for v in range(chunks * len(orders))]
        if stage_of is not None:
            stage_of_virtual = _integers("stage_of", stage_of, 1).tolist()
        if Counter(stage_of_virtual) != Counter([*range(len(orders))] * chunks):
            problem = (
                f"stage_of must name each of {plural(len(orders), 'stage')} once per chunk"
                f" ({chunks}), got {stage_of_virtual}."
            )
            raise value_error(problem)
        tables = _run_as_early_as_possible(actions_by_stage, stage_of_virtual, message_ticks)
    return from_ticks(
        len(orders), **tables, stage_of=stage_of_virtual, message_ticks=message_ticks, name=name
    )


def _parse_orders(orders: Sequence[str]) -> list[list[_Action]]:
    words = [(stage, word) for stage, order in enumerate(orders) for word in order.split()]
    bad_words = [f"stage {stage}: {word!r}" for stage, word in words if not _WORD.fullmatch(word)]
    if bad_words:
        fix = (
            "write F, B or W and the number of a micro-batch, then a dot and the chunk where there"
            " are several."
        )
        raise value_error(f"{plural(len(bad_words), 'word')} cannot be read.", bad_words, fix)
    actions_by_stage: list[list[_Action]] = [[] for _ in orders]
    for stage, word in words:
        actions_by_stage[stage] += [
            _Action(_KINDS[kind], int(chunk or 0), int(m))
            for kind, m, chunk in _ACTION.findall(word)
        ]
    return actions_by_stage


def _check_complete(actions_by_stage: list[list[_Action]]) -> None:
    all_actions = [action for actions in actions_by_stage for action in actions]
    if not all_actions:
        raise value_error(
            f"orders must list something to do, got {plural(len(actions_by_stage), 'stage')}."
        )
    micro_batches = 1 + max(action.micro_batch for action in all_actions)
    chunks = 1 + max(action.chunk for action in all_actions)
    sizes = f"{plural(micro_batches, 'micro-batch')} in {plural(chunks, 'chunk')}"
    # too many are missing to list them all
    if max(micro_batches, chunks) > len(all_actions):
        raise value_error(f"orders list {plural(len(all_actions), 'action')}, too few for {sizes}.")
    needed = {"forward", "backward", *(action.kind for action in all_actions)}
    kinds = [kind for kind in LETTERS if kind in needed]
    expected = itertools.starmap(
        _Action, itertools.product(kinds, range(chunks), range(micro_batches))
    )
    counts = [Counter(actions) for actions in actions_by_stage]
    faults = [
        f"stage {stage} lists {action} {plural(count[action], 'time')}"
        for (stage, count), action in itertools.product(enumerate(counts), expected)
        if count[action] != 1
    ]
    if faults:
        raise value_error(f"every stage must list {', '.join(kinds)} of {sizes} once.", faults)


def _run_as_early_as_possible(
    actions_by_stage: list[list[_Action]], stage_of_virtual: list[int], message_ticks: int
) -> dict[str, list[list[int]]]:
    """Return tables [V, M] of the tick of each action; a stage runs at most one action per tick."""
    # In reverse, so that `pop` takes the next pass.
    remaining = _passes_in_reverse(actions_by_stage, stage_of_virtual)
    ran_at: dict[_Pass, int] = {}
    tick = 0
    last_busy_tick = 0

    def has_arrived(stage: int, input_pass: _Pass | None) -> bool:
        if input_pass is None:
            return True
        # a result of the same stage is no message: it is there on the next tick
        is_message = stage_of_virtual[input_pass[1]] != stage
        delay = message_ticks if is_message else 1
        return input_pass in ran_at and tick >= ran_at[input_pass] + delay

    while any(remaining):
        inputs = {
            stage: input_pass_of(*actions[-1], len(stage_of_virtual))
            for stage, actions in enumerate(remaining)
            if actions
        }
        ready = [stage for stage, input_pass in inputs.items() if has_arrived(stage, input_pass)]
        # no message is on its way, so no stage can ever continue
        if not ready and tick > last_busy_tick + message_ticks:
            stuck = [
                f"stage {s}: {_pass_text(remaining[s][-1])} needs {_pass_text(input_pass)}"
                for s, input_pass in inputs.items()
                if input_pass
            ]
            raise value_error(
                f"the stages wait for one another from tick {last_busy_tick + 1} on.", stuck
            )
        # `ready` was found before any of these ran: all passes of a tick begin at once.
        for stage in ready:
            ran_at[remaining[stage].pop()] = last_busy_tick = tick
        tick += 1
    return _tables(ran_at, len(stage_of_virtual))


def _passes_in_reverse(
    actions_by_stage: list[list[_Action]], stage_of_virtual: list[int]
) -> list[list[_Pass]]:
    """Return the passes of each stage, the last one first."""
    passes = []
    for stage, actions in enumerate(actions_by_stage):
        virtual = [v for v, stage_of_v in enumerate(stage_of_virtual) if stage_of_v == stage]
        passes.append([(kind, virtual[chunk], m) for kind, chunk, m in reversed(actions)])
    return passes


def _tables(ran_at: dict[_Pass, int], num_virtual_stages: int) -> dict[str, list[list[int]]]:
    num_micro_batches = 1 + max(m for _, _, m in ran_at)
    return {
        kind: [
            [ran_at[kind, v, m] for m in range(num_micro_batches)]
            for v in range(num_virtual_stages)
        ]
        for kind in {kind for kind, _, _ in ran_at}
    }


def _pass_text(pass_key: _Pass) -> str:
    kind, v, m = pass_key
    return f"{kind} of micro-batch {m} at virtual stage {v}"
