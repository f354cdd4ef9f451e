"""The collectives of HLO in numpy: a value is an array [devices, ...], and a collective mixes its
rows.
"""

from collections.abc import Callable, Sequence

import numpy as np

from shardopt.hlo._collective import Groups

Function = Callable[[np.ndarray], Sequence[np.ndarray] | np.ndarray]
STUCK = ("waits forever", "receives twice", "do not hold each device once")
"""Parts of the reasons for which no devices can run a program."""


def rows_of(groups: Groups, positions: np.ndarray) -> list[list[int]]:
    """Return the rows of each group among the devices at some positions.

    Raise ValueError if a group waits for other devices.
    """
    row_of = {int(position): row for row, position in enumerate(positions)}
    rows = []
    for group in groups:
        members = [row_of[position] for position in group if position in row_of]
        if len(members) not in (0, len(group)):
            raise ValueError(f"of its group {group} only some devices run it, so it waits forever")
        if members:
            rows.append(members)
    if sorted(row for members in rows for row in members) != list(range(len(positions))):
        raise ValueError(f"its groups {groups} do not hold each device once")
    return rows


def in_groups(value: np.ndarray, rows: list[list[int]], function: Function) -> np.ndarray:
    """Return a function of the values of each group: [members, ...] -> one result per member."""
    results: list[np.ndarray] = [value] * len(value)
    for members in rows:
        for row, result in zip(members, function(value[members]), strict=True):
            results[row] = result
    return np.stack(results)


def copies(values: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return the same result for each member of a group."""
    return np.broadcast_to(result, (len(values), *result.shape))


def all_to_all(values: np.ndarray, dim: int) -> list[np.ndarray]:
    """Split a dim between the members, and join along it the pieces that each receives."""
    pieces = [np.split(value, len(values), dim) for value in values]
    return [np.concatenate(received, dim) for received in zip(*pieces, strict=True)]


def exchange(values: Sequence[np.ndarray], rows: list[list[int]]) -> tuple[np.ndarray, ...]:
    """The all-to-all of tuples: operand i goes to member i, and result i came from member i."""
    results = [np.empty_like(value) for value in values]
    for members in rows:
        for target, row in enumerate(members):
            for source, sender in enumerate(members):
                results[source][row] = values[target][sender]
    return tuple(results)


def ragged_all_to_all(values: Sequence[np.ndarray], rows: list[list[int]]) -> np.ndarray:
    """Return the outputs after each member of a group sent its rows to all members.

    Each states the places and the numbers of rows.
    """
    sent, output, starts, sizes, targets, _ = values
    result = output.copy()
    for members in rows:
        each = starts.shape[1] // len(members)  # several pieces for each member
        for sender in members:
            for place in range(starts.shape[1]):
                start, size, target = (
                    int(column[sender, place]) for column in (starts, sizes, targets)
                )
                result[members[place // each], target : target + size] = sent[
                    sender, start : start + size
                ]
    return result


def permute(value: np.ndarray, pairs: Groups, positions: np.ndarray) -> np.ndarray:
    """Return the array that each device receives by (source, target) pairs; zeros if it receives
    none.
    """
    row_of = {int(position): row for row, position in enumerate(positions)}
    result = np.zeros_like(value)
    if len({target for _, target in pairs}) < len(pairs):
        raise ValueError(f"a device receives twice: {pairs}")
    for source, target in pairs:
        if (source in row_of) != (target in row_of):
            raise ValueError(
                f"only one of the devices {source} and {target} runs it, so it waits forever"
            )
        if source in row_of:
            result[row_of[target]] = value[row_of[source]]
    return result
