"""The mlp of a block: gate and up in one product or in two, an activation, and down."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardopt.collectives._per_device import TENSOR
from shardopt.core._rounding import Precision
from shardopt.mesh import device_kind_or_default, mesh_under_trace
from shardopt.nn._low_rank import Weight, Weights
from shardopt.nn._memory_layout import components_last, split_parts
from shardopt.nn._parted_products import Parts, products_with_parts
from shardopt.nn._quantized_einsum import add_bias, linear, quantized_einsum
from shardopt.nn._sequence_parallel import shard_last
from shardopt.partition import shard_axes
from shardopt.partition._plan import largest_divisible_dim

Activation = Callable[[Array], Array]


def mlp(
    x: Float[Array, "B T D"],
    weights: Weights,
    activation: Activation,
    *,
    precision: Precision | None = None,
    sharded: bool = False,
    recompute: bool = True,
) -> Float[Array, "B T D"]:
    """Return `down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`.

    The first products have the name "mlp_hidden".

    Args:
      x: activations.
      weights: "up" [D, F] and "down" [F, D], and "gate" [D, F]; or "up" [D, C, F], whose C parts
        are the gate and up. "gate_bias", "up_bias" and "down_bias" are optional.
      activation: the activation.
      precision: as in `so.nn.quantized_einsum`.
      sharded: whether tensor shards the positions of block inputs.
      recompute: whether the backward pass computes the activation again.
    """
    # without constraints the partitioner shards the gradients of gate and up differently, and moves
    # them
    shard = shard_last if sharded else lambda x: x
    hidden = _hidden_parts(x, weights, shard, precision)

    def multiply_down(hidden: list[Array], weight: Weight) -> Array:
        activated = activation(hidden[0])
        activated = shard(activated * hidden[1] if len(hidden) > 1 else activated)
        return linear("btf,fd->btd", activated, {"down": weight}, "down", precision=precision)

    # without a barrier XLA reads the kept hidden units in the product: blocks run in a scan, where
    # it merges nothing
    if recompute:
        multiply_down = jax.checkpoint(multiply_down, prevent_cse=False)
    return add_bias(multiply_down(hidden, weights["down"]), weights.get("down_bias"))


def _hidden_parts(
    x: Array,
    weights: Weights,
    shard: Callable[[Array], Array],
    precision: Precision | None,
) -> list[Float[Array, "B T F"]]:
    """Return the products with gate and up, or with up alone."""
    if weights["up"].ndim == 2:
        names = [name for name in ("gate", "up") if name in weights]
        products = [
            shard(linear("btd,df->btf", x, weights, name, precision=precision)) for name in names
        ]
        return checkpoint_name(products, "mlp_hidden")
    if device_kind_or_default().startswith("TPU"):
        return _parts_on_tpu(x, weights, shard, precision)
    hidden = shard(linear("btd,dcf->btcf", x, weights, "up", precision=precision))
    return split_parts(checkpoint_name(hidden, "mlp_hidden"))


def _parts_on_tpu(
    x: Array,
    weights: Weights,
    shard: Callable[[Array], Array],
    precision: Precision | None,
) -> list[Float[Array, "B T F"]]:
    """Return the parts of the product with `up` [D, C, F].

    XLA:TPU copies no gathered weight and no kept product for it.
    """
    up = weights["up"]
    bias = weights.get("up_bias")
    mesh_sizes = {"data": 1, **mesh_under_trace().shape}
    if precision is None and mesh_sizes.get(TENSOR, 1) == 1 and isinstance(up, Array):
        # rows [C, F] of D are gathered as rows of a matrix
        is_matrix = largest_divisible_dim(up.shape, shard_axes(mesh_sizes).size, (None,) * 3) == 0
        D, C, _ = up.shape
        weight_product, letter = ("btd,df->btf", "f") if is_matrix else ("btd,dcf->cbtf", "c")
        parts = Parts("btd,df->btf", weight_product, letter, C)
        products = products_with_parts(parts, x, up.reshape(D, -1) if is_matrix else up)
        biases = [None] * C if bias is None else list(bias)
        hidden = [add_bias(product, b) for product, b in zip(products, biases, strict=True)]
        return checkpoint_name(hidden, "mlp_hidden")
    hidden = quantized_einsum("btd,dcf->cbtf", x, up, precision=precision)
    hidden = hidden if precision else components_last(hidden)
    hidden = shard(hidden if bias is None else hidden + bias[:, None, None])
    return split_parts(checkpoint_name(hidden, "mlp_hidden"), dim=0)
