"""An `evaluate` function for `fit`: each metric over a fixed set of batches, of any sizes."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sized

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.block_model import LossFn
from shardopt.core.errors import format_error
from shardopt.core.types import Metric, PyTree, TrainState
from shardopt.engine.config import check_evaluate_fn
from shardopt.engine.evaluate import Totals
from shardopt.engine.loss import LossParts
from shardopt.engine.metrics import added, value_of
from shardopt.engine.optimizer import ShardedOptimizer, check_is_strategy
from shardopt.training.loggers import ShowBatches

Evaluate = Callable[[TrainState], Mapping[str, float | np.ndarray | jax.Array]]


def evaluation(
    opt: ShardedOptimizer, batches: Iterable[PyTree], *, evaluate_fn: LossFn | None = None, prefix: str = "val_"
) -> "Evaluation":
    """Return `evaluate(state) -> metrics`: loss and aux metrics over the rows of all batches, of whatever sizes.

    With pieces p of n_p rows, as devices, micro-batches and batches cut the set, a plain value v_p is a mean over rows,
    and the metric is sum_p n_p v_p / sum_p n_p. Of what is `so.Weighted`, totals and weights are summed over all batches
    and divided once, at the end, in double precision: tokens count alike, however they are batched. `so.Sum` adds up,
    `so.Max` and `so.Min` take the largest and the smallest.

    **Equivalence**: equal to one device on the whole set at once, up to summation order, for every loss that is a
    (weighted) mean over rows. A batch that the devices do not divide, also one of fewer rows than devices, is filled up
    with copies of a row, which count nothing. It costs two more programs, run once for such a batch.

    With local updates (`local_sgd`, `diloco`) it is the loss of `state.params`, which change when replicas synchronize; of
    the mean of the replicas, `evaluate(opt.synchronize(state))`.

    Args:
      opt: the optimizer whose parameters, placement and loss they are.
      batches: a list of batches, or anything that can be iterated again each time; with several processes the same
        batches on each. Leaves are [rows, ...] with any number of rows.
      evaluate_fn: another loss than that of `opt.evaluate`, in the form of `loss_fn` of `so.ddp`; it gets no key.
      prefix: put before the name of each metric, since training reports "loss" too.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`; `batches` is an iterator, which would be empty the second time; `evaluate_fn` is not a function.
      ValueError: by the returned function, if there are no batches.
      NotSeparableError: by the returned function, in the per-device view, if the loss is no (weighted) mean over rows.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch - params["mean"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> evaluate = evaluation(opt, [jnp.array([1.0, 3.0]), jnp.array([2.0])])
      >>> evaluate(opt.init({"mean": jnp.array(2.0)}))["val_loss"] == 2 / 3
      True
    """
    check_is_strategy("evaluation", opt)
    if iter(batches) is batches:
        what = f"batches must be iterable more than once, got an iterator ({type(batches).__name__})."
        raise TypeError(format_error("evaluation", what, fix="pass list(itertools.islice(batches, n))."))
    config = opt.config if evaluate_fn is None else opt.config._replace(evaluate_fn=evaluate_fn)
    check_evaluate_fn("evaluation", config)
    return Evaluation(opt, batches, prefix, Totals(config))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluation` returns: a function of a state that tells what it evaluates.

    Attributes:
      opt: the optimizer whose loss it is.
      batches: the batches.
      prefix: what the names of its metrics begin with.
      totals: its compiled programs.
    """

    opt: ShardedOptimizer
    batches: Iterable[PyTree]
    prefix: str
    totals: Totals

    def __call__(self, state: TrainState, *, show: ShowBatches | None = None) -> dict[str, float]:
        """Return the metrics of a state over the whole set; `show(done, total)` is told of each batch."""
        sums: dict[str, Metric] = {}
        done, total = 0, len(self.batches) if isinstance(self.batches, Sized) else None
        # Fetched one late: the device works on one while the host prepares the next, and holds no more than two.
        waiting = None
        for done, batch in enumerate(self.batches, 1):
            if show is not None:
                show(done - 1, total)
            for parts in self.totals(state, batch):
                ready, waiting = waiting, parts
                _add(sums, ready)
        _add(sums, waiting)
        if show is not None:
            show(done, done)
        if not sums:
            what = "there are no examples in batches."
            raise ValueError(format_error("evaluation", what, fix="pass at least one batch."))
        with np.errstate(invalid="ignore", divide="ignore"):  # nothing of any weight: not a number
            return {self.prefix + name: value_of(one).item() for name, one in sums.items()}


def _add(sums: dict[str, Metric], parts: LossParts | None) -> None:
    """Add totals, weights and sums, in double precision, and keep the largest and smallest."""
    if parts is None:
        return
    for name, one in jax.device_get({"loss": parts.loss, **parts.metrics}).items():
        one = jax.tree.map(lambda x: np.asarray(x, np.float64), one)
        sums[name] = added(sums[name], one) if name in sums else one


def call_evaluate(evaluate: Evaluate, state: TrainState, taken: Collection[str], show: ShowBatches) -> dict[str, float]:
    """Call the user's `evaluate`, of which an `Evaluation` is shown, and return its metrics as numbers.

    Raises:
      TypeError: if it does not return a dict of numbers.
      ValueError: if a name is among `taken`, the names that training reports.
    """
    returned = evaluate(state, show=show) if isinstance(evaluate, Evaluation) else evaluate(state)
    if not isinstance(returned, Mapping):
        what = f"evaluate must return a dict of numbers, got {type(returned).__name__}."
        raise TypeError(format_error("fit", what, fix='return {"val_loss": ...}.'))
    values = jax.device_get(dict(returned))
    if strange := [f"{name!r}: {value!r:.80}" for name, value in values.items() if not _is_number(value)]:
        what = "evaluate must return a dict of numbers."
        raise TypeError(format_error("fit", what, strange, "reduce each to one number."))
    if clash := sorted(set(values) & set(taken)):
        what = f"evaluate returned {', '.join(map(repr, clash))}, which training reports too."
        raise ValueError(format_error("fit", what, fix=f"give it another name, such as {f'val_{clash[0]}'!r}."))
    return {name: float(values[name]) for name in returned}


def _is_number(value: object) -> bool:
    array = np.asarray(value)
    return array.shape == () and (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool)
