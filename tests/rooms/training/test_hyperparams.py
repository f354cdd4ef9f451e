import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.compilations import compilations
from support.tiers import tiered

import shardopt as so
from shardopt.training import hyperparams
from shardopt.training._fit import fit

ADAMW = {
    "learning_rate": 0.05,
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-8,
    "eps_root": 0.0,
    "weight_decay": 1e-4,
}
KINDS = ("ddp", "zero", "fsdp")


def build(kind, tx, mesh, loss_fn):
    options = {} if kind == "ddp" else {"min_shard_elements": 1}
    return getattr(so, kind)(tx, mesh, loss_fn, **options)


def new_state(opt):
    return opt.init({"w": jnp.zeros(4), "b": jnp.zeros(())})


def plain_state(tx):
    params = {"w": jnp.zeros(4)}
    return so.TrainState(jnp.int32(0), params, tx.init(params), jnp.zeros(2, jnp.uint32))


@pytest.mark.parametrize("kind", tiered(KINDS, lambda kind: kind == "fsdp"))
def test_round_trip_without_compiling_again(kind, mesh_of, loss_fn, batches):
    opt = build(
        kind, optax.inject_hyperparams(optax.adamw)(learning_rate=0.05), mesh_of(data=4), loss_fn
    )
    state = fit(opt, new_state(opt), batches, num_steps=2, progress=False).state
    assert hyperparams(state) == pytest.approx(ADAMW)
    with compilations() as compiled:
        changed = so.replace(
            state, hyperparams={"learning_rate": 0.01, "weight_decay": np.float64(0.5)}
        )

        def describe(leaf):
            return (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding)

        assert jax.tree.map(describe, changed) == jax.tree.map(describe, state)
        assert jax.tree.structure(changed) == jax.tree.structure(state)
        assert hyperparams(changed) == pytest.approx(
            ADAMW | {"learning_rate": 0.01, "weight_decay": 0.5}
        )
        result = fit(opt, changed, batches[2:], num_steps=6, progress=False)
    assert compiled == []
    assert hyperparams(result.state) == pytest.approx(
        ADAMW | {"learning_rate": 0.01, "weight_decay": 0.5}
    )


def test_it_changes_training_as_another_optimizer_would(mesh_of, loss_fn, batches):
    injected = build(
        "fsdp", optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), mesh_of(data=2), loss_fn
    )
    direct = build("fsdp", optax.sgd(0.125), mesh_of(data=2), loss_fn)
    state = so.replace(new_state(injected), hyperparams={"learning_rate": 0.125})
    params = fit(injected, state, batches, num_steps=10, progress=False).state.params
    wanted = fit(direct, new_state(direct), batches, num_steps=10, progress=False).state.params
    for name, value in wanted.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)


def test_found_wherever_it_is():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    tx = optax.chain(optax.clip(1.0), optax.apply_if_finite(inner, 3))
    state = plain_state(tx)
    assert hyperparams(state) == {"learning_rate": 0.5}
    assert hyperparams(so.replace(state, hyperparams={"learning_rate": 0.25})) == {
        "learning_rate": 0.25
    }
    assert hyperparams(state) == {"learning_rate": 0.5}


def test_shared_names_are_told_apart_by_path():
    def sgd(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    clip = optax.inject_hyperparams(optax.clip)(max_delta=2.0)
    state = plain_state(optax.chain(sgd(0.5), clip, sgd(0.25)))
    assert hyperparams(state) == {"0/learning_rate": 0.5, "max_delta": 2.0, "2/learning_rate": 0.25}
    changed = so.replace(state, hyperparams={"2/learning_rate": 0.125, "max_delta": 4})
    assert hyperparams(changed) == {
        "0/learning_rate": 0.5,
        "max_delta": 4.0,
        "2/learning_rate": 0.125,
    }
    fix = "Fix: choose from 0/learning_rate, 2/learning_rate, max_delta."
    with pytest.raises(
        ValueError,
        match=(
            f"^{re.escape(f'replace: no hyperparameter is named {chr(39)}learning_rate{chr(39)}.')}\n{re.escape(fix)}$"
        ),
    ):
        so.replace(state, hyperparams={"learning_rate": 0.1})


def test_hyperparams_injected_within_injected_are_found_and_set():
    def outer(scale):
        return optax.chain(
            optax.scale(scale), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        )

    state = plain_state(optax.inject_hyperparams(outer)(scale=3.0))
    assert hyperparams(state) == {"scale": 3.0, "learning_rate": 0.5}
    changed = so.replace(state, hyperparams={"learning_rate": 0.25, "scale": 1.5})
    assert hyperparams(changed) == {"scale": 1.5, "learning_rate": 0.25}


def test_dtypes_stay():
    tx = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.bfloat16)(
        learning_rate=0.5, momentum=0.5
    )
    state = so.replace(plain_state(tx), hyperparams={"learning_rate": 0.3, "momentum": 1})
    assert {leaf.dtype for leaf in state.opt_state.hyperparams.values()} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert hyperparams(state) == {"learning_rate": float(jnp.bfloat16(0.3)), "momentum": 1.0}


def test_schedules_are_read_but_not_set():
    tx = optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(1.0, 0.0, 10), momentum=0.5
    )
    state = plain_state(tx)
    assert hyperparams(state) == {"learning_rate": 1.0, "momentum": 0.5}
    message = (
        "replace: 'learning_rate' would be overwritten by a schedule at the next step.\n"
        "Fix: inject a number instead of the schedule, and set it as you go."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.replace(state, hyperparams={"learning_rate": 0.1, "momentum": 0.1})


def set_one(state):
    return so.replace(state, hyperparams={"learning_rate": 0.1})


def test_a_state_without_injected_hyperparams_is_refused():
    state = plain_state(optax.adam(1e-3))
    for caller, call in (("hyperparams", hyperparams), ("replace", set_one)):
        message = (
            f"{caller}: the optimizer state has no injected hyperparameters.\nFix: wrap the optimizer,"
            " as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(state)
        with pytest.raises(TypeError, match=f"^{caller}: state must be a TrainState, got dict."):
            call({})


@pytest.mark.parametrize(
    "value", ["0.1", None, True, [0.1], np.bool_(True), jnp.array(True), {"a": 1}]
)
def test_values_that_are_no_numbers_are_refused(value):
    state = plain_state(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    message = f"replace: learning_rate must be a number, got {value!r} ({type(value).__name__})."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        so.replace(state, hyperparams={"learning_rate": value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2), "learning_rate has shape (), got (2,)."),
        (float("nan"), "learning_rate must not be NaN."),
        (1e60, "learning_rate has dtype float32, which cannot hold 1e+60."),
    ],
)
def test_values_that_do_not_fit_are_refused(value, message):
    state = plain_state(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    with pytest.raises(ValueError, match=f"^{re.escape(f'replace: {message}')}$"):
        so.replace(state, hyperparams={"learning_rate": value})
    assert hyperparams(so.replace(state, hyperparams={"learning_rate": float("inf")})) == {
        "learning_rate": float("inf")
    }


def test_integers_are_not_rounded():
    def every(k):
        return optax.GradientTransformation(
            lambda params: optax.EmptyState(), lambda u, s, p=None: (u, s)
        )

    state = plain_state(optax.inject_hyperparams(every)(k=3))
    assert hyperparams(so.replace(state, hyperparams={"k": 5.0})) == {"k": 5}
    message = "replace: k has dtype int32, which cannot hold 5.5."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.replace(state, hyperparams={"k": 5.5})
