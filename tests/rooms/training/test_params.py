"""`so.replace(params=...)`: frozen leaves that are set between steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.compilations import compilations
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
TEACHER = {"layers": [{"w": np.eye(8, dtype=np.float32)}, {"w": 2 * np.eye(8, dtype=np.float32)}]}
PARAMS = {"w": np.full((8, 8), 0.5, np.float32), "kl": np.float32(0.5), "teacher": TEACHER}
FROZEN = [("^kl$", "frozen"), ("^teacher/", "frozen")]
NEW = {
    "kl": 0.125,
    "teacher": {"layers": [{"w": np.full((8, 8), 3.0)}, {"w": np.full((8, 8), 0.25, np.float64)}]},
}


def distilled(params, batch):
    taught = batch
    for layer in params["teacher"]["layers"]:
        taught = taught @ layer["w"]
    return jnp.mean((batch @ params["w"]) ** 2) + params["kl"] * jnp.mean(
        (batch @ params["w"] - taught) ** 2
    )


def as_float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name in ("zero1", "fsdp")))
def test_the_next_step_runs_the_same_program_on_the_new_values(strategy, mesh_of):
    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), distilled, rules=FROZEN)
    state, _ = opt.step(opt.init(PARAMS), X)
    w = np.array(state.params["w"])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    state = so.replace(state, params=NEW)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    with compilations() as compiled:
        state, metrics = opt.step(state, X)
    assert not compiled
    wanted = {"w": w, **as_float32(NEW)}
    np.testing.assert_allclose(metrics["loss"], distilled(wanted, X), rtol=1e-5)
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], 3.0)


def test_values_are_found_by_key_paths_in_whatever_containers(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), distilled, rules=FROZEN)
    state = so.replace(opt.init(PARAMS), params={"teacher/layers/1/w": np.ones((8, 8)), "kl": 0.25})
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], np.eye(8))
    np.testing.assert_array_equal(state.params["teacher"]["layers"][1]["w"], 1.0)
    assert float(state.params["kl"]) == 0.25
    state = so.replace(
        state, params={"teacher": {"layers": [{"w": None}, {"w": np.zeros((8, 8))}]}}
    )
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], np.eye(8))
    np.testing.assert_array_equal(state.params["teacher"]["layers"][1]["w"], 0.0)


def test_what_was_passed_outlives_the_step(mesh_of):
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), distilled, rules=FROZEN, min_shard_elements=8)
    state = opt.init(PARAMS)
    held = jax.device_put(jnp.full((8, 8), 7.0), state.params["w"].sharding)
    numpy_held = np.full((8, 8), 5, np.float32)
    state = so.replace(state, params={"teacher": {"layers": [{"w": held}, {"w": numpy_held}]}})
    numpy_held[:] = 0
    state, _ = opt.step(state, X)
    np.testing.assert_array_equal(held, 7.0)
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], 7.0)
    np.testing.assert_array_equal(state.params["teacher"]["layers"][1]["w"], 5.0)


def test_the_policy_becomes_its_own_reference(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=4), distilled, rules=FROZEN)
    state, _ = opt.step(opt.init(PARAMS), X)
    before = np.array(state.params["w"])
    state, _ = opt.step(
        so.replace(state, params={"teacher": {"layers": [{"w": state.params["w"]}, {}]}}), X
    )
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], before)
    assert np.abs(state.params["w"] - before).max() > 1e-3


@pytest.mark.parametrize("combine", tiered(["local_sgd", "diloco"], lambda name: name == "diloco"))
def test_every_replica_gets_the_value(combine, mesh_of):
    inner = so.ddp(optax.sgd(0.1), mesh_of(replica=2, data=2), distilled, rules=FROZEN)
    opt = (
        so.local_sgd(inner, sync_every=2)
        if combine == "local_sgd"
        else so.diloco(inner, sync_every=2)
    )
    state, _ = opt.step(opt.init(PARAMS), X)
    replica_values = np.array(state.opt_state.params.value["w"])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    state = so.replace(state, params=NEW)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert float(state.params["kl"]) == 0.125
    state, metrics = opt.step(state, X)
    rows = X.reshape(2, 8, 8)
    losses = [distilled({"w": replica_values[i], **as_float32(NEW)}, rows[i]) for i in range(2)]
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    state = opt.synchronize(state)
    np.testing.assert_array_equal(state.params["teacher"]["layers"][1]["w"], 0.25)
    np.testing.assert_array_equal(
        state.opt_state.params.value["teacher"]["layers"][1]["w"], np.full((2, 8, 8), 0.25)
    )


def test_a_pipeline_replaces_parameters_of_its_blocks(mesh_of):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda weights, x: x @ (weights["w"] + weights["old"]),
        loss=lambda outer, x, batch: outer["scale"] * jnp.mean(x**2),
    )
    eye = np.stack([np.eye(8, dtype=np.float32)] * 2)
    params = {"blocks": {"w": eye, "old": 0 * eye}, "scale": np.float32(1)}
    opt = so.hybrid(
        optax.sgd(0.1),
        mesh_of(data=2, pipeline=2),
        model,
        micro_batches=2,
        rules=[("^scale$", "frozen"), ("^blocks/old$", "frozen")],
    )
    state = so.replace(opt.init(params), params={"blocks": {"old": eye}, "scale": 0.5})
    state, metrics = opt.step(state, X)
    np.testing.assert_allclose(
        metrics["loss"], 0.5 * np.mean((X @ (2 * np.eye(8)) @ (2 * np.eye(8))) ** 2), rtol=1e-5
    )


def test_parameters_are_replaced_on_a_mesh_with_explicit_axes(mesh_of):
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    opt = so.fsdp(optax.sgd(0.1), mesh, distilled, rules=FROZEN, min_shard_elements=8)
    with jax.set_mesh(mesh):
        state = opt.init(PARAMS)
        sharding = state.params["w"].sharding
        state = so.replace(
            state, params={**NEW, "teacher": {"layers": [{"w": state.params["w"]}, {}]}}
        )
        assert state.params["teacher"]["layers"][0]["w"].sharding == sharding
        state, _ = opt.step(state, X)
    np.testing.assert_array_equal(state.params["teacher"]["layers"][0]["w"], 0.5)


def test_keys_integers_and_half_precision_are_replaced(mesh_of):
    def loss_fn(params, batch):
        drawn = jax.random.normal(params["key"], (8,))
        return (
            jnp.mean((batch @ params["w"] + drawn[None, :]) ** 2) * params["count"]
            + 0 * params["half"].sum()
        )

    params = {
        "w": np.eye(8, dtype=np.float32),
        "key": jax.random.key(0),
        "count": np.int32(1),
        "half": jnp.zeros(4, "bfloat16"),
    }
    opt = so.ddp(
        optax.sgd(0.1),
        mesh_of(data=2),
        loss_fn,
        rules=[("key", "frozen"), ("count", "frozen"), ("half", "frozen")],
    )
    state = opt.init(params)
    state = so.replace(state, params={"key": jax.random.key(7), "count": 3, "half": np.ones(4)})
    assert (state.params["count"].dtype, state.params["half"].dtype) == (jnp.int32, jnp.bfloat16)
    _, metrics = opt.step(state, X)
    drawn = jax.random.normal(jax.random.key(7), (8,))
    np.testing.assert_allclose(metrics["loss"], 3 * np.mean((X + drawn[None, :]) ** 2), rtol=1e-5)


REFUSED = [
    (
        {"kll": 0.1, "teacher": {"w": 1.0}},
        ValueError,
        (
            "replace: 2 values named no parameter.\n  kll\n  teacher/w\nFix: name parameters by"
            " their key paths, such as kl, step, teacher/layers/0/w, teacher/layers/1/w, w."
        ),
    ),
    (
        {"kl": 0.1, "teacher": {"layers": [{"w": 1.0}]}, "teacher/layers/0/w": 2.0},
        ValueError,
        (
            "replace: 1 key path stands for several leaves.\n"
            "  teacher/layers/0/w\n"
            "Fix: give each value one leaf, with a key path of its own."
        ),
    ),
    (
        {"kl": "much", "step": 1.5},
        TypeError,
        (
            "replace: values must be arrays or numbers of the kind that they replace.\n"
            "  kl: floating, got 'much' (str)\n"
            "  step: integer, got 1.5 (float)\n"
            "Fix: convert them, as by value.astype(dtype)."
        ),
    ),
    (
        {"kl": np.ones(2), "w": np.ones((2, 8, 8))},
        ValueError,
        (
            "replace: 2 values of another shape.\n"
            "  kl: shape (), got (2,)\n"
            "  w: shape (8, 8), got (2, 8, 8)\n"
            "Fix: give each value the shape of the parameter."
        ),
    ),
    (
        {"step": 2**40},
        ValueError,
        (
            "replace: 1 parameter cannot hold the integers given.\n"
            "  step: int32\n"
            "Fix: give values within the range of the dtype."
        ),
    ),
]


@pytest.mark.parametrize(("values", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_values_that_do_not_fit_are_refused(values, kind, message, mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), distilled, rules=[*FROZEN, ("^step$", "frozen")])
    state = opt.init({**PARAMS, "step": np.int32(0)})
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        so.replace(state, params=values)


def test_what_is_no_live_state_is_refused(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), distilled, rules=FROZEN)
    state = opt.init(PARAMS)
    message = (
        "replace: state must be a TrainState, got dict.\nFix: pass the state that opt.init or"
        " opt.step returned."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        so.replace(state.params, params={"kl": 1.0})
    opt.step(state, X)
    message = (
        "replace: this state was given to step already, which takes over its memory.\n"
        "Fix: pass the state that step returned."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.replace(state, params={"kl": 1.0})
