"""`search`: a schedule for measured times and a bound on memory, valid by construction."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardopt.core.arguments import check_number
from shardopt.pipeline.check import check_sizes
from shardopt.pipeline.construct import from_order
from shardopt.pipeline.schedule import Schedule
from shardopt.pipeline.timing import Times, pass_times, read_times, stage_times, table_time
from shardopt.pipeline.zero_bubbles import zero_bubble, zero_bubble_2

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROUNDING = 1e-9


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
    """Find a schedule with little bubble for these times that keeps no more than so many activations.

    Stage s runs a_s forwards, then a backward and a forward in turn, as 1F1B does; a_s never grows from stage to stage,
    which is all it takes for no stage to wait for ever. Its weight passes go where it would wait for a message, where
    the memory is full, and to the end. Chosen are, for each stage, a_s, its share of the memory, and by how much a weight
    pass may overrun a wait. The search begins with the a_s of ZB-H1 and of ZB-H2 and with as many forwards as fit
    before the first backward comes, takes the best of these, and changes one number at a time for as long as that
    helps. The same arguments give the same schedule; 16 stages and 64 micro-batches take well below a second.

    **Bubble**: never above that of `zero_bubble`, where S activations are allowed, nor of `zero_bubble_2` where 2 S - 1
    are. The paper's ZB-1p and ZB-2p are this with `memory` S and 2 S, its `memory_after_backward` and not
    `synchronous`. In lockstep no schedule is below `zero_bubble_lockstep`: this is for stages at their own pace.

    **Memory**: at most `memory` activations on every stage.

    Args:
      num_stages: S.
      num_micro_batches: M.
      forward: time of a stage's forward of a micro-batch; or a sequence [S] of one a stage, where they differ.
      backward: time of the gradient of its input; likewise.
      weight: time of the gradient of its weights; likewise.
      communication: time that a message takes to the next stage, in which both go on with what does not need it.
      memory: the most activations of a micro-batch on a stage, at least 1; by default no bound.
      memory_after_backward: what remains of an activation from its backward to its weight pass, from 0 to 1. shardopt
        keeps all of it, and `peak_activations` counts so; Megatron-LM keeps 32 h of 34 h + 5 a s bytes a token.
      synchronous: what is least. True: `table_time`, as a step of shardopt ends on all stages together. False: the
        longest of `stage_times`, as papers count whose stages begin the next step at once. Of equal ones that with the
        least of the other, then with the fewest activations.

    Returns:
      A `Schedule`.

    Raises:
      TypeError: if a size is not an integer, or a time or the memory not a number.
      ValueError: if a size is below 1, there are not as many times as stages, a time is negative, or the memory is out of
        range.

    Example:
      >>> import shardopt as so
      >>> times = {"forward": 2.0, "backward": 3.0, "weight": 1.0, "communication": 0.5}
      >>> found = so.schedules.search(4, 12, **times, memory=6)
      >>> known = so.schedules.zero_bubble(4, 12)
      >>> round(found.bubble_rate(**times), 3), round(known.bubble_rate(**times), 3)
      (0.153, 0.2)

    References:
      Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3.1 (the heuristic), table 5.
    """
    check_sizes("search", num_stages=num_stages, num_micro_batches=num_micro_batches)
    if memory is not None:
        check_number("search", "memory", memory, least=1)
    check_number("search", "memory_after_backward", memory_after_backward, below=math.nextafter(1, 2))
    F = read_times("search", "forward", forward, num_stages, "stage")
    B = read_times("search", "backward", backward, num_stages, "stage")
    W = read_times("search", "weight", weight, num_stages, "stage")
    (sending,) = read_times("search", "communication", communication, 1, "message")
    most = num_micro_batches if memory is None else min(memory, num_micro_batches)
    task = _Task(num_stages, num_micro_batches, F, B, W, sending, most, memory_after_backward, synchronous)
    best = _improve(task, min(_starts(task), key=lambda choice: _run(task, choice).cost))
    found = from_order([" ".join(order) for order in _run(task, best).orders], name="search")
    known = [make(num_stages, num_micro_batches) for make in (zero_bubble, zero_bubble_2)]

    def cost(schedule: Schedule) -> tuple[float, float]:
        times = pass_times("search", schedule.ticks, forward=F, backward=B, weight=W, communication=sending)
        total, longest = table_time(schedule.ticks, times), max(stage_times(schedule.ticks, times))
        return (total, longest) if synchronous else (longest, total)

    return min([found, *(one for one in known if one.num_slots <= most)], key=cost)


class _Task(NamedTuple):
    """What is asked for; `remains` is `memory_after_backward`."""

    num_stages: int
    num_micro_batches: int
    forward: list[float]
    backward: list[float]
    weight: list[float]
    communication: float
    memory: float
    remains: float
    synchronous: bool


class _Choice(NamedTuple):
    """What can be chosen for each stage, [S].

    Attributes:
      ahead: forwards before the first backward; never more than on the stage before.
      memory: activations that it keeps at most, at least `ahead`.
      overrun: what share of a weight pass may come after the message that the stage waits for; with 1 weight passes
        follow their backwards at once.
    """

    ahead: tuple[int, ...]
    memory: tuple[float, ...]
    overrun: tuple[float, ...]


class _Outcome(NamedTuple):
    cost: tuple[float, float, float]
    orders: list[list[str]]


def _starts(task: _Task) -> Iterator[_Choice]:
    """Yield the choices to begin with."""
    size, most = task.num_stages, int(task.memory)
    handmade = [[size - s for s in range(size)], [2 * (size - s) - 1 for s in range(size)]]
    for ahead in [*handmade, _that_fit(task, over=0), _that_fit(task, over=1)]:
        each = tuple(max(1, min(n, most)) for n in ahead)
        for overrun in _SHARES:
            for memory in {task.memory: None, float(max(each)): None}:
                yield _Choice(each, (memory,) * size, (overrun,) * size)


def _that_fit(task: _Task, over: int) -> list[int]:
    """Return how many forwards each stage can run until its first backward can begin, and so many more."""
    starts = [0.0]
    for one in task.forward[:-1]:
        starts.append(starts[-1] + one + task.communication)
    ahead, ready = [1], starts[-1] + task.forward[-1] + task.backward[-1]
    for s in reversed(range(task.num_stages - 1)):
        ready += task.communication
        room = (ready - starts[s]) / task.forward[s] if task.forward[s] else task.memory
        count = int(min(room + over, task.memory, task.num_micro_batches))
        ahead.insert(0, max(ahead[0], count))
        ready = max(ready, starts[s] + ahead[0] * task.forward[s]) + task.backward[s]
    return ahead


def _improve(task: _Task, choice: _Choice) -> _Choice:
    """Change one number at a time for as long as that helps."""
    best, again = _run(task, choice).cost, True
    while again:
        again = False
        for other in _neighbours(task, choice):
            cost = _run(task, other).cost
            # sums of times are rounded: what is better only by that would go on for ever
            if cost < best and any(a < b - _ROUNDING * (1 + b) for a, b in zip(cost, best, strict=True)):
                best, choice, again = cost, other, True
                break
    return choice


def _neighbours(task: _Task, choice: _Choice) -> Iterator[_Choice]:
    for s in range(task.num_stages):
        for change in (1, -1):
            count = choice.ahead[s] + change
            before = tuple(max(n, count) for n in choice.ahead[:s])
            after = tuple(min(n, count) for n in choice.ahead[s + 1 :])
            ahead = (*before, count, *after)
            if min(ahead) >= 1 and all(n <= most for n, most in zip(ahead, choice.memory, strict=True)):
                yield choice._replace(ahead=ahead)
        for share in _SHARES:
            if share != choice.overrun[s]:
                yield choice._replace(overrun=_with(choice.overrun, s, share))
        for change in (1, -1):
            memory = choice.memory[s] + change
            if choice.ahead[s] <= memory <= task.memory:
                yield choice._replace(memory=_with(choice.memory, s, memory))


def _with(values: tuple[float, ...], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _run(task: _Task, choice: _Choice) -> _Outcome:
    """Run every stage at its own pace, and put weight passes where the choice says; each stage goes on while it can."""
    size, count = task.num_stages, task.num_micro_batches
    free, begun, peak = [0.0] * size, [0.0] * size, 0.0
    sent: list[list[float]] = [[] for _ in range(size)]  # when its forwards have ended
    returned: list[list[float]] = [[] for _ in range(size)]  # when its backwards have
    weights = [0] * size
    orders: list[list[str]] = [[] for _ in range(size)]
    ready = list(reversed(range(size)))
    while ready:
        s = ready.pop()
        forwards, backwards, order, now, w = sent[s], returned[s], orders[s], free[s], weights[s]
        before = sent[s - 1] if s else None
        after = returned[s + 1] if s + 1 < size else None
        least = (1 - choice.overrun[s]) * task.weight[s]
        room = choice.memory[s] - 1 + _ROUNDING
        while (b := len(backwards)) < count:
            f = len(forwards)
            going = f < min(count, choice.ahead[s] + b)
            if going:
                if before is not None and len(before) <= f:
                    break
                comes = before[f] + task.communication if before is not None else 0.0
            else:
                if after is not None and len(after) <= b:
                    break
                comes = after[b] + task.communication if after is not None else forwards[b]
            while w < b and ((going and f - b + task.remains * (b - w) > room) or now + least <= comes):
                now += task.weight[s]
                order.append(f"W{w}")
                w += 1
            now = max(now, comes)
            if going:
                begun[s] = begun[s] if f else now
                now += task.forward[s]
                forwards.append(now)
                order.append(f"F{f}")
                peak = max(peak, f + 1 - b + task.remains * (b - w))
            else:
                now += task.backward[s]
                backwards.append(now)
                order.append(f"B{b}")
            # the neighbours may go on
            ready += [n for n in (s - 1, s + 1) if 0 <= n < size and n not in ready]
        free[s], weights[s] = now, w
    for s, order in enumerate(orders):
        order += [f"W{m}" for m in range(weights[s], count)]
    ends = [free[s] + (count - weights[s]) * task.weight[s] for s in range(size)]
    total, longest = max(ends), max(end - start for end, start in zip(ends, begun, strict=True))
    return _Outcome((total, longest, peak) if task.synchronous else (longest, total, peak), orders)
