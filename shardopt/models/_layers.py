"""The parts of the decoder that read no config: casts, rotary positions, layouts, and how sequence
parallelism shards activations.

Suffixes: B sequences, T positions, S cached positions, D width, H heads, K width of a head, F
hidden units.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from shardopt import nn
from shardopt.collectives import constrain_tensor
from shardopt.collectives._per_device import TENSOR
from shardopt.core._errors import format_error
from shardopt.kernels._devices import on_tensor_shards
from shardopt.kernels._rotary import rotate_halves, takes_rotation
from shardopt.low_precision._weight import RoundedWeight
from shardopt.mesh import device_kind_or_default, mesh_under_trace

Tree = TypeVar("Tree")


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Return weights in the dtype of a model's products; None keeps the dtype of each weight.

    Keys stay as they are.
    """
    if dtype is None:
        return tree

    def cast_leaf(leaf: Array | RoundedWeight) -> Array | RoundedWeight:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, RoundedWeight))


def rotate_by(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "*B T"],
    frequencies: Float[Array, " K/2"],
    factor: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T H K"]:
    """Rotate component pair i of the vector at position t by the angle t * frequencies[i], and
    scale it by `factor`.

    Positions are [T] or [B, T]. The product of a rotated query and a rotated key depends only on
    the distance of their positions.

    References:
      Su, Lu, Pan, Murtadha, Wen and Liu, "RoFormer: Enhanced Transformer with Rotary Position
      Embedding", 2021, equation 34; the pairs here are components i and i + K/2.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions.astype(wide)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    angles = angles.reshape(-1, positions.shape[-1], 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if takes_rotation(x):
        return on_tensor_shards(rotate_halves, (2, -1, -1), 2)(x, cos, sin)
    if device_kind_or_default().startswith("TPU"):
        return _rotated_by_product(x, cos, sin)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    ).astype(x.dtype)


def _rotated_by_swap(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T 1 K/2"], sin: Float[Array, "#B T 1 K/2"]
) -> Float[Array, "B T H K"]:
    """Return x rotated by XLA; a product with a permutation swaps its halves.

    Half a vector fills as many lanes of a TPU as a whole vector, so halves would cost twice the
    memory, and copies. With a product, XLA rotates in two passes over x. Each sum has one term, so
    nothing is rounded.
    """

    def join(first, second):
        return jnp.concatenate([first, second], axis=-1)

    K = x.shape[-1]
    swap = jnp.roll(jnp.eye(K, dtype=x.dtype), K // 2, axis=-1)
    swapped = jnp.einsum(
        "bthk,kj->bthj", x, swap, precision="highest", preferred_element_type=cos.dtype
    )
    return (x * join(cos, cos) + swapped * join(-sin, sin)).astype(x.dtype)


_rotated_by_product = jax.custom_vjp(_rotated_by_swap)
# the gradient is the opposite rotation, rounded once; jax would derive two terms, each rounded
_rotated_by_product.defvjp(
    lambda x, cos, sin: (_rotated_by_swap(x, cos, sin), (cos, sin)),
    lambda cos_sin, dy: (_rotated_by_swap(dy, cos_sin[0], -cos_sin[1]), None, None),
)


def places(
    length: int, positions: Int[Array, "B T"] | None, order: Int[Array, "B T"] | None
) -> Int[Array, "*B T"]:
    """Return the positions for position embeddings: `positions`, else `order`, else
    `nn.positions(length)`.
    """
    explicit_positions = order if positions is None else positions
    return nn.positions(length) if explicit_positions is None else explicit_positions


def visible(
    queries: Int[Array, "B T"], length: int, window: Int[Array, ""] | int
) -> Bool[Array, "B T S"]:
    """Return which of the first `length` positions the queries at these positions see, the last
    `window` of them.
    """
    distance = queries[:, :, None] - jnp.arange(length)[None, None]
    return (distance >= 0) & (distance < window)


def split_parts(x: Array, dim: int = 2) -> list[Array]:
    """Cut an array into its entries of a dim, such as [B, T, C, ...] into C parts [B, T, ...].

    The gradient of a split is one concatenation. The gradient of indexing would be a sum of
    paddings.
    """
    return [jnp.squeeze(part, dim) for part in jnp.split(x, x.shape[dim], axis=dim)]


def components_last(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return x, on TPU with the components of a token next to each other in memory.

    XLA:TPU would store tokens next to each other in the backward pass. It would copy the input of
    each block, and read the copy more slowly. This took 1.7% of a step of Llama 3 8B (v5p:4x4x4,
    4096 tokens a chip), and copies of kept hidden units 5% with tensor=4. The partitioner shards x
    as it does without the layout.
    """
    if not device_kind_or_default().startswith("TPU"):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shard_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return x with its positions sharded over tensor.

    Raises:
      ValueError: if tensor does not divide them.
    """
    tensor_size = mesh_under_trace().shape.get(TENSOR, 1)
    if x.shape[1] % tensor_size:
        problem = (
            f"sequence_parallel shards {x.shape[1]} positions over tensor={tensor_size}, which does"
            " not divide them."
        )
        fix = f"choose a length that {tensor_size} divides, or leave sequence_parallel out."
        raise ValueError(format_error("decoder", problem, fix=fix))
    return constrain_tensor([x], [PartitionSpec(None, TENSOR, None)])[0]


def shard_last(x: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Return x with its last dim sharded over tensor."""
    return constrain_tensor([x], [PartitionSpec(*[None] * (x.ndim - 1), TENSOR)])[0]


def gather_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return x with all positions on each device of tensor."""
    return constrain_tensor([x], [PartitionSpec()])[0]
