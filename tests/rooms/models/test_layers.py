"""Layers against what their papers say of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.models import gpt
from shardopt.models._rope import Rope
from shardopt.nn import _norm, _rotary
from shardopt.nn._mlp import mlp
from shardopt.nn._rotary import rotate_by

FUSED = gpt.config()


rms_norm = jax.jit(_norm.rms_norm)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@jax.jit
def rotate(x, positions):
    return rotate_by(x, positions, jnp.asarray(Rope().frequencies(x.shape[-1]), jnp.float32))


@pytest.mark.parametrize("shift", [0, 1, 7, 100])
def test_rotated_products_depend_on_the_distance_only(shift):
    query = draw(0, 1, 5, 2, 8)
    key = draw(1, 1, 5, 2, 8)
    same = np.broadcast_to(query[:, :1], query.shape), np.broadcast_to(key[:, :1], key.shape)

    def products(offset):
        positions = offset + np.arange(5)
        rotated = [np.asarray(rotate(x, positions)) for x in same]
        return np.einsum("bthk,bshk->bhts", *rotated)

    plain_products = products(0)
    shifted_products = products(shift)
    np.testing.assert_allclose(plain_products, shifted_products, atol=1e-4)
    # a Toeplitz matrix
    np.testing.assert_allclose(
        np.diagonal(plain_products[0, 0], 1), plain_products[0, 0, 0, 1], atol=1e-4
    )
    assert abs(plain_products[0, 0, 0, 1] - plain_products[0, 0, 0, 4]) > 1e-2


def test_rotation_is_the_papers():
    x = draw(0, 1, 3, 1, 4)
    t = 2
    frequencies = 10_000.0 ** (-np.array([0.0, 2.0]) / 4)
    pairs = np.asarray(x[0, t, 0, :2]) + 1j * np.asarray(x[0, t, 0, 2:])
    turned = pairs * np.exp(1j * t * frequencies)
    rotated = rotate(x, np.arange(3))[0, t, 0]
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag]), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_rotation_on_tpu_swaps_halves_by_a_product_and_is_the_same(dtype, monkeypatch):
    x = draw(0, 2, 5, 3, 8).astype(dtype)
    positions = np.arange(10).reshape(2, 5)

    def rotated_and_back():
        # a function of its own each time, because the kind of device is read while it is traced
        def run(x, positions):
            rotated, back = jax.vjp(lambda x: rotate.__wrapped__(x, positions), x)
            return rotated, back(x)[0]

        return jax.make_jaxpr(run)(x, positions), jax.jit(run)(x, positions)

    plain, expected = rotated_and_back()
    monkeypatch.setattr(_rotary, "device_kind_or_default", lambda: "TPU v5")
    traced, outputs = rotated_and_back()
    assert "dot_general" in str(traced)
    assert "dot_general" not in str(plain)
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(np.float32(output), np.float32(other), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_step_whose_rotation_is_a_product_is_the_same(monkeypatch):
    config = gpt.config(vocab_size=16, dim=16, num_layers=2, num_heads=2)
    params = gpt.init(config, jax.random.key(0))
    batch = {"tokens": jnp.arange(36).reshape(4, 9) % 16}
    norms = []
    for kind in ("cpu", "TPU v5"):
        monkeypatch.setattr(_rotary, "device_kind_or_default", lambda kind=kind: kind)
        opt = so.fsdp(
            optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), gpt.model(config)
        )
        _, metrics = opt.step(opt.init(params), batch)
        norms.append((metrics["loss"], metrics["grad_norm"]))
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_rms_norm_has_unit_mean_square_whatever_the_scale_of_its_input():
    x = 1e3 * draw(0, 2, 3, 64)
    scale = np.full(64, 2.0, np.float32)
    normed = np.asarray(rms_norm(x, scale))
    np.testing.assert_allclose(np.mean(normed**2, axis=-1), 4.0, rtol=1e-5)
    np.testing.assert_allclose(normed, rms_norm(x / 1e3, scale), rtol=1e-4)


def test_swiglu_gates_with_the_first_of_the_two():
    weights = {"up": draw(0, 4, 2, 6), "down": draw(1, 6, 4)}
    x = draw(2, 1, 3, 4)
    gate = x @ weights["up"][:, 0]
    up = x @ weights["up"][:, 1]
    output = jax.jit(mlp, static_argnums=2)(x, weights, jax.nn.silu)
    np.testing.assert_allclose(
        output, (gate / (1 + np.exp(-gate)) * up) @ weights["down"], rtol=1e-4, atol=1e-5
    )


def test_low_precision_keeps_its_dtype_and_is_normalised_in_float32():
    x = draw(0, 1, 4, 2, 8).astype(jnp.bfloat16)
    assert rotate(x, np.arange(4)).dtype == jnp.bfloat16
    normed = rms_norm(x[..., 0, :], np.ones(8, jnp.bfloat16))
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.mean(np.float32(normed) ** 2, axis=-1), 1, rtol=1e-2)


def test_swiglu_keeps_gate_and_up_for_the_backward_pass_and_nothing_between():
    weights = {"up": draw(0, 8, 2, 32), "down": draw(1, 32, 8)}
    x = draw(2, 4, 5, 8)
    residuals = jax.vjp(lambda x: mlp(x, weights, jax.nn.silu), x)[1]
    of_hidden = [leaf for leaf in jax.tree.leaves(residuals) if leaf.size == 4 * 5 * 32]
    assert len(of_hidden) == 2


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(jnp.float32, 1e-5), pytest.param(jnp.bfloat16, 3e-2, marks=pytest.mark.slow)],
)
def test_attention_is_that_of_jax_and_so_is_its_gradient(dtype, rtol):
    weights = draw(3, 2, 7, 3, 8).astype(dtype)

    def ours(*parts):
        return so.nn.attention(*parts, implementation="xla")

    def theirs(*parts):
        return jax.nn.dot_product_attention(*parts, is_causal=True)

    def compare(f, *parts):
        for candidate, other in zip(
            *(jax.tree.leaves(jax.jit(f(candidate))(*parts)) for candidate in (ours, theirs)),
            strict=True,
        ):
            candidate = np.asarray(candidate, np.float32)
            other = np.asarray(other, np.float32)
            np.testing.assert_allclose(candidate, other, atol=rtol * np.abs(other).max())

    query, key, value = (draw(seed, 2, 7, 3, 8).astype(dtype) for seed in range(3))
    # scores of hundreds: the largest is taken off first
    compare(lambda f: f, 20 * query, 5 * key, value)
    compare(
        lambda f: jax.grad(
            lambda *parts: jnp.sum((f(*parts) * weights).astype(jnp.float32)), (0, 1, 2)
        ),
        query,
        key,
        value,
    )


@pytest.mark.slow
def test_nobody_sees_what_comes_later():
    query, key, value = (jnp.asarray(draw(seed, 1, 6, 2, 4)) for seed in range(3))
    mixed = so.nn.attention(query, key, value)
    other = so.nn.attention(query, key.at[:, 4:].add(9.0), value.at[:, 4:].add(9.0))
    np.testing.assert_array_equal(mixed[:, :4], other[:, :4])
    assert np.abs(mixed[:, 4:] - other[:, 4:]).min() > 0
