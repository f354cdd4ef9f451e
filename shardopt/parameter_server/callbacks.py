"""Beside a run, on the thread of the caller: checkpoints, evaluation, early stopping and progress."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from shardopt.core import early_stopping as stopping
from shardopt.core.arguments import check_count
from shardopt.core.early_stopping import EarlyStopping, StoppingState
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.parameter_server.coordinator import Coordinator, Milestone, SavePolicy
from shardopt.parameter_server.run import Checkpoints, Run, Snapshot, load_snapshot, restore_run
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.views import Show

EvaluateParams = Callable[[PyTree], Mapping[str, float | jax.Array]]
"""`evaluate(params) -> metrics`."""

_USED = ("every", "save", "restore", "wait")
_PROGRESS_SECONDS = 0.25
"""Between two looks at the run."""


class Callbacks:
    """What is done with milestones; arguments as in `RunFn`. To show a run, set `show`, from `show_workers`."""

    def __init__(
        self,
        who: str,
        *,
        checkpoints: Checkpoints | None = None,
        early_stopping: EarlyStopping | None = None,
        evaluate: EvaluateParams | None = None,
        evaluate_every: int = 100,
        progress: bool = False,
    ):
        if not isinstance(progress, bool):
            raise TypeError(f"{who}: progress must be True or False, got {progress!r}.")
        if checkpoints is not None and not all(hasattr(checkpoints, name) for name in _USED):
            what = f"checkpoints must be a shardopt.Checkpoints, got {type(checkpoints).__name__}."
            raise TypeError(format_error(who, what, fix="pass so.Checkpoints(folder, every=100, keep=3)."))
        if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
            what = f"early_stopping must be a shardopt.EarlyStopping, got {type(early_stopping).__name__}."
            raise TypeError(format_error(who, what, fix='pass so.EarlyStopping("loss", patience=5).'))
        if evaluate is not None and not callable(evaluate):
            raise TypeError(f"{who}: evaluate must be a function (params) -> metrics, got {type(evaluate).__name__}.")
        check_count(who, "evaluate_every", evaluate_every, least=1)
        self.who, self.checkpoints, self.rule, self.evaluate = who, checkpoints, early_stopping, evaluate
        evaluates = early_stopping is not None or evaluate is not None
        save_every = None if checkpoints is None else checkpoints.every
        self.policy = SavePolicy(save_every, int(evaluate_every) if evaluates else None)
        self.progress = progress
        self.show: Show = lambda status, last=False: None
        self.state = StoppingState()
        self.resumed_from: int | None = None
        self.saved: int | None = None
        self.evaluations: list[dict[str, float]] = []
        self._window: list[Mapping[str, jax.Array | np.ndarray]] = []
        self._last: dict[str, float] = {}

    @property
    def idle(self) -> bool:
        """Whether no version is saved or evaluated."""
        return self.policy == SavePolicy()

    def begin(self, run: Run, params: PyTree) -> None:
        """Let a new run go on from the newest checkpoint, if there is one."""
        if (found := self.latest(run.server, params)) is not None:
            restore_run(self.who, run, found)
            self.resumed_from = self.saved = run.state.version

    def latest(self, server: Server, params: PyTree) -> Snapshot | None:
        """Read the newest checkpoint, and what early stopping remembered then; None where there is none."""
        checkpoints = self.checkpoints
        if checkpoints is None or (step := checkpoints.latest()) is None:
            return None
        if not checkpoints.resume:
            what = f"{checkpoints.directory} already has checkpoints, the last of step {step}."
            fix = "pass resume=True to so.Checkpoints to go on from there, or choose another folder."
            raise ValueError(format_error(self.who, what, fix=fix))
        found = load_snapshot(self.who, checkpoints, server, params, step)
        saved = found.about.get("early_stopping")
        if self.rule is not None and saved is not None:
            self.state = stopping.from_json(self.rule, saved) or StoppingState()
        return found

    def watch(self, coordinator: Coordinator) -> None:
        """Take milestones away until nobody works any more."""
        if self.idle and not self.progress:
            return
        timeout = _PROGRESS_SECONDS if self.progress else None
        while (milestone := coordinator.milestone(timeout)) is not None or coordinator.working:
            if milestone is not None and self.handle(milestone):
                coordinator.finish_early()
            self.show(coordinator.status)
        self.show(coordinator.status, last=True)

    def handle(self, milestone: Milestone) -> bool:
        """Evaluate, save; say whether the run is to end."""
        self._window += milestone.history
        if self.policy.evaluates(milestone.version):
            self._observe(milestone.version, milestone.params)
        if milestone.snapshot is not None:
            self._save(milestone.snapshot)
        return stopping.out_of_patience(self.rule, self.state) is not None

    def finish(self, found: Snapshot | None) -> None:
        """Save the end of a run, and wait until it is written."""
        if self.checkpoints is None:
            return
        if found is not None and int(found.state.step) != self.saved:
            self._save(found)
        self.checkpoints.wait()

    def metrics(self) -> dict[str, object]:
        """Return what the result says of all this."""
        found: dict[str, object] = {"resumed_from": self.resumed_from}
        if self.policy.evaluate_every is not None:
            found["evaluations"], found["best"] = self.evaluations, stopping.best(self.rule, self.state)
        return found

    def _save(self, found: Snapshot) -> None:
        """Begin to write a checkpoint."""
        assert self.checkpoints is not None
        about, version = dict(found.about), int(found.state.step)
        if self.rule is not None:
            about["early_stopping"] = stopping.to_json(self.rule, self.state)
        self.checkpoints.save(found.state, step=version, metrics=self._last, extra={"server": about})
        self.saved = version

    def _observe(self, version: int, params: PyTree) -> None:
        rows, self._window = jax.device_get(self._window), []
        metrics = {name: float(np.mean([row[name] for row in rows])) for name in (rows[0] if rows else ())}
        if self.evaluate is not None:
            found = self.evaluate(params)
            if not isinstance(found, Mapping):
                what = f"evaluate must return a dict of metrics, got {type(found).__name__}."
                raise TypeError(format_error(self.who, what, fix='return {"val_loss": loss}.'))
            metrics |= {name: float(value) for name, value in found.items()}
        stopping.check_metric(self.rule, metrics, self.who)
        self.state = stopping.update(self.rule, self.state, version, metrics)
        self.evaluations.append({"step": version, **metrics})
        self._last = metrics
