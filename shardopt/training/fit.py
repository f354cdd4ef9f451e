"""`fit`: the training loop, and what it refuses before anything runs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from shardopt.checkpoint import Checkpoints
from shardopt.core.arguments import check_count
from shardopt.core.early_stopping import EarlyStopping, best, check_metric, out_of_patience, update
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.batch_dims import num_rows
from shardopt.engine.batches import as_arrays
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.runtime.probe import probe_or_warn
from shardopt.runtime.progress import is_reported
from shardopt.training.evaluation import Evaluate, Evaluation, call_evaluate
from shardopt.training.goodput import Goodput, Ledger
from shardopt.training.loggers import Log, as_loggers, open_log, show_progress
from shardopt.training.metrics import Meter, check_state
from shardopt.training.resume import (
    END,
    SIGNALS,
    FirstState,
    Stream,
    begin,
    catch_signals,
    common_verdict,
    pack,
    step_of,
    written_out,
)
from shardopt.training.tolerance import Tolerance


class FitResult(NamedTuple):
    """How a run ended.

    Attributes:
      state: the last train state; with local updates synchronized, so that its parameters are the mean of all replicas.
      step: steps taken in all, earlier runs included.
      stopped: "completed" (num_steps reached), "early" (early stopping), "sigterm", "interrupted" (Ctrl-C) or
        "exhausted" (no more batches).
      history: what was logged in this call, `{"step": n, "loss": ..., ...}` each.
      best: `{"step": n, metric: value}`, the best that early stopping saw, earlier runs included; None without it.
      goodput: which part of the time went into steps that count; on the first process earlier attempts included.
    """

    state: TrainState
    step: int
    stopped: str
    history: list[dict[str, float]]
    best: dict[str, float] | None
    goodput: Goodput


def fit(
    opt: ShardedOptimizer,
    state: TrainState | FirstState,
    batches: Iterable[PyTree],
    *,
    num_steps: int,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoints: Checkpoints | None = None,
    log: Log | Sequence[Log] | None = None,
    log_every: int = 10,
    agree_every: int = 10,
    progress: bool = True,
) -> FitResult:
    """Train until `num_steps` steps have been taken in all, or something ends the run before.

    Each step is state, metrics = opt.step(state, batch). The host looks at the loss of a step while the device is at the
    next one, and waits only for an evaluation, a checkpoint, early stopping on a training metric, and the end. So at most
    two steps are under way.

    **Resuming.** With `checkpoints.resume` and a checkpoint newer than `state`, train state, data position and early
    stopping are restored; the run then equals an unbroken one (bit for bit on the same mesh). Data with `get_state` and
    `set_state` (grain) is put back by its own state; of other data pass a fresh iterator, from which the batches already
    used are drawn and dropped: it must give them in the same order, and a UserWarning says where it does not. With several processes the position of the first is restored on all.

    **Ends.** At `num_steps`, early stopping, SIGTERM, a first Ctrl-C (a second raises KeyboardInterrupt) and the end of
    the batches, the step is finished, a last evaluation made (not after a signal), and a checkpoint written. Signals are
    noticed in the main thread only.

    **Local updates** (`local_sgd`, `diloco`). Evaluated during the run is `state.params`, as last synchronized. The state
    returned is `opt.synchronize` of the last one, and so is what a last evaluation sees. Checkpoints hold states that are
    not synchronized, so a resumed run equals an unbroken one.

    **Several processes.** All call `fit` alike and draw equally many batches. A signal or early stopping of one stops all
    at the same step. The first process shows progress and writes logs.

    Args:
      opt: a strategy such as `so.ddp` or `so.fsdp`, or `so.local_sgd` or `so.diloco` of one.
      state: the state to start from; its memory goes to the next state. `so.FirstState(params)`, or of a function and a
        key, is made only where no checkpoint is restored: a restart is sooner by the time that it takes.
      batches: an iterable of batches, pytrees with leaves [global batch, ...]; drawn one at a time, never ahead.
      num_steps: the step count, as in `state.step`, to train to: from step 40 to 100 there are 60 steps to take.
      evaluate: `evaluate(state) -> {name: number}`, such as `so.training.evaluation(opt, batches)`; runs on every process
        and must not donate the state.
      evaluate_every: steps between evaluations; by default one with each checkpoint. One is made at the end anyway.
      early_stopping: when to stop; observes training metrics every `log_every` steps, others at scheduled evaluations.
      checkpoints: where to save; a state that is not finite is never saved.
      log: `log(step, metrics)`, or several: `so.training.jsonl`, `so.training.tensorboard` or any function.
      log_every: steps between reports of `opt.step`'s metrics, steps_per_second, examples_per_second and goodput (see
        `so.training.Goodput`).
      agree_every: steps after which several processes ask each other whether to stop.
      progress: show a bar on a terminal, another below it while `so.training.evaluation` runs, and lines elsewhere, on
        standard error; what is said about resuming is printed anyway.

    Returns:
      A `FitResult`.

    Raises:
      NonFiniteLossError: if the loss is NaN or infinite, at the latest one step after; or if an update made the state so. Not
        where `optax.apply_if_finite` skipped the update of that step; but from the step on that it applies again, because
        there were more than `max_consecutive_errors` in a row.
      TypeError: if an argument is of the wrong kind, or `evaluate` does not return a dict of numbers.
      ValueError: if a count is out of range, the state was donated, the folder has checkpoints and `checkpoints.resume`
        is not set, the batches cannot be put back, a metric is not a scalar, `evaluate` takes the name of a training
        metric, early stopping watches no metric, or a run with local updates would end before the first synchronization,
        or be ended by early stopping between two.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3, np.float32)}
      >>> result = fit(opt, opt.init({"w": jnp.zeros(())}), [batch] * 50, num_steps=40, progress=False)
      >>> result.stopped, result.step, round(float(result.state.params["w"]), 3)
      ('completed', 40, 3.0)
    """
    _check_optimizer_and_state(opt, state)
    _check_batches(batches)
    check_count("fit", "num_steps", num_steps, least=0)
    check_count("fit", "log_every", log_every)
    check_count("fit", "agree_every", agree_every)
    _check_evaluate(evaluate, evaluate_every, early_stopping)
    _check_checkpoints(checkpoints)
    as_loggers(log)
    if not isinstance(progress, bool):
        raise TypeError(f"fit: progress must be True or False, got {progress!r}.")
    scheduled_every = checkpoints.every if evaluate_every is None and checkpoints is not None else evaluate_every
    _check_rounds(opt, num_steps, evaluate, scheduled_every, early_stopping)

    local_updates = opt.config.local_updates is not None
    evaluation_scheduled = evaluate is not None and (evaluate_every is not None or checkpoints is not None)
    with ExitStack() as cleanup:
        received = cleanup.enter_context(catch_signals())
        display = cleanup.enter_context(show_progress(num_steps, shown=progress))
        write = cleanup.enter_context(open_log(log))
        ledger = Ledger(_folder(checkpoints))
        cleanup.callback(ledger.enter, "")  # after what is still being written
        ledger.enter("begin", step_of(state))
        cleanup.enter_context(written_out(checkpoints))

        stream, meter, history = Stream(batches), Meter(checkpoints), []
        state, seen = begin(opt, state, stream, early_stopping, checkpoints, display.say)
        step = int(jax.device_get(state.step))
        tolerance = Tolerance(opt.wrapped, state.opt_state)
        saved = None if checkpoints is None else checkpoints.latest()
        measured: dict[str, float] = {}
        display.advance(step)

        def report(step: int, metrics: dict[str, float]) -> None:
            if "steps_per_second" in metrics:
                metrics = {**metrics, "goodput": ledger.total().fraction}
            if history and history[-1]["step"] == step:
                history[-1].update(metrics)
            else:
                history.append({"step": step, **metrics})
            write(step, metrics)
            display.report(step, metrics)

        def evaluated(done: int, total: int | None) -> None:
            ledger.enter("evaluate")
            display.evaluate(done, total)

        def check(metrics: dict[str, float]) -> None:
            assert not isinstance(state, FirstState)
            check_state(state, metrics, step=step - 1, position=stream.drawn - 1, checkpoints=checkpoints)

        def save(metrics: dict[str, float]) -> None:
            nonlocal saved
            if checkpoints is not None and saved != step:
                checkpoints.save(state, step=step, metrics=metrics, extra=pack(stream, early_stopping, seen))
                saved = step

        stopped = common_verdict(received(), out_of_patience(early_stopping, seen), due=True)
        while stopped is None and step < num_steps:
            ledger.enter("data", step)
            batch = stream.draw()
            if batch is END:
                stopped = "exhausted"
                break
            batch = as_arrays("fit", batch)
            ledger.enter("step")
            state, arriving = opt.step(state, batch)
            step += 1
            logging, measured = step % log_every == 0, {}
            saving = checkpoints is not None and checkpoints.due(step)
            snapping = checkpoints is not None and checkpoints.due_in_memory(step)
            scheduled = saving if evaluate_every is None else step % evaluate_every == 0
            evaluating = evaluate is not None and (scheduled or (step == num_steps and not local_updates))
            ledger.enter("wait")
            late = meter.push(
                step,
                stream.drawn - 1,
                arriving,
                examples=num_rows(opt.config, batch),
                wanted=logging,
                tolerated=tolerance(state.opt_state),
            )
            ledger.enter("log")
            if late is not None:
                report(*late)
            display.advance(step)

            if saving or snapping or evaluating or (logging and early_stopping is not None):
                ledger.enter("wait")
                metrics = meter.settle()
                if evaluate is not None and evaluating:
                    ledger.enter("evaluate")
                    measured = call_evaluate(evaluate, state, metrics, evaluated)
                ledger.enter("log")
                if logging or evaluating:
                    report(step, metrics | measured)
                if evaluating or not evaluation_scheduled:
                    check_metric(early_stopping, known=metrics | measured)
                observed = (metrics if logging else {}) | (measured if scheduled else {})
                seen = update(early_stopping, seen, step, observed)
                if saving:
                    ledger.enter("checkpoint")
                    check(metrics)
                    save(metrics | measured)
                if snapping and checkpoints is not None:
                    ledger.enter("checkpoint")
                    check(metrics)
                    checkpoints.save_in_memory(state, step=step, extra=pack(stream, early_stopping, seen))
                meter.restart()
            due = evaluating or step % agree_every == 0
            ledger.enter("agree")
            stopped = common_verdict(received(), out_of_patience(early_stopping, seen), due=due)
            if step % (_PROBE * agree_every) == 0 and jax.process_count() > 1 and is_reported():
                ledger.enter("agree")  # no step is under way: all have just asked each other
                probe_or_warn()

        ledger.enter("agree")
        stopped = common_verdict(received(), stopped, due=True) or "completed"
        last = opt.synchronize(state) if local_updates else state
        if metrics := meter.settle():  # empty if there was no step to take
            fresh = {} if history and history[-1]["step"] == step else metrics
            if evaluate is not None and not measured and stopped not in SIGNALS:
                found = call_evaluate(evaluate, last, metrics, evaluated)
                fresh, measured = fresh | found, {} if local_updates else found  # what is saved is not synchronized
            if fresh:
                report(step, fresh)
            ledger.enter("checkpoint")
            check(metrics)
        save(metrics | measured)
        if stopped != "completed":
            display.say(f"Stopped at step {step} of {num_steps}: {_REASON[stopped]}.")
    ledger.write(ended_well=True)
    return FitResult(last, step, stopped, history, best(early_stopping, seen), ledger.total())


_PROBE = 10
"""After how often they agree processes that are watched measure their devices."""

_REASON = {
    "exhausted": "there are no more batches",
    "early": "early stopping",
    "interrupted": "interrupted from the keyboard",
    "sigterm": "SIGTERM",
}


def _folder(checkpoints: Checkpoints | None) -> Path | None:
    """Return where the account of goodput is kept, on the first process."""
    return None if checkpoints is None or jax.process_index() else Path(checkpoints.directory)


def _check_optimizer_and_state(opt: ShardedOptimizer, state: TrainState | FirstState) -> None:
    if not (callable(getattr(opt, "step", None)) and callable(getattr(opt, "init", None))):
        fix = "pass what so.ddp, so.zero or so.fsdp returns."
        raise TypeError(format_error("fit", f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix))
    if isinstance(state, FirstState):
        return
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        what = f"state must be a so.TrainState, got {type(state).__name__}."
        raise TypeError(format_error("fit", what, fix="pass opt.init(params)."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        what = "the state was already used: a step takes over the memory of the state it is given."
        fix = "pass the state that the last step or fit returned, or a new one."
        raise ValueError(format_error("fit", what, fix=fix))


def _check_batches(batches: Iterable[PyTree]) -> None:
    one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # Iterable alone knows only __iter__; a sequence (a torch-style dataset, a grain MapDataset) has __getitem__.
    if one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        what = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = "pass a grain dataset, an iterator or a list; for one batch over and over itertools.repeat(batch)."
        raise TypeError(format_error("fit", what, fix=fix))


def _check_evaluate(
    evaluate: Evaluate | None, evaluate_every: int | None, early_stopping: EarlyStopping | None
) -> None:
    if evaluate is not None and not callable(evaluate):
        what = f"evaluate must be a callable (state) -> dict of numbers, got {type(evaluate).__name__}."
        fix = "pass so.training.evaluation(opt, batches) or your own function."
        raise TypeError(format_error("fit", what, fix=fix))
    if evaluate_every is not None:
        check_count("fit", "evaluate_every", evaluate_every)
        if evaluate is None:
            raise ValueError(format_error("fit", "evaluate_every needs evaluate.", fix="pass evaluate, or drop it."))
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        what = f"early_stopping must be a so.EarlyStopping, got {type(early_stopping).__name__}."
        raise TypeError(format_error("fit", what, fix='pass so.EarlyStopping("val_loss", patience=5).'))


def _check_checkpoints(checkpoints: Checkpoints | None) -> None:
    needed = (
        "directory",
        "every",
        "resume",
        "due",
        "due_in_memory",
        "memory_every",
        "save",
        "wait",
        "latest",
        "restore",
    )
    if checkpoints is not None and (missing := [name for name in needed if not hasattr(checkpoints, name)]):
        what = f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without {', '.join(missing)}."
        path = repr(os.fspath(checkpoints)) if isinstance(checkpoints, str | os.PathLike) else "directory"
        raise TypeError(format_error("fit", what, fix=f"pass so.Checkpoints({path}, every=100, keep=3)."))


def _check_rounds(
    opt: ShardedOptimizer,
    num_steps: int,
    evaluate: Evaluate | None,
    evaluate_every: int | None,
    early_stopping: EarlyStopping | None,
) -> None:
    """Refuse a run in which replicas never synchronize, and one that early stopping ends whatever they learn."""
    sync = opt.config.local_updates
    if sync is None:
        return
    # the first step after which the parameters that replicas share may have changed
    first = 1 if sync.warmup_steps else sync.stride + sync.delay
    who, how = opt.config.strategy, f"sync_every={sync.sync_every}"
    how += f", fragments={sync.fragments}" if sync.fragments > 1 else ""
    how += f", delay={sync.delay}" if sync.delay else ""
    if 0 < num_steps < first:
        what = f"num_steps={num_steps} ends before the replicas of {who} first synchronize, at step {first} ({how})."
        raise ValueError(format_error("fit", what, fix="train for as many steps at least, or make sync_every smaller."))
    # Of another function, and of a training metric, it is not known that they stand still.
    if early_stopping is None or evaluate_every is None or not isinstance(evaluate, Evaluation):
        return
    standing = max(first - 1, sync.stride) // evaluate_every
    if early_stopping.metric.startswith(evaluate.prefix) and standing > early_stopping.patience:
        what = (
            f"early_stopping would end any run: evaluated every {plural(evaluate_every, 'step')}, "
            f"{early_stopping.metric!r} stays as it is {standing} times in a row, and patience={early_stopping.patience}. "
            f"It is of the parameters that the replicas of {who} share, which change every {plural(sync.stride, 'step')} "
            f"({how})."
        )
        fix = f"evaluate every {sync.stride} steps, or have more patience, or make sync_every smaller."
        raise ValueError(format_error("fit", what, fix=fix))
