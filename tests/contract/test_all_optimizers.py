"""Each transformation of optax and optax.contrib trains as on one device, or is refused by its
name. Transformations that optax adds later are tested too.

A function that returns a transformation is found by its annotation. One without an annotation
counts as one, unless `OTHERS` has its name. One with an argument that `ARGUMENTS` does not have fails
here: add a value for it.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.reference import relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.config._transformation import (
    UNSUPPORTED,
    ExtraArgs,
    call_update,
    check_updates,
    refuse_unsupported,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Specifying a key"),
]
DRAW = np.random.default_rng(0)
PARAMS = {
    "w": DRAW.normal(size=(8, 8)).astype(np.float32),
    "b": DRAW.normal(size=8).astype(np.float32),
}
BATCHES = [DRAW.normal(size=(16, 8)).astype(np.float32) for _ in range(2)]


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) + params["b"][None]) ** 2)


def mask(params):
    return {"w": True, "b": False}


def one_matrix(params):
    is_matrix = optax.contrib.MuonDimensionNumbers()
    return {"w": is_matrix, "b": optax.MaskedNode()}


ARGUMENTS = {
    "learning_rate": 0.01,
    "clipping": 0.1,
    "eta": 0.01,
    "gamma": 0.5,
    "inner": optax.sgd(0.01, momentum=0.9),
    "max_consecutive_errors": 3,
    "max_delta": 0.1,
    "threshold": 0.1,
    "max_norm": 0.1,
    "should_transform_fn": lambda step: step < 1,
    "decay": 0.9,
    "mask": mask,
    "freeze_mask": mask,
    "inner_factory": optax.sgd,
    "fast_optimizer": optax.sgd(0.01),
    "sync_period": 2,
    "slow_step_size": 0.5,
    "measure": optax.tree.norm,
    "measure_name": "norm",
    "transforms": {"a": optax.sgd(0.01), "b": optax.adam(0.01)},
    "param_labels": {"w": "a", "b": "b"},
    "step_size": -0.01,
    "step_size_fn": lambda step: -0.01,
    "optimizer": optax.sgd(0.01),
    "adv_optimizer": optax.sgd(0.1),
    "base_optimizer": optax.sgd(0.01),
    "max_backtracking_steps": 3,
    "max_linesearch_steps": 3,
    "tx": optax.sgd(0.01),
    "f": lambda updates, params: updates,
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
    "measures": {"norm": optax.tree.norm},
}
SPECIAL = {
    # for matrices alone
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=one_matrix), mask
    ),
    "snapshot": lambda: optax.snapshot("norm", lambda updates, **_: optax.tree.norm(updates)),
    "chain": lambda: optax.chain(optax.clip(0.1), optax.sgd(0.01)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", optax.sgd(0.01))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.01),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(
        learning_rate=0.01
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, param: update),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(0.01), optax.sgd(0.1), sync_period=2, opaque_mode=True, reset_state=False
    ),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.01)),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.01), 0.01, b1=0.9),
}
REFUSED = {
    "lookahead": "optax.lookahead steps two copies of the parameters, and there is but one here.",
    "dpsgd": "optax.contrib.dpsgd clips the gradient of each example, and a strategy has their mean",
    "differentially_private_aggregate": "optax.contrib.dpsgd clips the gradient of each example",
}


OTHERS = {
    "bias_correction",
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}
"""Functions without an annotation that return no transformation."""


# its updates are the measurement
MEASUREMENTS = ("measure_with_ema",)
# its state has the measurements after the first update alone
CHANGING = ("monitor",)
NEEDS_LOSS = ("sophia", "hutchinson_estimator_diag_hessian")


def transformations():
    functions = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if name.startswith("_") or inspect.isclass(function) or not callable(function):
                continue
            try:
                returned = str(inspect.signature(function).return_annotation)
            except (TypeError, ValueError):
                continue
            is_function = inspect.isfunction(function) and name not in OTHERS
            has_no_annotation = is_function and "return" not in function.__annotations__
            if "GradientTransformation" in returned or has_no_annotation:
                functions.setdefault(name, function)
    return functions


ALL = transformations()


def make(name):
    if name in SPECIAL:
        return SPECIAL[name]()
    needed = {
        parameter.name: ARGUMENTS[parameter.name]
        for parameter in inspect.signature(ALL[name]).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }  # fmt: skip
    return ALL[name](**needed)


def test_optax_has_as_many_as_are_known():
    assert len(ALL) >= 110


@pytest.mark.parametrize("name", ALL)
def test_each_transformation_is_accepted_when_traced_or_refused_by_name(name):
    tx = make(name)
    state = jax.eval_shape(tx.init, PARAMS)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            refuse_unsupported("fsdp", state)
        return
    refuse_unsupported("fsdp", state)

    def update(grads, state, params):
        def loss_at(params):
            return loss_fn(params, BATCHES[0])

        extra = ExtraArgs(loss_at(params), grads, loss_at, lambda params, _=0: jax.grad(loss_at)(params))  # fmt: skip
        updates, _ = call_update(tx, grads, state, params, extra)
        check_updates("fsdp", params, updates)
        return updates

    with jax.numpy_rank_promotion("allow"):  # optax's own
        if name in MEASUREMENTS:
            with pytest.raises(ValueError, match="another structure than parameters"):
                jax.eval_shape(update, PARAMS, state, PARAMS)
            return
        jax.eval_shape(update, PARAMS, state, PARAMS)


@pytest.mark.parametrize(
    "name",
    tiered(
        [name for name in ALL if name not in (*REFUSED, *MEASUREMENTS, *CHANGING)],
        lambda name: name in ("novograd", "momo"),
    ),
)
def test_each_transformation_trains_as_on_one_device(name, mesh_of):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        params = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        batches = [batch.astype(np.float64) for batch in BATCHES]
        tx = make(name)
        opt = STRATEGIES["fsdp"](tx, mesh_of(data=4), loss_fn)
        state = opt.init(params)
        for batch in batches:
            state, _ = opt.step(state, batch)
        asks = ["value", "grad", "value_fn", "grad_fn"]
        asks = ["obj_fn"] if name in NEEDS_LOSS else [ask for ask in asks if accepts(tx, ask)]
        _, expected = train(tx, loss_fn, params, batches, asks=asks)
        assert relative_difference(jax.device_get(state.params), expected) < 1e-8


def test_an_optimizer_whose_state_changes_its_structure_is_refused_when_traced(mesh_of):
    (name,) = CHANGING
    opt = so.fsdp(make(name), mesh_of(data=4), loss_fn)
    state = opt.abstract_state(PARAMS)
    with pytest.raises(ValueError, match="returned a state of another structure"):
        opt.step.lower(state, BATCHES[0])


def accepts(tx, name):
    parameters = inspect.signature(tx.update).parameters
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return (has_any and name != "grad_fn") or name in parameters


def changed(change):
    return optax.chain(optax.sgd(0.1), optax.stateless(change))


WRONG = {
    "a mean over rows": (
        lambda updates, _: jax.tree.map(lambda x: x.mean(0), updates),
        [
            "w: the update has shape (8,), the parameter (8, 8)",
            "b: the update has shape (), the parameter (8,)",
        ],
    ),
    "a dim of one": (
        lambda updates, _: {**updates, "w": updates["w"][:1]},
        ["w: the update has shape (1, 8), the parameter (8, 8)"],
    ),
    "one more dim": (
        lambda updates, _: {**updates, "b": updates["b"][None]},
        ["b: the update has shape (1, 8), the parameter (8,)"],
    ),
    "a scalar": (
        lambda updates, _: {**updates, "b": jnp.float32(0.1)},
        ["b: the update has shape (), the parameter (8,)"],
    ),
    "complex": (
        lambda updates, _: {**updates, "b": updates["b"] + 0j},
        ["b: the update is complex, the parameter float32"],
    ),
    "without a leaf": (lambda updates, _: {"w": updates["w"]}, ["b: a parameter without update"]),
    "another leaf": (
        lambda updates, _: {**updates, "c": updates["b"]},
        ["c: an update without parameter"],
    ),
}
STRUCTURES = ("without a leaf", "another leaf")


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name == "zero1"))
@pytest.mark.parametrize("kind", WRONG)
def test_updates_that_are_not_of_the_parameters_are_refused_when_traced(kind, strategy, mesh_of):
    change, lines = WRONG[kind]
    opt = STRATEGIES[strategy](changed(change), mesh_of(data=4), loss_fn)
    state = opt.abstract_state(PARAMS)
    with pytest.raises(ValueError, match="update of the optimizer returned") as error:
        opt.step.lower(state, BATCHES[0])
    assert sorted(str(error.value).split("\n")[1:-1]) == sorted(f"  {line}" for line in lines)
    assert str(error.value).startswith(f"{opt.config.strategy}: update of the optimizer returned")


@pytest.mark.parametrize(
    "result", [lambda u, s: u, lambda u, s: (u, s, 1), lambda u, s: {"updates": u, "state": s}]
)
def test_an_update_that_returns_no_pair_is_refused_when_traced(result, mesh_of):
    tx = optax.GradientTransformation(
        lambda _: (), lambda updates, state, _: result(updates, state)
    )
    opt = so.ddp(tx, mesh_of(data=4), loss_fn)
    with pytest.raises(TypeError, match=r"^update of the optimizer must return \(updates, state\)"):
        opt.step.lower(opt.abstract_state(PARAMS), BATCHES[0])


@pytest.mark.parametrize("collective", [jax.lax.pmean, jax.lax.psum, jax.lax.all_gather])
def test_an_optimizer_that_sums_over_devices_is_told_that_gradients_are_summed(collective, mesh_of):
    opt = so.ddp(changed(lambda updates, _: collective(updates, "data")), mesh_of(data=4), loss_fn)
    with pytest.raises(NameError, match="axis name") as error:
        opt.step.lower(opt.abstract_state(PARAMS), BATCHES[0])
    assert error.value.__notes__ == [
        "Gradients are those of the global batch already: sum over no mesh axis."
    ]


def test_the_outer_optimizer_of_replicas_is_checked_too(mesh_of):
    inner = so.ddp(optax.sgd(0.1), mesh_of(replica=2, data=2), loss_fn)
    outer = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x.mean(), updates))
    opt = so.diloco(inner, sync_every=1, outer=outer)
    state = opt.abstract_state(PARAMS)
    with pytest.raises(ValueError, match="cannot be added to the parameters"):
        opt.step.lower(state, BATCHES[0])


def test_an_update_of_another_real_dtype_is_cast(mesh_of):
    tx = changed(lambda updates, _: jax.tree.map(lambda x: x.astype(jnp.float16), updates))
    opt = so.ddp(tx, mesh_of(data=4), loss_fn)
    state, _ = opt.step(opt.init(PARAMS), BATCHES[0])
    assert state.params["w"].dtype == jnp.float32


def test_the_documents_name_what_is_refused():
    assert {transformation.problem.split()[0] for transformation in UNSUPPORTED} == {
        "optax.lookahead",
        "optax.contrib.dpsgd",
    }
