"""A loss of one row runs on each device's rows, without a proof, and equals a loop over the rows."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference
from support.table import STRATEGIES

import shardopt as so

ROWS = 16
DIM = 6


def make_params():
    draw = np.random.default_rng(0)
    return {
        "w": (draw.normal(size=(DIM, 16)) * 0.4).astype(np.float32),
        "out": (draw.normal(size=(16, DIM)) * 0.4).astype(np.float32),
    }


def make_batches(count=3, rows=ROWS):
    draw = np.random.default_rng(1)
    scale = np.linspace(0.2, 2, rows)[:, None]
    return [
        {
            "x": (scale * draw.normal(size=(rows, DIM))).astype(np.float32),
            "y": draw.normal(size=(rows, DIM)).astype(np.float32),
            "weight": np.maximum(0, draw.uniform(-0.5, 2, rows)).astype(np.float32),
        }
        for _ in range(count)
    ]


def dropout_loss(params, row, rng=None):
    x = row["x"]
    if rng is not None:
        x = jnp.where(jax.random.bernoulli(rng, 0.7, x.shape), x / 0.7, 0)
    error = ((jnp.tanh(x @ params["w"]) @ params["out"] - row["y"]) ** 2).mean()
    metrics = {
        "error": error,
        "weighted": so.losses.Weighted(error * row["weight"], row["weight"]),
        "counted": so.losses.Sum(row["weight"] > 0),
        "largest": so.losses.Max(error),
        "smallest": so.losses.Min(error),
    }
    return so.losses.Weighted(error * row["weight"], row["weight"]), metrics


@jax.jit
def loop_over_rows(params, batch, key):
    """Return the loss and metrics of a batch, row by row."""

    def of_row(number_and_row):
        number, row = number_and_row
        row_key = None if key is None else jax.random.fold_in(key, number)
        loss, metrics = dropout_loss(params, row, row_key)
        return loss.total, loss.weight, metrics["error"]

    numbers = jnp.arange(len(batch["x"]))
    # a loop, and not one operation after the other: that would be a large program
    totals, weights, errors = jax.lax.map(of_row, (numbers, batch))
    loss = totals.sum() / weights.sum()
    metrics = {
        "error": errors.mean(),
        "weighted": loss,
        "counted": (weights > 0).sum(),
        "largest": errors.max(),
        "smallest": errors.min(),
    }
    return loss, metrics


TX = optax.sgd(0.1, momentum=0.9)


@functools.cache
def trained_by_loop(key_bytes):
    """Train with the loss of `loop_over_rows`; return the metrics of each step and the parameters.

    `key_bytes` are those of the key of the state.
    """
    rng = jax.random.wrap_key_data(np.frombuffer(key_bytes, np.uint32))

    @jax.jit
    def step(params, opt_state, batch, number):
        differentiate = jax.value_and_grad(loop_over_rows, has_aux=True)
        key = jax.random.fold_in(rng, number)
        (loss, metrics), grads = differentiate(params, batch, key)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics | {"loss": loss}

    params = make_params()
    opt_state = TX.init(params)
    history = []
    for number, batch in enumerate(make_batches()):
        params, opt_state, metrics = step(params, opt_state, batch, number)
        history.append(metrics)
    return history, params


@pytest.fixture(autouse=True)
def every_warning_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


STRATEGY_ROWS = {
    **{name: (make, {}) for name, make in STRATEGIES.items() if name != "zero2"},
    "zero2, micro_batches": (STRATEGIES["zero2"], {"micro_batches": 2}),
    "global": (so.ddp, {"view": "global"}),
    "global_micro_batches": (so.ddp, {"view": "global", "micro_batches": 2}),
}


@pytest.mark.parametrize("name", STRATEGY_ROWS)
def test_every_strategy_equals_the_loop_over_rows_with_the_same_draws(name, mesh_of):
    make, options = STRATEGY_ROWS[name]
    opt = make(TX, mesh_of(replica=2, data=4), so.per_row(dropout_loss), **options)
    state = opt.init(make_params(), jax.random.key(3))
    history, final = trained_by_loop(jax.device_get(state.rng).tobytes())
    for batch, expected in zip(make_batches(), history, strict=True):
        state, metrics = opt.step(state, batch)
        for metric, value in expected.items():
            np.testing.assert_allclose(metrics[metric], value, rtol=2e-5, err_msg=metric)
    assert relative_difference(state.params, final) <= 2e-5


@pytest.mark.parametrize("rows", [1, 19])
def test_evaluation_of_any_number_of_rows_equals_the_loop(rows, mesh_of):
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=8), so.per_row(dropout_loss), min_shard_elements=8)
    (batch,) = make_batches(1, rows)
    loss, metrics = loop_over_rows(make_params(), batch, None)
    evaluate = so.training.evaluation(opt, [batch], prefix="")
    evaluated = evaluate(opt.init(make_params(), jax.random.key(0)))
    for metric, value in (metrics | {"loss": loss}).items():
        np.testing.assert_allclose(evaluated[metric], value, rtol=2e-5, err_msg=metric)


@pytest.mark.parametrize("make", [so.local_sgd, so.diloco])
def test_replicas_that_train_apart_draw_for_the_rows_of_the_global_batch(make, mesh_of):
    draws_of_steps = []

    @so.per_row
    def loss(params, row, rng=None):
        number = jnp.zeros(()) if rng is None else jax.random.uniform(rng)
        return (params["w"].sum() * row["x"].mean()) ** 2, {"draw": number}

    inner = so.ddp(optax.sgd(1e-3), mesh_of(replica=2, data=4), loss)
    opt = make(inner, sync_every=2)
    state = opt.init(make_params(), jax.random.key(3))
    rng = jax.random.wrap_key_data(jax.device_get(state.rng))
    for batch in make_batches():
        state, metrics = opt.step(state, batch)
        draws_of_steps.append(float(metrics["draw"]))

    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def draw(step, row):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(rng, step), row))

    draws = jax.jit(draw)(np.arange(3), np.arange(ROWS))
    np.testing.assert_allclose(draws_of_steps, np.mean(draws, axis=1), rtol=1e-6)


def test_workers_of_a_parameter_server_train_on_it_as_ddp(mesh_of):
    loss = so.per_row(lambda params, row: ((row["x"] @ params["w"]) ** 2).mean())
    tx = optax.sgd(0.05, momentum=0.9)
    batches = make_batches(4)
    opt = so.ddp(tx, mesh_of(data=2), loss)
    state = opt.init(make_params())
    for batch in batches:
        state, _ = opt.step(state, batch)
    server = so.async_sgd(tx, loss, workers=2)
    halves = [
        [jax.tree.map(lambda x: x[:8], batch) for batch in batches],
        [jax.tree.map(lambda x: x[8:], batch) for batch in batches],
    ]
    result = server.run(make_params(), lambda worker: iter(halves[worker]), num_updates=4)
    assert relative_difference(result.params, state.params) <= 1e-5


def solved(params, row):
    return (jnp.linalg.solve(jnp.eye(DIM) + params["square"], row["x"]) ** 2).mean()


def sorted_ranks(params, row):
    return optax.losses.ranking_softmax_loss(row["x"] @ params["square"], row["y"])


def own_number_of_turns(params, row):
    turns = jnp.int32(1 + 3 * (row["weight"] > 1))
    return (
        jax.lax.fori_loop(0, turns, lambda _, x: x * 0.5, row["x"]).sum() * params["square"].sum()
    )


def normal_density(params, row):
    covariance = jnp.eye(DIM) + params["square"] @ params["square"].T
    return -jax.scipy.stats.multivariate_normal.logpdf(row["x"], jnp.zeros(DIM), covariance)


def mean_without_nan(params, row):
    return jnp.nanmean((row["x"] @ params["square"]) ** 2)


def chunked_scan(params, row):
    @jax.checkpoint
    def body(carry, x):
        return jnp.tanh(carry + x * params["square"].sum()), None

    return jax.lax.scan(body, 0.0, row["x"].reshape(3, 2).sum(1))[0] ** 2


HARD_TO_PROVE = [
    solved,
    sorted_ranks,
    own_number_of_turns,
    normal_density,
    mean_without_nan,
    chunked_scan,
]


@pytest.mark.parametrize("loss_of_row", HARD_TO_PROVE)
def test_losses_that_no_rule_proves_run_on_the_rows_of_each_device(loss_of_row, mesh_of):
    draw = np.random.default_rng(2)
    params = {"square": (0.2 * draw.normal(size=(DIM, DIM))).astype(np.float32)}
    (batch,) = make_batches(1)
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=8), so.per_row(loss_of_row))
    state, _ = opt.step(opt.init(params), batch)
    assert opt.config.report().view.startswith("view: per_device: so.per_row")

    def loss(params):
        return jax.vmap(loss_of_row, (None, 0))(params, batch).mean()

    @jax.jit
    def stepped(params):
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, jax.grad(loss)(params))

    assert relative_difference(state.params, jax.device_get(stepped(params))) <= 1e-5


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(axis_size, in_batched, x):
    return x - x.mean(0), in_batched[0]


@jax.custom_jvp
def same_value(x):
    return x


@same_value.defjvp
def _(primals, tangents):
    return primals[0], centred(tangents[0])


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))


@jax.custom_vjp
def shifted_gradient(x):
    return x


shifted_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct + 0.1,))


@jax.custom_vjp
def sign_gradient(x):
    return x


sign_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.sign(ct),))


def prediction(params, row):
    return row["x"] @ params["w"]


NOT_BY_CONSTRUCTION = {
    "psum": (
        lambda params, row: jax.lax.psum(prediction(params, row).sum(), "data"),
        "a row names a mesh axis that carries rows",
    ),
    "axis_index": (
        lambda params, row: prediction(params, row).sum() * jax.lax.axis_index("data"),
        "a row names a mesh axis that carries rows",
    ),
    "replica": (
        lambda params, row: jax.lax.pmax(prediction(params, row).sum(), "replica"),
        "a row names a mesh axis that carries rows",
    ),
    "custom_vmap": (
        lambda params, row: (centred(prediction(params, row)) ** 2).sum(),
        "custom_vmap in it may mix rows",
    ),
    "custom_vmap_in_a_loop": (
        lambda params, row: jax.lax.fori_loop(
            0, 2, lambda _, x: centred(x), prediction(params, row)
        ).sum(),
        "custom_vmap in it may mix rows",
    ),
    "custom_vmap_in_a_derivative": (
        lambda params, row: (same_value(prediction(params, row)) ** 2).sum(),
        "its backward pass cannot be traced for one row",
    ),
    "clipped": (
        lambda params, row: (clipped_gradient(prediction(params, row)) ** 2).sum(),
        "the derivative rule of a jax.custom_vjp",
    ),
    "shifted": (
        lambda params, row: (shifted_gradient(prediction(params, row)) ** 2).sum(),
        "the derivative rule of a jax.custom_vjp",
    ),
    "sign": (
        lambda params, row: (sign_gradient(prediction(params, row)) ** 2).sum(),
        "the derivative rule of a jax.custom_vjp",
    ),
    "trained_weight": (
        lambda params, row: so.losses.Weighted(
            prediction(params, row).sum(), jnp.exp(params["w"].sum())
        ),
        "the weight of so.losses.Weighted depends on the parameters",
    ),
}


@pytest.mark.parametrize("name", NOT_BY_CONSTRUCTION)
def test_what_a_row_alone_does_not_decide_is_refused_with_its_reason(name, mesh_of):
    loss_of_row, reason = NOT_BY_CONSTRUCTION[name]
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(replica=2, data=4), so.per_row(loss_of_row), view="per_device"
    )
    with pytest.raises(so.errors.NotSeparableError, match=re.escape(reason)):
        opt.step(opt.init(make_params()), make_batches(1)[0])


@pytest.mark.parametrize("vmap_method", ["broadcast_all", "expand_dims"])
def test_a_callback_that_gets_all_rows_together_is_refused_in_evaluation_too(vmap_method, mesh_of):
    def loss_of_row(params, row):
        result = jax.ShapeDtypeStruct((), jnp.float32)
        total = jax.lax.stop_gradient(prediction(params, row).sum())
        return jax.pure_callback(
            lambda x: np.asarray(x - np.mean(x)), result, total, vmap_method=vmap_method
        )

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=8), so.per_row(loss_of_row), view="per_device")
    with pytest.raises(so.errors.NotSeparableError, match='Use vmap_method="sequential"'):
        opt.evaluate(opt.init(make_params()), make_batches(1)[0])


READS_THE_BATCH = {
    "gather_batch": lambda x: so.losses.gather_batch(x).sum(),
    "batch_mean": lambda x: so.losses.batch_mean(x).sum(),
    "batch_sum": lambda x: so.losses.batch_sum(x).sum(),
}


@pytest.mark.parametrize("name", READS_THE_BATCH)
def test_functions_of_the_whole_batch_are_refused_in_a_row_on_any_mesh(name):
    read = READS_THE_BATCH[name]
    loss = so.per_row(lambda params, row: read(prediction(params, row)))
    with pytest.raises(
        ValueError, match=r"so\.per_row gives the loss one row.*\nFix: write a loss"
    ):
        loss(make_params(), make_batches(1)[0])


def test_rows_in_another_dim_are_taken_from_there(mesh_of):
    def loss_of_row(params, row):
        return ((row["x"] @ params["w"] - row["table"]) ** 2).mean()

    dims = [("x", 1), ("table", None)]
    (rows,) = make_batches(1)
    batch = {"x": rows["x"].T.copy(), "table": np.arange(16, dtype=np.float32)}
    loss = so.per_row(loss_of_row, batch_dims=dims)
    expected = np.mean([((x @ make_params()["w"] - batch["table"]) ** 2).mean() for x in rows["x"]])
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=8), loss, batch_dims=dims)
    _, metrics = opt.step(opt.init(make_params()), batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    other = so.ddp(optax.sgd(0.1), mesh_of(data=8), so.per_row(loss_of_row), batch_dims=dims)
    with pytest.raises(ValueError, match=r"x: dim 0 in so\.per_row, dim 1 in ddp"):
        other.step(other.init(make_params()), batch)


def test_leaves_with_different_numbers_of_rows_are_named():
    loss = so.per_row(lambda params, row: row["x"].sum())
    with pytest.raises(ValueError, match=r"per_row: leaves .*\n  x: 4 rows\n  y: 3 rows\nFix: "):
        loss({}, {"x": np.ones((4, 2)), "y": np.ones(3)})


@pytest.mark.parametrize(
    ("loss_of_row", "error", "message"),
    [
        (lambda params, row: row["x"], ValueError, "loss_fn must return a scalar"),
        (lambda params, row: row["x"].sum().astype(int), TypeError, "real floating number"),
        (lambda params, row: "loss", TypeError, "loss"),
    ],
    ids=["vector", "integer", "text"],
)
def test_what_is_no_loss_of_a_row_is_refused(loss_of_row, error, message):
    with pytest.raises(error, match=message):
        so.per_row(loss_of_row)({}, make_batches(1)[0])


def test_a_block_model_is_refused():
    model = so.BlockModel(*[lambda *_: None] * 3)
    with pytest.raises(TypeError, match="pass a BlockModel to the strategy itself"):
        so.per_row(model)


def test_half_precision_is_averaged_in_float32():
    batch = {"x": np.full(4096, 1.0, jnp.bfloat16)}
    loss = so.per_row(lambda params, row: row["x"] + params)
    assert float(loss(jnp.bfloat16(0), batch)) == 1.0
    assert loss(jnp.bfloat16(0), batch).dtype == jnp.float32
