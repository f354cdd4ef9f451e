"""Partition rules of any kind: specs that fit every leaf, or an error that says which rule or leaf
is the matter.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.fuzz import fuzz, outcome

import shardopt as so
from shardopt.core._errors import calling
from shardopt.partition._rules import match_rules

pytestmark = pytest.mark.fast

LEAVES = [
    ("blocks/attention/qkv", (4, 8)),
    ("blocks/mlp/up", (8, 6)),
    ("embed", (16, 4)),
    ("bias", (3,)),
    ("scale", ()),
]

axes = st.sampled_from(
    ["tensor", "tensor", None, "data", "pipeline", "", 0, 1.5, P.UNCONSTRAINED, b"tensor"]
)
entries = axes | st.lists(axes, max_size=3).map(tuple) | st.lists(axes, max_size=2)
patterns = (
    st.sampled_from(
        [
            "qkv$",
            "up",
            "embed",
            "bias",
            ".*",
            "",
            "(",
            "a{99999999999}",
            "(" * 500,
            "[[a]",
            "(?i)QKV",
            None,
            3,
        ]
    )
    | st.text(max_size=8)
    | st.sampled_from([re.compile("qkv"), re.compile(b"qkv"), b"qkv"])
)


@st.composite
def specs(draw):
    try:
        return P(*draw(st.lists(entries, max_size=4)))
    except (TypeError, ValueError, AssertionError):  # jax itself refuses these
        return draw(st.sampled_from([P(), None, ("tensor",), "tensor"]))


rules = (
    st.lists(st.tuples(patterns, specs()) | st.tuples(patterns) | patterns | specs(), max_size=4)
    | st.dictionaries(st.text(max_size=4), specs(), max_size=2)
    | st.text(max_size=4)
    | st.none()
    | st.integers()
    | specs().map(lambda spec: lambda path, shape: spec)
    | specs().map(lambda spec: iter([("qkv", spec)]))
)


# 30 would split no leaf
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_rules_take_anything(count):
    fitted = []

    def prop(drawn_rules):
        fitted_specs, message = outcome(
            lambda: calling("fsdp")(match_rules)(drawn_rules, LEAVES), "fsdp"
        )
        if message is None:
            fitted.append(fitted_specs)
            for spec, (_, shape) in zip(fitted_specs, LEAVES, strict=True):
                named = [
                    axis
                    for entry in spec
                    for axis in (entry if isinstance(entry, tuple) else (entry,))
                ]
                assert len(spec) == len(shape)
                assert set(named) <= {"tensor", None}
                assert named.count("tensor") <= 1

    fuzz(prop, rules, count=count)
    assert any(axis for fitted_specs in fitted for spec in fitted_specs for axis in spec)


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_strategies_take_any_rules(count):
    params = {
        "w": jax.ShapeDtypeStruct((8, 6), jnp.float32),
        "b": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    mesh = so.make_mesh(data=4, tensor=2)
    tx = optax.adam(0.1)

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + params["b"].sum()

    rule_lists = st.lists(
        st.tuples(st.sampled_from(["w", "b", ".*", "(", "x"]), specs()), max_size=3
    )

    def prop(drawn_rules):
        state, message = outcome(
            lambda: so.fsdp(tx, mesh, loss_fn, rules=drawn_rules).abstract_state(params), "fsdp"
        )
        if message is None:
            for leaf in jax.tree.leaves(state.params):
                assert np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) >= 1

    fuzz(prop, rule_lists, count=count)
