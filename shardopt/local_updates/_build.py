"""`local_sgd` and `diloco`: replicas train independently, and synchronize every few steps."""

import optax

from shardopt.config._check import check_optimizer
from shardopt.config._sync import SyncConfig
from shardopt.core import calling, check_count, check_is_number, type_error, value_error
from shardopt.core._reducer import check_reducer
from shardopt.core._tracebacks import api_boundary
from shardopt.local_updates._step import compile_local_step
from shardopt.reducers import Reducer
from shardopt.step._build import build
from shardopt.step._optimizer import ShardedOptimizer


@api_boundary
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
    """Train each replica of a strategy independently, and step an outer optimizer every
    `sync_every` steps.

    Each replica i of R takes H steps from the shared parameters theta to theta_i. The outer
    gradient is Delta = (1/R) sum_i (theta - theta_i), and theta <- outer(theta, Delta). Each
    replica continues from (1 - mix) theta + mix theta_i, with its own optimizer state.

    Args:
      strategy: a strategy from `ddp`, `zero`, `fsdp` or `hybrid`, on a mesh with a replica axis.
      outer: the outer optimizer, by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`. It
        receives one fragment at a time, as a list of leaves.
      sync_every: H, the number of steps between two synchronizations of the same fragment.
      fragments: P, the number of fragments; it divides H.
      delay: the number of steps between sending and applying; below H / P.
      mix: the fraction of its own parameters that a replica keeps, from 0 to 1.
      reducer: the reducer that averages outer gradients over the replica axis, from `so.reducers`;
        by default an exact all-reduce. Each device compresses its own shards.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, `fragments` does not divide `sync_every`, the delay
        is too long, or the mesh has no replica axis.

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

    With P fragments (Streaming DiLoCo), the replicas synchronize one fragment of the model at a
    time. Fragment f is due after (f + 1) H / P steps, and then every H steps. Fragment f consists
    of the blocks f, f + P, f + 2P, ... of a `BlockModel` (in a pipeline, of each stage). The other
    leaves are assigned to the fragments in turn.

    With a delay, Delta is computed at step t, and theta is updated and mixed after step t + delay.
    Sending is part of the program of step t + 1, so it can overlap with training.

    **Methods**: `step` returns the metrics of this process's replicas: their mean, or the sum,
    maximum or minimum for `so.losses.Sum`, `so.losses.Max` and `so.losses.Min`. It does not wait
    for other processes. Each process reports its own metrics, and
    `jax.experimental.multihost_utils.process_allgather` collects them. `evaluate` uses the shared
    parameters.

    `synchronize` sets the shared parameters and all replicas to the mean of the replicas, without
    an outer step. Pending outer gradients are dropped, because the mean contains them. The reducer
    returns to its state before they were sent.

    Frozen leaves that the loss updates (`so.losses.Updated`) are averaged whenever a fragment is
    sent. Integer leaves take the maximum.

    **Equivalence**: equal to the published algorithm. With inner SGD, H = 1, and outer SGD of rate
    1 without momentum, it equals the strategy alone. With any H and that outer optimizer, it equals
    `local_sgd`.

    **Placement**: within a replica as in the strategy. `state.params` are the shared parameters
    theta in the model's shapes. They and the state of the outer optimizer are placed as the
    strategy places parameters. `state.opt_state` has each replica's own parameters and optimizer
    state, as [R, ...] sharded over replica. With a delay it also has the pending means, and the
    state of the reducer twice: its current state, and its state before they were sent.

    **Communication**: within a replica as in the strategy. Over replica, one all-reduce of each
    device's parameters every H steps, or the bytes that `reducer` sends. For Psi bytes of
    parameters this is 2(R-1)/R Psi / H per step, and at most 2(R-1)/R Psi / P at a time. Steps that
    do not send have no communication over replica.

    **Compilation**: each kind of step is a program, compiled when a step first needs it. There is
    one program for steps without synchronization. Each fragment adds one program without a delay,
    or up to two with a delay. So there are 1 + P programs without a delay and with a delay of 1,
    and up to 1 + 2P with a longer delay.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
      algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
      algorithm 2.
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    sync = SyncConfig(outer, sync_every, fragments=fragments, delay=delay, mix=mix, reducer=reducer)
    return combine("diloco", strategy, sync)


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


def combine(caller: str, strategy: ShardedOptimizer, sync: SyncConfig) -> ShardedOptimizer:
    """Return the strategy with replicas that train independently, and synchronize as `sync`
    configures.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, or the strategy does not support independent
        replicas.
    """
    with calling(caller):
        check_sync(sync)
        check_strategy(strategy, sync)
    config = strategy.config._replace(
        strategy=caller, local_updates=sync._replace(mix=float(sync.mix))
    )
    return build(config, compile_step=compile_local_step)


def check_strategy(strategy: ShardedOptimizer, sync: SyncConfig) -> None:
    """Check that this is a synchronous strategy on a mesh of several replicas.

    Raises:
      TypeError: if it is not a synchronous strategy.
      ValueError: if its mesh has no replica axis, or it has a reducer and `sync` has warm-up steps.
    """
    fix = "pass so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...)."
    check_synchronous(strategy, "strategy must be a synchronous one", fix)
    if strategy.config.mesh.shape.get("replica", 1) < 2:
        problem = (
            f"the mesh of the strategy has axes {dict(strategy.mesh.shape)}, and no replica axis"
            " above 1."
        )
        raise value_error(problem, fix="make the mesh with so.make_mesh(replica=...).")
    if sync.warmup_steps and strategy.config.wire.reducer is not None:
        problem = (
            "warm-up steps average gradients over replicas exactly, which a strategy with a reducer"
            " of its own does not."
        )
        raise value_error(problem, fix="use warmup_steps=0, or a strategy without a reducer.")


def check_synchronous(strategy: object, claim: str, fix: str) -> ShardedOptimizer:
    """Return a synchronous strategy; refuse, by a TypeError, what is none.

    Args:
      strategy: the argument.
      claim: the beginning of the message.
      fix: the remedy.
    """
    if not isinstance(strategy, ShardedOptimizer):
        raise type_error(f"{claim}, got {type(strategy).__name__}.", fix=fix)
    if strategy.config.local_updates is not None:
        raise type_error(f"{claim}, got {strategy.config.strategy}.", fix=fix)
    return strategy


def check_sync(sync: SyncConfig) -> None:
    """Check the types and ranges of a `SyncConfig`, and that its numbers fit together.

    Raises:
      TypeError: if a count is not an integer, the mix not a number, or the outer optimizer or the
        reducer not of its type.
      ValueError: if a number is out of range, fragments do not divide `sync_every`, or the delay is
        too long.
    """
    check_optimizer(sync.outer)
    if sync.reducer is not None:
        check_reducer(sync.reducer)
    check_count("sync_every", sync.sync_every, minimum=1)
    check_count("warmup_steps", sync.warmup_steps, minimum=0)
    check_count("fragments", sync.fragments, minimum=1)
    check_count("delay", sync.delay, minimum=0)
    every = sync.sync_every
    fragments = sync.fragments
    if every % fragments:
        problem = (
            f"sync_every={every} is not divisible by fragments={fragments}, remainder"
            f" {every % fragments}."
        )
        multiples = sorted(
            {max(every // fragments, 1) * fragments, (every // fragments + 1) * fragments}
        )
        raise value_error(problem, fix=f"use sync_every={' or '.join(map(str, multiples))}.")
    stride = every // fragments
    if sync.delay >= stride:
        problem = (
            f"delay={sync.delay} must be below sync_every / fragments = {stride}: the next fragment"
            " is sent then."
        )
        raise value_error(problem, fix=f"use a delay of at most {stride - 1}, or sync less often.")
    check_is_number("mix", sync.mix)
    if not 0 <= sync.mix <= 1:
        raise value_error(f"mix must be between 0 and 1, got {sync.mix}.")
