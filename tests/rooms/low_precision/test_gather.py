"""Weights that are rounded to 8 bits before they are gathered: values that are not finite, and
refusals.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import shardopt as so
from shardopt.collectives import all_gather
from shardopt.collectives._wire import LeafWire
from shardopt.low_precision._weight import RoundedForm
from shardopt.nn import Rounding
from shardopt.trace._jaxprs import equations

X = np.random.default_rng(0).normal(size=(2, 3, 8))


def gathered_product(weight, mesh, precision, change=lambda weight: weight):
    """Return the product of X with a weight that four devices round, each a quarter of its rows."""
    wire = LeafWire(0, PartitionSpec(), "data", form=RoundedForm(Rounding(precision), 0))

    def run(shard):
        (gathered,) = all_gather([shard], [wire])
        return so.nn.quantized_einsum(
            "btd,df->btf", jnp.asarray(X, shard.dtype), change(gathered), precision=precision
        )

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(weight)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", range(0, 8, 2))
def test_a_channel_with_nan_or_infinity_on_one_device_is_nan(row, value, mesh_of):
    """A maximum over devices drops NaN on CPU, and the NaN would be rounded to 0."""
    weight = (
        jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32).at[row, 1].set(value)
    )
    y = gathered_product(weight, mesh_of(data=4), "int8")
    expected = so.nn.quantized_einsum(
        "btd,df->btf", jnp.asarray(X, jnp.float32), weight, precision="int8"
    )
    assert np.isnan(expected[..., 1]).all()
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_scales_of_sharded_channels_travel_together(mesh_of):
    """Two weights of different shapes, one with two parts, are sharded on their last dims."""
    rng = np.random.default_rng(1)
    rounding = Rounding("int8")
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 4), (8, 2, 12))]
    wires = [
        LeafWire(dim, PartitionSpec(), "data", form=RoundedForm(rounding, dim)) for dim in (1, 2)
    ]

    def products(weights):
        x = jnp.asarray(X, jnp.float32)
        subscripts = ("btd,df->btf", "btd,dcf->btcf")
        return [
            so.nn.quantized_einsum(s, x, w, precision="int8")
            for s, w in zip(subscripts, weights, strict=True)
        ]

    last = [PartitionSpec(None, "data"), PartitionSpec(None, None, "data")]
    gathered = jax.shard_map(
        lambda shards: products(all_gather(shards, wires)),
        mesh=mesh_of(data=4),
        in_specs=(last,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    for y, expected in zip(jax.jit(gathered)(weights), products(weights), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    sent = {
        eqn.invars[0].aval.dtype.name: eqn.invars[0].aval.size
        for eqn in equations(jax.make_jaxpr(gathered)(weights))
        if "gather" in str(eqn.primitive)
    }
    assert sent == {"int8": 8 + 48, "float32": 1 + 6}


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_cast_of_the_arrays_within_a_weight_is_refused(precision, mesh_of):
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)
    mesh = mesh_of(data=4)

    def cast(leaf):
        return leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    message = "the arrays within a weight that BlockModel.rounded names were cast"
    for change in (cast, lambda leaf: leaf.astype(jnp.float32), lambda leaf: leaf * 0.5):
        with pytest.raises(TypeError, match=message):
            gathered_product(weight, mesh, precision, functools.partial(jax.tree.map, change))
    cast_leaves = functools.partial(
        jax.tree.map, lambda leaf: leaf.astype(weight.dtype), is_leaf=lambda x: hasattr(x, "astype")
    )
    expected = so.nn.quantized_einsum(
        "btd,df->btf", jnp.asarray(X, jnp.float32), weight, precision=precision
    )
    np.testing.assert_allclose(
        gathered_product(weight, mesh, precision, cast_leaves), expected, rtol=1e-6
    )


ROUNDED = [
    ({"b": Rounding("int8")}, "b: not a leaf of a block"),
    ({"a": "int8"}, "a: 'int8' is not a so.nn.Rounding"),
    ({"a": Rounding("int4")}, "a: unknown precision 'int4'"),
    ({"a": Rounding("int8", dtype=jnp.int32)}, "a: int32 is not floating"),
    (
        {"a": Rounding("int8", summed=2)},
        "a: shape (8, 4) has no product that sums over its first 2 dims",
    ),
    (
        {"a": Rounding("int8", summed="1")},
        "a: shape (8, 4) has no product that sums over its first '1' dims",
    ),
    (None, "BlockModel.rounded must be a dict of key path -> so.nn.Rounding, got None."),
]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(("rounded", "message"), ROUNDED, ids=[message for _, message in ROUNDED])
def test_what_does_not_fit_the_blocks_is_refused(rounded, message, evaluates, mesh_of):
    model = so.BlockModel(
        lambda outer, batch: batch, lambda weights, x: x, lambda outer, x, batch: x.mean()
    )
    wrong = model._replace(rounded=rounded)
    models = {"evaluate_fn": wrong} if evaluates else {}
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), model if evaluates else wrong, **models)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        opt.init({"blocks": {"a": jnp.ones((2, 8, 4))}})
