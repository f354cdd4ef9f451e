"""`search`: find a schedule for measured times and a memory limit; each candidate is valid by construction."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardopt.core._arguments import check_number
from shardopt.core._errors import calling
from shardopt.pipeline._check import check_sizes
from shardopt.pipeline._construct import from_order
from shardopt.pipeline._schedule import Schedule
from shardopt.pipeline._timing import Times, pass_times, read_times, stage_times, table_time
from shardopt.pipeline._zero_bubbles import zero_bubble, zero_bubble_2

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROUNDING = 1e-9


@calling("search")
def search(
    num_stages: int,
    num_micro_batches: int,
    *,
    forward: Times,
    backward: Times,
    weight: Times,
    communication: float = 0.0,
    memory: float | None = None,
    memory_after_backward: float = 1.0,
    synchronous: bool = True,
) -> Schedule:
    """Find a schedule with a small bubble for these times that stores at most `memory` activations.

    Args:
      num_stages: S.
      num_micro_batches: M.
      forward: time of a stage's forward of a micro-batch, or a sequence [S] of times if the stages differ.
      backward: time of the gradient of its input: a number or a sequence [S].
      weight: time of the gradient of its weights: a number or a sequence [S].
      communication: time of a message to the next stage. Both stages can run passes that do not need the message meanwhile.
      memory: the most activations of a micro-batch on a stage, at least 1; by default unlimited.
      memory_after_backward: the share of an activation that is stored from its backward to its weight pass, from 0 to 1.
        shardopt stores all of it, and `peak_activations` counts so. Megatron-LM stores 32 h of 34 h + 5 a s bytes a token.
      synchronous: the time to minimise. True: `table_time`, since a step of shardopt ends on all stages together. False: the
        longest of `stage_times`, as in papers whose stages begin the next step at once. Equal schedules are compared by the
        other time, then by the number of activations.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer, or a time or the memory is not a number.
      ValueError: if a size is below 1, there are not as many times as stages, a time is negative, or the memory is out of
        range.

    Example:
      >>> import shardopt as so
      >>> times = {"forward": 2.0, "backward": 3.0, "weight": 1.0, "communication": 0.5}
      >>> searched = so.schedules.search(4, 12, **times, memory=6)
      >>> known = so.schedules.zero_bubble(4, 12)
      >>> round(searched.bubble_rate(**times), 3), round(known.bubble_rate(**times), 3)
      (0.153, 0.2)

    Stage s runs a_s forwards, then a backward and a forward in turn, as 1F1B does. a_s never grows from stage to stage, so
    no stage waits forever. Weight passes run where the stage would wait for a message, where its memory is full, and at the
    end. The search chooses three numbers for each stage: a_s, its share of the memory, and how far a weight pass may overrun
    a wait.

    The search begins with the a_s of ZB-H1, the a_s of ZB-H2, and with as many forwards as fit before the first backward
    can begin. It takes the best of these, and changes one number at a time as long as the time decreases. The same arguments
    give the same schedule. 16 stages and 64 micro-batches take well below a second.

    **Bubble**: never above `zero_bubble` if S activations are allowed, and never above `zero_bubble_2` if 2 S - 1 are allowed.
    ZB-1p and ZB-2p of the paper are this search with `memory` S and 2 S, their `memory_after_backward`, and
    `synchronous=False`. In lockstep no schedule is below `zero_bubble_lockstep`: this search is for stages at their own pace.

    **Memory**: at most `memory` activations on every stage.

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3.1 (the heuristic), table 5.
    """
    check_sizes(num_stages=num_stages, num_micro_batches=num_micro_batches)
    if memory is not None:
        check_number("memory", memory, minimum=1)
    check_number("memory_after_backward", memory_after_backward, below=math.nextafter(1, 2))
    F = read_times("forward", forward, num_stages, "stage")
    B = read_times("backward", backward, num_stages, "stage")
    W = read_times("weight", weight, num_stages, "stage")
    (sending,) = read_times("communication", communication, 1, "message")
    max_activations = num_micro_batches if memory is None else min(memory, num_micro_batches)
    problem = _Problem(
        num_stages, num_micro_batches, F, B, W, sending, max_activations, memory_after_backward, synchronous
    )
    best = _improve(problem, min(_initial_choices(problem), key=lambda choice: _simulate(problem, choice).cost))
    searched = from_order([" ".join(order) for order in _simulate(problem, best).orders], name="search")
    known_schedules = [builder(num_stages, num_micro_batches) for builder in (zero_bubble, zero_bubble_2)]

    def cost(schedule: Schedule) -> tuple[float, float]:
        times = pass_times(schedule.ticks, forward=F, backward=B, weight=W, communication=sending)
        total, longest = table_time(schedule.ticks, times), max(stage_times(schedule.ticks, times))
        return (total, longest) if synchronous else (longest, total)

    return min(
        [searched, *(schedule for schedule in known_schedules if schedule.num_slots <= max_activations)], key=cost
    )


class _Problem(NamedTuple):
    """The arguments of `search`, checked.

    Attributes:
      num_stages: S.
      num_micro_batches: M.
      forward: [S], the time of a forward.
      backward: [S], the time of an input gradient.
      weight: [S], the time of a weight gradient.
      communication: the time of a message.
      memory: the most activations on a stage.
      kept_share: `memory_after_backward`.
      synchronous: whether to minimise `table_time`.
    """

    num_stages: int
    num_micro_batches: int
    forward: list[float]
    backward: list[float]
    weight: list[float]
    communication: float
    memory: float
    kept_share: float
    synchronous: bool


class _Choice(NamedTuple):
    """The numbers that the search chooses for each stage, [S].

    Attributes:
      ahead: forwards before the first backward; never more than on the previous stage.
      memory: the most activations that the stage stores, at least `ahead`.
      overrun: the share of a weight pass that may run after the awaited message has arrived. With 1, weight passes follow
        their backwards at once.
    """

    ahead: tuple[int, ...]
    memory: tuple[float, ...]
    overrun: tuple[float, ...]


class _Outcome(NamedTuple):
    cost: tuple[float, float, float]
    orders: list[list[str]]


def _initial_choices(problem: _Problem) -> Iterator[_Choice]:
    """Yield the choices with which the search begins."""
    num_stages, max_activations = problem.num_stages, int(problem.memory)
    zero_bubbles = [[num_stages - s for s in range(num_stages)], [2 * (num_stages - s) - 1 for s in range(num_stages)]]
    for ahead in [*zero_bubbles, _forwards_that_fit(problem, extra=0), _forwards_that_fit(problem, extra=1)]:
        bounded = tuple(max(1, min(forwards, max_activations)) for forwards in ahead)
        for overrun in _SHARES:
            for memory in {problem.memory: None, float(max(bounded)): None}:
                yield _Choice(bounded, (memory,) * num_stages, (overrun,) * num_stages)


def _forwards_that_fit(problem: _Problem, extra: int) -> list[int]:
    """Return [S], how many forwards each stage can run until its first backward can begin, plus `extra`."""
    starts = [0.0]
    for duration in problem.forward[:-1]:
        starts.append(starts[-1] + duration + problem.communication)
    ahead, ready = [1], starts[-1] + problem.forward[-1] + problem.backward[-1]
    for s in reversed(range(problem.num_stages - 1)):
        ready += problem.communication
        fitting = (ready - starts[s]) / problem.forward[s] if problem.forward[s] else problem.memory
        count = int(min(fitting + extra, problem.memory, problem.num_micro_batches))
        ahead.insert(0, max(ahead[0], count))
        ready = max(ready, starts[s] + ahead[0] * problem.forward[s]) + problem.backward[s]
    return ahead


def _improve(problem: _Problem, choice: _Choice) -> _Choice:
    """Change one number of the choice at a time, until no change improves the cost."""
    best, improved = _simulate(problem, choice).cost, True
    while improved:
        improved = False
        for candidate in _neighbours(problem, choice):
            cost = _simulate(problem, candidate).cost
            # sums of times are rounded: without a margin, changes by rounding errors would repeat forever
            if cost < best and any(a < b - _ROUNDING * (1 + b) for a, b in zip(cost, best, strict=True)):
                best, choice, improved = cost, candidate, True
                break
    return choice


def _neighbours(problem: _Problem, choice: _Choice) -> Iterator[_Choice]:
    for s in range(problem.num_stages):
        for change in (1, -1):
            new_ahead = choice.ahead[s] + change
            before = tuple(max(forwards, new_ahead) for forwards in choice.ahead[:s])
            after = tuple(min(forwards, new_ahead) for forwards in choice.ahead[s + 1 :])
            ahead = (*before, new_ahead, *after)
            if min(ahead) >= 1 and all(forwards <= limit for forwards, limit in zip(ahead, choice.memory, strict=True)):
                yield choice._replace(ahead=ahead)
        for share in _SHARES:
            if share != choice.overrun[s]:
                yield choice._replace(overrun=_replace_at(choice.overrun, s, share))
        for change in (1, -1):
            memory = choice.memory[s] + change
            if choice.ahead[s] <= memory <= problem.memory:
                yield choice._replace(memory=_replace_at(choice.memory, s, memory))


def _replace_at(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _simulate(problem: _Problem, choice: _Choice) -> _Outcome:
    """Run every stage at its own pace, with weight passes where the choice allows them; return the cost and the orders."""
    num_stages, num_micro_batches = problem.num_stages, problem.num_micro_batches
    free_at, first_begin, peak = [0.0] * num_stages, [0.0] * num_stages, 0.0
    forward_ends: list[list[float]] = [[] for _ in range(num_stages)]  # per stage, when its forwards ended
    backward_ends: list[list[float]] = [[] for _ in range(num_stages)]  # per stage, when its backwards ended
    weight_counts = [0] * num_stages
    orders: list[list[str]] = [[] for _ in range(num_stages)]
    ready = list(reversed(range(num_stages)))
    while ready:
        stage = ready.pop()
        forwards, backwards, order, now, num_weights = (
            forward_ends[stage],
            backward_ends[stage],
            orders[stage],
            free_at[stage],
            weight_counts[stage],
        )
        previous_ends = forward_ends[stage - 1] if stage else None
        next_ends = backward_ends[stage + 1] if stage + 1 < num_stages else None
        min_wait = (1 - choice.overrun[stage]) * problem.weight[stage]
        memory_limit = choice.memory[stage] - 1 + _ROUNDING
        while (num_backwards := len(backwards)) < num_micro_batches:
            num_forwards = len(forwards)
            is_forward = num_forwards < min(num_micro_batches, choice.ahead[stage] + num_backwards)
            if is_forward:
                if previous_ends is not None and len(previous_ends) <= num_forwards:
                    break
                arrival = previous_ends[num_forwards] + problem.communication if previous_ends is not None else 0.0
            else:
                if next_ends is not None and len(next_ends) <= num_backwards:
                    break
                arrival = (
                    next_ends[num_backwards] + problem.communication
                    if next_ends is not None
                    else forwards[num_backwards]
                )
            while num_weights < num_backwards and (
                (
                    is_forward
                    and num_forwards - num_backwards + problem.kept_share * (num_backwards - num_weights) > memory_limit
                )
                or now + min_wait <= arrival
            ):
                now += problem.weight[stage]
                order.append(f"W{num_weights}")
                num_weights += 1
            now = max(now, arrival)
            if is_forward:
                first_begin[stage] = first_begin[stage] if num_forwards else now
                now += problem.forward[stage]
                forwards.append(now)
                order.append(f"F{num_forwards}")
                peak = max(
                    peak,
                    num_forwards + 1 - num_backwards + problem.kept_share * (num_backwards - num_weights),
                )
            else:
                now += problem.backward[stage]
                backwards.append(now)
                order.append(f"B{num_backwards}")
            # the neighbours may continue now
            ready += [
                neighbour
                for neighbour in (stage - 1, stage + 1)
                if 0 <= neighbour < num_stages and neighbour not in ready
            ]
        free_at[stage], weight_counts[stage] = now, num_weights
    for stage, order in enumerate(orders):
        order += [f"W{m}" for m in range(weight_counts[stage], num_micro_batches)]
    ends = [
        free_at[stage] + (num_micro_batches - weight_counts[stage]) * problem.weight[stage]
        for stage in range(num_stages)
    ]
    total, longest = max(ends), max(end - start for end, start in zip(ends, first_begin, strict=True))
    return _Outcome((total, longest, peak) if problem.synchronous else (longest, total, peak), orders)
