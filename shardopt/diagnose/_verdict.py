"""The verdict on the runs of a verified step: where their sums first differ, and which device was
wrong.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardopt.diagnose._verified import STATE, WRITTEN, Column, Evidence

NAMED = "named"
ONE_OF = "one of"
UNKNOWN = "unknown"
NOT_DETERMINISTIC = "not deterministic"


class Verdict(NamedTuple):
    """A difference between sums that must be equal.

    Attributes:
      phase: the first phase with a difference, see `diagnose._verified`.
      kind: `NAMED` if the devices are wrong; `ONE_OF` if one of them is; `UNKNOWN` if any device
        may be; or `NOT_DETERMINISTIC` if most devices do not get the same result again.
      positions: the positions of the devices in the mesh.
    """

    phase: str
    kind: str
    positions: tuple[int, ...]


def judge(
    runs: Sequence[Evidence], sizes: Mapping[str, int], recorded: np.ndarray | None = None
) -> Verdict | None:
    """Return the verdict on the sums of some runs of one step; None if all are as they must be.

    Each device has a vote on each result that it computed: the majority is right. A device that got
    different results of the same computation is wrong in one of them.

    Args:
      runs: their sums.
      sizes: mesh axis -> size.
      recorded: uint64[positions, columns], the sums after the last update, if the state must be the
        state that it wrote.
    """
    columns = runs[0].columns
    for name in dict.fromkeys(column.phase for column in columns):
        indices = [i for i, column in enumerate(columns) if column.phase == name]
        phase = _Phase(name, runs, indices, sizes, recorded if name == STATE else None)
        if not phase.is_consistent():
            return (
                phase.name_together()
                if any(columns[i].together for i in indices)
                else phase.name_wrong()
            )
    return None


def written(run: Evidence) -> np.ndarray:
    """Return the sums of the state that a run wrote, to be `recorded` in the next step."""
    return run.sums[:, [i for i, column in enumerate(run.columns) if column.phase == WRITTEN]]


def total(sums: np.ndarray, columns: Sequence[Column], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the sum of all leaves of a state: each shard counts once, however many devices have
    copies of it.
    """
    halves = [0, 0]
    for i, column in enumerate(columns):
        firsts = sums[_groups(column.copies, sizes)[:, 0], i]
        halves[0] += int(np.sum(firsts >> np.uint64(32)))
        halves[1] += int(np.sum(firsts & np.uint64(2**32 - 1)))
    return halves[0] % 2**32, halves[1] % 2**32


class _Item(NamedTuple):
    """The sums of one shard, by the position of the device that computed it.

    `expected` if it is known.
    """

    sums: dict[int, set[int]]
    expected: int | None


