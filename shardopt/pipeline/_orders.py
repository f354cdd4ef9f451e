"""Helpers of several schedules: the order of passes on one stage, and the ticks of passes in
lockstep.
"""

import numpy as np


def lockstep_ticks(
    num_stages: int, num_micro_batches: int, num_chunks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ticks of the forward and backward passes of `interleaved`, [V, M] each."""
    v, m = np.indices((num_stages * num_chunks, num_micro_batches))
    chunk, stage = divmod(v, num_stages)

    # The number of a pass on its stage: S micro-batches in chunk 0, the same S in chunk 1, and so
    # on; then the next S.
    def position(chunk: np.ndarray) -> np.ndarray:
        return (m // num_stages * num_chunks + chunk) * num_stages + m % num_stages

    forward = position(chunk) + stage
    backward = (
        num_stages * num_chunks - 1 + position(num_chunks - 1 - chunk) + (num_stages - 1 - stage)
    )
    return forward, backward


def stage_order(
    ahead: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    *,
    weight_lag: int | None = None,
) -> str:
    """Return the order of passes on a stage that runs at most `ahead` forwards more than backwards.

    `ahead` counts passes of a chunk. With `weight_lag` the weight passes are split off, and run
    that many passes behind the backwards. Micro-batches go through the chunks in groups of S;
    backwards begin with the last chunk.
    """
    passes = range(num_micro_batches * num_chunks)
    groups = [divmod(k, num_stages * num_chunks) for k in passes]
    places = [(group * num_stages + k % num_stages, k // num_stages) for group, k in groups]
    if num_chunks == 1:
        places = [(m, 0) for m in passes]
    last = num_chunks - 1
    forward = [f"F{m}.{chunk}" for m, chunk in places]
    backward, weight = ([f"{letter}{m}.{last - chunk}" for m, chunk in places] for letter in "BW")
    # Fill with `ahead` forwards. Then each turn adds one B, one W (late by `weight_lag`) and one F;
    # slices beyond an end are empty, so the drain needs no case of its own.
    order = forward[:ahead]
    for k in range(len(passes) + (weight_lag or 0)):
        order += backward[k : k + 1]
        order += (
            weight[k - weight_lag : k - weight_lag + 1]
            if weight_lag is not None and k >= weight_lag
            else []
        )
        order += forward[k + ahead : k + ahead + 1]
    return " ".join(order)
