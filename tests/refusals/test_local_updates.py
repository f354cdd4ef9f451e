"""Bad input is refused at construction, or before anything compiles: whole messages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so

pytestmark = pytest.mark.fast

MESH = {"replica": 2, "data": 2, "pipeline": 1, "tensor": 1}


def message_of(call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


COUNTS = [
    ({"sync_every": 0}, "sync_every must be at least 1, got 0."),
    ({"sync_every": 6, "fragments": 0}, "fragments must be at least 1, got 0."),
    ({"sync_every": 6, "delay": -1}, "delay must be at least 0, got -1."),
    (
        {"sync_every": 6, "fragments": 4},
        "sync_every=6 is not divisible by fragments=4, remainder 2.\nFix: use sync_every=4 or 8.",
    ),
    (
        {"sync_every": 2, "fragments": 5},
        "sync_every=2 is not divisible by fragments=5, remainder 2.\nFix: use sync_every=5.",
    ),
    (
        {"sync_every": 6, "fragments": 2, "delay": 3},
        (
            "delay=3 must be below sync_every / fragments = 3: the next fragment is sent then.\n"
            "Fix: use a delay of at most 2, or sync less often."
        ),
    ),
    ({"mix": 1.5}, "mix must be between 0 and 1, got 1.5."),
    ({"mix": -0.1}, "mix must be between 0 and 1, got -0.1."),
    ({"mix": float("nan")}, "mix must be between 0 and 1, got nan."),
]
KINDS = [
    ({"sync_every": 2.0}, "sync_every must be an integer, got 2.0 (float)."),
    ({"sync_every": True}, "sync_every must be an integer, got True (bool)."),
    ({"fragments": "2"}, "fragments must be an integer, got '2' (str)."),
    ({"delay": None}, "delay must be an integer, got None (NoneType)."),
    ({"mix": "half"}, "mix must be a number, got 'half' (str)."),
    (
        {"outer": optax.sgd},
        (
            "tx must be an optax.GradientTransformation, got function.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (
        {"reducer": so.reducers.sign},
        "reducer must be a Reducer, got sign.\nFix: pass one such as so.reducers.int8(), called.",
    ),
]


@pytest.mark.parametrize(("how", "message"), COUNTS, ids=str)
def test_numbers_out_of_range_are_refused(how, message, strategy_of):
    assert message_of(lambda: so.diloco(strategy_of("ddp"), **how)) == f"diloco: {message}"


@pytest.mark.parametrize(("how", "message"), KINDS, ids=[next(iter(how)) for how, _ in KINDS])
def test_arguments_of_the_wrong_kind_are_refused(how, message, strategy_of):
    assert (
        message_of(lambda: so.diloco(strategy_of("ddp"), **how), TypeError) == f"diloco: {message}"
    )


def test_local_sgd_refuses_the_same(strategy_of):
    for how, message in (
        ({"sync_every": 0}, "sync_every must be at least 1, got 0."),
        ({"sync_every": 2, "warmup_steps": -1}, "warmup_steps must be at least 0, got -1."),
    ):
        assert (
            message_of(lambda how=how: so.local_sgd(strategy_of("ddp"), **how))
            == f"local_sgd: {message}"
        )


@pytest.mark.parametrize("sizes", [{"data": 4}, {"replica": 1, "data": 4}], ids=str)
def test_a_mesh_without_replicas_is_refused(sizes, mesh_of, model_of):
    inner = so.ddp(optax.sgd(0.1), mesh_of(**sizes), model_of())
    axes = dict(inner.mesh.shape)
    message = (
        f"local_sgd: the mesh of the strategy has axes {axes}, and no replica axis above 1.\n"
        "Fix: make the mesh with so.make_mesh(replica=...)."
    )
    assert message_of(lambda: so.local_sgd(inner, sync_every=2)) == message


def test_an_argument_that_is_no_synchronous_strategy_is_refused(strategy_of):
    fix = "Fix: pass so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...)."
    twice = so.local_sgd(strategy_of("ddp"), sync_every=2)
    for strategy, name in (
        (twice, "local_sgd"),
        (optax.sgd(0.1), "GradientTransformationExtraArgs"),
        (None, "NoneType"),
    ):
        message = message_of(lambda strategy=strategy: so.diloco(strategy), TypeError)
        assert message == f"diloco: strategy must be a synchronous one, got {name}.\n{fix}"


def test_a_warm_up_with_a_reducer_inside_is_refused(strategy_of):
    inner = strategy_of("ddp", options={"reducer": so.reducers.int8()})
    message = (
        "local_sgd: warm-up steps average gradients over replicas exactly, which a strategy with a"
        " reducer of its own does not.\nFix: use warmup_steps=0, or a strategy without a reducer."
    )
    assert message_of(lambda: so.local_sgd(inner, sync_every=2, warmup_steps=1)) == message
    so.local_sgd(inner, sync_every=2)


def test_steps_refuse_what_strategies_refuse_in_their_own_name(
    strategy_of, new_params, new_batches
):
    inner = strategy_of("ddp")
    opt = so.diloco(inner, sync_every=2)
    (batch,) = new_batches(1)
    state = opt.init(new_params())
    message = message_of(lambda: opt.step(state, jax.tree.map(lambda x: x[:6], batch)))
    assert message.startswith(
        "diloco: a global batch of 6 is not divisible by 4 devices along replica x data = 4."
    )
    message = message_of(lambda: opt.step(inner.init(new_params()), batch))
    assert message.startswith(
        "diloco: the optimizer state is not that of this optimizer: its structure differs.\nFix: "
    )
    opt.step(state, batch)
    assert message_of(lambda: opt.step(state, batch)).startswith(
        "diloco: this state was given to step already"
    )
    fresh = opt.init(new_params())
    assert (
        message_of(lambda: jax.jit(opt.step)(fresh, batch), TypeError)
        == "diloco: which program a step runs depends on state.step, which is traced here.\n"
        "Fix: call step outside jit: it is compiled already."
    )
    fresh = fresh._replace(step=np.int32(0))
    assert int(opt.step(fresh, batch)[0].step) == 1


def test_a_line_search_needs_the_loss_elsewhere(strategy_of, new_params, new_batches):
    opt = so.local_sgd(strategy_of("ddp", optax.lbfgs()), sync_every=2)
    state = opt.init(jax.tree.map(jnp.copy, new_params()))
    message = (
        "local_sgd: this optimizer asks for the loss at other parameters, as line searches do,"
        " which replicas that train apart cannot.\nFix: use an optimizer without value_fn."
    )
    assert message_of(lambda: opt.step(state, new_batches(1)[0])) == message
