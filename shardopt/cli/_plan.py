"""The commands that need no device: `shardopt plan`, `shardopt audit` and `shardopt schedule`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Literal

import tyro
from jax.sharding import Mesh

import shardopt as so
from shardopt.cli._failures import parse_failures
from shardopt.cli._options import ScheduleName, choices, errors_named, find_optimizer
from shardopt.cli._strategy import check_chunks, named_strategy, parse_mesh, schedule_builder
from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, format_error
from shardopt.hlo import Audit, inner_product_flops
from shardopt.pipeline import Schedule
from shardopt.pipeline._kinds import KINDS
from shardopt.planning import Plans, find_model, parse_topology
from shardopt.planning._layout import Layout


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Rank every layout of a model on a machine by its predicted step time, without a device.

    A layout combines data, tensor, pipeline and replica sizes with placement, schedule,
    micro-batches and rematerialisation. Layouts that do not fit into memory are dropped.
    Predictions use closed forms and published peaks.
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
    """Sequences in a step, over all chips. By default two per chip."""

    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of a sequence. By default the length that the model was trained with."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, for the bytes of its state."""

    failures: Annotated[str | None, tyro.conf.arg(metavar="NAME=NUMBER,...")] = None
    """How often chips fail and what a failure costs, such as mtbf=5y,restart=300,save=5: the fields
    of so.planning.Failures. Lists when to save, spares, and goodput."""

    top: int = 10
    """How many layouts to list."""

    json: bool = False
    """Print JSON instead of a table."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for a drawing of the memory and traffic of the listed layouts."""


@calling("plan")
def plan(options: PlanOptions) -> None:
    """Print the ranked layouts."""
    check_count("--top", options.top)
    shape = find_model(options.model)
    if options.length is not None:
        check_count("--length", options.length)
        shape = dataclasses.replace(shape, length=options.length)
    failures = None if options.failures is None else parse_failures(options.failures)
    with errors_named("plan"):
        factory, arguments = find_optimizer(options.optimizer)
        tx = factory(1e-3, **arguments)
    plans = so.plan(
        shape,
        hardware=options.hardware,
        chips=options.chips,
        slices=options.slices,
        batch_size=2 * options.chips if options.batch_size is None else options.batch_size,
        tx=tx,
        failures=failures,
    )
    if options.png is not None:
        from shardopt.planning._plots import plot_plans

        plot_plans(plans.ranked[: options.top], limit=plans.limit, path=options.png)
    print(as_json(plans, options.top) if options.json else as_text(plans, options.top))


def as_text(plans: Plans, top: int) -> str:
    """Return the table, and the code for the best layout."""
    best = plans.best
    sizes = ", ".join(
        f"{axis}={size}" for axis, size in best.mesh.items() if size > 1 or axis == "data"
    )
    layout = best.layout
    arguments = [f'placement="{layout.placement}"', f"micro_batches={layout.micro_batches}"]
    if layout.schedule is not None:
        arguments.append(f"schedule={_builder_text(layout)}")
    arguments += [f"remat={layout.remat!r}".replace("'", '"')] if layout.remat else []
    arguments += [] if layout.regather else ["regather=False"]
    arguments += ["rules=rules"] if layout.tensor > 1 else []
    arguments += ["gather_dtype=jnp.bfloat16"] if layout.placement == "fsdp" else []
    lines = [plans.table(top), "", "the first of them:", f"  mesh = so.make_mesh({sizes})"]
    return "\n".join([*lines, f"  opt = so.hybrid(tx, mesh, model, {', '.join(arguments)})"])


def _builder_text(layout: Layout) -> str:
    """Return the code that makes `layout.builder()`."""
    text = f"so.schedules.{layout.schedule}"
    arguments: dict[str, object] = {}
    if layout.searched is not None:
        arguments = layout.searched._asdict()
    elif layout.schedule and layout.chunks > 1 and KINDS[layout.schedule].takes_chunks:
        arguments = {"num_chunks": layout.chunks}
    if arguments:
        text = (
            f"functools.partial({text},"
            f" {', '.join(f'{name}={value}' for name, value in arguments.items())})"
        )
    return (
        text
        if layout.schedule and KINDS[layout.schedule].in_lockstep
        else f"so.schedules.send_ahead({text})"
    )


