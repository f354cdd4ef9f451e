"""Embedding tables: few rows travel, and the outcome is that of dense pushes where laziness changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import same_bits

import shardopt as so
from shardopt.parameter_server import SparseRows, make_server, make_update, rules

ROWS, DIM = 64, 3


def loss_fn(params, batch):
    return jnp.mean((params["table"][batch["ids"]] @ params["w"] - batch["y"]) ** 2)


def start(rows=ROWS, dim=DIM):
    draw = np.random.default_rng(0)
    return {"table": draw.normal(size=(rows, dim)).astype(np.float32), "w": np.ones(dim, np.float32)}


def batches_of(worker, rows=ROWS, size=8, count=100):
    draw = np.random.default_rng([1, worker])
    for _ in range(count):
        ids = np.minimum(draw.zipf(1.3, size=size), rows) - 1
        yield {"ids": ids.astype(np.int32), "y": draw.normal(size=size).astype(np.float32)}


def run(tx, *, sparse=("table",), max_staleness=0, workers=3, num_updates=12, rule=None):
    opt = so.async_sgd(tx, loss_fn, workers=workers, max_staleness=max_staleness, sparse=sparse, rule=rule)
    return opt, opt.run(start(), batches_of, num_updates=num_updates)


@pytest.mark.parametrize(
    "make", [lambda: optax.sgd(0.1), lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))]
)
def test_equal_to_dense_where_nothing_is_remembered(make):
    _, few = run(make())
    _, dense = run(make(), sparse=())
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
    for _ in range(5):
        grads = [jax.grad(loss_fn)(params, next(stream)) for stream in streams]
        grads = jax.tree.map(lambda *g: sum(g) / 3, *grads)
        touched = (grads["table"] != 0).any(1)
        updates, new = tx.update(grads, state, params)

        def keep(new, old, touched=touched):
            return jnp.where(touched[:, None], new, old) if new.shape == (ROWS, DIM) else new

        stepped = optax.apply_updates(params, updates)
        params, state = jax.tree.map(keep, stepped, params), jax.tree.map(keep, new, state)
    for name in ("table", "w"):
        np.testing.assert_allclose(result.params[name], params[name], atol=2e-6)


@pytest.mark.parametrize(("max_staleness", "rule"), [(0, None), (2, None), (2, rules.dc_asgd())])
def test_replay(max_staleness, rule):
    opt, result = run(optax.adam(0.05), max_staleness=max_staleness, rule=rule, num_updates=20)
    same_bits(opt.replay(result.log, start(), batches_of), result.params)
    same_bits(so.parameter_server.replay(result.log, optax.adam(0.05), loss_fn, start(), batches_of), result.params)


def pushed(grads, tx=None):
    server = make_server(tx or optax.sgd(1.0), max_staleness=1)
    state, _ = server.join(server.init(start()), 0)
    state, pulled = server.pull(state, 0)
    return server.push(state, 0, make_update(grads), pulled.version)[0]


def test_rows_named_twice_are_summed_and_others_stay():
    rows = SparseRows(np.array([5, 2, 5]), np.array([[1.0] * DIM, [2.0] * DIM, [4.0] * DIM], np.float32))
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


def test_a_large_table_sends_its_touched_rows_only():
    """1,000,000 x 64, one row in a hundred: at most 2% of the dense bytes, and the outcome of dense SGD."""
    rows, dim, ids = 1_000_000, 64, np.random.default_rng(0).choice(1_000_000, 10_000, replace=False).astype(np.int32)
    params = {"table": np.full((rows, dim), 0.5, np.float32)}
    loss = lambda params, batch: 0.5 * jnp.mean(params["table"][batch] ** 2) * 64  # noqa: E731
    opt = so.async_sgd(optax.sgd(10.0), loss, workers=1, sparse=["table"])
    result = opt.run(params, lambda worker: [ids], num_updates=1)
    assert 0 < result.metrics["push_bytes"] / params["table"].nbytes <= 0.02
    grads = jax.jit(jax.grad(loss))(params, ids)["table"]
    np.testing.assert_allclose(result.params["table"], params["table"] - 10.0 * grads, atol=1e-6)
    assert np.count_nonzero(np.asarray(result.params["table"])[:, 0] != 0.5) == len(ids)


def test_refusals(message_of):
    found = message_of(ValueError, run, optax.sgd(0.1), sparse=["tabel"], workers=1)
    assert found == (
        "async_sgd: sparse has patterns that match no trained leaf with rows.\n"
        "  tabel\nFix: the trained leaves are table, w."
    )
    assert message_of(TypeError, run, optax.sgd(0.1), sparse="table") == (
        "async_sgd: sparse must be a sequence of regular expressions, got 'table'."
    )
    assert message_of(ValueError, run, optax.sgd(0.1), sparse=["("]).startswith(
        "async_sgd: sparse must be regular expressions, got '(' ("
    )
    fix = "Fix: use an optimizer and a rule whose state is elementwise, or leave sparse out."
    stateful = rules.dc_asgd_adaptive()
    assert message_of(ValueError, run, optax.sgd(0.1), rule=stateful, max_staleness=1, workers=1) == (
        f"parameter_server: a rule with a state cannot take sparse pushes.\n{fix}"
    )
    outside = SparseRows(np.array([ROWS]), np.ones((1, DIM), np.float32))
    assert message_of(ValueError, pushed, {"table": outside, "w": np.zeros(DIM, np.float32)}) == (
        "parameter_server: the sparse push of worker 0 does not fit.\n"
        f"  table: indices int64[1], values float32[1, {DIM}], the parameter has {ROWS} rows\n"
        "Fix: push an index from 0 to rows - 1 for each row of values."
    )
    spoilt = SparseRows(np.array([1]), np.full((1, DIM), np.nan, np.float32))
    assert message_of(
        so.parameter_server.NonFiniteUpdateError, pushed, {"table": spoilt, "w": np.zeros(DIM, np.float32)}
    ).startswith("parameter_server: the push of worker 0 at its step 0 was refused:\n  table: not finite")
