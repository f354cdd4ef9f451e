"""Checkpoints of one arrangement of replicas and reducers restored to another: what is kept, and
what is said.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.cli._run_folder import ConvertingCheckpoints

PARAMS = {"a/b%": jnp.arange(8.0), "w": jnp.ones((4, 2))}
TX = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adam)(optax.constant_schedule(0.1)),
)
BATCH = np.arange(16.0, dtype=np.float32).reshape(8, 2) / 16


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"].T - 1) ** 2) + jnp.mean((params["a/b%"] - 2) ** 2)


def plain(mesh, tx=TX, **how):
    return so.ddp(tx, mesh, loss_fn, **how)


INT8 = so.reducers.error_feedback(so.reducers.int8())
FORMS = {
    "plain": lambda mesh: plain(mesh),
    "reduced": lambda mesh: plain(mesh, reducer=INT8),
    "average": lambda mesh: so.local_sgd(plain(mesh), sync_every=3),
    "diloco": lambda mesh: so.diloco(plain(mesh), sync_every=4, fragments=2, delay=1, reducer=INT8),
    "diloco of reduced": lambda mesh: so.diloco(plain(mesh, reducer=INT8), sync_every=4),
}
NOTES = {
    "plain": "",
    "reduced": "; the reducer is reset",
    "average": ", a copy for each of 4 replicas",
    "diloco": ", a copy for each of 4 replicas; the outer optimizer and the reducer are reset",
    "diloco of reduced": ", a copy for each of 4 replicas; the outer optimizer is reset",
}


def trained(opt, steps=5):
    state = opt.init(PARAMS)
    for _ in range(steps):
        state, metrics = opt.step(state, BATCH)
        jax.block_until_ready(metrics)
    return state


def optimizer_of(opt_state):
    """Return the state of adam, whatever it is wrapped in, with rows for replicas or without."""
    return getattr(
        getattr(opt_state, "optimizer", opt_state),
        "value",
        getattr(opt_state, "optimizer", opt_state),
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a function that gives a checkpoint of a form after five steps, two replicas, and its
    state.
    """
    mesh = so.make_mesh(replica=2, data=2, devices=jax.devices()[:4])

    @functools.cache
    def store(name):
        folder = tmp_path_factory.mktemp("stored")
        state = trained(FORMS[name](mesh))
        so.save(folder, state)
        return folder, jax.device_get(state)

    return store


PAIRS = list(itertools.product(FORMS, FORMS))


@pytest.mark.parametrize(
    ("before", "after"),
    # the same form alone is another path; three forms are read, and three are made
    tiered(PAIRS, lambda row: row in (("plain", "reduced"), ("average", "diloco"))),
)
def test_parameters_and_optimizer_state_are_kept_whatever_the_form(stored, before, after):
    folder, old = stored(before)
    local = hasattr(old.opt_state, "outer")
    mesh, said = so.make_mesh(replica=4, data=2), []
    opt = FORMS[after](mesh)
    opt.init(PARAMS)
    with ConvertingCheckpoints(
        folder,
        1,
        None,
        base=plain(mesh),
        abstract_params=jax.eval_shape(lambda: PARAMS),
        say=said.append,
    ) as checkpoints:
        state, extra = checkpoints.restore(opt)
    mean = ", the mean of 2 replicas" if local else ""
    expected = (
        []
        if before == after
        else [f"Kept of step 5: parameters and optimizer state{mean}{NOTES[after]}."]
    )
    assert (said, extra) == (expected, {})

    def means(tree):
        return jax.tree.map(lambda x: x.mean(0) if x.dtype == np.float32 else x.max(0), tree)

    params = means(old.opt_state.params.value) if local else old.params
    adam = means(optimizer_of(old.opt_state)) if local else optimizer_of(old.opt_state)
    new = jax.device_get(state)
    if hasattr(new.opt_state, "outer"):
        for row in range(4):

            def take(tree, row=row):
                return jax.tree.map(lambda x: x[row], tree)

            jax.tree.map(np.testing.assert_array_equal, take(new.opt_state.params.value), params)
            jax.tree.map(np.testing.assert_array_equal, take(optimizer_of(new.opt_state)), adam)
    else:
        jax.tree.map(np.testing.assert_array_equal, optimizer_of(new.opt_state), adam)
    if before != after:
        jax.tree.map(np.testing.assert_array_equal, new.params, params)
    assert int(new.step) == 5
    np.testing.assert_array_equal(new.rng, old.rng)

    def placed(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)

    assert placed(state) == placed(opt.abstract_state())


@pytest.mark.parametrize("after", tiered(["reduced", "diloco"], lambda form: False))
def test_what_was_converted_trains_on(stored, after):
    folder, _ = stored("average")
    mesh = so.make_mesh(replica=4, data=2)
    opt = FORMS[after](mesh)
    opt.init(PARAMS)
    with ConvertingCheckpoints(
        folder, 1, None, base=plain(mesh), abstract_params=jax.eval_shape(lambda: PARAMS), say=print
    ) as checkpoints:
        state, _ = checkpoints.restore(opt)
    before = float(loss_fn(jax.device_get(state.params), BATCH))
    for _ in range(6):
        state, metrics = opt.step(state, BATCH)
        jax.block_until_ready(metrics)
    assert float(metrics["loss"]) < before


def test_another_optimizer_is_refused_in_the_words_of_the_strategy_by_itself(stored):
    folder, _ = stored("average")
    mesh = so.make_mesh(replica=4, data=2)
    opt = plain(mesh, optax.sgd(0.1, momentum=0.9))
    opt.init(PARAMS)
    message = (
        f"train: step 5 in {folder} does not fit opt: 2 leaves missing, 0 left over, 0 different.\n"
        "  opt_state/0/trace/a/b%: float32[8], missing from the checkpoint\n  opt_state/0/trace/w:"
        " float32[4, 2], missing from the checkpoint\nFix: build opt with the optax chain that the"
        " checkpoint was saved with; or start another chain on its parameters:"
        " new_opt.init(restore(directory, old_opt).params)."
    )
    with (
        ConvertingCheckpoints(
            folder, 1, None, base=opt, abstract_params=jax.eval_shape(lambda: PARAMS), say=print
        ) as checkpoints,
        pytest.raises(so.errors.CheckpointError, match=f"^{re.escape(message)}$"),
    ):
        checkpoints.restore(opt)


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    mesh = so.make_mesh(replica=4, data=2)
    opt = FORMS["diloco"](mesh)
    so.save(tmp_path, trained(plain(mesh), 1))
    opt.init(PARAMS)
    victim = next(
        path
        for path in (tmp_path / "1" / "state").rglob("*")
        if path.is_file() and path.stat().st_size
    )
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with (
        ConvertingCheckpoints(
            tmp_path,
            1,
            None,
            base=plain(mesh),
            abstract_params=jax.eval_shape(lambda: PARAMS),
            say=pytest.fail,
        ) as checkpoints,
        pytest.raises(
            so.errors.CheckpointError,
            match=r"^Checkpoints: step 1 in .* is damaged|^train: step 1 in .* is damaged",
        ),
    ):
        checkpoints.restore(opt)
