"""Ways to bind an axis: vmap, pmap, and shard_map with and without types of varying values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so


def under_vmap(f, size):
    return jax.jit(jax.vmap(f, axis_name="data", axis_size=size))


def under_pmap(f, size):
    return jax.pmap(f, axis_name="data", devices=jax.devices()[:size])


def under_shard_map(f, size, *, check_vma=False):
    def one(*args):
        local = jax.tree.map(lambda x: x.reshape(x.shape[1:]), args)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], f(*local))

    mesh = so.make_mesh(data=size, devices=jax.devices()[:size])
    return jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    )


WAYS = {
    "vmap": under_vmap,
    "pmap": under_pmap,
    "shard_map": under_shard_map,
    "checked shard_map": functools.partial(under_shard_map, check_vma=True),
}


@pytest.fixture(scope="session")
def ways():
    """Functions (f, axis size) -> f over arguments stacked [axis size, ...], by name."""
    return WAYS


@pytest.fixture(scope="session")
def on_devices():
    """Return a function that runs f with the axis bound by vmap, and gives numpy arrays."""

    def run(f, size, *args):
        return jax.tree.map(np.asarray, under_vmap(f, size)(*args))

    return run
