"""Local SGD: replicas train independently, and average their parameters every few steps."""

import optax

from shardopt.config._sync import SyncConfig
from shardopt.core._tracebacks import api_boundary
from shardopt.local_updates._build import combine
from shardopt.step._optimizer import ShardedOptimizer


@api_boundary
def local_sgd(
    strategy: ShardedOptimizer, *, sync_every: int, warmup_steps: int = 0
) -> ShardedOptimizer:
    """Train each replica of a strategy independently, and average parameters every `sync_every`
    steps.

    Replica i of R trains on the gradient of its own rows. After H steps, theta_i <- (1/R) sum_j
    theta_j. Optimizer states are not averaged.

    Args:
      strategy: a strategy from `ddp`, `zero`, `fsdp` or `hybrid`, on a mesh with a replica axis.
      sync_every: H, the number of steps from one average to the next.
      warmup_steps: the number of first steps that average gradients over replicas.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a count is out of range, or the mesh has no replica axis.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)
      >>> inner = so.ddp(optax.sgd(0.25), so.make_mesh(replica=2), loss_fn)
      >>> opt = so.local_sgd(inner, sync_every=2)
      >>> state = opt.init({"w": jnp.zeros(())})
      >>> batch = {"x": jnp.ones(8), "y": jnp.arange(8.0) // 4}  # replica 0 wants w = 0, replica 1 wants w = 1
      >>> for _ in range(2):
      ...     state, metrics = opt.step(state, batch)
      >>> float(state.params["w"])
      0.375

    **Methods**: `step` returns the metrics of this process's replicas: their mean, or the sum,
    maximum or minimum for `so.losses.Sum`, `so.losses.Max` and `so.losses.Min`. It does not wait
    for other processes. Each process reports its own metrics, and
    `jax.experimental.multihost_utils.process_allgather` collects them.

    `evaluate` uses the shared parameters, which are the last average. `synchronize` averages at
    once. Frozen leaves that the loss updates (`so.losses.Updated`) are averaged with the
    parameters. Integer leaves take the maximum.

    **Equivalence**: equal to Local SGD. With `warmup_steps` it equals post-local SGD: the first
    steps average gradients, as the strategy alone does. With H = 1 and plain SGD it equals the
    strategy alone.

    **Placement**: within a replica as in the strategy. `state.params` are the shared parameters, in
    the model's shapes. `state.opt_state` has each replica's own parameters and optimizer state, as
    [R, ...] sharded over replica. So a device holds one more copy of its parameters than with the
    strategy alone.

    **Communication**: within a replica as in the strategy. Over replica, one all-reduce of each
    device's parameters every H steps. The steps between are separate programs without communication
    over replica.

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't Use Large
      Mini-Batches, Use Local SGD", 2020 (post-local SGD).
    """
    return combine(
        "local_sgd", strategy, SyncConfig(optax.sgd(1.0), sync_every, warmup_steps=warmup_steps)
    )
