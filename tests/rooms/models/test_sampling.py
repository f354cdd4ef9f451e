"""Sampling: the cached logits equal the logits of the whole sequence, and the draw follows its
arguments.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.host import host_params
from support.tiers import tiered

from shardopt.models import decoder, gpt, moe, sample
from shardopt.models._sampling import advance, empty_caches

CONFIG = gpt.config(dim=32, num_layers=2, num_heads=4, max_length=40)
WINDOWS = (decoder.BlockKind(window=3), decoder.BlockKind(rope=decoder.Rope(base=1e3)))
LATENT = decoder.LatentConfig(query=6, key=5, nope=4, rope=2, value=3)
EXPERTS = decoder.ExpertsConfig(number=4, top_k=2, hidden=8, num_first=1)
SIZES = {"dim": 16, "num_layers": 3, "num_heads": 4, "hidden": 24}
DECODERS = {
    "gpt": CONFIG,
    "windows, sinks and a cap": decoder.DecoderConfig(
        **SIZES,
        num_kv_heads=2,
        kinds=WINDOWS,
        pattern=(0, 1, 0),
        sinks=True,
        attention_softcap=5.0,
        qk_norm="head",
    ),
    "first blocks, latent attention and experts": decoder.DecoderConfig(
        **SIZES, latent=LATENT, experts=EXPERTS
    ),
    "learned positions and biases": decoder.DecoderConfig(
        **SIZES,
        positions=16,
        kinds=(decoder.BlockKind(rope=None),),
        norm="layer",
        qkv_bias=True,
        gated=False,
    ),
    "loads and fused heads of keys": moe.config(**SIZES, num_kv_heads=2, num_experts=4),
}


@pytest.fixture(scope="module")
def params():
    # Larger than at the start of training, so that likeliest tokens differ from place to place.
    return jax.tree.map(lambda leaf: 5 * leaf, host_params(gpt.init, CONFIG))


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(0).integers(0, 256, (3, 10))


@jax.jit
def whole_logits(params, tokens):
    return gpt.logits_of(CONFIG, params, tokens)


@pytest.mark.parametrize(
    "name", tiered(DECODERS, lambda name: name not in ("gpt", "loads and fused heads of keys"))
)
@pytest.mark.parametrize(
    "cuts", tiered([((10,),), ((4, 1, 5),), ((5, 5),)], lambda row: row[0] == (5, 5))
)
def test_cached_logits_are_those_of_the_whole_sequence(name, cuts, prompt):
    config = DECODERS[name]

    # Other numbers than at the start of training, where sinks are zeros and scores are near zero.
    def larger(leaf):
        return (5 * leaf + 0.1 * np.sin(np.arange(leaf.size)).reshape(leaf.shape)).astype(
            leaf.dtype
        )

    params = jax.tree.map(larger, host_params(decoder.init, config))
    caches = empty_caches(config, params, 3, 16)
    start = 0
    parts = []
    for length in cuts:
        tokens = prompt[:, start : start + length]
        part, caches = jax.jit(advance, static_argnums=0)(
            config, params, tokens, caches, np.int32(start)
        )
        parts.append(part)
        start += length
    full_logits = np.asarray(jax.jit(decoder.logits_of, static_argnums=0)(config, params, prompt))
    assert np.abs(np.diff(full_logits, axis=1)).max() > 0.1
    np.testing.assert_allclose(np.concatenate(parts, axis=1), full_logits, rtol=1e-4, atol=2e-4)


def test_greedy_tokens_are_the_likeliest_of_the_whole_sequence(params, prompt):
    result = sample(params, CONFIG, prompt, jax.random.key(1), num_tokens=8, temperature=0.0)
    np.testing.assert_array_equal(result[:, :10], prompt)
    likeliest = jnp.argmax(whole_logits(params, result), axis=-1)
    np.testing.assert_array_equal(result[:, 10:], likeliest[:, 9:-1])


def test_the_key_decides_and_rows_differ(params, prompt):
    same_rows = jnp.broadcast_to(prompt[:1], prompt.shape)

    def draw(seed):
        return np.asarray(
            sample(params, CONFIG, same_rows, jax.random.key(seed), num_tokens=20, temperature=2.0)
        )

    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    assert (draw(0)[0] != draw(0)[1]).any()


def test_top_k_draws_among_the_likeliest(params, prompt):
    result = sample(
        params, CONFIG, prompt, jax.random.key(1), num_tokens=8, temperature=5.0, top_k=3
    )
    ranks = jnp.argsort(jnp.argsort(-whole_logits(params, result), axis=-1), axis=-1)
    drawn = jnp.take_along_axis(ranks[:, 9:-1], result[:, 10:, None], axis=-1)
    assert drawn.max() == 2
    assert drawn.min() == 0
    likeliest_tokens = sample(params, CONFIG, prompt, jax.random.key(1), num_tokens=8, top_k=1)
    np.testing.assert_array_equal(
        likeliest_tokens,
        sample(params, CONFIG, prompt, jax.random.key(2), num_tokens=8, temperature=0.0),
    )


def test_every_wrong_argument_is_named(params):
    message = (
        "sample: 4 arguments cannot be used.\n"
        "  prompt must hold at least one token a row\n"
        "  temperature must not be negative, got -1.0\n"
        "  top_k must be in 1 to 256, got 300\n"
        "  0 + 41 tokens are more than max_length=40"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample(
            params,
            CONFIG,
            jnp.zeros((1, 0), int),
            jax.random.key(0),
            num_tokens=41,
            temperature=-1.0,
            top_k=300,
        )
