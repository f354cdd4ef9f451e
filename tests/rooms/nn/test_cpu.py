"""What layers compute in another form on CPU is what they compute elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.mesh import analysis
from shardopt.nn._attention import masked_attention, visible
from shardopt.nn._quantized_einsum import linear
from shardopt.trace._jaxprs import equations

LENGTH, WINDOW = 150, 20
WHOLE_ROW = f"{LENGTH},{LENGTH}]"
DRAW = np.random.default_rng(0)
SEGMENTS = np.sort(DRAW.integers(0, 3, (2, LENGTH)), axis=1)


def value_and_gradients(f, *args):
    loss = lambda args: jnp.sum(jnp.sin(f(*args)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(args)


@pytest.mark.parametrize(
    ("window", "segments", "softcap"),
    tiered(
        [(WINDOW, SEGMENTS, 2.0), (None, None, None), (None, SEGMENTS, None)],
        lambda row: row[0] == WINDOW,
    ),
)
def test_attention_in_chunks_has_the_gradients_of_the_whole_row(window, segments, softcap, x64):
    shapes = (2, LENGTH, 4, 8), (2, LENGTH, 2, 8), (2, LENGTH, 2, 6), (4,)
    args = [DRAW.normal(size=shape) for shape in shapes]

    def whole(query, key, value, sinks):
        mask = visible(LENGTH, causal=True, window=window)[None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        return masked_attention(query, key, value, mask, softcap=softcap, sinks=sinks)

    def in_chunks(query, key, value, sinks):
        return so.nn.attention(
            query, key, value, window=window, segment_ids=segments, softcap=softcap, sinks=sinks
        )

    assert f"f64[2,2,2,{WHOLE_ROW}" not in str(jax.make_jaxpr(in_chunks)(*args))
    seen, wanted = value_and_gradients(in_chunks, *args), value_and_gradients(whole, *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), seen, wanted)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("btd,dchk->btchk", ((2, 5, 6), (6, 3, 2, 4))),
        ("bthk,hkd->btd", ((2, 5, 2, 4), (2, 4, 6))),
    ],
)
def test_products_with_matrices_have_the_gradients_of_the_einsum(subscripts, shapes, x64):
    args = [DRAW.normal(size=shape) for shape in shapes]

    def outside(x, weight):
        return linear(subscripts, x, {"weight": weight}, "weight", precision=None)

    product = jax.shard_map(  # as in the step of a strategy
        outside,
        mesh=so.make_mesh(devices=jax.devices()[:1]),
        in_specs=jax.P(),
        out_specs=jax.P(),
    )
    seen = value_and_gradients(product, *args)
    wanted = value_and_gradients(functools.partial(jnp.einsum, subscripts), *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), seen, wanted)

    def gradients(*args):
        return jax.grad(lambda args: jnp.sum(jnp.sin(product(*args))))(args)

    def has_transposes():
        program = jax.make_jaxpr(lambda *args: gradients(*args))(*args)
        return any(eqn.primitive.name == "transpose" for eqn in equations(program.jaxpr))

    assert not has_transposes()
    with analysis():
        assert has_transposes()
    # a product with a Hessian differentiates forward, which custom_vjp refuses
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(jnp.sin(outside(x, args[1])))))(args[0])
    assert np.any(hessian)
