"""The kinds of the schedules in `so.schedules`."""

from typing import NamedTuple


class ScheduleKind(NamedTuple):
    """The kind of a schedule.

    Attributes:
      chunks: the number of chunks of a stage, if none is chosen.
      takes_chunks: whether `num_chunks` can choose another number.
      on_a_v: whether a stage's two chunks are placed in a V: the first stage holds the first and
        the last chunk.
      in_lockstep: whether all stages run the same kind of pass in a tick; other schedules send
        their messages ahead.
    """

    chunks: int = 1
    takes_chunks: bool = False
    on_a_v: bool = False
    in_lockstep: bool = False


KINDS = {
    "gpipe": ScheduleKind(in_lockstep=True),
    "one_f_one_b": ScheduleKind(),
    "eager_one_f_one_b": ScheduleKind(in_lockstep=True),
    "interleaved": ScheduleKind(2, takes_chunks=True, in_lockstep=True),
    "looped_breadth_first": ScheduleKind(2, takes_chunks=True, in_lockstep=True),
    "zero_bubble": ScheduleKind(takes_chunks=True),
    "zero_bubble_2": ScheduleKind(),
    "zero_bubble_lockstep": ScheduleKind(takes_chunks=True, in_lockstep=True),
    "zero_bubble_v": ScheduleKind(2, on_a_v=True),
    "dual_pipe_v": ScheduleKind(2, on_a_v=True),
}
