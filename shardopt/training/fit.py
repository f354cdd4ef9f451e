"""`fit`: the training loop, and the checks of its arguments before a step runs."""

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
    DeferredInit,
    Stream,
    begin,
    catch_signals,
    common_verdict,
    finish_writes,
    pack,
    step_of,
)
from shardopt.training.tolerance import Tolerance


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the last train state; with local updates it is synchronized, so that its parameters are the mean of all
        replicas.
      step: total steps taken, including earlier runs.
      stopped: "completed" (num_steps reached), "early" (early stopping), "sigterm", "interrupted" (Ctrl-C) or
        "exhausted" (no more batches).
      history: the metrics that this call logged, `{"step": n, "loss": ..., ...}` each.
      best: `{"step": n, metric: value}`, the best value that early stopping saw, including earlier runs; None without
        it.
      goodput: the share of time spent on steps that count; on the first process it includes earlier attempts.
    """

    state: TrainState
    step: int
    stopped: str
    history: list[dict[str, float]]
    best: dict[str, float] | None
    goodput: Goodput


def fit(
    opt: ShardedOptimizer,
    state: TrainState | DeferredInit,
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
    """Train until `num_steps` total steps are taken, or something ends the run earlier.

    Each step is state, metrics = opt.step(state, batch). The host reads the loss of a step while the device computes
    the next one. It waits only for an evaluation, a checkpoint, early stopping on a training metric, and the end. So
    at most two steps are in progress.

    **Resuming.** If `checkpoints.resume` is set and a checkpoint is newer than `state`, train state, position in the
    batches and early stopping are restored. The run then equals an unbroken one (bit for bit on the same mesh).

    - Batches with `get_state` and `set_state` (grain) continue from their saved state.
    - For other batches pass a fresh iterator; the batches already used are drawn and dropped. It must give the same
      order as before; if it does not, a UserWarning says so.
    - With several processes, all restore the position of the first process.

    **End of the run.** It ends at `num_steps`, at early stopping, at SIGTERM, at a first Ctrl-C (a second one raises
    KeyboardInterrupt) and after the last batch. Then the step is finished, a last evaluation runs (not after a
    signal), and a checkpoint is written. Signals are noticed only in the main thread.

    **Local updates** (`local_sgd`, `diloco`). Evaluations during the run use `state.params` as last synchronized. The
    returned state is `opt.synchronize` of the last state, and the last evaluation uses it. Checkpoints hold states
    before synchronization, so a resumed run equals an unbroken one.

    **Several processes.** All call `fit` with the same arguments and draw the same number of batches. A signal or early
    stopping on one process stops all at the same step. The first process shows progress and writes logs.

    Args:
      opt: a strategy such as `so.ddp` or `so.fsdp`, or `so.local_sgd` or `so.diloco` of a strategy.
      state: the state to start from; its memory is reused for the next state. Or `so.DeferredInit(params)`, or
        `so.DeferredInit(init_fn, key)`: it is initialized only if no checkpoint is restored, so a restart saves that
        time.
      batches: an iterable of batches, pytrees with leaves [global batch, ...]; drawn one at a time, never ahead.
      num_steps: the total step count, as in `state.step`, to train to: from step 40 to 100 there are 60 steps to take.
      evaluate: `evaluate(state) -> {name: number}`, such as `so.training.evaluation(opt, batches)`; runs on every
        process and must not donate the state.
      evaluate_every: steps between evaluations; by default one with each checkpoint. A last one runs at the end.
      early_stopping: when to stop; reads training metrics every `log_every` steps, other metrics at scheduled
        evaluations.
      checkpoints: where to save; a state that is not finite is never saved.
      log: `log(step, metrics)`, or several: `so.training.jsonl`, `so.training.tensorboard` or any function.
      log_every: steps between reports of `opt.step`'s metrics, steps_per_second, examples_per_second and goodput (see
        `so.training.Goodput`).
      agree_every: steps between agreements of several processes whether to stop.
      progress: show a bar on a terminal, a second bar while `so.training.evaluation` runs, and lines elsewhere, on
        standard error. Messages about resuming are printed even if False.

    Returns:
      A `FitResult`.

    Raises:
      NonFiniteLossError: if the loss is NaN or infinite, at most one step later; or if an update made the state NaN or
        infinite. It is not raised for a step whose update `optax.apply_if_finite` skipped. After more than
        `max_consecutive_errors` such steps in a row `apply_if_finite` applies updates again, and the error is raised.
      TypeError: if an argument is of the wrong kind, or `evaluate` does not return a dict of numbers.
      ValueError: if one of these is true:

        - a count is out of range, or the state was donated;
        - the folder has checkpoints and `checkpoints.resume` is not set;
        - the batches cannot be moved to the saved position;
        - a metric is not a scalar, or `evaluate` returns the name of a training metric;
        - early stopping watches an unknown metric;
        - a run with local updates would end before the first synchronization, or early stopping would end it between
          two.

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
    check_count("fit", "num_steps", num_steps, minimum=0)
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
        received_signal = cleanup.enter_context(catch_signals())
        display = cleanup.enter_context(show_progress(num_steps, shown=progress))
        write_log = cleanup.enter_context(open_log(log))
        ledger = Ledger(_goodput_folder(checkpoints))
        cleanup.callback(ledger.enter, "")  # runs after the last checkpoint is written
        ledger.enter("begin", step_of(state))
        cleanup.enter_context(finish_writes(checkpoints))

        stream, meter, history = Stream(batches), Meter(checkpoints), []
        state, stopping_state = begin(opt, state, stream, early_stopping, checkpoints, display.say)
        step = int(jax.device_get(state.step))
        tolerance = Tolerance(opt.wrapped, state.opt_state)
        saved_step = None if checkpoints is None else checkpoints.latest()
        evaluation_metrics: dict[str, float] = {}
        display.advance(step)

        def report(step: int, metrics: dict[str, float]) -> None:
            if "steps_per_second" in metrics:
                metrics = {**metrics, "goodput": ledger.total().fraction}
            if history and history[-1]["step"] == step:
                history[-1].update(metrics)
            else:
                history.append({"step": step, **metrics})
            write_log(step, metrics)
            display.report(step, metrics)

        def show_evaluation(done: int, total: int | None) -> None:
            ledger.enter("evaluate")
            display.evaluate(done, total)

        def check_finite(metrics: dict[str, float]) -> None:
            assert not isinstance(state, DeferredInit)
            check_state(state, metrics, step=step - 1, position=stream.drawn - 1, checkpoints=checkpoints)

        def save(metrics: dict[str, float]) -> None:
            nonlocal saved_step
            if checkpoints is not None and saved_step != step:
                checkpoints.save(state, step=step, metrics=metrics, extra=pack(stream, early_stopping, stopping_state))
                saved_step = step

        stopped = common_verdict(received_signal(), out_of_patience(early_stopping, stopping_state), due=True)
        while stopped is None and step < num_steps:
            ledger.enter("data", step)
            batch = stream.draw()
            if batch is END:
                stopped = "exhausted"
                break
            batch = as_arrays("fit", batch)
            ledger.enter("step")
            state, device_metrics = opt.step(state, batch)
            step += 1
            logging, evaluation_metrics = step % log_every == 0, {}
            saving = checkpoints is not None and checkpoints.due(step)
            snapshotting = checkpoints is not None and checkpoints.due_in_memory(step)
            scheduled = saving if evaluate_every is None else step % evaluate_every == 0
            evaluating = evaluate is not None and (scheduled or (step == num_steps and not local_updates))
            ledger.enter("wait")
            previous_report = meter.push(
                step,
                stream.drawn - 1,
                device_metrics,
                examples=num_rows(opt.config, batch),
                reported=logging,
                tolerated=tolerance(state.opt_state),
            )
            ledger.enter("log")
            if previous_report is not None:
                report(*previous_report)
            display.advance(step)

            if saving or snapshotting or evaluating or (logging and early_stopping is not None):
                ledger.enter("wait")
                metrics = meter.settle()
                if evaluate is not None and evaluating:
                    ledger.enter("evaluate")
                    evaluation_metrics = call_evaluate(evaluate, state, metrics, show_evaluation)
                ledger.enter("log")
                if logging or evaluating:
                    report(step, metrics | evaluation_metrics)
                if evaluating or not evaluation_scheduled:
                    check_metric(early_stopping, known=metrics | evaluation_metrics)
                observed = (metrics if logging else {}) | (evaluation_metrics if scheduled else {})
                stopping_state = update(early_stopping, stopping_state, step, observed)
                if saving:
                    ledger.enter("checkpoint")
                    check_finite(metrics)
                    save(metrics | evaluation_metrics)
                if snapshotting and checkpoints is not None:
                    ledger.enter("checkpoint")
                    check_finite(metrics)
                    checkpoints.save_in_memory(state, step=step, extra=pack(stream, early_stopping, stopping_state))
                meter.restart()
            due = evaluating or step % agree_every == 0
            ledger.enter("agree")
            stopped = common_verdict(received_signal(), out_of_patience(early_stopping, stopping_state), due=due)
            if step % (_PROBE_EVERY * agree_every) == 0 and jax.process_count() > 1 and is_reported():
                ledger.enter("agree")  # no step is in progress: all processes have just exchanged verdicts
                probe_or_warn()

        ledger.enter("agree")
        stopped = common_verdict(received_signal(), stopped, due=True) or "completed"
        final_state = opt.synchronize(state) if local_updates else state
        if metrics := meter.settle():  # empty if no step was taken
            last_metrics = {} if history and history[-1]["step"] == step else metrics
            if evaluate is not None and not evaluation_metrics and stopped not in SIGNALS:
                final_metrics = call_evaluate(evaluate, final_state, metrics, show_evaluation)
                last_metrics, evaluation_metrics = (
                    last_metrics | final_metrics,
                    {} if local_updates else final_metrics,
                )  # the saved state is not synchronized
            if last_metrics:
                report(step, last_metrics)
            ledger.enter("checkpoint")
            check_finite(metrics)
        save(metrics | evaluation_metrics)
        if stopped != "completed":
            display.say(f"Stopped at step {step} of {num_steps}: {_STOP_TEXT[stopped]}.")
    ledger.write(ended_well=True)
    return FitResult(final_state, step, stopped, history, best(early_stopping, stopping_state), ledger.total())


