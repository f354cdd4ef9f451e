"""A kernel runs in a region that is manual over every axis: jax refuses to lower it for TPU
elsewhere.
"""

import jax
import jax.numpy as jnp
import pytest

import shardopt as so
from shardopt.mesh import under_mesh
from shardopt.trace._jaxprs import equations


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_the_region_of_attention_is_manual_over_axes_of_size_one_too(sizes, mesh_of):
    mesh = mesh_of(**sizes)
    rows = jax.ShapeDtypeStruct((4, 128, 2, 128), jnp.float32)
    with under_mesh(mesh):
        jaxpr = jax.make_jaxpr(
            lambda x: so.nn.attention(x, x, x, causal=True, implementation="splash")
        )(rows)
    (region,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]
    assert set(region.params["newly_manual_axes"]) == set(mesh.axis_names)
    assert len(mesh.axis_names) > len([size for size in mesh.shape.values() if size > 1])
