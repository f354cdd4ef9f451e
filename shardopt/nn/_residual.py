"""The residual stream of a block: what its branches read, and how they add to it."""

from typing import NamedTuple

from jaxtyping import Array

from shardopt.nn._low_rank import Weights
from shardopt.nn._norm import Norm, apply_norm, norm_of_stream
from shardopt.nn._sequence_parallel import gather_positions, shard_positions


class Residual(NamedTuple):
    """How the branches of a block read the residual stream, and add to it.

    Attributes:
      norm: the norms, as in `DecoderConfig`.
      epsilon: the number that they add to the mean square.
      pre_norms: whether branches get normed inputs.
      post_norms: whether their outputs are normed.
      sharded: whether tensor shards the positions of the stream.
    """

    norm: Norm
    epsilon: float
    pre_norms: bool
    post_norms: bool
    sharded: bool

    def input(self, weights: Weights, x: Array, name: str) -> tuple[Array, Array]:
        """Return x, and the input of a branch.

        `name` names the products that read the input.
        """
        gather = gather_positions if self.sharded else lambda x: x
        if not self.pre_norms or not self.norm.startswith("rms"):
            return x, gather(self._normed(weights, "norm", x, self.pre_norms))
        x, normed = norm_of_stream(
            x,
            weights["norm"],
            self.epsilon,
            name=name,
            has_sharded_positions=self.sharded,
            plus_one=self.norm == "rms_plus_one",
        )
        return x, gather(normed)

    def add(self, weights: Weights, x: Array, out: Array) -> Array:
        """Return the stream plus the output of a branch."""
        shard = shard_positions if self.sharded else lambda x: x
        out = self._normed(weights, "post_norm", shard(out), self.post_norms)
        return shard(x + out)

    def _normed(self, weights: Weights, name: str, x: Array, has_norm: bool) -> Array:
        return apply_norm(self.norm, weights, name, x, self.epsilon) if has_norm else x
