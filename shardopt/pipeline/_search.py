"""`search`: find a schedule for measured times and a memory limit.

Each candidate is valid by construction.
"""

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
      forward: time of a stage's forward of a micro-batch, or a sequence [S] of times if the stages
        differ.
      backward: time of the gradient of its input: a number or a sequence [S].
      weight: time of the gradient of its weights: a number or a sequence [S].
      communication: time of a message to the next stage. Both stages can run passes that do not
        need the message meanwhile.
      memory: the most activations of a micro-batch on a stage, at least 1; by default unlimited.
      memory_after_backward: the share of an activation that is stored from its backward to its
        weight pass, from 0 to 1. shardopt stores all of it, and `peak_activations` counts so.
        Megatron-LM stores 32 h of 34 h + 5 a s bytes a token.
      synchronous: the time to minimise. True: `table_time`, since a step of shardopt ends on all
        stages together. False: the longest of `stage_times`, as in papers whose stages begin the
        next step at once. Equal schedules are compared by the other time, then by the number of
        activations.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer, or a time or the memory is not a number.
      ValueError: if a size is below 1, there are not as many times as stages, a time is negative,
        or the memory is out of range.

    Example:
      >>> import shardopt as so
      >>> times = {"forward": 2.0, "backward": 3.0, "weight": 1.0, "communication": 0.5}
      >>> searched = so.schedules.search(4, 12, **times, memory=6)
      >>> known = so.schedules.zero_bubble(4, 12)
      >>> round(searched.bubble_rate(**times), 3), round(known.bubble_rate(**times), 3)
      (0.153, 0.2)

    Stage s runs a_s forwards, then a backward and a forward in turn, as 1F1B does. a_s never grows
    from stage to stage, so no stage waits forever. Weight passes run where the stage would wait for
    a message, where its memory is full, and at the end. The search chooses three numbers for each
    stage: a_s, its share of the memory, and how far a weight pass may overrun a wait.

    The search begins with the a_s of ZB-H1, the a_s of ZB-H2, and with as many forwards as fit
    before the first backward can begin. It takes the best of these, and changes one number at a
    time as long as the time decreases. The same arguments give the same schedule. 16 stages and 64
    micro-batches take well below a second.

    **Bubble**: never above `zero_bubble` if S activations are allowed, and never above
    `zero_bubble_2` if 2 S - 1 are allowed. ZB-1p and ZB-2p of the paper are this search with
    `memory` S and 2 S, their `memory_after_backward`, and `synchronous=False`. In lockstep no
    schedule is below `zero_bubble_lockstep`: this search is for stages at their own pace.

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
        num_stages,
        num_micro_batches,
        F,
        B,
        W,
        sending,
        max_activations,
        memory_after_backward,
        synchronous,
    )
    best = _improve(
        problem, min(_initial_choices(problem), key=lambda choice: _simulate(problem, choice).cost)
    )
    searched = from_order(
        [" ".join(order) for order in _simulate(problem, best).orders], name="search"
    )
    known_schedules = [
        builder(num_stages, num_micro_batches) for builder in (zero_bubble, zero_bubble_2)
    ]

    def cost(schedule: Schedule) -> tuple[float, float]:
        times = pass_times(schedule.ticks, forward=F, backward=B, weight=W, communication=sending)
        total, longest = table_time(schedule.ticks, times), max(stage_times(schedule.ticks, times))
        return (total, longest) if synchronous else (longest, total)

    return min(
        [
            searched,
            *(schedule for schedule in known_schedules if schedule.num_slots <= max_activations),
        ],
        key=cost,
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
      overrun: the share of a weight pass that may run after the awaited message has arrived. With
        1, weight passes follow their backwards at once.
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
    zero_bubbles = [
        [num_stages - s for s in range(num_stages)],
        [2 * (num_stages - s) - 1 for s in range(num_stages)],
    ]
    for ahead in [
        *zero_bubbles,
        _forwards_that_fit(problem, extra=0),
        _forwards_that_fit(problem, extra=1),
    ]:
        bounded = tuple(max(1, min(forwards, max_activations)) for forwards in ahead)
        for overrun in _SHARES:
            for memory in {problem.memory: None, float(max(bounded)): None}:
                yield _Choice(bounded, (memory,) * num_stages, (overrun,) * num_stages)


def _forwards_that_fit(problem: _Problem, extra: int) -> list[int]:
    """Return [S], how many forwards each stage can run until its first backward can begin, plus
    `extra`.
    """
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
            # sums of times are rounded: without a margin, changes by rounding errors would repeat
            # forever
            if cost < best and any(
                a < b - _ROUNDING * (1 + b) for a, b in zip(cost, best, strict=True)
            ):
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
            if min(ahead) >= 1 and all(
                forwards <= limit for forwards, limit in zip(ahead, choice.memory, strict=True)
            ):
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
    """Run every stage at its own pace, with weight passes where the choice allows them.

    Return the cost and the orders.
    """
    stages = [_Stage(index, choice) for index in range(problem.num_stages)]
    ready = list(reversed(range(problem.num_stages)))
    while ready:
        stage = ready.pop()
        while _run_next_pass(problem, stages, stages[stage]):
            # the neighbours may continue now
            ready += [
                neighbour
                for neighbour in (stage - 1, stage + 1)
                if 0 <= neighbour < problem.num_stages and neighbour not in ready
            ]
    for stage in stages:
        stage.order += [f"W{m}" for m in range(stage.num_weights, problem.num_micro_batches)]
    ends = [
        stage.now + (problem.num_micro_batches - stage.num_weights) * problem.weight[stage.index]
        for stage in stages
    ]
    total, longest = (
        max(ends),
        max(end - stage.begin for end, stage in zip(ends, stages, strict=True)),
    )
    peak = max(stage.peak for stage in stages)
    cost = (total, longest, peak) if problem.synchronous else (longest, total, peak)
    return _Outcome(cost, [stage.order for stage in stages])


class _Stage:
    """A stage in a simulation.

    Attributes:
      now: when its last pass ended.
      begin: when its first forward began.
      peak: the most activations that it stored.
      forward_ends: when each of its forwards ended.
      backward_ends: when each of its backwards ended.
      num_weights: how many weight passes it ran.
      order: its passes, as `from_order` takes them.
    """

    def __init__(self, index: int, choice: _Choice):
        self.index, self.ahead, self.overrun = index, choice.ahead[index], choice.overrun[index]
        self.memory_limit = choice.memory[index] - 1 + _ROUNDING
        self.now, self.begin, self.peak, self.num_weights = 0.0, 0.0, 0.0, 0
        self.forward_ends: list[float] = []
        self.backward_ends: list[float] = []
        self.order: list[str] = []

    def activations(self, problem: _Problem) -> float:
        """Return how many activations are stored."""
        num_backwards = len(self.backward_ends)
        return (
            len(self.forward_ends)
            - num_backwards
            + problem.kept_share * (num_backwards - self.num_weights)
        )

    def run_weight(self, problem: _Problem) -> None:
        """Run the next weight pass."""
        self.now += problem.weight[self.index]
        self.order.append(f"W{self.num_weights}")
        self.num_weights += 1

    def run_weights(self, problem: _Problem, arrival: float, *, is_forward: bool) -> None:
        """Run weight passes while the message of the next pass is awaited, or until a forward has
        memory.
        """
        min_wait = (1 - self.overrun) * problem.weight[self.index]
        while self.num_weights < len(self.backward_ends) and (
            (is_forward and self.activations(problem) > self.memory_limit)
            or self.now + min_wait <= arrival
        ):
            self.run_weight(problem)


def _run_next_pass(problem: _Problem, stages: list[_Stage], stage: _Stage) -> bool:
    """Run the next forward or backward of a stage, after weight passes that fit.

    False if it has no message yet, or is done.
    """
    num_forwards, num_backwards = len(stage.forward_ends), len(stage.backward_ends)
    if num_backwards == problem.num_micro_batches:
        return False
    is_forward = num_forwards < min(problem.num_micro_batches, stage.ahead + num_backwards)
    arrival = _arrival(problem, stages, stage, is_forward=is_forward)
    if arrival is None:
        return False
    stage.run_weights(problem, arrival, is_forward=is_forward)
    stage.now = max(stage.now, arrival)
    if is_forward:
        stage.begin = stage.begin if num_forwards else stage.now
        stage.now += problem.forward[stage.index]
        stage.forward_ends.append(stage.now)
        stage.order.append(f"F{num_forwards}")
        stage.peak = max(stage.peak, stage.activations(problem))
    else:
        stage.now += problem.backward[stage.index]
        stage.backward_ends.append(stage.now)
        stage.order.append(f"B{num_backwards}")
    return True


def _arrival(
    problem: _Problem, stages: list[_Stage], stage: _Stage, *, is_forward: bool
) -> float | None:
    """Return when the message of the next pass arrives; None if it was not sent yet."""
    if is_forward:
        number, sent = len(stage.forward_ends), stages[stage.index - 1].forward_ends
        if stage.index == 0:
            return 0.0
    else:
        number, is_last = len(stage.backward_ends), stage.index + 1 == problem.num_stages
        if is_last:  # the backward follows the forward of the same micro-batch
            return stage.forward_ends[number]
        sent = stages[stage.index + 1].backward_ends
    return sent[number] + problem.communication if number < len(sent) else None
