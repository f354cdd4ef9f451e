"""What a table of ticks costs: run by stages at their own pace, and run as one lockstep program."""

import numpy as np

from shardopt.pipeline.ticks import Ticks, source


def work(ticks: Ticks, *, forward: float = 1, backward: float = 1, weight: float = 1) -> float:
    """Return the work of one stage; every stage has the same."""
    return ticks.num_chunks * ticks.num_micro_batches * (forward + backward + weight)


def table_time(ticks: Ticks, *, forward: float = 1, backward: float = 1, weight: float = 1) -> float:
    """Return the time from the first action to the last, when stages wait for nothing but their inputs.

    Every stage runs its own actions in the order of the table, each as soon as the stage is free and the message
    has come. This is what the literature calls a schedule's time.
    """
    cost = pass_costs(ticks, forward=forward, backward=backward, weight=weight)
    free: list[float] = [0] * ticks.num_stages
    done: dict[tuple[str, int, int] | None, float] = {None: 0}
    # by tick, then in the order within a tick: whatever an action needs has been timed before it
    for _, _, kind, v, m in sorted(
        (tick, place, kind, v, m)
        for place, (kind, when) in enumerate(ticks.passes.items())
        for v, row in enumerate(when.tolist())
        for m, tick in enumerate(row)
    ):
        stage = ticks.stage_of[v]
        start = max(free[stage], done[source(kind, v, m, ticks.num_virtual_stages)])
        free[stage] = done[kind, v, m] = start + cost[kind]
    return max(free)


def program_time(ticks: Ticks, *, forward: float = 1, backward: float = 1, weight: float = 1) -> float:
    """Return the time of the lockstep program: each tick takes as long as its busiest stage."""
    return sum(tick_costs(ticks, forward=forward, backward=backward, weight=weight))


def tick_costs(ticks: Ticks, *, forward: float = 1, backward: float = 1, weight: float = 1) -> list[float]:
    """Return how long each tick of the lockstep program takes, [num_ticks]."""
    cost = pass_costs(ticks, forward=forward, backward=backward, weight=weight)
    load = np.zeros((ticks.num_ticks, ticks.num_stages), np.result_type(*cost.values()))
    for kind, when in ticks.passes.items():
        np.add.at(load, (when, np.asarray(ticks.stage_of)[:, None]), cost[kind])
    return load.max(axis=1).tolist()


def pass_costs(ticks: Ticks, *, forward: float = 1, backward: float = 1, weight: float = 1) -> dict[str, float]:
    """Return how long each kind of pass takes; a backward that is not split does the work of two."""
    if ticks.weight is None:
        return {"forward": forward, "backward": backward + weight}
    return {"forward": forward, "backward": backward, "weight": weight}
