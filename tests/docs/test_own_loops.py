"""Published loops take links with few changed lines, and train as the links promise.

`examples/own_loops` has the loops, and for each link a diff with the lines that change.
"""

import functools
import itertools
import json
import re
import runpy
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.any_optimizer import ANY_OPTIMIZER
from support.tiers import tiered

import shardopt as so

FOLDER = Path(__file__).parents[2] / "examples" / "own_loops"
LOOPS = {
    "nnx_train_state": "jit",
    "named_sharding": "jit",
    "equinox_filter_jit": "jit",
    "big_vision": "jit",
    "pmap_flax": "pmap",
    "pmap_haiku": "pmap",
    "shard_map": "shard_map",
}
LINKS = ["zero", "int8", "local_updates", "clip", "skip_anomalies"]
OWN_GRADIENTS = ["int8", "local_updates"]
DEVICES = 8
EVERY = 2


def changed_text(loop, link):
    """Return the text of a loop with the lines of a diff changed."""
    lines = (FOLDER / f"{loop}.py").read_text().splitlines()
    diff = (FOLDER / "changes" / f"{loop}-{link}.diff").read_text()
    shift = -1  # lines are counted from 1
    for hunk in diff.split("\n@@ -")[1:]:
        head, *hunk_lines = hunk.splitlines()
        old = [line[1:] for line in hunk_lines if not line.startswith("+")]
        new = [line[1:] for line in hunk_lines if not line.startswith("-")]
        start = int(re.match(r"\d+", head)[0]) + shift
        assert lines[start : start + len(old)] == old
        lines[start : start + len(old)] = new
        shift += len(new) - len(old)
    return "\n".join(lines)


def num_changed(loop, link):
    """Return the number of changed lines, without imports and empty lines."""
    lines = (FOLDER / "changes" / f"{loop}-{link}.diff").read_text().split("\n")[2:]
    lines = [line for line in lines if line[1:].strip() and "import " not in line]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def train(loop, link, optimizer, monkeypatch, dtype="float64", batches=None):
    """Return the parameters, the optimizer state and the losses of a loop."""
    monkeypatch.syspath_prepend(str(FOLDER))
    if link == "diloco":  # the same lines, and one argument
        text = changed_text(loop, "local_updates").replace(
            "sync_every=2)", "sync_every=2, outer=OUTER)"
        )
    else:
        text = changed_text(loop, link)
    module = types.ModuleType(f"own_loop_{loop}_{link}")
    module.OUTER = OUTER
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, f"{loop}-{link}", "exec"), module.__dict__)
    data = module.data
    monkeypatch.delitem(sys.modules, "data")
    batches = data.batches(dtype=dtype) if batches is None else batches
    return module.train(optimizer, data.weights(dtype), batches)


@functools.cache
def data_of(dtype):
    data = runpy.run_path(str(FOLDER / "data.py"))
    return data["weights"](dtype), data["batches"](dtype=dtype)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train_on_one_device(optimizer, weights, batches):
    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = weights
    state = jax.jit(optimizer.init)(weights)
    for batch in batches:
        params, state = step(params, state, batch)
    return params


class Layers(NamedTuple):
    up: jax.Array
    down: jax.Array

    def __getitem__(self, name):
        return getattr(self, name)

    def items(self):
        return self._asdict().items()


def train_by_vmap(tx, weights, batches):
    """Train copies of the parameters with links that name the axis "data"."""

    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(step, axis_name="data"))
    params = jax.tree.map(lambda x: np.stack([x] * DEVICES), weights)
    state = jax.jit(jax.vmap(tx.init, axis_name="data"))(params)
    for batch in batches:
        rows = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        params, state = step(params, state, rows)
    return jax.tree.map(lambda x: x[0], params)


