"""Fully sharded data parallel: parameters, gradients and optimizer state all sharded."""

from collections.abc import Sequence

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import ZERO_3, BatchDims, OptStateLayout, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes


def fsdp(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    *,
    micro_batches: int = 1,
    rules: Rules = (),
    min_shard_elements: int = 1024,
    gather_dtype: jax.typing.DTypeLike | None = None,
    scatter_dtype: jax.typing.DTypeLike | None = None,
    frozen: Sequence[str] = (),
    evaluate_fn: LossFn | None = None,
    compiler_options: CompilerOptions | None = None,
    view: View = "auto",
    separable: bool | None = None,
    axes: Axes | None = None,
    batch_dims: BatchDims = (),
    sequence_dims: SequenceDims = (),
    expert_leaves: Sequence[str] = (),
    opt_state_layout: OptStateLayout = "within",
    offload: Sequence[str] = (),
) -> ShardedOptimizer:
    """Train data parallel with everything sharded; weights are gathered where they are used.

    A step computes g = reduce_scatter_d grad L_d(all_gather(p)) and updates each shard with its own part of g.

    **Equivalence**: equal to one device on the union batch, up to summation order, for every optax
    transformation. With `gather_dtype`, equal to one device that computes in that dtype with fp32 masters. With
    `scatter_dtype`, g = sum_d round(grad L_d), of each micro-batch by itself: what a device sends is rounded once. The sum
    is taken in fp32 on CPU; elsewhere in that dtype, where XLA rounds it up to N - 1 times more. Micro-batches add up, and
    replicas are summed, in the dtype of the parameters.

    **Placement**: parameters, gradients and optimizer state sharded over data (16/N bytes per parameter with fp32
    Adam) and over tensor by rule. With a `BlockModel` one block is gathered at a time, in the layer scan and again
    in the backward pass; its outer parameters are gathered from the forward to the backward pass, as all parameters
    of any other loss may be. A replica axis holds copies of the shards (hybrid sharding, HSDP).

    **Communication** a step, per device, for Psi parameter bytes over N data devices: all-gather in the forward
    and again in the backward pass, reduce-scatter of the gradients: 3(N-1)/N Psi each micro-batch. Gathered only
    once are weights that the backward pass does not need and the outer ones of a BlockModel, of which `tables` are not
    gathered at all where `so.nn.embedding` finds it cheaper to exchange rows; and, where the compiler merges the two
    gathers of a weight outside of blocks (XLA:CPU of jax 0.10 does), such weights. The gathers halve with
    `gather_dtype=bfloat16`, the reduce-scatter with `scatter_dtype=bfloat16` (on CPU an all-to-all of as many bytes); by
    default gradients are reduced in the dtype of the parameters. With replicas, an all-reduce of the 1/N shards over
    replica, after the last micro-batch; it keeps that dtype.

    Args:
      tx: any optax transformation; see `ddp`.
      mesh: from `make_mesh`.
      loss_fn: see `ddp`; a `BlockModel` is gathered block by block.
      micro_batches: see `ddp`.
      rules: see `ddp`.
      min_shard_elements: see `zero`.
      gather_dtype: what trained floating parameters are cast to before they are gathered and used;
        frozen ones keep their dtype.
      scatter_dtype: what gradients of sharded leaves are cast to before they are summed over data; by default the dtype
        of the parameters, whatever `gather_dtype` is: fp32 sums of bf16 products are then sent unrounded.
      frozen: see `ddp`; frozen leaves are sharded too.
      evaluate_fn: see `ddp`.
      compiler_options: see `ddp`.
      view: see `ddp`.
      separable: see `ddp`.
      axes: see `ddp`.
      batch_dims: see `ddp`.
      sequence_dims: see `ddp`.
      expert_leaves: see `ddp`.
      opt_state_layout: "within" shards optimizer state as the parameters are. "matrices" has each matrix worked on by one
        device, its owner, without collectives inside, for optimizers of matrices (Muon, Shampoo). Stacked blocks [L, ...]
        whose number data divides (times pipeline, and tensor where a rule splits the leaf) have state and update sharded over
        L: gradients go there by an all-to-all, updates back by another, 2 (N-1)/N^2 Psi; terms of the parameter (weight
        decay) are added where it lives, and if the state itself needs it, it goes along. Of other leaves the products and
        decompositions alone go to owners, a matrix or block each, shared out by flops; state stays within, and each array
        that goes or comes costs (N-1)/N^2 Psi. What has no such work sends nothing more.
      offload: ("opt_state",) keeps optimizer state in host memory between steps, 8/N bytes per parameter with fp32 Adam. Values
        are the same. A step copies it to the device and back: of a `BlockModel` block by block, if the optimizer treats these
        apart and does not ask for the loss; all of it at once otherwise, in pipelines, and with `opt_state_layout="matrices"`.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: as `ddp`; if `gather_dtype` or `scatter_dtype` is not floating, or the latter is given with
        `view="global"`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.fsdp(optax.adamw(1e-3), so.make_mesh(), loss_fn)
      >>> state = opt.init(lambda rng: {"w": jnp.ones((64, 32))}, jax.random.key(0))
      >>> state.params["w"].addressable_shards[0].data.shape
      (8, 32)

    References:
      Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
      Parallel", 2023.
    """
    return build(
        StrategyConfig(
            "fsdp",
            tx,
            mesh,
            loss_fn,
            ZERO_3,
            micro_batches=micro_batches,
            rules=rules,
            min_shard_elements=min_shard_elements,
            gather_dtype=gather_dtype,
            scatter_dtype=scatter_dtype,
            frozen=frozen,
            evaluate_fn=evaluate_fn,
            compiler_options=compiler_options,
            view=view,
            separable=separable,
            axis_names=axes,
            batch_dims=batch_dims,
            sequence_dims=sequence_dims,
            expert_leaves=expert_leaves,
            opt_state_layout=opt_state_layout,
            offload=offload,
        )
    )
