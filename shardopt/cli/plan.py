"""`shardopt plan`: every layout of a model on a machine, ranked, before the machine is rented."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

import shardopt as so
from shardopt.cli.optimizers import optimizer_named, parse_optimizer
from shardopt.cli.words import named
from shardopt.planning import Plans, find_model


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Rank every layout of a model on a machine by its predicted step time, without a device.

    Data, tensor, pipeline and replica sizes are combined with placement, schedule, micro-batches and
    rematerialisation; what does not fit into memory is dropped. Predictions are closed forms and published peaks.
    """

    model: str = "llama3-8b"
    """A published model: gpt2, gpt2-xl, llama2-70b, llama3-8b, llama3-70b, llama3-405b."""

    hardware: str = "v5p"
    """A chip: a100, h100, h200, b200, v4, v5e, v5p, v6e, tpu7x."""

    chips: int = 64
    """How many chips."""

    slices: int = 1
    """Pods that the chips are spread over, joined by the data-centre network."""

    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sequences in a step, over all chips. By itself two a chip."""

    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of a sequence. By itself those the model was trained with."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, for the bytes of its state."""

    top: int = 10
    """How many layouts to list."""

    json: bool = False
    """Print JSON instead of a table."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Draw memory and traffic of the layouts listed into this file."""


def plan(options: PlanOptions) -> None:
    """Print the plans.

    Raises:
      ValueError: if a name is unknown, a number out of range, or nothing fits.
    """
    if options.top < 1:
        raise ValueError(f"plan: --top must be at least 1, got {options.top}.")
    shape = find_model("plan", options.model)
    if options.length is not None:
        if options.length < 1:
            raise ValueError(f"plan: --length must be at least 1, got {options.length}.")
        shape = dataclasses.replace(shape, length=options.length)
    with named("plan"):
        name, arguments = parse_optimizer(options.optimizer)
        tx = optimizer_named(name, arguments)(1e-3, **arguments)
    plans = so.plan(
        shape,
        hardware=options.hardware,
        chips=options.chips,
        slices=options.slices,
        batch_size=2 * options.chips if options.batch_size is None else options.batch_size,
        tx=tx,
    )
    if options.png is not None:
        from shardopt.planning.plots import plot_plans

        plot_plans(plans.ranked[: options.top], limit=plans.limit, path=options.png)
    print(as_json(plans, options.top) if options.json else as_text(plans, options.top))


def as_text(plans: Plans, top: int) -> str:
    """Return the table, and what to type for the best."""
    best = plans.best
    sizes = ", ".join(f"{axis}={size}" for axis, size in best.mesh.items() if size > 1 or axis == "data")
    layout = best.layout
    words = [f'placement="{layout.placement}"', f"micro_batches={layout.micro_batches}"]
    if layout.schedule is not None:
        builder = f"so.schedules.{layout.schedule}"
        many = layout.chunks > 1
        words.append(
            f"schedule=functools.partial({builder}, num_chunks={layout.chunks})" if many else f"schedule={builder}"
        )
    words += ["remat=True"] if layout.remat else []
    words += ["rules=rules"] if layout.tensor > 1 else []
    words += ["gather_dtype=jnp.bfloat16"] if layout.placement == "fsdp" else []
    lines = [plans.table(top), "", "the first of them:", f"  mesh = so.make_mesh({sizes})"]
    return "\n".join([*lines, f"  opt = so.hybrid(tx, mesh, model, {', '.join(words)})"])


def as_json(plans: Plans, top: int) -> str:
    """Return the same as JSON."""
    dropped = [{"layout": str(one.layout), "why": one.why, "missing_bytes": one.missing_bytes} for one in plans.dropped]
    found = {
        "model": plans.workload.name,
        "parameters": plans.workload.num_parameters,
        "hardware": plans.hardware.name,
        "chips": plans.chips,
        "batch_size": plans.batch_size,
        "usable_bytes": plans.limit,
        "fitting": len(plans.ranked),
        "ranked": [one.to_json() for one in plans.ranked[:top]],
        "dropped": dropped[:top],
    }
    return json.dumps(found, indent=2)
