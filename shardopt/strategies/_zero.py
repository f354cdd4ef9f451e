"""ZeRO: data parallel, with optimizer state, then gradients sharded."""

from typing import Unpack

import optax
from jax.sharding import Mesh

from shardopt.config._config import STAGES, configure
from shardopt.config._options import ZeroOptions
from shardopt.config._user_mesh import Axes
from shardopt.core import type_error, value_error
from shardopt.core._block_model import LossFn
from shardopt.step._build import build
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._keywords import with_options
from shardopt.strategies._slots import own_slots


# adds the options to the signature and to Args, from the records in config/_options.py
@with_options
def zero(
    tx: optax.GradientTransformation,
    mesh: Mesh | Axes,
    loss_fn: LossFn,
    *,
    stage: int = 1,
    **options: Unpack[ZeroOptions],
) -> ShardedOptimizer:
    """Train data parallel with fewer redundant copies.

    Stage 1 shards the optimizer state over the data axis, stage 2 the gradients as well. Stage 3,
    which shards the parameters too, is `fsdp`. Each device reduces and updates its own shard of
    every leaf: p_k <- p_k + u(g_k) for shard k.

    Args:
      stage: 1 or 2.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `stage` is not 1 or 2; otherwise as `fsdp`.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.zero(optax.adam(1e-3), so.make_mesh(), loss_fn, stage=1)
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> tuple(opt.specs(state.params).opt_state[0].mu["w"])
      ('data', None)

    **Equivalence**: training equals one device on the union batch, up to summation order. This
    holds for every optax transformation but lookahead and dpsgd, elementwise or not, because the update runs
    in the global view. `fsdp` says how `so.reducers.exact(dtype)` rounds; stage 1 rounds the sum of its
    micro-batches.

    **Placement** of parameters, gradients (while they accumulate) and optimizer state, with the
    bytes of fp32 Adam per parameter:

    - Stage 1: parameters and gradients replicated, optimizer state sharded: 8 + 8/N bytes.
    - Stage 2: parameters replicated, gradients and optimizer state sharded: 4 + 12/N bytes.

    A leaf is sharded on its largest dim that the data axis divides and tensor does not take; a leaf
    of experts on the first such dim. A leaf of 2^20 or more elements prefers dims whose shards fill
    tiles of TPUs. Replicas hold copies.

    **Communication** per step and device, for parameters of Psi bytes over N data devices: stages 1
    and 2 reduce-scatter gradients and all-gather parameters, 2(N-1)/N Psi. Stage 1 does so after
    the last micro-batch, stage 2 reduce-scatters in each micro-batch. With
    `opt_state="matrices"` they reduce-scatter the gradients of blocks that data divides to
    their owners directly, so nothing more is sent. `so.reducers.exact(bfloat16)` halves the
    reduce-scatter. Replicas add an all-reduce of the 1/N shards over
    replica.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020.
    """
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise type_error(f"stage must be 1 or 2, got {stage!r} ({type(stage).__name__}).")
    if stage not in STAGES:
        fix = "use so.ddp to shard nothing, stage=1 or 2 for more, or so.fsdp for parameters too."
        raise value_error(f"stage must be 1 or 2, got {stage!r}.", fix=fix)
    return build(configure("zero", tx, mesh, loss_fn, STAGES[stage], options), own_slots)
