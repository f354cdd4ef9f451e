"""`fit`: the training loop, and the checks of its arguments before a step runs."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._hashed import is_hashed
from shardopt.checkpoint._sums import LeafSums
from shardopt.core._arguments import check_count, check_flag
from shardopt.core._early_stopping import (
    EarlyStopping,
    StoppingState,
    best,
    check_metric,
    from_json,
    out_of_patience,
    update,
)
from shardopt.core._errors import NonFiniteLossError, calling, format_error, plural
from shardopt.core._tracebacks import api_boundary
from shardopt.core._types import PyTree, TrainState, leaves_with_paths
from shardopt.losses._batch_dims import num_rows
from shardopt.runtime._probe import probe_or_warn
from shardopt.runtime._progress import is_reported
from shardopt.step._batches import as_arrays
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._evaluation import Evaluate, Evaluation, call_evaluate
from shardopt.training._goodput import Goodput, Ledger
from shardopt.training._loggers import Log, as_loggers, open_log, reopen, show_progress
from shardopt.training._metrics import Meter, check_state
from shardopt.training._norms import NormLog, check_metrics_every
from shardopt.training._profile import Profiler, check_profile
from shardopt.training._resume import (
    END,
    SIGNALS,
    DeferredInit,
    SavedStates,
    Stream,
    catch_signals,
    common_verdict,
    finish_writes,
    pack,
    step_of,
)
from shardopt.training._spikes import MOST_ROLLBACKS, Spikes, spikes_of
from shardopt.training._tolerance import num_skipped, tolerated
from shardopt.training._verify import Verification, verification_of


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the last train state; with local updates it is synchronized, so that its parameters are
        the mean of all replicas.
      step: total steps taken, including earlier runs.
      stopped: "completed" (num_steps reached), "early" (early stopping), "sigterm", "interrupted"
        (Ctrl-C) or "exhausted" (no more batches).
      history: the metrics that this call logged, `{"step": n, "loss": ..., ...}` each, without the
        norms of leaves.
      best: `{"step": n, metric: value}`, the best value that early stopping saw, including earlier
        runs; None without it.
      goodput: the share of time spent on steps that count; on the first process it includes earlier
        attempts.
    """

    state: TrainState
    step: int
    stopped: str
    history: list[dict[str, float]]
    best: dict[str, float] | None
    goodput: Goodput


