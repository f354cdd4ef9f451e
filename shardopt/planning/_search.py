"""`plan`: rank all layouts of a model on a machine by predicted step time, and drop layouts that do
not fit.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardopt.config._config import PLACEMENTS
from shardopt.core import (
    PyTree,
    Rules,
    calling,
    check_count,
    error_text,
    format_error,
    plural,
    quoted,
    value_error,
)
from shardopt.core._tables import aligned
from shardopt.pipeline import schedules as known_schedules
from shardopt.pipeline._kinds import KINDS, ScheduleKind
from shardopt.planning._costs import (
    Footprint,
    StepTime,
    StepTransfer,
    by_axis,
    footprint,
    seconds,
    step_time,
    traffic,
)
from shardopt.planning._hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning._layout import ParallelLayout, PlacedModel, abstract_opt_state, place
from shardopt.planning._models import Transformer, find_model
from shardopt.planning._workload import Workload

SCHEDULES = (
    "eager_one_f_one_b",
    "interleaved",
    "zero_bubble_lockstep",
    "zero_bubble_2",
    "zero_bubble_v",
)
"""No other schedule is predicted to be faster than all of these with the same memory."""


MEASURED = {
    "v5e": (6, 0.91, 1.17, 1.76),
    "v5p": (17, 0.78, 1.09, 1.22),
    "v6e": (16, 1.52, 1.62, 1.7),
    "tpu7x": (4, 1.4, 1.42, 1.79),
    "h100": (12, 1.54, 1.62, 1.97),
}
"""Chip -> public runs of dense models in bfloat16, and how many times as long as predicted their steps
took: shortest, median, longest. `docs/notes/measured_runs.md` has them.
"""


def known_error(chip: str) -> str:
    """Return how far measured runs were from predictions, as a sentence."""
    if chip in MEASURED:
        runs, shortest, median, longest = MEASURED[chip]
        seconds = f"{runs} measured runs on {chip} took {shortest} to {longest} (median {median})"
    else:
        _, shortest, _, longest = zip(*MEASURED.values(), strict=True)
        seconds = (
            "on no chip of this name were steps measured; on others they took"
            f" {min(shortest)} to {max(longest)}"
        )
    return (
        f"all numbers are estimated: {seconds} times as long\n"
        "memory: 70B on v5e took 15 to 17% more"
    )


class Prediction(NamedTuple):
    """A layout and its predicted memory, traffic and time.

    Attributes:
      layout: mesh sizes, placement, schedule, micro-batches.
      memory: bytes per device at the worst moment of a step, by purpose.
      transfers: collectives of a step.
      time: seconds of a step, by cause.
      mfu: model flops utilisation, from 0 to 1.
      tokens_per_second: tokens per second of all chips together.
      rules: the rules of the workload.
      transfer_seconds: seconds of each of the transfers, also of transfers that overlap with
        computation.
    """

    layout: ParallelLayout
    memory: Footprint
    transfers: tuple[StepTransfer, ...]
    time: StepTime
    mfu: float
    tokens_per_second: float
    rules: Rules
    transfer_seconds: tuple[float, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """Keyword arguments of `so.make_mesh`."""
        return self.layout.sizes

    @property
    def strategy(self) -> dict[str, Any]:
        """Keyword arguments of `so.hybrid`."""
        return self.layout.strategy(self.rules)

    @property
    def wire_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by mesh axis."""
        return by_axis(self.transfers, self.mesh)


class Dropped(NamedTuple):
    """A layout that cannot be used.

    Attributes:
      layout: the layout.
      why: the reason, as a sentence.
      missing_bytes: bytes by which it exceeds the memory; 0 if it is dropped for another reason.
    """

    layout: ParallelLayout
    why: str
    missing_bytes: float


class Plans(NamedTuple):
    """The result of `plan`; `print` shows a table.

    Attributes:
      ranked: the layouts that fit, the fastest first.
      dropped: the layouts that do not fit, the smallest `missing_bytes` first.
      workload: the model.
      hardware: the chip.
      chips: number of chips.
      batch_size: rows of the global batch.
      limit: bytes of a device's memory that may be used.
    """

    ranked: tuple[Prediction, ...]
    dropped: tuple[Dropped, ...]
    workload: Workload
    hardware: Hardware
    chips: int
    batch_size: int
    limit: float

    @property
    def best(self) -> Prediction:
        """The fastest layout."""
        return self.ranked[0]

    @property
    def devices(self) -> int:
        """The number of devices of the mesh: a chip of tpu7x shows two."""
        return self.chips * self.hardware.devices

    def table(self, count: int = 10) -> str:
        """Return a table of the fastest `count` layouts, and how many were dropped."""
        return _table(self, count)

    def __str__(self) -> str:
        """Return a table of the ten fastest layouts."""
        return self.table()


