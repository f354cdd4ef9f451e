"""An `evaluate` function for `fit`: each metric over a fixed set of batches of any sizes."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sized

import jax
import numpy as np

from shardopt.config._check import check_evaluate_fn
from shardopt.core import (
    Metric,
    PyTree,
    TrainState,
    calling,
    format_error,
    quoted,
    type_error,
    value_error,
)
from shardopt.core._block_model import LossFn
from shardopt.core._loss_parts import LossParts
from shardopt.losses._metrics import added, value_of
from shardopt.runtime._turn import pass_stop_point
from shardopt.step._average import check_selection, select_params
from shardopt.step._evaluate import Totals
from shardopt.step._global_rows import unwrap
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy
from shardopt.training._loggers import ShowBatches

Evaluate = Callable[[TrainState], Mapping[str, float | np.ndarray | jax.Array]]


@calling("evaluation")
def evaluation(
    opt: ShardedOptimizer,
    batches: Iterable[PyTree],
    *,
    evaluate_fn: LossFn | None = None,
    prefix: str = "val_",
    params: str | None = None,
) -> "Evaluation":
    """Return `evaluate(state) -> metrics`: loss and aux metrics over the rows of all batches, of
    any sizes.

    With local updates (`local_sgd`, `diloco`) the metrics belong to `state.params`, which change
    only when replicas synchronize. For the mean of the replicas, call
    `evaluate(opt.synchronize(state))`.

    Args:
      opt: the optimizer that gives placement and loss.
      batches: a list of batches, or another iterable that starts again each time. Leaves are
        [rows, ...] with any number of rows. With several processes, pass the rows of each process,
        or the same batches on all: `so.GlobalRows(batches)`. A process may have fewer rows or fewer
        batches than another.
      evaluate_fn: a loss to use in place of the loss of `opt.evaluate`, in the form of `loss_fn` of
        `so.ddp`. It gets no random key.
      prefix: put before the name of each metric, since training reports "loss" too.
      params: "average" to evaluate the average of `so.replace` in place of `state.params`.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`, if `batches` is an iterator, which is empty the
        second time, or if `evaluate_fn` is not a function.
      ValueError: if `params` is another value. From the returned function, if there are no batches,
        or no average.
      NotSeparableError: from the returned function, in the per-device view, if the loss is no
        (weighted) mean over rows.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch - params["mean"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> evaluate = evaluation(opt, [jnp.array([1.0, 3.0]), jnp.array([2.0])])
      >>> evaluate(opt.init({"mean": jnp.array(2.0)}))["val_loss"] == 2 / 3
      True

    **Definition**: devices, micro-batches and batches cut the set into pieces p of n_p rows.

    - A plain value v_p is a mean over rows; the metric is sum_p n_p v_p / sum_p n_p.
    - For `so.losses.Weighted`, totals and weights are summed over all batches and divided once at
      the end, in double precision. So every token counts the same, however the tokens are batched.
    - `so.losses.Sum` adds up; `so.losses.Max` and `so.losses.Min` take the largest and the smallest
      value.
    - A metric that is an array is a list of numbers.

    **Equivalence**: equal to one device on the complete set at once, up to summation order, if the
    loss is a (weighted) mean over rows. Any other loss is the mean over batches, by rows: if it is
    not shown to be a mean over rows, a set of several batches warns once. A batch whose rows the devices do not divide, even with
    fewer rows than devices, is padded with copies of a row; the copies do not count. Such a batch
    costs two more programs, each run once.
    """
    check_is_strategy(opt)
    inner_batches, _ = unwrap(batches)
    if iter(inner_batches) is inner_batches:
        problem = f"batches must be iterable more than once, got an iterator ({type(inner_batches).__name__})."
        raise type_error(problem, fix="pass list(itertools.islice(batches, n)).")
    config = opt.config if evaluate_fn is None else opt.config.replace(evaluate_fn=evaluate_fn)
    check_evaluate_fn(config)
    check_selection("evaluation", params)
    return Evaluation(opt, batches, prefix, Totals(config), params)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The function that `evaluation` returns, with readable attributes.

    Attributes:
      opt: the optimizer that gives placement and loss.
      batches: the batches.
      prefix: the prefix of the metric names.
      totals: the compiled programs.
      params: "average", or None for the parameters of the state.
      warned: has an entry once the loss was checked.
    """

    opt: ShardedOptimizer
    batches: Iterable[PyTree]
    prefix: str
    totals: Totals
    params: str | None = None
    warned: list[bool] = dataclasses.field(default_factory=list)

    def __call__(self, state: TrainState, *, show: ShowBatches | None = None) -> dict[str, float]:
        """Return the metrics of a state over all batches.

        Call `show(done, total)` for each batch.
        """
        state = select_params("evaluation", state, self.params)
        sums: dict[str, Metric] = {}
        batches, _ = unwrap(self.batches)
        done = 0
        total = len(batches) if isinstance(batches, Sized) else None
        # Results are fetched one batch late: the device computes one batch while the host prepares
        # the next. So the device holds at most two.
        pending = None
        for done, batch in enumerate(self.totals.rows.join_all(self.batches), 1):
            pass_stop_point()
            if show is not None:
                show(done - 1, total)
            if done == 2:
                self._warn_of_mixing(state, batch)
            for parts in self.totals(state, batch):
                finished = pending
                pending = parts
                _add(sums, finished)
        _add(sums, pending)
        if show is not None:
            show(done, done)
        if not sums:
            problem = "there are no examples in batches."
            raise ValueError(format_error("evaluation", problem, fix="pass at least one batch."))
        # if the weights sum to zero, the metric is NaN
        with np.errstate(invalid="ignore", divide="ignore"):
            return {self.prefix + name: value_of(metric).tolist() for name, metric in sums.items()}

    def _warn_of_mixing(self, state: TrainState, batch: PyTree) -> None:
        """Warn once if the mean over batches may not be the loss of the set."""
        if self.warned:
            return
        self.warned.append(True)
        mixing = self.totals.mixing(state, batch)
        if mixing is None:
            return
        problem = (
            f"{mixing.result} of the set is taken as the mean of its batches, by rows, but it is not"
            f" shown to be a (weighted) mean over rows: {mixing.reason}"
        )
        fix = (
            "return so.losses.Weighted(total, weight) or so.losses.Sum of rows, whose parts add up;"
            " or evaluate the set as one batch; or view='unproved' if you know better."
        )
        warnings.warn(format_error("evaluation", problem, mixing.lines, fix), stacklevel=3)


def _add(sums: dict[str, Metric], parts: LossParts | None) -> None:
    """Add the metrics of a batch to `sums`, in double precision; keep the largest and smallest."""
    if parts is None:
        return
    for name, metric in jax.device_get({"loss": parts.loss, **parts.metrics}).items():
        metric = jax.tree.map(lambda x: np.asarray(x, np.float64), metric)
        sums[name] = added(sums[name], metric) if name in sums else metric


def call_evaluate(
    evaluate: Evaluate, state: TrainState, training_names: Collection[str], show: ShowBatches
) -> dict[str, float]:
    """Call the user's `evaluate` and return its metrics as numbers.

    The progress of an `Evaluation` is shown.

    Args:
      evaluate: the function of the user.
      state: the state to evaluate.
      training_names: the metric names that training reports.
      show: shows the progress of an `Evaluation`.

    Raises:
      TypeError: if it does not return a dict of numbers.
      ValueError: if a name is among `training_names`.
    """
    returned = evaluate(state, show=show) if isinstance(evaluate, Evaluation) else evaluate(state)
    if not isinstance(returned, Mapping):
        problem = f"evaluate must return a dict of numbers, got {type(returned).__name__}."
        raise type_error(problem, fix='return {"val_loss": ...}.')
    values = jax.device_get(dict(returned))
    if not_numbers := [
        f"{name!r}: {value!r:.80}"
        for name, value in values.items()
        # complex numbers, objects, text and times
        if np.shape(value) or np.asarray(value).dtype.kind in "cOSUMm"
    ]:
        problem = "evaluate must return a dict of numbers."
        raise type_error(problem, not_numbers, "reduce each to one number.")
    clashing_names = sorted(set(values) & set(training_names))
    if clashing_names:
        problem = f"evaluate returned {quoted(clashing_names)}, which training reports too."
        fix = f"give it another name, such as {f'val_{clashing_names[0]}'!r}."
        raise value_error(problem, fix=fix)
    return {name: float(values[name]) for name in returned}
