"""Bad input is refused before anything compiles, and the message says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardopt as so

pytestmark = pytest.mark.fast

TX = optax.sgd(0.1)
FIX_OF_SHARDED = "Fix: use so.reducers.exact(jnp.bfloat16), ddp or zero1 (so.zero(stage=1)), or leave reducer out."
PARAMS = {"w": jnp.ones((8, 8))}
X = np.ones((16, 8), np.float32)


def square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr(
        jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled")
    )


def mesh(**sizes):
    return so.make_mesh(**sizes)


CONSTRUCTION = [
    (
        lambda: so.ddp("adam", mesh(), square),
        TypeError,
        (
            "ddp: tx must be an optax.GradientTransformation, got str.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (
        lambda: so.fsdp(optax.GradientTransformation, mesh(), square),
        TypeError,
        (
            "fsdp: tx must be an optax.GradientTransformation, got type.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (
        lambda: so.zero(TX, mesh(), square, stage=4),
        ValueError,
        (
            "zero: stage must be 1 or 2, got 4.\nFix: use so.ddp to shard nothing, stage=1 or 2 for"
            " more, or so.fsdp for parameters too."
        ),
    ),
    (
        lambda: so.zero(TX, mesh(), square, stage=3),
        ValueError,
        (
            "zero: stage must be 1 or 2, got 3.\nFix: use so.ddp to shard nothing, stage=1 or 2 for"
            " more, or so.fsdp for parameters too."
        ),
    ),
    (
        lambda: so.zero(TX, mesh(), square, stage=True),
        TypeError,
        "zero: stage must be 1 or 2, got True (bool).",
    ),
    (
        lambda: so.ddp(TX, mesh(data=4, pipeline=2), square),
        ValueError,
        (
            "ddp: mesh axis 'pipeline' (size 2) is above 1, but nothing is split over it.\n"
            "Fix: use so.hybrid, or make the mesh with pipeline=1."
        ),
    ),
    (
        lambda: so.ddp(TX, Mesh(np.array(jax.devices()), ("model",)), square),
        ValueError,
        (
            "ddp: the mesh has axes ('model',), none of them 'data'.\nFix: make the mesh with"
            " so.make_mesh(data=...), or say which axis it is: so.Axes(mesh, data=...)."
        ),
    ),
    (
        lambda: so.ddp(TX, Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), square),
        ValueError,
        (
            "ddp: mesh axis 'model' (size 2) is above 1, but nothing is split over it.\nFix: use"
            " the axes data, tensor, pipeline, context, expert, replica, or say what it is:"
            " so.Axes(mesh, data=('data', 'model')), or tensor='model'."
        ),
    ),
    (
        lambda: so.ddp(TX, 8, square),
        TypeError,
        "ddp: mesh must be a jax.sharding.Mesh, got int. Fix: use so.make_mesh().",
    ),
    (
        lambda: so.ddp(TX, mesh(), 3),
        TypeError,
        "ddp: loss_fn must be a function (params, batch) -> loss, or a BlockModel, got int.",
    ),
    (
        lambda: so.fsdp(TX, mesh(), square, gather_dtype=jnp.int8),
        ValueError,
        (
            "fsdp: gather_dtype must be a floating dtype, got int8.\n"
            "Fix: use jnp.bfloat16, or None to gather what is stored."
        ),
    ),
    (
        lambda: so.fsdp(TX, mesh(), square, reducer=so.reducers.int8()),
        ValueError,
        (
            "fsdp: int8(block_size=256) takes the mean of unsharded gradients, and this placement"
            f" shards them.\n{FIX_OF_SHARDED}"
        ),
    ),
    (
        lambda: so.zero(TX, mesh(), square, stage=2, reducer=so.reducers.top_k(density=0.1)),
        ValueError,
        (
            "zero: top_k(density=0.1) takes the mean of unsharded gradients, and this placement"
            f" shards them.\n{FIX_OF_SHARDED}"
        ),
    ),
    (
        lambda: so.fsdp(TX, mesh(), square, view="global", reducer=so.reducers.exact(jnp.bfloat16)),
        ValueError,
        (
            "fsdp: a reducer takes each device's own gradient, and with view='global' there is only"
            " that of the whole batch.\nFix: leave reducer out, or use view='per_device'."
        ),
    ),
    (
        lambda: so.ddp(TX, mesh(data=4, tensor=2), square, rules=[("w", P("data"))]),
        ValueError,
        (
            f"ddp: 1 rule cannot be used.\n  'w': {P('data')} names axis 'data'\n"
            "Fix: name only 'tensor' in rules, each once; the strategy places the other axes."
        ),
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTION)
def test_wrong_arguments_are_refused_at_construction(make, error, message, no_compile):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


FIRST_PARAMETERS = [
    (
        lambda: so.ddp(TX, mesh(data=4, tensor=2), square).specs(PARAMS),
        ValueError,
        (
            "ddp: mesh axis 'tensor' (size 2) is above 1, but nothing is split over it.\nFix: give"
            " rules=[(regex, PartitionSpec), ...] that name 'tensor', or make the mesh with"
            " tensor=1."
        ),
    ),
    (
        lambda: so.ddp(TX, mesh(), square, rules=[("kernel", P("tensor"))]).specs(PARAMS),
        ValueError,
        "ddp: 1 rule matched no parameter.\n  'kernel'\nFix: match a key path, such as: w.",
    ),
    (
        lambda: so.ddp(TX, mesh(), square, rules=[("kernel", "frozen")]).specs(PARAMS),
        ValueError,
        ("ddp: 1 rule matched no parameter.\n  'kernel'\nFix: match a key path, such as: w."),
    ),
    (
        lambda: so.ddp(TX, mesh(), square, rules=[("w", "frozen")]).specs(PARAMS),
        ValueError,
        (
            "ddp: nothing is trainable among 1 parameter leaf.\nFix: pass floating leaves that no"
            " rule freezes."
        ),
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), FIRST_PARAMETERS)
def test_wrong_parameters_are_refused_at_first_sight(make, error, message, no_compile):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


FIRST_BATCH = [
    (
        square,
        {},
        np.ones((12, 8), np.float32),
        ValueError,
        (
            "ddp: a global batch of 12 is not divisible by 8 devices along data = 8.\n"
            'Fix: use a batch of 8 or 16, or another mesh or micro_batches. Or view="global", where'
            " devices repeat work on rows."
        ),
    ),
    (
        square,
        {"micro_batches": 4},
        np.ones((48, 8), np.float32),
        ValueError,
        (
            "ddp: a global batch of 48 is not divisible by 8 devices along data x 4 micro-batches ="
            ' 32.\nFix: use a batch of 32 or 64, or another mesh or micro_batches. Or view="global",'
            " where devices repeat work on rows."
        ),
    ),
    (
        square,
        {},
        np.ones((0, 8), np.float32),
        ValueError,
        (
            "ddp: a global batch of 0 is not divisible by 8 devices along data = 8.\n"
            "Fix: use a batch of 8, or another mesh or micro_batches."
        ),
    ),
    (
        square,
        {"view": "per_device"},
        {"x": np.ones((16, 8)), "y": np.ones((8,)), "z": np.float32(1)},
        ValueError,
        (
            "ddp: batch leaves must agree on a number of rows, the global batch.\n  x: shape (16,"
            " 8); dim 0 has 16 rows\n  y: shape (8,); dim 0 has 8 rows\n  z: shape (); no"
            " rows\nFix: name the dim of rows of a leaf, or None if all rows share it:"
            ' batch_dims=[(regex, dim or None)]; or use view="global", which takes leaves of any'
            " shapes."
        ),
    ),
    (
        square,
        {},
        ["text"],
        TypeError,
        (
            "ddp: batch leaves must be arrays [global batch, ...], or numbers that all rows"
            " share.\n  batch: a list of str; make numbers of it, or leave it out"
        ),
    ),
    (
        lambda params, batch: (batch @ params["w"]).mean(1),
        {},
        X,
        ValueError,
        (
            "ddp: loss_fn must return a scalar, but its total has shape (16,).\n"
            "Fix: reduce it with .mean() over the examples, or return so.losses.Weighted(sum, weight)."
        ),
    ),
    (
        lambda params, batch: so.losses.Weighted(square(params, batch), batch[:, 0]),
        {},
        X,
        ValueError,
        (
            "ddp: loss_fn must return a scalar, but its weight has shape (16,).\n"
            "Fix: reduce it with .mean() over the examples, or return so.losses.Weighted(sum, weight)."
        ),
    ),
    (
        lambda params, batch: jnp.int32(1),
        {},
        X,
        TypeError,
        "ddp: loss_fn must return a real floating number, got dtype int32.",
    ),
    (
        lambda params, batch: (square(params, batch), {"loss": 1.0}),
        {},
        X,
        ValueError,
        (
            "ddp: metric names that shardopt itself reports: ['loss'].\nFix: rename it in the aux"
            " dict of loss_fn."
        ),
    ),
    (
        lambda params, batch: (square(params, batch), 1.0),
        {},
        X,
        TypeError,
        (
            "ddp: the aux value of loss_fn must be a dict of metrics, got float.\nFix: return"
            " (loss, {'name': value}); or so.losses.Weighted(total, weight) for a mean of total / weight."
        ),
    ),
    (
        lambda params, batch: (square(params, batch), {1: 0.5}),
        {},
        X,
        TypeError,
        (
            "ddp: aux values of loss_fn must be numbers, arrays, so.losses.Weighted, so.losses.Sum,"
            " so.losses.Max, so.losses.Min or so.losses.Updated.\n  1: float\n"
            "Fix: give each number a string of its own as its name."
        ),
    ),
    (
        lambda params, batch: (square(params, batch), {}, {}),
        {},
        X,
        TypeError,
        "ddp: loss_fn must return loss or (loss, aux), got a tuple of 3.",
    ),
]


@pytest.mark.parametrize(("loss_fn", "options", "batch", "error", "message"), FIRST_BATCH)
def test_wrong_batches_are_refused_before_anything_compiles(
    loss_fn, options, batch, error, message, request
):
    opt = so.ddp(TX, mesh(), loss_fn, **options)
    state = opt.init(PARAMS)
    request.getfixturevalue("no_compile")
    with pytest.raises(error) as caught:
        opt.step(state, batch)
    assert str(caught.value) == message


def test_check_wants_a_strategy():
    state = so.ddp(TX, mesh(), square).init(PARAMS)
    message = (
        "check: opt must be a so.ShardedOptimizer, got function.\n"
        "Fix: pass what so.ddp, so.zero, so.fsdp or so.hybrid returns."
    )
    with pytest.raises(TypeError) as caught:
        so.check(square, state, X)
    assert str(caught.value) == message


def kept_as(first, then):
    """An optimizer whose state begins as `first` makes it, and goes on as `then` does."""

    def update(grads, state, params=None):
        return (grads, jax.tree.map(then, grads))

    return optax.GradientTransformation(lambda params: jax.tree.map(first, params), update)


CHANGING = [
    (
        kept_as(lambda x: x.astype(jnp.bfloat16), lambda g: g),
        (
            "update of the optimizer changed its state's form, which must be the same at every"
            " step.\n  w: bfloat16[8, 8], then float32[8, 8]\nFix: let init make each leaf with the"
            " shape and dtype that update returns, or cast to it in update."
        ),
    ),
    (
        kept_as(lambda x: x[0], lambda g: g),
        (
            "update of the optimizer changed its state's form, which must be the same at every"
            " step.\n  w: float32[8], then float32[8, 8]\nFix: let init make each leaf with the"
            " shape and dtype that update returns, or cast to it in update."
        ),
    ),
    (
        kept_as(lambda x: (x, x), lambda g: g),
        (
            "update of the optimizer returned a state of another structure than it was given.\n"
            "Fix: let init make what update returns."
        ),
    ),
]


@pytest.mark.parametrize(("tx", "message"), CHANGING)
@pytest.mark.parametrize("strategy", ["fsdp", "local_sgd"])
def test_an_optimizer_whose_state_changes_its_form_is_refused(strategy, tx, message, request):
    inner = so.fsdp if strategy == "fsdp" else so.ddp
    opt = inner(tx, mesh() if strategy == "fsdp" else mesh(replica=2), square)
    opt = opt if strategy == "fsdp" else so.local_sgd(opt, sync_every=2)
    state = opt.init(PARAMS)
    request.getfixturevalue("no_compile")
    with pytest.raises(ValueError, match="update of the optimizer") as caught:
        opt.step(state, X)
    assert str(caught.value) == f"{strategy}: {message}"


LOOKAHEAD = optax.lookahead(TX, sync_period=5, slow_step_size=0.5)
WITH_LOOKAHEAD = {
    "alone": ("ddp", lambda: so.ddp(LOOKAHEAD, mesh(), square)),
    "in a chain": (
        "fsdp",
        lambda: so.fsdp(optax.chain(optax.clip(1.0), LOOKAHEAD), mesh(), square),
    ),
    "of some leaves": (
        "zero",
        lambda: so.zero(optax.masked(LOOKAHEAD, {"w": True}), mesh(), square, stage=1),
    ),
    "of replicas": (
        "diloco",
        lambda: so.diloco(so.ddp(TX, mesh(replica=2), square), sync_every=2, outer=LOOKAHEAD),
    ),
}


@pytest.mark.parametrize("name", WITH_LOOKAHEAD)
def test_lookahead_is_refused_by_the_type_of_its_state(name, no_compile):
    strategy, make = WITH_LOOKAHEAD[name]
    message = (
        f"{strategy}: optax.lookahead steps two copies of the parameters, and there is but one"
        " here.\nFix: use so.local_sgd or so.diloco, whose outer step is that of lookahead."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make().specs(PARAMS)