def _groups(copies: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Return the positions [groups, copies] that hold copies of the same shards."""
    positions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    dims = [list(sizes).index(axis) for axis in copies]
    last = range(positions.ndim - len(dims), positions.ndim)
    return np.moveaxis(positions, dims, last).reshape(-1, math.prod(sizes[axis] for axis in copies))


@dataclasses.dataclass(frozen=True)
class _Phase:
    """The sums of one phase.

    Attributes:
      name: the phase.
      runs: the runs of the step.
      indices: the columns of the phase.
      sizes: mesh axis -> size.
      recorded: uint64[positions, columns of the phase], the sums that are expected, or None.
    """

    name: str
    runs: Sequence[Evidence]
    indices: Sequence[int]
    sizes: Mapping[str, int]
    recorded: np.ndarray | None

    def column(self, i: int) -> Column:
        """Return the description of a column."""
        return self.runs[0].columns[i]

    def is_consistent(self) -> bool:
        """Return whether all runs, all copies, and the recorded sums are equal."""
        first, *further_sums = [run.sums[:, self.indices] for run in self.runs]
        if self.recorded is not None:
            further_sums.append(self.recorded)
        if not all(np.array_equal(first, sums) for sums in further_sums):
            return False
        grouped = [
            self.runs[0].sums[_groups(self.column(i).copies, self.sizes), i] for i in self.indices
        ]
        return all(bool((sums == sums[:, :1]).all()) for sums in grouped)

    def items(self) -> list[_Item]:
        """Return the shards whose sums differ."""
        items = []
        count = math.prod(self.sizes.values())
        for number, i in enumerate(self.indices):
            for group in _groups(self.column(i).copies, self.sizes):
                sums: dict[int, set[int]] = {}
                for position in map(int, group):
                    values = [int(run.sums[position, i]) for run in self.runs]
                    # A stored value that all runs read alike is what its own device stores,
                    # whichever device it moved to.
                    is_stored = self.name == STATE and len(set(values)) == 1
                    for run, value in zip(self.runs, values, strict=True):
                        device = position if is_stored else (position - run.shift) % count
                        sums.setdefault(device, set()).add(value)
                expected = None if self.recorded is None else int(self.recorded[group[0], number])
                distinct = set().union(*sums.values())
                if len(distinct) > 1 or (expected is not None and distinct != {expected}):
                    items.append(_Item(sums, expected))
        return items

    def name_wrong(self) -> Verdict:
        """Return the verdict on the shards whose sums differ."""
        wrong: set[int] = set()
        undecided: set[int] = set()
        unsteady: set[int] = set()
        for item in self.items():
            unsteady |= {device for device, sums in item.sums.items() if len(sums) > 1}
            expected = _majority(item) if item.expected is None else item.expected
            if expected is None:
                undecided |= set(item.sums)
            else:
                wrong |= {device for device, sums in item.sums.items() if sums != {expected}}
        count = self.runs[0].sums.shape[0]
        if wrong and not undecided and 2 * len(wrong) <= count:
            return Verdict(self.name, NAMED, tuple(sorted(wrong)))
        if 2 * len(unsteady) > count and not self.only_one_differs():
            return Verdict(self.name, NOT_DETERMINISTIC, ())
        return self.suspected(wrong | undecided, UNKNOWN)

    def name_together(self) -> Verdict:
        """Return the verdict on results of several devices each.

        A device is suspected if the results of all the other devices agree.
        """
        count = math.prod(self.sizes.values())
        suspects = set(range(count))
        for i in self.indices:
            for group in _groups(self.column(i).together, self.sizes):
                results = [
                    (run.sums[group, i].tobytes(), set((group - run.shift) % count))
                    for run in self.runs
                ]
                for device in range(count):
                    if len({result for result, devices in results if device not in devices}) > 1:
                        suspects.discard(device)
        if len(suspects) == 1:
            return Verdict(self.name, NAMED, tuple(suspects))
        results = {(run.shift, run.sums[:, self.indices].tobytes()) for run in self.runs}
        shifts = [shift for shift, _ in results]
        # One disturbed run differs from its repetition, and no other run does.
        unsteady = sum(shifts.count(shift) > 1 for shift in set(shifts))
        return self.suspected(suspects, NOT_DETERMINISTIC if unsteady > 1 else UNKNOWN)

    def suspected(self, suspects: set[int], otherwise: str) -> Verdict:
        """Return the verdict that one of the suspects is wrong.

        `otherwise` if these are none, or too many.
        """
        if 0 < len(suspects) <= max(2, self.runs[0].sums.shape[0] // 2):
            return Verdict(self.name, ONE_OF, tuple(sorted(suspects)))
        return Verdict(self.name, otherwise, ())

    def only_one_differs(self) -> bool:
        """Return whether all runs but one agree: then one of them was disturbed, and the program is
        deterministic.
        """
        results = [run.sums[:, self.indices].tobytes() for run in self.runs]
        return len(results) > 2 and max(map(results.count, results)) == len(results) - 1


def _majority(item: _Item) -> int | None:
    """Return the sum that more than half of the steady devices agree on, or None."""
    votes = [next(iter(sums)) for sums in item.sums.values() if len(sums) == 1]
    return next((value for value in set(votes) if 2 * votes.count(value) > len(votes)), None)
