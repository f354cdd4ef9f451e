"""Local SGD: replicas train by themselves, and average their parameters now and then."""

import optax

from shardopt.engine.config import SyncConfig
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.local_updates.build import combine


def local_sgd(strategy: ShardedOptimizer, *, sync_every: int, warmup_steps: int = 0) -> ShardedOptimizer:
    """Let each replica of a strategy train by itself, and average parameters every `sync_every` steps.

    Replica i of R steps on the gradient of its own rows; after H steps theta_i <- (1/R) sum_j theta_j. Optimizer
    states stay apart.

    **Equivalence**: equals Local SGD; with `warmup_steps` at first, during which gradients are averaged every step (as
    the strategy alone does), post-local SGD. With H = 1 and plain SGD it equals the strategy alone.

    **Placement**: within a replica as the strategy says. `state.params` are the parameters last agreed on, in the
    model's shapes; each replica's own parameters and optimizer state are in `state.opt_state`, [R, ...] sharded over
    replica. So a device holds one more copy of its parameters than the strategy alone.

    **Communication**: within a replica what the strategy says; over replica one all-reduce of each device's parameters
    every H steps, and nothing at all in the steps between (they are programs of their own).

    `step` returns metrics of this process's replicas: their mean, or what `so.Sum`, `so.Max` and `so.Min` ask for. It does
    not wait for other processes; each reports its own, and `jax.experimental.multihost_utils.process_allgather` collects
    them. `evaluate` takes the shared parameters, those last agreed on; `synchronize` averages now. Frozen leaves that the loss updates (`so.Updated`) are averaged with the
    parameters, integers take the maximum.

    Args:
      strategy: from `ddp`, `zero`, `fsdp` or `hybrid`, on a mesh with a replica axis.
      sync_every: H, steps.
      warmup_steps: steps of averaged gradients before the first that replicas take by themselves.

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

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't Use Large Mini-Batches, Use
      Local SGD", 2020 (post-local SGD).
    """
    return combine("local_sgd", strategy, SyncConfig(optax.sgd(1.0), sync_every, warmup_steps=warmup_steps))
