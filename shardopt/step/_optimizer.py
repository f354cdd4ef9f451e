"""The contract of every strategy: pure functions over a mesh, and the config they were built from."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import optax
from jax.sharding import Mesh

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, TrainState, error_text, format_error, type_error
from shardopt.core._loss_parts import StepMetrics
from shardopt.step._global_rows import rows_of
from shardopt.step._norms import Norms

Metrics = dict[str, jax.Array]


class InitFn(Protocol):
    """`init(params, rng=None)` or `init(init_fn, rng)`."""

    def __call__(self, params: PyTree, rng: jax.Array | None = None) -> TrainState:
        """Return the first train state, created sharded."""
        ...


class StepFn(Protocol):
    """`step(state, batch)`; batch leaves are [global batch, ...]."""

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Return the next train state, and loss, gradient norm and metrics of the batch.

        Donates `state`.
        """
        ...

    @property
    def with_norms(self) -> Callable[[TrainState, PyTree], tuple[TrainState, Metrics, Norms]]:
        """The same step, which also returns the norms of each leaf and layer.

        A program of its own.
        """
        ...

    @property
    def place(self) -> Callable[[TrainState, PyTree], tuple[str, PyTree]]:
        """The checks of a state and a batch: the view of the loss, and the placed batch."""
        ...

    def with_kinds(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepMetrics]:
        """Take a step and return metrics with their kinds, `Sum`, `Max` or `Min`, so that they can
        be combined with others.
        """
        ...

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        ...


class EvaluateFn(Protocol):
    """`evaluate(state, batch, params=None)`; batch leaves are [global batch, ...]."""

    def __call__(self, state: TrainState, batch: PyTree, params: str | None = None) -> Metrics:
        """Return the loss and metrics of a batch: no gradient, no random key, nothing donated."""
        ...

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        ...


class SynchronizeFn(Protocol):
    """`synchronize(state)`."""

    def __call__(self, state: TrainState) -> TrainState:
        """Return the state once all its copies are complete and equal."""
        ...


class SpecsFn(Protocol):
    """`specs(abstract_params)`."""

    def __call__(self, abstract_params: PyTree) -> TrainState:
        """Return where every leaf of the train state lives, as `PartitionSpec`.

        Allocates nothing.
        """
        ...


class AbstractStateFn(Protocol):
    """`abstract_state(abstract_params=None)`."""

    def __call__(self, abstract_params: PyTree = None) -> TrainState:
        """Return the train state as `jax.ShapeDtypeStruct` with shardings."""
        ...


class ShardedOptimizer(NamedTuple):
    """An optax optimizer made distributed: a bundle of pure functions over a mesh.

    It belongs to its process, and cannot be pickled. Send a function that makes it.

    Attributes:
      init: `init(params, rng=None)` or `init(init_fn, rng) -> TrainState`, created sharded.
      step: `step(state, batch) -> (state, metrics)`. Jitted; donates `state`. `step.lower(state,
        batch)` returns the `jax.stages.Lowered` program, also for abstract arguments. An array that
        is two leaves of `state`, or a leaf of both `state` and `batch`, is copied first, because
        its memory can be donated only once. Numbers, numpy arrays and torch tensors that you put
        into `state` are placed, and so is a state that was pickled. `step.with_norms(state, batch) -> (state, metrics,
        norms)` also returns `so.training.Norms`.
      evaluate: `evaluate(state, batch, params=None) -> metrics`, the loss and aux metrics of a
        batch: no gradient, no rng, nothing donated. `params="average"` evaluates the average of
        `so.replace`.
      synchronize: `synchronize(state) -> state`, once all copies of the state are complete and
        equal. In a synchronous strategy they are equal after every step, so this waits for the
        devices.
      specs: `specs(abstract_params) -> TrainState` of `PartitionSpec`, without allocating anything.
      abstract_state: `abstract_state(abstract_params=None) -> TrainState` of `jax.ShapeDtypeStruct`
        with their `NamedSharding`: the target for restoring a checkpoint. Without an argument it
        describes the parameters of the last call of `init`, `specs` or `step`, and raises
        ValueError if there was none.
      wrapped: the optax transformation.
      mesh: the user's mesh, on which state and metrics live.
      config: the arguments of the strategy, with `config.report()`.
    """

    init: InitFn
    step: StepFn
    evaluate: EvaluateFn
    synchronize: SynchronizeFn
    specs: SpecsFn
    abstract_state: AbstractStateFn
    wrapped: optax.GradientTransformation
    mesh: Mesh
    config: StrategyConfig

    def update(self, *_: PyTree, **__: PyTree) -> NoReturn:
        """Refuse to be used as an optax transformation: in `optax.chain`, `optax.MultiSteps` or
        flax's `TrainState`.

        Raises:
          TypeError: always.
        """
        strategy = self.config.strategy
        problem = (
            f"so.{strategy} returns no optax transformation: its step takes a batch, not gradients."
        )
        fix = (
            f"put what is of optax inside, so.{strategy}(optax.chain(clip, tx), ...), and train"
            " with state, metrics = opt.step(state, batch), which computes gradients itself;"
            " flax's TrainState, made with tx=opt.wrapped, becomes one of these by"
            " so.replace(opt.init(state.params), opt_state=state.opt_state, step=int(state.step))."
        )
        raise TypeError(format_error(strategy, problem, fix=fix))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        _refuse_pickle()

    def __copy__(self) -> "ShardedOptimizer":
        """Return the strategy itself: it never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedOptimizer":
        """Return the strategy itself: it never changes."""
        return self

    @property
    def world_size(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def row_shard(self) -> tuple[int, int]:
        """Which part of the rows this process loads: the number of the part, and how many there are.

        They are `jax.process_index()` and `jax.process_count()`, unless `tensor`, `pipeline` or
        `context` spans processes. Processes that share rows of the mesh have the same part.

        Raises:
          ValueError: if the devices of processes hold parts that overlap, or this one has none.
        """
        return rows_of(self.config, self.config.strategy).row_shard

    @property
    def rank(self) -> int:
        """The position in the mesh, from 0 to `world_size - 1`, of this process's first device."""
        process = jax.process_index()
        return next(
            i for i, device in enumerate(self.mesh.devices.flat) if device.process_index == process
        )


class NotPickled:
    """A part of a strategy, which belongs to this process."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        _refuse_pickle()


def _refuse_pickle() -> NoReturn:
    problem = (
        "a strategy, or a function of it such as opt.step, cannot be pickled: it has programs and"
        " devices of this process."
    )
    fix = "send a function that makes the strategy, and call it in the other process."
    raise TypeError(error_text(problem, fix=fix))


def check_is_strategy(opt: object) -> None:
    """Refuse, by a TypeError, a value that is not a `ShardedOptimizer`, such as the loss or the
    optax transformation.
    """
    if not isinstance(opt, ShardedOptimizer):
        problem = f"opt must be a so.ShardedOptimizer, got {type(opt).__name__}."
        raise type_error(problem, fix="pass what so.ddp, so.zero, so.fsdp or so.hybrid returns.")
