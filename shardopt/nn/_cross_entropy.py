"""Cross-entropy of the next token, computed for a few positions at a time, so that the logits of
all positions are never held.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shardopt.core import (
    calling,
    check_count,
    check_floating,
    check_number,
    type_error,
    value_error,
    wide_dtype,
)
from shardopt.kernels._flash import capped
from shardopt.mesh import is_analysed
from shardopt.nn._ids import IGNORED, as_int32, integers


@calling("cross_entropy")
def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    chunk: int | None = None,
    logits_dtype: DTypeLike | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T"]:
    """Return -log softmax(x head^T)[target] in nats, for each position.

    Args:
      x: [B, T, D], the output of the last norm.
      head: [V, D], the embedding of each token of the vocabulary.
      targets: [B, T], token ids; -100 is ignored, as in torch.
      chunk: positions at a time; the last chunk may be shorter. None: all at once.
      logits_dtype: the dtype of the logits; bfloat16 halves the memory, as in MaxText and torch's
        autocast. None: float32 at least.
      softcap: c: logits z become c tanh(z / c) before the softmax (Gemma 2). None: no cap.

    Returns:
      [B, T], float32 at least. 0 for a target of -100, with a gradient of 0: a mean leaves it out
      of its count too, as `so.losses.Weighted(nats.sum(), (targets != -100).sum())`. NaN, with a
      gradient of NaN, for any other target that is not in 0, ..., V - 1.

    Raises:
      TypeError: if chunk or the targets are not integers, or logits_dtype, x or the head is not
        floating.
      ValueError: if chunk is below 1, softcap is not positive, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> x, head, targets = jnp.zeros((2, 5, 4)), jnp.ones((8, 4)), jnp.zeros((2, 5), int)
      >>> bool(jnp.allclose(cross_entropy(x, head, targets, chunk=2), jnp.log(8)))
      True

    Logits are products in float32 at least, unless `logits_dtype` rounds them. The softmax and its
    sums are in float32 at least. A mask and a sum pick the target's logit, not an index. So a
    vocabulary that is sharded over tensor is reduced on its devices, not gathered.

    **Equivalence**: every chunk size gives the same result, up to summation order. `logits_dtype`
    rounds differently, but in the same way on any number of devices.

    **Memory**: B T V logits, stored for the backward pass, and as many gradients. With `chunk`, B
    chunk V at a time: in the forward pass, and again in the backward pass, which recomputes them.

    **Communication**: none over data. With the vocabulary sharded over tensor, sums of [B, chunk]
    over tensor.

    References:
      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, for why.
    """
    if chunk is not None:
        check_count("chunk", chunk, minimum=1)
    if softcap is not None:
        check_number("softcap", softcap, positive=True)
    if logits_dtype is not None and not jnp.issubdtype(logits_dtype, jnp.floating):
        raise type_error(f"logits_dtype must be floating, got {logits_dtype}.")
    check_floating(x=x, head=head)
    if x.ndim != 3 or x.shape[2:] != head.shape[1:]:
        problem = f"x has shape {x.shape}, the head {head.shape}."
        raise value_error(problem, fix="give x [B, T, D] and head [V, D].")
    targets = as_int32(integers("cross_entropy", "targets", targets, {"[B, T]": x.shape[:2]}))
    T = x.shape[1]
    if chunk is None or chunk >= T or is_analysed():
        return _nats(x, head, targets, logits_dtype, softcap)
    count, num_last = divmod(T, chunk)
    # A scan keeps forward and backward pass apart, so no barrier has to.
    chunk_nats = jax.checkpoint(
        functools.partial(_nats, dtype=logits_dtype, softcap=softcap), prevent_cse=False
    )

    def split(a):
        return jnp.moveaxis(
            a[:, : count * chunk].reshape(a.shape[0], count, chunk, *a.shape[2:]), 1, 0
        )

    _, nats = jax.lax.scan(
        lambda _, x_and_targets: (None, chunk_nats(x_and_targets[0], head, x_and_targets[1])),
        None,
        (split(x), split(targets)),
    )
    nats = jnp.moveaxis(nats, 0, 1).reshape(x.shape[0], count * chunk)
    if not num_last:
        return nats
    return jnp.concatenate(
        [nats, chunk_nats(x[:, -num_last:], head, targets[:, -num_last:])], axis=1
    )


def _nats(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    dtype: DTypeLike | None,
    softcap: float | None,
) -> Float[Array, "B T"]:
    wide = wide_dtype(x.dtype)
    logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=dtype or wide)
    if logits.dtype == wide or is_analysed():
        return _nats_of_logits(logits, targets, wide, softcap)
    # only the rounded logits are stored; the backward pass recomputes float32 exponentials
    return jax.checkpoint(_nats_of_logits, prevent_cse=False, static_argnums=(2, 3))(
        logits, targets, wide, softcap
    )


def _nats_of_logits(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    wide: DTypeLike,
    softcap: float | None,
) -> Float[Array, "B T"]:
    logits = capped(logits.astype(wide), softcap)
    vocab_size = logits.shape[-1]
    is_target = targets[:, :, None] == jnp.arange(vocab_size)[None, None, :]
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    is_ignored = targets == IGNORED
    is_known = is_ignored | ((targets >= 0) & (targets < vocab_size))
    # a product, so that the gradient is NaN too
    return jnp.where(is_ignored, 0, nats * jnp.where(is_known, 1, jnp.nan).astype(nats.dtype))
