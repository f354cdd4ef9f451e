"""flax models whose dims have names: the names become tensor rules, and training equals one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import shardopt as so

AXES = [("mlp", "tensor"), ("embed", None)]
NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}


def linen_model():
    def dense(width, name):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), NAMES[name])
        return linen.Dense(width, kernel_init=init, name=name)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return dense(8, "down")(jnp.tanh(dense(32, "up")(x)))

    boxed = Net().init(jax.random.key(0), jnp.zeros((1, 12)))
    params = linen.unbox(boxed)
    specs = linen.get_partition_spec(boxed)
    return params, specs, lambda params, x: Net().apply(params, x)


def nnx_model():
    def linear(sizes, name, rngs):
        init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), NAMES[name], eager_sharding=False
        )
        return nnx.Linear(*sizes, kernel_init=init, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = linear((12, 32), "up", rngs)
            self.down = linear((32, 8), "down", rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    return params, nnx.get_partition_spec(params), lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.parametrize("make", [pytest.param(linen_model, marks=pytest.mark.slow), nnx_model])
def test_names_of_dims_become_rules_that_train_as_one_device(make, mesh_of):
    params, specs, apply = make()
    rules = so.interop.rules_from_logical_axes(specs, AXES)
    # nnx has a level more
    specs_by_path = {pattern.removesuffix("/value$").strip("^$"): spec for pattern, spec in rules}
    specs_by_path = {path.removeprefix("params/"): spec for path, spec in specs_by_path.items()}
    assert specs_by_path == {"up/kernel": P(None, "tensor"), "down/kernel": P("tensor")}

    def loss_fn(params, batch):
        return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)

    tx = optax.adam(1e-2)
    opt = so.fsdp(tx, mesh_of(data=2, tensor=2), loss_fn, rules=rules, min_shard_elements=1)
    state = opt.init(params)
    reference = params
    moments = tx.init(params)
    gradient = jax.jit(jax.grad(loss_fn))
    update = jax.jit(tx.update)
    split = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2]
    assert set(split) == {P("data", "tensor"), P("tensor", "data")}
    for step in range(3):
        draw = np.random.default_rng(step)
        batch = {
            "x": draw.normal(size=(8, 12)).astype(np.float32),
            "y": draw.normal(size=(8, 8)).astype(np.float32),
        }
        state, _ = opt.step(state, batch)
        updates, moments = update(gradient(reference, batch), moments, reference)
        reference = optax.apply_updates(reference, updates)
    for trained_leaf, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(reference), strict=True
    ):
        np.testing.assert_allclose(trained_leaf, other, rtol=2e-5, atol=2e-6)


def test_stacked_blocks_the_order_of_names_and_several_names_a_dim():
    specs = {
        "blocks": {"w": P("layers", "embed", ("heads", "width")), "norm": P("layers", "embed")},
        "both": P("heads", "mlp"),
    }
    names = [
        ("mlp", "tensor"),
        ("heads", "tensor"),
        ("embed", None),
        ("layers", None),
        ("width", None),
    ]
    assert so.interop.rules_from_logical_axes(specs, names, stacked="^blocks/") == [
        ("^blocks/w$", P(None, "tensor")),
        ("^both$", P(None, "tensor")),  # mlp comes first
    ]
    assert so.interop.rules_from_logical_axes(specs, names)[0] == (
        "^blocks/w$",
        P(None, None, "tensor"),
    )


@pytest.mark.parametrize(
    ("specs", "axes", "error", "message"),
    [
        (
            {"a": P("embed", "mpl"), "b": P("kv")},
            AXES,
            ValueError,
            (
                "rules_from_logical_axes: 2 logical axes without a rule.\n  a: 'mpl'\n  b:"
                ' \'kv\'\nFix: give each ("name", "tensor") or ("name", None).'
            ),
        ),
        (
            {"a": P("embed")},
            [("embed", "fsdp"), ("mlp", "tensor")],
            ValueError,
            (
                "rules_from_logical_axes: 1 rule for another axis than tensor.\n  'embed': 'fsdp'\n"
                "Fix: map these to None; the strategy places data, pipeline and replica itself."
            ),
        ),
        (
            {"a": np.zeros(3)},
            AXES,
            TypeError,
            (
                "rules_from_logical_axes: leaves must be PartitionSpecs of logical axes.\n  a:"
                " ndarray\nFix: pass what flax.linen.get_partition_spec or"
                " flax.nnx.get_partition_spec returns."
            ),
        ),
    ],
)
def test_bad_input_is_refused(specs, axes, error, message):
    with pytest.raises(error) as caught:
        so.interop.rules_from_logical_axes(specs, axes)
    assert str(caught.value) == message
