"""What training a model asks of a machine, in numbers: the input of every prediction."""

from typing import Any, NamedTuple

import jax

from shardopt.core.types import PyTree
from shardopt.partition.paths import leaves_with_paths
from shardopt.partition.rules import match_rules


class Bytes(NamedTuple):
    """Bytes of activations, by whether the tensor axis splits them.

    Attributes:
      whole: on every device of the tensor axis.
      split: each device of the tensor axis has its part.
    """

    whole: float = 0.0
    split: float = 0.0

    def on(self, tensor: int) -> float:
        """Return the bytes on one of `tensor` devices."""
        return self.whole + self.split / tensor

    def times(self, factor: float) -> "Bytes":
        """Return both multiplied."""
        return Bytes(self.whole * factor, self.split * factor)

    def plus(self, other: "Bytes") -> "Bytes":
        """Return both added."""
        return Bytes(self.whole + other.whole, self.split + other.split)


class Workload(NamedTuple):
    """A model of blocks and the work of one example (row) of its batch.

    `so.planning.trace` makes one of any `BlockModel`, `so.planning.Transformer(...).workload()` of a shape. Costs of a
    row are taken to be proportional to rows, which holds wherever examples do not see each other.

    Attributes:
      name: for tables.
      params: abstract parameters, `{"blocks": leaves stacked [L, ...], **outer}`.
      rules: tensor rules, as strategies take them.
      tokens: positions of a row, for tokens a second; 1 where that means nothing.
      block_flops: multiplications and additions of inner products in the forward of one block and one row. Backward is
        twice that.
      again_flops: what remat runs again of them: all but the products that the backward pass has no use for, such as
        the last of a residual branch.
      ends_flops: the forward flops of embed and loss together.
      message: bytes of what one row hands from block to block.
      kept: bytes that one block keeps of a row from forward to backward, nothing recomputed.
      stage_kept: the same in a pipeline and under fsdp, which compute elementwise operations again.
      deferred: bytes that the backward of a block leaves for its weight gradient, where a schedule splits that off.
      working: bytes that come and go while one block is differentiated, over and above `kept` of that block.
      ends_working: bytes that come and go while the loss of a row is differentiated.
      tensor_sums: all-reduces of a message over tensor in the forward of a block, and in its backward; see
        `tensor_sums`.
      model_flops: of a training step and one row, by the convention of model flops utilisation: no recomputation,
        causal attention counted as half.
      itemsize: bytes of a number in which blocks compute.
      loss_reads: key paths of the outer parameters that the loss reads; the others are done with after embed.
    """

    name: str
    params: PyTree
    rules: Any
    tokens: int
    block_flops: float
    again_flops: float
    ends_flops: float
    message: int
    kept: Bytes
    stage_kept: Bytes
    deferred: Bytes
    working: Bytes
    ends_working: Bytes
    tensor_sums: tuple[int, int]
    model_flops: float
    itemsize: int
    loss_reads: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """L, the stacked blocks."""
        return jax.tree.leaves(self.params["blocks"])[0].shape[0]

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters are."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def tensor_sums(params: PyTree, rules: Any) -> tuple[int, int]:
    """Return how many sums over tensor the forward and the backward of a block need, by its rules.

    A weight that is split on its first dim, what it sums over, leaves partial results in the forward; one that is split
    on any other dim leaves partial gradients of its input in the backward.
    """
    leaves = leaves_with_paths(params)
    specs = match_rules(rules, [(path, leaf.shape[path.startswith("blocks/") :]) for path, leaf in leaves], who="plan")
    split = [tuple(spec) for (path, _), spec in zip(leaves, specs, strict=True) if path.startswith("blocks/")]
    rows = sum(spec[:1] == ("tensor",) for spec in split)
    return rows, sum("tensor" in spec for spec in split) - rows
