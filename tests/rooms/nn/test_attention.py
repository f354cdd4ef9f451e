"""Attention: every implementation that runs here computes the same, alone and inside a strategy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.trace._jaxprs import equations

T, H, G, K = 160, 4, 2, 16  # neither length nor width fills a tile of the kernel


def drawn(length=T, heads=H, groups=G, dtype=jnp.float32):
    draw = np.random.default_rng(0)
    shapes = [(2, length, heads, K), (2, length, groups, K), (2, length, groups, K)]
    return [draw.normal(size=shape).astype(dtype) for shape in shapes]


def expected(query, key, value, *, causal=True, segment_ids=None, window=None):
    """Return softmax attention, position by position, in numpy."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    repeat = query.shape[2] // key.shape[2]
    scores = np.einsum("bthk,bshk->bhts", query, np.repeat(key, repeat, 2)) / np.sqrt(
        query.shape[-1]
    )
    at = np.arange(query.shape[1])
    ahead = at[:, None] - at[None, :]
    seen = np.ones_like(scores, bool)
    if causal:
        seen &= ahead >= 0
    if window is not None:
        seen &= ahead < window
    if segment_ids is not None:
        seen &= (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum(
        "bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), np.repeat(value, repeat, 2)
    )


SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 4, (2, T)), axis=1)
WAYS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 37},
    "packed": {"segment_ids": SEGMENTS},
    "packed both ways": {"segment_ids": SEGMENTS, "causal": False},
}


@pytest.mark.parametrize(
    ("implementation", "way"),
    tiered(
        itertools.product(["xla", "splash"], WAYS),
        lambda row: (row[0] == "splash" and row[1] != "packed") or row[1] in ("window", "packed"),
    ),
)
def test_attention_equals_plain_softmax(way, implementation):
    args = drawn()
    how = WAYS[way]
    output = jax.jit(functools.partial(so.nn.attention, **how, implementation=implementation))(
        *args
    )
    np.testing.assert_allclose(output, expected(*args, **how), atol=2e-5)


@pytest.mark.parametrize("way", tiered(["causal", "packed"], lambda way: way == "packed"))
def test_gradients_of_splash_are_those_of_xla(way):
    args = drawn()

    def loss(args, implementation):
        return jnp.sum(jnp.sin(so.nn.attention(*args, **WAYS[way], implementation=implementation)))

    gradients, wanted = (
        jax.jit(jax.grad(loss), static_argnums=1)(args, kernel_name)
        for kernel_name in ("splash", "xla")
    )
    for a, b in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def loss_fn(params, batch):
    def split(name):
        return jnp.einsum("btd,dhk->bthk", batch["x"], params[name])

    mixed = so.nn.attention(split("q"), split("k"), split("v"), window=9, implementation="splash")
    return jnp.mean((jnp.einsum("bthk,hkd->btd", mixed, params["out"]) - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    tiered(
        [(2, {"data": 8}), (2, {"data": 4, "tensor": 2}), (1, {"data": 4, "tensor": 2})],
        lambda row: row[0] == 2 and "tensor" in row[1],
    ),
)
def test_kernels_run_on_local_rows_and_heads(groups, sizes, mesh_of):
    """One head of keys and values is on every device of tensor."""
    rng = np.random.default_rng(0)
    heads = {"q": 2, "k": groups, "v": groups}
    params = {
        name: rng.normal(size=(8, count, 4)).astype(np.float32) for name, count in heads.items()
    }
    params["out"] = rng.normal(size=(2, 4, 8)).astype(np.float32)
    batch = {name: rng.normal(size=(8, 12, 8)).astype(np.float32) for name in "xy"}
    rules = [("^[qkv]$" if groups > 1 else "^q$", P(None, "tensor")), ("out", P("tensor"))]
    opt = so.fsdp(optax.sgd(0.1), mesh_of(**sizes), loss_fn, rules=rules, min_shard_elements=1)
    state, metrics = opt.step(opt.init(params), batch)
    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(state.params[name], params[name] - 0.1 * grad, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"groups": 3},
            (
                "attention: 4 heads of queries are not a multiple of 3 heads of keys and values.\n"
                "Fix: give keys and values a number of heads that divides it."
            ),
        ),
        (
            {"window": 3, "causal": False},
            (
                "attention: a window looks back from each position, so it needs causal=True.\n"
                "Fix: pass causal=True, or leave window out."
            ),
        ),
        (
            {"implementation": "flash"},
            (
                "attention: unknown implementation 'flash'.\n"
                "Fix: use 'splash', 'cudnn', 'xla', or None to choose by device."
            ),
        ),
    ],
)
def test_bad_input_is_refused(how, message):
    args = drawn(8, groups=how.pop("groups", G))
    with pytest.raises(ValueError, match="attention") as caught:
        so.nn.attention(*args, **how)
    assert str(caught.value) == message