_PROBE_EVERY = 10
"""Processes under a watch measure the speed of their devices after this many agreements."""

_STOP_TEXT = {
    "exhausted": "there are no more batches",
    "early": "early stopping",
    "interrupted": "interrupted from the keyboard",
    "sigterm": "SIGTERM",
}


def _goodput_folder(checkpoints: Checkpoints | None) -> Path | None:
    """Return the folder for the account of goodput, on the first process; None elsewhere."""
    return None if checkpoints is None or jax.process_index() else Path(checkpoints.directory)


def _check_optimizer_and_state(opt: ShardedOptimizer, state: TrainState | DeferredInit) -> None:
    if not (callable(getattr(opt, "step", None)) and callable(getattr(opt, "init", None))):
        fix = "pass what so.ddp, so.zero or so.fsdp returns."
        raise TypeError(format_error("fit", f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix))
    if isinstance(state, DeferredInit):
        return
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        problem = f"state must be a so.TrainState, got {type(state).__name__}."
        raise TypeError(format_error("fit", problem, fix="pass opt.init(params)."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        problem = "the state was already used: a step takes over the memory of the state it is given."
        fix = "pass the state that the last step or fit returned, or a new one."
        raise ValueError(format_error("fit", problem, fix=fix))


def _check_batches(batches: Iterable[PyTree]) -> None:
    is_one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # isinstance(..., Iterable) only checks __iter__; a torch-style dataset or a grain MapDataset has only __getitem__.
    if is_one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        problem = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = "pass a grain dataset, an iterator or a list; for one batch over and over itertools.repeat(batch)."
        raise TypeError(format_error("fit", problem, fix=fix))


def _check_evaluate(
    evaluate: Evaluate | None, evaluate_every: int | None, early_stopping: EarlyStopping | None
) -> None:
    if evaluate is not None and not callable(evaluate):
        problem = f"evaluate must be a callable (state) -> dict of numbers, got {type(evaluate).__name__}."
        fix = "pass so.training.evaluation(opt, batches) or your own function."
        raise TypeError(format_error("fit", problem, fix=fix))
    if evaluate_every is not None:
        check_count("fit", "evaluate_every", evaluate_every)
        if evaluate is None:
            raise ValueError(format_error("fit", "evaluate_every needs evaluate.", fix="pass evaluate, or drop it."))
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        problem = f"early_stopping must be a so.EarlyStopping, got {type(early_stopping).__name__}."
        raise TypeError(format_error("fit", problem, fix='pass so.EarlyStopping("val_loss", patience=5).'))


def _check_checkpoints(checkpoints: Checkpoints | None) -> None:
    required_names = (
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
    if checkpoints is not None and (
        missing_names := [name for name in required_names if not hasattr(checkpoints, name)]
    ):
        problem = f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without {', '.join(missing_names)}."
        path_text = repr(os.fspath(checkpoints)) if isinstance(checkpoints, str | os.PathLike) else "directory"
        raise TypeError(format_error("fit", problem, fix=f"pass so.Checkpoints({path_text}, every=100, keep=3)."))


def _check_rounds(
    opt: ShardedOptimizer,
    num_steps: int,
    evaluate: Evaluate | None,
    evaluate_every: int | None,
    early_stopping: EarlyStopping | None,
) -> None:
    """Refuse a run that ends before replicas synchronize, or that early stopping would end in any case.

    Between two synchronizations the evaluated parameters do not change, so early stopping sees no improvement.
    """
    local_updates = opt.config.local_updates
    if local_updates is None:
        return
    # the first step after which the shared parameters of the replicas may have changed
    first_change = 1 if local_updates.warmup_steps else local_updates.stride + local_updates.delay
    caller, options_text = opt.config.strategy, f"sync_every={local_updates.sync_every}"
    options_text += f", fragments={local_updates.fragments}" if local_updates.fragments > 1 else ""
    options_text += f", delay={local_updates.delay}" if local_updates.delay else ""
    if 0 < num_steps < first_change:
        problem = f"num_steps={num_steps} ends before the replicas of {caller} first synchronize, at step {first_change} ({options_text})."
        raise ValueError(
            format_error("fit", problem, fix="train for as many steps at least, or make sync_every smaller.")
        )
    # Metrics of another function, and training metrics, may change between synchronizations.
    if early_stopping is None or evaluate_every is None or not isinstance(evaluate, Evaluation):
        return
    unchanged_evaluations = max(first_change - 1, local_updates.stride) // evaluate_every
    if early_stopping.metric.startswith(evaluate.prefix) and unchanged_evaluations > early_stopping.patience:
        problem = (
            f"early_stopping would end any run: evaluated every {plural(evaluate_every, 'step')}, "
            f"{early_stopping.metric!r} stays as it is {unchanged_evaluations} times in a row, and patience={early_stopping.patience}. "
            f"It is of the parameters that the replicas of {caller} share, which change every {plural(local_updates.stride, 'step')} "
            f"({options_text})."
        )
        fix = f"evaluate every {local_updates.stride} steps, or have more patience, or make sync_every smaller."
        raise ValueError(format_error("fit", problem, fix=fix))
