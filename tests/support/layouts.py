"""A small transformer under a layout: the prediction, and the step that is really compiled."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax

import shardopt as so
from benchmarks import transformer
from shardopt.hlo import inner_product_flops, memory
from shardopt.planning import ParallelLayout, Transformer, trace
from shardopt.planning._costs import by_axis, footprint, traffic
from shardopt.planning._layout import abstract_opt_state, place
from shardopt.planning._models import RULES
from support.scripts import imported

SIZES = {
    "dim": 128,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "hidden": 384,
    "vocab_size": 512,
}
SHAPE = Transformer("small", **SIZES, length=64, dtype=jnp.float32, fused_attention=False)
THREE_LAYERS = dataclasses.replace(SHAPE, num_layers=3)
TX = optax.adamw(1e-3)

LAYOUTS = {
    "ddp": (ParallelLayout(data=8, placement="ddp"), 16),
    "ddp, micro-batches": (ParallelLayout(data=8, placement="ddp", micro_batches=2), 32),
    "ddp, remat": (ParallelLayout(data=8, placement="ddp", remat=True), 64),
    "ddp, saved": (ParallelLayout(data=8, placement="ddp", remat="save:qkv"), 64),
    "zero1": (ParallelLayout(data=8, placement="zero1"), 16),
    "zero1, tensor": (ParallelLayout(data=4, tensor=2, placement="zero1"), 16),
    "zero2": (ParallelLayout(data=8, placement="zero2", micro_batches=2), 32),
    "zero2, tensor": (ParallelLayout(data=4, tensor=2, placement="zero2", micro_batches=4), 32),
    "fsdp": (ParallelLayout(data=8), 16),
    "fsdp, micro-batches": (ParallelLayout(data=8, micro_batches=4), 64),
    "fsdp, remat": (ParallelLayout(data=8, remat=True), 64),
    "fsdp, scattered in half": (ParallelLayout(data=8, scatter_dtype="bfloat16"), 16),
    "zero2, scattered in half": (
        ParallelLayout(data=8, placement="zero2", micro_batches=2, scatter_dtype="bfloat16"),
        32,
    ),
    "fsdp, saved": (ParallelLayout(data=8, remat="save:attention,mlp_hidden"), 64),
    "fsdp, tensor": (ParallelLayout(data=4, tensor=2), 32),
    "fsdp, tensor, remat": (ParallelLayout(data=4, tensor=2, remat=True), 64),
    "fsdp, tensor, saved": (ParallelLayout(data=4, tensor=2, remat="save:qkv,attention_out"), 64),
    "fsdp, tensor=4": (ParallelLayout(data=2, tensor=4), 32),
    "hsdp": (ParallelLayout(replica=2, data=4), 16),
    "hsdp, remat": (ParallelLayout(replica=2, data=4, remat=True, micro_batches=2), 64),
    "fsdp, context": (ParallelLayout(data=2, context=4), 16),
    "fsdp, context, remat": (
        ParallelLayout(data=2, context=2, tensor=2, remat=True, micro_batches=2),
        32,
    ),
    "zero1, context": (ParallelLayout(data=4, context=2, placement="zero1"), 32),
    "1f1b, context": (
        ParallelLayout(
            data=2, pipeline=2, context=2, schedule="eager_one_f_one_b", micro_batches=4, remat=True
        ),
        64,
    ),
    "1f1b": (ParallelLayout(data=2, pipeline=4, schedule="eager_one_f_one_b", micro_batches=8), 64),
    "1f1b, remat": (
        ParallelLayout(
            data=2, pipeline=4, schedule="eager_one_f_one_b", micro_batches=8, remat=True
        ),
        64,
    ),
    "zero bubble on a V, sent ahead": (
        ParallelLayout(
            data=2,
            pipeline=4,
            placement="zero1",
            schedule="zero_bubble_v",
            chunks=2,
            micro_batches=8,
        ),
        64,
    ),
    "1f1b, ddp, remat": (
        ParallelLayout(
            data=4,
            pipeline=2,
            placement="ddp",
            schedule="eager_one_f_one_b",
            micro_batches=4,
            remat=True,
        ),
        64,
    ),
    "1f1b, ddp": (
        ParallelLayout(
            data=4, pipeline=2, placement="ddp", schedule="eager_one_f_one_b", micro_batches=4
        ),
        64,
    ),
    "zero bubble, zero1, tensor": (
        ParallelLayout(
            data=2,
            pipeline=2,
            tensor=2,
            placement="zero1",
            schedule="zero_bubble_lockstep",
            micro_batches=4,
        ),
        32,
    ),
    "interleaved, tensor": (
        ParallelLayout(
            data=2, pipeline=2, tensor=2, schedule="interleaved", chunks=2, micro_batches=4
        ),
        32,
    ),
    "interleaved, remat": (
        ParallelLayout(
            data=4, pipeline=2, schedule="interleaved", chunks=2, micro_batches=4, remat=True
        ),
        64,
    ),
    "1f1b, zero2": (
        ParallelLayout(
            data=2, pipeline=4, placement="zero2", schedule="eager_one_f_one_b", micro_batches=8
        ),
        64,
    ),
    "three stages of one block, remat": (
        ParallelLayout(
            data=2, pipeline=3, schedule="eager_one_f_one_b", micro_batches=6, remat=True
        ),
        24,
        THREE_LAYERS,
    ),
    "chunks of one block, remat": (
        ParallelLayout(
            data=2, pipeline=4, schedule="interleaved", chunks=2, micro_batches=4, remat=True
        ),
        32,
    ),
}


@functools.cache
def traced(shape, precision):
    """Return the work of a model, which is the same for every layout."""
    model = transformer.model(shape, precision=precision)
    return trace(model, shape.abstract_params(), transformer.abstract_batch(shape, 1), rules=RULES)


def predicted(layout, batch_size, shape=SHAPE, precision=None):
    """Return (placed, footprint, bytes sent by axis) of the traced model."""
    work = traced(shape, precision)
    placed = place(work, layout, abstract_opt_state(work, TX))
    sent = by_axis(traffic(placed, batch_size=batch_size), layout.sizes)
    return placed, footprint(placed, batch_size=batch_size), sent


@functools.cache
def compiled(layout, batch_size, shape=SHAPE):
    """Compile the step of the layout on fake devices."""
    mesh = so.make_mesh(**layout.sizes, devices=jax.devices()[: layout.num_chips])
    opt = so.hybrid(TX, mesh, transformer.model(shape), **layout.strategy(RULES))
    state = opt.abstract_state(shape.abstract_params())
    form = "targets" if layout.context > 1 else "tokens"
    return opt.step.lower(state, transformer.abstract_batch(shape, batch_size, form=form)).compile()


def disagreements(layout, batch_size, shape=SHAPE):
    """Return the quantities that differ between prediction and compiled step: bytes held, bytes
    sent over an axis, flops.
    """
    placed, held, sent = predicted(layout, batch_size, shape)
    program = compiled(layout, batch_size, shape)
    table = layout.table()
    measured_memory = memory(program)
    wrong = []

    positions = 2 * shape.length // layout.context if layout.context > 1 else shape.length + 1
    batch = batch_size // layout.data // layout.replica * positions * 4
    if (
        not measured_memory.arguments - 64
        <= placed.params + placed.opt_state + batch
        <= measured_memory.arguments
    ):
        wrong.append("arguments")
    if not 0.90 * measured_memory.peak <= held.total <= 1.10 * measured_memory.peak:
        wrong.append("memory")

    sizes = {axis: size for axis, size in layout.sizes.items() if axis != "replica" or size > 1}
    collectives = so.hlo.audit(program, mesh=sizes, schedule=table).collectives
    # XLA:CPU of jax 0.10 merges the gather of a forward that runs again with the gather of the
    # backward after it
    merged = layout.remat and layout.pipeline == 1 and jax.__version_info__ < (0, 11)
    for axis, wire in sent.items():
        if axis == "context" and merged:
            continue
        # bytes that go over several axes at once count for the first axis: only sums of the loss do
        # so
        mine = [
            collective
            for collective in collectives
            if collective.axes is not None and collective.axes[0] == axis
        ]
        found_wire = sum(collective.wire_bytes * (collective.calls or 0) for collective in mine)
        if not math.isclose(wire, found_wire, rel_tol=0.15 if axis == "tensor" else 0.05):
            wrong.append(f"sent over {axis}")

    if layout.pipeline == 1:
        with imported("step_times") as step_times:
            predicted_flops = step_times.step_flops(placed.workload, layout, batch_size=batch_size)
        if not math.isclose(predicted_flops, inner_product_flops(program) or 0.0, rel_tol=0.05):
            wrong.append("flops")
    return wrong


def active_parameters(shape):
    """Return the number of parameters that one token uses: without the experts that the token does
    not go to.
    """
    idle = shape.num_experts - shape.top_k if shape.num_experts else 0
    of_an_expert = (2 + shape.gated) * shape.dim * shape.hidden
    return shape.num_parameters - shape.num_layers * idle * of_an_expert
