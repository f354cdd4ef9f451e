"""The arguments of `fit`: their checks before a step runs, and the record that the run reads."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import jax
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints, is_save_due
from shardopt.checkpoint._hashed import is_hashed
from shardopt.core import (
    PyTree,
    TrainState,
    check_count,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
)
from shardopt.core._early_stopping import EarlyStopping
from shardopt.step._global_rows import Rows, RowsOfOne, unwrap
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._evaluation import Evaluate
from shardopt.training._resume import DeferredInit
from shardopt.training._verify import Verification


class Due(NamedTuple):
    """The tasks that are due after a step.

    Attributes:
      log: the metrics are reported.
      observe: early stopping sees the metrics of the step.
      evaluate: the state is evaluated.
      scheduled: early stopping sees the evaluation, since it is not only the last one.
      save: a checkpoint is written.
      save_in_memory: a snapshot is stored in the memory of the hosts.
      agree: processes agree whether to stop.
    """

    log: bool = False
    observe: bool = False
    evaluate: bool = False
    scheduled: bool = False
    save: bool = False
    save_in_memory: bool = False
    agree: bool = False

    @property
    def waits(self) -> bool:
        """Whether the run waits for the step."""
        return self.observe or self.evaluate or self.save or self.save_in_memory


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The checked arguments of `fit`.

    Attributes:
      evaluate_every: steps between evaluations; None for one with each checkpoint.
      verification: takes verified steps; or None.
    """

    opt: ShardedOptimizer
    num_steps: int
    evaluate: Evaluate | None
    evaluate_every: int | None
    early_stopping: EarlyStopping | None
    checkpoints: Checkpoints | None
    log_every: int
    norms_every: int | None
    profile: tuple[int, int] | None
    verification: Verification | None

    @property
    def local_updates(self) -> bool:
        """Whether replicas train apart, so that the returned state is not the saved one."""
        return self.opt.config.local_updates is not None

    @property
    def evaluates_on_schedule(self) -> bool:
        """Whether there are evaluations before the last step."""
        has_schedule = self.evaluate_every is not None or self.checkpoints is not None
        return self.evaluate is not None and has_schedule

    def due(self, step: int) -> Due:
        """Return the tasks that are due after this many steps."""
        checkpoints = self.checkpoints
        log = step % self.log_every == 0
        save = is_save_due(checkpoints, step, agree_every=self.log_every)
        scheduled = save if self.evaluate_every is None else step % self.evaluate_every == 0
        is_last = step == self.num_steps and not self.local_updates
        evaluate = self.evaluate is not None and (scheduled or is_last)
        return Due(
            log=log,
            observe=log and self.early_stopping is not None,
            evaluate=evaluate,
            scheduled=scheduled,
            save=save,
            save_in_memory=checkpoints is not None and checkpoints.due_in_memory(step),
            agree=log or evaluate,
        )


def check_optimizer_and_state(opt: ShardedOptimizer, state: TrainState | DeferredInit) -> None:
    """Refuse an argument that is no strategy, or no live state of it.

    Raises:
      TypeError: if one is of another type.
      ValueError: if the state was passed to a step before.
    """
    if not (callable(getattr(opt, "step", None)) and callable(getattr(opt, "init", None))):
        fix = "pass what so.ddp, so.zero or so.fsdp returns."
        raise type_error(f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix)
    if isinstance(state, DeferredInit):
        return
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        problem = f"state must be a so.TrainState, got {type(state).__name__}."
        raise type_error(problem, fix="pass opt.init(params).")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        problem = (
            "the state was already used: a step takes over the memory of the state it is given."
        )
        fix = "pass the state that the last step or fit returned, or a new one."
        raise value_error(problem, fix=fix)


