"""A run of `fit`: its state, and the phases of its loop."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._sums import LeafSums
from shardopt.core import NonFiniteLossError, PyTree, TrainState
from shardopt.core._early_stopping import StoppingState, check_metric, out_of_patience, update
from shardopt.losses._batch_dims import num_rows
from shardopt.runtime._agreement import agree
from shardopt.runtime._turn import StopRun, stop_points, turn_of_step
from shardopt.step._global_rows import rows_of
from shardopt.step._optimizer import Metrics
from shardopt.training._arguments import Arguments, Due, check_same_arguments
from shardopt.training._evaluation import call_evaluate
from shardopt.training._goodput import Ledger
from shardopt.training._hooks import Hook
from shardopt.training._loggers import Display, Log, open_log, show_progress
from shardopt.training._metrics import HostMetrics, Meter, check_state, is_finite_on_host
from shardopt.training._norms import NormLog
from shardopt.training._profile import Profiler
from shardopt.training._resume import (
    SIGNALS,
    DeferredInit,
    SavedStates,
    common_verdict,
    finish_writes,
    pack,
    step_of,
)
from shardopt.training._stop import Stop
from shardopt.training._stream import END, BatchStream, OwnBatches, global_batches
from shardopt.training._tolerance import may_skip, num_skipped, tolerated

if TYPE_CHECKING:
    from shardopt.training._agreed_stream import AgreedStream

_STOP_TEXT = {
    "exhausted": "there are no more batches",
    "early": "early stopping",
    "interrupted": "interrupted from the keyboard",
    "sigterm": "SIGTERM",
}


@dataclasses.dataclass
class FitRun:
    """The state of the loop of `fit`; the methods are the phases of the loop.

    Attributes:
      arguments: the arguments of `fit`.
      stop: the signal that asks to stop, and the thread that saves then.
      display: shows the run to a person.
      write_log: writes metrics to all loggers.
      ledger: the account of the time.
      stream: the batches of this process.
      global_batches: draws the batches of all processes together.
      hooks: the code that runs next to the steps, in the order of being asked for the next step.
      meter: fetches metrics, one step late.
      state: the train state.
      stopping_state: the state of early stopping.
      step: the steps taken.
      saved_step: the step of the newest checkpoint, or None.
      stopped: why the run ends, or None.
      due: the tasks that are due after the last step.
      is_observed: whether all of it is done, other than checkpoints.
      may_skip: whether the optimizer may skip a step.
      measured_step: the last step whose metrics the meter has.
      evaluation_metrics: the metrics of the evaluation of this state; empty without one.
      history: the metrics that were reported.
    """

    arguments: Arguments
    stop: Stop
    display: Display
    write_log: Log
    ledger: Ledger
    stream: BatchStream
    global_batches: "OwnBatches | AgreedStream"
    hooks: Sequence[Hook]
    meter: Meter
    state: TrainState
    stopping_state: StoppingState
    step: int
    saved_step: int | None
    stopped: str | None = None
    due: Due = dataclasses.field(default_factory=Due)
    is_observed: bool = True
    may_skip: bool = False
    measured_step: int = 0
    evaluation_metrics: HostMetrics = dataclasses.field(default_factory=dict)
    history: list[HostMetrics] = dataclasses.field(default_factory=list)

    def next_batch(self) -> PyTree:
        """Return the next batch, or `END` if there is no next step."""
        num_steps = self.arguments.num_steps
        if self.stopped is not None or self.step >= num_steps:
            return END
        self.stop.check()
        self.ledger.enter("data", self.step)
        if self.arguments.checkpoints is not None:
            self.stream.hold_position()
        with self.stop.turn.away():
            batch, self.stopped = self.global_batches.draw(lambda: self.stop.verdict)
        return batch

    def take_step(self, batch: PyTree) -> None:
        """Take a step, and report the step before it."""
        self.ledger.enter("step")
        # Of this batch: `drawn` counts it already.
        position = self.stream.drawn - 1
        # Before the step, which takes over the memory of the state.
        num_before = num_skipped(self.state) if self.may_skip else None
        device_metrics = self._step(batch, position)
        self.ledger.enter("wait")
        # The metrics of the step before. To read this step's would wait for it, and the devices
        # would be idle while the host prepares the next one.
        previous_report = self.meter.push(
            self.step,
            position,
            device_metrics,
            examples=num_rows(self.arguments.opt.config, batch),
            reported=self.due.log,
            tolerated=None if num_before is None else tolerated(self.state, num_before),
        )
        self.measured_step = self.step
        if previous_report is not None:
            self.ledger.enter("log")
            self.report(*previous_report)
        self.display.advance(self.step)

    def _step(self, batch: PyTree, position: int) -> Metrics:
        """Take a step by `opt.step`, or by the first hook that takes it; return its metrics."""
        take_step = None
        for hook in self.hooks:
            take_step = hook.before_step(self.step, position)
            if take_step is not None:
                break
        step = self.arguments.opt.step
        # A step of ours takes the turn back when it is compiled, before it reuses the state.
        gives_turn = hasattr(step, "place")
        with turn_of_step(self.stop.turn) if gives_turn else nullcontext():
            next_state, metrics = (take_step or step)(self.state, batch)
        self.state = next_state
        self.step = self.step + 1
        self.due = self.arguments.due(self.step)
        self.evaluation_metrics = {}
        self.is_observed = not (self.due.observe or self.due.evaluate)
        # The position is held from before the draw until the step is taken. A signal in between
        # saves the position of the last step, and the batch is drawn again.
        self.stream.release_position()
        for hook in self.hooks:
            hook.after_step(self.step - 1, metrics)
        return metrics

    def evaluate_and_save(self) -> None:
        """Evaluate, observe and save the state if one of these is due.

        All of them wait for the step.
        """
        if not self.due.waits:
            return
        self.ledger.enter("wait")
        metrics = self.wait()
        if self.due.evaluate:
            self.evaluation_metrics = self.evaluate(self.state, metrics)
        all_metrics = metrics | self.evaluation_metrics
        self.ledger.enter("log")
        if self.due.log or self.due.evaluate:
            self.report(self.step, all_metrics)
        self.observe(metrics)
        self.is_observed = True
        # All processes are here before one of them begins a program of all.
        if self.due.save or self.due.save_in_memory:
            self.wait_for_all()
        if self.due.save:
            self.check_finite(metrics)
            self.save(all_metrics)
        if self.due.save_in_memory:
            self.check_finite(metrics)
            self.save_in_memory()
        self.meter.restart()

    def wait_for_all(self) -> None:
        """Wait until all processes are here; a thread may save the state meanwhile.

        The next phase takes programs of all processes, and no thread could save during it. So it
        must not wait for a process that is in code of the user.
        """
        with self.stop.turn.away():
            agree("fit", self.step, range(jax.process_count()))

    def wait(self) -> HostMetrics:
        """Wait for the last step, and return its metrics; empty if no step was taken."""
        for hook in self.hooks:
            hook.at_wait()
        return self.meter.settle()

    def evaluate(self, state: TrainState, metrics: HostMetrics) -> HostMetrics:
        """Return the metrics of the user's `evaluate`; `metrics` are the metrics of training."""
        evaluate = self.arguments.evaluate
        if evaluate is None:
            return {}
        self.stop.check()
        self.ledger.enter("evaluate")
        # several processes must leave it together, if they compute together: before a batch
        is_alone = jax.process_count() == 1
        leavable = self.stop.turn.leavable() if is_alone else nullcontext()
        with self.stop.turn.away(), stop_points(self.stop.check_batch), leavable:
            return call_evaluate(evaluate, state, metrics, self.show_evaluation)

    def observe(self, metrics: HostMetrics) -> None:
        """Let early stopping see the metrics that are due."""
        arguments = self.arguments
        rule = arguments.early_stopping
        checkpoints = arguments.checkpoints
        if self.due.evaluate or not arguments.evaluates_on_schedule:
            known = metrics | self.evaluation_metrics
            check_metric("early_stopping", rule and rule.metric, known)
            check_metric("best of so.Checkpoints", checkpoints and checkpoints.best, known)
        training_metrics = metrics if self.due.log else {}
        evaluation_metrics = self.evaluation_metrics if self.due.scheduled else {}
        self.stopping_state = update(
            rule, self.stopping_state, self.step, training_metrics | evaluation_metrics
        )

    def agree(self) -> None:
        """Agree with all processes whether to stop, if that is due."""
        if self.stopped is None:
            if self.due.agree:
                self.ledger.enter("agree")
                self.wait_for_all()
            self.stopped = self.verdict(due=self.due.agree)

    def finish(self) -> TrainState:
        """Evaluate, report and save the last state; return it, synchronized."""
        self.ledger.enter("agree")
        self.wait_for_all()
        self.stopped = common_verdict(self.stop.verdict, self.stopped, due=True)
        metrics = self.wait()
        final_state = self.state
        if self.arguments.local_updates:
            final_state = self.arguments.opt.synchronize(final_state)
        if metrics:
            self.report_last(final_state, metrics)
            self.wait_for_all()
            self.check_finite(metrics)
        self.save(metrics | self.evaluation_metrics)
        if self.stopped is not None:
            self.display.say(
                f"Stopped at step {self.step} of {self.arguments.num_steps}:"
                f" {_STOP_TEXT[self.stopped]}."
            )
        return final_state

    def report_last(self, final_state: TrainState, metrics: HostMetrics) -> None:
        """Evaluate the last state if it was not evaluated, and report metrics that were not
        reported.
        """
        is_reported_already = bool(self.history) and self.history[-1]["step"] == self.step
        last_metrics = {} if is_reported_already else metrics
        if not self.evaluation_metrics and self.stopped not in SIGNALS:
            final_metrics = self.evaluate_last(final_state, metrics)
            last_metrics = last_metrics | final_metrics
            if not self.arguments.local_updates:
                # otherwise the saved state is not the synchronized one
                self.evaluation_metrics = final_metrics
        if last_metrics:
            self.report(self.step, last_metrics)

    def evaluate_last(self, final_state: TrainState, metrics: HostMetrics) -> HostMetrics:
        """Evaluate the last state, unless a signal ends that."""
        try:
            return self.evaluate(final_state, metrics)
        except StopRun:
            self.stopped = self.stop.verdict
            return {}

    def verdict(self, *, due: bool) -> str | None:
        """Return the common verdict about signals and early stopping."""
        early = out_of_patience(self.arguments.early_stopping, self.stopping_state)
        return common_verdict(self.stop.verdict, early, due=due)

    def show_evaluation(self, done: int, total: int | None) -> None:
        """Show the progress of an evaluation."""
        self.ledger.enter("evaluate")
        self.display.evaluate(done, total)

    def report(self, step: int, metrics: HostMetrics) -> None:
        """Add metrics to the history, log them and show them."""
        if "steps_per_second" in metrics:
            metrics = {**metrics, "goodput": self.ledger.total().fraction}
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(metrics)
        else:
            self.history.append({"step": step, **metrics})
        self.write_log(step, metrics)
        self.display.report(step, metrics)

    def check_finite(self, metrics: HostMetrics) -> None:
        """Refuse a state that is not finite, before it is saved or returned."""
        self.ledger.enter("checkpoint")
        check_state(
            self.state,
            metrics,
            step=self.step - 1,
            position=self.stream.drawn - 1,
            checkpoints=self.arguments.checkpoints,
        )

    def save(self, metrics: HostMetrics) -> None:
        """Write a checkpoint, unless there is one of this step."""
        checkpoints = self.arguments.checkpoints
        if checkpoints is not None and self.saved_step != self.step:
            checkpoints.save(
                self.state,
                step=self.step,
                metrics=metrics,
                extra=self.extra(),
                **self.sums_to_save(),
            )
            self.saved_step = self.step

    def save_at_signal(self) -> None:
        """Save the state of the last step, on a thread of `Stop`, while the run is in other code.

        With several processes all call it. Leave to the run what takes programs on all devices, and
        errors.
        """
        # All or none: a save needs every process, and they may stand at different places of their
        # loops.
        answers = exchange("yes" if self.can_save_now() else "no")
        if set(answers) == {"yes"}:
            self.save(self.meter.settle() | self.evaluation_metrics)

    def can_save_now(self) -> bool:
        """Return whether the state can be saved without a program on all devices, and is finite."""
        arguments = self.arguments
        checkpoints = arguments.checkpoints
        is_hashed = bool(getattr(checkpoints, "hash_only", ())) and jax.process_count() > 1
        if checkpoints is None or arguments.verification is not None or is_hashed:
            return False
        if self.step == 0 or self.measured_step != self.step:
            return False
        try:
            metrics = self.meter.settle()
        except NonFiniteLossError:
            return False
        return is_finite_on_host(self.state, metrics)

    def save_in_memory(self) -> None:
        """Store a snapshot in the memory of the hosts."""
        checkpoints = self.arguments.checkpoints
        assert checkpoints is not None
        checkpoints.save_in_memory(
            self.state, step=self.step, extra=self.extra(), **self.sums_to_save()
        )

    def extra(self) -> dict[str, PyTree]:
        """Return the values that a checkpoint holds next to the state."""
        extra = pack(self.stream, self.arguments.early_stopping, self.stopping_state)
        if not self.is_observed:
            # a signal ends the evaluation: a run that goes on from here begins with it
            extra["unfinished"] = [self.due, self.meter.settle()]
        return extra

    def finish_restored_step(self) -> None:
        """Do the tasks that were due after the restored step, and not finished before it was saved."""
        if self.is_observed:
            return
        if self.due.save:
            self.saved_step = None  # save it again, with the metrics of the evaluation
        self.evaluate_and_save()

    def sums_to_save(self) -> dict[str, LeafSums]:
        """Return the sums of the state as an argument of `save`, after comparing it with the last
        verified step.
        """
        verification = self.arguments.verification
        if verification is None:
            return {}
        return {"sums": verification.sums_to_save(self.state, self.step)}


