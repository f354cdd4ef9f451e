"""Real TPU compiles of published shapes, against the placement formula and the planner."""

import math

import jax.numpy as jnp
import optax

import shardopt as so
from shardopt.models import transformer
from shardopt.planning import Candidate, find_hardware, find_model, parse_topology, predict
from shardopt.planning.transformer import RULES

# model, topology, slices, replica, tensor, rows a chip of the data axes
CASES = [
    ("llama3-8b", "v5p:4x4x4", 1, 1, 1, 1),
    ("gpt2", "v6e:16x16", 1, 1, 1, 8),
    ("llama3-8b", "v5p:8x8x8", 1, 1, 1, 1),
    ("llama3-70b", "v5p:8x8x8", 1, 1, 4, 1),
    ("llama3-8b", "v6e:16x16", 4, 4, 1, 1),
    ("llama3-8b", "v5p:4x4x4", 1, 2, 1, 1),
    ("gpt2", "v5p:4x4x4", 1, 1, 1, 8),
    ("llama3-8b", "v6e:16x16", 1, 1, 1, 1),
    ("gpt2", "v5p:8x8x8", 1, 1, 1, 8),
    ("llama3-70b", "v6e:16x16", 1, 1, 4, 1),
    ("gpt2", "v6e:16x16", 4, 4, 1, 8),
    ("llama3-70b", "v6e:16x16", 4, 4, 4, 1),
    ("gpt2", "v5p:16x16x16", 1, 1, 1, 8),
    ("llama3-8b", "v5p:16x16x16", 1, 1, 1, 1),
    ("llama3-70b", "v5p:16x16x16", 1, 1, 4, 1),
]
LENGTH = 1024
"""Tokens of a row: XLA's own attention writes its scores, so long rows measure attention and nothing else."""


def compile_rows(only):
    """Yield a row a compile."""
    for name, topology, slices, replica, tensor, rows in CASES:
        label = f"{name} {slices if slices > 1 else ''}{'x' if slices > 1 else ''}{topology} replica={replica} tensor={tensor}"
        if only in label:
            yield one(label, name, topology, slices, replica, tensor, rows)


def one(label, name, topology, slices, replica, tensor, rows):
    """Compile fsdp with full rematerialisation and bfloat16 gathers; compare."""
    import dataclasses

    shape = dataclasses.replace(find_model("pod", name), length=LENGTH, fused_attention=False)
    chip, dims = parse_topology(topology)
    chips = math.prod(dims) * slices
    batch_size = rows * chips // tensor
    tx = optax.adamw(1e-3)

    def make(mesh):
        rules = RULES if tensor > 1 else ()
        return so.fsdp(tx, mesh, transformer.model(shape, remat="full"), gather_dtype=jnp.bfloat16, rules=rules)

    report = so.aot(
        make,
        shape.abstract_params(),
        transformer.abstract_batch(shape, batch_size),
        topology=topology,
        num_slices=slices,
        replica=replica,
        tensor=tensor,
    )
    layout = Candidate(
        replica=replica, data=chips // replica // tensor, tensor=tensor, remat=True, gather_dtype=jnp.bfloat16
    )
    work = shape.workload()
    told = predict(work, layout, hardware=find_hardware("pod", chip), batch_size=batch_size, tx=tx, slices=slices)
    batch_bytes = batch_size // layout.data // replica * (LENGTH + 1) * 4
    formula = told.memory.params + told.memory.opt_state + batch_bytes
    flops = batch_size * (work.num_blocks * (3 * work.block_flops + work.again_flops) + 3 * work.ends_flops) / chips
    return {
        "name": label,
        "chips": chips,
        "layers": shape.num_layers,
        "compile_seconds": round(report.compile_seconds, 1),
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "hbm_bytes": report.hbm_bytes,
        "arguments_ratio": formula / report.argument_bytes,
        "memory_ratio": told.memory.total / report.peak_bytes,
        "flops_ratio": None if report.flops is None else flops / report.flops,
        "collectives": {kind: found._asdict() for kind, found in report.audit.by_kind().items()},
        "predicted_mfu": told.mfu,
    }
