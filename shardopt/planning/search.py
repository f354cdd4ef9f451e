"""`plan`: every layout of a model on a machine, those that do not fit dropped, the rest ranked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from shardopt.core.errors import complaint, plural
from shardopt.planning.candidate import Candidate
from shardopt.planning.hardware import HARDWARE, Hardware, find_hardware
from shardopt.planning.layouts import layouts
from shardopt.planning.models import find_model
from shardopt.planning.placed import abstract_opt_state
from shardopt.planning.prediction import Prediction, predict
from shardopt.planning.table import plans_table
from shardopt.planning.transformer import Transformer
from shardopt.planning.workload import Workload
from shardopt.strategies.placement import PLACEMENTS

SCHEDULES = ("one_f_one_b", "interleaved", "zero_bubble_lockstep")


class Dropped(NamedTuple):
    """A layout that cannot be used.

    Attributes:
      layout: the layout.
      why: in words.
      missing_bytes: by how many bytes it does not fit; 0 where it is refused for another reason.
    """

    layout: Candidate
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
        """The fastest."""
        return self.ranked[0]

    def table(self, count: int = 10) -> str:
        """Return the fastest `count` as a table, and what was dropped."""
        return plans_table(self, count)

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
    remat: Sequence[bool] = (False, True),
    gather_dtype: Any = jnp.bfloat16,
    headroom: float = 0.1,
) -> Plans:
    """Rank every way to lay a model out over chips by its predicted step time, without a device.

    Sizes of replica, data, tensor and pipeline are combined with placement, schedule, micro-batches and
    rematerialisation. Memory and traffic are closed forms of what the strategies do (`footprint`, `traffic`), and time
    is a roofline of published peaks (`step_time`): right in order more than in amount, and fitted to no run.

    Args:
      model: a name such as "llama3-8b", a `so.planning.Transformer`, or a `Workload` from `so.planning.trace(...)`.
      hardware: a name such as "v5p", or a `so.planning.Hardware`.
      chips: how many there are.
      batch_size: rows (sequences) of the global batch.
      tx: any optax transformation, for the bytes of its state; by default `optax.adamw`.
      slices: pods that the chips are spread over evenly, joined by the data-centre network.
      placements: among "ddp", "zero1", "zero2" and "fsdp".
      schedules: names of `so.schedules`, for layouts with a pipeline.
      remat: whether backward passes may run forwards again.
      gather_dtype: dtype in which fsdp gathers weights; None is their own.
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
    _check(chips, batch_size, slices, placements, headroom)
    opt_state = abstract_opt_state(workload, optax.adamw(1e-3) if tx is None else tx)
    limit = chip.memory_bytes * (1 - headroom)
    fitting, dropped = [], []
    for layout in layouts(
        workload,
        chips=chips,
        batch_size=batch_size,
        slices=slices,
        # a copy a slice
        replicas=sorted({1, slices}),
        placements=placements,
        schedules=schedules,
        remat=remat,
        gather_dtype=gather_dtype,
    ):
        try:
            found = predict(workload, layout, hardware=chip, batch_size=batch_size, opt_state=opt_state, slices=slices)
        except ValueError as error:  # a dim that tensor does not divide
            dropped.append(Dropped(layout, str(error).splitlines()[0].removeprefix("plan: "), 0.0))
            continue
        if found.memory.total > limit:
            missing = found.memory.total - limit
            dropped.append(Dropped(layout, f"needs {missing / 1e9:.2f} GB more than a chip has", missing))
        else:
            fitting.append(found)
    dropped.sort(key=lambda one: one.missing_bytes or float("inf"))
    if not fitting:
        raise ValueError(_nothing_fits(workload, chip, chips, batch_size, limit, dropped))
    fitting.sort(key=lambda one: (one.time.total, one.memory.total))
    return Plans(tuple(fitting), tuple(dropped), workload, chip, chips, batch_size, limit)


def _check(chips: int, batch_size: int, slices: int, placements: Sequence[str], headroom: float) -> None:
    for name, value in {"chips": chips, "batch_size": batch_size, "slices": slices}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"plan: {name} must be an integer, got {value!r}.")
        if value < 1:
            raise ValueError(f"plan: {name} must be at least 1, got {value}.")
    if chips % slices:
        what = f"{chips} chips cannot be spread evenly over {plural(slices, 'slice')}."
        raise ValueError(complaint("plan", what, fix=f"choose chips divisible by {slices}."))
    if unknown := [name for name in placements if name not in PLACEMENTS]:
        fix = f"use some of {', '.join(PLACEMENTS)}."
        raise ValueError(complaint("plan", f"unknown placement {', '.join(map(repr, unknown))}.", fix=fix))
    if not 0 <= headroom < 1:
        raise ValueError(f"plan: headroom must be at least 0 and below 1, got {headroom}.")


def _nothing_fits(
    workload: Workload, chip: Hardware, chips: int, batch_size: int, limit: float, dropped: list[Dropped]
) -> str:
    who = f"{workload.name} on {plural(chips, 'chip')} of {chip.name} with {plural(batch_size, 'row')} a batch"
    short = [one for one in dropped if one.missing_bytes]
    if not short:
        fix = f"choose a batch_size that {chips} chips divide evenly, or other chips."
        return complaint("plan", f"{who}: no layout divides evenly.", [one.why for one in dropped], fix)
    lines = [f"{one.layout}: {one.missing_bytes:,.0f} bytes too many" for one in short[:3]]
    need = limit + short[0].missing_bytes
    larger = sorted(
        (one.memory_bytes, name)
        for name, one in HARDWARE.items()
        if one.memory_bytes * limit / chip.memory_bytes >= need
    )
    chips_help = f"about {-(-chips * need // limit):.0f} chips or more"
    fix = (
        f"use {chips_help}"
        + (f", chips with more memory ({larger[0][1]})" if larger else "")
        + ", or fewer rows a batch."
    )
    return complaint("plan", f"{who}: nothing fits into {limit:,.0f} bytes a chip; the nearest are:", lines, fix)
