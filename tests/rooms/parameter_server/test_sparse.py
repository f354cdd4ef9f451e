"""Embedding tables: few rows travel, and the outcome is that of dense pushes where laziness changes
nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import same_bits
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import SparseRows, make_server, make_update, rules

ROWS, DIM = 64, 3


def loss_fn(params, batch):
    return jnp.mean((params["table"][batch["ids"]] @ params["w"] - batch["y"]) ** 2)


def start(rows=ROWS, dim=DIM):
    draw = np.random.default_rng(0)
    return {
        "table": draw.normal(size=(rows, dim)).astype(np.float32),
        "w": np.ones(dim, np.float32),
    }


def batches_of(worker, rows=ROWS, size=8, count=100):
    draw = np.random.default_rng([1, worker])
    for _ in range(count):
        ids = np.minimum(draw.zipf(1.3, size=size), rows) - 1
        yield {"ids": ids.astype(np.int32), "y": draw.normal(size=size).astype(np.float32)}


def run(tx, *, sparse=("table",), max_staleness=0, workers=3, num_updates=12, rule=None):
    here = jax.devices()[:1] * workers  # one program for all
    opt = so.async_sgd(
        tx, loss_fn, workers=here, max_staleness=max_staleness, sparse=sparse, rule=rule
    )
    return opt, opt.run(start(), batches_of, num_updates=num_updates)


@pytest.mark.parametrize("clip", tiered([0.1, None], bool))
def test_equal_to_dense_where_nothing_is_remembered(clip):
    tx = optax.chain(optax.clip_by_global_norm(clip), optax.sgd(0.5)) if clip else optax.sgd(0.1)
    _, few = run(tx)
    _, dense = run(tx, sparse=())
    for name in ("table", "w"):
        np.testing.assert_allclose(few.params[name], dense.params[name], atol=1e-6)
    assert np.abs(few.params["table"] - start()["table"]).max() > 1e-3
    assert few.metrics["push_bytes"] < dense.metrics["push_bytes"]


def test_lazy_adam_is_adam_on_the_rows_that_are_touched():
    """Against a plain loop: rows of moments that the union of a clock touches, and no other."""
    _, result = run(optax.adam(0.1), num_updates=5)
    params, tx = jax.tree.map(jnp.asarray, start()), optax.adam(0.1)
    state = tx.init(params)
    streams = [batches_of(worker) for worker in range(3)]
    gradient, update = jax.jit(jax.grad(loss_fn)), jax.jit(tx.update)
    for _ in range(5):
        grads = [gradient(params, next(stream)) for stream in streams]
        grads = jax.tree.map(lambda *g: sum(g) / 3, *grads)
        touched = (grads["table"] != 0).any(1)
        updates, new = update(grads, state, params)

        def keep(new, old, touched=touched):
            return jnp.where(touched[:, None], new, old) if new.shape == (ROWS, DIM) else new

        stepped = optax.apply_updates(params, updates)
        params, state = jax.tree.map(keep, stepped, params), jax.tree.map(keep, new, state)
    for name in ("table", "w"):
        np.testing.assert_allclose(result.params[name], params[name], atol=2e-6)


@pytest.mark.parametrize(
    ("max_staleness", "rule"),
    tiered([(0, None), (2, None), (2, rules.dc_asgd())], lambda row: row[1] is not None),
)
def test_replay(max_staleness, rule):
    opt, result = run(optax.adam(0.05), max_staleness=max_staleness, rule=rule, num_updates=20)
    same_bits(opt.replay(result.log, start(), batches_of), result.params)
    same_bits(
        so.parameter_server.replay(result.log, optax.adam(0.05), loss_fn, start(), batches_of),
        result.params,
    )


def pushed(grads, tx=None):
    server = make_server(tx or optax.sgd(1.0), max_staleness=1)
    state, _ = server.join(server.init(start()), 0)
    state, pulled = server.pull(state, 0)
    return server.push(state, 0, make_update(grads), pulled.version)[0]


def test_rows_named_twice_are_summed_and_others_stay():
    rows = SparseRows(
        np.array([5, 2, 5]), np.array([[1.0] * DIM, [2.0] * DIM, [4.0] * DIM], np.float32)
    )
    state = pushed({"table": rows, "w": np.zeros(DIM, np.float32)})
    moved = start()["table"] - np.asarray(state.params["table"])
    expected = np.zeros((ROWS, DIM), np.float32)
    expected[5], expected[2] = 5.0, 2.0
    np.testing.assert_allclose(moved, expected, atol=1e-6)


def test_nothing_touched_is_a_push_too():
    none = SparseRows(np.zeros(0, np.int32), np.zeros((0, DIM), np.float32))
    state = pushed({"table": none, "w": np.ones(DIM, np.float32)})
    np.testing.assert_array_equal(state.params["table"], start()["table"])
    np.testing.assert_array_equal(state.params["w"], np.zeros(DIM, np.float32))
    assert state.version == 1


@pytest.mark.slow  # test_equal_to_dense compares bytes and parameters
def test_a_large_table_sends_its_touched_rows_only():
    """100,000 x 64, one row in a hundred: at most 2% of the dense bytes, and the outcome of dense
    SGD.
    """
    rows, dim, ids = (
        100_000,
        64,
        np.random.default_rng(0).choice(100_000, 1_000, replace=False).astype(np.int32),
    )
    params = {"table": np.full((rows, dim), 0.5, np.float32)}

    def loss(params, batch):
        return 0.5 * jnp.mean(params["table"][batch] ** 2) * 64

    opt = so.async_sgd(optax.sgd(10.0), loss, workers=1, sparse=["table"])
    result = opt.run(params, lambda worker: [ids], num_updates=1)
    assert 0 < result.metrics["push_bytes"] / params["table"].nbytes <= 0.02
    grads = jax.jit(jax.grad(loss))(params, ids)["table"]
    np.testing.assert_allclose(result.params["table"], params["table"] - 10.0 * grads, atol=1e-6)
    assert np.count_nonzero(np.asarray(result.params["table"])[:, 0] != 0.5) == len(ids)


@pytest.mark.slow  # test_what_acts_row_by_row has one with multi_transform
def test_an_optimizer_for_the_rows_and_another_for_the_rest():
    """SGD on the table, Adam elsewhere: equal to dense pushes, since only the table is sparse."""

    def make():
        return optax.multi_transform(
            {"rows": optax.sgd(0.1), "rest": optax.adam(0.1)}, {"table": "rows", "w": "rest"}
        )

    _, few = run(make(), num_updates=4)
    _, dense = run(make(), sparse=(), num_updates=4)
    for name in ("table", "w"):
        np.testing.assert_allclose(few.params[name], dense.params[name], atol=1e-6)


def stateless(f):
    def update(updates, state, params=None):
        return f(updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def on_table(f):
    return stateless(lambda updates, params: {**updates, "table": f(updates["table"])})


ALL_DIMS = ((0, 1), (0, 1)), ((), ())


def square(g):
    """As many copies of the sum of each row as there are rows."""
    return jnp.broadcast_to(g.sum(1, keepdims=True), (g.shape[0], g.shape[0]))


def row_norms(updates, params):
    g = updates["table"]
    return {**updates, "table": g / (1e-3 + jnp.linalg.norm(g, axis=1, keepdims=True))}


BY_ROW = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clip, then adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "norms of rows": stateless(row_norms),
    "lamb elsewhere": optax.multi_transform(
        {"a": optax.adagrad(0.1), "b": optax.lamb(0.1)}, {"table": "a", "w": "b"}
    ),
    "injected": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
}
NOT_BY_ROW = {
    "trust ratio": (optax.lars(0.1), "broadcast_in_dim, reduce_sum"),
    "adaptive clip": (
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
        "broadcast_in_dim, reduce_sum",
    ),
    "block rms": (
        optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
        "it depends on the number of rows",
    ),
    "number of rows": (on_table(lambda g: g / g.shape[0]), "it depends on the number of rows"),
    "place": (on_table(lambda g: g * jnp.arange(g.shape[0], dtype=g.dtype)[:, None]), "iota"),
    "rolled": (on_table(lambda g: jnp.roll(g, 1, axis=0)), "slice"),
    "first row": (on_table(lambda g: g.at[0].set(0.0)), "scatter"),
    "sum of what is not 0": (on_table(lambda g: g * jnp.exp(g).sum()), "reduce_sum"),
    "noise": (
        on_table(lambda g: g * jax.random.bernoulli(jax.random.key(0), 0.5, g.shape)),
        "random_bits",
    ),
    "number of rows by a sum": (
        on_table(lambda g: g * jnp.ones((DIM, g.shape[0])).sum(1)[None]),
        "reduce_sum",
    ),
    "copies of a row, added up": (
        on_table(lambda g: g * square(g).sum(1, keepdims=True)),
        "reduce_sum",
    ),
    "copies of a row, multiplied": (
        on_table(lambda g: g * jax.lax.dot_general(square(g), square(g), ALL_DIMS)),
        "dot_general",
    ),
    "largest number of rows": (
        on_table(lambda g: g * jnp.full((DIM, g.shape[0]), 0.5).sum(1).max()),
        "reduce_sum",
    ),
    "norm of momentum": (
        optax.chain(optax.trace(0.9), optax.clip_by_global_norm(0.01)),
        "reduce_sum",
    ),
}


def after(tx, *, sparse, steps=2):
    """The parameters after pushes of rows 3 and 5, then 5 and 9: as rows, or dense."""
    server = make_server(tx, max_staleness=1)
    state, _ = server.join(server.init(start()), 0)
    for ids in ([3, 5], [5, 9])[:steps]:
        values = np.arange(1.0, 2 * DIM + 1, dtype=np.float32).reshape(2, DIM) * ids[0] / 10
        table = np.zeros((ROWS, DIM), np.float32)
        table[ids] = values
        grads = {
            "table": SparseRows(np.array(ids), values) if sparse else table,
            "w": np.ones(DIM, np.float32),
        }
        state, pulled = server.pull(state, 0)
        state = server.push(state, 0, make_update(grads), pulled.version)[0]
    return state.params


@pytest.mark.parametrize(
    "name", tiered(BY_ROW, lambda name: name in ("clip, then adamw", "lamb elsewhere", "injected"))
)
def test_what_acts_row_by_row_equals_dense_on_the_rows_of_each_push(name):
    found, dense = (after(BY_ROW[name], sparse=sparse, steps=1) for sparse in (True, False))
    np.testing.assert_allclose(
        found["table"][np.array([3, 5])], dense["table"][np.array([3, 5])], rtol=1e-5
    )
    np.testing.assert_allclose(found["w"], dense["w"], rtol=1e-5)


@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_what_mixes_rows_is_refused(name, message_of):
    tx, why = NOT_BY_ROW[name]
    assert (
        message_of(ValueError, after, tx, sparse=True)
        == "parameter_server: the optimizer or the rule does not act on each row of a sparse leaf"
        f" by itself ({why}).\nFix: use what acts row by row, such as sgd, adam or a clip of"
        " gradients before them; or leave sparse out."
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_refused_for_a_reason(name, monkeypatch):
    """Let through, the rows that are pushed would move otherwise than among all."""
    monkeypatch.setattr("shardopt.parameter_server._sparse._check_by_row", lambda *args: None)
    found, dense = (after(NOT_BY_ROW[name][0], sparse=sparse) for sparse in (True, False))
    moved, expected = (np.asarray(x["table"] - start()["table"]) for x in (found, dense))
    assert np.abs(moved - expected).max() / np.abs(moved).max() > 1e-4


def test_rows_of_two_tables_are_not_the_same_rows(message_of):
    """Tables of one shape, whose product would pair rows by where they stand among those pushed."""

    def swap(updates, params):
        return {"a": updates["a"] * updates["b"], "b": updates["b"]}

    server = make_server(stateless(swap), max_staleness=1)
    state, _ = server.join(
        server.init({name: np.ones((ROWS, DIM), np.float32) for name in "ab"}), 0
    )
    state, pulled = server.pull(state, 0)
    grads = {
        name: SparseRows(np.array([row]), np.ones((1, DIM), np.float32))
        for name, row in [("a", 1), ("b", 2)]
    }
    assert message_of(
        ValueError, server.push, state, 0, make_update(grads), pulled.version
    ).startswith(
        "parameter_server: the optimizer or the rule cannot be traced for some rows of a sparse"
        " leaf.\n  mul got"
    )


def test_refusals(message_of):
    found = message_of(ValueError, run, optax.sgd(0.1), sparse=["tabel"], workers=1)
    assert (
        found == "async_sgd: sparse has patterns that match no trained leaf with rows.\n"
        "  tabel\nFix: the trained leaves are table, w."
    )
    assert (
        message_of(TypeError, run, optax.sgd(0.1), sparse="table")
        == "async_sgd: sparse must be a sequence of regular expressions, got 'table'."
    )
    assert message_of(ValueError, run, optax.sgd(0.1), sparse=["("]).startswith(
        "async_sgd: sparse must be regular expressions, got '(' ("
    )
    fix = "Fix: use an optimizer and a rule whose state is elementwise, or leave sparse out."
    stateful = rules.delayed_nesterov(every=2)
    assert (
        message_of(ValueError, run, optax.sgd(0.1), rule=stateful, max_staleness=1, workers=1)
        == f"parameter_server: a rule with a state cannot take sparse pushes.\n{fix}"
    )
    late = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params),
        lambda updates, state, params=None: (updates, state),
    )
    assert (
        message_of(ValueError, after, late, sparse=True)
        == "parameter_server: the optimizer keeps state that has no row for each row of a sparse"
        f" leaf.\n  state float32[2, {ROWS}, {DIM}] of a parameter float32[{ROWS}, {DIM}]\n{fix}"
    )
    outside = SparseRows(np.array([ROWS]), np.ones((1, DIM), np.float32))
    assert (
        message_of(ValueError, pushed, {"table": outside, "w": np.zeros(DIM, np.float32)})
        == "parameter_server: the sparse push of worker 0 does not fit.\n"
        f"  table: indices int64[1], values float32[1, {DIM}], the parameter has {ROWS} rows\n"
        "Fix: push an index from 0 to rows - 1 for each row of values."
    )
    spoilt = SparseRows(np.array([1]), np.full((1, DIM), np.nan, np.float32))
    assert message_of(
        so.parameter_server.NonFiniteUpdateError,
        pushed,
        {"table": spoilt, "w": np.zeros(DIM, np.float32)},
    ).startswith(
        "parameter_server: the push of worker 0 at its step 0 was refused:\n  table: not finite"
    )
