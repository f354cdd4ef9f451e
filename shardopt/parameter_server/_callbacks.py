"""The work of the caller's thread during a run: checkpoints, evaluation, early stopping and
progress.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints, check_checkpoints, check_may_resume
from shardopt.core import (
    PyTree,
    calling,
    check_count,
    check_flag,
    format_error,
    type_error,
    value_error,
)
from shardopt.core import _early_stopping as stopping
from shardopt.core._early_stopping import EarlyStopping, StoppingState, check_early_stopping
from shardopt.parameter_server._coordinator import Coordinator, Milestone, SavePolicy
from shardopt.parameter_server._run import AsyncRun, RunSnapshot, load_snapshot, restore_run
from shardopt.parameter_server._server import ParameterServer
from shardopt.parameter_server._views import make_show

EvaluateParams = Callable[[PyTree], Mapping[str, float | jax.Array]]
"""`evaluate(params) -> metrics`."""

_PROGRESS_SECONDS = 0.25
"""Seconds between two looks at the run."""


@dataclass
class Callbacks:
    """Saves, evaluates and shows milestones; arguments as in `AsyncOptimizer.run`."""

    caller: str
    checkpoints: Checkpoints | None = None
    early_stopping: EarlyStopping | None = None
    evaluate: EvaluateParams | None = None
    evaluate_every: int = 100
    progress: bool = False

    def __post_init__(self):
        check_flag("progress", self.progress)
        check_checkpoints(self.checkpoints)
        check_early_stopping(self.early_stopping)
        if self.evaluate is not None and not callable(self.evaluate):
            raise type_error(
                "evaluate must be a function (params) -> metrics, got"
                f" {type(self.evaluate).__name__}."
            )
        check_count("evaluate_every", self.evaluate_every, minimum=1)
        evaluates = self.early_stopping is not None or self.evaluate is not None
        save_every = None if self.checkpoints is None else self.checkpoints.every
        if isinstance(save_every, datetime.timedelta):
            problem = "checkpoints of an asynchronous run are due by its updates, not by time."
            fix = "pass so.Checkpoints(folder, every=100, keep=3), with a number of updates."
            raise value_error(problem, fix=fix)
        self.policy = SavePolicy(save_every, int(self.evaluate_every) if evaluates else None)
        self.show = make_show(self.caller, shown=self.progress)
        self.stopping_state = StoppingState()
        self.resumed_from: int | None = None
        self.saved_version: int | None = None
        self.evaluations: list[dict[str, float]] = []
        # metrics since the last evaluation
        self._new_history: list[Mapping[str, jax.Array | np.ndarray]] = []
        self._last_metrics: dict[str, float] = {}

    @property
    def has_no_milestones(self) -> bool:
        """Return whether no version is saved or evaluated."""
        return self.policy == SavePolicy()

    def begin(self, run: AsyncRun, params: PyTree) -> None:
        """Restore a new run from the newest checkpoint, if there is one."""
        snapshot = self.load_latest(run.server, params)
        if snapshot is not None:
            restore_run(self.caller, run, snapshot)
            self.resumed_from = self.saved_version = run.state.version

    def load_latest(self, server: ParameterServer, params: PyTree) -> RunSnapshot | None:
        """Read the newest checkpoint, and the state of early stopping in it.

        Return None without a checkpoint.
        """
        checkpoints = self.checkpoints
        if checkpoints is None or (step := checkpoints.latest()) is None:
            return None
        check_may_resume(self.caller, checkpoints, step)
        snapshot = load_snapshot(self.caller, checkpoints, server, params, step)
        saved_state = snapshot.record.get("early_stopping")
        self.stopping_state = (
            stopping.from_json(self.early_stopping, saved_state) or StoppingState()
        )
        return snapshot

    def watch(self, coordinator: Coordinator) -> None:
        """Handle milestones until all workers have ended."""
        if self.has_no_milestones and not self.progress:
            return
        timeout = _PROGRESS_SECONDS if self.progress else None
        while (
            milestone := coordinator.next_milestone(timeout)
        ) is not None or coordinator.running_workers:
            if milestone is not None and self.handle(milestone):
                coordinator.finish_early()
            self.show(coordinator.status)
        self.show(coordinator.status, last=True)

    def handle(self, milestone: Milestone) -> bool:
        """Evaluate and save a milestone; return whether early stopping ends the run."""
        self._new_history += milestone.history
        if self.policy.evaluates(milestone.version):
            self._observe(milestone.version, milestone.params)
        if milestone.snapshot is not None:
            self._save(milestone.snapshot)
        return stopping.out_of_patience(self.early_stopping, self.stopping_state) is not None

    def finish(self, snapshot: RunSnapshot | None) -> None:
        """Save the end of a run, and wait until it is written."""
        if self.checkpoints is None:
            return
        if snapshot is not None and int(snapshot.state.step) != self.saved_version:
            self._save(snapshot)
        self.checkpoints.wait()

    def metrics(self) -> dict[str, object]:
        """Return the metrics of the result: the version of the restored checkpoint, the evaluations
        and the best one.
        """
        metrics: dict[str, object] = {"resumed_from": self.resumed_from}
        if self.policy.evaluate_every is not None:
            metrics["evaluations"] = self.evaluations
            metrics["best"] = stopping.best(self.early_stopping, self.stopping_state)
        return metrics

    def _save(self, snapshot: RunSnapshot) -> None:
        """Begin to write a checkpoint."""
        assert self.checkpoints is not None
        record = dict(snapshot.record)
        version = int(snapshot.state.step)
        if self.early_stopping is not None:
            record["early_stopping"] = stopping.to_json(self.early_stopping, self.stopping_state)
        self.checkpoints.save(
            snapshot.state, step=version, metrics=self._last_metrics, extra={"server": record}
        )
        self.saved_version = version

    def _observe(self, version: int, params: PyTree) -> None:
        """Evaluate a version, and tell early stopping the results."""
        updates = jax.device_get(self._new_history)
        self._new_history = []
        names = updates[0] if updates else ()
        metrics = {name: float(np.mean([update[name] for update in updates])) for name in names}
        if self.evaluate is not None:
            results = self.evaluate(params)
            if not isinstance(results, Mapping):
                problem = f"evaluate must return a dict of metrics, got {type(results).__name__}."
                raise TypeError(
                    format_error(self.caller, problem, fix='return {"val_loss": loss}.')
                )
            metrics |= {name: float(value) for name, value in results.items()}
        with calling(self.caller):
            rule = self.early_stopping
            stopping.check_metric("early_stopping", rule and rule.metric, metrics)
        self.stopping_state = stopping.update(rule, self.stopping_state, version, metrics)
        self.evaluations.append({"step": version, **metrics})
        self._last_metrics = metrics
