"""A small regression, data that differs from step to step, and checkpoints kept in memory."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so


def loss_fn(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return (error**2).mean(), {"error": jnp.abs(error).mean()}


def make_batches(count, seed=0):
    """Return `count` batches of eight rows, no two alike."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8, 4)).astype(np.float32)
    y = (x @ rng.normal(size=4) + 0.5).astype(np.float32)
    return [{"x": x[i], "y": y[i]} for i in range(count)]


@pytest.fixture(scope="session", name="loss_fn")
def loss_fn_fixture():
    return loss_fn


@pytest.fixture(scope="session")
def batches():
    return make_batches(40)


@pytest.fixture(scope="session")
def opt():
    """Adam on two devices, the weights split."""
    return so.fsdp(
        optax.adam(0.05),
        so.make_mesh(data=2, devices=jax.devices()[:2]),
        loss_fn,
        min_shard_elements=1,
    )


@pytest.fixture(scope="session")
def new_state(opt):
    """Return a function that makes a fresh state, always the same."""
    return lambda: opt.init({"w": jnp.zeros(4), "b": jnp.zeros(())})


@pytest.fixture(scope="session")
def same():
    """Return a function that says whether two states are equal bit for bit."""

    def compare(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)

    return compare


@pytest.fixture
def memory():
    """Return a function that makes checkpoints kept in memory.

    A saved state arrives only with `wait`, as on a disk that takes its time. Passing the same
    `disk` again is opening the same folder again."""

    def make(every, *, disk=None, resume=False):
        disk = {} if disk is None else disk
        pending = {}

        def save(state, *, step, metrics=None, extra=None):
            assert step not in disk | pending, f"step {step} was saved twice"
            assert step == int(state.step)
            pending[step] = (jax.tree.map(np.array, state), json.dumps(extra), metrics)

        def wait():
            disk.update(pending)
            pending.clear()

        def restore(opt, *, step=None):
            state, extra, _ = disk[max(disk) if step is None else step]

            def place(value, target):
                return jax.device_put(value, target.sharding, may_alias=False)

            return jax.tree.map(place, state, opt.abstract_state()), json.loads(extra)

        return types.SimpleNamespace(
            directory="/runs/a",
            every=every,
            resume=resume,
            disk=disk,
            pending=pending,
            due=lambda step: step % every == 0,
            due_in_memory=lambda step: False,
            memory_every=None,
            best=None,
            save=save,
            wait=wait,
            latest=lambda: max(disk, default=None),
            restore=restore,
        )

    return make


@pytest.fixture(scope="session")
def metrics_at():
    """Return a function from a history to {step: value} of one metric."""
    return lambda history, name: {
        record["step"]: record[name] for record in history if name in record
    }
