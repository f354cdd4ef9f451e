"""Cross-entropy of the next token, a few positions at a time, so that logits of all of them are never held."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.core.arguments import check_count
from shardopt.mesh import is_analysed


def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    chunk: int | None = None,
    logits_dtype: DTypeLike | None = None,
) -> Float[Array, "B T"]:
    """Return -log softmax(x head^T)[target] in nats, of each position.

    Logits are products in float32 at least, unless `logits_dtype` rounds them; the softmax and its sums are in float32 at
    least. The target's logit is picked by a mask and a sum rather than an index, so a vocabulary sharded over tensor is
    reduced where it lies instead of being gathered.

    **Equivalence**: the same for every chunk, up to summation order; `logits_dtype` is another rounding, on any number of
    devices the same.

    **Memory**: B T V logits, kept for the backward pass, and as many gradients. With `chunk` B chunk V at a time, forwards
    and, computed again, backwards.

    **Communication**: none over data; with the vocabulary sharded over tensor, sums of [B, chunk] over tensor.

    Args:
      x: [B, T, D], what the last norm returned.
      head: [V, D], the embedding of each token of the vocabulary.
      targets: [B, T], token ids.
      chunk: positions at a time; the last chunk may be shorter. None: all at once.
      logits_dtype: to which logits are rounded; bfloat16 halves what is held, as MaxText and torch's autocast do. None:
        float32 at least.

    Returns:
      [B, T], float32 at least.

    Raises:
      TypeError: if chunk is not an integer.
      ValueError: if it is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> x, head, targets = jnp.zeros((2, 5, 4)), jnp.ones((8, 4)), jnp.zeros((2, 5), int)
      >>> bool(jnp.allclose(cross_entropy(x, head, targets, chunk=2), jnp.log(8)))
      True

    References:
      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, for why.
    """
    if chunk is not None:
        check_count("cross_entropy", "chunk", chunk, least=1)
    T = x.shape[1]
    if chunk is None or chunk >= T or is_analysed():
        return _nats(x, head, targets, logits_dtype)
    count, left = divmod(T, chunk)
    some = jax.checkpoint(functools.partial(_nats, dtype=logits_dtype), prevent_cse=False)
    cut = lambda a: jnp.moveaxis(a[:, : count * chunk].reshape(a.shape[0], count, chunk, *a.shape[2:]), 1, 0)  # noqa: E731
    _, nats = jax.lax.scan(lambda _, one: (None, some(one[0], head, one[1])), None, (cut(x), cut(targets)))
    nats = jnp.moveaxis(nats, 0, 1).reshape(x.shape[0], count * chunk)
    if not left:
        return nats
    return jnp.concatenate([nats, some(x[:, -left:], head, targets[:, -left:])], axis=1)


def _nats(
    x: Float[Array, "B T D"], head: Float[Array, "V D"], targets: Int[Array, "B T"], dtype: DTypeLike | None
) -> Float[Array, "B T"]:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=dtype or wide)
    if logits.dtype == wide or is_analysed():
        return _of_logits(logits, targets, wide)
    # the rounded logits alone are kept; float32 exponentials are computed again
    return jax.checkpoint(_of_logits, prevent_cse=False, static_argnums=2)(logits, targets, wide)


def _of_logits(logits: Float[Array, "B T V"], targets: Int[Array, "B T"], wide: DTypeLike) -> Float[Array, "B T"]:
    logits = logits.astype(wide)
    is_target = targets[:, :, None] == jnp.arange(logits.shape[-1])[None, None, :]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