@calling("plan")
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
    """Rank all ways to distribute a model over chips by their predicted step time.

    No device is needed.

    Args:
      model: a name such as "llama3-8b", a `so.planning.Transformer`, or a `Workload` from
        `so.planning.trace(...)`.
      hardware: a name such as "v5p", or a `so.planning.Hardware`.
      chips: number of chips. A chip is one device, but a tpu7x is two: the meshes for 8 chips have
        16 devices, each with half of a chip's memory, arithmetic and links.
      batch_size: rows (sequences) of the global batch.
      tx: any optax transformation, for the bytes of its state; by default `optax.adamw`.
      slices: number of pods, joined by the data-centre network; each has an equal number of chips.
      placements: placements to try, among "ddp", "zero1", "zero2" and "fsdp".
      schedules: names of `so.schedules` to try, for layouts with a pipeline. Schedules
        that do not run in lockstep are predicted with `so.schedules.send_ahead`.
      remat: values of `remat` to try: False recomputes nothing, True recomputes all,
        "save:NAME,..." saves the values of these names. By default all three are tried. Names of
        the model's blocks that avoid most flops per byte are saved first, so the fastest layout is
        the one that fits and recomputes least. Names are not tried in pipelines. Offloading is
        never tried.
      gather_dtype: dtype of the all-gathers of weights under fsdp; None is the dtype of the
        weights.
      scatter_dtype: dtype of the reduce-scatters of gradients, except under ddp; None is the dtype
        of the weights.
      headroom: share of a chip's memory that stays free for costs that the formulas do not count.

    Returns:
      `Plans`: `.best` and `.ranked` have `.mesh` for `so.make_mesh(**...)` and `.strategy` for
      `so.hybrid(tx, mesh, model, **...)`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a name is unknown (the message lists the known names), or a number is out of
        range.
      ValueError: if nothing fits; the message gives the missing bytes and a remedy.

    Example:
      >>> import shardopt as so
      >>> plans = so.plan("llama3-8b", hardware="v5p", chips=64, batch_size=128)
      >>> plans.best.mesh["data"] * plans.best.mesh["tensor"] * plans.best.mesh["pipeline"]
      64
      >>> plans.best.memory.total < 95 * 2**30
      True

    Note:
      Sizes of replica, data, tensor, pipeline, context and expert are combined with placement,
      schedule, micro-batches and rematerialisation. Memory and traffic are closed forms of the
      strategies' own rules (`footprint`, `traffic`). Time is a roofline of published peaks
      (`step_time`), not fitted to any run. Trust the order of the layouts more than the seconds.
    """
    workload = model if isinstance(model, Workload) else find_model(model).workload()
    chip = find_hardware(hardware)
    device = chip.per_device()
    _check(chips, batch_size, slices, placements, schedules, headroom)
    opt_state = abstract_opt_state(workload, tx)
    limit = device.memory_bytes * (1 - headroom)
    remat_choices = workload.remat_choices() if remat is None else tuple(remat)
    for choice in remat_choices:
        workload.recompute(choice)  # raises for names that blocks do not have
    dtypes = gather_dtype, scatter_dtype
    machine = {"hardware": device, "batch_size": batch_size, "slices": slices}
    ranking = _Ranking(workload, opt_state, machine, limit)
    space = _Space(
        workload,
        chips * chip.devices,
        batch_size,
        slices,
        placements,
        schedules,
        remat_choices,
        dtypes,
    )
    contexts = space.contexts()
    ranking.add(space.layouts(contexts))
    fitting = ranking.fitting
    if not fitting:
        ranking.add(space.layouts(space.other_contexts(contexts)))
    dropped = ranking.dropped
    dropped.sort(key=lambda entry: entry.missing_bytes or float("inf"))
    fitting.sort(key=lambda prediction: (prediction.time.total, prediction.memory.total))
    plans = Plans(tuple(fitting), tuple(dropped), workload, chip, chips, batch_size, limit)
    if not fitting:
        raise ValueError(_nothing_fits(plans))
    return plans


