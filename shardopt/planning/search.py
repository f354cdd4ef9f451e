"""`plan`: every layout of a model on a machine, those that do not fit dropped, the rest ranked."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, Rules
from shardopt.engine.config import PLACEMENTS
from shardopt.partition import LayoutBytes
from shardopt.pipeline import schedules as known_schedules
from shardopt.planning.costs import Footprint, StepTime, Transfer, by_axis, footprint, step_time, traffic
from shardopt.planning.hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning.layout import CHUNKED, ON_A_V, Layout, PlacedModel, abstract_opt_state, place, state_layout_bytes
from shardopt.planning.models import Transformer, find_model
from shardopt.planning.searched import with_search_arguments
from shardopt.planning.workload import Workload

SCHEDULES = ("eager_one_f_one_b", "interleaved", "zero_bubble_lockstep", "zero_bubble_v", "search")
"""Of the others none is predicted to be faster than all of these with as much memory."""


class Prediction(NamedTuple):
    """A layout with its predictions.

    Attributes:
      layout: mesh sizes, placement, schedule, micro-batches.
      memory: bytes per device at the worst moment of a step, by purpose.
      transfers: what a device sends in a step.
      time: seconds of a step, by purpose.
      mfu: model flops utilisation, from 0 to 1.
      tokens_per_second: of all chips together.
      rules: the workload's tensor rules.
      expert_leaves: its leaves of experts.
    """

    layout: Layout
    memory: Footprint
    transfers: tuple[Transfer, ...]
    time: StepTime
    mfu: float
    tokens_per_second: float
    rules: Rules
    expert_leaves: tuple[str, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """Keyword arguments of `so.make_mesh`."""
        return self.layout.sizes

    @property
    def strategy(self) -> dict[str, Any]:
        """Keyword arguments of `so.hybrid`."""
        return self.layout.strategy(self.rules, self.expert_leaves)

    @property
    def wire_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by mesh axis."""
        return by_axis(self.transfers, self.mesh)

    def to_json(self) -> dict[str, object]:
        """Return plain numbers and words."""
        dtypes = {"gather_dtype": self.layout.gather_dtype, "scatter_dtype": self.layout.scatter_dtype}
        return {
            "layout": self.layout._asdict() | {name: None if one is None else str(one) for name, one in dtypes.items()},
            "memory": self.memory._asdict() | {"total": self.memory.total},
            "wire_bytes": self.wire_bytes,
            "seconds": self.time._asdict() | {"total": self.time.total},
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
        }


class Dropped(NamedTuple):
    """A layout that cannot be used.

    Attributes:
      layout: the layout.
      why: in words.
      missing_bytes: by how many bytes it does not fit; 0 where it is refused for another reason.
    """

    layout: Layout
    why: str
    missing_bytes: float


class Plans(NamedTuple):
    """What `plan` found; `print` shows a table.

    Attributes:
      ranked: the layouts that fit, the fastest first.
      dropped: those that do not, the nearest to fitting first.
      workload: the model.
      hardware: the chip.
      chips: how many.
      batch_size: rows of the global batch.
      limit: bytes of a chip's memory that may be used.
      state_layouts: what work on matrices sends under the fastest with either `opt_state_layout`, and which is recommended; None
        if the optimizer has none.
    """

    ranked: tuple[Prediction, ...]
    dropped: tuple[Dropped, ...]
    workload: Workload
    hardware: Hardware
    chips: int
    batch_size: int
    limit: float
    state_layouts: LayoutBytes | None = None

    @property
    def best(self) -> Prediction:
        """The fastest."""
        return self.ranked[0]

    def table(self, count: int = 10) -> str:
        """Return the fastest `count` as a table, and what was dropped."""
        return _table(self, count)

    def __str__(self) -> str:
        """Return the ten fastest as a table."""
        return self.table()


