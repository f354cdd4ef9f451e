"""Which dim of a leaf goes over data, which leaves stay whole and why."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.core._errors import calling
from shardopt.partition import LeafPlanOptions, plan_leaves, shard_axes, state_specs
from shardopt.partition._plan import LeafPlan, largest_divisible_dim

pytestmark = pytest.mark.fast


@calling("zero")
def plan(shapes, mesh, rules=(), *, stacked=False, min_elements=1):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return plan_leaves(params, mesh, LeafPlanOptions(rules, stacked, min_elements, bool))


def test_data_takes_the_largest_dim_that_it_divides(mesh_of):
    plans = plan({"a": (6, 8, 16), "b": (16, 16), "c": (12, 7)}, mesh_of(data=4))
    assert [plans[name].dim for name in "abc"] == [2, 0, 0]


def test_tensor_keeps_its_dim_and_data_takes_another(mesh_of):
    plans = plan(
        {"a": (8, 64), "b": (64, 8)},
        mesh_of(data=4, tensor=2),
        [("a", P(None, "tensor")), ("b", P("tensor"))],
    )
    assert plans["a"].spec(sharded=True) == P("data", "tensor")
    assert plans["b"].spec(sharded=True) == P("tensor", "data")
    assert plans["b"].spec(sharded=False) == P("tensor", None)
    assert plans["b"].data_spec(sharded=True) == P(None, "data")


def test_what_stays_whole_says_why(mesh_of):
    plans = plan(
        {"odd": (3, 5), "small": (4,), "taken": (8, 3)},
        mesh_of(data=4, tensor=2),
        [("taken", P("tensor"))],
        min_elements=5,
    )
    assert {name: leaf_plan.reason for name, leaf_plan in plans.items()} == {
        "odd": "shape (3, 5): no dim is divisible by data=4",
        "small": "4 elements, fewer than min_shard_elements=5",
        "taken": "shape (8, 3): the only dim divisible by data=4 is split over tensor",
    }
    assert all(leaf_plan.dim is None for leaf_plan in plans.values())


def test_stacked_blocks_are_judged_one_block_at_a_time(mesh_of):
    shapes = {"blocks": {"w": (8, 4, 12), "b": (8, 4)}, "w": (8, 4)}
    plans = plan(
        shapes,
        mesh_of(data=4, tensor=2),
        [("^blocks/w", P("tensor"))],
        stacked=True,
        min_elements=5,
    )
    block = plans["blocks"]["w"]
    assert (block.dim, block.tensor, block.stacked) == (2, P(None, "tensor", None), True)
    assert plans["blocks"]["b"].dim is None  # 4 elements a block, though 32 in all
    assert plans["w"].dim == 0


@pytest.mark.parametrize(
    ("lengths", "neighbours", "sizes"),
    [
        ((7, 9), ("6 or 8", "8 or 10"), "1"),
        ((9, 15), ("8 or 10", "14 or 16"), "1 or 3"),
        ((45, 1), ("44 or 46", "2"), "1"),
        ((45, 90), ("44 or 46", None), "1, 3, 5, 9, 15 or 45"),
    ],
)
def test_an_uneven_tensor_dim_is_refused_with_every_leaf_and_the_sizes_that_divide_all(
    lengths, neighbours, sizes, mesh_of
):
    rules = [("a", P(None, "tensor")), ("b", P("tensor")), ("whole", P("tensor"))]
    shapes = {"a": (8, lengths[0]), "b": (lengths[1],), "whole": (11,)}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan(shapes, mesh_of(data=4, tensor=2), [*rules, ("whole", "if_divisible")])
    title, *lines, fix = str(caught.value).split("\n")
    assert title.endswith("cannot be split over mesh axis 'tensor' (size 2).")
    assert lines == [
        f"  {name}: shape {shapes[name]}; dim {dim} is {length}, which tensor=2 does not divide; it"
        f" divides {lengths_that_do}"
        for name, dim, length, lengths_that_do in zip(
            "ab", (1, 0), lengths, neighbours, strict=True
        )
        if lengths_that_do
    ]
    assert fix == f"Fix: choose tensor={sizes}, pad the dim, or change the rule."


def test_an_idle_tensor_axis_is_refused(mesh_of):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan({"a": (8, 8)}, mesh_of(data=4, tensor=2))
    assert (
        str(caught.value)
        == "zero: mesh axis 'tensor' (size 2) is above 1, but nothing is split over it.\nFix: give"
        " rules=[(regex, PartitionSpec), ...] that name 'tensor', or make the mesh with"
        " tensor=1."
    )


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(1, 8), st.data())
def test_the_chosen_dim_divides_and_is_the_largest(shape, size, data):
    taken = tuple(data.draw(st.sampled_from([None, "tensor"])) for _ in shape)
    dim = largest_divisible_dim(tuple(shape), size, taken)
    fitting = [
        n for n, used in zip(shape, taken, strict=True) if n and n % size == 0 and used is None
    ]
    if dim is None:
        assert not fitting
    else:
        assert taken[dim] is None
        assert shape[dim] == max(fitting) or math.prod(shape) >= 2**20


@pytest.mark.parametrize(
    ("shape", "size", "dim"),
    [
        ((14336, 4096), 64, 0),  # 224 and 64 rows
        ((14336, 4096), 256, 1),  # 56 rows are 3.5 tiles of 2-byte numbers, and 16 are one
        ((4096, 2, 14336), 512, 0),  # 8 and 28 rows
        ((128256, 4096), 64, 0),  # 2004 rows need few more
        ((56, 32), 2, 0),  # small
    ],
)
def test_shards_of_a_large_leaf_fill_tiles_if_they_can(shape, size, dim):
    assert largest_divisible_dim(shape, size, (None,) * len(shape)) == dim


STATEFUL = {
    "adam": optax.adam(1.0),
    "adafactor": optax.adafactor(1.0, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1.0),
    "sm3": optax.sm3(1.0),
    "schedule_free": optax.contrib.schedule_free_adamw(1.0),
    "masked": optax.masked(optax.adam(1.0), {"w": True, "b": False}),
    "multi": optax.multi_transform(
        {"x": optax.adam(1.0), "y": optax.sgd(1.0, momentum=0.9)}, {"w": "x", "b": "y"}
    ),
    "inject": optax.inject_hyperparams(optax.adamw)(1e-3),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_optimizer_state_lives_as_its_parameter_does_and_else_where_it_fits(name, mesh_of):
    mesh = mesh_of(data=4, tensor=2)
    plans = plan({"w": (16, 8), "b": (8,)}, mesh, [("w", P(None, "tensor"))])
    abstract = {
        name: jax.ShapeDtypeStruct(leaf_plan.shape, leaf_plan.dtype)
        for name, leaf_plan in plans.items()
    }
    state = jax.eval_shape(STATEFUL[name].init, abstract)
    flat = jax.tree_util.tree_leaves_with_path(plans, is_leaf=lambda x: isinstance(x, LeafPlan))
    axes = shard_axes(mesh.shape)
    sizes = dict(mesh.shape)
    specs = state_specs(state, flat, sharded=True, axes=axes, sizes=sizes, min_shard_elements=1)
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(
        state
    )
    placed = zip(
        jax.tree.leaves(state),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    )
    for leaf, spec in placed:
        if leaf.shape == (16, 8):
            assert spec == P("data", "tensor")
        elif leaf.shape in ((16,), (8,)):
            assert spec == P("data")
        else:
            assert spec == P(*[None] * leaf.ndim)


def test_mesh_of_one_makes_no_trouble(mesh_of):
    assert plan({"a": (3,)}, mesh_of(data=1))["a"].dim == 0
    assert so.make_mesh(devices=jax.devices()[:1]).size == 1