def begin(
    cleanup: ExitStack,
    arguments: Arguments,
    state: TrainState | DeferredInit,
    batches: Iterable[PyTree],
    log: Log | Sequence[Log] | None,
    *,
    progress: bool,
) -> FitRun:
    """Return a run from its first state, which is restored if there is a newer checkpoint.

    Until `cleanup` ends, signals are caught, and the display and the logs are open.
    """
    stop = Stop()
    cleanup.enter_context(stop.watched())
    display = cleanup.enter_context(show_progress(arguments.num_steps, shown=progress))
    write_log = _with_turn_away(stop, cleanup.enter_context(open_log(log)))
    folder = None if arguments.checkpoints is None else Path(arguments.checkpoints.directory)
    ledger = Ledger(None if jax.process_index() else folder)
    cleanup.callback(ledger.enter, "")  # runs after the last checkpoint is written
    ledger.enter("begin", step_of(state))
    cleanup.enter_context(finish_writes(arguments.checkpoints))

    rows = rows_of(arguments.opt.config, "fit")
    check_same_arguments(arguments, rows)
    stream = BatchStream(batches, rows, stop.turn.leavable)
    # a method of the run would make a cycle, and memory of the device would wait for the garbage
    # collector
    meter = Meter(arguments.checkpoints, partial(_report_skipped, display.say, write_log))
    falls_back = arguments.verification is not None
    saved = SavedStates(arguments.opt, arguments.checkpoints, display.say, falls_back)
    state, stopping_state, unfinished = saved.begin(state, stream, arguments.early_stopping)
    step = int(jax.device_get(state.step))
    saved_step = None if arguments.checkpoints is None else arguments.checkpoints.latest()
    profiler = Profiler((folder or Path()) / "profile", arguments.profile, display.say)
    cleanup.enter_context(profiler.opened())
    hooks: list[Hook | None] = [profiler, arguments.verification]
    if arguments.norms_every is not None:
        hooks.append(NormLog(arguments.opt, arguments.norms_every, write_log, step))
    run = FitRun(
        arguments,
        stop,
        display,
        write_log,
        ledger,
        stream,
        global_batches(stream, rows, display.say),
        [hook for hook in hooks if hook is not None],
        meter,
        state,
        stopping_state,
        step,
        saved_step,
        may_skip=may_skip(state),
        measured_step=step,
    )
    if unfinished is not None:
        due, metrics = unfinished
        run.due = Due(*due)._replace(agree=False)
        run.is_observed = False
        meter.resume(metrics)
    stop.run = run
    cleanup.callback(stop.forget_run)
    display.advance(step)
    run.stopped = run.verdict(due=True)
    return run


def _with_turn_away(stop: Stop, write_log: Log) -> Log:
    """Return a function that writes metrics, during which another thread may save the state."""

    def write(step: int, metrics: Mapping[str, float]) -> None:
        with stop.turn.away():
            write_log(step, metrics)

    return write


def _report_skipped(
    say: Callable[[str], None], write_log: Log, step: int, position: int, metrics: HostMetrics
) -> None:
    """Say and log that the optimizer skipped a step."""
    values = ", ".join(
        f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm") if name in metrics
    )
    say(f"The optimizer skipped step {step - 1} (batch {position}, both counted from 0): {values}.")
    write_log(step, {**metrics, "skipped_batch": position})
