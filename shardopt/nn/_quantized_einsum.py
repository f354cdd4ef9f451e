"""`quantized_einsum`: the product of activations and a weight, which may have an adapter, in 8 bits or not."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.core import format_error, is_floating, plural
from shardopt.core._rounding import Precision
from shardopt.low_precision._einsum import opened, parse_subscripts, product_in_8_bits
from shardopt.low_precision._numbers import check_precision
from shardopt.low_precision._weight import RoundedWeight
from shardopt.nn._cpu import product_of_matrices, takes_matrices
from shardopt.nn._low_rank import LowRank, Weights


def quantized_einsum(
    subscripts: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."] | LowRank | RoundedWeight,
    *,
    precision: Precision | None,
) -> Float[Array, "..."]:
    """Return `jnp.einsum(subscripts, x, weight)` of activations and a weight, multiplied in 8 bits,
    with gradients.

    Args:
      subscripts: of two operands, such as "btd,dhk->bthk". Dims of both operands are summed; all
        others are in the result.
      x: activations.
      weight: in the dtype of the product without quantisation. A weight with an adapter
        (`shardopt.adapters`) adds the product of x and the adapter, which is not quantised. A
        weight that `BlockModel.rounded` names is rounded already.
      precision: "int8" (TPU v5e, v5p, v6e, GPU) or "fp8" (TPU 7x; GPU from Hopper). On CPU the
        rounded numbers are multiplied in float32. None: `jnp.einsum`.

    Returns:
      The product, in the dtype of x and weight.

    Raises:
      ValueError: if `precision` is unknown, subscripts do not have this form, operands do not fit
        them or are not floating; if `BlockModel.rounded` describes another product of the weight.

    Example:
      >>> import jax.numpy as jnp
      >>> x, weight = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(0, 1, 8).reshape(4, 2)
      >>> error = quantized_einsum("td,df->tf", x, weight, precision="int8") - x @ weight
      >>> bool(0 < abs(error).max() < 0.01)
      True

    With q(a) = round(a / s) and s = max |a| / m, where m is the largest number of the 8 bits:

        y  = s_x s_w (q(x) q(w))      s_x of each token, s_w of each channel: each index of the weight that the result has
        dx = s_g (q(g s_w) q(w))      s_g of each token
        dw = s_h (q(x)^T q(g s_x))    s_h of each row and channel

    g is the gradient of y. One copy of a weight and one of x serve both passes, because their
    scales are multiplied into g before it is rounded. The precision "int8" rounds to the nearest of
    -127 to 127. The precision "fp8" is e4m3fn, with 3 bits of fraction, up to 448; g uses e5m2,
    with 2 bits, up to 57344. Gradients ignore the rounding (straight through).

    **Rows**: of the dims of tokens, the last one counts positions, and the others count rows. With
    a single dim of tokens, dw is x^T g without rounding, since devices may share this dim.

    **Devices**: XLA multiplies y and dx in 8 bits where the device can. It multiplies the same
    rounded numbers of dw in the dtype of the gradients. `docs/notes/low_precision.md` has the known
    facts about the speed.

    **Equivalence**: scales are of a token, a row or a channel, and no row is shared but over
    context, where devices take the maximum of all. So strategies, mesh sizes and micro-batches
    equal one device with the same `precision`, up to summation order. If a different order moves a
    number across a rounding boundary, the number changes by one step of the 8 bits (in float64:
    practically never).

    **Placement**: weights are not cast, so master weights stay in float32.

    **Communication**: none over data, where fsdp gathers weights. It gathers them in 8 bits if
    `BlockModel.rounded` names them; then each device rounds its own shards, and a channel of
    several devices takes the maximum of all. Over context, the maxima of g s_x are sent, 4 bytes a
    row and channel. If summed dims are sharded over tensor, maxima of tokens and channels and
    partial sums in 32 bits are sent. If channels are, maxima of tokens' gradients.

    References:
      Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
      2023, algorithm 1 (SwitchBack, which has one scale for w; there the product over tokens keeps
      its precision). Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (e4m3 forwards,
      e5m2 backwards).
    """
    if isinstance(weight, LowRank):
        product = quantized_einsum(subscripts, x, weight.base, precision=precision)
        return product + weight.einsum(x, parse_subscripts(subscripts)).astype(product.dtype)
    if isinstance(weight, RoundedWeight):
        weight = opened(subscripts, weight, precision)
    _check_operands(subscripts, x, weight, any_dtype=precision is None)
    if precision is None:
        return jnp.einsum(subscripts, x, weight)
    check_precision("quantized_einsum", precision)
    return product_in_8_bits(subscripts, x, weight, precision)


def _check_operands(
    subscripts: str, x: Array, weight: Array | RoundedWeight, *, any_dtype: bool
) -> None:
    """Refuse operands with more or fewer dims than the subscripts. Without `any_dtype`
    refuse operands that are not floating too.
    """
    for operand, letters in zip((x, weight), parse_subscripts(subscripts)[:2], strict=True):
        if len(operand.shape) != len(letters) or not (any_dtype or is_floating(operand)):
            problem = f"an operand of {subscripts!r} is {operand.dtype}{list(operand.shape)}."
            fix = f"give it a floating dtype, and the {plural(len(letters), 'dim')} of {letters!r}."
            raise ValueError(format_error("quantized_einsum", problem, fix=fix))


def linear(
    subscripts: str,
    x: Float[Array, "..."],
    weights: Weights,
    name: str,
    *,
    precision: Precision | None,
) -> Float[Array, "..."]:
    """Return `quantized_einsum` with the weight `name`, plus the bias of this name, if any."""
    weight = weights[name]
    is_plain = precision is None and isinstance(weight, Array)
    if is_plain and takes_matrices(subscripts):
        _check_operands(subscripts, x, weight, any_dtype=True)
        product = product_of_matrices(x.ndim - 2, x, weight)
    else:
        product = quantized_einsum(subscripts, x, weight, precision=precision)
    return add_bias(product, weights.get(f"{name}_bias"))


def add_bias(x: Array, bias: Array | None) -> Array:
    """Return x plus a bias of its last dims, if there is one."""
    return x if bias is None else x + jnp.broadcast_to(bias, x.shape)
