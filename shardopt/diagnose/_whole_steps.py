"""Whole steps of a strategy, each compared with the step of one device from the same state."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import PyTree, TrainState, leaves_with_paths
from shardopt.core._block_model import LossFn, as_block_model, takes_rng
from shardopt.diagnose._difference import (
    Difference,
    as_numbers,
    compare,
    compare_change,
    compare_copies,
    rounding_of,
)
from shardopt.diagnose._one_device import Evaluation, OneDevice
from shardopt.diagnose._pieces import values_on_host
from shardopt.diagnose._unsent import exact_gradients, unsent, with_memory
from shardopt.losses._batch_dims import map_rows, num_rows, row_counts
from shardopt.step._build import build
from shardopt.step._optimizer import Metrics, ShardedOptimizer
from shardopt.step._results import TakenStep
from shardopt.step._step import compile_step

GRADIENTS = " gradients"
"""The name of the gradients among the metrics; no metric of a loss begins with a space."""


def with_gradients(opt: ShardedOptimizer) -> ShardedOptimizer:
    """Return the strategy with a step that returns its gradients too, and a loss without a key.

    A reducer gets a memory, so that its exact gradient is known.
    """
    config = opt.config
    fields: dict[str, Any] = {"loss_fn": without_key(config.loss.loss_fn)}
    if config.wire.reducer is not None:
        fields["reducer"] = with_memory(config.wire.reducer)
    return build(
        config.replace(**fields), compile_step=functools.partial(compile_step, report=_report)
    )


def _report(taken: TakenStep) -> PyTree:
    return taken.metrics | {GRADIENTS: taken.gradients.grads}


def without_key(loss_fn: LossFn) -> LossFn:
    """Return a loss that gets no random key, so that dropout is off."""
    model = as_block_model(loss_fn)

    def bind(f):
        return functools.partial(f, rng=None) if takes_rng(f) else f

    if model is None:
        return bind(loss_fn)
    return model._replace(embed=bind(model.embed), block=bind(model.block), loss=bind(model.loss))


def batches_of(config: StrategyConfig, batch: PyTree, count: int) -> Iterator[PyTree]:
    """Yield a batch, and then batches of rows drawn from it.

    A step that reads something stale is right if nothing changes.
    """
    yield batch
    for number in range(1, count):
        if len(row_counts(config, batch)) != 1:
            yield batch
            continue
        size = num_rows(config, batch)
        rows = np.random.default_rng(number).integers(0, size, size)

        def drawn(leaf, dim, rows=rows):
            return np.take(values_on_host(leaf), rows, dim)

        yield map_rows(config, drawn, batch)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """A strategy and one device.

    Attributes:
      opt: the strategy, `with_gradients`.
      layout: of its parameters.
      tolerance: the relative difference that counts as rounding; None: that of each dtype.
    """

    opt: ShardedOptimizer
    layout: Layout
    tolerance: float | None

    @functools.cached_property
    def one_device(self) -> OneDevice:
        """The step of one device."""
        return OneDevice(self.opt.config, self.layout)

    def allowed(self, *dtypes: Any) -> float:
        """Return the relative difference that counts as rounding for values of some dtypes."""
        if self.tolerance is not None:
            return self.tolerance
        return max(map(rounding_of, dtypes))

    def first_state(self, params: PyTree) -> Iterator[Difference]:
        """Compare the state that `init` makes of some parameters."""
        state = self.opt.init(params)
        yield from compare_copies(state)
        actual_params = values_of(state.params)
        yield from self._state_changed("first parameters", params, params, actual_params)
        expected = self.one_device.first_state(params)
        actual = self.optimizer_state(state)
        yield from self._state_changed("first optimizer state", expected, expected, actual)

    def evaluation(self, state: TrainState, params: PyTree, batch: PyTree) -> Iterator[Difference]:
        """Compare an evaluation."""
        metrics = self.opt.evaluate(state, batch)
        expected = self.one_device.evaluate(params, values_of(batch))
        yield from self._values("evaluated ", metrics, expected)

    def start(self, state: TrainState, params: PyTree) -> TrainState:
        """Return a copy of a state, with a memory if the reducer has none."""
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)
        fresh = self.opt.init(params).opt_state
        if jax.tree.structure(fresh) == jax.tree.structure(state.opt_state):
            return state
        optimizer_state, _ = self.layout.reduce.split(state.opt_state)
        _, reducer_state = self.layout.reduce.split(fresh)
        return state._replace(opt_state=self.layout.reduce.join(optimizer_state, reducer_state))

    def step(self, state: TrainState, batch: PyTree, differences: list[Difference]) -> TrainState:
        """Take a step, add its differences, and return the next state."""
        before = values_of(state.params)
        optimizer_before = self.optimizer_state(state)
        step_before = int(state.step)
        unsent_before = self._unsent(state)
        state, metrics = self.opt.step(state, batch)
        metrics, batch = values_of((metrics, batch))
        gradients = jax.tree.leaves(metrics.pop(GRADIENTS))
        taken, expected = self.one_device.differentiate(before, batch)
        differences += self._metrics(metrics, taken, gradients)
        exact = gradients
        if unsent_before:
            exact = exact_gradients(self.layout, gradients, unsent_before, self._unsent(state))
        differences += self._gradients(exact, expected)
        # From the strategy's own loss and gradients: an optimizer such as Adam makes a whole step
        # of the rounding of a gradient near zero.
        new_params, new_state = self.one_device.update(
            before,
            optimizer_before,
            self.layout.merge([None] * len(self.layout.plans), gradients),
            taken._replace(loss=metrics["loss"]),
            batch,
        )
        differences += self._changed("update of", before, new_params, values_of(state.params))
        differences += self._state_changed(
            "optimizer state", optimizer_before, new_state, self.optimizer_state(state)
        )
        differences += compare_copies(state)
        differences.append(Difference("step", float(int(state.step) != step_before + 1), 0.0))
        return state

    def optimizer_state(self, state: TrainState) -> PyTree:
        """Return the state of the optimizer alone, on the host."""
        return values_of(self.layout.reduce.split(state.opt_state)[0])

    def _unsent(self, state: TrainState) -> list[np.ndarray]:
        if self.opt.config.wire.reducer is None:
            return []
        return unsent(self.layout, state.opt_state)

    def _metrics(
        self, metrics: Metrics, expected: Evaluation, gradients: list[PyTree]
    ) -> Iterator[Difference]:
        squares = [np.sum(np.square(np.abs(as_numbers(grad)))) for grad in gradients]
        norm = np.sqrt(np.sum(squares))
        yield from self._values("", metrics, expected)
        grad_norm = metrics["grad_norm"]
        yield compare("metric grad_norm", grad_norm, norm, self.allowed(grad_norm.dtype))

    def _values(self, prefix: str, metrics: Metrics, expected: Evaluation) -> Iterator[Difference]:
        gather_dtype = self.opt.config.wire.gather_dtype
        for name, value in {"loss": expected.loss, **expected.metrics}.items():
            is_loss = name == "loss"
            kind = prefix or ("" if is_loss else "metric ")
            # The loss of a policy gradient may be zero but for rounding.
            floor = rounding_of(value.dtype) if is_loss else 0.0
            tolerance = self.allowed(value.dtype, gather_dtype)
            yield compare(f"{kind}{name}", metrics[name], value, tolerance, floor)

    def _gradients(self, actual: list[PyTree], expected: list[PyTree]) -> Iterator[Difference]:
        wire = self.opt.config.wire
        largest = max(float(np.max(np.abs(grad), initial=0)) for grad in expected)
        for plan, value, gradient in zip(self.layout.trained, actual, expected, strict=True):
            tolerance = self.allowed(gradient.dtype, wire.gather_dtype, wire.scatter_dtype)
            # What cancels in a small gradient may be as large as other gradients.
            floor = largest * rounding_of(gradient.dtype)
            yield compare(f"gradient of {plan.path}", value, gradient, tolerance, floor)

    def _changed(
        self, name: str, before: PyTree, expected: PyTree, actual: PyTree
    ) -> Iterator[Difference]:
        leaves = [jax.tree.leaves(tree) for tree in (before, actual, expected)]
        for (path, _), old, new, wanted in zip(leaves_with_paths(actual), *leaves, strict=True):
            tolerance = self.allowed(wanted.dtype)
            yield compare_change(f"{name} {path}", old, new, wanted, tolerance)

    def _state_changed(
        self, name: str, before: PyTree, expected: PyTree, actual: PyTree
    ) -> Iterator[Difference]:
        """Compare the leaves of a state; leaves that do not differ have one name together."""
        for difference in self._changed(name, before, expected, actual):
            yield difference if difference.differs else difference._replace(name=name)


def values_of(tree: PyTree) -> PyTree:
    """Return a tree with all values on the host."""
    return jax.tree.map(values_on_host, tree)
