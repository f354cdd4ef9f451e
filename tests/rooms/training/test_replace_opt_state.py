"""States from elsewhere: adopted ones go on as they would have there.

What does not fit is listed; misuses get a sentence.
"""

import re

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState
from support.tiers import tiered

import shardopt as so

RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.normal(size=(8, 4)).astype(np.float32), "y": RNG.normal(size=8).astype(np.float32)}
    for _ in range(4)
]
PARAMS = {"w": RNG.normal(size=4).astype(np.float32), "b": np.zeros((), np.float32)}


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(0.1, 0.01, 4)))


def flax_after(count):
    state = FlaxState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, PARAMS), tx=TX)
    for batch in BATCHES[:count]:
        state = state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))
    return state


def continued(opt, source):
    """The state of another program, with its optimizer state and step."""
    return so.replace(opt.init(source.params), opt_state=source.opt_state, step=int(source.step))


def nested(tree):
    """As an orbax checkpoint gives it back without a target: dicts and lists."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, dict):
        return {name: nested(value) for name, value in tree.items()}
    return [nested(child) for child in tree] if isinstance(tree, tuple | list) else tree


@pytest.mark.parametrize(
    "form", tiered(["flax", "trees", "nested", "shardopt"], lambda form: form == "flax")
)
def test_it_goes_on_as_it_would_have(form):
    """Two steps of flax are adopted, and two more follow. The parameters equal four steps of flax,
    whose own state stays usable.
    """
    opt = so.fsdp(TX, so.make_mesh(), loss_fn, min_shard_elements=1)
    source = flax_after(2)
    if form == "flax":
        state = continued(opt, source)
    elif form == "trees":
        frozen_params = flax.core.freeze(source.params)
        state = so.replace(opt.init(frozen_params), opt_state=source.opt_state, step=2)
        assert isinstance(state.params, flax.core.FrozenDict)
    elif form == "nested":
        opt_state = jax.tree.map(np.asarray, nested(source.opt_state))
        state = so.replace(opt.init(source.params), opt_state=opt_state, step=2)
    else:
        state = continued(opt, continued(so.ddp(TX, so.make_mesh(), loss_fn), source))
    if form == "trees":  # the optimizer state has dicts, as flax kept it
        state = so.replace(opt.init(source.params), opt_state=source.opt_state, step=2)
    assert int(state.step) == 2
    for batch in BATCHES[2:]:
        state, _ = opt.step(state, batch)
    wanted = flax_after(4)
    for name in PARAMS:
        np.testing.assert_allclose(state.params[name], wanted.params[name], rtol=1e-5)
        np.testing.assert_array_equal(source.params[name], flax_after(2).params[name])


def test_without_an_optimizer_state_it_is_new():
    opt = so.local_sgd(so.ddp(TX, so.make_mesh(replica=2, data=4), loss_fn), sync_every=2)
    state = so.replace(opt.init(PARAMS), step=5)
    assert int(state.step) == 5
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
    message = (
        "replace: the replicas of local_sgd and diloco keep an optimizer state each, and one was passed.\n"
        "Fix: leave opt_state out: each replica goes on with its own."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        so.replace(state, opt_state=TX.init(PARAMS))


def test_an_optimizer_state_is_replaced_next_to_the_state_of_a_reducer():
    opt = so.ddp(
        optax.adam(0.1),
        so.make_mesh(),
        loss_fn,
        reducer=so.reducers.error_feedback(so.reducers.int8()),
    )
    adam_state = optax.adam(0.1).update(PARAMS, optax.adam(0.1).init(PARAMS), PARAMS)[1]
    state = so.replace(opt.init(PARAMS), opt_state=adam_state, step=1)
    np.testing.assert_array_equal(state.opt_state.optimizer[0].mu["w"], adam_state[0].mu["w"])
    opt.step(state, BATCHES[0])


def test_what_does_not_fit_is_listed():
    opt = so.ddp(optax.adam(0.1), so.make_mesh(), loss_fn, rules=[("b", "frozen")])
    other = optax.adam(0.1).init({"w": jnp.zeros((5,)), "b": jnp.zeros(())})
    message = (
        "replace: the optimizer state is not that of opt.wrapped over the trained parameters: 0"
        " leaves missing, 2 left over, 2 different.\n  0/mu/w: float32[5], float32[4] wanted\n "
        " 0/nu/w: float32[5], float32[4] wanted\n  0/mu/b: float32[], left over\n  0/nu/b:"
        " float32[], left over\nFix: build opt with the optax chain that made it, or leave"
        " opt_state out to start a new one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        so.replace(opt.init(PARAMS), opt_state=other)


NO_TRANSFORMATION = (
    "ddp: so.ddp returns no optax transformation: its step takes a batch, not gradients.\nFix: put"
    " what is of optax inside, so.ddp(optax.chain(clip, tx), ...), and train with state, metrics ="
    " opt.step(state, batch), which computes gradients itself; flax's TrainState, made with"
    " tx=opt.wrapped, becomes one of these by so.replace(opt.init(state.params),"
    " opt_state=state.opt_state, step=int(state.step))."
)


def first_update(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def first_nnx_update(opt):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, opt, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))


UNDER_A_TRACE = (
    "ddp: init was called under a trace, where arrays have no values.\nFix: call init outside of"
    " jax.jit; inside of another optimizer put the optax optimizer itself, opt.wrapped."
)
MISUSES = {
    "flax.create": (
        lambda opt: FlaxState.create(apply_fn=None, params=PARAMS, tx=opt).apply_gradients(
            grads=PARAMS
        ),
        NO_TRANSFORMATION,
    ),
    "nnx.Optimizer": (first_nnx_update, NO_TRANSFORMATION),
    "chain": (lambda opt: first_update(optax.chain(optax.clip(1.0), opt)), NO_TRANSFORMATION),
    "apply_if_finite": (lambda opt: first_update(optax.apply_if_finite(opt, 3)), NO_TRANSFORMATION),
    "MultiSteps": (lambda opt: first_update(optax.MultiSteps(opt, 4)), NO_TRANSFORMATION),
    "multi_transform": (
        lambda opt: first_update(optax.multi_transform({"a": opt}, {"w": "a", "b": "a"})),
        NO_TRANSFORMATION,
    ),
    "jit": (lambda opt: jax.jit(opt.init)(PARAMS), UNDER_A_TRACE),
    "jit of nothing": (lambda opt: jax.jit(lambda: opt.init(PARAMS))(), UNDER_A_TRACE),
    "jit of a key": (
        lambda opt: jax.jit(lambda key: opt.init(lambda _: PARAMS, key))(jax.random.key(0)),
        UNDER_A_TRACE,
    ),
    "update": (lambda opt: opt.update(PARAMS, opt.init(PARAMS), PARAMS), NO_TRANSFORMATION),
    "sharded inside of a chain": (
        lambda opt: so.fsdp(optax.chain(optax.clip(1.0), opt), so.make_mesh(), loss_fn).init(
            PARAMS
        ),
        UNDER_A_TRACE,
    ),
    "sharded twice": (
        lambda opt: so.fsdp(opt, so.make_mesh(), loss_fn),
        (
            "fsdp: tx must be an optax.GradientTransformation, but it is sharded already, by"
            " so.ddp.\nFix: pass the optax optimizer itself, opt.wrapped."
        ),
    ),
    "flax's state as parameters": (
        lambda opt: opt.init(flax_after(0)),
        (
            "ddp: parameters were expected, got a TrainState.\nFix: pass its .params;"
            " so.replace(state, opt_state=..., step=...) sets what else it has."
        ),
    ),
    "flax's state in a step": (
        lambda opt: opt.step(flax_after(0), BATCHES[0]),
        (
            "ddp: the state must be the TrainState that init or step returned, got TrainState.\n"
            "Fix: this one is flax's: so.replace(opt.init(state.params), opt_state=state.opt_state,"
            " step=int(state.step)) makes one of it."
        ),
    ),
    "flax's state in replace": (
        lambda opt: so.replace(flax_after(0), step=1),
        (
            "replace: state must be a TrainState, got TrainState.\n"
            "Fix: pass the state that opt.init or opt.step returned."
        ),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuses_get_a_sentence(name):
    misuse, message = MISUSES[name]
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        misuse(so.ddp(TX, so.make_mesh(), loss_fn))