def check_same_arguments(arguments: Arguments, rows: Rows) -> None:
    """Refuse, by a ValueError, arguments that differ between the processes of a mesh."""
    if isinstance(rows, RowsOfOne):
        return
    # only several processes load it
    from shardopt.step._same_start import check_same

    names = ("num_steps", "evaluate_every", "early_stopping", "log_every", "norms_every")
    values = {name: str(getattr(arguments, name)) for name in names}
    values["evaluate"] = "None" if arguments.evaluate is None else "a function"
    values["cross_check_every"] = "None" if arguments.verification is None else "a number"
    values["checkpoints"] = "None"
    if arguments.checkpoints is not None:
        fields = ("every", "memory_every", "resume")
        values["checkpoints"] = ", ".join(
            f"{field}={getattr(arguments.checkpoints, field)}" for field in fields
        )
    check_same("fit", {"options": values}, rows.processes)


def check_batches(batches: Iterable[PyTree]) -> None:
    """Refuse, by a TypeError, one batch in place of batches, and what cannot be iterated."""
    batches, _ = unwrap(batches)
    is_one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # isinstance(..., Iterable) only checks __iter__; a torch-style dataset or a grain MapDataset
    # has only __getitem__.
    if is_one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        problem = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = (
            "pass a grain dataset, an iterator or a list; for one batch over and over"
            " itertools.repeat(batch)."
        )
        raise type_error(problem, fix=fix)


def split_evaluate(
    evaluate: Evaluate | tuple[Evaluate, int] | None,
) -> tuple[Evaluate | None, int | None]:
    """Return the function that evaluates, and the steps between evaluations if they are given.

    Raises:
      TypeError: if it is neither a function nor a pair of a function and a number.
      ValueError: if the number is below 1.
    """
    if evaluate is None:
        return None, None
    function = evaluate
    every = None
    if isinstance(evaluate, tuple) and len(evaluate) == 2:
        function, every = cast(tuple[Evaluate, int | None], evaluate)
        if every is not None:
            check_count("evaluate[1]", every)
    if isinstance(function, tuple) or not callable(function):
        problem = (
            "evaluate must be a callable (state) -> dict of numbers, or a pair of it and the steps"
            f" between evaluations, got {type(function).__name__}."
        )
        fix = "pass so.training.evaluation(opt, batches) or your own function."
        raise type_error(problem, fix=fix)
    return function, every


def check_hash_only(
    opt: ShardedOptimizer, state: TrainState | DeferredInit, checkpoints: Checkpoints | None
) -> None:
    """Refuse checkpoints that would have only a hash of parameters that are trained."""
    hash_only = getattr(checkpoints, "hash_only", ())
    if not hash_only:
        return
    if opt.config.local_updates is not None:
        problem = "checkpoints with hash_only cannot store the parameters of each replica apart."
        raise value_error(problem, fix="leave hash_only out with local_sgd and diloco.")
    params = state.shapes() if isinstance(state, DeferredInit) else state.params
    frozen = [re.compile(pattern) for pattern in opt.config.layout.frozen]
    trained = [
        path
        for path, _ in leaves_with_paths(params)
        if is_hashed(path, hash_only) and not is_hashed(path, frozen)
    ]
    if trained:
        problem = (
            f"hash_only of the checkpoints matches {plural(len(trained), 'leaf')} that the strategy"
            " trains."
        )
        raise value_error(problem, trained, "pass the regexes that the strategy got as frozen.")


def check_rounds(opt: ShardedOptimizer, num_steps: int) -> None:
    """Refuse a run that ends before replicas synchronize."""
    local_updates = opt.config.local_updates
    if local_updates is None:
        return
    # the first step after which the shared parameters of the replicas may have changed
    first_change = 1 if local_updates.warmup_steps else local_updates.stride + local_updates.delay
    if 0 < num_steps < first_change:
        options_text = f"sync_every={local_updates.sync_every}"
        if local_updates.fragments > 1:
            options_text += f", fragments={local_updates.fragments}"
        if local_updates.delay:
            options_text += f", delay={local_updates.delay}"
        problem = (
            f"num_steps={num_steps} ends before the replicas of {opt.config.strategy} first"
            f" synchronize, at step {first_change} ({options_text})."
        )
        fix = "train for as many steps at least, or make sync_every smaller."
        raise value_error(problem, fix=fix)
