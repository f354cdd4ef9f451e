"""What only a step shows: slices of the rows of all devices, and gradients of weights."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.core._trace_context import RowContext
from shardopt.core._types import abstract
from shardopt.losses._separable import Cut, LossCall, find_mixing

DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=(4,)).astype(np.float32)}
BATCH = {
    "x": DRAW.normal(size=(8, 4)).astype(np.float32),
    "y": DRAW.normal(size=8).astype(np.float32),
}


def outputs(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def own(batch):
    return batch["x"].shape[0]


OF_ALL_ROWS = {
    "as many as there are here": lambda p, b: jnp.mean(
        so.losses.gather_batch(outputs(p, b))[: own(b)] ** 2
    ),
    "all but the last": lambda p, b: jnp.mean(
        so.losses.gather_batch(outputs(p, b))[: own(b) - 1] ** 2
    ),
    "against the first": lambda p, b: jnp.mean(
        outputs(p, b) * so.losses.gather_batch(b["y"])[: own(b)]
    ),
    "against the last": lambda p, b: jnp.mean(
        outputs(p, b) * so.losses.gather_batch(b["y"])[-own(b) :]
    ),
    "by a dynamic slice": lambda p, b: jnp.mean(
        outputs(p, b) * jax.lax.dynamic_slice(so.losses.gather_batch(b["y"]), (0,), (own(b),))
    ),
    "by a lookup": lambda p, b: jnp.mean(
        outputs(p, b) * so.losses.gather_batch(b["y"])[jnp.arange(own(b))]
    ),
    "the last here": lambda p, b: (
        jnp.mean(outputs(p, b)) * so.losses.gather_batch(b["y"])[own(b) - 1]
    ),
    "by strides": lambda p, b: jnp.mean(so.losses.gather_batch(outputs(p, b))[:: 8 // own(b)] ** 2),
    "reshaped": lambda p, b: jnp.mean(
        so.losses.gather_batch(outputs(p, b)).reshape(own(b), -1)[:, 0] * b["y"]
    ),
}


COMBINED = {
    "the largest": lambda x: jax.lax.pmax(x, "data"),
    "the smallest": lambda x: jnp.sin(jax.lax.pmin(x, "data")),
    "the largest in a call": jax.jit(lambda x: x - jax.lax.pmax(jax.lax.stop_gradient(x), "data")),
}


@pytest.mark.parametrize("row", tiered(COMBINED, lambda row: row == "the largest"))
def test_a_loop_over_rows_that_combines_devices_is_refused(row, mesh_of):
    def loss_fn(p, b):
        def of_row(x):
            return COMBINED[row](jax.lax.stop_gradient(x)) * jnp.sum(p["w"])

        return jnp.mean(jax.lax.map(of_row, b["y"]))

    tx = optax.sgd(1.0)
    losses = []
    for size in (1, 2):
        opt = so.ddp(tx, mesh_of(data=size), loss_fn, view="unproved")
        losses.append(float(opt.step(opt.init(PARAMS), BATCH)[1]["loss"]))
    # or the row shows nothing
    assert abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0])
    opt = so.ddp(tx, mesh_of(data=2), loss_fn, view="per_device")
    with pytest.raises(so.errors.NotSeparableError):
        opt.step(opt.init(PARAMS), BATCH)


@pytest.mark.parametrize("row", tiered(OF_ALL_ROWS, lambda row: row in list(OF_ALL_ROWS)[::3]))
def test_slices_of_all_rows_are_refused(row, mesh_of):
    loss_fn = OF_ALL_ROWS[row]
    mesh = mesh_of(data=2)
    opt = so.ddp(optax.sgd(1.0), mesh, loss_fn, view="unproved")
    loss = opt.evaluate(opt.init(PARAMS), BATCH)["loss"]
    # or the row shows nothing
    assert abs(loss - jax.jit(loss_fn)(PARAMS, BATCH)) > 1e-4 * abs(loss)
    opt = so.ddp(optax.sgd(1.0), mesh, loss_fn, view="per_device")
    state = opt.init(PARAMS)
    with pytest.raises(so.errors.NotSeparableError):
        opt.step(state, BATCH)
    with pytest.raises(so.errors.NotSeparableError):
        opt.step.lower(*abstract((state, BATCH)))


@jax.custom_vjp
def is_positive(x):
    return (x > 0) * 1.0


is_positive.defvjp(lambda x: (is_positive(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_jvp
def rounded(x):
    return jnp.round(x).astype(int).astype(x.dtype)


@rounded.defjvp
def _rounded_tangents(primals, tangents):
    return rounded(*primals), tangents[0]


WEIGHTS = {
    "a straight-through step": lambda p, b: 0.1 + is_positive(outputs(p, b)),
    "a straight-through integer": lambda p, b: 4 + rounded(outputs(p, b)),
    "a straight-through step in a loop over rows": lambda p, b: (
        0.1 + jax.lax.map(jax.jit(is_positive), outputs(p, b))
    ),
    "a sigmoid": lambda p, b: jax.nn.sigmoid(b["x"] @ p["w"]),
    "a softplus of another row": lambda p, b: jax.nn.softplus(b["x"][:, ::-1] @ p["w"]),
    "a square of the parameters": lambda p, b: jnp.full(own(b), jnp.sum(p["w"] ** 2)),
    "an exponential": lambda p, b: jnp.exp(0.3 * outputs(p, b)) * (b["y"] > -1),
}
TERMS = {
    "one term": lambda p, b, weight: so.losses.Weighted(
        jnp.sum(outputs(p, b) * weight), jnp.sum(weight)
    ),
    "another total": lambda p, b, weight: so.losses.Weighted(
        jnp.sum(outputs(p, b) - b["y"]), jnp.sum(weight)
    ),
    "two terms": lambda p, b, weight: so.losses.Weighted(
        (jnp.sum(outputs(p, b)), jnp.sum(b["y"])), (own(b), jnp.sum(weight))
    ),
}


@pytest.mark.parametrize(
    ("weight", "terms", "view", "micro_batches"),
    tiered(
        [
            (weight, terms, view, micro_batches)
            for weight, terms in itertools.product(WEIGHTS, TERMS)
            if weight == "a sigmoid" or terms == "one term"
            for view in ("per_device", "global")
            for micro_batches in (1, 2)
        ],
        lambda row: (
            (row[3] == 1 and "one term" in row)
            or (row[:2] == ("a sigmoid", "two terms") and row[3] == 2)
        ),
    ),
)
def test_a_weight_that_is_trained_is_refused_or_differentiated(
    weight, terms, view, micro_batches, mesh_of
):
    def loss_fn(p, b):
        return TERMS[terms](p, b, WEIGHTS[weight](p, b))

    def quotient(params):
        loss = loss_fn(params, BATCH)
        several = type(loss.total) is tuple
        pairs = (
            zip(loss.total, loss.weight, strict=True) if several else [(loss.total, loss.weight)]
        )
        return sum(total / weight for total, weight in pairs)

    exact = jax.jit(jax.grad(quotient))(PARAMS)["w"]
    opt = so.ddp(optax.sgd(1.0), mesh_of(data=2), loss_fn, view=view, micro_batches=micro_batches)
    state = opt.init(PARAMS)
    if view == "per_device":
        with pytest.raises(
            so.errors.NotSeparableError,
            match=r"weight( 2)? of so\.losses\.Weighted depends on the parameters",
        ):
            opt.step(state, BATCH)
        return
    with (
        pytest.warns(UserWarning, match="micro_batches=2")
        if micro_batches == 2
        else contextlib.nullcontext()
    ):
        state, _ = opt.step(state, BATCH)
    np.testing.assert_allclose(
        PARAMS["w"] - np.asarray(state.params["w"]), exact, rtol=1e-4, atol=1e-6
    )


GATHERS = {
    "in the order of the pieces": ("replica", "data"),
    "in another order": ("data", "replica"),
    "of one axis": ("data",),
}


@pytest.mark.fast
@pytest.mark.parametrize("row", GATHERS)
@pytest.mark.parametrize("entry", [0, -1, 3])
def test_a_gather_has_all_rows_only_if_it_names_the_axes_in_the_order_of_the_pieces(row, entry):
    def loss_fn(p, b):
        rows = jax.lax.all_gather(b["y"], GATHERS[row], tiled=True)
        return jnp.mean(outputs(p, b) * rows[entry])

    context = RowContext(("replica", "data"), 4)
    call = LossCall(context=context, axis_sizes={"replica": 2, "data": 2})
    mixing = find_mixing(loss_fn, abstract(PARAMS), abstract(BATCH), Cut(4), call)
    assert (mixing is None) == (row == "in the order of the pieces")
