"""Continue a prompt token by token, with any of the decoders of this package."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardopt.core._errors import format_error, plural
from shardopt.models import decoder, gpt, moe

Config = gpt.GPTConfig | moe.MoEConfig | decoder.DecoderConfig


def sample(
    params: gpt.Params,
    config: Config,
    prompt: gpt.Tokens,
    rng: jax.Array,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "B S"]:
    """Continue a prompt token by token; a GPT caches keys and values, and other decoders run the whole row again.

    Args:
      params: the parameters; of a GPT on one device or sharded, of other decoders on one device.
      config: the shape of the model.
      prompt: token ids, at least one per row.
      rng: a jax random key.
      num_tokens: how many tokens to add.
      temperature: the divisor of the logits; 0 takes the likeliest token.
      top_k: draw only from this many likeliest tokens; None draws from all.

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
    sizes = {"vocab_size": config.vocab_size, "max_length": config.max_length}
    check_sampling(prompt.shape[1], num_tokens, temperature, top_k, **sizes)
    return _sample(params, config, jnp.asarray(prompt, jnp.int32), rng, num_tokens, temperature, top_k)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "temperature", "top_k"))
def _sample(
    params: gpt.Params,
    config: Config,
    prompt: Int[Array, "B T"],
    rng: jax.Array,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Int[Array, "B S"]:
    batch_size, prompt_length = prompt.shape
    length = prompt_length + num_tokens
    if isinstance(config, gpt.GPTConfig):
        advance = functools.partial(gpt.advance, params, config)
        cache: Any = gpt.empty_cache(params, batch_size, length, config.dtype)
    else:
        advance = functools.partial(_run_row, params, config)
        cache = jnp.zeros((batch_size, length), jnp.int32)
    logits, cache = advance(prompt, cache, jnp.int32(0))

    def add_token(carry, i):
        logits, cache = carry
        token = draw(logits, jax.random.fold_in(rng, i), temperature, top_k)
        logits, cache = advance(token[:, None], cache, prompt_length + i)
        return (logits[:, -1], cache), token

    _, new_tokens = jax.lax.scan(add_token, (logits[:, -1], cache), jnp.arange(num_tokens, dtype=jnp.int32))
    return jnp.concatenate([prompt, new_tokens.T], axis=1)


def _run_row(
    params: gpt.Params,
    config: moe.MoEConfig | decoder.DecoderConfig,
    tokens: gpt.Tokens,
    row: Int[Array, "B S"],
    start: Int[Array, ""],
) -> tuple[Float[Array, "B T V"], Int[Array, "B S"]]:
    """Return the logits after each of T tokens at positions `start`, ..., and the row with these tokens.

    The whole row runs again. Positions after these tokens have no effect, since attention is causal.
    """
    row = jax.lax.dynamic_update_slice_in_dim(row, tokens, start, axis=1)
    logits = (
        moe.logits_of(config, params, row)
        if isinstance(config, moe.MoEConfig)
        else decoder.logits_of(config, params, row)
    )
    return jax.lax.dynamic_slice_in_dim(logits, start, tokens.shape[1], axis=1), row


def check_sampling(
    prompt_length: int, num_tokens: int, temperature: float, top_k: int | None, *, vocab_size: int, max_length: int
) -> None:
    """Refuse arguments that cannot be used.

    Raises:
      ValueError: if the prompt is empty, the result is longer than `max_length`, num_tokens or temperature is negative, or
        top_k is not between 1 and `vocab_size`.
    """
    rules = [
        (prompt_length < 1, "prompt must hold at least one token a row"),
        (num_tokens < 0, f"num_tokens must not be negative, got {num_tokens}"),
        (temperature < 0, f"temperature must not be negative, got {temperature}"),
        (
            top_k is not None and not 1 <= top_k <= vocab_size,
            f"top_k must be in 1 to {vocab_size}, got {top_k}",
        ),
        (
            prompt_length + num_tokens > max_length,
            f"{prompt_length} + {num_tokens} tokens are more than max_length={max_length}",
        ),
    ]
    if problems := [message for is_wrong, message in rules if is_wrong]:
        raise ValueError(format_error("sample", f"{plural(len(problems), 'argument')} cannot be used.", problems))


def draw(logits: Float[Array, "B V"], rng: jax.Array, temperature: float, top_k: int | None) -> Int[Array, " B"]:
    """Return one token per row, drawn from the `top_k` likeliest; with temperature 0 the likeliest."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(rng, logits / temperature).astype(jnp.int32)
