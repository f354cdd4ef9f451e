"""Values of the host in a train state and among parameters are placed, or refused with the remedy.
The counter of steps does not wrap.
"""

import functools
import itertools
from collections import OrderedDict

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.step import _host_values
from shardopt.step._step_counter import LAST_STEP

pytestmark = pytest.mark.fast

FIX = "Fix: so.replace(state, params=..., hyperparams=..., step=...) places values in a state."
BATCH = np.ones((8, 16), np.float32)


class Tensor:
    """A tensor as torch has it, which is not installed here."""

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape
        self.dtype = "torch.float32"

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.values


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def params():
    return {"w": np.linspace(0, 1, 64, dtype=np.float32).reshape(16, 4)}


KINDS = {
    "ddp": lambda tx, mesh_of: so.ddp(tx, mesh_of(data=4), loss_fn),
    "fsdp": lambda tx, mesh_of: so.fsdp(tx, mesh_of(data=4), loss_fn, min_shard_elements=1),
    "local_sgd": lambda tx, mesh_of: so.local_sgd(
        so.ddp(tx, mesh_of(replica=2, data=2), loss_fn), sync_every=2
    ),
}


def strategy(mesh_of, kind="fsdp"):
    return KINDS[kind](optax.inject_hyperparams(optax.adam)(learning_rate=0.1), mesh_of)


@pytest.fixture(scope="module")
def strategy_of(mesh_of):
    """Return a function from a kind to one strategy, so that its programs are compiled once."""
    return functools.cache(functools.partial(strategy, mesh_of))


def with_rate(state, value):
    state.opt_state.hyperparams["learning_rate"] = value
    return state


CHANGES = {
    "a rate": (lambda state: with_rate(state, 0.01), {"hyperparams": {"learning_rate": 0.01}}),
    "an integer rate": (lambda state: with_rate(state, 1), {"hyperparams": {"learning_rate": 1}}),
    "a rate of numpy": (
        lambda state: with_rate(state, np.float64(0.01)),
        {"hyperparams": {"learning_rate": 0.01}},
    ),
    "a rate of jax": (
        lambda state: with_rate(state, jnp.asarray(0.01)),
        {"hyperparams": {"learning_rate": 0.01}},
    ),
    "a rate of torch": (
        lambda state: with_rate(state, Tensor(0.01)),
        {"hyperparams": {"learning_rate": 0.01}},
    ),
    "a step": (lambda state: state._replace(step=7), {"step": 7}),
    "a step of numpy": (lambda state: state._replace(step=np.int64(7)), {"step": 7}),
    "a step of jax": (lambda state: state._replace(step=jnp.asarray(7)), {"step": 7}),
    "parameters": (
        lambda state: state._replace(params={"w": np.full((16, 4), 0.5)}),
        {"params": {"w": np.full((16, 4), 0.5, np.float32)}},
    ),
    "parameters of torch": (
        lambda state: state._replace(params={"w": Tensor(np.full((16, 4), 0.5))}),
        {"params": {"w": np.full((16, 4), 0.5, np.float32)}},
    ),
    "integers as parameters": (
        lambda state: state._replace(params={"w": np.full((16, 4), 2)}),
        {"params": {"w": np.full((16, 4), 2.0, np.float32)}},
    ),
    "all of it": (jax.device_get, {}),
    "a pickled state": (lambda state: cloudpickle.loads(cloudpickle.dumps(state)), {}),
}


COMPILED_FOR = (
    "a rate",
    "a step of jax",
    "parameters of torch",
    "integers as parameters",
    "all of it",
)
"""A value of each kind, for a step that has not run: it compiles for the values that it gets first."""


@pytest.mark.parametrize(
    ("change", "steps_before"),
    [*itertools.product(CHANGES, [2]), *itertools.product(COMPILED_FOR, [0])],
)
def test_a_value_of_the_host_is_placed_as_replace_places_it(
    mesh_of, strategy_of, change, steps_before
):
    put_in, replaced = CHANGES[change]
    placing = strategy_of("fsdp") if steps_before else strategy(mesh_of)
    results = []
    for opt, edit in (
        (placing, put_in),
        (strategy_of("fsdp"), lambda state: so.replace(state, **replaced)),
    ):
        state = opt.init(params())
        for _ in range(steps_before):
            state, _ = opt.step(state, BATCH)
        state = edit(state)
        for _ in range(2):
            state, metrics = opt.step(state, BATCH)
        results.append((state, metrics))
    (placed, metrics), (expected, expected_metrics) = results
    jax.tree.map(np.testing.assert_array_equal, metrics, expected_metrics)
    jax.tree.map(np.testing.assert_array_equal, placed, expected)
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, state) for state in (placed, expected)]
    assert shardings[0] == shardings[1]


