"""Reducers in a `shard_map` over one axis of a mesh whose other axes are Auto. Each gradient keeps
its sharding of the partitioner, and no more bytes are sent than without a reducer.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so

R = so.reducers
REDUCERS = {
    "int8": lambda: R.int8(),
    "blocks of 64": lambda: R.int8(block_size=64),
    "sign": lambda: R.sign(),
    "bfloat16": lambda: R.exact(jnp.bfloat16),
    "exact": lambda: R.exact(),
}
LEAVES = {  # shape, spec
    "columns": ((64, 256), P(None, "tensor")),
    "rows": ((256, 64), P("tensor", None)),
    "both": ((2, 128, 64), P(None, "tensor", None)),
    "bias": ((512,), P("tensor")),
    "replicated": ((64, 128), P()),
    "conv": ((3, 3, 16, 64), P(None, None, None, "tensor")),
    "odd": ((7, 33), P()),
    "odd columns": ((9, 36), P(None, "tensor")),
    "scalar": ((), P()),
}
MODELS = {
    "products": ["columns", "rows", "bias"],
    "stacked": ["both", "replicated", "scalar"],
    "odd": ["conv", "odd", "odd columns"],
}
MESHES = {"4x2": {"data": 4, "tensor": 2}, "2x4": {"data": 2, "tensor": 4}}


def compiled_mean(reducer, names, mesh):
    """Return the compiled mean of gradients, its result, the gradients of devices, and residuals."""
    size = mesh.shape["data"]
    draw = np.random.default_rng(0)
    grads = {name: draw.normal(size=(size, *LEAVES[name][0])).astype(np.float32) for name in names}
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, P("data", *LEAVES[name][1])))
        for name, leaf in grads.items()
    }

    def local(grads):
        grads = jax.tree.map(lambda leaf: leaf[0], grads)
        state = jax.tree.map(jnp.asarray, reducer.init(grads))
        mean, residual, _ = reducer.transmit(grads, None, state, "data")
        return mean, jax.tree.map(lambda leaf: leaf[None], residual)

    run = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), axis_names={"data"}
        )
    )
    compiled = run.lower(placed).compile()
    return compiled, compiled(placed), grads


@pytest.mark.parametrize(
    ("name", "model", "sizes"),
    tiered(
        itertools.product(REDUCERS, MODELS, MESHES),
        lambda row: row in [("int8", "products", "4x2"), ("sign", "odd", "2x4")],
        ids="-".join,
    ),
)
def test_a_gradient_keeps_its_sharding_and_no_more_than_fp32_is_sent(name, model, sizes, mesh_of):
    mesh = mesh_of(**MESHES[sizes])
    names = MODELS[model]
    compiled, (means, residuals), grads = compiled_mean(REDUCERS[name](), names, mesh)
    size = mesh.shape["data"]
    num_shards = mesh.shape["tensor"]
    elements = 0
    for leaf in names:
        shape, spec = LEAVES[leaf]
        elements += int(np.prod(shape)) // (num_shards if "tensor" in spec else 1)
        assert means[leaf].sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape))
        total = size * np.float64(means[leaf]) + np.float64(residuals[leaf]).sum(0) * (
            name != "exact"
        )
        np.testing.assert_allclose(total, grads[leaf].astype(np.float64).sum(0), atol=1e-4)
    fp32 = 2 * (size - 1) / size * 4 * elements
    sent = sum(c.wire_bytes * c.calls for c in so.hlo.audit(compiled, mesh=mesh).collectives)
    assert sent <= fp32 * 1.01
    if model == "products":
        parts = {"int8": 0.4, "blocks of 64": 0.42, "sign": 0.08, "bfloat16": 0.76}
        assert sent <= fp32 * parts.get(name, 1.01)
