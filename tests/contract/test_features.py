"""A loss may ask for aux metrics, rng, frozen and updated leaves, half precision and extra optax
arguments.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.problems import problem
from support.reference import relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
PARAMS = {"w": jnp.full((8, 8), 0.5), "b": jnp.zeros((8,))}


def square(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None, :]) ** 2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_aux_metrics_are_those_of_the_union_batch(mesh_of, micro_batches):
    def loss_fn(params, batch):
        aux = {
            "mean": batch.mean(),
            "ratio": so.losses.Weighted(batch[:, 0].sum(), (batch[:, 1] ** 2).sum()),
            "count": so.losses.Sum(jnp.int32(batch.shape[0])),
            "vector": batch.mean(0),
        }
        return square(params, batch), aux

    sizes = {"micro_batches": micro_batches, "min_shard_elements": 1}
    # but for "count"
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), loss_fn, view="unproved", **sizes)
    _, metrics = opt.step(opt.init(PARAMS), X)
    assert set(metrics) == {"loss", "grad_norm", "mean", "ratio", "count", "vector"}
    np.testing.assert_allclose(metrics["mean"], X.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio"], X[:, 0].sum() / (X[:, 1] ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["vector"], X.mean(0), rtol=1e-4, atol=1e-6)
    assert metrics["count"] == 16


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name in ("zero1", "fsdp")))
def test_evaluate_gives_the_same_loss_and_donates_nothing(strategy, mesh_of):
    def loss_fn(params, batch):
        return (square(params, batch), {"m": batch.mean()})

    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), loss_fn)
    state = opt.init(PARAMS)
    metrics = opt.evaluate(state, X)
    np.testing.assert_allclose(metrics["loss"], square(PARAMS, X), rtol=1e-6)
    assert set(metrics) == {"loss", "m"}
    opt.step(state, X)


def test_each_step_device_and_micro_batch_has_its_own_key(mesh_of):
    def loss_fn(params, batch, *, rng):
        # which rows are this device's
        draws = jnp.where(batch[:, 0] > 0, jax.random.uniform(rng), 0.0)
        return square(params, batch[:, 1:]), {
            "draws": so.losses.Updated(
                {"seen": jnp.zeros((16,)).at[batch[:, 0].astype(int) - 1].set(draws) * 8}
            )
        }

    params = {**PARAMS, "seen": jnp.zeros((16,))}
    opt = so.ddp(
        optax.sgd(0.0),
        mesh_of(data=4),
        loss_fn,
        micro_batches=2,
        rules=[("seen", "frozen")],
        view="unproved",
    )
    rows = np.concatenate([np.arange(1, 17, dtype=np.float32)[:, None], X], axis=1)
    state = opt.init(params, jax.random.key(5))
    seen = []
    for _ in range(2):
        state, _ = opt.step(state, rows)
        seen.append(np.asarray(state.params["seen"]))
    # two rows share a device and micro-batch, so 16 rows draw 8 different numbers, others the next
    # step
    assert len(set(np.round(seen[0], 6))) == 8
    assert not set(np.round(seen[0], 6)) & set(np.round(seen[1], 6))
    replayed_state = opt.init(params, jax.random.key(5))
    replayed_state, _ = opt.step(replayed_state, rows)
    np.testing.assert_array_equal(replayed_state.params["seen"], seen[0])


def test_blocks_draw_their_own_numbers():
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x, rng: x + jax.random.uniform(rng) * w["one"],
        loss=lambda outer, x, batch: x.mean(),
    )
    params = {"blocks": {"one": jnp.eye(3)[:, None, :]}}
    x = jax.jit(model._replace(loss=lambda outer, x, batch: x).loss_fn)(
        params, jnp.zeros((1, 3)), jax.random.key(0)
    )
    assert len(set(x[0].tolist())) == 3


@pytest.mark.parametrize(
    "strategy", tiered(STRATEGIES, lambda name: name == "fsdp", fast=lambda name: name == "zero1")
)
def test_frozen_leaves_are_not_trained_and_batch_statistics_can_be_updated(strategy, mesh_of):
    def loss_fn(params, batch):
        normal = batch - params["stats"]["mean"][None, :]
        stats = {
            "stats": {
                "mean": 0.9 * params["stats"]["mean"] + 0.1 * batch.mean(0),
                "steps": params["stats"]["steps"] + 1,
            }
        }
        return square(params, normal) + params["base"].sum(), {"stats": so.losses.Updated(stats)}

    params = {
        **PARAMS,
        "base": jnp.ones((8, 8)),
        "stats": {"mean": jnp.zeros((8,)), "steps": jnp.int32(0)},
    }
    opt = STRATEGIES[strategy](
        optax.adam(0.1),
        mesh_of(data=4),
        loss_fn,
        rules=[("^base$", "frozen"), ("^stats/mean", "frozen")],
        micro_batches=2,
    )
    state = opt.init(params)
    assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(
        {"w": 0, "b": 0, "base": None, "stats": {"mean": None, "steps": None}}
    )
    state, metrics = opt.step(state, X)
    np.testing.assert_array_equal(state.params["base"], params["base"])
    np.testing.assert_allclose(state.params["stats"]["mean"], 0.1 * X.mean(0), rtol=1e-4, atol=1e-6)
    assert int(state.params["stats"]["steps"]) == 1
    assert "stats" not in metrics
    assert not np.allclose(state.params["w"], PARAMS["w"])


def test_gradients_of_frozen_leaves_are_not_sent(mesh_of):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x: jnp.tanh(x @ (w["base"] + w["a"] @ w["b"])),
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    params = {
        "blocks": {"base": jnp.ones((3, 8, 8)), "a": jnp.ones((3, 8, 4)), "b": jnp.ones((3, 4, 8))}
    }
    opt = so.fsdp(
        optax.sgd(0.1), mesh_of(data=4), model, rules=[("base$", "frozen")], min_shard_elements=1
    )
    state = opt.init(params)
    program = so.hlo.audit(opt.step, state, np.ones((8, 8), np.float32))
    sent = [
        (c.kind, c.bytes)
        for c in program.collectives
        if c.kind in ("all-gather", "reduce-scatter", "all-to-all")
    ]
    # the joined shards of base, a and b are gathered; only the gradients of a and b are summed
    assert set(sent) == {("all-gather", 4 * (64 + 32 + 32)), ("reduce-scatter", 4 * (32 + 32))}


def test_batch_statistics_of_nnx_live_in_frozen_leaves(mesh_of):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dense(x))

    graph, weights, batch_stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch):
        net = nnx.merge(graph, params["weights"], params["rest"])
        loss = jnp.mean(jnp.square(net(batch) - batch))
        _, _, batch_stats = nnx.split(net, nnx.Param, ...)
        return loss, {"rest": so.losses.Updated({"rest": batch_stats})}

    params = {"weights": weights, "rest": batch_stats}
    opt = so.fsdp(
        optax.adam(1e-2), mesh_of(data=2), loss_fn, rules=[("^rest", "frozen")], view="unproved"
    )  # halves normalise apart
    state = opt.init(params)
    state, _ = opt.step(state, X)
    halves = []
    for half in (X[:8], X[8:]):
        # modules change the values that they are merged from
        net = nnx.merge(graph, weights, jax.tree.map(jnp.copy, batch_stats))
        net(half)
        halves.append(np.asarray(net.norm.mean[...]))
    merged = nnx.merge(graph, state.params["weights"], state.params["rest"])
    np.testing.assert_allclose(
        merged.norm.mean[...], (halves[0] + halves[1]) / 2, rtol=1e-4, atol=1e-6
    )
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_updates_must_fit(mesh_of):
    def loss_fn(params, batch):
        return square(params, batch), {
            "u": so.losses.Updated({"w": params["w"], "n": jnp.zeros((2,)), "z": params["b"]})
        }

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=4), loss_fn)
    state = opt.init({**PARAMS, "n": jnp.int32(0)})
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        opt.step(state, X)
    assert (
        str(caught.value)
        == "ddp: so.losses.Updated does not fit the parameters.\n  w: not a frozen parameter leaf\n  z:"
        " not a frozen parameter leaf\n  n: shape (2,), the parameter has ()\n  n: float32, the parameter is"
        " int32\nFix: return so.losses.Updated with the parameters' own nesting, for leaves that rules freeze or of integer"
        " type."
    )


def test_optimizers_that_want_the_loss_get_it(mesh_of):
    tx = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, accumulation_size=1)
    )
    opt = so.zero(
        tx, mesh_of(data=4), lambda params, batch: jnp.float32(1.0) + 0 * square(params, batch)
    )
    state = opt.init(PARAMS)
    for _ in range(4):
        state, _ = opt.step(state, X)
    assert float(state.opt_state[1].scale) < 1.0


BACKTRACKING = optax.scale_by_backtracking_linesearch(6, store_grad=True)


@pytest.mark.parametrize(
    ("strategy", "search"),
    tiered(
        [
            ("fsdp", BACKTRACKING),
            ("fsdp", optax.scale_by_zoom_linesearch(20)),
            ("zero1", BACKTRACKING),
        ],
        lambda row: False,
        ids=lambda row: f"{row[0]}-{'backtracking' if row[1] is BACKTRACKING else 'zoom'}",
    ),
)
def test_line_searches_evaluate_the_loss_of_the_union_batch(strategy, search, mesh_of, x64):
    """L-BFGS differentiates `value_fn` from outside, in a while loop, in the global view.

    In every run rooms/losses/test_global_view.py has a search over the whole batch, and
    test_edge_cases.py its loss."""
    tx = optax.lbfgs(linesearch=search)
    case = problem("odd", weighted=True, steps=3)
    opt = STRATEGIES[strategy](tx, mesh_of(replica=2, data=2), case.loss_fn)
    expected, final = train(tx, case.reference, case.params, case.batches, value_fn=True)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, final) <= 1e-8
    assert expected[-1][0] < expected[0][0]


@pytest.mark.parametrize("model", ["function", "blocks"])
def test_gather_dtype_computes_in_half_precision_with_fp32_masters(model, mesh_of):
    seen = []

    def block(w, x):
        seen.append(w["w"].dtype)
        return jnp.tanh(x @ w["w"])

    blocks = so.BlockModel(
        embed=lambda outer, batch: (batch @ outer["in"].astype(jnp.float32)).astype(
            outer["in"].dtype
        ),
        block=block,
        loss=lambda outer, x, batch: jnp.mean(x.astype(jnp.float32) ** 2),
    )
    draw = np.random.default_rng(0)
    params = {
        "in": np.eye(8, dtype=np.float32),
        "blocks": {"w": draw.normal(size=(3, 8, 8)).astype(np.float32)},
    }
    loss_fn = blocks if model == "blocks" else lambda params, batch: blocks.loss_fn(params, batch)
    opt = so.fsdp(
        optax.sgd(0.5), mesh_of(data=4), loss_fn, gather_dtype=jnp.bfloat16, min_shard_elements=1
    )

    def reference(params, batch):
        return blocks.loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)

    gradient = jax.jit(jax.grad(reference))
    state = opt.init(params)
    expected = params
    for _ in range(3):
        state, _ = opt.step(state, X)
        grads = jax.device_get(gradient(expected, X))
        expected = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.5) * g, expected, grads)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    for leaf, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, wanted, atol=0.01)


@pytest.mark.parametrize(
    "names", tiered([["ddp", "fsdp"], [*STRATEGIES]], lambda names: len(names) == 2, ids="-".join)
)
def test_half_precision_parameters_train_on_every_strategy(names, mesh_of):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    losses = set()
    for name in names:
        opt = STRATEGIES[name](
            optax.sgd(0.5),
            mesh_of(data=4),
            lambda params, batch: square(params, batch.astype(jnp.bfloat16)),
        )
        state, _ = opt.step(opt.init(params), X)
        state, metrics = opt.step(state, X)
        assert metrics["loss"].dtype == jnp.float32
        losses.add(round(float(metrics["loss"]), 2))
    assert len(losses) == 1


@pytest.mark.parametrize(
    "make",
    tiered(
        [*STRATEGIES, "global", "hybrid"],
        lambda name: False,
        fast=lambda name: name != "zero1",
    ),
)
def test_the_optimizer_receives_gradients_in_the_dtype_of_their_parameters(make, mesh_of):
    """Sums over micro-batches are in float32, and are cast back, so the state of the optimizer is
    as on one device.

    The mutation: `accumulate` returns the sums as they are.
    """
    received = []

    def update(grads, state, params):
        received.append(jax.tree.map(lambda grad: grad.dtype, grads))
        return grads, state

    tx = optax.GradientTransformation(lambda params: (), update)
    params = {
        "blocks": {"w": jnp.ones((2, 8, 8), jnp.bfloat16), "b": jnp.ones((2, 8))},
        "in": jnp.ones((8, 8), jnp.bfloat16),
    }
    model = so.BlockModel(
        embed=lambda outer, batch: batch.astype(jnp.bfloat16) @ outer["in"],
        block=lambda w, x: x + jnp.tanh(x @ w["w"]) * w["b"].astype(x.dtype)[None],
        loss=lambda outer, x, batch: jnp.mean(x.astype(jnp.float32) ** 2),
    )
    options = {"micro_batches": 2}
    if make == "hybrid":
        opt = so.hybrid(tx, mesh_of(data=2, pipeline=2), model, min_shard_elements=8, **options)
    elif make == "global":
        opt = so.fsdp(tx, mesh_of(data=2), model, min_shard_elements=8, view="global", **options)
    else:
        opt = STRATEGIES[make](tx, mesh_of(data=2), model, **options)
    opt.step.lower(opt.abstract_state(params), X)
    assert received
    assert all(dtypes == jax.tree.map(lambda x: x.dtype, params) for dtypes in received)


def test_a_loss_that_scans_from_constant_zeros_works(mesh_of):
    """An RNN's zero carry is a type error under check_vma=True."""

    def loss_fn(params, batch):
        def cell(carry, x):
            return jnp.tanh(carry @ params["w"] + x), None

        final, _ = jax.lax.scan(cell, jnp.zeros_like(batch[:, :, 0]), jnp.moveaxis(batch, 2, 0))
        return jnp.mean(final**2) + 0 * params["b"].sum()

    batch = np.random.default_rng(1).normal(size=(8, 8, 5)).astype(np.float32)
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), loss_fn, min_shard_elements=1)
    state, _ = opt.step(opt.init(PARAMS), batch)
    np.testing.assert_allclose(
        state.params["w"], PARAMS["w"] - 0.1 * jax.grad(loss_fn)(PARAMS, batch)["w"], rtol=1e-5
    )


