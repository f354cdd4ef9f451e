"""An `evaluate` function for `fit`: the mean of each metric over a fixed set of batches."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, TrainState
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.training.metrics import count_examples

Evaluate = Callable[[TrainState], Mapping[str, float | np.ndarray | jax.Array]]


def evaluation(opt: ShardedOptimizer, batches: Iterable[PyTree], *, prefix: str = "val_") -> "Evaluation":
    """Return `evaluate(state) -> metrics`: loss and aux metrics of `opt.evaluate`, averaged over batches.

    With batches b of n_b examples, a metric is sum_b n_b m_b / sum_b n_b. For a loss that is a mean over examples
    this is the mean over all examples. For a `Weighted` loss m_b is already divided by the weight of its own batch, so
    batches of uneven weight count by their examples, not by their weight.

    With local updates (`local_sgd`, `diloco`) it is the loss of `state.params`, which change when replicas synchronize; of
    the mean of the replicas, `evaluate(opt.synchronize(state))`.

    Args:
      opt: the optimizer whose loss it is.
      batches: a list of batches, or anything that can be iterated again each time; with several processes the same
        batches on each.
      prefix: put before the name of each metric, since training reports "loss" too.

    Raises:
      TypeError: if `batches` is an iterator, which would be empty the second time.
      ValueError: by the returned function, if there are no batches.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch - params["mean"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(devices=jax.devices()[:1]), loss_fn)
      >>> evaluate = evaluation(opt, [jnp.array([1.0, 3.0]), jnp.array([2.0])])
      >>> evaluate(opt.init({"mean": jnp.array(2.0)}))["val_loss"] == 2 / 3
      True
    """
    if iter(batches) is batches:
        what = f"batches must be iterable more than once, got an iterator ({type(batches).__name__})."
        raise TypeError(format_error("evaluation", what, fix="pass list(itertools.islice(batches, n))."))
    return Evaluation(opt, batches, prefix)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluation` returns: a function of a state that tells what it evaluates.

    Attributes:
      opt: the optimizer whose loss it is.
      batches: the batches.
      prefix: what the names of its metrics begin with.
    """

    opt: ShardedOptimizer
    batches: Iterable[PyTree]
    prefix: str

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the means of the metrics of a state."""
        totals: dict[str, float] = {}
        examples = 0
        # Fetched one batch late: the device works on one while the host prepares the next, and holds no more than two.
        waiting = None
        for batch in self.batches:
            ready, waiting = waiting, (count_examples(batch), self.opt.evaluate(state, batch))
            examples += _add(totals, ready)
        examples += _add(totals, waiting)
        if not examples:
            what = "there are no examples in batches."
            raise ValueError(format_error("evaluation", what, fix="pass at least one batch."))
        return {self.prefix + name: total / examples for name, total in totals.items()}


def _add(totals: dict[str, float], measured: tuple[int, Mapping[str, jax.Array]] | None) -> int:
    """Add the metrics of one batch to the totals, in double precision, and return its size."""
    if measured is None:
        return 0
    size, metrics = measured
    for name, value in jax.device_get(metrics).items():
        totals[name] = totals.get(name, 0.0) + size * float(value)
    return size


def call_evaluate(evaluate: Evaluate, state: TrainState, taken: Collection[str]) -> dict[str, float]:
    """Call the user's `evaluate` and return its metrics as numbers.

    Raises:
      TypeError: if it does not return a dict of numbers.
      ValueError: if a name is among `taken`, the names that training reports.
    """
    returned = evaluate(state)
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
