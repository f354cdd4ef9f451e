"""Sequence parallelism: tensor shards the positions of block inputs and outputs.

References:
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
  4.2.2; Wang, Zhang, Shen, Li and Ruwase, "Domino: Eliminating Communication in LLM Training via
  Generic Tensor Slicing and Overlapping", 2024, for halves.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from shardopt.collectives._per_device import TENSOR, constrain_tensor
from shardopt.core import format_error
from shardopt.kernels._devices import num_shards
from shardopt.mesh import device_kind_or_default, is_analysed, mesh_under_trace


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


Tree = TypeVar("Tree")

_TOKENS_OF_HALF = 2048
"""The fewest tokens that are computed by themselves. Fewer do not fill products; 8192 were
compiled.
"""


def computes_by_halves(x: Float[Array, "B T D"]) -> bool:
    """Return whether a block computes one half of the rows while the other half is sent.

    On TPU it does if tensor shards positions and both halves are long enough. Otherwise it would
    wait for its gathers and scatters over tensor. Llama 3 8B with tensor=4 (v5p:4x4x4, 4096 tokens
    a chip) takes 560 ms a step, and 604 with all rows at once.
    """
    B, T, _ = x.shape
    can_part = B % 2 == 0 and B * T >= 2 * _TOKENS_OF_HALF
    is_tpu = device_kind_or_default().startswith("TPU")
    return can_part and num_shards() > 1 and is_tpu and not is_analysed()


def halves_of(rows: Tree) -> list[Tree]:
    """Return each half of the rows of a tree of arrays."""
    leaves, treedef = jax.tree.flatten(rows)
    halves = zip(*(jnp.split(leaf, 2) for leaf in leaves), strict=True)
    return [treedef.unflatten(half) for half in halves]
