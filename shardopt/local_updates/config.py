"""What `local_sgd` and `diloco` refuse before anything is built."""

from typing import Any

from shardopt.core.arguments import check_count, check_is_number
from shardopt.core.errors import format_error
from shardopt.engine.config import StrategyConfig
from shardopt.engine.optimizer import ShardedOptimizer, check_optimizer
from shardopt.reducers.reducer import check_reducer


def check_strategy(who: str, strategy: Any, *, warmup_steps: int = 0) -> None:
    """Refuse what is not a ring-1 strategy on a mesh of several replicas.

    Raises:
      TypeError: if it is not a strategy of ring 1.
      ValueError: if its mesh has no replica axis, or it has a reducer and there are warm-up steps.
    """
    if not isinstance(strategy, ShardedOptimizer) or not isinstance(
        getattr(strategy.config, "recipe", None), StrategyConfig
    ):
        given = getattr(getattr(strategy, "config", None), "strategy", type(strategy).__name__)
        what = f"strategy must be one of ring 1, got {given}."
        raise TypeError(format_error(who, what, fix="pass so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...)."))
    if strategy.mesh.shape.get("replica", 1) < 2:
        what = f"the mesh of the strategy has axes {dict(strategy.mesh.shape)}, and no replica axis above 1."
        raise ValueError(format_error(who, what, fix="make the mesh with so.make_mesh(replica=...)."))
    if warmup_steps and strategy.config.recipe.reducer is not None:
        what = "warm-up steps average gradients over replicas exactly, which a strategy with a reducer of its own does not."
        raise ValueError(format_error(who, what, fix="use warmup_steps=0, or a strategy without a reducer."))


def check_sync(who: str, *, sync_every: Any, warmup_steps: Any = 0, fragments: Any = 1, delay: Any = 0) -> None:
    """Refuse step counts that do not go together.

    Raises:
      TypeError: if one is not an integer.
      ValueError: if one is out of range, fragments do not divide `sync_every`, or the delay is too long.
    """
    check_count(who, "sync_every", sync_every, least=1)
    check_count(who, "warmup_steps", warmup_steps, least=0)
    check_count(who, "fragments", fragments, least=1)
    check_count(who, "delay", delay, least=0)
    if sync_every % fragments:
        what = f"sync_every={sync_every} is not divisible by fragments={fragments}, remainder {sync_every % fragments}."
        near = sorted({max(sync_every // fragments, 1) * fragments, (sync_every // fragments + 1) * fragments})
        raise ValueError(format_error(who, what, fix=f"use sync_every={' or '.join(map(str, near))}."))
    stride = sync_every // fragments
    if delay >= stride:
        what = f"delay={delay} must be below sync_every / fragments = {stride}: the next fragment is sent then."
        raise ValueError(format_error(who, what, fix=f"use a delay of at most {stride - 1}, or sync less often."))


def check_mix(who: str, mix: Any) -> None:
    """Refuse a share that is not between 0 and 1.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is out of range.
    """
    check_is_number(who, "mix", mix)
    if not 0 <= mix <= 1:
        raise ValueError(f"{who}: mix must be between 0 and 1, got {mix}.")


def check_outer(who: str, outer: Any, reducer: Any) -> None:
    """Refuse what is not an outer optimizer, or not a reducer."""
    check_optimizer(who, outer)
    if reducer is not None:
        check_reducer(who, reducer)
