"""A strategy trains each block that plain jax differentiates, whatever the block keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import jitted

import shardopt as so
from shardopt.models import gpt
from shardopt.remat._gathered_block import kept_by_jax
from shardopt.strategies import _slots

DIM = 6
ROWS = 8


def params_of():
    draw = np.random.default_rng(0)
    blocks = {"w": 0.3 * draw.normal(size=(3, DIM, DIM)), "scale": draw.random((3, 1, DIM))}
    outer = {"in": 0.3 * draw.normal(size=(DIM, DIM)), "out": draw.normal(size=(DIM, 1))}
    return jax.tree.map(np.float32, outer | {"blocks": blocks})


def on_host(x):
    """Return a function of numpy, which has no derivative."""
    return jax.pure_callback(
        lambda x: np.cos(x, dtype=np.float32), jax.ShapeDtypeStruct(x.shape, jnp.float32), x
    )


def looped(x):
    """Return the result of a `while` loop, which has no derivative backwards."""
    _, x = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))
    return x


def embedded(outer, batch):
    """Return x, and numbers of the batch that each block may change."""
    return {
        "x": batch @ outer["in"],
        "gate": batch,
        "count": jnp.int32(0),
        "penalty": jnp.float32(0),
    }


def model_of(block, *, embed=embedded):
    return so.BlockModel(
        embed=embed,
        block=block,
        loss=lambda outer, x, batch: jnp.mean((x["x"] @ outer["out"] - batch[:, :1]) ** 2),
    )


def frozen_on_host(w, x):
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) * on_host(w["scale"])}


def frozen_in_a_loop(w, x):
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) * looped(w["scale"])}


def gated_on_host(w, x):
    gate = on_host(x["gate"])
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) * gate, "gate": gate, "count": x["count"] + 1}


def gated_in_a_loop(w, x):
    gate = looped(x["gate"] * (1.0 + x["count"]))
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) * gate, "gate": gate, "count": x["count"] + 1}


def gated_by_x(w, x):
    """The second leaf has no weight, and a tangent of the first."""
    return x | {"x": x["x"] @ w["w"] * x["gate"], "gate": jnp.tanh(x["x"])}


def with_constants(w, x):
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) * w["scale"], "count": 3, "penalty": 0.0}


def without_weights(w, x):
    return {"x": 2 * x["x"], "gate": jnp.zeros_like(x["gate"]), "count": 3, "penalty": 1.0}


outer_weights = []


def with_outer_weights(w, x):
    """Each block reads an outer weight that embed has left for it."""
    return x | {"x": jnp.tanh(x["x"] @ w["w"]) @ outer_weights[-1]}


def leaving_outer_weights(outer, batch):
    outer_weights.append(outer["in"])
    return embedded(outer, batch)


STRATEGIES = {
    "ddp": so.ddp,
    "zero": so.zero,
    "fsdp": functools.partial(so.fsdp, min_shard_elements=1),
}
FROZEN = [("blocks/scale", "frozen")]
BLOCKS = [
    frozen_on_host,
    frozen_in_a_loop,
    gated_on_host,
    gated_in_a_loop,
    gated_by_x,
    with_constants,
    without_weights,
    with_outer_weights,
]


def trained(tx, model, batches, *, frozen):
    """Return the parameters after steps of plain jax."""
    params = jax.tree.map(jnp.asarray, params_of())

    def loss_of(params, batch):
        if frozen:
            params = params | {
                "blocks": params["blocks"]
                | {"scale": jax.lax.stop_gradient(params["blocks"]["scale"])}
            }
        return model.loss_fn(params, batch)

    tx = jitted(tx)
    state = tx.init(params)
    for batch in batches:
        grads = jax.jit(jax.grad(loss_of))(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_only_what_has_a_tangent_is_differentiated(block, strategy, mesh_of):
    embed = leaving_outer_weights if block is with_outer_weights else embedded
    model = model_of(block, embed=embed)
    batches = np.random.default_rng(1).normal(size=(3, ROWS, DIM)).astype(np.float32)
    tx = optax.sgd(0.1, 0.9)
    expected = trained(tx, model, batches, frozen=True)
    opt = STRATEGIES[strategy](tx, mesh_of(data=4), model, view="unproved", rules=FROZEN)
    state = opt.init(params_of())
    for batch in batches:
        state, _ = opt.step(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_frozen_weights_may_go_from_block_to_block_into_a_rule_that_refuses_them(strategy, mesh_of):
    """jax has no derivative of `betainc` by its first two arguments."""

    def block(w, x):
        positive = jnp.exp(x["gate"]) * w["scale"]
        y = jnp.tanh(x["x"] @ w["w"]) * jax.scipy.special.betainc(positive, 2.0, 0.5)
        return x | {"x": y, "gate": 0.5 * x["gate"] * w["scale"]}

    model = model_of(block)
    batches = np.random.default_rng(1).normal(size=(3, ROWS, DIM)).astype(np.float32)
    tx = optax.sgd(0.1, 0.9)
    expected = trained(tx, model, batches, frozen=True)
    opt = STRATEGIES[strategy](tx, mesh_of(data=4), model, view="unproved", rules=FROZEN)
    state = opt.init(params_of())
    for batch in batches:
        state, _ = opt.step(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_number_that_jax_promotes_may_go_from_block_to_block(strategy, mesh_of):
    def block(w, x):
        y = jnp.tanh(x["x"] @ w["w"])
        return {"x": y, "penalty": x["penalty"] + jnp.mean(y**2)}

    model = so.BlockModel(
        embed=lambda outer, batch: {"x": batch @ outer["in"], "penalty": 0},
        block=block,
        loss=lambda outer, x, batch: jnp.mean(x["x"] @ outer["out"]) + x["penalty"],
    )
    batches = np.random.default_rng(1).normal(size=(2, ROWS, DIM)).astype(np.float32)
    expected = trained(optax.sgd(0.1), model, batches, frozen=False)
    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), model, view="unproved")
    state = opt.init(params_of())
    for batch in batches:
        state, _ = opt.step(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_callback_runs_where_no_result_needs_weights(strategy, mesh_of):
    seen = []

    def block(w, x):
        jax.debug.callback(lambda x: seen.append(x.shape), x["x"])
        return without_weights(w, x)

    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=2), model_of(block), view="unproved")
    opt.step(opt.init(params_of()), np.ones((ROWS, DIM), np.float32))
    jax.effects_barrier()
    assert seen == [(ROWS // 2, DIM)] * (2 * 3)  # devices, blocks


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_usual_block_stores_less_than_jax_keeps(dtype, mesh_of, monkeypatch):
    config = gpt.config(dim=64, num_layers=4, num_heads=4, max_length=64, dtype=dtype)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 65), jnp.int32)}
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))

    def temporary():
        opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), gpt.model(config))
        program = opt.step.lower(opt.abstract_state(shapes), batch).compile()
        return program.memory_analysis().temp_size_in_bytes

    with_cut = temporary()
    monkeypatch.setattr(_slots, "_remat", lambda config: kept_by_jax)
    assert with_cut < 0.9 * temporary()


def forward_curvature():
    """Return an optimizer that scales the gradient by the slope of the loss along it."""

    def update(updates, state, params=None, *, value_fn, **_):
        _, slope = jax.jvp(value_fn, (params,), (updates,))
        return jax.tree.map(lambda grad: -0.1 * grad / (1 + slope), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


MODEL = model_of(lambda w, x: x | {"x": jnp.tanh(x["x"] @ w["w"]) * w["scale"]})


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_an_optimizer_may_differentiate_the_loss_forwards(strategy, mesh_of, x64):
    batch = np.random.default_rng(1).normal(size=(ROWS, DIM))
    params = jax.tree.map(np.float64, params_of())
    grads = jax.jit(jax.grad(MODEL.loss_fn))(params, batch)
    squares = sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(grads))
    expected = jax.tree.map(lambda p, grad: p - 0.1 * grad / (1 + squares), params, grads)
    opt = STRATEGIES[strategy](forward_curvature(), mesh_of(data=4), MODEL)
    state, _ = opt.step(opt.init(params), batch)
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def plain(params, batch):
    return MODEL.loss_fn(params, batch)


@pytest.mark.parametrize("view", ["per_device", "global"])
@pytest.mark.parametrize("loss", [MODEL, plain], ids=["blocks", "plain"])
def test_gathered_parameters_have_no_derivative_forwards(loss, view, mesh_of):
    opt = so.fsdp(forward_curvature(), mesh_of(data=4), loss, view=view)
    state = opt.init(params_of())
    with pytest.raises(ValueError, match="differentiated forwards") as error:
        opt.step.lower(state, np.ones((ROWS, DIM), np.float32))
    assert str(error.value) == (
        "fsdp: the loss is differentiated forwards (jax.jvp), and gathered parameters have a"
        " derivative backwards alone.\nFix: use so.ddp or so.zero, whose devices hold all"
        " parameters; or jax.vjp."
    )
