"""`shardopt audit`: what a compiled program sends and holds; of a file, or of a compile for TPUs that are not there."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import shardopt as so
from shardopt.cli.devices import parse_mesh
from shardopt.cli.words import named
from shardopt.core.errors import complaint
from shardopt.planning import Audit, find_model, inner_product_flops, parse_topology


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """List the collectives of a compiled program, with their mesh axes, bytes and calls.

    Either of a file, `shardopt audit step.hlo --mesh data=4,tensor=2`, that holds `compiled.as_text()`; or of a
    published model compiled for a TPU, `shardopt audit --model llama3-8b --topology v5p:4x4x4`, which needs the extra
    tpu, and no TPU.
    """

    program: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = None
    """A file with the text of an optimised HLO module."""

    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,...")] = None
    """Mesh that the program was compiled for, outermost axis first; with --topology the sizes of all axes but data."""

    model: str = "llama3-8b"
    """Model to compile, with --topology: gpt2, gpt2-xl, llama2-70b, llama3-8b, llama3-70b, llama3-405b."""

    topology: Annotated[str | None, tyro.conf.arg(metavar="CHIP:AxBxC")] = None
    """Chip and torus to compile for, such as v5p:4x4x4 or v6e:16x16."""

    slices: int = 1
    """How many of them."""

    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp"
    """What is split over data."""

    rows: int = 1
    """Sequences a device of the data axes."""

    length: int = 1024
    """Tokens of a sequence."""

    json: bool = False
    """Print JSON instead of a table."""


def audit(options: AuditOptions) -> None:
    """Print the audit.

    Raises:
      ValueError: if neither or both of a file and a topology are given, or one of them cannot be used.
      OSError: if the file cannot be read.
      ModuleNotFoundError: if libtpu is needed and not installed.
    """
    if (options.program is None) == (options.topology is None):
        what = "there is nothing to audit." if options.program is None else "a file and --topology exclude each other."
        fix = "give a file with compiled.as_text(), or --model and --topology to compile one."
        raise ValueError(complaint("audit", what, fix=fix))
    if options.program is not None:
        text = options.program.read_text()
        found = so.audit(text, mesh=mesh_sizes(options.mesh) or None)
        shown: Any = to_json(found) | {"flops": inner_product_flops(text)}
        print(json.dumps(shown, indent=2) if options.json else str(found))
        return
    report = compile_model(options)
    if options.json:
        print(json.dumps(report.to_json() | {"audit": to_json(report.audit)}, indent=2))
    else:
        print(f"{report}\n\n{report.audit}")


def compile_model(options: AuditOptions) -> so.planning.AotReport:
    """Compile the model for the topology, each block rematerialised, weights gathered in bfloat16."""
    import jax.numpy as jnp
    import optax

    from shardopt.models import transformer
    from shardopt.planning.transformer import RULES

    assert options.topology is not None
    if options.rows < 1 or options.length < 1:
        raise ValueError(f"audit: --rows and --length must be at least 1, got {options.rows} and {options.length}.")
    shape = dataclasses.replace(find_model("audit", options.model), length=options.length)
    sizes = {"tensor": 1, "replica": 1} | mesh_sizes(options.mesh)
    _, dims = parse_topology(options.topology)
    chips = math.prod(dims) * options.slices

    def make(mesh: Any) -> so.ShardedOptimizer:
        model, tx = transformer.model(shape, remat="full"), optax.adamw(1e-3)
        rules = RULES if mesh.shape["tensor"] > 1 else ()
        if options.strategy == "fsdp":
            return so.fsdp(tx, mesh, model, rules=rules, gather_dtype=jnp.bfloat16)
        if options.strategy == "ddp":
            return so.ddp(tx, mesh, model, rules=rules)
        return so.zero(tx, mesh, model, stage=int(options.strategy.removeprefix("zero")), rules=rules)

    batch = transformer.abstract_batch(shape, options.rows * chips // sizes["tensor"])
    return so.aot(make, shape.abstract_params(), batch, topology=options.topology, num_slices=options.slices, **sizes)


def mesh_sizes(text: str | None) -> dict[str, int]:
    """Return the sizes in a text such as "data=4,tensor=2"; of none, none."""
    with named("audit"):
        return {} if text is None else parse_mesh(text)


def to_json(found: Audit) -> dict[str, Any]:
    """Return an audit as plain numbers and words."""
    return {
        "program": found.name,
        "mesh": found.mesh_shape,
        "collectives": [one._asdict() | {"calls": one.calls} for one in found.collectives],
        "by_axis": {" x ".join(axes or ("mixed",)): traffic._asdict() for axes, traffic in found.by_axis().items()},
        "by_kind": {kind: traffic._asdict() for kind, traffic in found.by_kind().items()},
    }
