"""Half precision in a pipeline: the dtypes of stored leaves, of messages and of sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pipelines import SCHEDULES
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import audit

DRAW = np.random.default_rng(0)
X = (
    DRAW.normal(size=(16, 4)).astype(np.float32)
    * np.linspace(0.2, 2.0, 16, dtype=np.float32)[:, None]
)
PARAMS = {
    "blocks": {"up": DRAW.normal(size=(8, 8, 16)) / 4, "down": DRAW.normal(size=(8, 16, 8)) / 4},
    "in": DRAW.normal(size=(4, 8)) / 2,
}
KEEPS_GRADIENTS = optax.chain(optax.trace(1.0), optax.scale(0.1))
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def model(seen=None):
    def block(w, x):
        if seen is not None:
            seen.update({w["up"].dtype, x.dtype})
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    return so.BlockModel(
        embed=lambda outer, batch: batch["x"].astype(outer["in"].dtype) @ outer["in"],
        block=block,
        loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T).astype(jnp.float32) ** 2),
    )


def gradient(opt, params):
    """Return the gradient, which the optimizer keeps, and the metrics of one step."""
    state, metrics = opt.step(opt.init(params), {"x": X})
    return jax.device_get((state.opt_state[0].trace, metrics))


def check(grads_and_metrics, dtype):
    """Compare with the gradient that fp32 gives at the same rounded parameters: half a percent is
    bfloat16's rounding.
    """
    grads, metrics = grads_and_metrics
    rounded = cast(cast(PARAMS, jnp.bfloat16), jnp.float32)
    loss, expected = jax.jit(jax.value_and_grad(model().loss_fn))(rounded, {"x": X})
    np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-3)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(expected), rtol=5e-3)
    for leaf, other in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        assert leaf.dtype == dtype
        assert np.linalg.norm(np.asarray(leaf, np.float32) - other) <= 0.01 * np.linalg.norm(other)


def hybrid(mesh, schedule, seen=None, **options):
    rules = RULES if mesh.shape["tensor"] > 1 else ()
    options = {"micro_batches": 4, "min_shard_elements": 8, "rules": rules} | options
    return so.hybrid(KEEPS_GRADIENTS, mesh, model(seen), schedule=SCHEDULES[schedule], **options)


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        pytest.param("eager_one_f_one_b", "ddp", marks=pytest.mark.slow),
        pytest.param("interleaved", "zero1", marks=pytest.mark.slow),
        pytest.param("zero_bubble", "zero2", marks=pytest.mark.slow),
        pytest.param("zero_bubble_lockstep", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_parameters_and_activations_may_have_half_precision(schedule, placement, mesh_of):
    seen = set()
    opt = hybrid(mesh_of(data=2, tensor=2, pipeline=2), schedule, seen, placement=placement)
    check(gradient(opt, cast(PARAMS, jnp.bfloat16)), jnp.bfloat16)
    assert seen == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow  # test_features.py
@pytest.mark.parametrize(
    ("schedule", "remat"),
    tiered(
        [("eager_one_f_one_b", False), ("interleaved", True), ("zero_bubble", False)],
        lambda row: row[0] == "zero_bubble",
    ),
)
def test_gather_dtype_computes_in_half_precision_with_fp32_masters(schedule, remat, mesh_of):
    seen = set()
    opt = hybrid(
        mesh_of(data=2, pipeline=4), schedule, seen, gather_dtype=jnp.bfloat16, remat=remat
    )
    check(gradient(opt, cast(PARAMS, jnp.float32)), jnp.float32)
    assert seen == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow  # test_collectives.py has it without stages
def test_gathers_in_half_precision_send_half(mesh_of):
    sent = {}
    for dtype in (None, jnp.bfloat16):
        opt = hybrid(mesh_of(data=2, pipeline=2), "eager_one_f_one_b", gather_dtype=dtype)
        abstract = jax.eval_shape(lambda: cast(PARAMS, jnp.float32))
        report = audit(
            opt.step,
            opt.abstract_state(abstract),
            {"x": jax.ShapeDtypeStruct(X.shape, jnp.float32)},
        )
        sent[dtype] = {
            kind: report.of(kind=kind).total.bytes for kind in ("all-gather", "reduce-scatter")
        }
    assert sent[jnp.bfloat16]["all-gather"] * 2 == sent[None]["all-gather"] > 0
    assert sent[jnp.bfloat16]["reduce-scatter"] == sent[None]["reduce-scatter"] > 0


@pytest.mark.parametrize(
    "schedule", tiered(["eager_one_f_one_b", "zero_bubble"], lambda name: name == "zero_bubble")
)
def test_sums_over_micro_batches_are_taken_in_fp32(schedule, mesh_of):
    """A bfloat16 sum loses 1/128 next to 4. An fp32 sum keeps all 31 of these small terms."""
    values = np.full((32, 1), 1 / 128, np.float32)
    values[0] = 4.0  # 4 + 1/128 is 4 in bfloat16
    scaling_model = so.BlockModel(
        embed=lambda outer, batch: batch["x"].astype(jnp.bfloat16) * outer["scale"],
        block=lambda w, x: x * w["one"],
        loss=lambda outer, x, batch: (
            x.astype(jnp.float32).sum() + 0 * outer["scale"].astype(jnp.float32)
        ),
    )
    params = {"blocks": {"one": jnp.ones((2,), jnp.bfloat16)}, "scale": jnp.ones((), jnp.bfloat16)}
    opt = so.hybrid(
        optax.sgd(32.0),
        mesh_of(data=1, pipeline=2),
        scaling_model,
        schedule=SCHEDULES[schedule],
        micro_batches=32,
        placement="ddp",
        view="unproved",  # each of 32 micro-batches gives its sum
    )
    state, _ = opt.step(opt.init(params), {"x": values})
    expected = 1 - (4 + 31 / 128)
    for leaf in jax.tree.leaves(state.params):
        np.testing.assert_allclose(np.asarray(leaf, np.float32), expected, rtol=4e-3)
        assert abs(expected - -3) > 4e-3 * abs(expected)
