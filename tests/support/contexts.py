"""Attention on a mesh with a context axis, and the same attention on one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import shardopt as so

MESH_AXES = ("data", "pipeline", "context", "tensor")


def mesh_of(**sizes):
    """Return a mesh of our axes with a context axis, each of size 1 where none is given."""
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def drawn(rows=2, length=32, heads=8, groups=4, width=4, *, packed=False, dtype=np.float64):
    """Return a batch: query, key, value, the weight of each result in the loss, and segments if it
    is packed.
    """
    rng = np.random.default_rng(0)
    heads = {"query": heads, "key": groups, "value": groups, "weight": heads}
    batch = {
        name: rng.normal(size=(rows, length, count, width)).astype(dtype)
        for name, count in heads.items()
    }
    if packed:
        batch["segments"] = np.sort(rng.integers(0, 4, (rows, length)), axis=1).astype(np.int32)
    return batch


def results(batch, **how):
    """Return attention, and the gradients of a loss of it."""

    def loss(args):
        marks = {"segment_ids": batch.get("segments"), "positions": batch.get("order")}
        out = so.nn.attention(*args, **marks, **how)
        return jnp.sum(out * batch["weight"]), out

    args = batch["query"], batch["key"], batch["value"]
    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(args)
    return out, *grads


@functools.partial(jax.jit, static_argnums=(1, 2))
def on_one_device(batch, causal, window):
    return results(batch, causal=causal, window=window, implementation="xla")


def program(mesh, batch, **how):
    """Return the function of a batch in the per-device view, as the step makes it: tensor is left
    to the partitioner.
    """
    spec = PartitionSpec("data", "context")
    specs = {name: PartitionSpec(*spec[: leaf.ndim]) for name, leaf in batch.items()}
    manual = frozenset(MESH_AXES) - ({"tensor"} if mesh.shape["tensor"] > 1 else set())
    f = functools.partial(results, **how)
    return jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(spec,) * 4,
            axis_names=manual,
            check_vma=False,
        )
    )


def difference(mesh, batch, *, order=None, causal=True, window=None, **how):
    """Return the largest difference between the mesh and one device, of attention and each
    gradient.
    """
    wanted = on_one_device(batch, causal, window)
    permuted_batch = batch if order is None else so.nn.zigzag(batch, mesh, order=order)
    outputs = program(mesh, permuted_batch, causal=causal, window=window, **how)(permuted_batch)
    if order is not None:
        outputs = so.nn.zigzag(outputs, mesh, order=order, inverse=True)
    for a, b in zip(outputs, wanted, strict=True):
        assert a.dtype == b.dtype
    return max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(outputs, wanted, strict=True)
    )
