"""Attention over a context axis is that of one device: values and gradients of query, key and value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.contexts import difference, drawn, mesh_of, on_one_device, results
from support.pairwise import all_pairs, few
from support.tiers import tiered

import shardopt as so
from shardopt.nn import flash

FACTORS = {
    "method": ["ring", "all_to_all", "all_gather"],
    "sight": ["causal", "both ways", "window", "wide window"],
    "groups": [8, 4, 2],
    "packed": [False, True],
    "order": [None, "zigzag", "striped"],
    "context": [2, 4, 8],
    "tile": [512, 3],
    "dtype": ["float64", "float32"],
}
SIGHTS = {"causal": {}, "both ways": {"causal": False}, "window": {"window": 5}, "wide window": {"window": 14}}
ROWS = all_pairs(FACTORS)
QUICK = few(ROWS)
ERRORS = {"float64": 1e-10, "float32": 2e-5}


@pytest.mark.parametrize(
    "row", tiered(ROWS, lambda row: row in QUICK, ids=lambda row: "-".join(map(str, row.values())))
)
def test_it_equals_one_device(row, x64, monkeypatch):
    monkeypatch.setattr(flash, "TILE", row["tile"])
    batch = drawn(groups=row["groups"], packed=row["packed"], dtype=np.dtype(row["dtype"]))
    mesh = mesh_of(context=row["context"])
    error = difference(mesh, batch, order=row["order"], method=row["method"], **SIGHTS[row["sight"]])
    assert error < ERRORS[row["dtype"]]


@pytest.mark.parametrize(
    ("sizes", "how"),
    tiered(
        [
            ({"data": 2, "context": 2, "tensor": 2}, {"method": "ring"}),
            ({"data": 2, "context": 2, "tensor": 2}, {"method": "all_to_all"}),
            ({"context": 4, "tensor": 2}, {"method": "all_to_all"}),  # two groups of two
            ({"context": 4, "tensor": 2}, {"method": "all_gather", "order": "zigzag"}),
            ({"data": 2, "context": 4}, {"method": None}),
            ({"data": 2, "context": 2, "tensor": 2}, {"method": "ring", "order": "zigzag", "packed": True}),
        ],
        lambda row: row[0].get("data") and row[1]["method"] == "ring" and not row[1].get("order"),
        ids=str,
    ),
)
def test_beside_data_and_tensor(sizes, how, x64):
    how = dict(how)
    batch = drawn(rows=4, groups=4, packed=how.pop("packed", False))
    assert difference(mesh_of(**sizes), batch, **how) < 1e-10


@pytest.mark.parametrize("method", tiered(["ring", "all_to_all", "all_gather"], lambda method: method == "ring"))
def test_in_the_global_view(method, x64):
    """Everything is left to the partitioner: the layer makes its own region over rows, positions and heads."""
    mesh, batch = mesh_of(data=2, context=2, tensor=2), drawn(rows=4)
    run = jax.jit(so.mesh.on_mesh(mesh, functools.partial(results, method=method)))
    found = run(jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data"))))
    for a, b in zip(found, on_one_device(batch, True, None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("method", tiered(["ring", "all_to_all", "all_gather"], lambda method: method == "ring"))
def test_in_a_branch_that_one_stage_takes(method, x64):
    """A pipeline runs blocks in a `cond` on the stage: a collective that waits for all devices would never return."""
    mesh, batch = mesh_of(pipeline=2, context=4), drawn()
    spec = PartitionSpec("data", "context")

    def one_stage(batch):
        run = functools.partial(results, method=method)
        nothing = lambda batch: jax.tree.map(jnp.zeros_like, jax.eval_shape(run, batch))  # noqa: E731
        mine = jax.lax.cond(jax.lax.axis_index("pipeline") == 1, run, nothing, batch)
        return jax.tree.map(lambda x: jax.lax.psum(x, "pipeline"), mine)

    found = jax.jit(jax.shard_map(one_stage, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(batch)
    for a, b in zip(found, on_one_device(batch, True, None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
