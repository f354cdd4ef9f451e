"""What attention over a context axis sends and keeps: the formulas of its docstring, read off
compiled programs and traces.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.contexts import drawn, mesh_of, results
from support.tiers import tiered

import shardopt as so
from shardopt.remat._split_backward import split_backward

B = 2
T = 32
H = 8
K = 4


def formula(method, C, G, hops=None, dtype=4):
    """Return the bytes that a device sends in a forward and backward pass."""
    length = T // C
    keys = 2 * B * length * G * K * dtype
    if method != "all_to_all":
        return (C - 1 if hops is None else hops) * keys * (2 + 4 / dtype)
    d = np.gcd(C, G)
    exchanges = 2 * 2 * (d - 1) / d * B * length * (H + G) * K * dtype
    return exchanges + (C // d - 1) * keys * (2 + 4 / dtype)


@pytest.mark.parametrize(
    ("method", "C", "G", "how"),
    tiered(
        [
            ("ring", 4, 4, {}),
            ("ring", 2, 8, {}),
            ("ring", 8, 2, {"window": 6, "hops": 2}),
            ("ring", 8, 2, {"window": 5, "hops": 1}),
            ("all_gather", 4, 4, {}),
            ("all_to_all", 4, 4, {}),
            ("all_to_all", 8, 4, {}),
            ("all_to_all", 2, 8, {}),
        ],
        lambda row: (
            row in [("all_gather", 4, 4, {}), ("all_to_all", 4, 4, {})] or row[3].get("hops") == 2
        ),
        ids=str,
    ),
)
def test_the_wire_carries_the_bytes_of_the_formulas(method, C, G, how):
    how = dict(how)
    wanted = 2 * formula(method, C, G, how.pop("hops", None))
    report = so.hlo.audit(two_layers(method, C, G, **how), mesh=mesh_of(context=C))
    assert report.total_wire_bytes == wanted
    kinds = {
        "ring": {"collective-permute"},
        "all_gather": {"all-gather", "reduce-scatter"},
        "all_to_all": {"all-to-all"} | ({"collective-permute"} if C > G else set()),
    }
    assert set(report.by_kind()) == kinds[method]
    if method == "ring":
        # hops are a loop: as many instructions on any number of devices
        assert len(report.collectives) <= 16


def two_layers(method, C, G, **how):
    """Return the compiled loss and gradients of a scan over layers: forward and backward are loops
    of their own, as in models.

    XLA:CPU drops barriers. With one layer, its backward pass would reuse the gathered arrays of the
    forward pass."""
    layers = [jax.ShapeDtypeStruct((2, B, T, heads, K), np.float32) for heads in (H, G, G)]

    def loss(layers):
        def one(total, layer):
            return (total + jnp.sum(so.nn.attention(*layer, method=method, **how) ** 2), None)

        return jax.lax.scan(one, jnp.float32(0), layers)[0]

    spec = PartitionSpec(None, None, "context")
    step = jax.shard_map(
        jax.grad(loss), mesh=mesh_of(context=C), in_specs=(spec,), out_specs=spec, check_vma=False
    )
    return jax.jit(step).lower(layers).compile()


def block(weights, x):
    """A layer: projections, attention, projection."""
    query, key, value = (jnp.einsum("btd,dhk->bthk", x[0], w) for w in weights[:3])
    mixed = so.nn.attention(query, key, value, method="ring")
    return [x[0] + jnp.einsum("bthk,hkd->btd", mixed, weights[3])]


def on_context(f, *args):
    """Trace, or run under jit, a function of weights and an x whose positions are split over four
    devices.
    """
    x = PartitionSpec(None, "context")
    weights = PartitionSpec("context")
    return jax.shard_map(
        f,
        mesh=mesh_of(context=4),
        in_specs=(PartitionSpec(), x),
        out_specs=(x, weights),
        check_vma=False,
    )


def weights_and_x():
    rng = np.random.default_rng(0)
    shapes = [(6, H, K), (6, 4, K), (6, 4, K), (H, K, 6)]
    return [rng.normal(size=shape) / 4 for shape in shapes], rng.normal(size=(B, T, 6))


def passes_at_once(weights, x):
    y, vjp = jax.vjp(lambda weights, x: block(weights, [x])[0], weights, x)
    dw, dx = vjp(y)
    return dx, [w[None] for w in dw]


@pytest.mark.slow  # remat/test_split_backward.py splits blocks of every kind
def test_the_backward_pass_can_be_split(x64):
    """As zero-bubble schedules do: the weight gradient later, of residuals that are this device's
    alone.
    """
    weights, x = weights_and_x()
    sizes = []

    def split(weights, x):
        passes = split_backward(block, weights, [x], trained=range(4))
        y, residuals = passes.forward(weights, [x])
        (dx,), deferred = passes.backward(weights, residuals, y)
        sizes.extend(leaf.size for leaf in [*passes.residuals, *passes.deferred])
        return dx, [
            w[None]
            for w in passes.weight(
                weights, [residuals[i] for i in passes.weight_residuals], deferred
            )
        ]

    split_gradients = jax.jit(on_context(split))(weights, x)
    wanted = jax.jit(on_context(passes_at_once))(weights, x)
    for a, b in zip(jax.tree.leaves(split_gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    assert max(sizes) <= B * T // 4 * H * K


def test_a_ring_that_is_kept_by_name_does_not_run_again():
    weights, x = weights_and_x()

    def permutes(policy):
        checkpointed_block = jax.checkpoint(block, policy=policy)

        def f(weights, x):
            _, vjp = jax.vjp(lambda weights, x: checkpointed_block(weights, [x])[0], weights, x)
            dw, dx = vjp(x)
            return dx, [w[None] for w in dw]

        return str(jax.make_jaxpr(jax.jit(on_context(f)))(weights, x)).count("ppermute[")

    policies = jax.checkpoint_policies
    named = permutes(policies.save_only_these_names("attention"))
    without = permutes(policies.everything_saveable)
    assert named == without > 0
    assert (
        permutes(policies.nothing_saveable) == without + 4
    )  # keys and values, the first hop and the loop over the others


@pytest.mark.slow
def test_rings_of_replicas_that_train_apart_stay_within_a_replica(x64):
    """`local_sgd` maps a step over replicas: every ring stays in its own."""
    mesh = mesh_of(data=2, context=4)
    batch = drawn(rows=2)
    replica_results = functools.partial(results, method="ring")
    spec = PartitionSpec(None, "context")
    step = jax.shard_map(
        replica_results,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={"data", "context"},
        check_vma=False,
    )
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), batch)
    outputs = jax.jit(jax.vmap(step, spmd_axis_name="data"))(stacked)
    for i in range(2):
        wanted = jax.jit(functools.partial(results, implementation="xla"))(
            jax.tree.map(operator.itemgetter(i), stacked)
        )
        for a, b in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-9)