def plan(
    model: str | Transformer | Workload,
    *,
    hardware: str | Hardware,
    chips: int,
    batch_size: int,
    tx: optax.GradientTransformation | None = None,
    slices: int = 1,
    placements: Sequence[str] = ("ddp", "zero1", "zero2", "fsdp"),
    schedules: Sequence[str] = SCHEDULES,
    remat: Sequence[bool | str] | None = None,
    gather_dtype: DTypeLike | None = jnp.bfloat16,
    scatter_dtype: DTypeLike | None = None,
    headroom: float = 0.1,
) -> Plans:
    """Rank every way to lay a model out over chips by its predicted step time, without a device.

    Sizes of replica, data, tensor, pipeline, context and expert are combined with placement, schedule, micro-batches and
    rematerialisation. Memory and traffic are closed forms of what the strategies do (`footprint`, `traffic`), and time
    is a roofline of published peaks (`step_time`): right in order more than in amount, and fitted to no run.

    Args:
      model: a name such as "llama3-8b", a `so.planning.Transformer`, or a `Workload` from `so.planning.trace(...)`.
      hardware: a name such as "v5p", or a `so.planning.Hardware`.
      chips: how many there are.
      batch_size: rows (sequences) of the global batch.
      tx: any optax transformation, for the bytes of its state, and of its work on matrices; by default `optax.adamw`.
      slices: pods that the chips are spread over evenly, joined by the data-centre network.
      placements: among "ddp", "zero1", "zero2" and "fsdp".
      schedules: names of `so.schedules`, for layouts with a pipeline. "search" is `so.schedules.search` for the predicted times
        of passes and messages and the activations that fit beside all else, tried where another schedule is fastest or nearly
        fits. Schedules that do not run in lockstep are
        predicted as `so.schedules.send_ahead` makes them.
      remat: what backward passes may run again: False nothing, True all, "save:NAME,..." all but the values of these
        names. By default each of these, with the names of the model's blocks, those first that spare most flops a byte; the
        fastest is then what recomputes least of what fits. Names are not tried in pipelines, nor is offloading at all.
      gather_dtype: dtype in which fsdp gathers weights; None is their own.
      scatter_dtype: dtype in which all but ddp reduce-scatter gradients; None is that of the weights.
      headroom: share of a chip's memory left free, for what the formulas do not see.

    Returns:
      `Plans`: `.best` and `.ranked` have `.mesh` for `so.make_mesh(**...)` and `.strategy` for
      `so.hybrid(tx, mesh, model, **...)`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a name is unknown (the message lists the known ones), a number is out of range, or nothing fits: the
        message says by how many bytes, and what would help.

    Example:
      >>> import shardopt as so
      >>> plans = so.plan("llama3-8b", hardware="v5p", chips=64, batch_size=128)
      >>> plans.best.mesh["data"] * plans.best.mesh["tensor"] * plans.best.mesh["pipeline"]
      64
      >>> plans.best.memory.total < 95 * 2**30
      True
    """
    workload = model if isinstance(model, Workload) else find_model("plan", model).workload()
    chip = find_hardware("plan", hardware)
    _check(chips, batch_size, slices, placements, schedules, headroom)
    opt_state = abstract_opt_state(workload, tx)
    limit = chip.memory_bytes * (1 - headroom)
    fitting, dropped = [], []
    choices = workload.remat_choices() if remat is None else tuple(remat)
    for one in choices:
        workload.recompute(one)  # refuses names that blocks do not have
    dtypes = gather_dtype, scatter_dtype
    asked = {"hardware": chip, "batch_size": batch_size, "slices": slices}
    known: dict[object, PlacedModel] = {}

    def placed_as(layout: Layout) -> PlacedModel:
        """Schedule, micro-batches and remat do not move parameters."""
        key = layout.placement, *layout.sizes.items()
        if key not in known:
            known[key] = place(workload, layout, opt_state, tiled=chip.torus_dims > 0)
        return known[key]._replace(layout=layout)

    def rank(layouts: Iterable[Layout]) -> None:
        for layout in layouts:
            try:
                if layout.schedule == "search":
                    layout = with_search_arguments(placed_as(layout), **asked, limit=limit)
                found = predict(workload, layout, **asked, placed=placed_as(layout))
            except ValueError as error:  # a dim that tensor does not divide
                dropped.append(Dropped(layout, str(error).splitlines()[0].removeprefix("plan: "), 0.0))
                continue
            if found.memory.total > limit:
                missing = found.memory.total - limit
                dropped.append(Dropped(layout, f"needs {missing / 1e9:.2f} GB more than a chip has", missing))
            else:
                fitting.append(found)

    named = [name for name in schedules if name != "search"]
    rank(_layouts(workload, chips, batch_size, slices, placements, named or SCHEDULES[:1], choices, dtypes))
    # what is tried where it may help, rather than everywhere
    if "search" in schedules:
        rank(_to_search(fitting, dropped))
    rank(_gathered_once(fitting))
    if not named:
        fitting = [one for one in fitting if one.layout.schedule in (None, "search")]
    dropped.sort(key=lambda one: one.missing_bytes or float("inf"))
    fitting.sort(key=lambda one: (one.time.total, one.memory.total))
    plans = Plans(tuple(fitting), tuple(dropped), workload, chip, chips, batch_size, limit)
    if not fitting:
        raise ValueError(_nothing_fits(plans))
    if tx is None:
        return plans
    return plans._replace(state_layouts=state_layout_bytes(workload, plans.best.layout, tx))