@dataclass
class _Ranking:
    """The layouts that were tried.

    Attributes:
      workload: the model.
      opt_state: the abstract optimizer state.
      machine: the arguments `hardware`, `batch_size` and `slices` of `predict`.
      limit: bytes of a device's memory that may be used.
      fitting: the predictions of the layouts that fit.
      dropped: the layouts that cannot be used.
      placed: placed models. Layouts that differ in schedule, micro-batches and remat alone have
        equal parameters, and share one.
    """

    workload: Workload
    opt_state: PyTree
    machine: dict[str, Any]
    limit: float
    fitting: list[Prediction] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    placed: dict[object, PlacedModel] = field(default_factory=dict)

    def add(self, layouts: Iterable[ParallelLayout]) -> None:
        """Predict layouts, and drop layouts that cannot be used."""
        for layout in layouts:
            try:
                placed = self._placed(layout)
                prediction = predict(self.workload, layout, **self.machine, placed=placed)
            except ValueError as error:  # a dim that tensor does not divide
                reason = str(error).splitlines()[0].removeprefix("plan: ")
                self.dropped.append(Dropped(layout, reason, 0.0))
                continue
            missing = prediction.memory.total - self.limit
            if missing > 0:
                reason = f"needs {missing / 1e9:.2f} GB more than a device has"
                self.dropped.append(Dropped(prediction.layout, reason, missing))
            else:
                self.fitting.append(prediction)

    def _placed(self, layout: ParallelLayout) -> PlacedModel:
        key = layout.placement, *layout.sizes.items()
        if key not in self.placed:
            tiled = self.machine["hardware"].torus_dims > 0
            self.placed[key] = place(self.workload, layout, self.opt_state, tiled=tiled)
        return self.placed[key]._replace(layout=layout)


_SCHEDULE_NAMES = tuple(
    name
    for name in known_schedules.__all__
    if name not in ("Schedule", "balance", "from_order", "from_ticks", "send_ahead")
)


