"""The commands that need no device: `shardopt plan` and `shardopt audit`."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import Mesh

import shardopt as so
from shardopt.cli._optimizer import find_optimizer
from shardopt.cli._options import Count, OptionalCount, check_numbers
from shardopt.cli._strategy import named_strategy, parse_mesh
from shardopt.core import calling, value_error
from shardopt.pipeline._kinds import KINDS
from shardopt.planning._aot import AotReport
from shardopt.planning._layout import ParallelLayout
from shardopt.planning._models import Transformer, find_model
from shardopt.planning._search import Plans
from shardopt.planning._topologies import parse_topology


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

    chips: Count = 64
    """How many chips."""

    slices: Count = 1
    """Pods that the chips are spread over, joined by the data-centre network."""

    batch_size: OptionalCount = None
    """Sequences in a step, over all chips. By default two per chip."""

    length: OptionalCount = None
    """Tokens of a sequence. By default the length that the model was trained with."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, for the bytes of its state."""

    top: Count = 10
    """How many layouts to list."""


@calling("plan")
def plan(options: PlanOptions) -> None:
    """Print the ranked layouts."""
    check_numbers(options)
    shape = find_model(options.model)
    if options.length is not None:
        shape = dataclasses.replace(shape, length=options.length)
    factory, arguments = find_optimizer(options.optimizer)
    plans = so.plan(
        shape,
        hardware=options.hardware,
        chips=options.chips,
        slices=options.slices,
        batch_size=2 * options.chips if options.batch_size is None else options.batch_size,
        tx=factory(1e-3, **arguments),
    )
    print(as_text(plans, options.top))


def as_text(plans: Plans, top: int) -> str:
    """Return the table, and the code for the best layout."""
    best = plans.best
    sizes = ", ".join(
        f"{axis}={size}" for axis, size in best.mesh.items() if size > 1 or axis == "data"
    )
    layout = best.layout
    arguments = [f'placement="{layout.placement}"', f"micro_batches={layout.micro_batches}"]
    if layout.schedule is not None:
        arguments.append(f"schedule={_builder_text(layout, layout.schedule)}")
    if layout.remat:
        arguments.append(f"remat={layout.remat!r}".replace("'", '"'))
    if layout.tensor * layout.expert > 1:
        arguments.append("rules=rules")
    if layout.placement == "fsdp":
        arguments.append("gather_dtype=jnp.bfloat16")
    return (
        f"{plans.table(top)}\n\nthe first of them:\n  mesh = so.make_mesh({sizes})\n"
        f"  opt = so.hybrid(tx, mesh, model, {', '.join(arguments)})"
    )


def _builder_text(layout: ParallelLayout, name: str) -> str:
    """Return the code that makes `layout.builder()`."""
    text = f"so.schedules.{name}"
    kind = KINDS[name]
    if layout.chunks > 1 and kind.takes_chunks:
        text = f"functools.partial({text}, num_chunks={layout.chunks})"
    return text if kind.in_lockstep else f"so.schedules.send_ahead({text})"


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """List the collectives of a compiled program, with their mesh axes, bytes and calls.

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

    slices: Count = 1
    """How many toruses, or nodes of GPUs."""

    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    """Strategy, which decides what is sharded over data."""

    rows: Count = 1
    """Sequences per device of the data axes."""

    length: Count = 1024
    """Tokens of a sequence."""

    prove: bool = False
    """Prove the program too: each sum over devices is complete once, and the results are those that
    were written.
    """


@calling("audit")
def audit(options: AuditOptions) -> None:
    """Print the audit.

    Raises:
      ValueError: if the options have neither a file nor a topology, or both, or one of them cannot
        be used.
      OSError: if the file cannot be read.
      ModuleNotFoundError: if libtpu is needed and not installed.
    """
    if (options.program is None) == (options.topology is None):
        problem = "a file and --topology exclude each other."
        if options.program is None:
            problem = "there is nothing to audit."
        fix = "give a file with compiled.as_text(), or --model and --topology to compile one."
        raise value_error(problem, fix=fix)
    if options.program is None:
        compiled = compile_model(options)
        proof = f"\n\n{compiled.proof}" if options.prove else ""
        print(f"{compiled}\n\n{compiled.audit}{proof}")
    else:
        print(_audit_file(options, options.program))


def _audit_file(options: AuditOptions, program: Path) -> str:
    if options.prove:
        problem = "--prove needs to know where results live, which a file does not tell."
        fix = "give --model and --topology, or use so.hlo.prove(text, outputs=...) in Python."
        raise value_error(problem, fix=fix)
    return str(so.hlo.audit(program.read_text(), mesh=mesh_sizes(options.mesh) or None))


@calling("audit")
def compile_model(options: AuditOptions) -> AotReport:
    """Compile the model for the topology: each block is rematerialised, and weights are gathered in
    bfloat16.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from shardopt.models import decoder

    assert options.topology is not None
    check_numbers(options)
    shape = dataclasses.replace(find_model(options.model), length=options.length)
    config = decoder.DecoderConfig(**_decoder_fields(shape))
    sizes = {"tensor": 1, "replica": 1} | mesh_sizes(options.mesh)
    _, dims = parse_topology(options.topology)
    chips = math.prod(dims) * options.slices

    def make(mesh: Mesh) -> so.ShardedOptimizer:
        rules = decoder.rules(config) if mesh.shape["tensor"] > 1 else ()
        arguments = {"rules": rules, "gather_dtype": jnp.bfloat16}
        model = decoder.model(config, remat="full")
        return named_strategy(options.strategy, optax.adamw(1e-3), mesh, model, arguments)

    context = sizes.get("context", 1)
    rows = options.rows * chips // (sizes["tensor"] * context)
    if context > 1:
        tokens = jax.ShapeDtypeStruct((rows, shape.length), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
    else:
        batch = {"tokens": jax.ShapeDtypeStruct((rows, shape.length + 1), jnp.int32)}
    params = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
    return so.planning.aot(
        make, params, batch, topology=options.topology, num_slices=options.slices, **sizes
    )


def _decoder_fields(shape: Transformer) -> dict[str, Any]:
    """Return the fields of the decoder with the sizes of a published model."""
    from shardopt.models.decoder import BlockKind, Rope

    return {
        "vocab_size": shape.vocab_size,
        "dim": shape.dim,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.width,
        "hidden": shape.hidden,
        "kinds": (BlockKind(rope=None if shape.positions else Rope(base=500_000.0)),),
        "positions": shape.positions,
        "activation": "silu" if shape.gated else "gelu_tanh",
        "gated": shape.gated,
        "tied": shape.tied,
        "fused": "kv",
        "param_dtype": shape.param_dtype,
        "dtype": shape.dtype,
    }


def mesh_sizes(text: str | None) -> dict[str, int]:
    """Return the axis sizes in a text such as "data=4,tensor=2"; {} for None."""
    return {} if text is None else parse_mesh(text)