@api_boundary
@calling("fit")
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
    metrics_every: int | None = None,
    agree_every: int = 10,
    progress: bool = True,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    on_spike: Literal["skip", "rollback"] | None = None,
    profile: tuple[int, int] | None = None,
    verify_every: int | None = None,
) -> FitResult:
    """Train until `num_steps` total steps are taken, or something ends the run earlier.

    Each step is state, metrics = opt.step(state, batch). The host reads the loss of a step while
    the device computes the next one. It waits only for an evaluation, a checkpoint, early stopping
    on a training metric, and the end. So at most two steps are in progress.

    Args:
      opt: a strategy such as `so.ddp` or `so.fsdp`, or `so.local_sgd` or `so.diloco` of a strategy.
      state: the state to start from; its memory is reused for the next state. Or
        `so.training.DeferredInit(params)`, or `so.training.DeferredInit(init_fn, key)`: it is
        initialized only if no checkpoint is restored, so a restart saves that time.
      batches: an iterable of batches, pytrees with leaves [global batch, ...]; drawn one at a time,
        never ahead.
      num_steps: the total step count, as in `state.step`, to train to: from step 40 to 100 there
        are 60 steps to take.
      evaluate: `evaluate(state) -> {name: number}`, such as `so.training.evaluation(opt, batches)`;
        runs on every process and must not donate the state.
      evaluate_every: steps between evaluations; by default one with each checkpoint. A last one
        runs at the end.
      early_stopping: when to stop; reads training metrics every `log_every` steps, other metrics at
        scheduled evaluations.
      checkpoints: where to save; a state that is not finite is never saved.
      log: `log(step, metrics)`, or several: `so.training.jsonl`, `tensorboard`, `wandb`, `mlflow`,
        `trackio` or any function.
      log_every: steps between reports of `opt.step`'s metrics, steps_per_second,
        examples_per_second and goodput (see `so.training.Goodput`).
      metrics_every: steps between norms of the gradient, the update and the parameters, of each
        leaf and each layer of stacked blocks; by default none. The log gets
        "gradient_norm/PATH/layer_0", "update_norm/..." and "param_norm/...", which
        `so.training.plot_norms` draws. Other steps stay as they are; these steps are a second
        compiled program. Norms that are due in a verified step are those of the next step.
      agree_every: steps between agreements of several processes whether to stop.
      progress: show a bar on a terminal, a second bar while `so.training.evaluation` runs, and
        lines elsewhere, on standard error. Messages about resuming are printed even if False.
      on_nonfinite: "raise" ends the run at a loss that is not finite, unless the optimizer skipped
        the step. "skip" makes sure that it is skipped: the optimizer must have
        `so.transforms.skip_anomalies` or `optax.apply_if_finite`, or the run goes back with
        `on_spike="rollback"`.
      on_spike: "skip" makes sure that the optimizer skips spikes, by
        `so.transforms.skip_anomalies`. "rollback" goes back to the newest snapshot of
        `checkpoints`. The log has `spike_step`, `spike_batch` and the values.
      profile: (first, count): record a profile of `count` steps from step `first`, counted from 0,
        in the folder "profile" of the checkpoints, or of the working directory. Each process
        records its devices. Step n has the annotation "train" with the number n. SIGUSR1 to a
        process records a profile of its next five steps.
      verify_every: steps between verified steps. Such a step is computed on two devices each, and
        sums of the bits are compared. The step before each save and the last step are verified too.
        A difference ends the run before the state is used or saved. It costs another step, and
        memory for two more states. By default no step is verified.

    Returns:
      A `FitResult`.

    Raises:
      NonFiniteLossError: if the loss is NaN or infinite, at most one step later; or if an update
        made the state NaN or infinite. It is not raised for a step that `optax.apply_if_finite` or
        `so.transforms.skip_anomalies` skipped, until more of them than these allow come in a row. A
        skipped step is shown and logged with its batch. Or if a run cannot go back from a spike.
      SilentCorruptionError: if a verified step, or the copies of a state, differ between devices.
        The process ends with code 117 if one of its devices is at fault, and `shardopt launch` goes
        on without it.
      TypeError: if an argument is of the wrong kind, or `evaluate` does not return a dict of
        numbers.
      ValueError: if one of these is true:

        - a count is out of range, or the state was donated;
        - the folder has checkpoints and `checkpoints.resume` is not set;
        - the batches cannot be moved to the saved position;
        - a metric is not a scalar, or `evaluate` returns the name of a training metric;
        - early stopping watches an unknown metric;
        - `on_nonfinite` or `on_spike` asks for what the optimizer or the checkpoints cannot do;
        - `verify_every` is given, and a step cannot be computed on two devices;
        - `metrics_every` is set, and the replicas of the strategy train apart;
        - a run with local updates would end before the first synchronization, or early stopping
          would end it between two.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3, np.float32)}
      >>> result = fit(opt, opt.init({"w": jnp.zeros(())}), [batch] * 50, num_steps=40, progress=False)
      >>> result.stopped, result.step, round(float(result.state.params["w"]), 3)
      ('completed', 40, 3.0)

    **Resuming.** If `checkpoints.resume` is set and a checkpoint is newer than `state`, train
    state, position in the batches and early stopping are restored. The run then equals an unbroken
    one (bit for bit on the same mesh).

    - Batches with `get_state` and `set_state` (grain) continue from their saved state.
    - For other batches pass a fresh iterator; the batches already used are drawn and dropped. It
      must give the same order as before; if it does not, a UserWarning says so.
    - With several processes, all restore the position of the first process.

    **End of the run.** It ends at `num_steps`, at early stopping, at SIGTERM, at a first Ctrl-C (a
    second one raises KeyboardInterrupt) and after the last batch. Then the step is finished, a last
    evaluation runs (not after a signal), and a checkpoint is written. Signals are noticed only in
    the main thread.

    **Spikes.** With `on_spike="rollback"` a step is a spike by the rule of
    `so.transforms.skip_anomalies` with its defaults. The run goes back to the newest snapshot or
    checkpoint. The batches drawn since are skipped. The window is saved too, so a resumed run goes
    back at the same steps. After three rollbacks to the same snapshot the next spike ends the run.

    **Local updates** (`local_sgd`, `diloco`). Evaluations during the run use `state.params` as last
    synchronized. The returned state is `opt.synchronize` of the last state, and the last evaluation
    uses it. Checkpoints hold states before synchronization, so a resumed run equals an unbroken
    one.

    **Silent corruption.** With `verify_every` a run restores only a snapshot or checkpoint whose
    sums are right. A damaged checkpoint is renamed to `<step>.damaged`, and the next copy is used.

    **Several processes.** All call `fit` with the same arguments and draw the same number of
    batches. A signal or early stopping on one process stops all at the same step. The first process
    shows progress and writes logs.
    """
    _check_optimizer_and_state(opt, state)
    _check_batches(batches)
    check_count("num_steps", num_steps, minimum=0)
    check_count("log_every", log_every)
    check_count("agree_every", agree_every)
    _check_evaluate(evaluate, evaluate_every, early_stopping)
    _check_checkpoints(checkpoints)
    _check_hash_only(opt, state, checkpoints)
    as_loggers(log)
    check_flag("progress", progress)
    scheduled_every = (
        checkpoints.every if evaluate_every is None and checkpoints is not None else evaluate_every
    )
    _check_rounds(opt, num_steps, evaluate, scheduled_every, early_stopping)

    check_profile(profile)
    check_metrics_every(opt, metrics_every, verify_every)
    abstract_state = (
        opt.abstract_state(state.shapes()) if isinstance(state, DeferredInit) else state
    )
    spikes = spikes_of(opt, abstract_state.opt_state, on_nonfinite, on_spike, checkpoints)
    del abstract_state  # a step donates the state
    verification = verification_of(opt, verify_every, checkpoints, num_steps)

    run = _Run(
        opt,
        num_steps,
        evaluate,
        evaluate_every,
        early_stopping,
        checkpoints,
        log_every,
        agree_every,
        spikes,
        verification,
    )
    with ExitStack() as cleanup:
        run.start(cleanup, state, batches, log, progress=progress)
        run.norms = NormLog(opt, metrics_every, run.write_log)
        run.profiler = Profiler(_profile_folder(checkpoints), profile, run.display.say)
        cleanup.enter_context(run.profiler.opened())
        del state  # a step donates it; parameters in a `DeferredInit` would stay in memory
        while (batch := run.next_batch()) is not END:
            run.take_step(batch)
            run.evaluate_and_save()
            run.agree()
        final_state = run.finish()
    run.ledger.write(ended_well=True)
    best_metric, goodput = best(early_stopping, run.stopping_state), run.ledger.total()
    return FitResult(
        final_state, run.step, run.stopped or "completed", run.history, best_metric, goodput
    )


