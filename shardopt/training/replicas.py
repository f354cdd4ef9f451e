"""What `fit` knows of replicas that train apart: when the parameters they share change, and what has no sense beside it."""

from typing import Any, NamedTuple

from shardopt.core.early_stopping import EarlyStopping
from shardopt.core.errors import complaint, plural
from shardopt.training.evaluation import Evaluation


class Rounds(NamedTuple):
    """When replicas that train apart agree.

    Attributes:
      first: the first step after which the parameters that they share may have changed.
      stride: steps from one agreement, on whatever part of the model, to the next.
    """

    first: int
    stride: int


def rounds_of(opt: Any) -> Rounds | None:
    """Return when the replicas of `local_sgd` and `diloco` agree; None where they do so in every step."""
    config: Any = getattr(opt, "config", None)
    if not hasattr(config, "sync_every"):
        return None
    stride = config.sync_every // config.fragments
    return Rounds(1 if config.warmup_steps else stride + config.delay, stride)


def check_rounds(
    opt: Any,
    *,
    num_steps: int,
    evaluate: Any,
    evaluate_every: int | None,
    early_stopping: EarlyStopping | None,
    checkpoints: Any,
) -> None:
    """Refuse a run in which replicas never agree, and one that early stopping ends whatever they learn.

    Raises:
      ValueError: if `num_steps` ends before the first agreement, or between two agreements there are more evaluations
        than early stopping has patience for.
    """
    rounds = rounds_of(opt)
    if rounds is None:
        return
    config = opt.config
    who, how = config.strategy, f"sync_every={config.sync_every}"
    how += f", fragments={config.fragments}" if config.fragments > 1 else ""
    how += f", delay={config.delay}" if config.delay else ""
    if 0 < num_steps < rounds.first:
        what = f"num_steps={num_steps} ends before the replicas of {who} agree for the first time, at step {rounds.first} ({how})."
        raise ValueError(complaint("fit", what, fix="train for as many steps at least, or make sync_every smaller."))
    every = getattr(checkpoints, "every", None) if evaluate_every is None else evaluate_every
    # Of another function, and of a training metric, it is not known that they stand still.
    if early_stopping is None or every is None or not isinstance(evaluate, Evaluation):
        return
    most = max(rounds.first - 1, rounds.stride)
    if early_stopping.metric.startswith(evaluate.prefix) and most // every > early_stopping.patience:
        what = (
            f"early_stopping would end any run: evaluated every {plural(every, 'step')}, {early_stopping.metric!r} stays "
            f"as it is {most // every} times in a row, and patience={early_stopping.patience}. It is of the parameters "
            f"that the replicas of {who} share, which change every {plural(rounds.stride, 'step')} ({how})."
        )
        fix = f"evaluate every {rounds.stride} steps, or have more patience, or make sync_every smaller."
        raise ValueError(complaint("fit", what, fix=fix))
