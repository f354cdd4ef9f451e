"""Values that blocks hand on, and that the loss does not differentiate, leave gradients finite.

Each block computes the norm of a branch that starts at 0, where its derivative is infinite.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from support.reference import jitted

import shardopt as so

DIM = 4
ROWS = 8


def params_of():
    draw = np.random.default_rng(0)
    blocks = {"w": 0.3 * draw.normal(size=(2, DIM, DIM)), "v": np.zeros((2, DIM, DIM))}
    outer = {"in": draw.normal(size=(DIM, DIM)), "zeros": np.zeros(DIM)}
    return jax.tree.map(np.float32, outer | {"blocks": blocks})


def embedded(outer, batch):
    rows = len(batch)
    return {
        "x": batch @ outer["in"],
        "total": jnp.zeros(rows),
        "count": jnp.zeros(()),
        "each": jnp.zeros((rows, 3)),
        "of_outer": jnp.linalg.norm(outer["zeros"]),
    }


def loss(outer, x, batch):
    squares = jnp.square(x["x"] - batch) + jnp.sum(outer["zeros"])
    return jnp.mean(squares), {"total": jnp.mean(x["total"])}


def changed(w, x):
    """Return x after the branch, and the norm of the branch in each row."""
    branch = jnp.tanh(x["x"] @ w["w"]) @ w["v"]
    return x | {"x": x["x"] + branch}, jnp.linalg.norm(branch, axis=-1)


def summed(w, x):
    y, norm = changed(w, x)
    return y | {"total": x["total"] + norm}


def last(w, x):
    y, norm = changed(w, x)
    return y | {"total": norm}


def averaged(w, x):
    y, norm = changed(w, x)
    count = x["count"] + 1
    return y | {"count": count, "total": x["total"] + (norm - x["total"]) / count}


def one_after_the_other(w, x):
    y, norm = changed(w, x)
    return y | {"each": jnp.stack([norm] * 3, axis=-1), "total": x["total"] + x["each"][:, 0]}


def written(w, x):
    y, norm = changed(w, x)
    return y | {"each": x["each"].at[:, 1].set(norm)}


def of_weights(w, x):
    y, _ = changed(w, x)
    return y | {"total": x["total"] + jnp.linalg.norm(w["v"])}


def gating(w, x):
    """Read the norm, without a derivative."""
    y, norm = changed(w, x)
    return y | {"x": y["x"] * (x["total"] < 1)[:, None], "total": x["total"] + norm}


def on_host(w, x):
    """Compute a number on the host, where no derivative is needed and jax has none."""
    y, norm = changed(w, x)
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    count = jax.pure_callback(lambda count: count + np.float32(1), shape, x["count"])
    return y | {"count": count, "total": x["total"] + norm}


def untouched(w, x):
    y, _ = changed(w, x)
    return y


def jitted_block(w, x):
    return jax.jit(summed)(w, x)


def checkpointed_block(w, x):
    return jax.checkpoint(summed)(w, x)


def read(w, x):
    """Hand on a number that the next block differentiates."""
    y, _ = changed(w, x)
    return y | {"x": y["x"] + x["total"][:, None], "total": 0.1 * jnp.mean(y["x"], axis=-1)}


BLOCKS = [
    summed,
    last,
    averaged,
    one_after_the_other,
    written,
    of_weights,
    gating,
    on_host,
    untouched,
    jitted_block,
    checkpointed_block,
    read,
]


def pipelined(placement):
    def strategy(tx, mesh_of, model):
        mesh = mesh_of(data=2, pipeline=2)
        options = {"micro_batches": 2, "placement": placement, "min_shard_elements": 1}
        return so.hybrid(tx, mesh, model, view="unproved", **options)

    return strategy


STRATEGIES = {
    "ddp": lambda tx, mesh_of, model: so.ddp(tx, mesh_of(data=4), model, view="unproved"),
    "zero": lambda tx, mesh_of, model: so.zero(tx, mesh_of(data=4), model, view="unproved"),
    "fsdp": lambda tx, mesh_of, model: so.fsdp(
        tx, mesh_of(data=4), model, view="unproved", min_shard_elements=1
    ),
    "fsdp, all again": lambda tx, mesh_of, model: so.fsdp(
        tx, mesh_of(data=4), model._replace(remat="full"), view="unproved", min_shard_elements=1
    ),
    "fsdp, global view": lambda tx, mesh_of, model: so.fsdp(
        tx, mesh_of(data=4), model, view="global"
    ),
    "pipeline": pipelined("ddp"),
    "pipeline of fsdp": pipelined("fsdp"),
}


def check_steps(strategy, mesh_of, model, params):
    """Check that steps with momentum have the parameters of plain jax, which are finite."""
    batches = np.random.default_rng(1).normal(size=(3, ROWS, DIM)).astype(np.float32)
    tx = optax.sgd(0.1, 0.9)

    def loss_of(params, batch):
        returned = model.loss_fn(params, batch)
        return returned[0] if isinstance(returned, tuple) else returned

    gradient, update = jax.jit(jax.grad(loss_of)), jitted(tx)
    expected = jax.tree.map(jnp.asarray, params)
    tx_state = update.init(expected)
    opt = STRATEGIES[strategy](tx, mesh_of, model)
    state = opt.init(params)
    for batch in batches:
        updates, tx_state = update.update(gradient(expected, batch), tx_state, expected)
        expected = optax.apply_updates(expected, updates)
        state, _ = opt.step(state, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    for a, b in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_a_value_that_the_loss_does_not_read_makes_no_gradient_infinite(block, strategy, mesh_of):
    model = so.BlockModel(embed=embedded, block=block, loss=loss)
    check_steps(strategy, mesh_of, model, params_of())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_value_that_the_loss_reads_some_blocks_later_is_differentiated(strategy, mesh_of):
    draw = np.random.default_rng(0)
    outer = {name: draw.normal(size=(DIM, DIM)).astype(np.float32) for name in "abcd"}
    params = outer | {"blocks": {"w": np.float32(0.5 * draw.normal(size=(6, DIM, DIM)))}}

    def block(w, x):
        a, b, c, d = x
        return jnp.tanh(a @ w["w"]) + b, 1.5 * c, jnp.sin(d), d + 1

    model = so.BlockModel(
        embed=lambda outer, batch: tuple(batch @ outer[name] for name in "abcd"),
        block=block,
        loss=lambda outer, x, batch: jnp.mean(jnp.square(x[0] - batch)),
    )
    check_steps(strategy, mesh_of, model, params)


def called_in_aux(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return 0.0, {"doubled": jnp.mean(jax.pure_callback(lambda x: np.float32(2) * x, shape, x))}


def called_for_an_effect(x):
    io_callback(lambda x: None, None, x)
    return 0.0, {}


def looped(x):
    _, x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, x))
    return jnp.mean(x), {}


@pytest.mark.parametrize(
    ("read", "strategy"),
    [
        *itertools.product([called_in_aux, called_for_an_effect, looped], ["ddp", "zero"]),
        (called_in_aux, "fsdp"),
        (called_in_aux, "pipeline"),
    ],
)
def test_a_loss_may_read_a_value_without_gradient_in_an_operation_without_derivative(
    read, strategy, mesh_of
):
    def block(w, x):
        y, _ = changed(w, x)
        return y | {"total": x["total"] + jnp.sum(jax.lax.stop_gradient(w["w"]) ** 2)}

    def loss_of_both(outer, x, batch):
        term, metrics = read(x["total"])
        return jnp.mean(jnp.square(x["x"] - batch)) + term, metrics

    model = so.BlockModel(embedded, block, loss_of_both)
    check_steps(strategy, mesh_of, model, params_of())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_without_a_gradient_make_none_that_is_infinite(strategy, mesh_of):
    def block(w, x):
        branch = jnp.tanh(x @ w["w"]) @ w["v"]
        return x + branch + jnp.linalg.norm(branch, axis=-1, keepdims=True)

    def probe(outer, x, batch):
        return jnp.mean(jnp.square(jax.lax.stop_gradient(x) @ outer["in"] - batch))

    model = so.BlockModel(lambda outer, batch: batch @ outer["in"], block, probe)
    check_steps(strategy, mesh_of, model, params_of())


def test_a_block_that_changes_its_structure_is_refused_before_the_loss_is_traced(mesh_of):
    def loss_of_more(outer, x, batch):
        return jnp.mean(jnp.square(x["x"] - batch)) + jnp.mean(x["more"])

    model = so.BlockModel(embedded, lambda w, x: x | {"more": x["x"]}, loss_of_more)
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), model, view="unproved")
    state = opt.init(params_of())
    with pytest.raises(ValueError, match="a block must return what it is given"):
        opt.step(state, np.ones((ROWS, DIM), np.float32))
