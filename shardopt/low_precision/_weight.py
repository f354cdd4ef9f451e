"""`RoundedWeight`: a weight that devices rounded to 8 bits before they gathered it, as one node of
a pytree.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Shaped

from shardopt.collectives._buckets import MeshAxes
from shardopt.collectives._wire import Encoded
from shardopt.core import format_error, wide_dtype
from shardopt.core._rounding import Rounding
from shardopt.core._stand_in import StandIn
from shardopt.low_precision._numbers import as_bits, eight_bits, from_bits, largest_over, round_over
from shardopt.trace._marks import OPENED


class RoundedForm(NamedTuple):
    """The form of a weight that is rounded before it is gathered; see `WireForm`.

    Attributes:
      rounding: how it is rounded.
      dim: the dim that devices share.
    """

    rounding: Rounding
    dim: int

    is_scattered = True

    def encode(self, shard: Array, axes: MeshAxes) -> Encoded:
        """Return a shard rounded; a device rounds its own.

        **Communication**: the numbers, a byte each. A scale of 4 bytes for each channel is gathered
        if devices share channels, and else it is a maximum over the axes.
        """
        dtype = self.rounding.dtype or shard.dtype
        shares_sums = self.dim in self.rounding.sum_dims
        numbers, scale = round_over(
            shard.astype(dtype),
            self.rounding.sum_dims,
            eight_bits(self.rounding.precision).numbers,
            functools.partial(largest_over, axes=axes if shares_sums else ()),
        )

        def decode(arrays: list[Array]) -> "RoundedWeight":
            channel_scale = scale if shares_sums else arrays[1]
            is_cast = dtype == shard.dtype
            return RoundedWeight.of(arrays[0], channel_scale, dtype, self.rounding, is_cast=is_cast)

        return Encoded([numbers] if shares_sums else [numbers, scale], decode)

    def gradient(self, cotangent: "RoundedWeight") -> Array:
        """Return the gradient of the weight."""
        return cotangent.zeros


def wire_form(
    dim: int | None, tensor: PartitionSpec, rounding: Rounding | None
) -> RoundedForm | None:
    """Return the form of a leaf of a block when it is gathered.

    None if it has no rounding, is not sharded, or is sharded over tensor.
    """
    return None if rounding is None or dim is None or any(tensor) else RoundedForm(rounding, dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedWeight(StandIn):
    """A weight in 8 bits.

    A block gets it for a leaf that `BlockModel.rounded` names.

    Attributes:
      numbers: the numbers of 8 bits, by `as_bits`.
      scale: the factors of its channels; summed dims have size 1.
      zeros: zeros, which no product reads. Their gradient is the gradient of the weight.
      rounding: how it is rounded, with its dtype before.
      is_cast: whether the block has cast it to the dtype of its rounding, or gets it in this dtype.
    """

    caller = "quantized_einsum"
    problem = (
        "a weight that BlockModel.rounded names was used as an array, and it is rounded to 8 bits."
    )
    fix = "multiply it by so.nn.quantized_einsum alone, or take its name out of BlockModel.rounded."

    numbers: Int8[Array, "..."]
    scale: Float[Array, "..."]
    zeros: Float[Array, "..."]
    rounding: Rounding = dataclasses.field(metadata={"static": True})
    is_cast: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def of(
        cls,
        numbers: Array,
        scale: Array,
        dtype: DTypeLike,
        rounding: Rounding,
        *,
        is_cast: bool = True,
    ) -> "RoundedWeight":
        """Return the weight of gathered numbers and scales, for products in a dtype."""
        rounding = rounding._replace(dtype=jnp.dtype(dtype))
        return cls(as_bits(numbers), scale, jnp.zeros(numbers.shape, dtype), rounding, is_cast)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        """The number of dims of the weight."""
        return self.numbers.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weight in a product."""
        return self.zeros.dtype

    def astype(self, dtype: DTypeLike) -> "RoundedWeight":
        """Return the weight for products in another dtype.

        Raises:
          TypeError: if a cast to the dtype before the weight was rounded would have changed its
            numbers.
        """
        with jax.numpy_dtype_promotion("standard"):
            is_wide = jnp.promote_types(dtype, self.dtype) == dtype
        if not is_wide:
            problem = (
                f"a weight that BlockModel.rounded names is cast to {jnp.dtype(dtype)}, and was"
                f" rounded in {self.dtype}."
            )
            raise TypeError(
                format_error(
                    "quantized_einsum", problem, fix="give its Rounding the dtype of this cast."
                )
            )
        return dataclasses.replace(
            self,
            zeros=self.zeros.astype(dtype),
            is_cast=self.is_cast or dtype == self.rounding.dtype,
        )

    @property
    def is_intact(self) -> bool:
        """Whether numbers and scales have the dtypes of their rounding.

        `jax.tree.map` with a cast changes them.
        """
        return self.numbers.dtype == jnp.int8 and self.scale.dtype == wide_dtype(
            self.rounding.dtype or self.dtype
        )

    def opened(self) -> "RoundedWeight":
        """Return the weight with its arrays named for a product, which alone reads them.

        See `low_precision/_reads.py`.
        """
        return jax.tree.map(lambda array: checkpoint_name(array, OPENED), self)

    def unpacked(self) -> tuple[Shaped[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        """Return the numbers in 8 bits, the scales of the channels, and the zeros."""
        scale = jnp.squeeze(self.scale, self.rounding.sum_dims)
        return from_bits(self.numbers, self.rounding.precision), scale, self.zeros


def check_intact(weight: RoundedWeight) -> None:
    """Refuse a rounded weight whose arrays were cast, or that the block did not cast as its
    rounding says.

    Raises:
      TypeError: if numbers or scales have another dtype than that of their rounding, or the block
        has not cast the weight to it.
    """
    if not weight.is_cast:
        dtype = weight.rounding.dtype
        problem = (
            f"a weight that BlockModel.rounded names was rounded in {dtype}, and the block did not"
            " cast it to that."
        )
        fix = "leave out the dtype of its Rounding, or cast the weight."
        raise TypeError(format_error("quantized_einsum", problem, fix=fix))
    if not weight.is_intact:
        problem = (
            "the arrays within a weight that BlockModel.rounded names were cast, and it is rounded"
            " to 8 bits."
        )
        fix = (
            "cast the weight itself: give jax.tree.map is_leaf=lambda leaf: hasattr(leaf,"
            ' "astype").'
        )
        raise TypeError(format_error("quantized_einsum", problem, fix=fix))
