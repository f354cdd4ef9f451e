"""Models of others, as their users write them, take the steps that they take on one device."""

import re

import jax
import numpy as np
import optax
import pytest
from support.mean_of import mean_and_updated
from support.others import MODELS, Case, gan
from support.tiers import tiered

import shardopt as so
from shardopt.core._block_model import takes_rng
from shardopt.core._types import leaves_with_paths


@pytest.fixture(autouse=True)
def ranks_as_users_have_them():
    """Libraries add biases [N] to rows [B, N]."""
    with jax.numpy_rank_promotion("allow"):
        yield


STEPS = 3
TOLERANCE = 2e-5
KEY = 7
# A bias before a batch norm has a gradient of zero but for rounding. It must not become a whole
# step.
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def one_device(case, tx):
    """Return (init, step) in plain jax: it keeps `Updated` values, and draws the keys of a strategy
    on one device.
    """
    paths = [path for path, _ in leaves_with_paths(case.params)]
    treedef = jax.tree.structure(case.params)
    trained = [
        np.issubdtype(leaf.dtype, np.floating)
        and not any(re.search(condition, path) for condition, _ in case.rules)
        for path, leaf in leaves_with_paths(case.params)
    ]

    def part_of(leaves):
        return [x for condition, x in zip(trained, leaves, strict=True) if condition]

    def merge(part, leaves):
        new = iter(part)
        return [next(new) if condition else x for condition, x in zip(trained, leaves, strict=True)]

    @jax.jit
    def step(params, opt_state, batch, number):
        leaves = jax.tree.leaves(params)
        key = jax.random.fold_in(jax.random.key(KEY), 0)
        for index in (number, 0, 0, 0):  # the step's, the device's, the micro-batch's, the loss's
            key = jax.random.fold_in(key, index)

        def loss_of(part):
            rng = {"rng": key} if takes_rng(case.loss_fn) else {}
            return mean_and_updated(
                case.loss_fn(treedef.unflatten(merge(part, leaves)), batch, **rng)
            )

        part = part_of(leaves)
        (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(part)
        updates, opt_state = tx.update(grads, opt_state, part)
        new = merge(optax.apply_updates(part, updates), leaves)
        return (
            treedef.unflatten([updated.get(path, x) for path, x in zip(paths, new, strict=True)]),
            opt_state,
            loss,
        )

    return lambda params: tx.init(part_of(jax.tree.leaves(params))), step


def assert_same(actual, expected):
    for (path, leaf), other in zip(
        leaves_with_paths(jax.device_get(actual)), jax.tree.leaves(expected), strict=True
    ):
        scale = max(
            0.1, np.max(np.abs(other))
        )  # some gradients are zero but for rounding: of keys' biases in attention
        np.testing.assert_allclose(leaf, other, rtol=0, atol=TOLERANCE * scale, err_msg=path)


ROWS = [(name, strategy) for name in MODELS for strategy in ("ddp", "fsdp")]
QUICK = [("jraph_graphs", "fsdp")]


@pytest.mark.parametrize(("name", "strategy"), tiered(ROWS, lambda row: row in QUICK))
def test_it_trains_as_on_one_device(name, strategy, mesh_of):
    case = MODELS[name]()
    options = case.options | ({"min_shard_elements": 1} if strategy == "fsdp" else {})
    opt = getattr(so, strategy)(TX, mesh_of(data=8), case.loss_fn, **options)
    init, step = one_device(case, TX)
    state = opt.init(case.params, jax.random.key(KEY))
    params = case.params
    opt_state = init(case.params)
    for number, batch in enumerate(case.batches(STEPS)):
        state, metrics = opt.step(state, batch)
        params, opt_state, loss = step(params, opt_state, batch, number)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=TOLERANCE)
    assert_same(state.params, params)


@pytest.mark.parametrize("name", tiered(MODELS, lambda name: name == "nnx_cnn"))
def test_in_the_per_device_view_it_is_refused_if_rows_mix_and_else_not(name, mesh_of):
    case = MODELS[name]()
    opt = so.ddp(TX, mesh_of(data=8), case.loss_fn, rules=case.rules, view="per_device")
    state = opt.init(case.params, jax.random.key(KEY))
    batch = case.batches(1)[0]
    if case.mixing or case.waits:
        message = "no rule says what this loop" if case.waits else re.escape("support/others.py")
        with pytest.raises(so.errors.NotSeparableError, match=message):
            opt.step.lower(state, batch)
    elif name == "linen_transformer":
        with pytest.raises(ValueError, match=r"Fix: use view='global'"):
            opt.step.lower(state, batch)
    else:
        opt.step.lower(state, batch)


@pytest.mark.slow
def test_two_optimizers_take_turns_on_one_tree_of_parameters(mesh_of):
    """A GAN: each step takes over the parameters and hands them on, the other player's unchanged."""
    start, discriminator_loss, generator_loss, make_batch = gan()
    players = [
        (
            Case(start, discriminator_loss, make_batch, [("^generator/", "frozen")]),
            optax.adam(3e-3, eps=1e-3),
        ),
        (
            Case(start, generator_loss, make_batch, [("^discriminator/", "frozen")]),
            optax.sgd(1e-2, momentum=0.9),
        ),
    ]

    def make(case, tx):
        return so.fsdp(tx, mesh_of(data=8), case.loss_fn, min_shard_elements=1, **case.options)

    opts = [make(*player) for player in players]
    alone = [one_device(*player) for player in players]
    states = [opt.init(start) for opt in opts]
    opt_states = [init(start) for init, _ in alone]
    params = states[0].params
    expected = start
    for number, batch in enumerate(players[0][0].batches(STEPS)):
        for turn, (opt, (_, step)) in enumerate(zip(opts, alone, strict=True)):
            states[turn], metrics = opt.step(states[turn]._replace(params=params), batch)
            params = states[turn].params
            expected, opt_states[turn], loss = step(expected, opt_states[turn], batch, number)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=TOLERANCE)
    assert_same(params, expected)