def as_json(plans: Plans, top: int) -> str:
    """Return the ranked and the dropped layouts as JSON."""
    dropped = [
        {"layout": str(entry.layout), "why": entry.why, "missing_bytes": entry.missing_bytes}
        for entry in plans.dropped
    ]
    report = {
        "model": plans.workload.name,
        "parameters": plans.workload.num_parameters,
        "hardware": plans.hardware.name,
        "chips": plans.chips,
        "batch_size": plans.batch_size,
        "usable_bytes": plans.limit,
        "fitting": len(plans.ranked),
        "ranked": [entry.to_json() for entry in plans.ranked[:top]],
        "dropped": dropped[:top],
        "recoveries": [
            entry.recovery.to_json()
            | {
                "layout": str(entry.prediction.layout),
                "tokens_per_second": entry.tokens_per_second,
            }
            for entry in plans.recoveries
        ],
    }
    return json.dumps(report, indent=2)


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """List the collectives of a compiled program, with their mesh axes, bytes and calls, and
    estimate its step time.

    The program is a file with `compiled.as_text()`: `shardopt audit step.hlo --mesh
    data=4,tensor=2`. Or it is a published model, compiled for TPUs without a TPU: `shardopt audit
    --model llama3-8b --topology v5p:4x4x4`, with the extra tpu. Or it is compiled for nodes of
    GPUs: `--topology h100:8 --slices 4`, with the extra gpu.
    """

    program: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = None
    """A file with the text of an optimised HLO module."""

    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,...")] = None
    """Mesh of the compiled program, outermost axis first; with --topology the sizes of all axes
    except data.
    """

    model: str = "llama3-8b"
    """Model to compile, with --topology: gpt2, gpt2-xl, llama2-70b, llama3-8b, llama3-70b,
    llama3-405b.
    """

    topology: Annotated[str | None, tyro.conf.arg(metavar="CHIP:AxBxC")] = None
    """Chip and torus to compile for, such as v5p:4x4x4 or v6e:16x16; or GPUs of a node, h100:8."""

    slices: int = 1
    """How many toruses, or nodes of GPUs."""

    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    """Strategy, which decides what is sharded over data."""

    rows: int = 1
    """Sequences per device of the data axes."""

    length: int = 1024
    """Tokens of a sequence."""

    hardware: Annotated[str | None, tyro.conf.arg(metavar="CHIP")] = None
    """Chip that the program in a file was compiled for, such as v5p; needed for the step time."""

    prove: bool = False
    """Prove the program too: each sum over devices is complete once, and the results are those that
    were written.
    """

    json: bool = False
    """Print JSON instead of a table."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for a drawing of the timeline of a step."""


def audit(options: AuditOptions) -> None:
    """Print the audit.

    Raises:
      ValueError: if the options have neither a file nor a topology, or both, or one of them cannot
        be used.
      OSError: if the file cannot be read.
      ModuleNotFoundError: if libtpu is needed and not installed.
    """
    if (options.program is None) == (options.topology is None):
        problem = (
            "there is nothing to audit."
            if options.program is None
            else "a file and --topology exclude each other."
        )
        fix = "give a file with compiled.as_text(), or --model and --topology to compile one."
        raise ValueError(format_error("audit", problem, fix=fix))
    if options.program is not None:
        if options.prove:
            problem = "--prove needs to know where results live, which a file does not tell."
            fix = "give --model and --topology, or use so.hlo.prove(text, outputs=...) in Python."
            raise ValueError(format_error("audit", problem, fix=fix))
        text, mesh_shape = options.program.read_text(), mesh_sizes(options.mesh) or None
        file_audit = so.audit(text, mesh=mesh_shape)
        if options.png is not None and options.hardware is None:
            fix = "give --hardware, such as v5p."
            raise ValueError(format_error("audit", "--png needs to know the chip.", fix=fix))
        step = (
            so.planning.step_seconds(text, mesh=mesh_shape, hardware=options.hardware)
            if options.hardware
            else None
        )
        json_report = to_json(file_audit) | {"flops": inner_product_flops(text)}
        json_report |= {} if step is None else {"step_seconds": step.to_json()}
        lines = [str(file_audit), *([] if step is None else ["", str(step)])]
    else:
        report = compile_model(options)
        step = report.step_seconds
        json_report = report.to_json() | {"audit": to_json(report.audit)}
        lines = [str(report), "", str(report.audit)]
        if options.prove:
            proof = report.proof
            problem = proof.problem and proof.problem._asdict()
            unknown = [instruction._asdict() for instruction in proof.unknown]
            json_report |= {"proof": proof._asdict() | {"problem": problem, "unknown": unknown}}
            lines += ["", str(proof)]
    if options.png is not None and step is not None:
        so.planning.plot_timeline(step, path=options.png)
    print(json.dumps(json_report, indent=2) if options.json else "\n".join(lines))