def check_equal(params, expected, tolerance):
    for name, leaf in expected.items():
        param = np.asarray(params[name])
        if param.ndim > leaf.ndim:  # parameters of all devices, after they were averaged
            np.testing.assert_allclose(param, np.stack([param[0]] * DEVICES), atol=1e-12)
            param = param[0]
        np.testing.assert_allclose(param, leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.fast
@pytest.mark.parametrize(("loop", "link"), list(itertools.product(LOOPS, LINKS)))
def test_few_lines_change(loop, link):
    if LOOPS[loop] == "shard_map":
        limit = 5
    elif LOOPS[loop] == "jit" and link in OWN_GRADIENTS:
        limit = 7
    else:
        limit = 3
    assert 1 <= num_changed(loop, link) <= limit


def test_the_table_of_the_page_has_these_numbers():
    page = (FOLDER.parents[1] / "docs" / "howto" / "own_loop.md").read_text()
    columns = ["int8", "zero", "local_updates", "clip", "skip_anomalies"]
    for loop in LOOPS:
        cells = " | ".join(str(num_changed(loop, link)) for link in columns)
        assert f"| {cells} |" in page


def test_the_page_has_the_bytes_that_were_measured():
    root = FOLDER.parents[1]
    page = (root / "docs" / "howto" / "own_loop.md").read_text()
    record = json.loads((root / "benchmarks" / "results" / "own_loops.json").read_text())
    for loop in LOOPS:
        rows = [
            record["results"][loop][link] for link in ("plain", "zero", "int8", "local_updates")
        ]
        cells = [f"{row['bytes sent']:,}, {row['bytes of state']:,}" for row in rows]
        assert f"| {' | '.join(cells)} |" in page
        plain, sharded, compressed, _ = rows
        assert sharded["bytes of state"] < 0.2 * plain["bytes of state"]
        assert compressed["bytes sent"] < 0.5 * plain["bytes sent"]


OPTIMIZERS = {
    **ANY_OPTIMIZER,
    "adan": lambda: optax.adan(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}
QUICK = list(zip(LOOPS, OPTIMIZERS, strict=False))
"""Each loop with an optimizer of its own."""


@pytest.mark.parametrize(
    ("loop", "name"),
    tiered(itertools.product(LOOPS, OPTIMIZERS), lambda row: row in QUICK, ids="-".join),
)
def test_zero_of_any_optimizer_equals_one_device(loop, name, monkeypatch, x64):
    optimizer = OPTIMIZERS[name]()
    expected = train_on_one_device(optimizer, *data_of("float64"))
    params, state, _ = train(loop, "zero", optimizer, monkeypatch)
    check_equal(params, expected, 1e-6 if name == "soap" else 1e-9)
    state_leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, data_of("float64")[0]))
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    small = 8 * 12 * len(state_leaves)  # counts, and the number of a device
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in state_leaves)
    assert stored <= state_bytes / DEVICES + small


@functools.cache
def trained_with_clipping():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    return train_on_one_device(clipped, *data_of("float64"))


@pytest.mark.parametrize("loop", LOOPS)
def test_clipping_clips_the_mean_gradient(loop, monkeypatch, x64):
    params, *_ = train(loop, "clip", optax.sgd(0.1, momentum=0.9), monkeypatch)
    check_equal(params, trained_with_clipping(), 1e-9)


@functools.cache
def trained_by_adam():
    return train_on_one_device(optax.adam(1e-2), *data_of("float64"))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_that_is_not_finite_is_skipped_on_all_devices(loop, monkeypatch, x64):
    _, batches = data_of("float64")
    bad = jax.tree.map(np.copy, batches[2])
    bad["y"][5] = np.nan  # of one device
    extended_batches = [*batches[:2], bad, *batches[2:]]
    params, *_ = train(
        loop, "skip_anomalies", optax.adam(1e-2), monkeypatch, batches=extended_batches
    )
    check_equal(params, trained_by_adam(), 1e-9)


@functools.cache
def trained_with_int8(has_layers):
    reducer = so.reducers.error_feedback(so.reducers.int8())
    average = so.transforms.average_gradients("data", reducer)
    weights, batches = data_of("float32")
    if has_layers:
        weights = Layers(**weights)
    return train_by_vmap(optax.chain(average, optax.sgd(0.05, momentum=0.9)), weights, batches)


@pytest.mark.parametrize("loop", LOOPS)
def test_int8_with_error_feedback_equals_its_plain_form(loop, monkeypatch):
    # blocks of int8 go over leaves in the order of the model
    expected = trained_with_int8(has_layers=loop == "equinox_filter_jit")
    params, *_ = train(loop, "int8", optax.sgd(0.05, momentum=0.9), monkeypatch, "float32")
    check_equal(params, expected, 2e-5)


@functools.cache
def trained_apart(link):
    """Return the parameters of copies that train apart, after they were averaged."""
    optimizer = optax.adam(1e-2)
    weights, batches = data_of("float64")
    copies = [weights] * DEVICES
    states = [jax.jit(optimizer.init)(weights)] * DEVICES

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def averaged(copies, shared, outer_state):
        mean = jax.tree.map(lambda *leaves: sum(leaves) / DEVICES, *copies)
        if link == "diloco":
            delta = jax.tree.map(lambda old, new: old - new, shared, mean)
            updates, outer_state = OUTER.update(delta, outer_state, shared)
            mean = optax.apply_updates(shared, updates)
        return mean, outer_state

    shared = weights
    outer_state = OUTER.init(weights)
    for number, batch in enumerate(batches):
        for device in range(DEVICES):
            rows = jax.tree.map(lambda x, d=device: np.split(x, DEVICES)[d], batch)
            copies[device], states[device] = step(copies[device], states[device], rows)
        if (number + 1) % EVERY == 0:
            shared, outer_state = averaged(copies, shared, outer_state)
            copies = [shared] * DEVICES
    return copies[0]


@pytest.mark.parametrize(
    ("loop", "link"),
    tiered(
        itertools.product(LOOPS, ["local_updates", "diloco"]),
        lambda row: row[1] == "local_updates" or row[0] in ("pmap_haiku", "equinox_filter_jit"),
        ids="-".join,
    ),
)
def test_local_updates_equal_copies_that_train_apart(loop, link, monkeypatch, x64):
    params, *_ = train(loop, link, optax.adam(1e-2), monkeypatch)
    check_equal(params, trained_apart(link), 1e-9)
