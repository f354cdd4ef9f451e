"""An exact reducer with a dtype: each device's gradient is rounded once before it is summed over data, and the
bytes of the sum halve.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.reference import relative_difference
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.collectives import LeafWire, per_device, reduce_scatter
from shardopt.hlo import audit

DIM = 16
HIDDEN = 32
LAYERS = 2
ROWS = 16
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]
RATE = 0.05
MOMENTUM = 0.9
STEPS = 4

MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"] + w["bias"][None, :]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch["y"]) ** 2),
)


def params_of(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"up": (LAYERS, DIM, HIDDEN), "down": (LAYERS, HIDDEN, DIM), "bias": (LAYERS, HIDDEN)}
    blocks = {name: 0.3 * rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return {"blocks": blocks, "in": 0.3 * rng.normal(size=(8, DIM)).astype(dtype)}


def batches_of():
    rng = np.random.default_rng(1)
    scale = np.linspace(0.2, 2.0, ROWS)[:, None]
    return [
        {"x": scale * rng.normal(size=(ROWS, 8)), "y": rng.normal(size=(ROWS, 8))}
        for _ in range(STEPS)
    ]


def trained(params, batches, *, data, replica, micro_batches, each_rounded, is_rounded):
    """Train on one device, which rounds the gradients that each device would send."""

    def rounded(g):
        return np.asarray(jnp.asarray(g).astype(jnp.bfloat16), np.float64)

    grad = jax.jit(jax.grad(MODEL.loss_fn))
    leaves, treedef = jax.tree.flatten(params)
    moments = [np.zeros_like(leaf) for leaf in leaves]
    pieces = data * replica * micro_batches
    for batch in batches:
        total = [np.zeros_like(leaf) for leaf in leaves]
        for device in range(data * replica):
            mine = [np.zeros_like(leaf) for leaf in leaves]
            for m in range(micro_batches):
                start = (device * micro_batches + m) * (ROWS // pieces)
                size = ROWS // pieces
                rows = jax.tree.map(
                    lambda x, start=start, size=size: x[start : start + size], batch
                )
                grads = [
                    np.asarray(g) / pieces
                    for g in jax.tree.leaves(grad(treedef.unflatten(leaves), rows))
                ]
                grads = [
                    rounded(g) if each_rounded and flag else g
                    for g, flag in zip(grads, is_rounded, strict=True)
                ]
                mine = [a + b for a, b in zip(mine, grads, strict=True)]
            if not each_rounded:
                mine = [rounded(g) if flag else g for g, flag in zip(mine, is_rounded, strict=True)]
            total = [a + b for a, b in zip(total, mine, strict=True)]
        moments = [MOMENTUM * a + b for a, b in zip(moments, total, strict=True)]
        leaves = [p - RATE * m for p, m in zip(leaves, moments, strict=True)]
    return treedef.unflatten(leaves)


EXACT = [
    ("fsdp", {"data": 4}, 2),
    ("zero1", {"data": 4}, 2),
    ("zero2", {"data": 2, "tensor": 2}, 2),
    ("fsdp", {"data": 2, "tensor": 2}, 1),
    ("fsdp", {"replica": 2, "data": 2}, 2),
    ("fsdp", {"data": 4}, 1),
]


@pytest.mark.slow  # test_the_sum_sends_half
@pytest.mark.parametrize(
    ("strategy", "sizes", "micro_batches"),
    tiered(EXACT, lambda row: False, fast=lambda row: row == EXACT[0], ids=str),
)
def test_equals_one_device_that_rounds_what_is_sent(strategy, sizes, micro_batches, mesh_of, x64):
    params = params_of()
    batches = batches_of()
    rules = RULES if "tensor" in sizes else ()
    tx = optax.sgd(RATE, momentum=MOMENTUM)

    def run(dtype):
        opt = STRATEGIES[strategy](
            tx,
            mesh_of(**sizes),
            MODEL,
            micro_batches=micro_batches,
            rules=rules,
            reducer=so.reducers.exact(dtype),
        )
        state = opt.init(params)
        for batch in batches:
            state, _ = opt.step(state, batch)
        return state.params, opt

    trained_params, opt = run(jnp.bfloat16)
    is_rounded = ["data" in tuple(row.opt_state) for row in opt.config.report().rows]
    split_options = {
        "data": sizes["data"],
        "replica": sizes.get("replica", 1),
        "micro_batches": micro_batches,
    }
    expected = trained(
        params, batches, **split_options, each_rounded=strategy != "zero1", is_rounded=is_rounded
    )
    exact = trained(
        params, batches, **split_options, each_rounded=True, is_rounded=[False] * len(is_rounded)
    )
    assert relative_difference(trained_params, expected) <= 1e-6  # sums in float32
    assert relative_difference(trained_params, exact) > 1e-5


@pytest.mark.slow  # or the contract would not be exact
def test_by_default_nothing_is_rounded(mesh_of):
    def sent(**options):
        opt = STRATEGIES["fsdp"](optax.sgd(RATE), mesh_of(data=4), MODEL, **options)
        batch = {
            "x": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32),
            "y": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32),
        }
        return opt.step.lower(opt.abstract_state(params_of(np.float32)), batch).as_text()

    assert sent() == sent(reducer=so.reducers.exact())
    assert "bf16" not in sent()
    assert "bf16" in sent(reducer=so.reducers.exact(jnp.bfloat16))


@pytest.mark.parametrize(
    ("strategy", "sizes", "micro_batches"),
    tiered(EXACT, lambda row: row in EXACT[:1], fast=lambda row: row == EXACT[0], ids=str),
)
def test_the_sum_sends_half(strategy, sizes, micro_batches, mesh_of):
    rules = RULES if "tensor" in sizes else ()
    batch = {
        "x": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32),
        "y": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32),
    }

    def sent(dtype):
        opt = STRATEGIES[strategy](
            optax.sgd(RATE),
            mesh_of(**sizes),
            MODEL,
            micro_batches=micro_batches,
            rules=rules,
            reducer=so.reducers.exact(dtype),
        )
        traffic_by_kind = (
            audit(opt.step, opt.abstract_state(params_of(np.float32)), batch)
            .of(axis="data")
            .by_kind()
        )
        return {kind: traffic.wire_bytes for kind, traffic in traffic_by_kind.items()}

    wide = sent(None)
    narrow = sent(jnp.bfloat16)
    assert wide.pop("reduce-scatter") == 2 * narrow.pop("all-to-all")
    assert wide == narrow


@pytest.mark.parametrize("placement", tiered(["fsdp", "zero2", "zero1"], lambda placement: False))
def test_a_pipeline_rounds_its_sums(placement, mesh_of, x64):
    """Rounded once for each micro-batch and device, or once for the sum: the difference is that of
    rounding.
    """
    params = params_of()
    batches = batches_of()
    final_params = []
    for dtype in (None, jnp.bfloat16):
        opt = so.hybrid(
            optax.sgd(RATE, momentum=MOMENTUM),
            mesh_of(data=2, pipeline=2),
            MODEL,
            micro_batches=4,
            placement=placement,
            min_shard_elements=8,
            reducer=so.reducers.exact(dtype),
        )
        state = opt.init(params)
        for batch in batches:
            state, _ = opt.step(state, batch)
        final_params.append(jax.device_get(state.params))
    assert 1e-5 < relative_difference(final_params[1], final_params[0]) < 1e-2


def test_a_wider_dtype_sums_half_precision_exactly(mesh_of):
    """A sum of 1 + 2^-9 + 2^-9 in float32 keeps the small terms. Each of them added alone would be
    lost.
    """
    mesh = mesh_of(data=4)
    parts = jnp.array([1.0, 2.0**-9, 2.0**-9, 0.0], jnp.bfloat16)[:, None] * jnp.ones(
        (4, 4), jnp.bfloat16
    )

    def local(x):
        return reduce_scatter([x[0]], [LeafWire(0, P(None), "data", scatter_dtype=jnp.float32)])

    (total,) = jax.jit(per_device(local, mesh, in_specs=(P("data"),), out_specs=[P("data")]))(parts)
    assert total.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(total, np.float32), np.float32(jnp.bfloat16(1.0 + 2.0**-8))
    )


@pytest.mark.slow
def test_on_tpu_it_stays_a_reduce_scatter_of_half_the_bytes():
    """The test fails, rather than skips, if libtpu is not installed: pip install 'shardopt[tpu]'."""
    shapes = {
        "blocks": {"up": (4, 512, 2048), "down": (4, 2048, 512), "bias": (4, 2048)},
        "in": (8, 512),
    }
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    batch = {
        "x": jax.ShapeDtypeStruct((64, 8), jnp.float32),
        "y": jax.ShapeDtypeStruct((64, 8), jnp.float32),
    }

    def sent(dtype):
        def make(mesh):
            return so.fsdp(optax.sgd(RATE), mesh, MODEL, reducer=so.reducers.exact(dtype))

        report = so.planning.aot(make, params, batch, topology="v5e:2x4")
        # the matrices: XLA may all-reduce a bias
        return report.audit.of(axis="data", min_bytes=65536).by_kind()["reduce-scatter"].wire_bytes

    assert sent(jnp.bfloat16) * 2 == sent(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"), [(so.fsdp, {}), (so.zero, {"stage": 2})], ids=["fsdp", "zero2"]
)
def test_on_tpu_every_micro_batch_is_scattered(make, options):
    """XLA would sum them first, in the memory of an unsharded gradient, and fails where sums are
    cast back.
    """
    shapes = {
        "blocks": {"up": (4, 512, 2048), "down": (4, 2048, 512), "bias": (4, 2048)},
        "in": (512, 512),
    }
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    batch = {
        "x": jax.ShapeDtypeStruct((64, 512), jnp.float32),
        "y": jax.ShapeDtypeStruct((64, 512), jnp.float32),
    }

    def sent(dtype):
        of = {**options, "micro_batches": 2, "reducer": so.reducers.exact(dtype)}
        report = so.planning.aot(
            lambda mesh: make(optax.sgd(RATE), mesh, MODEL, **of), params, batch, topology="v5e:2x4"
        )
        return report.audit.of(axis="data", min_bytes=65536).by_kind()["reduce-scatter"].wire_bytes

    # A single micro-batch is no reference: XLA may choose an all-reduce for it
    # (docs/notes/tpu_compiler.md).
    matrices = [shapes["blocks"]["up"], shapes["blocks"]["down"], shapes["in"]]
    of_each_micro_batch = sum(4 * math.prod(shape) for shape in matrices) * 7 // 8
    assert sent(None) == 2 * of_each_micro_batch
    assert sent(jnp.bfloat16) == of_each_micro_batch
