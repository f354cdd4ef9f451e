"""DiLoCo: replicas train by themselves for long, and an outer optimizer learns from how far each has come."""

import optax

from shardopt.engine.config import SyncConfig
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.local_updates.build import combine
from shardopt.reducers import Reducer


def diloco(
    strategy: ShardedOptimizer,
    *,
    outer: optax.GradientTransformation | None = None,
    sync_every: int = 500,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    reducer: Reducer | None = None,
) -> ShardedOptimizer:
    """Let each replica of a strategy train by itself, and step an outer optimizer every `sync_every` steps.

    From shared parameters theta each replica i of R takes H steps to theta_i. Then
    Delta = (1/R) sum_i (theta - theta_i) is the outer gradient, theta <- outer(theta, Delta), and each replica goes on
    from (1 - mix) theta + mix theta_i, with its own optimizer state.

    With P fragments (Streaming DiLoCo) the model agrees part by part: fragment f after steps (f + 1) H / P, then every
    H. It consists of the blocks f, f + P, f + 2P, ... of a `BlockModel` (of each stage, in a pipeline) and of the other
    leaves dealt out in turn. With a delay, Delta is taken at step t, and theta updated and mixed after step t + delay;
    sending is part of the program of step t + 1, so it can overlap with training.

    **Equivalence**: equals the published algorithm. With H = 1, inner SGD of rate a, and outer SGD of rate 1 without
    momentum it equals the strategy alone; with any H and that outer optimizer, `local_sgd`.

    **Placement**: within a replica as the strategy says. `state.params` are the shared parameters theta, in the model's
    shapes, placed as the strategy places parameters, like the outer optimizer's state; each replica's own parameters
    and optimizer state are in `state.opt_state`, [R, ...] sharded over replica. With a delay come the means on their way,
    and the state of the reducer twice: now, and before they were sent.

    **Communication**: within a replica what the strategy says; over replica one all-reduce of each device's parameters
    every H steps (of Psi bytes: 2(R-1)/R Psi / H a step, at most 2(R-1)/R Psi / P at a time), or what `reducer` sends;
    nothing at all in steps that do not send (they are programs of their own). What a step does is fixed when it is
    compiled: there is a program for steps without an agreement, and for each fragment one without a delay, and with one
    up to two: 1 + P programs, or up to 1 + 2P (of a delay of 1, 1 + P), each compiled in the step that needs it first.

    `step` returns metrics of this process's replicas: their mean, or what `so.Sum`, `so.Max` and `so.Min` ask for. It does
    not wait for other processes; each reports its own, and `jax.experimental.multihost_utils.process_allgather` collects
    them. `evaluate` takes the shared parameters.
    `synchronize` makes them, and all replicas, the mean of the replicas, without an outer step; outer gradients that are
    on their way are dropped, as the mean has what they say, and what the reducer remembers is again what it was before
    they were sent. Frozen leaves that the loss updates (`so.Updated`) are averaged whenever something is sent, integers
    take the maximum.

    Args:
      strategy: from `ddp`, `zero`, `fsdp` or `hybrid`, on a mesh with a replica axis.
      outer: the outer optimizer, by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`. It sees one fragment at a
        time, as a list of leaves.
      sync_every: H, steps between two agreements on the same fragment.
      fragments: P; divides H.
      delay: steps between sending and applying; below H / P.
      mix: the share of its own parameters that a replica keeps, from 0 to 1.
      reducer: how outer gradients cross the replica axis, from `so.reducers`; by default as an exact all-reduce. Each
        device compresses what it holds.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, `fragments` does not divide `sync_every`, the delay is too long, or the
        mesh has no replica axis.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)
      >>> inner = so.fsdp(optax.sgd(0.25), so.make_mesh(replica=2), loss_fn)
      >>> opt = so.diloco(inner, outer=optax.sgd(0.5), sync_every=2)
      >>> state = opt.init({"w": jnp.zeros(())})
      >>> batch = {"x": jnp.ones(8), "y": jnp.arange(8.0) // 4}  # replica 0 wants w = 0, replica 1 wants w = 1
      >>> for _ in range(2):
      ...     state, metrics = opt.step(state, batch)
      >>> float(state.params["w"])
      0.1875

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1;
      Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, algorithm 2.
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    sync = SyncConfig(outer, sync_every, fragments=fragments, delay=delay, mix=mix, reducer=reducer)
    return combine("diloco", strategy, sync)
