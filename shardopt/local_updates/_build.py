"""Build the optimizer of `local_sgd` and `diloco` from a synchronous strategy and a `SyncConfig`."""

from shardopt.config._check import check_optimizer
from shardopt.config._recipe import Recipe
from shardopt.config._sync import SyncConfig
from shardopt.core._arguments import check_count, check_is_number
from shardopt.core._errors import calling, type_error, value_error
from shardopt.core._reducer import check_reducer
from shardopt.local_updates._step import compile_local_step
from shardopt.step._build import build
from shardopt.step._optimizer import ShardedOptimizer


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
        strategy=caller,
        local_updates=sync._replace(mix=float(sync.mix)),
        recipe=Recipe(combine, (caller, strategy, sync), {}),
    )
    return build(config, compile_step=compile_local_step)


def check_strategy(strategy: ShardedOptimizer, sync: SyncConfig) -> None:
    """Check that this is a synchronous strategy on a mesh of several replicas.

    Raises:
      TypeError: if it is not a synchronous strategy.
      ValueError: if its mesh has no replica axis, or it has a reducer and `sync` has warm-up steps.
    """
    if not isinstance(strategy, ShardedOptimizer) or strategy.config.local_updates is not None:
        strategy_name = (
            strategy.config.strategy
            if isinstance(strategy, ShardedOptimizer)
            else type(strategy).__name__
        )
        problem = f"strategy must be a synchronous one, got {strategy_name}."
        raise type_error(
            problem, fix="pass so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...)."
        )
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
    every, fragments = sync.sync_every, sync.fragments
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
        fix = f"use a delay of at most {stride - 1}, or sync less often."
        raise value_error(problem, fix=fix)
    check_is_number("mix", sync.mix)
    if not 0 <= sync.mix <= 1:
        raise value_error(f"mix must be between 0 and 1, got {sync.mix}.")
