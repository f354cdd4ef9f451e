"""Fully sharded data parallel: parameters, gradients and optimizer state all sharded."""

from typing import Unpack

import optax
from jax.sharding import Mesh

from shardopt.config._config import ZERO_3, configure
from shardopt.config._options import FsdpOptions
from shardopt.config._user_mesh import Axes
from shardopt.core._block_model import LossFn
from shardopt.step._build import build
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._keywords import with_options
from shardopt.strategies._slots import own_slots


# adds the options to the signature and to Args, from the records in config/_options.py
@with_options
def fsdp(
    tx: optax.GradientTransformation,
    mesh: Mesh | Axes,
    loss_fn: LossFn,
    **options: Unpack[FsdpOptions],
) -> ShardedOptimizer:
    """Train fully sharded data parallel: parameters, gradients and optimizer state are all sharded.

    Each device gathers weights just before they are used. A step computes g = reduce_scatter_d grad
    L_d(all_gather(p)), and each device updates its own shard of the parameters with its own shard
    of g.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: as `ddp`; if `gather_dtype` is not floating; if `reducer` is not
        `so.reducers.exact`, since each device sums its own shard of the gradients alone.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.fsdp(optax.adamw(1e-3), so.make_mesh(), loss_fn)
      >>> state = opt.init(lambda rng: {"w": jnp.ones((64, 32))}, jax.random.key(0))
      >>> state.params["w"].addressable_shards[0].data.shape
      (8, 32)

    **Equivalence**: training equals one device on the union batch, up to summation order, for every
    optax transformation but lookahead and dpsgd.

    - With `gather_dtype` it equals one device that computes in that dtype with fp32 master weights.
    - With `reducer=so.reducers.exact(dtype)` g = sum_d round(grad L_d) for each micro-batch: each device rounds once,
      before it sends. The sum is taken in fp32 on CPU. Elsewhere it is taken in that dtype, where
      XLA rounds it up to N - 1 times more. The sums over micro-batches and over replicas are taken
      in the dtype of the parameters.

    **Placement**: parameters, gradients and optimizer state are sharded over data (16/N bytes per
    parameter with fp32 Adam), and over tensor by `rules`. One block of a `BlockModel` is gathered
    at a time, in the layer scan and again in the backward pass. Its outer parameters stay gathered
    from the forward to the backward pass, and so may all parameters of any other loss. A replica
    axis holds copies of the shards (hybrid sharding, HSDP).

    **Communication** per step and device, for parameters of Psi bytes over N data devices: 3(N-1)/N
    Psi in each micro-batch. The weights are all-gathered in the forward and again in the backward
    pass. The gradients are reduce-scattered.

    - Some weights are gathered only once: weights that the backward pass does not need, and outer
      weights of a BlockModel. `tables` of a BlockModel are not gathered at all if `so.nn.embedding`
      finds it cheaper to exchange rows. Weights outside of blocks are gathered once if the compiler
      merges their two gathers (XLA:CPU of jax 0.10 does).
    - `gather_dtype=bfloat16` halves the gathers. `so.reducers.exact(bfloat16)` halves the
      reduce-scatter
      (on CPU it is an all-to-all of as many bytes). By default gradients are reduced in the dtype
      of the parameters.
    - Replicas add an all-reduce of the 1/N shards over replica, after the last micro-batch, in the
      dtype of the parameters.

    **Matrices** (`opt_state="matrices"`): stacked blocks [L, ...] have their state and
    update sharded over L, if data (times pipeline, and times tensor if a rule splits the leaf)
    divides L. An all-to-all sends their gradients to the owners, and another sends the updates
    back: 2 (N-1)/N^2 Psi. Terms of the parameter (weight decay) are added where the parameter
    lives; the parameter is sent along only if the state itself needs it. For other leaves only
    products and decompositions go to owners, one matrix or block each, shared out by flops. Their
    state stays sharded "within", and each array that is sent to an owner or back costs (N-1)/N^2
    Psi. Leaves without such work send nothing more.

    References:
      Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
      Sharded Data Parallel", 2023.
    """
    return build(configure("fsdp", tx, mesh, loss_fn, ZERO_3, options), own_slots)