@pytest.mark.parametrize("kind", ["ddp", "local_sgd"])
def test_other_strategies_place_a_step_too(strategy_of, kind):
    opt = strategy_of(kind)
    state, _ = opt.step(opt.init(params()), BATCH)
    state, _ = opt.step(state._replace(step=4), BATCH)
    assert int(state.step) == 5


@pytest.mark.parametrize("function", ["evaluate", "synchronize", "with_norms", "fit"])
def test_other_functions_place_values_too(strategy_of, function):
    opt = strategy_of("fsdp")
    state = jax.device_get(opt.init(params()))._replace(step=3)
    calls = {
        "evaluate": lambda: opt.evaluate(state, BATCH),
        "synchronize": lambda: opt.synchronize(state),
        "with_norms": lambda: opt.step.with_norms(with_rate(state, 0.01), BATCH),
        "fit": lambda: so.fit(
            opt, with_rate(state, 0.01), [BATCH] * 9, num_steps=5, progress=False
        ),
    }
    result = calls[function]()
    if function == "fit":
        assert (result.step, len(result.state.params["w"].sharding.device_set)) == (5, 4)


def refusal(opt, state, kind):
    with pytest.raises(kind) as refused:
        opt.step(state, BATCH)
    return str(refused.value)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("edit", "kind", "line"),
    [
        (
            lambda state: with_rate(state, "0.1"),
            TypeError,
            "opt_state/hyperparams/learning_rate: str '0.1'",
        ),
        (lambda state: state._replace(step=object), TypeError, "step: type <class 'object'>"),
        (
            lambda state: state._replace(step=2**31),
            ValueError,
            "step: int64[] 2147483648, not int32[]",
        ),
        (lambda state: state._replace(step=0.5), ValueError, "step: float64[] 0.5, not int32[]"),
        (
            lambda state: state._replace(params={"w": np.ones((4, 16))}),
            ValueError,
            "params/w: shape (4, 16), not shape (16, 4)",
        ),
        (
            lambda state: state._replace(params={"v": state.params["w"]}),
            ValueError,
            "params/v: shape (16, 4), not nothing",
        ),
        (
            lambda state: state._replace(params={"w": np.ones((16, 4)).tolist()}),
            ValueError,
            "params/w: nothing, not shape (16, 4)",
        ),
        (
            lambda state: state._replace(params=OrderedDict(state.params)),
            ValueError,
            "params: PyTreeDef(CustomNode(OrderedDict",
        ),
        (
            lambda state: with_rate(state, [0.1, 0.2]),
            ValueError,
            "the optimizer state is not that of this optimizer: its structure differs.",
        ),
        (
            lambda state: with_rate(state, None),
            ValueError,
            "the optimizer state is not that of this optimizer: its structure differs.",
        ),
        (
            lambda state: with_rate(state, True),
            ValueError,
            "opt_state/hyperparams/learning_rate: bool[] True, not float32[]",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(
    mesh_of, strategy_of, edit, kind, line, steps_before
):
    opt = strategy_of("fsdp") if steps_before else strategy(mesh_of)
    state = opt.init(params())
    for _ in range(steps_before):
        state, _ = opt.step(state, BATCH)
    text = refusal(opt, edit(state), kind)
    assert line in text
    blames_params = line.startswith("params")
    assert ("the parameters do not fit the optimizer state" in text) == blames_params
    assert "structure differs" in line or blames_params or text.endswith(FIX)


def test_an_array_of_another_mesh_is_refused_after_the_first_step_too(strategy_of):
    opt = strategy_of("fsdp")
    state, _ = opt.step(opt.init(params()), BATCH)
    elsewhere = jax.device_put(state.params, jax.devices()[5])
    text = refusal(opt, state._replace(params=elsewhere), ValueError)
    assert text.startswith("fsdp: the state does not live where this strategy keeps it (1 leaf).")
    assert text.endswith(
        "Fix: move a state between strategies and meshes with so.save and so.restore."
    )


def test_an_error_of_the_loss_stays_as_it_is(mesh_of):
    def broken(params, batch):
        raise TypeError("an error of mine")

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), broken, view="global")
    with pytest.raises(TypeError, match="an error of mine"):
        opt.step(opt.init(params()), BATCH)