_NAMES = tuple(
    name
    for name in known_schedules.__all__
    if name not in ("Schedule", "balance", "from_order", "from_ticks", "send_ahead")
)


_TRIES = 6


def _to_search(fitting: Sequence[Prediction], dropped: Sequence[Dropped]) -> list[Layout]:
    """Return the pipelines for which a schedule is searched: those that are fastest with another, or nearest to fitting."""
    short = sorted((one for one in dropped if one.missing_bytes), key=lambda one: one.missing_bytes)
    several = ([one.layout for one in some if one.layout.schedule] for some in (_fastest(fitting), short))
    bases = ([one._replace(schedule="search", chunks=1) for one in layouts] for layouts in several)
    return [layout for some in bases for layout in list(dict.fromkeys(some))[:_TRIES]]


def _gathered_once(fitting: Sequence[Prediction]) -> list[Layout]:
    """Return the fastest pipelines of fsdp, that gather blocks once a step."""
    layouts = [one.layout for one in _fastest(fitting) if one.layout.pipeline > 1 and one.layout.placement == "fsdp"]
    return [layout._replace(regather=False) for layout in layouts[:_TRIES]]


def _fastest(fitting: Sequence[Prediction]) -> list[Prediction]:
    return sorted(fitting, key=lambda one: one.time.total)


def _check(
    chips: int, batch_size: int, slices: int, placements: Sequence[str], schedules: Sequence[str], headroom: float
) -> None:
    for name, value in {"chips": chips, "batch_size": batch_size, "slices": slices}.items():
        check_count("plan", name, value)
    if chips % slices:
        what = f"{chips} chips cannot be spread evenly over {plural(slices, 'slice')}."
        raise ValueError(format_error("plan", what, fix=f"choose chips divisible by {slices}."))
    if unknown := [name for name in placements if name not in PLACEMENTS]:
        fix = f"use some of {', '.join(PLACEMENTS)}."
        raise ValueError(format_error("plan", f"unknown placement {', '.join(map(repr, unknown))}.", fix=fix))
    if unknown := [name for name in schedules if name not in _NAMES]:
        fix = f"use some of {', '.join(_NAMES)}."
        raise ValueError(format_error("plan", f"unknown schedule {', '.join(map(repr, unknown))}.", fix=fix))
    if not 0 <= headroom < 1:
        raise ValueError(f"plan: headroom must be at least 0 and below 1, got {headroom}.")


_MOST = 64
"""The largest tensor and pipeline sizes, and the most micro-batches, that are tried."""


