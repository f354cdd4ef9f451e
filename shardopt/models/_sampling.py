"""Continue a prompt token by token, with any of the decoders of this package."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from shardopt.core import calling, check_integer, check_is_number, format_error, plural
from shardopt.models import decoder
from shardopt.models._decoder_block import KVCache, apply_cached_block
from shardopt.models._decoder_config import DecoderConfig
from shardopt.models._inputs import Inputs, Params, Tokens, check_ids
from shardopt.nn._ids import as_int32, integers


def sample(
    params: Params,
    config: DecoderConfig,
    prompt: Tokens,
    rng: jax.Array,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "B S"]:
    """Continue a prompt token by token, with a cache of keys and values.

    Args:
      params: the parameters, on one device or sharded.
      config: the description of the model, as of `gpt.config` or `from_pretrained`.
      prompt: token ids, at least one per row.
      rng: a jax random key.
      num_tokens: how many tokens to add.
      temperature: the divisor of the logits; 0 takes the likeliest token.
      top_k: draw only from this many likeliest tokens; None draws from all.

    Returns:
      Token ids [B, T + num_tokens], the prompt first. If logits are NaN, tokens of -1 follow.

    Raises:
      TypeError: if the prompt or a number of tokens is not of integers, or temperature is no number.
      ValueError: if the prompt is empty or has an id that the model does not have. If the result is
        longer than `config.max_length` or the table of positions, num_tokens or temperature is negative, or top_k is not
        between 1 and the vocabulary's size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardopt.models import gpt
      >>> config = gpt.config(dim=32, num_layers=2)
      >>> params = gpt.init(config, jax.random.key(0))
      >>> sample(params, config, jnp.array([[72, 105]]), jax.random.key(1), num_tokens=3).shape
      (1, 5)
    """
    prompt = integers("sample", "tokens of the prompt", prompt)
    if prompt.ndim != 2:
        raise ValueError(f"sample: the prompt must be [B, T], got shape {prompt.shape}.")
    max_length = min(config.max_length, config.positions or config.max_length)
    sizes = {"vocab_size": config.vocab_size, "max_length": max_length}
    check_sampling(prompt.shape[1], num_tokens, temperature, top_k, **sizes)
    if not isinstance(prompt, Tracer):
        check_ids("sample", {"tokens": np.asarray(prompt)}, config.vocab_size)
    return _sample(params, config, as_int32(prompt), rng, num_tokens, temperature, top_k)


@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "temperature", "top_k"))
def _sample(
    params: Params,
    config: DecoderConfig,
    prompt: Int[Array, "B T"],
    rng: jax.Array,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Int[Array, "B S"]:
    batch_size, prompt_length = prompt.shape
    caches = empty_caches(config, params, batch_size, prompt_length + num_tokens)
    logits, caches = advance(config, params, prompt, caches, jnp.int32(0))

    def add_token(carry, i):
        logits, caches = carry
        token = draw(logits, jax.random.fold_in(rng, i), temperature, top_k)
        logits, caches = advance(config, params, token[:, None], caches, prompt_length + i)
        return (logits[:, -1], caches), token

    _, new_tokens = jax.lax.scan(
        add_token, (logits[:, -1], caches), jnp.arange(num_tokens, dtype=jnp.int32)
    )
    return jnp.concatenate([prompt, new_tokens.T], axis=1)


Caches = dict[str, KVCache]


def empty_caches(config: DecoderConfig, params: Params, batch_size: int, length: int) -> Caches:
    """Return caches for `advance`: zeros, for each group of stacked blocks."""
    L = config.num_layers - config.num_first
    G = config.kv_heads
    key_width = config.head_width
    value_width = config.latent.value if config.latent else config.head_width
    dtype = config.dtype or params["embedding"].dtype

    def zeros(count: int) -> KVCache:
        return KVCache(
            *(
                jnp.zeros((count, batch_size, length, G, width), dtype)
                for width in (key_width, value_width)
            )
        )

    first = {"first_blocks": zeros(config.num_first)} if config.num_first else {}
    return first | {"blocks": zeros(L)}


def advance(
    config: DecoderConfig, params: Params, tokens: Tokens, caches: Caches, start: Int[Array, ""]
) -> tuple[Float[Array, "B T V"], Caches]:
    """Return the logits after each of T tokens at positions `start`, `start` + 1, ..., and the new
    caches.
    """
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    stream = decoder.embed_tokens(
        config, params, Inputs(tokens, tokens, None, None, positions, None)
    )
    new_caches = {}

    def run_block(stream, block):
        return apply_cached_block(config, block[0], stream, block[1], start)

    for group in ("first_blocks", "blocks") if config.num_first else ("blocks",):
        stream, new_caches[group] = jax.lax.scan(run_block, stream, (params[group], caches[group]))
    return decoder.last_logits(config, params, stream.x), new_caches


def check_sampling(
    prompt_length: int,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    *,
    vocab_size: int,
    max_length: int,
) -> None:
    """Refuse arguments that cannot be used.

    Raises:
      TypeError: if a number has another type.
      ValueError: if the prompt is empty, the result is longer than `max_length`, num_tokens or
        temperature is negative, or top_k is not between 1 and `vocab_size`.
    """
    with calling("sample"):
        check_integer("num_tokens", num_tokens)
        check_is_number("temperature", temperature)
        if top_k is not None:
            check_integer("top_k", top_k)
    rules = [
        (prompt_length < 1, "prompt must hold at least one token a row"),
        (num_tokens < 0, f"num_tokens must not be negative, got {num_tokens}"),
        (not temperature >= 0, f"temperature must not be negative, got {temperature}"),
        (
            top_k is not None and not 1 <= top_k <= vocab_size,
            f"top_k must be in 1 to {vocab_size}, got {top_k}",
        ),
        (
            prompt_length + num_tokens > max_length,
            f"{prompt_length} + {num_tokens} tokens are more than max_length={max_length}",
        ),
    ]
    problems = [message for is_wrong, message in rules if is_wrong]
    if problems:
        raise ValueError(
            format_error("sample", f"{plural(len(problems), 'argument')} cannot be used.", problems)
        )


def draw(
    logits: Float[Array, "B V"], rng: jax.Array, temperature: float, top_k: int | None
) -> Int[Array, " B"]:
    """Return one token per row, drawn from the `top_k` likeliest.

    With temperature 0 the likeliest. -1 where logits are NaN.
    """
    is_nan = jnp.isnan(logits).any(axis=-1)
    if temperature == 0:
        return jnp.where(is_nan, -1, jnp.argmax(logits, axis=-1).astype(jnp.int32))
    if top_k is not None:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    tokens = jax.random.categorical(rng, logits / temperature).astype(jnp.int32)
    return jnp.where(is_nan, -1, tokens)
