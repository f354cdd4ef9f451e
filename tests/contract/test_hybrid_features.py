"""Each feature of a loss works in a pipeline too, with the same draws and results as without one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.pipelines import SCHEDULES, block_problem
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(16, 4)) * np.linspace(0.2, 2.0, 16)[:, None]
PARAMS = {"blocks": {"kernel": DRAW.normal(size=(8, 8, 8)) / 4}, "in": DRAW.normal(size=(4, 8)) / 2}
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"]),
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch["x"]) ** 2),
)


def run(opt, params, batch, steps=2, seed=5):
    state = opt.init(params, jax.random.key(seed))
    for _ in range(steps):
        state, metrics = opt.step(state, batch)
    return state, metrics


def hybrid(mesh, model, schedule="eager_one_f_one_b", tx=None, **options):
    tx = tx or optax.sgd(0.1, momentum=0.9)
    options = {"micro_batches": 4, "min_shard_elements": 8} | options
    return so.hybrid(tx, mesh, model, schedule=SCHEDULES[schedule], **options)


def same(actual, expected, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.extended):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


def plain(mesh, model, tx=None, **options):
    return so.ddp(
        tx or optax.sgd(0.1, momentum=0.9), mesh, model, **({"micro_batches": 4} | options)
    )


@pytest.mark.parametrize(
    ("schedule", "remat"),
    tiered(
        [("eager_one_f_one_b", True), ("zero_bubble", False), ("interleaved", False)],
        lambda row: row[0] == "zero_bubble",
    ),
)
def test_draws_what_ddp_draws(schedule, remat, mesh_of, x64):
    """With as many data devices and micro-batches: each block, step, device and micro-batch has the
    same key.
    """

    def dropped(x, rng):
        return x * jax.random.bernoulli(rng, 0.7, x.shape) / 0.7

    model = so.BlockModel(
        embed=lambda outer, batch, *, rng: dropped(MODEL.embed(outer, batch), rng),
        block=lambda w, x, *, rng: x + dropped(jnp.tanh(x @ w["kernel"]), rng),
        loss=lambda outer, x, batch, *, rng: MODEL.loss(outer, dropped(x, rng), batch),
    )
    state, metrics = run(
        hybrid(mesh_of(data=2, pipeline=4), model, schedule, remat=remat), PARAMS, {"x": X}
    )
    without = plain(mesh_of(data=2), model)
    expected, wanted = run(without, PARAMS, {"x": X})
    same((state.params, metrics), (expected.params, wanted))
    other, _ = run(without, PARAMS, {"x": X}, seed=6)
    assert relative_difference(other.params, jax.device_get(expected.params)) > 1e-4


@pytest.mark.slow  # test_features.py without a pipeline, test_hybrid_frozen.py
@pytest.mark.parametrize(
    "schedule",
    tiered(["eager_one_f_one_b", "zero_bubble_lockstep_2"], lambda name: "eager" in name),
)
def test_frozen_and_updated_leaves_and_metrics_equal_ddp(schedule, mesh_of, x64):
    """Frozen leaves in blocks and outside, integer, boolean and key leaves.

    New values for some; metrics of every kind.
    """

    def block(w, x):
        scale = jnp.where(w["on"], w["frozen"], 1.0) + 0.1 * jax.random.uniform(w["key"])
        return x + jnp.tanh(x @ w["kernel"]) * scale * (w["power"] + 1)

    def loss(outer, x, batch):
        positive = (batch["x"][:, 0] > 0).sum().astype(jnp.int32)
        aux = {
            "mean": batch["x"].mean(),
            "ratio": so.losses.Weighted(batch["x"][:, 0].sum(), (batch["x"][:, 1] ** 2).sum()),
            "vector": x.mean(0),
            "count": so.losses.Sum(jnp.int32(3)),
            "stats": so.losses.Updated(
                {
                    "stats": {
                        "mean": batch["x"].mean(0),
                        "most": positive,
                        "least": -positive - 1,
                        "any": positive > 1,
                    }
                }
            ),
        }
        return so.losses.Weighted(
            MODEL.loss(outer, x, batch) * positive, positive.astype(float)
        ), aux

    block_leaves = {
        "frozen": np.linspace(0.5, 1.5, 8),
        "on": np.arange(8) % 3 > 0,
        "power": np.arange(8) % 2,
        "key": jax.random.split(jax.random.key(0), 8),
    }
    stats = {"mean": np.zeros(4), "most": np.int32(0), "least": np.int32(0), "any": np.bool_(False)}
    params = {
        "blocks": PARAMS["blocks"] | block_leaves,
        "in": PARAMS["in"],
        "fixed": np.ones(3),
        "stats": stats,
    }
    model = MODEL._replace(block=block, loss=loss)
    rules = [("^(blocks/frozen|blocks/key|fixed|stats/mean)", "frozen")]
    # weights and counts of a piece are no sums over rows
    trusted = {"rules": rules, "view": "unproved"}
    pipelined_opt = hybrid(
        mesh_of(data=2, pipeline=4), model, schedule, placement="zero2", **trusted
    )
    state, metrics = run(pipelined_opt, params, {"x": X})
    other = plain(mesh_of(data=2), model, **trusted)
    expected, wanted = run(other, params, {"x": X})
    assert set(metrics) == {"loss", "grad_norm", "mean", "ratio", "vector", "count"}
    same((state.params, metrics), (expected.params, wanted))
    np.testing.assert_allclose(state.params["stats"]["mean"], X.mean(0), atol=1e-12)
    assert int(state.params["stats"]["least"]) < 0
    same(
        pipelined_opt.evaluate(state, {"x": X}), other.evaluate(other.init(state.params), {"x": X})
    )


@pytest.mark.parametrize(
    ("schedule", "frozen"),
    tiered(
        [("eager_one_f_one_b", "^in"), ("zero_bubble", "^blocks")],
        lambda row: row[0] == "zero_bubble",
    ),
)
def test_one_part_alone_is_trained(schedule, frozen, mesh_of, x64):
    state, metrics = run(
        hybrid(mesh_of(data=2, pipeline=4), MODEL, schedule, rules=[(frozen, "frozen")]),
        PARAMS,
        {"x": X},
    )
    expected, wanted = run(
        plain(mesh_of(data=2), MODEL, rules=[(frozen, "frozen")]), PARAMS, {"x": X}
    )
    same((state.params, metrics), (expected.params, wanted))


def everything(w, x):
    """A block of inner scans, one of them unrolled, a checkpoint, custom gradients and a constant."""
    h = jax.nn.relu(jax.nn.gelu(x @ w["kernel"]) @ jnp.asarray(np.eye(8)[::-1]))
    h, _ = jax.lax.scan(
        lambda h, s: (jnp.tanh(h @ w["kernel"] * s), None), h, jnp.array([0.5, 1.0])
    )
    h, _ = jax.lax.scan(lambda h, s: (jnp.tanh(h * s), None), h, jnp.array([0.5, 1.0]), unroll=True)
    h = checkpoint_name(h, "hidden")
    return x + jax.checkpoint(lambda h, k: jnp.sin(h @ k))(h, w["kernel"]) * twice(h)


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, x), lambda x, dy: (3 * dy * jnp.cos(x),))


@pytest.mark.parametrize(
    ("schedule", "remat_policy", "remat"),
    [
        pytest.param("zero_bubble", None, False, marks=pytest.mark.slow),
        pytest.param("zero_bubble", "full", False, marks=pytest.mark.slow),
        pytest.param(
            "interleaved", jax.checkpoint_policies.dots_saveable, False, marks=pytest.mark.slow
        ),
        pytest.param("eager_one_f_one_b", "full", True, marks=pytest.mark.slow),
        pytest.param(
            "zero_bubble", jax.checkpoint_policies.nothing_saveable, True, marks=pytest.mark.slow
        ),
    ],
    ids=lambda parameter: getattr(parameter, "__name__", str(parameter)),
)
def test_any_block_and_remat_policy_equals_ddp(schedule, remat_policy, remat, mesh_of, x64):
    model = MODEL._replace(block=everything, remat=remat_policy)
    state, metrics = run(
        hybrid(mesh_of(data=2, pipeline=4), model, schedule, remat=remat), PARAMS, {"x": X}
    )
    expected, wanted = run(plain(mesh_of(data=2), model), PARAMS, {"x": X})
    same((state.params, metrics), (expected.params, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager_one_f_one_b", "interleaved"])
def test_line_searches_evaluate_the_loss_of_the_union_batch(schedule, mesh_of, x64):
    case = block_problem("pytree", weighted=True, num_blocks=4, rows=16)
    opt = hybrid(
        mesh_of(data=2, tensor=2, pipeline=2),
        case.loss_fn,
        schedule,
        tx=optax.lbfgs(),
        rules=case.rules,
    )
    expected, final = train(optax.lbfgs(), case.reference, case.params, case.batches, value_fn=True)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-8
    assert expected[-1][0] < expected[0][0]


@pytest.mark.slow  # test_placement.py
def test_specs_are_the_shardings_and_the_second_step_compiles_nothing(mesh_of):
    case = block_problem("pytree", weighted=True, num_blocks=8, rows=8)
    mesh = mesh_of(data=2, tensor=2, pipeline=2)
    opt = hybrid(mesh, case.loss_fn, "interleaved", tx=optax.adafactor(1e-2), rules=case.rules)
    specs = opt.specs(jax.eval_shape(lambda: case.params))
    expected = jax.tree.map(
        lambda spec: NamedSharding(opt.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    state = opt.init(lambda rng: case.params, jax.random.key(0))
    abstract = opt.abstract_state()

    def check(state):
        for leaf, sharding, promised in zip(
            *map(jax.tree.leaves, (state, expected, abstract)), strict=True
        ):
            assert leaf.sharding == sharding == promised.sharding
            assert (leaf.shape, leaf.dtype) == (promised.shape, promised.dtype)

    check(state)
    # 5 is odd, so data finds no dim
    assert specs.params["blocks"]["w"][0] == P("pipeline", None, "tensor")
    assert specs.params["blocks"]["gate"] == P("pipeline")
    old = jax.tree.leaves(state)
    state, _ = opt.step(state, case.batches[0])
    check(state)
    assert all(leaf.is_deleted() for leaf in old if leaf.size > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax._src.compiler,
            "compile_or_get_cached",
            lambda *_, **__: pytest.fail("compiled again"),
        )
        state, _ = opt.step(state, case.batches[1])
    check(state)