def test_a_step_checks_no_leaf_that_a_step_returned(strategy_of, monkeypatch):
    opt = strategy_of("fsdp")
    state, _ = opt.step(opt.init(params()), BATCH)

    def refuse(*_):
        raise AssertionError("a step looks for values of the host")

    monkeypatch.setattr(_host_values, "_placed", refuse)
    monkeypatch.setattr(_host_values, "check_placement", refuse)
    for _ in range(3):
        state, _ = opt.step(state, BATCH)


@pytest.mark.parametrize("start", ["init", "deferred", "replace"])
def test_torch_tensors_are_parameters(strategy_of, start):
    opt = strategy_of("fsdp")
    tensors = {"w": Tensor(params()["w"])}
    if start == "deferred":
        deferred = so.training.DeferredInit(tensors)
        state = so.fit(opt, deferred, [], num_steps=0, progress=False).state
    elif start == "replace":
        state = so.replace(opt.init({"w": np.zeros((16, 4), np.float32)}), params=tensors)
    else:
        state = opt.init(tensors)
    np.testing.assert_array_equal(state.params["w"], params()["w"])
    assert len(state.params["w"].sharding.device_set) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_counter_is_refused_before_it_wraps(strategy_of, kind):
    opt = strategy_of(kind)
    state = so.replace(opt.init(params()), step=LAST_STEP - 2)
    for _ in range(2):
        state, _ = opt.step(state, BATCH)
    assert int(state.step) == LAST_STEP
    assert refusal(opt, state, ValueError) == (
        f"{kind}: the step counter of the state is at 2,147,483,647, the last int32, and would become"
        " negative.\nFix: so.replace(state, step=0) counts from 0 again. The random keys of steps then"
        " come again too, and the counters of the optimizer stay."
    )
    opt.evaluate(state, BATCH)
    state, _ = opt.step(so.replace(state, step=0), BATCH)
    assert int(state.step) == 1


@pytest.mark.parametrize("source", ["a number", "numpy", "a pickled state", "norms", "restored"])
def test_a_counter_at_its_end_is_refused_wherever_the_state_comes_from(
    strategy_of, tmp_path, source
):
    opt = strategy_of("fsdp")
    state = opt.init(params())
    if source == "restored":
        so.save(
            tmp_path,
            state._replace(step=jax.device_put(np.int32(LAST_STEP), state.step.sharding)),
            step=1,
        )
        state = so.restore(tmp_path, opt)
    else:
        state, _ = opt.step(state, BATCH)
        number = {"a number": LAST_STEP, "numpy": np.int64(LAST_STEP)}
        state = state._replace(step=number.get(source, np.int32(LAST_STEP)))
    if source == "a pickled state":
        state = cloudpickle.loads(cloudpickle.dumps(state))
    with pytest.raises(ValueError, match="the step counter of the state is at 2,147,483,647"):
        (opt.step.with_norms if source == "norms" else opt.step)(state, BATCH)


@pytest.mark.parametrize("step", [LAST_STEP, 2**31, 2**40])
def test_replace_refuses_a_step_at_the_end(strategy_of, step):
    state = strategy_of("fsdp").init(params())
    with pytest.raises(ValueError, match=f"^replace: step must be below 2,147,483,647.*{step:,}"):
        so.replace(state, step=step)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.MultiSteps(optax.adam(0.1), 2),
        so.optimizers.soap(0.1),
        optax.chain(optax.sgd(0.1), so.transforms.average_params(0.9)),
        so.transforms.skip_anomalies(optax.sgd(0.1)),
    ],
    ids=["adam", "MultiSteps", "soap", "average_params", "skip_anomalies"],
)
def test_counters_of_an_optimizer_stay_at_their_end(mesh_of, tx):
    tx = getattr(tx, "gradient_transformation", lambda: tx)()
    opt = so.ddp(tx, mesh_of(data=2), loss_fn)
    state = opt.init(params())

    def at_end(leaf):
        is_counter = leaf.dtype == jnp.int32 and leaf.ndim == 0
        return np.full((), LAST_STEP, np.int32) if is_counter else leaf

    state = state._replace(opt_state=jax.tree.map(at_end, state.opt_state))
    for _ in range(2):
        state, _ = opt.step(state, BATCH)
    counters = [
        int(leaf)
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.dtype == jnp.int32 and leaf.ndim == 0
    ]
    assert min(counters, default=0) >= 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
