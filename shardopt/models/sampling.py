"""Drawing text from a GPT, one token after another, with keys and values cached."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.core.errors import format_error, plural
from shardopt.models import gpt, layers


def sample(
    params: gpt.Params,
    config: gpt.GPTConfig,
    prompt: gpt.Tokens,
    rng: jax.Array,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "B S"]:
    """Continue a prompt, one token after another, with keys and values cached.

    Args:
      params: the parameters, on one device or sharded.
      config: the shape of the model.
      prompt: token ids, at least one a row.
      rng: a jax random key.
      num_tokens: how many tokens to add.
      temperature: what logits are divided by; 0 takes the likeliest token.
      top_k: draw among this many likeliest tokens only; None among all.

    Returns:
      Token ids [B, T + num_tokens], the prompt first.

    Raises:
      ValueError: if the prompt is empty, the result is longer than `config.max_length`, num_tokens or
        temperature is negative, or top_k is not between 1 and the vocabulary's size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.models import gpt
      >>> config = gpt.GPTConfig(dim=32, num_layers=2)
      >>> params = gpt.init(config, jax.random.key(0))
      >>> sample(params, config, jnp.array([[72, 105]]), jax.random.key(1), num_tokens=3).shape
      (1, 5)
    """
    length = prompt.shape[1] + num_tokens
    wrong = [
        (prompt.shape[1] < 1, "prompt must hold at least one token a row"),
        (num_tokens < 0, f"num_tokens must not be negative, got {num_tokens}"),
        (temperature < 0, f"temperature must not be negative, got {temperature}"),
        (
            top_k is not None and not 1 <= top_k <= config.vocab_size,
            f"top_k must be in 1 to {config.vocab_size}, got {top_k}",
        ),
        (
            length > config.max_length,
            f"{prompt.shape[1]} + {num_tokens} tokens are more than max_length={config.max_length}",
        ),
    ]
    if problems := [message for is_wrong, message in wrong if is_wrong]:
        raise ValueError(format_error("sample", f"{plural(len(problems), 'argument')} cannot be used.", problems))
    return _sample(params, config, jnp.asarray(prompt, jnp.int32), rng, num_tokens, temperature, top_k)


def empty_cache(params: gpt.Params, batch_size: int, length: int, dtype: DTypeLike | None = None) -> layers.KVCache:
    """Return a cache for `advance`: zeros, key and value [L, batch_size, length, H, K]."""
    qkv = params["blocks"]["attention"]["qkv"]
    num_layers, _, _, num_heads, head_dim = qkv.shape
    zeros = jnp.zeros((num_layers, batch_size, length, num_heads, head_dim), dtype or qkv.dtype)
    return layers.KVCache(zeros, zeros)


def advance(
    params: gpt.Params, config: gpt.GPTConfig, tokens: gpt.Tokens, cache: layers.KVCache, start: Int[Array, ""]
) -> tuple[Float[Array, "B T V"], Any]:
    """Return the logits after each of T tokens that stand at positions `start`, `start` + 1, ..., and the cache."""

    def one(x, block_and_cache):
        one_block, block_cache = block_and_cache
        return gpt.apply_block(config, one_block, x, block_cache, start)

    x, written = jax.lax.scan(one, gpt.embed_tokens(config, params, tokens), (params["blocks"], cache))
    return gpt.logits_of(config, params, x), written


@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "temperature", "top_k"))
def _sample(params, config, prompt, rng, num_tokens, temperature, top_k):
    batch_size, prompt_length = prompt.shape
    cache = empty_cache(params, batch_size, prompt_length + num_tokens, config.dtype)
    logits, cache = advance(params, config, prompt, cache, jnp.int32(0))

    def add_one(carry, i):
        logits, cache = carry
        token = _draw(logits, jax.random.fold_in(rng, i), temperature, top_k)
        logits, cache = advance(params, config, token[:, None], cache, prompt_length + i)
        return (logits[:, -1], cache), token

    _, added = jax.lax.scan(add_one, (logits[:, -1], cache), jnp.arange(num_tokens, dtype=jnp.int32))
    return jnp.concatenate([prompt, added.T], axis=1)


def _draw(logits: Float[Array, "B V"], rng: jax.Array, temperature: float, top_k: int | None) -> Int[Array, " B"]:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(rng, logits / temperature).astype(jnp.int32)
