"""The training loop."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.core.arguments import check_count
from shardopt.core.early_stopping import EarlyStopping, best, check_metric, out_of_patience, update
from shardopt.core.errors import format_error, plural
from shardopt.training.evaluation import Evaluation, call_evaluate
from shardopt.training.loggers import Log, as_loggers, open_log, show_progress
from shardopt.training.metrics import Meter, check_state, count_examples
from shardopt.training.resume import END, Stream, begin, pack, written_out
from shardopt.training.signals import SIGNALS, catch_signals, common_verdict

# What `fit` knows of replicas that train apart: when the parameters they share change, and what has no sense beside it.


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
        raise ValueError(format_error("fit", what, fix="train for as many steps at least, or make sync_every smaller."))
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
        raise ValueError(format_error("fit", what, fix=fix))


# What `fit` refuses before anything runs.


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
        raise TypeError(
            format_error("fit", what, fix="pass so.training.evaluation(opt, batches) or your own function.")
        )
    if evaluate_every is not None:
        check_count("fit", "evaluate_every", evaluate_every)
        if evaluate is None:
            raise ValueError(format_error("fit", "evaluate_every needs evaluate.", fix="pass evaluate, or drop it."))
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        what = f"early_stopping must be a so.EarlyStopping, got {type(early_stopping).__name__}."
        raise TypeError(format_error("fit", what, fix='pass so.EarlyStopping("val_loss", patience=5).'))
    if checkpoints is not None and (missing := [name for name in _CHECKPOINTS if not hasattr(checkpoints, name)]):
        what = f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without {', '.join(missing)}."
        path = repr(os.fspath(checkpoints)) if isinstance(checkpoints, str | os.PathLike) else "directory"
        raise TypeError(format_error("fit", what, fix=f"pass so.Checkpoints({path}, every=100, keep=3)."))
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
        raise TypeError(format_error("fit", f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix))
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        what = f"state must be a so.TrainState, got {type(state).__name__}."
        raise TypeError(format_error("fit", what, fix="pass opt.init(params)."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        what = "the state was already used: a step takes over the memory of the state it is given."
        raise ValueError(
            format_error("fit", what, fix="pass the state that the last step or fit returned, or a new one.")
        )


def _check_batches(batches: Any) -> None:
    one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # Iterable alone knows only __iter__; a sequence (a torch-style dataset, a grain MapDataset) has __getitem__.
    if one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        what = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = "pass a grain dataset, an iterator or a list; for one batch over and over itertools.repeat(batch)."
        raise TypeError(format_error("fit", what, fix=fix))


class FitResult(NamedTuple):
    """How a run ended.

    Attributes:
      state: the last train state; of replicas that train apart synchronized, so that its parameters are their mean.
      step: steps taken in all, earlier runs included.
      stopped: "completed" (num_steps reached), "early" (early stopping), "sigterm", "interrupted" (Ctrl-C) or
        "exhausted" (no more batches).
      history: what was logged in this call, `{"step": n, "loss": ..., ...}` each.
      best: `{"step": n, metric: value}`, the best that early stopping saw, earlier runs included; None without it.
    """

    state: Any
    step: int
    stopped: str
    history: list[dict[str, float]]
    best: dict[str, float] | None


def fit(
    opt: Any,
    state: Any,
    batches: Iterable[Any],
    *,
    num_steps: int,
    evaluate: Callable[[Any], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoints: Any = None,
    log: Log | Sequence[Log] | None = None,
    log_every: int = 10,
    agree_every: int = 10,
    progress: bool = True,
) -> FitResult:
    """Train until `num_steps` steps have been taken in all, or something ends the run before.

    Each step is state, metrics = opt.step(state, batch). The host looks at a step's loss while the device is already
    at the next one, and waits for the device only where it must: for an evaluation, a checkpoint, early stopping on a
    training metric, and at the end. So two steps are under way at the most: queues do not grow, neither in memory nor
    on fake CPU devices, whose collectives deadlock when many steps wait for a thread.

    **Resuming.** With `checkpoints.resume` and a checkpoint newer than `state`, the run goes on from it: train state,
    data position and early stopping, so that it equals an unbroken run (bit for bit on the same mesh). Data that
    keeps its own state (a grain dataset or iterator: `get_state`, `set_state`) is put back by it; of any other a
    fresh iterator must be passed, from which the batches already used are drawn and dropped. A state as new as the
    last checkpoint is continued as it is, with the batches as they are. With several processes the position of the
    first is restored on all.

    **Ends.** At `num_steps`, early stopping, SIGTERM, a first Ctrl-C (a second one raises KeyboardInterrupt) and the
    end of the batches, the step is finished, a checkpoint is saved and written out, and `fit` returns; signals are
    noticed in the main thread only. A last evaluation runs too, unless a signal is in a hurry.

    **Replicas that train apart** (`local_sgd`, `diloco`). What is evaluated during the run is `state.params`, which they
    agreed on last. The state that is returned is `opt.synchronize` of the last one: its parameters are the mean of all
    replicas as they are now, and an evaluation made only because the run ends is of these. Checkpoints hold states that
    are not synchronized, the last one too, with the metrics of their own `params`: so a resumed run equals an unbroken
    one, where it was broken off in the middle of a round too. Whoever trains on from the state returned instead goes
    on from the mean. A run that ends before the first agreement is refused, and so is early stopping that no agreement
    could keep from ending the run, as far as it can be known: for metrics of `so.training.evaluation`.

    **Several processes.** All call `fit` alike. Each must draw equally many batches. A verdict of one of them (a
    signal, early stopping) stops all at the same step: they ask each other every `agree_every` steps and at each
    evaluation. Progress and logs come from the first process only.

    Args:
      opt: what `so.ddp`, `so.zero` or `so.fsdp` returns.
      state: the state to start from. It is used up: its memory goes to the next state.
      batches: an iterable of batches, pytrees with leaves [global batch, ...]; drawn one at a time, never ahead.
      num_steps: the step count, as in `state.step`, to train to: from step 40 to 100 there are 60 steps to take.
      evaluate: `evaluate(state) -> {name: number}`, such as `so.training.evaluation(opt, batches)`. It must not
        donate the state, and runs on every process. Names that training reports are refused.
      evaluate_every: steps between evaluations; by default one with each checkpoint. One is made at the end anyway.
      early_stopping: when to stop for lack of improvement. It observes training metrics every `log_every` steps and
        those of `evaluate` at each evaluation, other than one made only because the run ends.
      checkpoints: a `so.Checkpoints`. A state that is not finite is never saved.
      log: `log(step, metrics)`, or a sequence of such: `so.training.jsonl`, `so.training.tensorboard` or any
        function. A metric that arrives later at the same step (a last evaluation) comes in a call of its own.
      log_every: steps between reports. Metrics are those of `opt.step`, and steps_per_second and examples_per_second
        since the report before, without compilation, evaluation and saving.
      agree_every: steps between the questions of several processes to each other; without effect for one.
      progress: show a progress bar on a terminal, lines elsewhere, on standard error. What is said about resuming
        is printed in any case.

    Returns:
      A `FitResult`.

    Raises:
      NonFiniteLossError: if the loss is NaN or infinite, at the latest one step after, or if an update made the
        state so, before it would be saved and at the end.
      TypeError: if an argument is of the wrong kind, or `evaluate` does not return a dict of numbers.
      ValueError: if a count is out of range, the state was donated before, the folder has checkpoints but
        `checkpoints.resume` is not set, the batches cannot be put back to the saved position, a metric is not a
        scalar, `evaluate` takes the name of a training metric, early stopping watches a metric that is not there, or
        replicas that train apart agree too rarely for this run.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3, np.float32)}
      >>> result = fit(opt, opt.init({"w": jnp.zeros(())}), [batch] * 50, num_steps=40, progress=False)
      >>> result.stopped, result.step, round(float(result.state.params["w"]), 3)
      ('completed', 40, 3.0)
    """
    check_arguments(
        opt,
        state,
        batches,
        num_steps=num_steps,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        early_stopping=early_stopping,
        checkpoints=checkpoints,
        log=log,
        log_every=log_every,
        agree_every=agree_every,
        progress=progress,
    )
    apart = rounds_of(opt) is not None
    evaluation_scheduled = evaluate is not None and (evaluate_every is not None or checkpoints is not None)
    with ExitStack() as cleanup:
        received = cleanup.enter_context(catch_signals())
        display = cleanup.enter_context(show_progress(num_steps, shown=progress))
        write = cleanup.enter_context(open_log(log))
        cleanup.enter_context(written_out(checkpoints))

        stream, meter, history = Stream(batches), Meter(checkpoints), []
        state, seen = begin(opt, state, stream, early_stopping, checkpoints, display.say)
        step = int(state.step)
        saved = None if checkpoints is None else checkpoints.latest()
        measured: dict[str, float] = {}
        display.advance(step)

        def report(step: int, metrics: dict[str, float]) -> None:
            if history and history[-1]["step"] == step:
                history[-1].update(metrics)
            else:
                history.append({"step": step, **metrics})
            write(step, metrics)
            display.report(step, metrics)

        def check(metrics: dict[str, float]) -> None:
            check_state(state, metrics, step=step - 1, position=stream.drawn - 1, checkpoints=checkpoints)

        def save(metrics: dict[str, float]) -> None:
            nonlocal saved
            if checkpoints is not None and saved != step:
                checkpoints.save(state, step=step, metrics=metrics, extra=pack(stream, early_stopping, seen))
                saved = step

        stopped = common_verdict(received(), out_of_patience(early_stopping, seen), due=True)
        while stopped is None and step < num_steps:
            batch = stream.draw()
            if batch is END:
                stopped = "exhausted"
                break
            state, arriving = opt.step(state, batch)
            step += 1
            logging, measured = step % log_every == 0, {}
            saving = checkpoints is not None and checkpoints.due(step)
            scheduled = saving if evaluate_every is None else step % evaluate_every == 0
            evaluating = evaluate is not None and (scheduled or (step == num_steps and not apart))
            late = meter.push(step, stream.drawn - 1, arriving, examples=count_examples(batch), wanted=logging)
            if late is not None:
                report(*late)
            display.advance(step)

            if saving or evaluating or (logging and early_stopping is not None):
                metrics = meter.settle()
                if evaluate is not None and evaluating:
                    measured = call_evaluate(evaluate, state, taken=metrics)
                if logging or evaluating:
                    report(step, metrics | measured)
                if evaluating or not evaluation_scheduled:
                    check_metric(early_stopping, known=metrics | measured)
                observed = (metrics if logging else {}) | (measured if scheduled else {})
                seen = update(early_stopping, seen, step, observed)
                if saving:
                    check(metrics)
                    save(metrics | measured)
                meter.restart()
            due = evaluating or step % agree_every == 0
            stopped = common_verdict(received(), out_of_patience(early_stopping, seen), due=due)

        stopped = common_verdict(received(), stopped, due=True) or "completed"
        last = opt.synchronize(state) if apart else state
        if metrics := meter.settle():  # empty if there was no step to take
            fresh = {} if history and history[-1]["step"] == step else metrics
            if evaluate is not None and not measured and stopped not in SIGNALS:
                found = call_evaluate(evaluate, last, taken=metrics)
                fresh, measured = fresh | found, {} if apart else found  # what is saved is not synchronized
            if fresh:
                report(step, fresh)
            check(metrics)
        save(metrics | measured)
        if stopped != "completed":
            display.say(f"Stopped at step {step} of {num_steps}: {_REASON[stopped]}.")
    return FitResult(last, step, stopped, history, best(early_stopping, seen))


_REASON = {
    "exhausted": "there are no more batches",
    "early": "early stopping",
    "interrupted": "interrupted from the keyboard",
    "sigterm": "SIGTERM",
}
