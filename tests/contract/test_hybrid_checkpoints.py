"""States move between pipelines, meshes and strategies: blocks are stored in the model's order,
whatever runs them.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from support.pipelines import SCHEDULES, block_problem
from support.reference import relative_difference, same_bits
from support.tiers import tiered

import shardopt as so

TX = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-4))


@functools.cache
def problem_of(model):
    return block_problem(model, weighted=True, num_blocks=8, rows=16, steps=4)


@pytest.fixture(params=tiered(["pytree", "nnx"], lambda model: model == "pytree"))
def case(request, x64):
    return problem_of(request.param)


def hybrid(mesh, case, schedule="eager_one_f_one_b", **options):
    rules = case.rules if mesh.shape["tensor"] > 1 else ()
    options = {"micro_batches": 4, "min_shard_elements": 8, "rules": rules} | options
    return knowing(so.hybrid(TX, mesh, case.loss_fn, schedule=SCHEDULES[schedule], **options), case)


def others(mesh_of, case):
    optimizers = {
        "pipeline=1": hybrid(mesh_of(data=4, pipeline=1), case),
        "pipeline=2": hybrid(
            mesh_of(data=2, tensor=2, pipeline=2), case, "zero_bubble", placement="zero1"
        ),
        "interleaved again": hybrid(
            mesh_of(data=1, pipeline=4), case, "interleaved", placement="ddp"
        ),
        "v-shaped": hybrid(
            mesh_of(data=4, pipeline=2), case, "v_shaped", placement="zero2", micro_batches=2
        ),
        "fsdp": so.fsdp(
            TX, mesh_of(data=4, tensor=2), case.loss_fn, rules=case.rules, min_shard_elements=8
        ),
        "ddp": so.ddp(TX, mesh_of(data=2), case.loss_fn),
    }
    return {name: knowing(opt, case) for name, opt in optimizers.items()}


def knowing(opt, case):
    """Show it the parameters: the types of flax cannot be rebuilt from a checkpoint."""
    opt.specs(jax.eval_shape(lambda: case.params))
    return opt


def train(opt, state, batches):
    for batch in batches:
        state, _ = opt.step(state, batch)
    return state


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert relative_difference(actual, jax.device_get(expected)) <= 1e-10


@pytest.mark.slow
def test_a_run_goes_on_anywhere(case, mesh_of, tmp_path):
    """A run is interleaved on four stages, then goes on with any strategy.

    Parameters and moments alike.
    """
    first = hybrid(mesh_of(data=2, pipeline=4), case, "interleaved")
    state = train(first, first.init(case.params, jax.random.key(1)), case.batches[:2])
    so.save(tmp_path, state)
    unbroken_state = train(first, state, case.batches[2:])
    for name, opt in others(mesh_of, case).items():
        restored = so.restore(tmp_path, opt)
        for leaf, promised in zip(
            *map(jax.tree.leaves, (restored, opt.abstract_state(case.params))), strict=True
        ):
            assert leaf.sharding == promised.sharding, name
        same(train(opt, restored, case.batches[2:]), unbroken_state)


@pytest.mark.parametrize(
    "source", tiered(["fsdp", "v-shaped", "ddp"], lambda source: source == "ddp")
)
def test_a_run_comes_into_a_pipeline_from_anywhere(source, case, mesh_of, tmp_path):
    """A pipeline of chunks also restores its own checkpoint bit for bit."""
    opt = others(mesh_of, case)[source]
    state = train(opt, opt.init(case.params, jax.random.key(1)), case.batches[:2])
    pipeline = hybrid(mesh_of(data=2, pipeline=4), case, "interleaved")
    so.save(tmp_path / "from", state)
    moved = so.restore(tmp_path / "from", pipeline)
    so.save(tmp_path / "into", moved)
    same_bits(so.restore(tmp_path / "into", pipeline), moved)
    same(train(pipeline, moved, case.batches[2:]), train(opt, state, case.batches[2:]))


@pytest.mark.slow
def test_the_state_is_in_the_order_of_the_model(case, mesh_of):
    """Before the first step each block has its given values; after it, the values that ddp learns."""
    plain = so.ddp(TX, mesh_of(data=2), case.loss_fn)
    expected = plain.init(case.params)
    after = train(plain, plain.init(case.params), case.batches[:1])
    for schedule in ("interleaved", "v_shaped"):
        opt = hybrid(mesh_of(data=2, pipeline=4), case, schedule)
        state = opt.init(case.params)
        for leaf, other in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
            np.testing.assert_array_equal(leaf, other)
        same(train(opt, state, case.batches[:1]), after)


@pytest.mark.slow
def test_the_same_mesh_goes_on_bit_for_bit(case, mesh_of, tmp_path):
    opt = hybrid(mesh_of(data=2, pipeline=4), case, "zero_bubble_lockstep_2", remat=True)
    state = train(opt, opt.init(case.params), case.batches[:2])
    so.save(tmp_path, state)
    unbroken_state = train(opt, state, case.batches[2:])
    resumed_state = train(opt, so.restore(tmp_path, opt), case.batches[2:])
    for leaf, other in zip(*map(jax.tree.leaves, (resumed_state, unbroken_state)), strict=True):
        np.testing.assert_array_equal(leaf, other)
