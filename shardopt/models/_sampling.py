"""Helpers of sampling from any decoder: check the arguments, and draw a token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardopt.core._errors import format_error, plural


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
