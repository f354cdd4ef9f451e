"""`GlobalRows`: batches that are the same on all processes; and which processes share the rows of a
mesh.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree
from shardopt.losses._batch_dims import row_dims
from shardopt.step._batches import as_arrays

if TYPE_CHECKING:
    from shardopt.step._rows import AgreedRows


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalRows:
    """Batches with the rows of all processes, the same on each process.

    With several processes, each of them passes its own rows to `opt.step`, `opt.evaluate`, `fit`
    and `so.training.evaluation`. Wrap a batch, or an iterable of batches, if each process has the
    rows of all instead. The processes compare the batches. With one process it changes nothing.

    Attributes:
      batches: a batch, or an iterable of batches.

    Example:
      >>> import jax, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch - params["mean"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.5), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> state = opt.init({"mean": np.zeros(())})
      >>> state, metrics = opt.step(state, so.GlobalRows(np.ones(4, np.float32)))
      >>> float(metrics["loss"])
      1.0
    """

    batches: PyTree | Iterable[PyTree]

    def __iter__(self) -> Iterator["GlobalRows"]:
        """Iterate over batches, each of them marked."""
        return map(GlobalRows, self.batches)


END = object()
"""What stands for a batch when there are no more."""

Rows: TypeAlias = "RowsOfOne | AgreedRows"


def unwrap(batches: Any) -> tuple[Any, bool]:
    """Return a batch or batches without `GlobalRows`, and whether they had it."""
    if isinstance(batches, GlobalRows):
        return unwrap(batches.batches)[0], True
    return batches, False


@dataclasses.dataclass(frozen=True)
class RowsOfOne:
    """The rows of a mesh whose devices belong to one process; as `AgreedRows`, without others.

    Attributes:
      config: of the strategy.
    """

    config: StrategyConfig

    @property
    def leaders(self) -> list[int]:
        """This process."""
        return [jax.process_index()]

    @property
    def row_shard(self) -> tuple[int, int]:
        """The only part of the rows."""
        return 0, 1

    def join(self, batch: PyTree) -> PyTree:
        """Return the batch with arrays as leaves."""
        return as_arrays(self.config.strategy, unwrap(batch)[0])

    def join_all(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Return an iterator over the batches, with arrays as leaves."""
        return map(self.join, batches)


def leaves_with_rows(config: StrategyConfig, batch: PyTree) -> list[tuple[Any, int]]:
    """Return the leaves of a batch that have rows, each with the dim that counts them."""
    leaves_and_dims = zip(jax.tree.leaves(batch), row_dims(config, batch), strict=True)
    return [(leaf, dim) for leaf, dim in leaves_and_dims if dim is not None]


def rows_of(config: StrategyConfig, caller: str) -> Rows:
    """Return what makes global batches of the batches of the processes of a mesh.

    Args:
      config: of the strategy.
      caller: the function that the user called, for messages.
    """
    if len({device.process_index for device in config.mesh.devices.flat}) == 1:
        return RowsOfOne(config)
    # only several processes load it
    from shardopt.step._rows import AgreedRows

    return AgreedRows(config, caller)