def _layouts(
    workload: Workload,
    chips: int,
    batch_size: int,
    slices: int,
    placements: Sequence[str],
    schedules: Sequence[str],
    remat: Sequence[bool | str],
    dtypes: tuple[DTypeLike | None, DTypeLike | None],
) -> Iterator[Layout]:
    """Yield the layouts of `chips` chips whose sizes divide what they have to.

    Tensor and pipeline take powers of two (or the chips' own small divisors) up to 64, stages divide the blocks, replica
    is 1 or a copy per slice, data takes the rest. So does context, which divides the positions, where it can be of use: rows are
    fewer than chips, or longer than 16,384 positions. Expert takes what divides the experts. Micro-batches are powers of two that leave a device at least a row;
    a pipeline gets at least as many as stages.
    """
    # fsdp computes elementwise operations again: with all inner products saved it is what it is with remat=False
    idle = [one for one in remat if False in remat and isinstance(one, str) and not _recompute_flops(workload, one)]
    for tensor in _divisors(chips // slices, _MOST if any(workload.tensor_sums) else 1):
        stages = [n for n in _divisors(chips // slices // tensor, _MOST) if workload.num_blocks % n == 0]
        inner = itertools.product(stages, _contexts(workload, chips, batch_size), _experts(workload, chips))
        for pipeline, context, expert in inner:
            rest, left = divmod(chips // slices // tensor, pipeline * context * expert)
            if left or batch_size % (rest * slices * expert):
                continue
            rest *= slices
            micro = [
                m for m in _divisors(batch_size // rest // expert, _MOST, small=0) if pipeline == 1 or m >= pipeline
            ]
            for replica in sorted({1, slices}):
                if rest % replica:
                    continue
                data = rest // replica
                several = data * context * expert > 1
                whole = [choice for choice in remat if pipeline == 1 or isinstance(choice, bool)]
                ways = (placements if several else ("ddp",), schedules if pipeline > 1 else (None,), whole)
                for m, placement, schedule, again in itertools.product(micro, *ways):
                    if placement == "fsdp" and again in idle:
                        continue
                    gathered = dtypes[0] if placement == "fsdp" else None
                    scattered = dtypes[1] if placement != "ddp" else None
                    for chunks in _chunks(workload, pipeline, m, schedule):
                        sizes = replica, data, pipeline, tensor
                        yield Layout(
                            *sizes, placement, m, schedule, chunks, again, gathered, scattered, context, expert
                        )


_LONG = 16_384


def _contexts(workload: Workload, chips: int, batch_size: int) -> list[int]:
    if workload.attention is None or (batch_size >= chips and workload.tokens <= _LONG):
        return [1]
    return [n for n in _divisors(chips, _MOST, small=0) if workload.tokens % n == 0]


def _experts(workload: Workload, chips: int) -> list[int]:
    if workload.experts is None:
        return [1]
    return [n for n in _divisors(chips, _MOST, small=0) if workload.experts.num_experts % n == 0]


def _recompute_flops(workload: Workload, remat: bool | str) -> float:
    found = workload.recompute(remat)
    return 0.0 if found is None else found.flops


def _divisors(count: int, most: int, small: int = 8) -> list[int]:
    """Return the powers of two that divide a count, and its other divisors up to `small`."""
    return [n for n in range(1, min(count, most) + 1) if count % n == 0 and (n & (n - 1) == 0 or n <= small)]


def _chunks(workload: Workload, pipeline: int, micro_batches: int, schedule: str | None) -> list[int]:
    if schedule in ON_A_V:
        return [2] if workload.num_blocks % (2 * pipeline) == 0 else []
    if schedule not in CHUNKED:
        return [1]
    several = [2] if workload.num_blocks % (2 * pipeline) == 0 and micro_batches % pipeline == 0 else []
    return several if schedule in ("interleaved", "looped_breadth_first") else [1, *several]


def predict(
    workload: Workload,
    layout: Layout,
    *,
    hardware: Hardware,
    batch_size: int,
    tx: optax.GradientTransformation | None = None,
    opt_state: PyTree = None,
    slices: int = 1,
    placed: PlacedModel | None = None,
) -> Prediction:
    """Return what one layout is predicted to need.

    Args:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      hardware: the chip.
      batch_size: rows of the global batch.
      tx: the optimizer, for the bytes of its state; by default `optax.adamw`.
      opt_state: its abstract state, if it is known already.
      slices: pods that the chips are spread over evenly.
      placed: the layout's placement, if it is known already.

    Raises:
      ValueError: if a tensor rule does not divide the parameters, the schedule refuses the sizes, or `layout.remat` names
        values that blocks do not have, or names any in a pipeline.

    Example:
      >>> from shardopt.planning import HARDWARE, Layout, find_model
      >>> work = find_model("plan", "llama3-8b").workload()
      >>> found = predict(work, Layout(data=64, remat=True), hardware=HARDWARE["v5p"], batch_size=128)
      >>> round(found.memory.params / 1e9, 3), 0.5 < found.mfu < 1
      (0.502, True)
    """
    if isinstance(layout.remat, str) and layout.pipeline > 1:
        what = f"what remat={layout.remat!r} keeps in a pipeline is not predicted."
        raise ValueError(format_error("plan", what, fix="use remat=True or False there."))
    if placed is None:
        state = abstract_opt_state(workload, tx) if opt_state is None else opt_state
        placed = place(workload, layout, state, tiled=hardware.torus_dims > 0)
    sent = traffic(placed, batch_size=batch_size)
    time = step_time(placed, sent, hardware, batch_size=batch_size, slices=slices)
    return Prediction(
        layout=layout,
        memory=footprint(placed, batch_size=batch_size),
        transfers=sent,
        time=time,
        mfu=workload.model_flops * batch_size / (time.total * layout.num_chips * hardware.flops),
        tokens_per_second=workload.tokens * batch_size / time.total,
        rules=workload.rules,
        expert_leaves=() if workload.experts is None else workload.experts.leaves,
    )


def _nothing_fits(plans: Plans) -> str:
    chip, limit = plans.hardware, plans.limit
    rows = plural(plans.batch_size, "row")
    who = f"{plans.workload.name} on {plural(plans.chips, 'chip')} of {chip.name} with {rows} per batch"
    short = [one for one in plans.dropped if one.missing_bytes]
    if not short:
        fix = f"choose a batch_size that {plans.chips} chips divide evenly, or other chips."
        return format_error("plan", f"{who}: no layout divides evenly.", [one.why for one in plans.dropped], fix)
    lines = [f"{one.layout}: {one.missing_bytes:,.0f} bytes too many" for one in short[:3]]
    need = limit + short[0].missing_bytes
    share = limit / chip.memory_bytes
    larger = sorted((one.memory_bytes, name) for name, one in HARDWARE.items() if one.memory_bytes * share >= need)
    other = f", chips with more memory ({larger[0][1]})" if larger else ""
    fix = f"use about {-(-plans.chips * need // limit):.0f} chips or more{other}, or fewer rows per batch."
    return format_error("plan", f"{who}: nothing fits into {limit:,.0f} bytes per chip; the nearest are:", lines, fix)


def _table(plans: Plans, count: int) -> str:
    shown = plans.ranked[:count]
    columns = ["context"] * any(one.layout.context > 1 for one in shown)
    columns += ["expert"] * any(one.layout.expert > 1 for one in shown)
    head = [
        "layout",
        "memory",
        "step",
        "MFU",
        "compute",
        "tensor",
        "data",
        "pipeline",
        "bubble",
        *columns,
    ]
    rows = [head, *(_row(one, columns) for one in shown)]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
    model, rows_text = plans.workload, plural(plans.batch_size, "row")
    machine = f"{plural(plans.chips, 'chip')} of {plans.hardware.name}"
    rest = len(plans.ranked) - count
    tight = sum(one.missing_bytes > 0 for one in plans.dropped)
    uneven = len(plans.dropped) - tight
    return "\n".join(
        [
            f"{model.name} ({_count(model.num_parameters)} parameters) on {machine}, {rows_text} per batch",
            *lines,
            *([f"... and {rest} more that fit"] if rest > 0 else []),
            f"{plural(tight, 'layout')} dropped for memory ({plans.limit / 1e9:.1f} GB per chip may be used)",
            *([f"{plural(uneven, 'layout')} dropped for sizes that do not divide"] if uneven else []),
            *([] if plans.state_layouts is None else [str(plans.state_layouts)]),
        ]
    )


def _row(one: Prediction, columns: Sequence[str]) -> list[str]:
    time, memory = one.time, one.memory.total
    more = [getattr(time, name) for name in columns]
    parts = (time.compute, time.tensor, time.data, time.pipeline, time.bubble, *more)
    return [
        str(one.layout),
        f"{memory / 1e9:.1f} GB" if memory >= 1e9 else f"{memory / 1e6:.1f} MB",
        _duration(time.total),
        f"{one.mfu:.1%}",
        *(f"{part / time.total:.0%}" for part in parts),
    ]


def _count(number: int) -> str:
    """Return `8.03 billion`, `124 million` or the number itself."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def _duration(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"
