"""Early stopping when a metric has not improved for a while, as a pure update of a small state."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardopt.core._arguments import check_choice, check_count, check_number
from shardopt.core._errors import calling, type_error, value_error


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a metric has not improved for `patience` observations in a row.

    A training metric is observed every `log_every` steps, a metric of `evaluate` at each scheduled
    evaluation. A value v improves on the best value b if v < b - min_delta ("min") or v > b +
    min_delta ("max"). NaN is never an improvement. Checkpoints save the best value and the count,
    so a resumed run stops at the same step.

    Args:
      metric: the name of a training metric or of a metric that `evaluate` returns.
      patience: the number of observations without improvement that ends the run; at least 1.
      min_delta: the smallest change that counts as an improvement, in units of the metric; at least
        0.
      mode: "min" if smaller is better, "max" if larger is.

    Raises:
      TypeError: if `metric` or `mode` is not a string, `patience` not an integer or `min_delta` not
        a number.
      ValueError: if `metric` is empty, `patience` is below 1, `min_delta` is negative or not
        finite, or `mode` is neither "min" nor "max".

    Example:
      >>> rule, state = EarlyStopping("val_loss", patience=2), StoppingState()
      >>> for step, loss in enumerate([1.0, 0.8, 0.9, 0.85]):
      ...     state = update(rule, state, step, {"val_loss": loss})
      >>> state, out_of_patience(rule, state)
      (StoppingState(best=0.8, best_step=1, wait=2), 'early')
    """

    metric: str
    patience: int
    min_delta: float = 0.0
    mode: str = "min"

    @calling("EarlyStopping")
    def __post_init__(self):
        if not isinstance(self.metric, str):
            raise type_error(
                f"metric must be the name of a metric, got {type(self.metric).__name__}."
            )
        if not self.metric:
            raise value_error("metric must not be empty.")
        check_count("patience", self.patience)
        check_number("min_delta", self.min_delta)
        check_choice("mode", self.mode, ("min", "max"), "use 'min' or 'max'.")


class StoppingState(NamedTuple):
    """The state of early stopping.

    Attributes:
      best: the best value seen, or None before the first number.
      best_step: the number of steps taken when the best value was seen.
      wait: the number of observations since then.
    """

    best: float | None = None
    best_step: int | None = None
    wait: int = 0


def check_early_stopping(early_stopping: EarlyStopping | None) -> None:
    """Refuse, by a TypeError, an argument that is no rule of early stopping."""
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        problem = (
            "early_stopping must be a so.training.EarlyStopping, got"
            f" {type(early_stopping).__name__}."
        )
        raise type_error(problem, fix='pass so.training.EarlyStopping("val_loss", patience=5).')


def update(
    rule: EarlyStopping | None, state: StoppingState, step: int, metrics: Mapping[str, float]
) -> StoppingState:
    """Return the state after one observation.

    The same state if there is no rule, or `metrics` lacks its metric.
    """
    if rule is None or rule.metric not in metrics:
        return state
    value = float(metrics[rule.metric])
    if math.isnan(value) or (state.best is not None and not _improves(rule, value, state.best)):
        return state._replace(wait=state.wait + 1)
    return StoppingState(best=value, best_step=step, wait=0)


def out_of_patience(rule: EarlyStopping | None, state: StoppingState) -> str | None:
    """Return the verdict "early" if the patience of the rule is used up, else None."""
    return "early" if rule is not None and state.wait >= rule.patience else None


def best(rule: EarlyStopping | None, state: StoppingState) -> dict[str, float] | None:
    """Return `{"step": n, metric: value}` for the best value seen, or None before the first value."""
    if rule is None or state.best is None or state.best_step is None:
        return None
    return {"step": state.best_step, rule.metric: state.best}


def check_metric(watcher: str, metric: str | None, known: Collection[str]) -> None:
    """Raise an error if the run does not report the metric that is watched.

    Raises:
      ValueError: if `metric` is not in `known`.
    """
    if metric is not None and metric not in known:
        problem = f"{watcher} watches {metric!r}, which is not among the metrics of this run:"
        fix = "watch one of these, or return it from evaluate, every few steps."
        raise value_error(problem, sorted(known), fix)


def to_json(rule: EarlyStopping, state: StoppingState) -> dict[str, Any]:
    """Return the state for a checkpoint, with the metric and mode of the rule."""
    return {"metric": rule.metric, "mode": rule.mode, **state._asdict()}


def from_json(rule: EarlyStopping | None, saved: Mapping[str, Any] | None) -> StoppingState | None:
    """Return the state of a checkpoint.

    None without a rule or a saved state, or if it has another metric or mode.
    """
    if (
        rule is None
        or saved is None
        or (saved["metric"], saved["mode"]) != (rule.metric, rule.mode)
    ):
        return None
    return StoppingState(saved["best"], saved["best_step"], saved["wait"])


def _improves(rule: EarlyStopping, value: float, best: float) -> bool:
    return value < best - rule.min_delta if rule.mode == "min" else value > best + rule.min_delta
