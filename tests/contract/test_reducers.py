"""Every reducer under ddp with every kind of optimizer: one device that plays all senders, and the
bytes that each holds.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.pipelines import block_problem
from support.reference import OPTIMIZERS, relative_difference
from support.tiers import tiered

import shardopt as so

R = so.reducers
EF = R.error_feedback
DEVICES = 4
REDUCERS = {
    "bf16": R.exact(jnp.bfloat16),
    "int8": EF(R.int8(16)),
    "sign": EF(R.sign(8)),
    "top_k": EF(R.top_k(0.1)),
    "power_sgd": EF(R.power_sgd(1, min_ratio=0)),
    "warm_up": EF(R.warm_up(R.sign(8), 2)),
}
# lamb takes norms of whole leaves: nothing element by element
KINDS = ("momentum", "adamw", "lamb")
QUICK = [("int8", "momentum")]  # the others' laws hold in tests/rooms/reducers too


def played(tx, reducer, case):
    """One device: the gradient of each sender's rows, the reducer with the axis bound by vmap, the
    plain optimizer.
    """

    def total(params, batch):
        loss = case.loss_fn.loss_fn(params, batch)
        return loss.total, loss.weight

    @jax.jit
    def step(params, opt_state, memory, batch):
        rows = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        grads, weights = jax.vmap(jax.grad(total, has_aux=True), (None, 0))(params, rows)
        sender_grads = jax.tree.map(lambda g: g * (DEVICES / weights.sum()), grads)
        means, memory = jax.vmap(lambda g, m: reducer.reduce(g, m, "data"), axis_name="data")(
            sender_grads, memory
        )
        updates, opt_state = tx.update(jax.tree.map(lambda x: x[0], means), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, memory

    params = case.params
    opt_state = tx.init(case.params)
    memory = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), reducer.init(case.params))
    for batch in case.batches:
        params, opt_state, memory = step(params, opt_state, memory, batch)
    return params


@pytest.mark.parametrize(
    ("name", "kind"), tiered(itertools.product(REDUCERS, KINDS), QUICK.__contains__)
)
def test_ddp_sends_and_steps_as_one_device_that_plays_all_senders(name, kind, mesh_of, x64):
    case = block_problem("nnx", weighted=True, num_blocks=4, rows=16, steps=5)
    reducer = REDUCERS[name]
    tx = OPTIMIZERS[kind]()
    opt = so.ddp(tx, mesh_of(data=DEVICES), case.loss_fn, reducer=reducer)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    expected = played(tx, reducer, case)
    assert relative_difference(state.params, expected) < 1e-10
    moved = relative_difference(case.params, expected)
    assert moved > 1e-3


def held(tree):
    """Bytes of a device's pieces."""
    leaves = jax.tree.leaves(tree)
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves
    )


def test_bytes_of_a_device_are_what_the_docstrings_state(mesh_of):
    """ddp with Adam takes 12 bytes a parameter, and 4 more for values that are not sent."""
    case = block_problem("nnx", weighted=True, num_blocks=4, rows=16, steps=1)
    abstract = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.float32), case.params))
    psi = 4 * sum(leaf.size for leaf in jax.tree.leaves(abstract))
    for name, beside in {
        "bf16": 0,
        "int8": psi,
        "sign": psi,
        "top_k": psi,
        "warm_up": psi + 4,
    }.items():
        opt = so.ddp(optax.adam(0.1), mesh_of(data=DEVICES), case.loss_fn, reducer=REDUCERS[name])
        state = opt.abstract_state(abstract)
        assert held(state.params) == psi
        assert held(state.opt_state.optimizer) == 2 * psi + 4
        assert held(state.opt_state.reducer) == beside


def test_the_layers_of_a_model_of_blocks_are_matrices_of_their_own(mesh_of):
    """This holds on the way through a strategy too, which cuts the tree into leaves."""
    case = block_problem("nnx", weighted=True, num_blocks=4, rows=16, steps=1)
    reducer = R.power_sgd(2, min_ratio=0)
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=DEVICES), case.loss_fn, reducer=reducer)
    rows = opt.abstract_state(jax.eval_shape(lambda: case.params)).opt_state.reducer
    alone = jax.eval_shape(reducer.init, case.params)
    assert sorted(leaf.shape[2:] for leaf in jax.tree.leaves(rows)) == sorted(
        x.shape for x in jax.tree.leaves(alone)
    )
    assert {leaf.shape[0] for leaf in jax.tree.leaves(alone)} == {4, 1}
