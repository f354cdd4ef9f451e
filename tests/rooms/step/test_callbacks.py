"""If tensor is 1, no part of a loss is left to the partitioner, so that callbacks run as on one
device.

A loss that constrains arrays over tensor is an exception: it is the same at every size of tensor.
"""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.collectives import has_auto_tensor, per_device
from shardopt.mesh import axes_of_role, device_kind, mesh_under_trace, trace_without_mesh

PARAMS = {"blocks": {"kernel": jnp.ones((4, 4, 4)) / 8}, "in": jnp.eye(4)}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
SEEN = []


def host_double(x):
    return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def embed(outer, batch):
    x = host_double(jax.lax.stop_gradient(batch)) @ outer["in"]
    return eqx.error_if(x, jnp.any(jnp.abs(x) > 1e3), "embedded too far")


def block(w, x):
    return x + jnp.tanh(x @ w["kernel"])


def mean_square(outer, x, batch):
    loss = jnp.mean((x @ outer["in"].T - batch) ** 2)
    jax.debug.callback(lambda value: SEEN.append(float(value)), loss)
    return loss


def unrolled(params, batch):
    x = embed(params, batch)
    for i in range(4):
        x = block({"kernel": params["blocks"]["kernel"][i]}, x)
    return mean_square(params, x, batch)


MODEL = so.BlockModel(embed, block, mean_square)
FSDP = {"min_shard_elements": 1}
ROWS = {
    "ddp": (so.ddp, {"data": 4}, unrolled, {"micro_batches": 2}),
    "zero 2, replicas": (so.zero, {"replica": 2, "data": 2}, unrolled, {"stage": 2, **FSDP}),
    "fsdp": (so.fsdp, {"data": 4}, unrolled, {"micro_batches": 2, **FSDP}),
    "fsdp, blocks": (so.fsdp, {"data": 4}, MODEL, {"micro_batches": 2, **FSDP}),
    "hybrid": (so.hybrid, {"data": 2, "pipeline": 2}, MODEL, {"micro_batches": 2, **FSDP}),
}


@pytest.mark.parametrize("row", tiered(ROWS, quick=lambda row: row == "hybrid"))
def test_callbacks_run_in_a_loss(row, mesh_of):
    make, sizes, loss_fn, options = ROWS[row]
    opt = make(
        optax.sgd(0.1), mesh_of(**sizes), loss_fn, view="unproved", **options
    )  # or they run to find that out, too
    state = opt.init(PARAMS)
    SEEN.clear()
    state, metrics = opt.step(state, X)
    jax.block_until_ready(state)
    jax.effects_barrier()
    rows = np.split(X, 4 * options.get("micro_batches", 1) // (2 if row == "hybrid" else 1))
    expected = [float(unrolled(PARAMS, part)) for part in rows]
    assert float(metrics["loss"]) == pytest.approx(np.mean(expected), rel=1e-6)
    jax.effects_barrier()
    assert sorted(SEEN[: -len(rows)]) == pytest.approx(sorted(expected), rel=1e-6)

    if row != "hybrid":  # XLA:CPU: idle stages would wait for stages that raised
        with pytest.raises(Exception, match="embedded too far"):
            float(opt.step(state, 1e4 * np.ones_like(X))[1]["loss"])
        # or it is raised again when the process ends
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()


@pytest.mark.parametrize("make", tiered([so.ddp, so.fsdp], lambda make: make is so.ddp))
def test_debug_nans_names_the_line_of_the_loss(make, mesh_of):
    def loss_fn(params, batch):
        return jnp.mean(jnp.log(batch @ params["in"] - 1e3))

    opt = make(optax.sgd(0.1), mesh_of(data=2), loss_fn, **(FSDP if make is so.fsdp else {}))
    state = opt.init(PARAMS)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        jax.block_until_ready(opt.step(state, X))
    lines = [str(frame.statement) for frame in error.traceback if frame.name == "loss_fn"]
    assert lines
    assert "jnp.log" in lines[-1]


def constrained_by(sharding):
    """Return a loss and a `BlockModel` that place arrays within a block over tensor."""

    def within(w, x):
        return x + jnp.tanh(jax.lax.with_sharding_constraint(x @ w["kernel"], sharding))

    def loss_fn(params, batch):
        x = batch @ params["in"]
        for i in range(4):
            x = within({"kernel": params["blocks"]["kernel"][i]}, x)
        return jnp.mean((x @ params["in"].T - batch) ** 2)

    model = so.BlockModel(
        lambda outer, batch: batch @ outer["in"],
        within,
        lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch) ** 2),
    )
    return loss_fn, model


@pytest.mark.parametrize("tensor", tiered([1, 2], lambda size: size == 2))
@pytest.mark.parametrize("row", tiered(["ddp", "fsdp", "hybrid"], quick=lambda row: row == "ddp"))
@pytest.mark.parametrize("named", tiered([False, True], lambda named: named))
def test_a_loss_that_constrains_over_tensor_is_the_same_at_every_size_of_it(
    named, row, tensor, mesh_of
):
    make, sizes, _, options = ROWS[row]
    mesh = mesh_of(**(sizes | {"data": 2, "tensor": tensor}))
    spec = P(None, "tensor")
    loss_fn, model = constrained_by(NamedSharding(mesh, spec) if named else spec)
    rules = [("kernel", P(*([] if row == "hybrid" else [None]), None, "tensor"))]
    opt = make(optax.sgd(0.1), mesh, model if row == "hybrid" else loss_fn, rules=rules, **options)
    state, metrics = opt.step(opt.init(PARAMS), X)
    value, grads = jax.value_and_grad(mean_square_of)(PARAMS)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    new = jax.tree.map(lambda x, grad: x - 0.1 * grad, PARAMS, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.params), new
    )


def mean_square_of(params):
    x = X @ params["in"]
    for i in range(4):
        x = block({"kernel": params["blocks"]["kernel"][i]}, x)
    return jnp.mean((x @ params["in"].T - X) ** 2)


def test_our_mesh_counts_where_jax_has_none(mesh_of):
    """Loops of equinox need this."""
    said = []

    def ask(x):
        said.append(
            (device_kind(), axes_of_role("data"), has_auto_tensor(), mesh_under_trace().manual_axes)
        )
        with pytest.raises(ValueError, match="outside of a strategy's loss"):
            so.losses.batch_mean(x)
        return so.nn.attention(x, x, x)

    for f in (ask, trace_without_mesh(ask)):
        run = per_device(f, mesh_of(data=2), in_specs=P("data"), out_specs=P("data"))
        jax.eval_shape(jax.jit(run), jax.ShapeDtypeStruct((2, 4, 2, 4), np.float32))
    assert said == [("cpu", ("data",), False, ("data", "pipeline", "tensor"))] * 2
