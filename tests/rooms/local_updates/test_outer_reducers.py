"""Reducers of outer gradients: exact reducers change nothing, others conserve the values that they
do not send.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.groups import groups_of
from support.tiers import tiered

import shardopt as so

R = so.reducers
HOW = {"sync_every": 2, "fragments": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "name", "sizes"),
    [
        (R.exact(), "hybrid", {"pipeline": 2}),
        (R.error_feedback(R.top_k(1.0)), "fsdp", {"tensor": 2}),
        (R.error_feedback(R.power_sgd(8, min_ratio=0)), "hybrid", {"pipeline": 2}),
    ],
    ids=lambda parameter: getattr(parameter, "name", str(parameter)),
)
def test_an_exact_one_is_the_exact_mean(
    reducer,
    name,
    sizes,
    strategy_of,
    new_params,
    new_batches,
    steps_on,
    rows_of,
    max_difference,
    x64,
):
    inner = strategy_of(name, optax.sgd(0.05), **sizes)
    batches = new_batches(5, rows=16)
    reduced_state, wanted = (
        steps_on(opt, opt.init(new_params()), batches)[0]
        for opt in (so.diloco(inner, reducer=reducer, **HOW), so.diloco(inner, **HOW))
    )
    assert max_difference(reduced_state.params, jax.device_get(wanted.params)) < 1e-10
    assert max_difference(rows_of(reduced_state), rows_of(wanted)) < 1e-10


def test_int8_of_an_exactly_representable_grid_is_exact(strategy_of, max_difference):
    """Outer gradients are whole numbers up to 127, one of them 127 in each block, on both ways."""

    def loss(params, batch):
        return jnp.mean(batch["x"] @ params["w"])

    x = np.array([127.0, 3, -64, 1] * 4, np.float32).reshape(4, 4)
    inner = strategy_of("ddp", optax.sgd(1.0), model=loss, data=2)
    reducer = R.error_feedback(R.int8(2))
    opt = so.diloco(inner, outer=optax.sgd(1.0), sync_every=1, reducer=reducer)
    state = opt.init({"w": jnp.zeros((4, 1))})
    x[:, 3] = 127
    state, _ = opt.step(state, {"x": x})
    assert state.params["w"][:, 0].tolist() == [-127.0, -3.0, 64.0, -127.0]
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.opt_state.reducer))


@pytest.mark.slow  # test_state.py follows unsent values through an agreement
@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.int8(4), R.top_k(0.2), R.sign(8)],
        lambda reducer_part: "int8" in reducer_part.name,
        ids=lambda reducer_part: reducer_part.name,
    ),
)
def test_error_feedback_conserves_outer_gradients(
    reducer, strategy_of, new_params, new_batches, x64
):
    """With H = 1, a plain outer step and no error left out: R (theta_0 - theta) + memories = sum of
    all inner steps.
    """
    inner = strategy_of("fsdp", optax.sgd(0.05), data=2)
    opt = so.diloco(inner, outer=optax.sgd(1.0), sync_every=1, reducer=R.error_feedback(reducer))
    plain = so.diloco(inner, outer=optax.sgd(1.0), sync_every=1)
    state = opt.init(new_params())
    stepped = jax.tree.map(np.zeros_like, jax.device_get(state.params))
    for batch in new_batches(4):
        before = jax.device_get(state.params)
        alone = plain.init(state.params)
        alone, _ = plain.step(alone, batch)
        stepped = jax.tree.map(
            lambda s, a, b: s + 2 * (a - b), stepped, before, jax.device_get(alone.params)
        )
        state, _ = opt.step(state, batch)
    moved = jax.tree.map(
        lambda a, b: 2 * (a - np.asarray(b)), new_params(), jax.device_get(state.params)
    )
    # [replicas, data, pipeline, tensor, ...] of each shard, in groups
    memory = jax.tree.leaves(
        [reducer_part.memory.value for reducer_part in state.opt_state.reducer[0]]
    )
    order = [i for group in groups_of(jax.tree.leaves(state.params), ["replica"]) for i in group]
    moved, stepped = ([jax.tree.leaves(tree)[i] for i in order] for tree in (moved, stepped))
    for residual, m, s in zip(memory, moved, stepped, strict=True):
        residual = np.asarray(residual).sum(0)
        is_unsplit = residual.shape[3:] == s.shape
        total = residual[0].sum() if is_unsplit else residual.sum()
        np.testing.assert_allclose(m.sum() + total, s.sum(), atol=1e-12)


@pytest.mark.slow  # test_int8_of_an_exactly_representable_grid_is_exact
def test_a_reducer_of_the_strategy_keeps_to_its_replica(
    strategy_of, new_params, new_batches, steps_on, rows_of, max_difference, x64
):
    """Inside a replica the gradients go through it.

    Full density is exact, and nothing crosses between replicas.
    """
    exact = R.error_feedback(R.top_k(1.0))
    inner = strategy_of("ddp", options={"reducer": exact})
    opt, plain = (so.local_sgd(strategy, sync_every=3) for strategy in (inner, strategy_of("ddp")))
    batches = new_batches(2)
    state = opt.init(new_params())
    step = opt.step.lower(state, batches[0]).compile()
    assert not so.hlo.audit(step).of(axis="replica").collectives
    reduced_state, _ = step(step(state, batches[0])[0], batches[1])
    wanted, _ = steps_on(plain, plain.init(new_params()), batches)
    assert max_difference(rows_of(reduced_state), rows_of(wanted)) < 1e-10
    memory = jax.tree.leaves(reduced_state.opt_state.inner_reducer[0].memory)
    assert all(leaf.shape[:2] == (2, 2) for leaf in memory)  # devices of the mean, then replicas
    assert len(memory) == 5
