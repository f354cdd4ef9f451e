"""`RoundedWeight`: a weight that devices rounded to 8 bits before they gathered it, as one node of
a pytree.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Shaped

from shardopt.collectives._buckets import MeshAxes
from shardopt.collectives._wire import Encoded
from shardopt.core._errors import format_error
from shardopt.core._rounding import Rounding
from shardopt.core._stand_in import StandIn
from shardopt.core._types import wide_dtype
from shardopt.low_precision._numbers import (
    as_bits,
    eight_bits,
    from_bits,
    inverse,
    largest_magnitude,
    largest_number,
    maximum_over,
    narrow,
)
from shardopt.trace._marks import OPENED


class Form(NamedTuple):
    """How a weight is a matrix whose rows are shared out among devices.

    With K summed dims together, C parts and N channels of a part, the matrix is [K, C N], or [N, C
    K] by channel. The parts of experts are the experts.

    Attributes:
      shape: the shape of the weight.
      rounding: how it is rounded.
      by_channel: whether rows are channels, and else summed.
    """

    shape: tuple[int, ...]
    rounding: Rounding
    by_channel: bool

    gradient_dim = 0

    def encode(self, shard: Array, axes: MeshAxes) -> Encoded:
        """Return a shard rounded; a device rounds its own, see `WireForm`.

        **Communication**: the numbers, a byte each. A scale of 4 bytes for each channel is gathered
        if rows are channels, and else it is a maximum over the axes.
        """
        form, dtype = self.of_shard(shard), self.rounding.dtype or shard.dtype
        maximum = functools.partial(maximum_over, axes=axes)
        numbers, scale = form.round_rows(form.matrix(shard.astype(dtype)), maximum)

        def decode(matrices: list[Array]) -> "RoundedWeight":
            channel_scale = scale
            if form.by_channel:
                channel_scale = matrices[1].reshape(-1, *scale.shape[1:])
            is_cast = dtype == shard.dtype
            return RoundedWeight.of(matrices[0], channel_scale, dtype, form, is_cast=is_cast)

        return Encoded([numbers, scale.reshape(1, -1)] if form.by_channel else [numbers], decode)

    def split(self, gradient: "RoundedWeight") -> list[Array]:
        """Return the gradient as a matrix for each part."""
        return list(gradient.zeros)

    def join(self, parts: list[Array], shard: jax.ShapeDtypeStruct) -> Array:
        """Return the gradient of a shard from rows of the matrix of each part."""
        return self.of_shard(shard).weight(joined(parts))

    def of_shard(self, shard: Array | jax.ShapeDtypeStruct) -> "Form":
        """Return the form of a weight on the device of a shard, which may have some of the experts."""
        return (
            self._replace(shape=(shard.shape[0], *self.shape[1:]))
            if self.rounding.experts
            else self
        )

    @property
    def num_parts(self) -> int:
        """The number of parts, C."""
        return self.shape[0] if self.rounding.experts else self.rounding.parts

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the weight in the order of the matrix: summed dims, then parts and channels.

        By channel the last dim first.
        """
        dims, summed = tuple(range(len(self.shape))), self.rounding.summed
        if self.rounding.experts:
            dims = (*dims[1 : summed + 1], 0, *dims[summed + 1 :])
        return (dims[-1], *dims[summed:-1], *dims[:summed]) if self.by_channel else dims

    def matrix(self, weight: Array) -> Array:
        """Return a weight, or a shard of it, as a matrix, or the rows of a matrix."""
        row_dims = 1 if self.by_channel else self.rounding.summed
        ordered = jnp.transpose(weight, self.order)
        return ordered.reshape(math.prod(ordered.shape[:row_dims]), -1)

    def weight(self, matrix: Array) -> Array:
        """Return the weight, or a shard of it, from a matrix or rows of it."""
        ordered = matrix.reshape(-1, *[self.shape[dim] for dim in self.order[1:]])
        return jnp.transpose(ordered, sorted(range(ordered.ndim), key=self.order.__getitem__))

    def round_rows(
        self, rows: Float[Array, "r S"], maximum: Callable[[Array], Array]
    ) -> tuple[Shaped[Array, "r S"], Float[Array, "..."]]:
        """Return rows of the matrix rounded, and the scales of their channels: [1, C N], or [r, C]
        by channel.

        Args:
          rows: the rows of this device.
          maximum: returns the maximum over devices. It is called if rows are summed, since a
            channel is on all devices then.
        """
        dtype = eight_bits(self.rounding.precision).numbers
        largest = largest_number(dtype)
        wide, parts = rows.astype(wide_dtype(rows.dtype)), self.num_parts
        if self.by_channel:
            wide = wide.reshape(len(rows), parts, -1)
            scale = largest_magnitude(wide, 2) / largest
        else:
            scale = maximum(largest_magnitude(wide, 0)) / largest
        numbers = narrow(wide * inverse(scale), dtype)
        return numbers.reshape(rows.shape), jnp.squeeze(scale, 2) if self.by_channel else scale


