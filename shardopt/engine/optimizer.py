"""The contract that every strategy returns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh


class ShardedOptimizer(NamedTuple):
    """An optax optimizer made distributed: a bundle of pure functions over a mesh.

    Attributes:
      init: `init(params, rng=None)` or `init(init_fn, rng) -> TrainState`, created sharded.
      step: `step(state, batch) -> (state, metrics)`. Jitted; donates `state`. `step.lower(state, batch)`
        gives the `jax.stages.Lowered` program, also for abstract arguments.
      evaluate: `evaluate(state, batch) -> metrics`, the loss and aux metrics of a batch: no gradient, no rng,
        nothing donated.
      synchronize: `synchronize(state) -> state`, once all copies of the state are there and equal. In ring 1 they
        are equal after every step, so this waits for the devices.
      specs: `specs(abstract_params) -> TrainState` of `PartitionSpec`, without allocating anything.
      abstract_state: `abstract_state(abstract_params=None) -> TrainState` of `jax.ShapeDtypeStruct` that carry
        their `NamedSharding`: what a checkpoint is restored into. Without an argument it speaks of the
        parameters last seen by `init`, `specs` or `step`, and raises ValueError if there were none.
      wrapped: the optax transformation.
      mesh: the mesh it runs on.
      config: how the strategy was built, with `config.report()`.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    synchronize: Callable[..., Any]
    specs: Callable[..., Any]
    abstract_state: Callable[..., Any]
    wrapped: optax.GradientTransformation
    mesh: Mesh
    config: Any

    @property
    def world_size(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def rank(self) -> int:
        """The position in the mesh, from 0 to `world_size - 1`, of this process's first device."""
        here = jax.process_index()
        return next(i for i, device in enumerate(self.mesh.devices.flat) if device.process_index == here)


def check_optimizer(who: str, tx: Any) -> None:
    """Refuse what is not an optax gradient transformation.

    Raises:
      TypeError: if `tx` has no callable `init` and `update`.
    """
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"{who}: tx must be an optax.GradientTransformation, got {type(tx).__name__}.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        )
