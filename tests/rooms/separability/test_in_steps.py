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


BOTH_AXES = {"data": 4, "model": 2}
OF_FOUR = LossCall(
    key=jax.eval_shape(lambda: jax.random.key(0)),
    context=RowContext(("data",), 4),
    axis_sizes=BOTH_AXES,
)


def of_own(whole_factor, piece_factor):
    """Return a factor that another function computes on all 8 rows than on fewer."""
    return lambda p, b: (
        jnp.mean(outputs(p, b)) * (whole_factor if own(b) == 8 else piece_factor)(p, b)
    )


def mean_over(axes, shares, groups=None):
    def mean(p, b):
        return jax.lax.psum(jnp.mean(b["y"]), axes, axis_index_groups=groups) / shares

    return mean


def from_neighbour(*pairs):
    return lambda p, b: jax.lax.ppermute(p["w"][0], "model", pairs)


def drawn_branch(p, b, rng):
    branches = (lambda y: so.losses.batch_mean(y) ** 2), (lambda y: jnp.sum(p["w"]))
    return jnp.mean(outputs(p, b)) + jax.lax.cond(jax.random.bernoulli(rng), *branches, b["y"])


def drawn_turns(p, b, rng):
    turns = jax.random.randint(rng, (), 1, 5)

    def turn(state):
        return state[0] + 1, state[1] + so.losses.batch_mean(jax.lax.stop_gradient(b["y"])) ** 2

    _, total = jax.lax.while_loop(lambda state: state[0] < turns, turn, (0, jnp.float32(0)))
    return jnp.mean(outputs(p, b)) + total


def turns_of_rows(p, b):
    def of_row(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x**2) > 1, lambda x: 0.1 * jax.lax.pmean(x, "model"), x
        )

    return jnp.mean(jax.vmap(of_row)(jax.lax.stop_gradient(b["x"])) @ p["w"])


def chosen_branch(p, b):
    branches = (lambda y: so.losses.batch_mean(y) ** 2), (lambda y: jnp.sum(p["w"]))
    return jnp.mean(outputs(p, b)) + jax.lax.cond(p["w"][0] > 0, *branches, b["y"])


COLLECTIVES = {
    "of another axis on a piece": of_own(mean_over("data", 1), mean_over("model", 4)),
    "of groups on a piece": of_own(mean_over("data", 1), mean_over("data", 4, [[0, 1], [2, 3]])),
    "of another neighbour on a piece": of_own(
        from_neighbour((0, 1), (1, 0)), from_neighbour((0, 0), (1, 1))
    ),
    "in a branch that is drawn": drawn_branch,
    "in turns whose number is drawn": drawn_turns,
    "in turns whose number a row has": turns_of_rows,
    "in a branch that parameters choose": chosen_branch,
    "of neighbours": of_own(*[from_neighbour((0, 1), (1, 0))] * 2),
}
FOLLOWED = "in a branch that parameters choose", "of neighbours"


@pytest.mark.fast
@pytest.mark.parametrize("row", COLLECTIVES)
def test_all_devices_must_come_to_the_same_collective(row):
    mixing = find_mixing(COLLECTIVES[row], abstract(PARAMS), abstract(BATCH), Cut(4), OF_FOUR)
    assert (mixing is None) == (row in FOLLOWED)


SEQUENCES = {
    "x": jax.ShapeDtypeStruct((2, 8, 3, 4), np.float32),
    "many": jax.ShapeDtypeStruct((2, 8, 3, 2, 4), np.float32),
    "numbers": jax.ShapeDtypeStruct((2, 8), np.float32),
}


def mixed(x):
    return so.nn.attention(x, x, x)


def mean_of_positions(of_positions):
    """Return the mean over the batch of numbers [B, T, ...], which `Weighted` divides once more."""

    def loss(p, b):
        numbers = of_positions(p["w"][0], b)
        return so.losses.Weighted(jnp.sum(numbers), jnp.float32(numbers.size))

    return loss


def known_positions(w, b):
    length = b["numbers"].shape[1]
    jitted = jax.jit(lambda: jnp.arange(length, dtype=jnp.int32))
    return w * b["numbers"] * (so.nn.positions(length) if length == 8 else jitted())[None]


def attended_in_turns(p, b, rng):
    turns = jax.random.randint(rng, (), 1, 5)
    _, x = jax.lax.while_loop(
        lambda state: state[0] < turns, lambda state: (state[0] + 1, mixed(state[1])), (0, b["x"])
    )
    return jnp.mean(x) * p["w"][0]


def attended_by_vmap(p, b):
    by_vmap = jax.vmap(mixed, in_axes=2, out_axes=2)(b["many"])
    return so.losses.Weighted(jnp.mean(by_vmap) * p["w"][0], jnp.float32(b["many"].shape[1]))


OF_POSITIONS = {
    "attention": mean_of_positions(lambda w, b: w * mixed(b["x"])),
    "positions": mean_of_positions(lambda w, b: w * b["numbers"] * so.nn.positions(b["numbers"].shape[1])[None]),
    "positions in a function of one's own": mean_of_positions(known_positions),
    "attention by vmap": attended_by_vmap,
    "tangents of attention": mean_of_positions(lambda w, b: jax.jvp(mixed, (w * b["x"],), (b["x"],))[1]),
    "a gradient of attention": mean_of_positions(lambda w, b: jax.grad(lambda x: jnp.sum(mixed(x)))(w * b["x"])),
    "attention in turns whose number is drawn": attended_in_turns,
    "a mean over devices": lambda p, b: jnp.mean(jnp.tanh(jax.lax.pmean(b["numbers"], "context") * p["w"][0])),
    "numbers of a neighbour": lambda p, b: jnp.mean(p["w"][0] * b["numbers"] * jax.lax.ppermute(b["numbers"], "context", [(0, 1), (1, 0)])),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("row", OF_POSITIONS)
def test_what_devices_along_context_compute_together(row):
    takes_key = OF_POSITIONS[row] is attended_in_turns
    call = LossCall(key=OF_FOUR.key if takes_key else None, axis_sizes={"data": 1, "context": 4})
    cut = Cut(4, [1] * len(SEQUENCES), positions=("context",))
    mixing = find_mixing(OF_POSITIONS[row], abstract(PARAMS), SEQUENCES, cut, call)
    assert (mixing is None) == (row in ("attention", "positions"))


def test_a_metric_of_a_number_of_rows_is_refused():
    """A number for each column, of which one counts the rows and another is a parameter."""

    def loss_fn(p, b):
        counted = jnp.concatenate([jnp.float32(own(b))[None], p["w"][:1]])
        return jnp.mean(outputs(p, b)), {"counted": counted}

    mixing = find_mixing(loss_fn, abstract(PARAMS), abstract(BATCH), Cut(4))
    assert mixing.result == "metric 'counted'"
