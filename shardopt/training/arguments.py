"""What `fit` refuses before anything runs."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from shardopt.core.arguments import check_count
from shardopt.core.early_stopping import EarlyStopping
from shardopt.core.errors import complaint
from shardopt.training.loggers import as_loggers
from shardopt.training.replicas import check_rounds

_CHECKPOINTS = ("directory", "resume", "due", "save", "wait", "latest", "restore")


def check_arguments(
    opt: Any,
    state: Any,
    batches: Any,
    *,
    num_steps: Any,
    evaluate: Any,
    evaluate_every: Any,
    early_stopping: Any,
    checkpoints: Any,
    log: Any,
    log_every: Any,
    agree_every: Any,
    progress: Any,
) -> None:
    """Refuse what cannot be trained with.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `num_steps` is negative or another count below 1, `evaluate_every` is given without `evaluate`,
        the state was already donated to a step, or replicas that train apart agree too rarely for this run.
    """
    _check_optimizer_and_state(opt, state)
    _check_batches(batches)
    check_count("fit", "num_steps", num_steps, least=0)
    check_count("fit", "log_every", log_every)
    check_count("fit", "agree_every", agree_every)
    if evaluate is not None and not callable(evaluate):
        what = f"evaluate must be a callable (state) -> dict of numbers, got {type(evaluate).__name__}."
        raise TypeError(complaint("fit", what, fix="pass so.training.evaluation(opt, batches) or your own function."))
    if evaluate_every is not None:
        check_count("fit", "evaluate_every", evaluate_every)
        if evaluate is None:
            raise ValueError(complaint("fit", "evaluate_every needs evaluate.", fix="pass evaluate, or drop it."))
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        what = f"early_stopping must be a so.EarlyStopping, got {type(early_stopping).__name__}."
        raise TypeError(complaint("fit", what, fix='pass so.EarlyStopping("val_loss", patience=5).'))
    if checkpoints is not None and (missing := [name for name in _CHECKPOINTS if not hasattr(checkpoints, name)]):
        what = f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without {', '.join(missing)}."
        path = repr(os.fspath(checkpoints)) if isinstance(checkpoints, str | os.PathLike) else "directory"
        raise TypeError(complaint("fit", what, fix=f"pass so.Checkpoints({path}, every=100, keep=3)."))
    as_loggers(log)
    if not isinstance(progress, bool):
        raise TypeError(f"fit: progress must be True or False, got {progress!r}.")
    check_rounds(
        opt,
        num_steps=num_steps,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        early_stopping=early_stopping,
        checkpoints=checkpoints,
    )


def _check_optimizer_and_state(opt: Any, state: Any) -> None:
    if not (callable(getattr(opt, "step", None)) and callable(getattr(opt, "init", None))):
        fix = "pass what so.ddp, so.zero or so.fsdp returns."
        raise TypeError(complaint("fit", f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix))
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        what = f"state must be a so.TrainState, got {type(state).__name__}."
        raise TypeError(complaint("fit", what, fix="pass opt.init(params)."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        what = "the state was already used: a step takes over the memory of the state it is given."
        raise ValueError(complaint("fit", what, fix="pass the state that the last step or fit returned, or a new one."))


def _check_batches(batches: Any) -> None:
    one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # Iterable alone knows only __iter__; a sequence (a torch-style dataset, a grain MapDataset) has __getitem__.
    if one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        what = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = "pass a grain dataset, an iterator or a list; for one batch over and over itertools.repeat(batch)."
        raise TypeError(complaint("fit", what, fix=fix))