def wire_form(
    shape: tuple[int, ...], dim: int | None, tensor: PartitionSpec, rounding: Rounding | None
) -> Form | None:
    """Return the form in which a leaf of a block is gathered.

    None if it has no rounding, is not sharded, is sharded over tensor, or if its shards are rows of
    no matrix.
    """
    if rounding is None or dim is None or any(tensor):
        return None
    return form_of(shape, dim, rounding)


def form_of(shape: tuple[int, ...], dim: int, rounding: Rounding) -> Form | None:
    """Return the form of a weight that is sharded over a dim.

    None if the shards are rows of no such matrix.
    """
    by_summed, by_channel = (Form(shape, rounding, by_channel) for by_channel in (False, True))
    if dim == by_summed.order[0]:
        return by_summed
    is_last_of_parts = (
        math.prod(shape[i] for i in by_summed.order[rounding.summed : -1]) == by_channel.num_parts
    )
    return by_channel if is_last_of_parts and dim == by_channel.order[0] else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedWeight(StandIn):
    """A weight in 8 bits, as the matrix of a form.

    A block gets it for a leaf that `BlockModel.rounded` names.

    Attributes:
      numbers: the matrix, by `as_bits`.
      scale: the factors of its channels, [1, C N], or [N, C] by channel.
      zeros: a matrix of zeros for each part, [K, N], or [N, K] by channel; experts have one for
        all. No product reads them. Their gradients are the gradients of the weight.
      form: how the matrix is the weight.
      is_cast: whether the block has cast it to the dtype of its rounding, or gets it in this dtype.
    """

    caller = "quantized_einsum"
    problem = (
        "a weight that BlockModel.rounded names was used as an array, and it is rounded to 8 bits."
    )
    fix = "multiply it by so.nn.quantized_einsum alone, or take its name out of BlockModel.rounded."

    numbers: Int8[Array, "R S"]
    scale: Float[Array, "..."]
    zeros: tuple[Float[Array, "R S/C"], ...]
    form: Form = dataclasses.field(metadata={"static": True})
    is_cast: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def of(
        cls, numbers: Array, scale: Array, dtype: DTypeLike, form: Form, *, is_cast: bool = True
    ) -> "RoundedWeight":
        """Return the weight of gathered numbers and scales, for products in a dtype."""
        parts = form.rounding.parts
        zeros = jnp.zeros((len(numbers), numbers.shape[1] // parts), dtype)
        form = form._replace(rounding=form.rounding._replace(dtype=jnp.dtype(dtype)))
        return cls(as_bits(numbers), scale, (zeros,) * parts, form, is_cast)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """The number of dims of the weight."""
        return len(self.form.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weight in a product."""
        return self.zeros[0].dtype

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
        zeros = tuple(zeros.astype(dtype) for zeros in self.zeros)
        return dataclasses.replace(
            self, zeros=zeros, is_cast=self.is_cast or dtype == self.form.rounding.dtype
        )

    @property
    def is_intact(self) -> bool:
        """Whether numbers and scales have the dtypes of their rounding.

        `jax.tree.map` with a cast changes them.
        """
        rounding = self.form.rounding
        return self.numbers.dtype == jnp.int8 and self.scale.dtype == wide_dtype(
            rounding.dtype or self.dtype
        )

    def opened(self) -> "RoundedWeight":
        """Return the weight with its arrays named for a product, which alone reads them.

        See `remat/_rounded_reads.py`.
        """
        return jax.tree.map(lambda array: checkpoint_name(array, OPENED), self)

    def unpacked(self) -> tuple[Shaped[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        """Return the numbers in the shape of the weight, the scales in the shape of its channels,
        and the zeros as a weight.
        """
        dims = self.form._replace(by_channel=False).order[self.form.rounding.summed :]
        channels = self.channel_scale.reshape([self.shape[dim] for dim in dims])
        return self.form.weight(self.matrix), channels, self.form.weight(joined(self.zeros))

    @property
    def channel_scale(self) -> Float[Array, "1 CN"]:
        """The factors of the channels, part after part."""
        return (self.scale.T if self.form.by_channel else self.scale).reshape(1, -1)

    @property
    def matrix(self) -> Shaped[Array, "R S"]:
        """The matrix in the dtype of its numbers."""
        return from_bits(self.numbers, self.form.rounding.precision)


def joined(parts: Sequence[Array]) -> Array:
    """Return the matrix of its parts."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def check_intact(caller: str, weight: RoundedWeight) -> None:
    """Refuse a rounded weight whose arrays were cast, or that the block did not cast as its
    rounding says.

    Raises:
      TypeError: if numbers or scales have another dtype than that of their rounding, or the block
        has not cast the weight to it.
    """
    if not weight.is_cast:
        dtype = weight.form.rounding.dtype
        problem = (
            f"a weight that BlockModel.rounded names was rounded in {dtype}, and the block did not"
            " cast it to that."
        )
        raise TypeError(
            format_error(
                caller, problem, fix="leave out the dtype of its Rounding, or cast the weight."
            )
        )
    if not weight.is_intact:
        problem = (
            "the arrays within a weight that BlockModel.rounded names were cast, and it is rounded"
            " to 8 bits."
        )
        fix = (
            "cast the weight itself: give jax.tree.map is_leaf=lambda leaf: hasattr(leaf,"
            ' "astype").'
        )
        raise TypeError(format_error(caller, problem, fix=fix))