def test_values_wider_than_keys_are_refused():
    query, key, value = drawn(8)
    with pytest.raises(
        ValueError, match=f"^attention: values are {K} wide, wider than the 3 of queries and keys."
    ):
        so.nn.attention(query[..., :3], key[..., :3], value)


def test_heads_that_tensor_does_not_divide_are_refused(mesh_of):
    args = drawn(8, heads=6, groups=3)
    mesh = mesh_of(data=4, tensor=2)
    with pytest.raises(
        ValueError,
        match=r"3 heads of keys and values cannot be sharded over mesh axis 'tensor' \(size 2\)\.\n"
        r"Fix: repeat them, or choose tensor=1 or 3\.",
    ):
        jax.jit(so.mesh.on_mesh(mesh, lambda *xs: so.nn.attention(*xs, implementation="splash")))(
            *args
        )


def test_a_soft_cap_has_the_gradients_of_plain_softmax_in_tiles_too():
    """Positions choose the tiles, whose backward pass is written by hand.

    The scores are well beyond the cap.
    """
    query, key, value = drawn(length=40)
    query = 8 * query
    cap = 1.5
    scale = 0.3

    def plain(query, key, value):
        key, value = (jnp.repeat(x, H // G, axis=2) for x in (key, value))
        scores = cap * jnp.tanh(scale * jnp.einsum("bthk,bshk->bhts", query, key) / cap)
        mask = jnp.tril(jnp.ones((40, 40), bool))[None, None]
        return jnp.einsum(
            "bhts,bshk->bthk", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), value
        )

    def sines(attention):
        return lambda *args: jnp.sum(jnp.sin(attention(*args)))

    expected_gradients = jax.jit(jax.grad(sines(plain), argnums=(0, 1, 2)))(query, key, value)
    for positions in (None, np.arange(40)):
        capped = functools.partial(so.nn.attention, softcap=cap, scale=scale, positions=positions)
        gradients = jax.jit(jax.grad(sines(capped), argnums=(0, 1, 2)))(query, key, value)
        for ours, expected_gradient in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(ours, expected_gradient, atol=2e-5)


def test_sinks_are_keys_with_values_of_zeros():
    query, key, value = drawn(length=12, groups=H)
    sinks = np.linspace(-1.0, 2.0, H).astype(np.float32)
    scores = np.einsum("bthk,bshk->bhts", query, key) / K**0.5
    scores = np.where(np.tri(12, dtype=bool)[None, None], scores, -np.inf)
    scores = np.exp(
        np.concatenate(
            [scores, np.broadcast_to(sinks[None, :, None, None], (2, H, 12, 1))], axis=-1
        )
    )
    weights = scores / scores.sum(-1, keepdims=True)
    expected_values = np.einsum("bhts,bshk->bthk", weights[..., :-1], value)
    attend = jax.jit(so.nn.attention)
    for positions in (None, np.arange(12)):
        result = attend(query, key, value, sinks=sinks, positions=positions)
        np.testing.assert_allclose(result, expected_values, atol=2e-6)
    with pytest.raises(ValueError, match="cudnn computes neither softcap nor sinks"):
        so.nn.attention(query, key, value, softcap=2.0, implementation="cudnn")


def test_a_factor_of_numpy_does_not_widen_the_queries():
    x = jnp.ones((1, 128, 1, 128), jnp.bfloat16)
    attend = functools.partial(so.nn.attention, scale=1 / np.sqrt(128), implementation="splash")
    kernels = [
        eqn
        for eqn in equations(jax.make_jaxpr(attend)(x, x, x))
        if eqn.primitive.name == "pallas_call"
    ]
    assert {
        variable.aval.dtype for eqn in kernels for variable in eqn.invars if variable.aval.ndim == 4
    } == {x.dtype}
