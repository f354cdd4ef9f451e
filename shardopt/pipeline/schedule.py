"""`Schedule`: who does what at each tick of a pipeline, as data that can be checked, printed and plotted."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardopt.core.errors import plural
from shardopt.pipeline import timing
from shardopt.pipeline.check import check
from shardopt.pipeline.ticks import LETTERS, Slots, Table, Ticks, as_table, num_live, shifts, tick_table
from shardopt.pipeline.timing import Pace, PassTimes, Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Schedule:
    """A pipeline schedule: V virtual stages on S stages, M micro-batches.

    The model is cut into V = S x chunks virtual stages. At each tick a stage runs at most one forward, then one
    backward, then one weight pass, whichever the table holds; then every message moves on, and can be used from
    the next tick. Where `ticks.weight` is None, a backward pass computes both gradients; otherwise backward is
    the gradient of the input, and weight that of the weights.

    Attributes:
      name: what it is called in messages, prints and plots.
      ticks: when every pass runs.
      slots: where in its stage's ring buffers everything lies that is kept from one tick to another.
    """

    name: str
    ticks: Ticks
    slots: Slots

    @property
    def num_stages(self) -> int:
        """S: the stages that work side by side, one per place on the mesh axis `pipeline`."""
        return self.ticks.num_stages

    @property
    def num_micro_batches(self) -> int:
        """M: the parts that a batch is cut into."""
        return self.ticks.num_micro_batches

    @property
    def num_chunks(self) -> int:
        """How many virtual stages each stage holds."""
        return self.ticks.num_chunks

    @property
    def num_ticks(self) -> int:
        """How many ticks the lockstep program has, the rows of `table()`."""
        return self.ticks.num_ticks

    @property
    def virtual_stages(self) -> Table:
        """[S, chunks]: the virtual stages that each stage holds, in the order of its chunks."""
        order = np.argsort(np.asarray(self.ticks.stage_of), kind="stable")
        return as_table(order.reshape(self.num_stages, self.num_chunks))

    @property
    def bubble_fraction(self) -> float:
        """`bubble_rate()`: the idle share of all stages if every pass takes one unit and messages take no time."""
        return self.bubble_rate()

    @property
    def program_bubble_fraction(self) -> float:
        """`bubble_rate(pace="lockstep")`, that of the lockstep program; `bubble_fraction` is never above it."""
        return self.bubble_rate(pace="lockstep")

    def bubble_rate(
        self,
        *,
        forward: Times = 1,
        backward: Times = 1,
        weight: Times = 1,
        communication: float = 0,
        pace: Pace = "own",
    ) -> float:
        """Return the idle share of all stages from the first pass to the last, exact and rounded once.

        Papers whose stages begin the next step without waiting for each other give 1 - work / max(`stage_times`).

        Args:
          forward: as for `table_time`.
          backward: as for `table_time`.
          weight: as for `table_time`.
          communication: as for `table_time`.
          pace: "own": the share of `table_time`. "lockstep": of `program_time`, the program.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.one_f_one_b(4, 8)
          >>> round(schedule.bubble_rate(), 3), round(schedule.bubble_rate(communication=0.5), 3)
          (0.273, 0.415)
          >>> round(schedule.bubble_rate(pace="lockstep"), 3)
          0.4
        """
        times = self._times(forward, backward, weight, communication)
        total = (timing.program_time if pace == "lockstep" else timing.table_time)(self.ticks, times)
        return float(timing.idle_fraction(self.ticks, times, total))

    def _times(self, forward: Times, backward: Times, weight: Times, communication: float) -> PassTimes:
        given = {"forward": forward, "backward": backward, "weight": weight}
        return timing.pass_times(self.name, self.ticks, **given, communication=communication)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """[S]: how many activations each stage keeps at its worst tick, in units of one chunk of one micro-batch.

        An activation is kept from its forward to its last use, both included: the backward, or the weight pass
        where there is one.
        """
        return tuple(num_live(self.ticks, "activation").max(axis=0).tolist())

    @property
    def num_slots(self) -> int:
        """Slots for activations, the same on every stage: what the busiest stage needs."""
        return self.slots.count("activation")

    @property
    def num_input_slots(self) -> int:
        """Slots for forward messages that wait; 0 if each is used on the tick on which it arrives."""
        return self.slots.count("input")

    @property
    def num_cotangent_slots(self) -> int:
        """Slots for backward messages that wait; 0 if each is used on the tick on which it arrives."""
        return self.slots.count("cotangent")

    @property
    def num_deferred_slots(self) -> int:
        """Slots for what a backward leaves for its weight pass; 0 where these are one."""
        return self.slots.count("deferred")

    @property
    def forward_shifts(self) -> tuple[int, ...]:
        """By how many stages, modulo S, activations move: (1,) if v is on stage v mod S. One permute each, none for 0."""
        return shifts(self.ticks)["forward"]

    @property
    def backward_shifts(self) -> tuple[int, ...]:
        """By how many stages, modulo S, cotangents move: then (S - 1,). One permute each, none for 0."""
        return shifts(self.ticks)["backward"]

    def table_time(
        self, *, forward: Times = 1, backward: Times = 1, weight: Times = 1, communication: float = 0
    ) -> float:
        """Return the time from the first pass to the last if every stage goes at its own pace.

        Every stage runs its own passes in the order of the table, each as soon as the stage is free and the message
        has come: an event-driven clock, what the literature calls a schedule's time. The program that shardopt
        compiles runs in lockstep; its time is `program_time`.

        Args:
          forward: time of the forward of one chunk of one micro-batch; or a sequence [V] of one a virtual stage, in
            the model's order, where they differ (embedding, head).
          backward: time of the gradient of its input; likewise.
          weight: time of the gradient of its weights; likewise. A backward that computes both takes backward + weight.
          communication: time that a message takes from one stage to another, in which both go on with what does not
            need it. Between chunks of one stage there is none.

        Raises:
          TypeError: if a time is not a number.
          ValueError: if a sequence has not V times, or one is negative.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.one_f_one_b(2, 3)
          >>> schedule.table_time(), schedule.table_time(forward=[2, 1], communication=0.5)
          (12, 16.0)
        """
        return timing.table_time(self.ticks, self._times(forward, backward, weight, communication))

    def stage_times(
        self, *, forward: Times = 1, backward: Times = 1, weight: Times = 1, communication: float = 0
    ) -> tuple[float, ...]:
        """Return [S], each stage's time from its first pass to its last, at its own pace; arguments as for `table_time`.

        The longest is what a step takes if every stage begins the next one as soon as it is done, and so what papers
        on zero bubbles count. A synchronous step, as shardopt's, takes `table_time`: it ends when all have ended.
        """
        return timing.stage_times(self.ticks, self._times(forward, backward, weight, communication))

    def program_time(
        self, *, forward: Times = 1, backward: Times = 1, weight: Times = 1, communication: float = 0
    ) -> float:
        """Return the time of the compiled program; arguments as for `table_time`.

        In lockstep each tick takes as long as its busiest stage, and then the messages, which all stages send after their
        passes: nothing of them is hidden. Of schedules that `send_ahead` made, a stage waits at the end of a tick for the
        messages that its neighbours began to send at the beginning of theirs.
        """
        return timing.program_time(self.ticks, self._times(forward, backward, weight, communication))

    def table(self) -> dict[str, np.ndarray]:
        """Return the schedule as int32 arrays with one row per tick; -1 wherever there is nothing.

        A program that obeys them does, at tick t on stage s, in this order: store arrivals, forward, backward,
        weight, send. [num_ticks, S] unless it says otherwise; `weight_*` and `*_deferred` only where the weight
        pass is split off:

        - `forward_micro_batch`, `backward_micro_batch`, `weight_micro_batch`: which micro-batch; -1 is idle.
        - `forward_chunk`, `backward_chunk`, `weight_chunk`: which chunk of the stage, that is which virtual stage
          `virtual_stages[s][chunk]`.
        - `forward_slot`: the activation slot that the forward writes. `backward_slot`, `weight_slot`: the one it
          reads.
        - `forward_shift`: the forward's input has arrived just now by `forward_shifts[this]`. `forward_waited`: it
          lies in this input slot. Both -1: it is virtual stage 0, which reads the batch.
        - `backward_shift`, `backward_waited`: the same of the backward's cotangent, by `backward_shifts` and in the
          cotangent slots. Both -1: it is the last virtual stage, which differentiates the loss.
        - `forward_arrival` [num_ticks, S, len(forward_shifts)]: the input slot in which the message is stored that
          arrives by that shift at the start of this tick; -1: it is used at once, or there is none.
        - `backward_arrival` [num_ticks, S, len(backward_shifts)]: the same for cotangent slots.
        - `backward_deferred`: the deferred slot that the backward writes. `weight_deferred`: the one that the
          weight pass reads.

        Example:
          >>> import shardopt as so
          >>> schedule = so.schedules.eager_one_f_one_b(2, 3)
          >>> schedule.table()["backward_micro_batch"].T.tolist()
          [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
        """
        return tick_table(self.ticks, self.slots)

    def validate(self) -> None:
        """Refuse a schedule that cannot be run; what `from_ticks` returns has passed.

        Raises:
          ValueError: if tables differ in shape or virtual stages are not spread evenly; or else if a pass is
            missing, runs before what it needs, or shares its tick, stage and kind with another; or else if things
            that are live at the same tick share a slot. All faults are found, the first eight listed.
        """
        check(self.name, self.ticks, self.slots)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        pace: Pace = "lockstep",
        forward: Times = 1,
        backward: Times = 1,
        weight: Times = 1,
        communication: float = 0,
    ) -> "Figure":
        """Draw who does what when, in the lockstep program or with stages at their own pace.

        Args:
          path: where to save the picture; the suffix chooses the format, PNG without one.
          pace: "lockstep": as the program runs, as `program_time` counts. "own": as `table_time` does.
          forward: as for `table_time`.
          backward: as for `table_time`.
          weight: as for `table_time`.
          communication: as for `table_time`.

        Returns:
          A matplotlib figure.
        """
        from shardopt.pipeline.plot import plot

        idle = self.bubble_rate(
            forward=forward, backward=backward, weight=weight, communication=communication, pace=pace
        )
        program = " in lockstep" if self.ticks.message_ticks == 1 else ", messages sent ahead"
        how = plural(self.num_ticks, "tick") + program if pace == "lockstep" else "stages at their own pace"
        most = plural(max(self.peak_activations), "activation")
        heading = self._sizes(), f"{how}, {idle:.1%} idle, at most {most} per stage"
        return plot(self.ticks, self._times(forward, backward, weight, communication), pace, heading, path)

    def __repr__(self) -> str:
        sizes = ((self.num_stages, "stage"), (self.num_micro_batches, "micro-batch"), (self.num_chunks, "chunk"))
        return f"Schedule({self.name}: {', '.join(plural(count, noun) for count, noun in sizes)})"

    def __str__(self) -> str:
        """Return two lines of numbers, a line of ticks, and one line per stage: F3.1 is forward of micro-batch 3, chunk 1."""
        peaks = ", ".join(map(str, self.peak_activations))
        numbers = [
            plural(self.num_ticks, "tick"),
            f"bubble {self.bubble_fraction:.1%}",
            f"as {'a lockstep' if self.ticks.message_ticks == 1 else 'the'} program {self.program_bubble_fraction:.1%}",
            f"at most {plural(max(self.peak_activations), 'activation')} per stage ({peaks})",
        ]
        return "\n".join([self._sizes(), ", ".join(numbers), "", *_grid(self.ticks)])

    def _sizes(self) -> str:
        return repr(self).removeprefix("Schedule(").removesuffix(")")


def _grid(ticks: Ticks) -> list[str]:
    """Return a line of tick numbers and a line per stage."""
    cells = [["" for _ in range(ticks.num_ticks)] for _ in range(ticks.num_stages)]
    chunk_of = ticks.chunk_of
    for kind, when in ticks.passes.items():
        for v, row in enumerate(when.tolist()):
            chunk = f".{chunk_of[v]}" if ticks.num_chunks > 1 else ""
            for m, tick in enumerate(row):
                cells[ticks.stage_of[v]][tick] += f"{LETTERS[kind]}{m}{chunk}"
    columns = [["tick", *(f"stage {stage}" for stage in range(ticks.num_stages))]]
    columns += [[str(tick), *(row[tick] or "." for row in cells)] for tick in range(ticks.num_ticks)]
    widths = [max(map(len, column)) for column in columns]
    padded = [[text.ljust(width) for text in column] for column, width in zip(columns, widths, strict=True)]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
