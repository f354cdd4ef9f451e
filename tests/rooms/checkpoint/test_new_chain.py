"""A checkpoint restored into another optax chain: what both chains have goes on.

A restored state equals a state that is put together by hand, and some train on, as one device does
from there.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pipelines import block_problem
from support.reference import relative_difference
from support.tiers import tiered

import shardopt as so

BEFORE = 3
AFTER = 3
"""Steps before the save, and after the restore."""


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["up"]) @ params["down"]
    return jnp.mean((hidden + params["bias"][None] - 1) ** 2)


def make_params():
    draw = np.random.default_rng(0)
    return {
        "up": draw.normal(size=(16, 32)).astype(np.float32),
        "down": draw.normal(size=(32, 8)).astype(np.float32) / 6,
        "bias": np.zeros(8, np.float32),
    }


def make_batch(step):
    return np.random.default_rng(step + 1).normal(size=(16, 16)).astype(np.float32)


@functools.cache
def step_of_one_device(tx, trained):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step_fn(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        seen = {name: params[name] for name in trained}
        grads = {name: grads[name] for name in trained}
        updates, opt_state = tx.update(grads, opt_state, seen, value=loss)
        return params | optax.apply_updates(seen, updates), opt_state

    return step_fn


def one_device(tx, params, opt_state, steps, trained=("up", "down", "bias"), rows=slice(None)):
    """Train on one device; `trained` names the parameters that the optimizer sees."""
    step_fn = step_of_one_device(tx, trained)
    for step in steps:
        params, opt_state = step_fn(params, opt_state, make_batch(step)[rows])
    return params, opt_state


STRATEGIES = {
    "ddp": lambda tx, **options: so.ddp(tx, so.make_mesh(data=8), loss_fn, **options),
    "zero": lambda tx, **options: so.zero(
        tx, so.make_mesh(data=8), loss_fn, stage=1, min_shard_elements=1, **options
    ),
    "fsdp": lambda tx, **options: so.fsdp(
        tx, so.make_mesh(data=8), loss_fn, min_shard_elements=1, **options
    ),
    "fsdp 4": lambda tx, **options: so.fsdp(
        tx,
        so.make_mesh(data=4, devices=jax.devices()[:4]),
        loss_fn,
        min_shard_elements=1,
        **options,
    ),
    "tensor": lambda tx, rules=(), **options: so.fsdp(
        tx,
        so.make_mesh(data=4, tensor=2),
        loss_fn,
        rules=[*rules, ("up", P(None, "tensor"))],
        min_shard_elements=1,
        **options,
    ),
    "replicas": lambda tx, **options: so.fsdp(
        tx, so.make_mesh(replica=2, data=4), loss_fn, min_shard_elements=1, **options
    ),
}

ADAM = optax.adam(0.05)
SCHEDULE = optax.linear_schedule(0.05, 0.01, 5)


def renamed_adam(fields, name):
    """Return Adam whose state has other names of fields."""
    state_type = NamedTuple(name, [(field, object) for field in fields])
    inner = optax.scale_by_adam()

    def init(params):
        return state_type(*inner.init(params))

    def update(updates, state, params=None):
        updates, new_state = inner.update(updates, optax.ScaleByAdamState(*state), params)
        return updates, state_type(*new_state)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-0.05))


def in_parts(first, second):
    return optax.partition({"a": first, "b": second}, {"up": "a", "down": "b", "bias": "b"})


def split_adam(old, new):
    """Put the moments of Adam into the states of a partition, by hand."""
    (adam, *_) = old
    states = {}
    for label, names in {"a": ["up"], "b": ["down", "bias"]}.items():
        masked = new.inner_states[label]
        inner = list(masked.inner_state)
        mu, nu = (
            {
                name: moment[name] if name in names else inner[0].mu[name]
                for name in ("up", "down", "bias")
            }
            for moment in (adam.mu, adam.nu)
        )
        inner[0] = inner[0]._replace(count=adam.count, mu=mu, nu=nu)
        states[label] = masked._replace(inner_state=tuple(inner))
    return new._replace(inner_states=states)


def joined_adam(old, new):
    """Put the moments of a partition into one Adam, by hand."""
    a, b = (old.inner_states[label].inner_state[0] for label in "ab")
    mu, nu = (
        {"up": first["up"], "down": second["down"], "bias": second["bias"]}
        for first, second in ((a.mu, b.mu), (a.nu, b.nu))
    )
    return (new[0]._replace(count=a.count, mu=mu, nu=nu), *new[1:])


@functools.cache
def strategy(name, tx):
    """Return one strategy for a name and an optimizer, so that its programs are compiled once."""
    return STRATEGIES[name](tx)


CLIP = optax.clip_by_global_norm(0.05)
AVERAGE = so.transforms.average_params(0.5)
TRACE = optax.sgd(0.05, momentum=0.9)

CHAINS = {
    # the old chain, the new one, and by hand: (old state, first new state) -> state that goes on
    "a schedule": (ADAM, optax.adam(SCHEDULE), lambda old, new: (old[0], new[1])),
    "a number": (optax.adam(SCHEDULE), ADAM, lambda old, new: (old[0], new[1])),
    "another schedule": (
        optax.adam(SCHEDULE),
        optax.chain(CLIP, optax.adam(optax.constant_schedule(0.02))),
        lambda old, new: (new[0], old),
    ),
    "clipping added": (ADAM, optax.chain(CLIP, ADAM), lambda old, new: (new[0], old)),
    "clipping removed": (optax.chain(CLIP, ADAM), ADAM, lambda old, new: old[1]),
    "adamw": (ADAM, optax.adamw(0.05, weight_decay=0.1), lambda old, new: (old[0], *new[1:])),
    "clipped adamw": (
        ADAM,
        optax.chain(CLIP, optax.adamw(SCHEDULE)),
        lambda old, new: (new[0], (old[0], *new[1][1:])),
    ),
    "several batches": (
        ADAM,
        optax.MultiSteps(ADAM, 2).gradient_transformation(),
        lambda old, new: new._replace(inner_opt_state=old),
    ),
    "one batch": (
        optax.MultiSteps(ADAM, 2).gradient_transformation(),
        ADAM,
        lambda old, new: old.inner_opt_state,
    ),
    "anomalies skipped": (
        ADAM,
        so.transforms.skip_anomalies(ADAM),
        lambda old, new: new._replace(inner=old),
    ),
    "not finite skipped": (
        TRACE,
        optax.apply_if_finite(TRACE, 3),
        lambda old, new: new._replace(inner_state=old),
    ),
    "hyperparameters injected": (
        ADAM,
        optax.inject_hyperparams(optax.adam)(learning_rate=0.02),
        lambda old, new: new._replace(inner_state=(old[0], *new.inner_state[1:])),
    ),
    "hyperparameters fixed": (
        optax.inject_hyperparams(optax.adam)(learning_rate=0.02),
        ADAM,
        lambda old, new: (old.inner_state[0], *new[1:]),
    ),
    "an injected schedule": (
        optax.inject_hyperparams(optax.adam)(learning_rate=0.02),
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
        lambda old, new: new._replace(
            count=old.count, inner_state=old.inner_state, hyperparams=old.hyperparams
        ),
    ),
    "an average": (ADAM, optax.chain(ADAM, AVERAGE), lambda old, new: (old, new[1])),
    "no average": (optax.chain(ADAM, AVERAGE), ADAM, lambda old, new: old[0]),
    "reordered": (
        optax.chain(optax.trace(0.9), optax.scale_by_rms(), optax.scale(-0.01)),
        optax.chain(optax.scale_by_rms(), optax.trace(0.9), optax.scale(-0.01)),
        lambda old, new: (old[1], old[0], new[2]),
    ),
    "parts": (ADAM, in_parts(ADAM, optax.adam(0.01)), split_adam),
    "one part": (
        in_parts(ADAM, optax.adam(0.01)),
        optax.chain(CLIP, ADAM),
        lambda old, new: (new[0], joined_adam(old, new[1])),
    ),
    "masked": (
        ADAM,
        optax.masked(ADAM, {"up": True, "down": True, "bias": False}),
        lambda old, new: new._replace(
            inner_state=(
                old[0]._replace(
                    mu=old[0].mu | {"bias": optax.MaskedNode()},
                    nu=old[0].nu | {"bias": optax.MaskedNode()},
                ),
                *new.inner_state[1:],
            )
        ),
    ),
    "moments in bfloat16": (
        ADAM,
        optax.chain(CLIP, optax.adam(0.05, mu_dtype=jnp.bfloat16)),
        lambda old, new: (
            new[0],
            (old[0]._replace(mu=optax.tree.cast(old[0].mu, jnp.bfloat16)), new[1][1]),
        ),
    ),
    "another optimizer": (TRACE, ADAM, lambda old, new: new),
    "a part of the moments": (
        ADAM,
        optax.chain(optax.scale_by_lion(), optax.scale(-0.01)),
        lambda old, new: (new[0]._replace(count=old[0].count, mu=old[0].mu), new[1]),
    ),
    "a running maximum": (
        ADAM,
        optax.chain(CLIP, optax.amsgrad(0.05)),
        lambda old, new: (
            new[0],
            (new[1][0]._replace(count=old[0].count, mu=old[0].mu, nu=old[0].nu), new[1][1]),
        ),
    ),
    "no running maximum": (
        optax.amsgrad(0.05),
        ADAM,
        lambda old, new: (new[0]._replace(count=old[0].count, mu=old[0].mu, nu=old[0].nu), new[1]),
    ),
    "a masked running maximum": (
        optax.adamw(SCHEDULE),
        optax.masked(optax.amsgrad(SCHEDULE), {"up": True, "down": True, "bias": True}),
        lambda old, new: new._replace(
            inner_state=(
                new.inner_state[0]._replace(count=old[0].count, mu=old[0].mu, nu=old[0].nu),
                old[2],
            )
        ),
    ),
    "a moment that is missing": (
        optax.chain(optax.scale_by_lion(), optax.scale(-0.01)),
        ADAM,
        lambda old, new: new,
    ),
}

NAMES = list(STRATEGIES)
HARD = {
    "another schedule": ("tensor", "fsdp 4"),
    "clipped adamw": ("fsdp", "ddp"),
    "several batches": ("fsdp", "fsdp 4"),
    "an injected schedule": ("zero", "tensor"),
    "an average": ("fsdp", "replicas"),
    "parts": ("replicas", "fsdp"),
    "one part": ("ddp", "tensor"),
    "a running maximum": ("fsdp", "zero"),
    "a part of the moments": ("fsdp", "tensor"),
}
"""The chains of the default tier, with the strategies that save and restore: many share the program
that saves.
"""
TRAIN_ON = ("several batches", "an average", "one part")
ONLY_RESTORED = {(chain, *names) for chain, names in HARD.items() if chain not in TRAIN_ON}
"""Rows that do not train on. Other rows of their chain do, in the slow tier."""

QUICK = [
    (chain, *HARD.get(chain, (NAMES[index % 6], NAMES[(index + 1 + index // 6) % 6])))
    for index, chain in enumerate(CHAINS)
]
ROWS = QUICK + [
    (chain, old, NAMES[(NAMES.index(new) + 2) % 6])
    for chain, new, old in QUICK
    for old in (old, NAMES[(NAMES.index(old) + 1) % 6])
]


def go_on(opt, state):
    for step in range(BEFORE, BEFORE + AFTER):
        state, _ = opt.step(state, make_batch(step))
    return state


def assert_same(state, params, opt_state, steps=BEFORE + AFTER):
    assert int(state.step) == steps
    leaves = jax.tree.leaves((state.params, state.opt_state))
    expected = (params, opt_state)
    for leaf, expected_leaf in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=3e-4, atol=3e-6)


def assert_placed(state, opt):
    abstract_state = opt.abstract_state(jax.eval_shape(make_params))
    for leaf, abstract_leaf in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((abstract_state.params, abstract_state.opt_state)),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(abstract_leaf.sharding, leaf.ndim)
        assert leaf.dtype == abstract_leaf.dtype


def save_after_steps(folder, opt):
    """Return the parameters and the state of the optimizer that are saved."""
    state = opt.init(make_params())
    for step in range(BEFORE):
        state, _ = opt.step(state, make_batch(step))
    so.save(folder, state)
    return jax.device_get((state.params, state.opt_state))


@pytest.mark.parametrize(
    ("chain", "old", "new"), tiered(ROWS, lambda row: row in QUICK and row[0] in HARD)
)
def test_what_both_chains_have_goes_on(chain, old, new, tmp_path):
    old_tx, new_tx, by_hand = CHAINS[chain]
    params, old_state = save_after_steps(tmp_path, strategy(old, old_tx))
    opt = strategy(new, new_tx)
    state = so.restore(tmp_path, opt, new_chain=True)
    opt_state = by_hand(old_state, new_tx.init(params))
    assert_same(state, params, opt_state, BEFORE)
    assert_placed(state, opt)
    if (chain, old, new) in ONLY_RESTORED:
        return
    steps = range(BEFORE, BEFORE + AFTER)
    assert_same(go_on(opt, state), *one_device(new_tx, params, opt_state, steps))


FREEZING = {
    "frozen": ((), [("bias", "frozen")], ("up", "down", "bias"), ("up", "down")),
    "another one": ([("up", "frozen")], [("down", "frozen")], ("down", "bias"), ("up", "bias")),
}


@pytest.mark.parametrize("change", FREEZING)
def test_moments_of_leaves_that_are_still_trained_go_on(change, tmp_path, capsys):
    old_rules, new_rules, old_names, new_names = FREEZING[change]
    save_after_steps(tmp_path, STRATEGIES["fsdp"](ADAM, rules=old_rules))
    opt = STRATEGIES["tensor"](ADAM, rules=new_rules)
    state = go_on(opt, so.restore(tmp_path, opt, new_chain=True))
    params = make_params()
    seen = {name: params[name] for name in old_names}
    params, old = one_device(ADAM, params, ADAM.init(seen), range(BEFORE), old_names)
    new = ADAM.init({name: params[name] for name in new_names})
    mu, nu = (
        {name: moment.get(name, zeros[name]) for name in new_names}
        for moment, zeros in ((old[0].mu, new[0].mu), (old[0].nu, new[0].nu))
    )
    opt_state = (old[0]._replace(mu=mu, nu=nu), *new[1:])
    steps = range(BEFORE, BEFORE + AFTER)
    params, opt_state = one_device(ADAM, params, opt_state, steps, new_names)
    assert_same(state, params, opt_state)
    text = capsys.readouterr().err
    for verdict, names in (
        ("started", set(new_names) - set(old_names)),
        ("dropped", set(old_names) - set(new_names)),
    ):
        lines = re.findall(rf"  (\S+): .*, {verdict}\n", text)
        assert sorted(lines) == sorted(
            f"opt_state/0/{moment}/{name}" for moment in ("mu", "nu") for name in names
        )


@pytest.mark.parametrize(
    "chain",
    tiered(["an average", "clipping added", "a schedule"], lambda chain: chain == "an average"),
)
def test_each_replica_goes_on_with_its_own_state(chain, tmp_path):
    """Under diloco, with moments of an outer optimizer of the same shapes."""
    old_tx, new_tx, by_hand = CHAINS[chain]

    def make(tx):
        outer = optax.sgd(0.7, momentum=0.9)
        return so.diloco(STRATEGIES["replicas"](tx), sync_every=50, outer=outer)

    save_after_steps(tmp_path, make(old_tx))
    opt = make(new_tx)
    state = go_on(opt, so.restore(tmp_path, opt, new_chain=True))
    for replica, rows in enumerate((slice(0, 8), slice(8, 16))):
        params = make_params()
        opt_state = old_tx.init(make_params())
        params, opt_state = one_device(old_tx, params, opt_state, range(BEFORE), rows=rows)
        # an average starts from the parameters that the replicas share
        opt_state = by_hand(opt_state, new_tx.init(make_params()))
        steps = range(BEFORE, BEFORE + AFTER)
        params, opt_state = one_device(new_tx, params, opt_state, steps, rows=rows)
        replica_state = jax.tree.map(lambda leaf: leaf[replica], state.opt_state)  # noqa: B023
        shared = state._replace(
            params=replica_state.params.value, opt_state=replica_state.optimizer.value
        )
        assert_same(shared, params, opt_state)


@pytest.mark.parametrize(
    "chain",
    tiered(["several batches", "clipping added", "a schedule"], lambda chain: False),
)
def test_the_moments_of_a_pipeline_go_on(chain, tmp_path, x64):
    old_tx, new_tx, by_hand = CHAINS[chain]
    case = block_problem("gpt", weighted=False, num_blocks=4, rows=16, steps=4)

    def make(tx, **sizes):
        return so.hybrid(
            tx, so.make_mesh(**sizes), case.loss_fn, micro_batches=2, min_shard_elements=8
        )

    first = make(old_tx, data=2, pipeline=4)
    state = first.init(case.params)
    for batch in case.batches[:2]:
        state, _ = first.step(state, batch)
    so.save(tmp_path, state)
    second = make(new_tx, data=4, pipeline=2)
    state = so.restore(tmp_path, second, new_chain=True)
    for batch in case.batches[2:]:
        state, _ = second.step(state, batch)

    def step_fn(tx):
        def run(params, opt_state, batch):
            grads = jax.grad(case.reference)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return jax.jit(run)

    params = case.params
    opt_state = old_tx.init(case.params)
    for batch in case.batches[:2]:
        params, opt_state = step_fn(old_tx)(params, opt_state, batch)
    opt_state = by_hand(opt_state, new_tx.init(params))
    for batch in case.batches[2:]:
        params, opt_state = step_fn(new_tx)(params, opt_state, batch)
    assert relative_difference(state.params, params) <= 1e-8


TWO = optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-0.01))
AMBIGUOUS = {
    "shifted": (
        TWO,
        optax.chain(CLIP, *[optax.trace(0.9), optax.trace(0.5)], optax.scale(-0.01)),
        {1: "opt_state/0 or opt_state/1", 2: "opt_state/0 or opt_state/1"},
        {"opt_state/1": "opt_state/0", "opt_state/2": "opt_state/1"},
        lambda old, new: (new[0], *old),
    ),
    "one is left": (
        TWO,
        optax.chain(optax.trace(0.5), optax.scale(-0.01)),
        {0: "opt_state/0 or opt_state/1"},
        {"opt_state/0": "opt_state/1"},
        lambda old, new: old[1:],
    ),
    "one is added": (
        optax.chain(optax.trace(0.9), optax.scale(-0.01)),
        TWO,
        {0: "opt_state/0", 1: "opt_state/0"},
        {"opt_state/0": None, "opt_state/1": "opt_state/0"},
        lambda old, new: (new[0], *old),
    ),
    "two Adams": (
        optax.chain(optax.scale_by_adam(), optax.scale_by_adam(0.5), optax.scale(-0.01)),
        optax.chain(optax.scale_by_adam(), optax.scale(-0.01)),
        {0: "opt_state/0 or opt_state/1"},
        {"opt_state/0/count": "opt_state/1/count", "opt_state/0/mu": "opt_state/1/mu"}
        | {"opt_state/0/nu": "opt_state/0/nu"},
        lambda old, new: (old[1]._replace(nu=old[0].nu), new[1]),
    ),
}


@pytest.mark.parametrize("change", AMBIGUOUS)
def test_states_that_could_be_mistaken_are_refused_until_they_are_named(change, tmp_path):
    old_tx, new_tx, lines, named, by_hand = AMBIGUOUS[change]
    params, old_state = save_after_steps(tmp_path, strategy("fsdp", old_tx))
    opt = strategy("zero", new_tx)
    with pytest.raises(so.errors.CheckpointError) as error:
        so.restore(tmp_path, opt, new_chain=True)
    text = str(error.value)
    assert text.startswith(
        "restore: the checkpoint does not say which stored state belongs to which state of opt.\n"
    )
    for place, origins in lines.items():
        assert re.search(rf"\n  opt_state/{place} \([a-z, ]+\): {origins}\n", text)
    state = so.restore(tmp_path, opt, new_chain=named)
    assert_same(state, params, by_hand(old_state, new_tx.init(params)), BEFORE)
    assert_placed(state, opt)


def test_an_exchange_that_paths_do_not_show_can_be_named(tmp_path):
    save_after_steps(tmp_path, strategy("fsdp", TWO))
    swapped = optax.chain(optax.trace(0.5), optax.trace(0.9), optax.scale(-0.01))
    opt = strategy("fsdp", swapped)
    names = {"opt_state/0": "opt_state/1", "opt_state/1": "opt_state/0"}
    state = so.restore(tmp_path, opt, new_chain=names)
    plain = so.restore(tmp_path, strategy("fsdp", TWO))
    for name in ("up", "down", "bias"):
        for place in (0, 1):
            np.testing.assert_array_equal(
                state.opt_state[place].trace[name], plain.opt_state[1 - place].trace[name]
            )


def test_moments_with_other_names_go_on_if_they_are_named(tmp_path):
    save_after_steps(tmp_path, strategy("fsdp", renamed_adam(["count", "first", "second"], "Old")))
    opt = strategy("fsdp", ADAM)
    started = so.restore(tmp_path, opt, new_chain=True)
    assert not np.any(started.opt_state[0].mu["up"])
    names = {
        f"opt_state/0/{name}": f"opt_state/0/{old_name}"
        for name, old_name in (("count", "count"), ("mu", "first"), ("nu", "second"))
    }
    state = so.restore(tmp_path, opt, new_chain=names)
    assert int(state.opt_state[0].count) == BEFORE
    for moment in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert all(np.any(leaf) for leaf in moment.values())


def test_a_schedule_goes_on_from_the_count_that_is_named(tmp_path):
    save_after_steps(tmp_path, strategy("fsdp", ADAM))
    opt = strategy("fsdp", optax.adam(SCHEDULE))
    state = so.restore(tmp_path, opt, new_chain={"opt_state/1/count": "opt_state/0/count"})
    assert (int(state.opt_state[0].count), int(state.opt_state[1].count)) == (BEFORE, BEFORE)
    opt.step(state, make_batch(0))  # the two counts share no memory, so both may be donated


def test_counts_that_differ_are_refused_until_one_is_named(tmp_path):
    parts = in_parts(ADAM, optax.conditionally_mask(ADAM, lambda step, **_: step > 1))
    save_after_steps(tmp_path, strategy("fsdp", parts))
    opt = strategy("fsdp", ADAM)
    message = (
        "has different numbers for the same leaf of opt.\n  opt_state/0/count:"
        " opt_state/inner_states/a/inner_state/0/count or"
        " opt_state/inner_states/b/inner_state/inner_state/0/count\nFix: "
    )
    with pytest.raises(so.errors.CheckpointError, match=re.escape(message)):
        so.restore(tmp_path, opt, new_chain=True)
    name = "opt_state/inner_states/a/inner_state/0/count"
    state = so.restore(tmp_path, opt, new_chain={"opt_state/0/count": name})
    assert int(state.opt_state[0].count) == BEFORE


def test_fit_goes_on_with_another_chain_if_resume_says_so(tmp_path, capsys):
    batches = [make_batch(step) for step in range(BEFORE + AFTER)]

    def fit(tx, num_steps, resume):
        opt = strategy("fsdp", tx)
        with so.Checkpoints(tmp_path, every=10, keep=1, resume=resume) as checkpoints:
            return so.fit(
                opt,
                so.training.DeferredInit(make_params()),
                batches,
                num_steps=num_steps,
                checkpoints=checkpoints,
                progress=False,
            ).state

    fit(ADAM, BEFORE, True)
    chain = optax.chain(CLIP, ADAM)
    with pytest.raises(so.errors.CheckpointError, match="resume='new_chain'"):
        fit(chain, BEFORE + AFTER, True)
    capsys.readouterr()
    state = fit(chain, BEFORE + AFTER, "new_chain")
    assert "7 leaves matched: opt_state/1 from opt_state\n" in capsys.readouterr().err
    params, old = one_device(ADAM, make_params(), ADAM.init(make_params()), range(BEFORE))
    opt_state = (chain.init(params)[0], old)
    assert_same(state, *one_device(chain, params, opt_state, range(BEFORE, BEFORE + AFTER)))
    # where nothing changed, fit prints nothing about it
    capsys.readouterr()
    fit(chain, BEFORE + AFTER, {})
    assert "matched" not in capsys.readouterr().err


def test_parameters_of_which_there_is_a_hash_stay(tmp_path):
    frozen = [("up", "frozen")]
    opt = STRATEGIES["fsdp"](ADAM, rules=frozen)
    state = opt.init(make_params())
    state, _ = opt.step(state, make_batch(0))
    with so.Checkpoints(tmp_path, 1, 1, hash_only=["up"]) as checkpoints:
        checkpoints.save(state, step=1)
        mu = np.asarray(state.opt_state[0].mu["down"])
    chain = optax.chain(CLIP, ADAM, so.transforms.average_params(0.5))
    opt = STRATEGIES["fsdp"](chain, rules=frozen)
    state = so.restore(tmp_path, opt, params=make_params(), new_chain=True)
    np.testing.assert_array_equal(state.params["up"], make_params()["up"])
    np.testing.assert_array_equal(state.opt_state[1][0].mu["down"], mu)
    np.testing.assert_array_equal(state.opt_state[2].average["down"], state.params["down"])


HEADS = {
    # leaves of the old model, and of the new one, that differ from make_params
    "another shape": ({}, {"down": np.full((32, 4), 0.1), "bias": np.ones(4)}),
    "a leaf more": ({}, {"head": np.ones(3)}),
    "a leaf less": ({"head": np.ones(3)}, {}),
    "another tree": ({"head": np.ones(3)}, {"head": {"kernel": np.ones((3, 2))}}),
}
HEAD_ROWS = [(head, chain) for head in HEADS for chain in ("clipping added", "a schedule")]
HEAD_ROWS += [("another shape", chain) for chain in ("several batches", "an average")]


def with_leaves(leaves):
    return make_params() | jax.tree.map(np.float32, leaves)


@pytest.mark.parametrize(
    ("head", "chain"), tiered(HEAD_ROWS, lambda row: row == ("another shape", "clipping added"))
)
def test_a_head_changes_together_with_the_chain(head, chain, tmp_path, capsys):
    """The backbone and its moments go on. The new leaves are taken from params, and not donated."""
    (old_leaves, new_leaves), (old_tx, new_tx, by_hand) = HEADS[head], CHAINS[chain]
    first = strategy("fsdp", old_tx)
    state = first.init(with_leaves(old_leaves))
    for step in range(BEFORE):
        state, _ = first.step(state, make_batch(step))
    so.save(tmp_path, state)
    opt = strategy("zero", new_tx)
    params = jax.tree.map(jnp.asarray, with_leaves(new_leaves))
    if not head.startswith("a leaf"):
        with pytest.raises(
            so.errors.CheckpointError, match="or pass new_chain=True, and as params="
        ):
            so.restore(tmp_path, opt, abstract_params=jax.eval_shape(lambda: params))
    capsys.readouterr()
    state = so.restore(tmp_path, opt, new_chain=True, params=params)
    text = capsys.readouterr().err
    for name in new_leaves:
        assert re.search(rf"\n  params/{name}.*, taken from params\n", text)
    for name in old_leaves:
        assert re.search(rf"\n  params/{name}: .*, dropped\n", text)
    state = go_on(opt, state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))

    old_params = with_leaves(old_leaves)
    names = tuple(with_leaves(new_leaves))
    old_params, old = one_device(
        old_tx, old_params, old_tx.init(old_params), range(BEFORE), tuple(old_params)
    )
    is_params = lambda node: isinstance(node, dict) and "up" in node  # noqa: E731

    def backbone(node, new_node):
        return new_node | {name: node[name] for name in new_node if name not in new_leaves}

    params = backbone(old_params, with_leaves(new_leaves))
    blank = old_tx.init(params)
    old = jax.tree.map(
        lambda node, new: backbone(node, new) if is_params(node) else node,
        old,
        blank,
        is_leaf=is_params,
    )
    opt_state = by_hand(old, new_tx.init(params))
    assert_same(state, *one_device(new_tx, params, opt_state, range(BEFORE, BEFORE + AFTER), names))


def test_the_checkpoint_of_another_model_is_refused_with_params_too(tmp_path):
    save_after_steps(tmp_path, strategy("fsdp", ADAM))
    other = {"w": np.zeros((64, 8), np.float32)}
    opt = strategy("fsdp", optax.chain(CLIP, ADAM))
    with pytest.raises(so.errors.CheckpointError, match="1 leaf missing, 3 left over, 0 different"):
        so.restore(tmp_path, opt, params=other, new_chain=True)
    half = jax.tree.map(jnp.bfloat16, make_params())
    with pytest.raises(so.errors.CheckpointError, match="0 left over, 3 different"):
        so.restore(tmp_path, opt, params=half, new_chain=True)


def test_other_parameters_are_refused_as_before(tmp_path):
    save_after_steps(tmp_path, strategy("fsdp", ADAM))
    params = make_params() | {"bias": np.zeros(4, np.float32), "new": np.zeros(3, np.float32)}
    opt = strategy("fsdp", optax.chain(CLIP, ADAM))
    with pytest.raises(so.errors.CheckpointError) as error:
        so.restore(tmp_path, opt, abstract_params=jax.eval_shape(lambda: params), new_chain=True)
    assert "does not fit opt: 1 leaf missing, 0 left over, 1 different." in str(error.value)


@pytest.mark.parametrize(
    ("new_chain", "error", "message"),
    [
        ("yes", TypeError, "new_chain must be True, False or a dict of paths, got 'yes'."),
        (
            {"opt_state/7": "opt_state/0"},
            ValueError,
            "new_chain names states that are not there.\n  opt_state/7: not in the state of opt\n",
        ),
        (
            {"opt_state/0": "opt_state/mu"},
            ValueError,
            "new_chain names states that are not there.\n  opt_state/mu: not in the checkpoint, for"
            " opt_state/0\n",
        ),
    ],
)
def test_names_that_are_not_there_are_refused(new_chain, error, message, tmp_path):
    opt = strategy("fsdp", ADAM)
    so.save(tmp_path, opt.init(make_params()))
    with pytest.raises(error, match=re.escape(f"restore: {message}")):
        so.restore(tmp_path, opt, new_chain=new_chain)
    with pytest.raises(TypeError, match="new_chain is for an optimizer, not for an abstract"):
        so.restore(tmp_path, opt.abstract_state(), new_chain=True)
    with pytest.raises(TypeError, match="resume must be True, False, 'new_chain' or a dict"):
        so.Checkpoints(tmp_path, 1, 1, resume="yes")


def test_moments_are_cast_where_the_paths_are_the_same(tmp_path, capsys):
    save_after_steps(tmp_path, strategy("fsdp", ADAM))
    opt = strategy("zero", optax.adam(0.05, mu_dtype=jnp.bfloat16))
    with pytest.raises(so.errors.CheckpointError, match="new_chain=True"):
        so.restore(tmp_path, opt, abstract_params=jax.eval_shape(make_params))
    state = so.restore(tmp_path, opt, new_chain=True)
    plain = so.restore(tmp_path, strategy("fsdp", ADAM))
    for name in ("up", "down", "bias"):
        expected = plain.opt_state[0].mu[name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(state.opt_state[0].mu[name], expected)
    assert "opt_state/0/mu/up: bfloat16[16, 32], cast" in capsys.readouterr().err


REDUCED = {
    "clipping added": ((), lambda leaf: True),
    "a leaf frozen": ([("bias", "frozen")], lambda leaf: leaf != "bias"),
}


@pytest.mark.parametrize("change", REDUCED)
def test_the_memory_of_a_reducer_goes_on(change, tmp_path):
    rules, is_kept = REDUCED[change]
    reducer = so.reducers.error_feedback(so.reducers.top_k(0.1))
    save_after_steps(tmp_path, STRATEGIES["ddp"](ADAM, reducer=reducer))
    opt = STRATEGIES["ddp"](optax.chain(CLIP, ADAM), reducer=reducer, rules=rules)
    state = so.restore(tmp_path, opt, new_chain=True)
    plain = so.restore(tmp_path, STRATEGIES["ddp"](ADAM, reducer=reducer))
    old, new = (
        dict(jax.tree_util.tree_leaves_with_path(s.opt_state.reducer)) for s in (plain, state)
    )
    assert set(new) == {path for path in old if is_kept(path[-1].key)}
    for path, memory in new.items():
        np.testing.assert_array_equal(memory, old[path])
        assert np.any(memory)
    go_on(opt, state)
