"""The results of the phases of a step."""

from typing import NamedTuple

from shardopt.core import PyTree, TrainState
from shardopt.core._loss_parts import Gradients, StepMetrics


class Change(NamedTuple):
    """The change of an update: trees of the trainable leaves, sharded like the optimizer state.

    Attributes:
      gradients: the gradients that the optax transformation receives.
      updates: the updates that it returns.
      params: the parameters before the update.
    """

    gradients: PyTree
    updates: PyTree
    params: PyTree


class AppliedUpdate(NamedTuple):
    """The result of an optax update.

    Attributes:
      params: the new parameters, before their gather.
      opt_state: the new optimizer state, where it is stored.
      change: the change of the update.
    """

    params: PyTree
    opt_state: PyTree
    change: Change


class TakenStep(NamedTuple):
    """The results that a step computes, before it is compiled.

    Attributes:
      state: the next train state.
      metrics: loss, norm of the gradient, and the metrics that the loss returns.
      gradients: the reduced gradients.
      update: the result of the optax update.
    """

    state: TrainState
    metrics: StepMetrics
    gradients: Gradients
    update: AppliedUpdate
