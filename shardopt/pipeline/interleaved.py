"""Interleaved 1F1B: several chunks of the model on each stage, for a bubble that many times smaller."""

import numpy as np

from shardopt.pipeline.arguments import check_groups, check_sizes
from shardopt.pipeline.from_ticks import from_ticks
from shardopt.pipeline.schedule import Schedule


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """Cut the model into chunks x stages parts, part v on stage v mod S, and run a forward and a backward a tick.

    Micro-batches go round the ring of stages in groups of S: a group through chunk 0, then through chunk 1, and so
    on, and the next group follows without a gap. The passes of a stage are thus in a row k(m, c) = (v (m div S) +
    c) S + m mod S, with v chunks; stage s runs forward of micro-batch m and chunk c at tick k(m, c) + s and
    backward at tick (v S - 1) + k(m, v - 1 - c) + (S - 1 - s). Every message is used on the tick after it is sent.

    **Bubble**: (S - 1) / (v M + S - 1), of the table and of the lockstep program alike: filling and draining
    take S - 1 passes of a part that is v times smaller.

    **Memory**: stage s keeps at most (v + 1) S - 1 - 2 s activations of a chunk; the busiest, in units of a whole
    stage, 1 + (S - 1) / (v S) times the S of textbook 1F1B. Nothing else waits.

    **Communication**: v times the messages of 1F1B.

    Args:
      num_stages: S.
      num_micro_batches: M; a multiple of S, unless there is one chunk.
      num_chunks: v, chunks a stage; 1 is `one_f_one_b`.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer.
      ValueError: if a size is below 1, or there are several chunks and M is not a multiple of S.

    Example:
      >>> import shardopt as so
      >>> print(so.schedules.interleaved(2, 2, 2))
      interleaved: 2 stages, 2 micro-batches, 2 chunks
      8 ticks, bubble 20.0%, as a lockstep program 20.0%, at most 4 activations a stage (4, 3)
      <BLANKLINE>
      tick     0     1     2     3         4         5     6     7
      stage 0  F0.0  F1.0  F0.1  F1.1      B0.1      B1.1  B0.0  B1.0
      stage 1  .     F0.0  F1.0  F0.1B0.1  F1.1B1.1  B0.0  B1.0  .

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
      section 2.2.
    """
    check_sizes("interleaved", num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    check_groups("interleaved", num_stages, num_micro_batches, num_chunks)
    forward, backward = round_the_ring(num_stages, num_micro_batches, num_chunks)
    return from_ticks(num_stages, forward, backward, name="interleaved")


def round_the_ring(num_stages: int, num_micro_batches: int, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ticks of forward and backward, [V, M] each."""
    v, m = np.indices((num_stages * num_chunks, num_micro_batches))
    chunk, stage = divmod(v, num_stages)

    def place(chunk: np.ndarray) -> np.ndarray:
        return (m // num_stages * num_chunks + chunk) * num_stages + m % num_stages

    forward = place(chunk) + stage
    backward = num_stages * num_chunks - 1 + place(num_chunks - 1 - chunk) + (num_stages - 1 - stage)
    return forward, backward
