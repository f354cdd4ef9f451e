"""`Schedule`: which pass each stage of a pipeline runs at each tick, as data that can be checked and
printed.
"""

import functools
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from shardopt.core import calling, plural
from shardopt.core._tables import aligned
from shardopt.pipeline import _timing as timing
from shardopt.pipeline._check import check
from shardopt.pipeline._ticks import (
    LETTERS,
    Slots,
    Table,
    Ticks,
    as_table,
    assign_slots,
    num_live,
    shifts,
    tick_table,
)
from shardopt.pipeline._timing import Durations, Pace, PassTimes, pass_times


@dataclass(frozen=True, repr=False)
class Schedule:
    """A pipeline schedule: V virtual stages on S stages, M micro-batches.

    The model is cut into V = S x chunks virtual stages. At each tick a stage runs at most one
    forward pass, then at most one backward pass, then at most one weight pass, as the table says.
    Then it sends its messages, which can be used from the next tick on. If `ticks.weight` is None,
    a backward pass computes both gradients. Otherwise the backward pass computes the gradient of
    the input, and the weight pass the gradient of the weights.

    Attributes:
      name: the name of the schedule in messages and prints.
      ticks: the tick of every pass.

    Raises:
      ValueError: in this order: if tables differ in shape, or virtual stages are not spread evenly.
        If a pass is missing, runs before its input arrives, or shares its tick, stage and kind with
        another pass. The error counts all faults and lists the first eight.
    """

    name: str
    ticks: Ticks

    def __post_init__(self) -> None:
        with calling(self.name):
            check(self.ticks)

    @functools.cached_property
    def slots(self) -> Slots:
        """The ring-buffer slots of all values that a stage stores from one tick to another."""
        return assign_slots(self.ticks)

    @property
    def num_stages(self) -> int:
        """S: the stages that work in parallel, one per index of the mesh axis `pipeline`."""
        return self.ticks.num_stages

    @property
    def num_micro_batches(self) -> int:
        """M: the number of micro-batches in a batch."""
        return self.ticks.num_micro_batches

    @property
    def num_chunks(self) -> int:
        """How many virtual stages each stage holds."""
        return self.ticks.num_chunks

    @property
    def num_ticks(self) -> int:
        """The number of ticks of the lockstep program: the rows of `table()`."""
        return self.ticks.num_ticks

    @property
    def virtual_stages(self) -> Table:
        """[S, chunks]: the virtual stages of each stage, in the order of its chunks."""
        # Sorted by stage. Stable, so that the chunks of a stage stay in the order of the model.
        order = np.argsort(np.asarray(self.ticks.stage_of), kind="stable")
        return as_table(order.reshape(self.num_stages, self.num_chunks))

    @property
    def bubble_fraction(self) -> float:
        """`bubble_rate()`: the idle share of all stages if every pass takes one unit and messages
        take no time.
        """
        return self.bubble_rate()

    @property
    def program_bubble_fraction(self) -> float:
        """`bubble_rate(pace="lockstep")`: the idle share in the lockstep program.

        Never below `bubble_fraction`.
        """
        return self.bubble_rate(pace="lockstep")

    def bubble_rate(self, *, pace: Pace = "own", **durations: Unpack[Durations]) -> float:
        """Return the idle share of all stages from the first pass to the last: an exact fraction,
        rounded once.

        In some papers a stage begins the next step without waiting for others. They state 1 - work
        / max(`stage_times`).

        Args:
          pace: "own": the idle share of `table_time`. "lockstep": the idle share of `program_time`.
          **durations: as for `table_time`.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.one_f_one_b(4, 8)
          >>> round(schedule.bubble_rate(), 3), round(schedule.bubble_rate(communication=0.5), 3)
          (0.273, 0.415)
          >>> round(schedule.bubble_rate(pace="lockstep"), 3)
          0.4
        """
        times = self._times(durations)
        total = (timing.program_time if pace == "lockstep" else timing.table_time)(
            self.ticks, times
        )
        return float(timing.idle_fraction(self.ticks, times, total))

    def _times(self, durations: Durations) -> PassTimes:
        with calling(self.name):
            return pass_times(self.ticks, **durations)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """[S]: how many activations each stage stores at its worst tick, in units of one chunk of
        one micro-batch.

        An activation is stored from its forward to its last use, both included. The last use is the
        weight pass, or the backward pass if the schedule has no weight passes.
        """
        return tuple(num_live(self.ticks).max(axis=0).tolist())

    @property
    def num_slots(self) -> int:
        """Slots for activations, the same number on every stage: the need of the busiest stage."""
        return self.slots.count("activation")

    @property
    def num_input_slots(self) -> int:
        """Slots for forward messages that wait; 0 if each is used on the tick of its arrival."""
        return self.slots.count("input")

    @property
    def num_cotangent_slots(self) -> int:
        """Slots for backward messages that wait; 0 if each is used on the tick of its arrival."""
        return self.slots.count("cotangent")

    @property
    def num_deferred_slots(self) -> int:
        """Slots for values that a backward pass stores for its weight pass.

        0 if the schedule has no weight passes.
        """
        return self.slots.count("deferred")

    @property
    def forward_shifts(self) -> tuple[int, ...]:
        """By how many stages, modulo S, activations move.

        One permute each, none for 0. (1,) if v is on stage v mod S.
        """
        return shifts(self.ticks)["forward"]

    @property
    def backward_shifts(self) -> tuple[int, ...]:
        """By how many stages, modulo S, cotangents move.

        One permute each, none for 0. (S - 1,) if v is on stage v mod S.
        """
        return shifts(self.ticks)["backward"]

    def table_time(self, **durations: Unpack[Durations]) -> float:
        """Return the time from the first pass to the last if every stage goes at its own pace.

        Every stage runs its passes in the order of the table, each as soon as the stage is free and
        the message has arrived. The literature calls the result of this event-driven clock a
        schedule's time. The program that shardopt compiles runs in lockstep; its time is
        `program_time`.

        Args:
          **durations: times, each 1 by default:

            - forward: of the forward of one chunk of one micro-batch. If the virtual stages differ
              (embedding, head), a sequence [V] of times in the order of the model.
            - backward: of the gradient of its input: a number or a sequence [V].
            - weight: of the gradient of its weights: a number or a sequence [V]. A backward pass
              that computes both gradients takes backward + weight.
            - communication: of a message from one stage to another, 0 by default. Both stages can
              run passes that do not need the message meanwhile. Between chunks of one stage it is
              0.

        Raises:
          TypeError: if a time is not a number.
          ValueError: if a sequence does not have V times, or a time is negative.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.one_f_one_b(2, 3)
          >>> schedule.table_time(), schedule.table_time(forward=[2, 1], communication=0.5)
          (12, 16.0)
        """
        return timing.table_time(self.ticks, self._times(durations))

    def stage_times(self, **durations: Unpack[Durations]) -> tuple[float, ...]:
        """Return [S], each stage's time from its first pass to its last, at its own pace.

        Arguments as for `table_time`.

        Papers on zero bubbles state the longest of them: a step takes so long if every stage begins
        the next step as soon as it is done. A step of shardopt is synchronous and takes
        `table_time`: it ends when all stages have ended.
        """
        return timing.stage_times(self.ticks, self._times(durations))

    def program_time(self, **durations: Unpack[Durations]) -> float:
        """Return the time of the compiled program; arguments as for `table_time`.

        In lockstep a tick takes the time of its busiest stage, and then the time of the messages:
        all stages send after their passes, so no message is hidden. In a schedule of `send_ahead`,
        neighbours begin to send at the beginning of a tick, and a stage waits for these messages at
        the end of its tick.
        """
        return timing.program_time(self.ticks, self._times(durations))

    def table(self) -> dict[str, np.ndarray]:
        """Return the schedule as int32 arrays with one row per tick; -1 means none.

        At tick t, stage s stores arrived messages, then runs its forward, backward and weight pass,
        then sends. Arrays are [num_ticks, S] unless stated. `weight_*` and `*_deferred` exist only
        if the weight pass is split off.

        - `forward_micro_batch`, `backward_micro_batch`, `weight_micro_batch`: the micro-batch; -1
          is idle.
        - `forward_chunk`, `backward_chunk`, `weight_chunk`: the chunk of the stage. Its virtual
          stage is `virtual_stages[s][chunk]`.
        - `forward_slot`: the activation slot that the forward writes. `backward_slot`,
          `weight_slot`: the slot that this pass reads.
        - `forward_shift`: an index of `forward_shifts`, by which the forward's input has just
          arrived. `forward_waited`: the input slot that holds it. Both are -1 on virtual stage 0,
          which reads the batch.
        - `backward_shift`, `backward_waited`: the same for the backward's cotangent, with
          `backward_shifts` and the cotangent slots. Both are -1 on the last virtual stage, which
          differentiates the loss.
        - `forward_arrival` [num_ticks, S, len(forward_shifts)]: the input slot that stores the
          message arriving by this shift at the start of the tick. It is -1 if the message is used
          at once, or if none arrives.
        - `backward_arrival` [num_ticks, S, len(backward_shifts)]: the same for cotangent slots.
        - `backward_deferred`: the deferred slot that the backward writes. `weight_deferred`: the
          slot that the weight pass reads.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.eager_one_f_one_b(2, 3)
          >>> schedule.table()["backward_micro_batch"].T.tolist()
          [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
        """
        return tick_table(self.ticks, self.slots)

    def __repr__(self) -> str:
        sizes = (
            (self.num_stages, "stage"),
            (self.num_micro_batches, "micro-batch"),
            (self.num_chunks, "chunk"),
        )
        return f"Schedule({self.name}: {', '.join(plural(count, noun) for count, noun in sizes)})"

    def __str__(self) -> str:
        """Return two lines of numbers, a line of ticks, and one line per stage: F3.1 is forward of
        micro-batch 3, chunk 1.
        """
        peaks = ", ".join(map(str, self.peak_activations))
        numbers = [
            plural(self.num_ticks, "tick"),
            f"bubble {self.bubble_fraction:.1%}",
            (
                f"as {'a lockstep' if self.ticks.message_ticks == 1 else 'the'} program"
                f" {self.program_bubble_fraction:.1%}"
            ),
            f"at most {plural(max(self.peak_activations), 'activation')} per stage ({peaks})",
        ]
        return "\n".join([self.sizes, ", ".join(numbers), "", *_grid(self.ticks)])

    @property
    def sizes(self) -> str:
        """Its name, and the numbers of stages, micro-batches and chunks."""
        return repr(self).removeprefix("Schedule(").removesuffix(")")


def _grid(ticks: Ticks) -> list[str]:
    """Return a line of tick numbers and a line per stage."""
    cells = [["" for _ in range(ticks.num_ticks)] for _ in range(ticks.num_stages)]
    chunk_of = ticks.chunk_of
    for kind, pass_ticks in ticks.passes.items():
        for v, row in enumerate(pass_ticks.tolist()):
            chunk = f".{chunk_of[v]}" if ticks.num_chunks > 1 else ""
            for m, tick in enumerate(row):
                cells[ticks.stage_of[v]][tick] += f"{LETTERS[kind]}{m}{chunk}"
    columns = [["tick", *(f"stage {stage}" for stage in range(ticks.num_stages))]]
    columns += [
        [str(tick), *(row[tick] or "." for row in cells)] for tick in range(ticks.num_ticks)
    ]
    return aligned(list(zip(*columns, strict=True)))
