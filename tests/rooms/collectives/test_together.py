"""Small leaves travel together on CPU, and arrive as they would alone."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.collectives import (
    SMALL_BUCKET_BYTES,
    LeafWire,
    all_gather,
    all_reduce,
    per_device,
    reduce_scatter,
)
from shardopt.collectives import _buckets as together
from shardopt.collectives._shards import psum_scatter

pytestmark = pytest.mark.fast

SHAPES = [((8, 3), 0), ((5, 12), 1), ((4,), 0), ((2, 8, 4), 2), ((3, 5), None), ((16, 2), 0)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32, jnp.bfloat16]


def leaves():
    rng = np.random.default_rng(0)
    drawn = [rng.integers(-8, 8, shape) for (shape, _), _ in zip(SHAPES, DTYPES, strict=True)]
    return [jnp.asarray(x, dtype) for x, dtype in zip(drawn, DTYPES, strict=True)]


def spec(dim):
    return P() if dim is None else P(*[None] * dim, "data")


def compiled(f, mesh, *, out_specs):
    """Return a function of the leaves, split on their dims, and the kinds of its program's
    collectives.
    """
    split = per_device(f, mesh, in_specs=([spec(dim) for _, dim in SHAPES],), out_specs=out_specs)
    lowered = jax.jit(so.mesh.on_mesh(mesh, split)).lower(leaves())
    collectives = so.hlo.audit(lowered, mesh=mesh).collectives
    return lowered.compile(), [collective.kind for collective in collectives]


DIMS = [dim for _, dim in SHAPES]
SPECS = [P()] * len(SHAPES)
WIRES = [LeafWire(dim, P(), "data") for dim in DIMS]


def test_gathered_leaves_are_those_that_travelled_alone(mesh_of):
    def f(xs):
        return all_gather(xs, WIRES)

    run, sent = compiled(f, mesh_of(data=4), out_specs=SPECS)
    for gathered, x in zip(run(leaves()), leaves(), strict=True):
        np.testing.assert_array_equal(gathered, x)
    assert sent == ["all-gather"] * 2, "one a dtype"

    def f(xs):
        return all_gather(xs, WIRES, bucket_bytes=0)

    _, sent = compiled(f, mesh_of(data=4), out_specs=SPECS)
    assert sent == ["all-gather"] * 5


@pytest.mark.parametrize(("bucket_bytes", "sums"), [(SMALL_BUCKET_BYTES, 2), (0, 5)])
def test_scattered_sums_are_those_of_leaves_that_travelled_alone(bucket_bytes, sums, mesh_of):
    def f(xs):
        rank = jax.lax.axis_index("data")
        gathered = [(rank + 1).astype(x.dtype) * x for x in all_gather(xs, WIRES)]
        return reduce_scatter(gathered, WIRES, bucket_bytes=bucket_bytes)

    run, sent = compiled(f, mesh_of(data=4), out_specs=[spec(dim) for dim in DIMS])
    for part, x, dim in zip(run(leaves()), leaves(), DIMS, strict=True):
        np.testing.assert_array_equal(part, x * (10 if dim is not None else 1))
    assert sent.count("reduce-scatter") == sums


def test_sums_are_those_of_leaves_that_travelled_alone(mesh_of):
    def f(xs):
        return all_reduce([x * 2 for x in xs], ["data"])

    split = per_device(f, mesh_of(data=4), in_specs=(SPECS,), out_specs=SPECS)
    for total, x in zip(
        jax.jit(so.mesh.on_mesh(mesh_of(data=4), split))(leaves()), leaves(), strict=True
    ):
        np.testing.assert_array_equal(total, 8 * x)


def test_a_leaf_alone_in_a_bucket_is_sent_in_its_shape(mesh_of):
    """The mutation: a bucket of a single leaf is flattened too, which copies the leaf before and
    after the collective.
    """
    sent = []

    def gather(x, axis, dim):
        sent.append(("gather", x.shape, dim))
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True)

    def scatter(x, axis, dim):
        sent.append(("scatter", x.shape, dim))
        return psum_scatter(x, axis, dim)

    def f(xs):
        gathered = together.all_gather_buckets(xs, dims, "data", gather, bucket_bytes=128)
        return together.reduce_scatter_buckets(gathered, dims, "data", scatter, bucket_bytes=128)

    # 96, 480, 32 and 64 bytes: the second leaf is above the limit, and the last two share a bucket
    leaves = [jnp.ones((8, 3)), jnp.ones((5, 24)), jnp.ones(8), jnp.ones((2, 8))]
    dims = [0, 1, 0, 1]
    specs = [spec(dim) for dim in dims]
    mesh = mesh_of(data=2)
    jax.eval_shape(
        so.mesh.on_mesh(mesh, per_device(f, mesh, in_specs=(specs,), out_specs=specs)), leaves
    )
    assert sent == [
        ("gather", (4, 3), 0),
        ("gather", (5, 12), 1),
        ("gather", (1, 4 + 8), 0),
        ("scatter", (8, 3), 0),
        ("scatter", (5, 24), 1),
        ("scatter", (2, 4 + 8), 0),
    ]


@pytest.mark.parametrize(
    ("kind", "processes", "sums"),
    [("cpu", 2, 4), ("cpu", 1, 5), ("TPU v5 lite", 2, 5), ("NVIDIA H200", 2, 5)],
)
def test_groups_are_bounded_and_on_accelerators_of_one(kind, processes, sums, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    sizes = [2**18, 2**18, 2**18, 2**20, 1]  # float32: 1 MB three times, 4 MB, 4 bytes
    mesh = types.SimpleNamespace(abstract_device=types.SimpleNamespace(device_kind=kind))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    monkeypatch.setattr(together, "BUCKET_BYTES", 2**21)
    jaxpr = jax.make_jaxpr(
        lambda xs: together.all_reduce_buckets(xs, ("data",)), axis_env=[("data", 4)]
    )([jnp.zeros(size) for size in sizes])
    assert len(re.findall(r"= psum", str(jaxpr))) == sums