def to_json(program_audit: Audit) -> dict[str, object]:
    """Return an audit as JSON values."""
    return {
        "program": program_audit.name,
        "mesh": program_audit.mesh_shape,
        "collectives": [op._asdict() | {"calls": op.calls} for op in program_audit.collectives],
        "by_axis": {
            " x ".join(axes or ("mixed",)): traffic._asdict()
            for axes, traffic in program_audit.by_axis().items()
        },
        "by_kind": {kind: traffic._asdict() for kind, traffic in program_audit.by_kind().items()},
    }


@calling("audit")
def compile_model(options: AuditOptions) -> so.planning.AotReport:
    """Compile the model for the topology: each block is rematerialised, and weights are gathered in
    bfloat16.
    """
    import jax.numpy as jnp
    import optax

    from shardopt.models._transformer import abstract_batch, model
    from shardopt.planning._models import RULES

    assert options.topology is not None
    check_count("--rows", options.rows)
    check_count("--length", options.length)
    shape = dataclasses.replace(find_model(options.model), length=options.length)
    sizes = {"tensor": 1, "replica": 1} | mesh_sizes(options.mesh)
    _, dims = parse_topology(options.topology)
    chips = math.prod(dims) * options.slices

    def make(mesh: Mesh) -> so.ShardedOptimizer:
        block_model, tx = model(shape, remat="full"), optax.adamw(1e-3)
        rules = RULES if mesh.shape["tensor"] > 1 else ()
        return named_strategy(
            options.strategy, tx, mesh, block_model, rules=rules, gather_dtype=jnp.bfloat16
        )

    context = sizes.get("context", 1)
    rows = options.rows * chips // (sizes["tensor"] * context)
    batch = abstract_batch(shape, rows, form="targets" if context > 1 else "tokens")
    return so.aot(
        make,
        shape.abstract_params(),
        batch,
        topology=options.topology,
        num_slices=options.slices,
        **sizes,
    )


def mesh_sizes(text: str | None) -> dict[str, int]:
    """Return the axis sizes in a text such as "data=4,tensor=2"; {} for None."""
    with errors_named("audit"):
        return {} if text is None else parse_mesh(text)


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """Show the work of each pipeline stage over time: ticks, idle time, activations in memory."""

    kind: Annotated[ScheduleName, tyro.conf.arg(metavar=choices(ScheduleName))] = (
        "eager_one_f_one_b"
    )
    """Name of the schedule in so.schedules."""

    stages: int = 4
    """Size of the mesh axis pipeline."""

    micro_batches: int = 8
    """Parts of a batch that pass through the stages one after another."""

    chunks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model on each stage, for interleaved and looped_breadth_first (by default 2),
    zero_bubble and zero_bubble_lockstep (1)."""

    json: bool = False
    """Print JSON instead of text."""

    png: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File for a drawing of the schedule."""


@calling("schedule")
def schedule(options: ScheduleOptions) -> None:
    """Print the schedule."""
    check_chunks("--kind", options.kind, options.chunks)
    table = schedule_builder(options.kind, options.chunks)(options.stages, options.micro_batches)
    if options.png is not None:
        table.plot(options.png)
    print(json.dumps(numbers(table), indent=2) if options.json else str(table))


def numbers(table: Schedule) -> dict[str, object]:
    """Return a schedule as JSON values."""
    return {
        "name": table.name,
        "stages": table.num_stages,
        "micro_batches": table.num_micro_batches,
        "chunks": table.num_chunks,
        "ticks": table.num_ticks,
        "bubble": table.bubble_fraction,
        "program_bubble": table.program_bubble_fraction,
        "peak_activations": list(table.peak_activations),
        "table": {name: column.tolist() for name, column in table.table().items()},
    }
