"""Real TPU compiles of published shapes, against the placement formula and the planner."""

import dataclasses
import math
import time

import jax.numpy as jnp
import optax
import transformer
from step_times import step_flops

import shardopt as so
from shardopt.planning import ParallelLayout, predict
from shardopt.planning._layout import stored_bytes
from shardopt.planning._models import RULES, find_model
from shardopt.planning._topologies import parse_topology

# model, topology, slices, replica, tensor, rows a chip of the data axes
CASES = [
    ("llama3-8b", "v5p:8x8x8", 1, 1, 1, 1),
    ("llama3-8b", "v6e:16x16", 4, 4, 1, 1),
    ("llama3-70b", "v5p:8x8x8", 1, 1, 4, 1),
    ("llama3-8b", "v5p:16x16x16", 1, 1, 1, 1),
    ("llama3-8b", "v5p:4x4x4", 1, 2, 1, 1),
    ("gpt2", "v5p:4x4x4", 1, 1, 1, 8),
    ("llama3-8b", "v6e:16x16", 1, 1, 1, 1),
    ("gpt2", "v5p:8x8x8", 1, 1, 1, 8),
    ("llama3-70b", "v6e:16x16", 1, 1, 4, 1),
    ("gpt2", "v6e:16x16", 4, 4, 1, 8),
    ("llama3-70b", "v6e:16x16", 4, 4, 4, 1),
    ("gpt2", "v5p:16x16x16", 1, 1, 1, 8),
    ("llama3-70b", "v5p:16x16x16", 1, 1, 4, 1),
    ("llama3-8b", "v5p:4x4x4", 1, 1, 1, 1),
    ("gpt2", "v6e:16x16", 1, 1, 1, 8),
]
BLOCKS = (8, 16)
"""Fewer blocks of llama3-8b, to see what a block costs the compiler."""


LENGTH = 1024
"""Tokens of a row."""


def compile_rows(only):
    """Yield a row a compile."""
    for case in [*CASES, *(("llama3-8b", "v5p:4x4x4", 1, 1, 1, 1, blocks) for blocks in BLOCKS)]:
        name, topology, slices, replica, tensor, _, *blocks = case
        model = name + "".join(f" of {count} blocks" for count in blocks)
        label = (
            f"{model} {f'{slices}x' if slices > 1 else ''}{topology} replica={replica}"
            f" tensor={tensor}"
        )
        if only in label:
            yield one(label, case)


def shape_of(case):
    """Return the sizes of the model of a case."""
    name, _, _, _, _, _, *blocks = case
    shape = dataclasses.replace(find_model(name), length=LENGTH)
    return dataclasses.replace(shape, num_layers=blocks[0]) if blocks else shape


def one(label, case):
    """Compile fsdp with full rematerialisation and bfloat16 gathers; compare."""
    _, topology, slices, replica, tensor, rows, *_ = case
    shape = shape_of(case)
    dims = parse_topology(topology)[1]
    chips = math.prod(dims) * slices
    batch_size = rows * chips // tensor
    tx = optax.adamw(1e-3)

    def make(mesh):
        rules = RULES if tensor > 1 else ()
        return so.fsdp(
            tx, mesh, transformer.model(shape, remat="full"), gather_dtype=jnp.bfloat16, rules=rules
        )

    start = time.process_time()
    report = so.planning.aot(
        make,
        shape.abstract_params(),
        transformer.abstract_batch(shape, batch_size),
        topology=topology,
        num_slices=slices,
        replica=replica,
        tensor=tensor,
    )
    facts = {
        "name": label,
        "case": list(case),
        "chips": chips,
        "layers": shape.num_layers,
        "compile_seconds": round(report.compile_seconds, 1),
        # of one core; the seconds above count what else the machine did
        "compile_cpu_seconds": round(time.process_time() - start, 1),
        "argument_bytes": report.memory.arguments,
        "argument_padding": report.argument_padding,
        "temp_bytes": report.memory.temporary,
        "peak_bytes": report.memory.peak,
        "hbm_bytes": report.hbm_bytes,
        "flops": report.flops,
        "collectives": {kind: found._asdict() for kind, found in report.audit.by_kind().items()},
    }
    return facts | compared(facts)


def compared(facts):
    """Return what is predicted of a case beside what was compiled."""
    _, topology, slices, replica, tensor, rows, *_ = facts["case"]
    shape = shape_of(facts["case"])
    chip = parse_topology(topology)[0]
    chips = facts["chips"]
    batch_size = rows * chips // tensor
    layout = ParallelLayout(
        replica=replica,
        data=chips // replica // tensor,
        tensor=tensor,
        remat=True,
        gather_dtype=jnp.bfloat16,
    )
    work = shape.workload()
    tx = optax.adamw(1e-3)
    told = predict(work, layout, hardware=chip, batch_size=batch_size, tx=tx, slices=slices)
    formula = told.memory.params + told.memory.opt_state + stored_bytes((rows, LENGTH + 1), 4)
    flops = step_flops(work, layout, batch_size=batch_size)
    return {
        "arguments_ratio": formula / facts["argument_bytes"],
        "memory_ratio": told.memory.total / facts["peak_bytes"],
        "flops_ratio": None if facts["flops"] is None else flops / facts["flops"],
        "predicted_mfu": told.mfu,
    }


def again_rows(rows):
    """Yield the rows with what is predicted now, nothing compiled."""
    for row in rows:
        yield row | compared(row)
