"""The slots of a step: the parts that a strategy or an option hands in. The step itself names no
feature.

A slot is filled where the strategy is made (`strategies/_slots.py`). The core's own fillings are in
`step/` and `losses/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from shardopt.collectives import LeafWire
from shardopt.core import Arrays, PyTree, Weighted
from shardopt.core._loss_parts import Gradients, LossParts, StepMetrics
from shardopt.core._rounding import Rounding
from shardopt.partition import LeafPlan, Owners
from shardopt.partition._counts import Counts

if TYPE_CHECKING:
    from shardopt.config._config import StrategyConfig, WireOptions
    from shardopt.config._layout import Layout
    from shardopt.config._transformation import ExtraArgs
    from shardopt.remat._gathered_block import BlockRemat


class StepInputs(NamedTuple):
    """The inputs that a device differentiates in one step, in the per-device view.

    Attributes:
      params: all leaves of the parameters, as they are placed.
      batch: the rows of this device.
      step: the number of the step; None outside of training.
      rng: the key data of the train state; None outside of training.
      piece_rows: the rows of a piece of an evaluation; None: as in a step.
    """

    params: Arrays
    batch: PyTree
    step: jax.Array | None
    rng: jax.Array | None
    piece_rows: int | None = None


class DeviceLoss(Protocol):
    """The loss of the rows of one device: micro-batches one after another, or a pipeline."""

    def gradients(
        self, config: StrategyConfig, layout: Layout, inputs: StepInputs
    ) -> tuple[Arrays, LossParts]:
        """Return the local gradients of the trained leaves, summed over micro-batches, and loss
        parts [micro_batches, ...].

        If the placement shards gradients, they are reduce-scattered over data already. If the
        config asks for sums, the sum of the local gradients' bits follows the last gradient, as
        limbs.
        """
        ...

    def losses(self, config: StrategyConfig, layout: Layout, inputs: StepInputs) -> LossParts:
        """Return the parts of the local loss, [micro_batches, ...]; without keys if rng is None."""
        ...

    def stored_order(self, config: StrategyConfig, layout: Layout, grads: Arrays) -> Arrays:
        """Return gradients that are summed over devices, in the order of the stored leaves."""
        ...


LossFunction = Callable[..., tuple[jax.Array, StepMetrics]]
"""`loss(params, batch, step=None, rng=None) -> (loss, metrics)` of the union batch."""


class Differentiate(Protocol):
    """Slot 1: the loss of a batch and its gradient, in one view of the loss."""

    def gradients(self, config: StrategyConfig, layout: Layout) -> Callable[..., Gradients]:
        """Return `gradients(params, batch, step, rng, reducer_state=None)`, to be called in the
        global view. They are the gradients of the union batch.
        """
        ...

    def loss(self, config: StrategyConfig, layout: Layout) -> LossFunction:
        """Return the loss of the union batch.

        With a step and rng it is the function that `gradients` differentiates, with the same keys
        and micro-batches. Without them the loss gets no key.
        """
        ...

    def totals(self, config: StrategyConfig, layout: Layout) -> Callable[..., LossParts]:
        """Return `totals(params, batch, counted)`: parts with totals and weights of all rows.

        `counted`, a bool for each piece of the batch, selects the pieces that count; None: all.
        """
        ...


class Reduce(Protocol):
    """Slot 2: how gradients are summed over devices. It is made for one parameter structure."""

    @property
    def state_specs(self) -> PyTree:
        """The specs of its state in the per-device view; None without a state."""
        ...

    def grad_specs(self, config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
        """Return how reduced gradients of the trained leaves are sharded over all axes but
        tensor.
        """
        ...

    def norm(self, config: StrategyConfig, leaves: Arrays, specs: list[PartitionSpec]) -> jax.Array:
        """Return the Euclidean norm of reduced gradients together, which lie as `specs` say."""
        ...

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: Arrays,
        loss: Weighted,
        state: PyTree,
        stored_order: Callable[[Arrays], Arrays],
    ) -> tuple[Arrays, PyTree]:
        """Return the gradients of the union batch and the new state, in the per-device view.

        Args:
          config: of the strategy.
          layout: of the parameters.
          grads: the gradients of this device.
          loss: total and weight of the loss of the union batch.
          state: its state.
          stored_order: brings gradients into the order of the stored leaves.
        """
        ...

    def init(self) -> PyTree:
        """Return its first state."""
        ...

    def specs(self) -> PyTree:
        """Return the specs of its state in the global view."""
        ...

    def join(self, opt_state: PyTree, state: PyTree) -> PyTree:
        """Return the optimizer state of a train state, with the state of the reduction in it."""
        ...

    def split(self, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the state of the optimizer, and the state of the reduction: the inverse of
        `join`.
        """
        ...


class Wire(Protocol):
    """Slot 4: how a leaf and its gradient travel between devices.

    The `form` of a `LeafWire` has the functions that run inside the step: they write the leaf for
    its all-gather, and its gradient for the reduce-scatter.
    """

    def __call__(
        self, wire: WireOptions, plan: LeafPlan, rounding: Rounding | None = None
    ) -> LeafWire:
        """Return how a leaf travels; `rounding` is the model's choice for a weight of its blocks."""
        ...


class OptimizerUpdate(Protocol):
    """Slot 3: one update of the optimizer, in the global view."""

    def __call__(
        self,
        config: StrategyConfig,
        layout: Layout,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        extra_args: ExtraArgs,
    ) -> tuple[PyTree, PyTree]:
        """Return the updates and the new optimizer state."""
        ...

    def describe(self, config: StrategyConfig, layout: Layout) -> Owners | None:
        """Return for the report who owns which matrices."""
        ...


def no_stages(config: StrategyConfig, params: PyTree) -> Counts:
    """Return (): there is no pipeline."""
    return ()


class StepSlots(NamedTuple):
    """What fills the slots of a step.

    Attributes:
      differentiate: view of the loss -> the loss and its gradient.
      reduce: makes the reduction of some trained leaves.
      update: one update of the optimizer.
      wire: how a leaf travels.
      remat: chooses the values that a block keeps for its backward pass.
      counts: returns for some parameters how many blocks each virtual stage of a pipeline runs.
    """

    differentiate: Mapping[str, Differentiate]
    reduce: Callable[[StrategyConfig, Sequence[LeafPlan]], Reduce]
    update: OptimizerUpdate
    wire: Wire
    remat: BlockRemat
    counts: Callable[[StrategyConfig, PyTree], Counts] = no_stages