def _check(
    chips: int,
    batch_size: int,
    slices: int,
    placements: Sequence[str],
    schedules: Sequence[str],
    headroom: float,
) -> None:
    for name, value in {"chips": chips, "batch_size": batch_size, "slices": slices}.items():
        check_count(name, value)
    if chips % slices:
        problem = f"{chips} chips cannot be spread evenly over {plural(slices, 'slice')}."
        raise value_error(problem, fix=f"choose chips divisible by {slices}.")
    for noun, names, known in (
        ("placement", placements, PLACEMENTS),
        ("schedule", schedules, _SCHEDULE_NAMES),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            problem = f"unknown {noun} {quoted(unknown)}."
            raise value_error(problem, fix=f"use some of {', '.join(known)}.")
    if not 0 <= headroom < 1:
        raise ValueError(f"plan: headroom must be at least 0 and below 1, got {headroom}.")


_MAX_SIZE = 64
"""The largest sizes of tensor and pipeline, and the largest number of micro-batches, that are
tried.
"""


_LONG_ROW = 16_384


class _Space(NamedTuple):
    """The layouts to try; the fields are arguments of `plan`.

    Attributes:
      workload: the model.
      devices: number of devices.
      batch_size: rows of the global batch.
      slices: number of pods.
      placements: placements to try.
      schedules: schedules to try.
      remat: values of `remat` to try.
      dtypes: dtypes of the gathers of fsdp, and of the reduce-scatters.
    """

    workload: Workload
    devices: int
    batch_size: int
    slices: int
    placements: Sequence[str]
    schedules: Sequence[str]
    remat: Sequence[bool | str]
    dtypes: tuple[DTypeLike | None, DTypeLike | None]

    def layouts(self, contexts: Sequence[int]) -> Iterator[ParallelLayout]:
        """Yield the layouts of `devices` devices whose sizes divide the model and the batch.

        - tensor and pipeline: powers of two up to 64, or small divisors of the number of devices.
          Stages divide the blocks.
        - replica: 1, or one copy per slice.
        - context: `contexts`.
        - expert: divisors of the number of experts.
        - data: the remaining devices.
        - micro-batches: powers of two, with at least one row per device; in a pipeline at least one
          per stage.
        """
        slice_devices = self.devices // self.slices
        for tensor in _divisors(slice_devices, _MAX_SIZE if any(self.workload.tensor_sums) else 1):
            stages = [
                n
                for n in _divisors(slice_devices // tensor, _MAX_SIZE)
                if self.workload.num_blocks % n == 0
            ]
            for pipeline, context, expert in itertools.product(stages, contexts, self._experts()):
                copies, remainder = divmod(slice_devices // tensor, pipeline * context * expert)
                copies *= self.slices
                if remainder or self.batch_size % (copies * expert):
                    continue
                for replica in sorted({1, self.slices}):
                    if copies % replica == 0:
                        sizes = replica, copies // replica, pipeline, tensor
                        yield from self._options(
                            ParallelLayout(*sizes, context=context, expert=expert)
                        )

    def _options(self, sizes: ParallelLayout) -> Iterator[ParallelLayout]:
        """Yield the layouts with these sizes of the mesh."""
        pipeline = sizes.pipeline
        rows = self.batch_size // (sizes.replica * sizes.data * sizes.expert)
        micro_batches = [
            m for m in _divisors(rows, _MAX_SIZE, small=0) if pipeline == 1 or m >= pipeline
        ]
        placements = self.placements if sizes.shards.size > 1 else ("ddp",)
        schedules = self.schedules if pipeline > 1 else (None,)
        useful_remat = self._useful_remat()
        tried_remat = [
            choice for choice in useful_remat if pipeline == 1 or isinstance(choice, bool)
        ]
        for m, placement, schedule, choice in itertools.product(
            micro_batches, placements, schedules, tried_remat
        ):
            for chunks in self._chunks(pipeline, m, schedule):
                yield sizes._replace(
                    placement=placement,
                    micro_batches=m,
                    schedule=schedule,
                    chunks=chunks,
                    remat=choice,
                    gather_dtype=self.dtypes[0] if placement == "fsdp" else None,
                    scatter_dtype=self.dtypes[1] if placement != "ddp" else None,
                )

    def _useful_remat(self) -> Sequence[bool | str]:
        """Return the choices, without strings that equal remat=False: it computes elementwise
        operations again too.
        """
        if False not in self.remat:
            return self.remat
        recomputes = {choice: self.workload.recompute(choice) for choice in self.remat}
        return [
            choice
            for choice, recompute in recomputes.items()
            if isinstance(choice, bool) or recompute is None or recompute.flops
        ]

    def contexts(self) -> list[int]:
        """Return the sizes of context to try first: divisors of the positions, if there are fewer
        rows than devices or rows of more than 16,384 positions.
        """
        workload = self.workload
        if workload.attention is None or (
            self.batch_size >= self.devices and workload.tokens <= _LONG_ROW
        ):
            return [1]
        return [n for n in _divisors(self.devices, _MAX_SIZE, small=0) if workload.tokens % n == 0]

    def other_contexts(self, tried: Sequence[int]) -> list[int]:
        """Return all other sizes of context, for a model that fits with none of those tried."""
        if self.workload.attention is None:
            return []
        tokens = self.workload.tokens
        sizes = _divisors(self.devices, self.devices, small=self.devices)
        return [n for n in sizes if tokens % n == 0 and n not in tried]

    def _experts(self) -> list[int]:
        experts = self.workload.experts
        if experts is None:
            return [1]
        return [
            n for n in _divisors(self.devices, _MAX_SIZE, small=0) if experts.num_experts % n == 0
        ]

    def _chunks(self, pipeline: int, micro_batches: int, schedule: str | None) -> list[int]:
        two_chunks = [2] if self.workload.num_blocks % (2 * pipeline) == 0 else []
        kind = ScheduleKind() if schedule is None else KINDS[schedule]
        if kind.on_a_v:
            return two_chunks
        if not kind.takes_chunks:
            return [1]
        two_chunks = two_chunks if micro_batches % pipeline == 0 else []
        return two_chunks if kind.chunks == 2 else [1, *two_chunks]


def _divisors(count: int, largest: int, small: int = 8) -> list[int]:
    """Return the powers of two that divide a count, and its other divisors up to `small`."""
    return [
        n
        for n in range(1, min(count, largest) + 1)
        if count % n == 0 and (n & (n - 1) == 0 or n <= small)
    ]


def predict(
    workload: Workload,
    layout: ParallelLayout,
    *,
    hardware: Hardware,
    batch_size: int,
    tx: optax.GradientTransformation | None = None,
    slices: int = 1,
    placed: PlacedModel | None = None,
) -> Prediction:
    """Predict the memory, traffic and time of one layout.

    Args:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      hardware: the chip. Each device of the mesh has its part of it.
      batch_size: rows of the global batch.
      tx: the optimizer, for the bytes of its state; by default `optax.adamw`.
      slices: number of pods; each has an equal number of chips.
      placed: the result of `place` for the layout, if it is known already.

    Raises:
      ValueError: if tensor does not divide a parameter as its rule says, or the schedule does not
        accept the sizes.
      ValueError: if `layout.remat` names values that blocks do not have, or names any values in a
        pipeline.

    Example:
      >>> from shardopt.planning import HARDWARE, MODELS, ParallelLayout
      >>> work = MODELS["llama3-8b"].workload()
      >>> prediction = predict(work, ParallelLayout(data=64, remat=True), hardware=HARDWARE["v5p"], batch_size=128)
      >>> round(prediction.memory.params / 1e9, 3), 0.5 < prediction.mfu < 1
      (0.503, True)
    """
    hardware = hardware.per_device()
    if isinstance(layout.remat, str) and layout.pipeline > 1:
        problem = f"what remat={layout.remat!r} keeps in a pipeline is not predicted."
        raise ValueError(format_error("plan", problem, fix="use remat=True or False there."))
    if placed is None:
        state = abstract_opt_state(workload, tx)
        placed = place(workload, layout, state, tiled=hardware.torus_dims > 0)
    transfers = traffic(placed, batch_size=batch_size)
    time = step_time(placed, transfers, hardware, batch_size=batch_size, slices=slices)
    return Prediction(
        layout=layout,
        memory=footprint(placed, batch_size=batch_size),
        transfers=transfers,
        time=time,
        mfu=workload.model_flops * batch_size / (time.total * layout.num_chips * hardware.flops),
        tokens_per_second=workload.tokens * batch_size / time.total,
        rules=workload.rules,
        transfer_seconds=tuple(
            seconds(transfer, layout, hardware, slices=slices) for transfer in transfers
        ),
    )


def _nothing_fits(plans: Plans) -> str:
    chip = plans.hardware
    limit = plans.limit
    rows = plural(plans.batch_size, "row")
    title = f"{plans.workload.name} on {_machine(plans)} with {rows} per batch"
    too_large = [entry for entry in plans.dropped if entry.missing_bytes]
    if not too_large:
        fix = f"choose a batch_size that {plans.chips} chips divide evenly, or other chips."
        return error_text(
            f"{title}: no layout divides evenly.", [entry.why for entry in plans.dropped], fix
        )
    lines = [
        f"{entry.layout}: {entry.missing_bytes:,.0f} bytes too many" for entry in too_large[:3]
    ]
    need = limit + too_large[0].missing_bytes
    share = limit / chip.per_device().memory_bytes
    memories = {name: known.per_device().memory_bytes for name, known in HARDWARE.items()}
    larger = sorted((memory, name) for name, memory in memories.items() if memory * share >= need)
    other = f", chips with more memory ({larger[0][1]})" if larger else ""
    fix = (
        f"use about {-(-plans.chips * need // limit):.0f} chips or more{other}, or fewer rows per"
        " batch."
    )
    return error_text(
        f"{title}: nothing fits into {limit:,.0f} bytes per"
        f" {'chip' if chip.devices == 1 else 'device'}; the nearest are:",
        lines,
        fix,
    )


def _machine(plans: Plans) -> str:
    devices = f" ({plans.devices} devices)" if plans.hardware.devices > 1 else ""
    return f"{plural(plans.chips, 'chip')} of {plans.hardware.name}{devices}"


def _table(plans: Plans, count: int) -> str:
    predictions = plans.ranked[:count]
    columns = ["context"] * any(prediction.layout.context > 1 for prediction in predictions)
    columns += ["expert"] * any(prediction.layout.expert > 1 for prediction in predictions)
    header = [
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
    rows = [header, *(_row(prediction, columns) for prediction in predictions)]
    lines = aligned(rows, lambda column, _: column > 0)
    model = plans.workload
    batch = plural(plans.batch_size, "row")
    unlisted = len(plans.ranked) - count
    too_large = sum(entry.missing_bytes > 0 for entry in plans.dropped)
    uneven = len(plans.dropped) - too_large
    return "\n".join(
        [
            (
                f"{model.name} ({_count(model.num_parameters)} parameters) on {_machine(plans)},"
                f" {batch} per batch"
            ),
            *lines,
            *([f"... and {unlisted} more that fit"] if unlisted > 0 else []),
            (
                f"MFU: flops of the model / flops that the chips could do\n{known_error(plans.hardware.name)}\n"
                f"{plural(too_large, 'layout')} dropped for memory ({plans.limit / 1e9:.1f} GB per"
                f" {'chip' if plans.hardware.devices == 1 else 'device'} may be used)"
            ),
            *(
                [f"{plural(uneven, 'layout')} dropped for sizes that do not divide"]
                if uneven
                else []
            ),
        ]
    )


def _row(prediction: Prediction, columns: Sequence[str]) -> list[str]:
    time = prediction.time
    memory = prediction.memory.total
    extra_seconds = [getattr(time, name) for name in columns]
    parts = (time.compute, time.tensor, time.data, time.pipeline, time.bubble, *extra_seconds)
    return [
        str(prediction.layout),
        f"{memory / 1e9:.1f} GB" if memory >= 1e9 else f"{memory / 1e6:.1f} MB",
        _duration(time.total),
        f"{prediction.mfu:.1%}",
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