def test_equinox_modules_are_parameters_although_callable(mesh_of):
    net = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)

    def loss_fn(params, batch):
        return jnp.mean(jax.vmap(eqx.combine(params, static))(batch) ** 2)

    opt = so.fsdp(optax.adam(1e-2), mesh_of(data=4), loss_fn, min_shard_elements=1)
    state = opt.init(params)
    before = float(opt.evaluate(state, X)["loss"])
    for _ in range(5):
        state, metrics = opt.step(state, X)
    assert float(metrics["loss"]) < before
    assert isinstance(state.params, eqx.nn.MLP)
    with pytest.raises(TypeError) as caught:
        opt.init(net)
    assert (
        str(caught.value)
        == "fsdp: parameters must be a pytree of arrays.\n  activation: custom_jvp\n "
        " final_activation: function\nFix: split the rest off, for instance with"
        " equinox.partition(model, equinox.is_array) or flax.nnx.split."
    )


def test_model_loss_fn_is_treated_as_the_model(mesh_of):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x: x @ w["w"],
        loss=lambda outer, x, batch: x.mean(),
    )
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), model.loss_fn, min_shard_elements=1)
    specs = opt.specs({"blocks": {"w": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}})
    assert tuple(specs.params["blocks"]["w"]) == (None, "data", None)


def test_a_mesh_from_jax_itself_is_taken(mesh_of):
    mesh = jax.make_mesh((8,), ("data",))
    opt = so.zero(optax.adam(0.1), mesh, square, min_shard_elements=1)
    _, metrics = opt.step(opt.init(PARAMS), X)
    np.testing.assert_allclose(metrics["loss"], square(PARAMS, X), rtol=1e-6)


def test_a_strategy_and_its_state_have_the_fields_of_the_contract(mesh_of):
    tx = optax.adam(0.1)
    opt = so.fsdp(tx, mesh_of(data=4, replica=2), square)
    assert isinstance(opt, so.ShardedOptimizer)
    assert opt.wrapped is tx
    assert (opt.rank, opt.world_size) == (0, 8)
    assert opt.config.strategy == "fsdp"
    assert opt.config.mesh_shape == {"replica": 2, "data": 4, "pipeline": 1, "tensor": 1}
    state = opt.init(PARAMS)
    assert all(
        a is b
        for a, b in zip(
            jax.tree.leaves(opt.synchronize(state)), jax.tree.leaves(state), strict=True
        )
    )
