"""ZeRO: data parallel with optimizer state, gradients and parameters sharded, one more each stage."""

from collections.abc import Sequence

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn
from shardopt.core.errors import format_error
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import STAGES, BatchDims, OptStateLayout, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes


def zero(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    *,
    stage: int = 1,
    micro_batches: int = 1,
    rules: Rules = (),
    min_shard_elements: int = 1024,
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
    """Train data parallel with the redundant copies removed, stage by stage.

    Stage 1 shards the optimizer state over data, stage 2 the gradients as well, stage 3 the parameters too (it
    is `fsdp`). Each device reduces, and updates, its own shard of every leaf: p_k <- p_k + u(g_k) for shard k.

    **Equivalence**: equal to one device on the union batch, up to summation order, for every optax
    transformation, also those that are not elementwise: the update runs in the global view. With `scatter_dtype` see
    `fsdp`; stage 1 rounds the sum of its micro-batches.

    **Placement**: parameters replicated (stages 1, 2) or sharded (3); gradients replicated (1) or sharded (2, 3)
    while they accumulate; optimizer state sharded. A leaf is sharded on its largest dim that the data axis divides and
    tensor does not take, one of experts on the first such. With fp32 Adam: 8 + 8/N, 4 + 12/N, 16/N bytes per parameter. Replicas hold copies.

    **Communication** a step, per device, for Psi parameter bytes over N data devices: stages 1 and 2
    reduce-scatter gradients and all-gather parameters, 2(N-1)/N Psi; stage 1 after the last micro-batch, stage 2
    each micro-batch. `scatter_dtype=bfloat16` halves the reduce-scatter. Stage 3: see `fsdp`. With replicas, an
    all-reduce of the 1/N shards over replica.

    Args:
      tx: any optax transformation; see `ddp`.
      mesh: from `make_mesh`.
      loss_fn: see `ddp`.
      stage: 1, 2 or 3.
      micro_batches: see `ddp`.
      rules: see `ddp`.
      min_shard_elements: leaves with fewer elements (in one block, where blocks are stacked) stay replicated
        over data; `opt.config.report()` lists them.
      scatter_dtype: see `fsdp`.
      frozen: see `ddp`.
      evaluate_fn: see `ddp`.
      compiler_options: see `ddp`.
      view: see `ddp`.
      separable: see `ddp`.
      axes: see `ddp`.
      batch_dims: see `ddp`.
      sequence_dims: see `ddp`.
      expert_leaves: see `ddp`.
      opt_state_layout: see `fsdp`; in stages 1 and 2 gradients of blocks that data divides are reduce-scattered to their
        owners at once, and nothing more is sent.
      offload: see `fsdp`.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `stage` is not 1, 2 or 3; otherwise as `fsdp`.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.zero(optax.adam(1e-3), so.make_mesh(), loss_fn, stage=1)
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> tuple(opt.specs(state.params).opt_state[0].mu["w"])
      ('data', None)

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(f"zero: stage must be 1, 2 or 3, got {stage!r} ({type(stage).__name__}).")
    if stage not in STAGES:
        fix = "use so.ddp to shard nothing, stage=1, 2 or 3 for more."
        raise ValueError(format_error("zero", f"stage must be 1, 2 or 3, got {stage!r}.", fix=fix))
    return build(
        StrategyConfig(
            "zero",
            tx,
            mesh,
            loss_fn,
            STAGES[stage],
            micro_batches=micro_batches,
            rules=rules,
            min_shard_elements=min_shard_elements,
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
