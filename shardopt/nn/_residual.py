"""The residual stream of a block: what its branches read, and how they add to it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from shardopt.core._rounding import Precision
from shardopt.low_precision._einsum import Normed
from shardopt.nn._norm import Norm, apply_norm, norm_of_stream
from shardopt.nn._sequence_parallel import gather_positions, shard_positions


class Residual(NamedTuple):
    """How the branches of a block read the residual stream, and add to it.

    Attributes:
      norm: the norms, as in `DecoderConfig`.
      epsilon: the number that they add to the mean square.
      pre_norms: whether branches get normed inputs.
      post_norms: whether their outputs are normed.
      scale: the factor of their outputs.
      has_biases: whether the last product of a branch has a bias.
      sharded: whether tensor shards the positions of the stream.
      precision: of products with the weights of a block.
    """

    norm: Norm
    epsilon: float
    pre_norms: bool
    post_norms: bool
    scale: float
    has_biases: bool
    sharded: bool
    precision: Precision | None

    def inputs(
        self, weights: Mapping[str, Any], x: Array, name: str, uses: int = 1
    ) -> tuple[Array, list[Array | Normed]]:
        """Return x, and the input of a branch once for each of its uses.

        `name` names the products that read the input.
        """
        gather = gather_positions if self.sharded else lambda x: x
        if not self.pre_norms or not self.norm.startswith("rms"):
            return x, [gather(self._normed(weights, "norm", x, self.pre_norms))] * uses
        scale, plus_one = weights["norm"], self.norm == "rms_plus_one"
        options: dict[str, Any] = {"has_sharded_positions": self.sharded, "plus_one": plus_one}
        x, inputs = norm_of_stream(x, scale, self.epsilon, uses, name=name, **options)
        if self.precision is not None and not self.sharded and not plus_one:
            return x, [Normed(normed, x, scale, self.epsilon) for normed in inputs]
        return x, [gather(normed) for normed in inputs]

    @property
    def is_added_by_products(self) -> bool:
        """Whether the last product of a branch adds the stream: the kernels for 8 bits do it in the
        same pass.
        """
        has_more = self.post_norms or self.sharded or self.has_biases or self.scale != 1
        return self.precision is not None and not has_more

    def add(self, weights: Mapping[str, Any], x: Array, out: Array) -> Array:
        """Return the stream plus the output of a branch whose product did not add the stream."""
        shard = shard_positions if self.sharded else lambda x: x
        out = self._normed(weights, "post_norm", shard(out), self.post_norms)
        return shard(x + (out if self.scale == 1 else out * jnp.asarray(self.scale, out.dtype)))

    def _normed(self, weights: Mapping[str, Any], name: str, x: Array, has_norm: bool) -> Array:
        return apply_norm(self.norm, weights, name, x, self.epsilon) if has_norm else x