@dataclasses.dataclass
class _Run:
    """The arguments of `fit` and the state of its loop; the methods are the phases of the loop."""

    profiler: Profiler = dataclasses.field(init=False)
    norms: NormLog = dataclasses.field(init=False)

    opt: ShardedOptimizer
    num_steps: int
    evaluate: Evaluate | None
    evaluate_every: int | None
    early_stopping: EarlyStopping | None
    checkpoints: Checkpoints | None
    log_every: int
    agree_every: int
    spikes: Spikes | None
    verification: Verification | None

    def start(
        self,
        cleanup: ExitStack,
        state: TrainState | DeferredInit,
        batches: Iterable[PyTree],
        log: Log | Sequence[Log] | None,
        *,
        progress: bool,
    ) -> None:
        """Catch signals, open the display and the logs until the end of the run, and restore the
        first state.
        """
        self.received_signal = cleanup.enter_context(catch_signals())
        self.display = cleanup.enter_context(show_progress(self.num_steps, shown=progress))
        self.write_log = cleanup.enter_context(open_log(log))
        checkpoints = self.checkpoints
        self.ledger = Ledger(
            None if checkpoints is None or jax.process_index() else Path(checkpoints.directory)
        )
        cleanup.callback(self.ledger.enter, "")  # runs after the last checkpoint is written
        self.ledger.enter("begin", step_of(state))
        cleanup.enter_context(finish_writes(self.checkpoints))

        self.stream, self.meter, self.loggers = Stream(batches), self.new_meter(), as_loggers(log)
        self.history: list[dict[str, float]] = []
        self.saved = SavedStates(
            self.opt, self.checkpoints, self.display.say, self.verification is not None
        )
        self.state, self.stopping_state = self.saved.begin(
            state, self.stream, self.early_stopping, self.spikes
        )
        self.step, self.local_updates = (
            int(jax.device_get(self.state.step)),
            self.opt.config.local_updates is not None,
        )
        self.saved_step = None if self.checkpoints is None else self.checkpoints.latest()
        self.evaluation_metrics: dict[str, float] = {}
        self.display.advance(self.step)
        self.stopped = self.verdict(due=True)

    def new_meter(self) -> Meter:
        # a method of this run would make a cycle, and memory of the device would wait for the
        # garbage collector
        report_skipped = partial(_report_skipped, self.display.say, self.write_log)
        return Meter(
            self.checkpoints, report_skipped, None if self.spikes is None else self.spikes.watch
        )

    def next_batch(self) -> PyTree:
        """Return the next batch, or `END` if there is no next step."""
        if self.spikes is not None and self.step >= self.num_steps:
            self.meter.settle()
            self.roll_back()
        if self.stopped is not None or self.step >= self.num_steps:
            return END
        self.ledger.enter("data", self.step)
        batch = self.stream.draw()
        self.stopped = "exhausted" if batch is END else None
        return batch

    def take_step(self, batch: PyTree) -> None:
        """Take a step, and report the step before it."""
        batch = as_arrays("fit", batch)
        self.ledger.enter("step")
        num_before = num_skipped(self.state)
        with self.profiler.before(self.step):
            if self.verification is not None and self.verification.due(self.step):
                position = self.stream.drawn - 1
                self.state, device_metrics = self.verification.take_step(
                    self.state, batch, self.step, position
                )
                self.norms.leave_to_next(self.step)
            else:
                self.state, device_metrics = self.norms.step(self.step, self.state, batch)
        self.profiler.after(self.step, device_metrics)
        self.step += 1
        step, checkpoints, evaluate_every = self.step, self.checkpoints, self.evaluate_every
        self.logging, self.evaluation_metrics = step % self.log_every == 0, {}
        self.saving = checkpoints is not None and checkpoints.due(step)
        self.snapshotting = checkpoints is not None and checkpoints.due_in_memory(step)
        self.scheduled = self.saving if evaluate_every is None else step % evaluate_every == 0
        is_last = step == self.num_steps and not self.local_updates
        self.evaluating = self.evaluate is not None and (self.scheduled or is_last)
        self.ledger.enter("wait")
        previous_report = self.meter.push(
            step,
            self.stream.drawn - 1,
            device_metrics,
            examples=num_rows(self.opt.config, batch),
            reported=self.logging,
            tolerated=tolerated(self.state, num_before),
        )
        self.ledger.enter("log")
        if previous_report is not None:
            self.report(*previous_report)
        self.display.advance(step)

    def evaluate_and_save(self) -> None:
        """Evaluate, observe and save the state if one of these is due.

        All of them wait for the step.
        """
        if self.roll_back():
            return
        observing = self.logging and self.early_stopping is not None
        if not (self.saving or self.snapshotting or self.evaluating or observing):
            return
        self.ledger.enter("wait")
        self.norms.write()
        metrics = self.meter.settle()
        if self.roll_back():
            return
        if self.evaluate is not None and self.evaluating:
            self.ledger.enter("evaluate")
            self.evaluation_metrics = call_evaluate(
                self.evaluate, self.state, metrics, self.show_evaluation
            )
        all_metrics = metrics | self.evaluation_metrics
        self.ledger.enter("log")
        if self.logging or self.evaluating:
            self.report(self.step, all_metrics)
        evaluations_scheduled = self.evaluate_every is not None or self.checkpoints is not None
        if self.evaluating or self.evaluate is None or not evaluations_scheduled:
            check_metric(self.early_stopping, known=all_metrics)
        observed = (metrics if self.logging else {}) | (
            self.evaluation_metrics if self.scheduled else {}
        )
        self.stopping_state = update(self.early_stopping, self.stopping_state, self.step, observed)
        if self.saving:
            self.check_finite(metrics)
            self.save(all_metrics)
        if self.snapshotting and self.checkpoints is not None:
            self.check_finite(metrics)
            extra = pack(self.stream, self.early_stopping, self.stopping_state, self.spikes)
            self.checkpoints.save_in_memory(
                self.state, step=self.step, extra=extra, **self.sums_to_save()
            )
        self.meter.restart()

    def agree(self) -> None:
        """Agree with all processes whether to stop, if that is due.

        Now and then measure the speed of devices.
        """
        self.ledger.enter("agree")
        self.stopped = self.verdict(due=self.evaluating or self.step % self.agree_every == 0)
        if (
            self.step % (_PROBE_EVERY * self.agree_every) == 0
            and jax.process_count() > 1
            and is_reported()
        ):
            # no step is in progress: all processes have just exchanged verdicts
            self.ledger.enter("agree")
            probe_or_warn()

    def finish(self) -> TrainState:
        """Evaluate, report and save the last state; return it, synchronized."""
        self.ledger.enter("agree")
        self.stopped = common_verdict(self.received_signal(), self.stopped, due=True)
        self.norms.write()
        self.meter.settle()
        self.roll_back()
        final_state = self.opt.synchronize(self.state) if self.local_updates else self.state
        if metrics := self.meter.settle():  # empty if no step was taken
            last_metrics = {} if self.history and self.history[-1]["step"] == self.step else metrics
            if (
                self.evaluate is not None
                and not self.evaluation_metrics
                and self.stopped not in SIGNALS
            ):
                self.ledger.enter("evaluate")
                final_metrics = call_evaluate(
                    self.evaluate, final_state, metrics, self.show_evaluation
                )
                last_metrics = last_metrics | final_metrics
                if not self.local_updates:  # otherwise the saved state is not the synchronized one
                    self.evaluation_metrics = final_metrics
            if last_metrics:
                self.report(self.step, last_metrics)
            self.check_finite(metrics)
        self.save(metrics | self.evaluation_metrics)
        if self.stopped is not None:
            self.display.say(
                f"Stopped at step {self.step} of {self.num_steps}: {_STOP_TEXT[self.stopped]}."
            )
        return final_state

    def roll_back(self) -> bool:
        """If a spike was found, go back to the newest snapshot, keep the position in the batches,
        and return True.
        """
        if (
            self.spikes is None
            or (spike := self.spikes.pending) is None
            or self.checkpoints is None
        ):
            return False
        self.ledger.enter("checkpoint")
        restored = self.saved.restore_newest(self.state)
        values = ", ".join(f"{name} {value:.4g}" for name, value in spike.values.items())
        text = (
            f"spike at step {spike.step - 1} (batch {spike.position}, both counted from 0):"
            f" {values}"
        )
        if restored is None or self.spikes.rollbacks.get(restored[0], 0) == MOST_ROLLBACKS:
            reason = (
                "there is no snapshot yet"
                if restored is None
                else f"{MOST_ROLLBACKS} rollbacks did not help"
            )
            problem = f"{text}, and {reason}."
            fix = (
                "lower the learning rate, clip the gradients (optax.clip_by_global_norm), or save"
                " more often."
            )
            error_text = format_error("fit", problem, fix=fix)
            raise NonFiniteLossError(error_text, step=spike.step - 1, position=spike.position)
        self.step, self.state, extra = restored
        if self.verification is not None:
            self.verification.forget()
        self.spikes.rollbacks = {self.step: self.spikes.rollbacks.get(self.step, 0) + 1}
        self.spikes.restore(extra.get("spikes"))
        self.stopping_state = (
            from_json(self.early_stopping, extra.get("early_stopping")) or StoppingState()
        )
        self.meter, self.saved_step, self.evaluation_metrics = self.new_meter(), self.step, {}
        self.norms.drop()
        self.evaluating = False
        self.history = [record for record in self.history if record["step"] <= self.step]
        reopen(self.loggers)
        self.display.say(
            f"Going back to step {self.step}, from a {text}. The batches since are skipped."
        )
        self.write_log(
            self.step + 1,
            {**spike.values, "spike_step": spike.step - 1, "spike_batch": spike.position},
        )
        self.display.advance(self.step)
        return True

    def verdict(self, *, due: bool) -> str | None:
        """Return the common verdict about signals and early stopping."""
        early = out_of_patience(self.early_stopping, self.stopping_state)
        return common_verdict(self.received_signal(), early, due=due)

    def show_evaluation(self, done: int, total: int | None) -> None:
        self.ledger.enter("evaluate")
        self.display.evaluate(done, total)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics to the history, log them and show them."""
        if "steps_per_second" in metrics:
            metrics = {**metrics, "goodput": self.ledger.total().fraction}
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(metrics)
        else:
            self.history.append({"step": step, **metrics})
        self.write_log(step, metrics)
        self.display.report(step, metrics)

    def check_finite(self, metrics: dict[str, float]) -> None:
        self.ledger.enter("checkpoint")
        position, checkpoints = self.stream.drawn - 1, self.checkpoints
        check_state(
            self.state, metrics, step=self.step - 1, position=position, checkpoints=checkpoints
        )

    def save(self, metrics: dict[str, float]) -> None:
        if self.checkpoints is not None and self.saved_step != self.step:
            extra = pack(self.stream, self.early_stopping, self.stopping_state, self.spikes)
            self.checkpoints.save(
                self.state, step=self.step, metrics=metrics, extra=extra, **self.sums_to_save()
            )
            self.saved_step = self.step

    def sums_to_save(self) -> dict[str, LeafSums]:
        """Return the sums of the state as an argument of `save`, after comparing it with the last
        verified step.
        """
        return (
            {}
            if self.verification is None
            else {"sums": self.verification.sums_to_save(self.state, self.step)}
        )


def _report_skipped(
    say: Callable[[str], None], write_log: Log, step: int, position: int, metrics: dict[str, float]
) -> None:
    """Say and log that the optimizer skipped a step."""
    values = ", ".join(
        f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm") if name in metrics
    )
    say(f"The optimizer skipped step {step - 1} (batch {position}, both counted from 0): {values}.")
    write_log(step, {**metrics, "skipped_batch": position})


_PROBE_EVERY = 10
"""Processes under a watch measure the speed of their devices after this many agreements."""

_STOP_TEXT = {
    "exhausted": "there are no more batches",
    "early": "early stopping",
    "interrupted": "interrupted from the keyboard",
    "sigterm": "SIGTERM",
}


def _profile_folder(checkpoints: Checkpoints | None) -> Path:
    return Path("." if checkpoints is None else checkpoints.directory) / "profile"


def _check_optimizer_and_state(opt: ShardedOptimizer, state: TrainState | DeferredInit) -> None:
    if not (callable(getattr(opt, "step", None)) and callable(getattr(opt, "init", None))):
        fix = "pass what so.ddp, so.zero or so.fsdp returns."
        raise TypeError(
            format_error(
                "fit", f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}.", fix=fix
            )
        )
    if isinstance(state, DeferredInit):
        return
    if not all(hasattr(state, field) for field in ("step", "params", "opt_state")):
        problem = f"state must be a so.TrainState, got {type(state).__name__}."
        raise TypeError(format_error("fit", problem, fix="pass opt.init(params)."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        problem = (
            "the state was already used: a step takes over the memory of the state it is given."
        )
        fix = "pass the state that the last step or fit returned, or a new one."
        raise ValueError(format_error("fit", problem, fix=fix))


def _check_batches(batches: Iterable[PyTree]) -> None:
    is_one_batch = isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array)
    # isinstance(..., Iterable) only checks __iter__; a torch-style dataset or a grain MapDataset
    # has only __getitem__.
    if is_one_batch or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        problem = f"batches must be an iterable of batches, got {type(batches).__name__}."
        fix = (
            "pass a grain dataset, an iterator or a list; for one batch over and over"
            " itertools.repeat(batch)."
        )
        raise TypeError(format_error("fit", problem, fix=fix))


def _check_evaluate(
    evaluate: Evaluate | None, evaluate_every: int | None, early_stopping: EarlyStopping | None
) -> None:
    if evaluate is not None and not callable(evaluate):
        problem = (
            "evaluate must be a callable (state) -> dict of numbers, got"
            f" {type(evaluate).__name__}."
        )
        fix = "pass so.training.evaluation(opt, batches) or your own function."
        raise TypeError(format_error("fit", problem, fix=fix))
    if evaluate_every is not None:
        check_count("evaluate_every", evaluate_every)
        if evaluate is None:
            raise ValueError(
                format_error(
                    "fit", "evaluate_every needs evaluate.", fix="pass evaluate, or drop it."
                )
            )
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        problem = (
            "early_stopping must be a so.training.EarlyStopping, got"
            f" {type(early_stopping).__name__}."
        )
        raise TypeError(
            format_error(
                "fit", problem, fix='pass so.training.EarlyStopping("val_loss", patience=5).'
            )
        )


def _check_checkpoints(checkpoints: Checkpoints | None) -> None:
    required_names = [
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
    ]
    if checkpoints is not None and (
        missing_names := [name for name in required_names if not hasattr(checkpoints, name)]
    ):
        problem = (
            f"checkpoints must be a so.Checkpoints, got {type(checkpoints).__name__} without"
            f" {', '.join(missing_names)}."
        )
        path_text = (
            repr(os.fspath(checkpoints))
            if isinstance(checkpoints, str | os.PathLike)
            else "directory"
        )
        raise TypeError(
            format_error(
                "fit", problem, fix=f"pass so.Checkpoints({path_text}, every=100, keep=3)."
            )
        )


def _check_hash_only(
    opt: ShardedOptimizer, state: TrainState | DeferredInit, checkpoints: Checkpoints | None
) -> None:
    """Refuse checkpoints that would have only a hash of parameters that are trained."""
    hash_only = getattr(checkpoints, "hash_only", ())
    if not hash_only:
        return
    if opt.config.local_updates is not None:
        problem = "checkpoints with hash_only cannot store the parameters of each replica apart."
        raise ValueError(
            format_error("fit", problem, fix="leave hash_only out with local_sgd and diloco.")
        )
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
        raise ValueError(
            format_error(
                "fit", problem, trained, "pass the regexes that the strategy got as frozen."
            )
        )


def _check_rounds(
    opt: ShardedOptimizer,
    num_steps: int,
    evaluate: Evaluate | None,
    evaluate_every: int | None,
    early_stopping: EarlyStopping | None,
) -> None:
    """Refuse a run that ends before replicas synchronize, or that early stopping would end in any
    case.

    Between two synchronizations the evaluated parameters do not change, so early stopping sees no
    improvement.
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
        problem = (
            f"num_steps={num_steps} ends before the replicas of {caller} first synchronize, at step"
            f" {first_change} ({options_text})."
        )
        fix = "train for as many steps at least, or make sync_every smaller."
        raise ValueError(format_error("fit", problem, fix=fix))
    # Metrics of another function, and training metrics, may change between synchronizations.
    if early_stopping is None or evaluate_every is None or not isinstance(evaluate, Evaluation):
        return
    unchanged_evaluations = max(first_change - 1, local_updates.stride) // evaluate_every
    if (
        early_stopping.metric.startswith(evaluate.prefix)
        and unchanged_evaluations > early_stopping.patience
    ):
        problem = (
            f"early_stopping would end any run: evaluated every {plural(evaluate_every, 'step')},"
            f" {early_stopping.metric!r} stays as it is {unchanged_evaluations} times in a row, and"
            f" patience={early_stopping.patience}. It is of the parameters that the replicas of"
            f" {caller} share, which change every {plural(local_updates.stride, 'step')}"
            f" ({options_text})."
        )
        fix = (
            f"evaluate every {local_updates.stride} steps, or have more patience, or make"
            " sync_every smaller."
        )
        raise ValueError(format_error("fit", problem, fix=fix))
