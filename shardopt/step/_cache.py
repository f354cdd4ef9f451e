"""Compiled programs by parameter structure, and a limit on the calls that run at the same time."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import jax
from jax.core import Tracer

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, make_layout
from shardopt.core import PyTree, TrainState, abstract, format_error
from shardopt.step._optimizer import Metrics

_Compiled = TypeVar("_Compiled")
_Result = TypeVar("_Result", Metrics, tuple[TrainState, Metrics])


class LayoutCache(Generic[_Compiled]):
    """A cache of compiled objects by parameter structure.

    It remembers the last one that was read.
    """

    def __init__(
        self, config: StrategyConfig, compile_for: Callable[[StrategyConfig, Layout], _Compiled]
    ):
        self._config = config
        self._compile = compile_for
        self._compiled: dict[Hashable, _Compiled] = {}
        self._last: _Compiled | None = None

    def of(self, params: PyTree) -> _Compiled:
        """Return the compiled object for these parameters, arrays or shapes."""
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._compiled:
            self._compiled[key] = self._compile(
                self._config, make_layout(self._config, abstract(params))
            )
        self._last = self._compiled[key]
        return self._last

    def use(self, compiled: _Compiled) -> None:
        """Remember a compiled object of this cache as the one that was read last."""
        self._last = compiled

    def last_or_none(self) -> _Compiled | None:
        """Return the compiled object that was read last, None if there is none."""
        return self._last

    def last(self) -> _Compiled:
        """Return the compiled object that was read last.

        Raises:
          ValueError: if there is none.
        """
        if self._last is None:
            problem = "no parameters have been seen yet, so nothing can be said of their placement."
            fix = (
                "call opt.init or opt.specs first, or pass the abstract parameters (jax.eval_shape"
                " gives them)."
            )
            raise ValueError(format_error(self._config.strategy, problem, fix=fix))
        return self._last


def limit_in_flight(config: StrategyConfig) -> Callable[[_Result], _Result]:
    """Return a function that lets at most two calls run at a time on CPU, and does nothing on other
    platforms.

    Fake devices share one thread pool. Hundreds of queued programs with collectives can leave no
    thread for the device that the others wait for, and XLA ends the process after 40 seconds.
    """
    previous: list[jax.Array | None] = [None]

    def wait(result: _Result) -> _Result:
        metrics = result[1] if isinstance(result, tuple) else result
        loss = metrics["loss"]
        if not isinstance(loss, Tracer):
            # Waits for the call before this one. So the host prepares one step while one runs.
            if previous[0] is not None:
                previous[0].block_until_ready()
            previous[0] = loss
        return result

    return wait if config.mesh.devices.flat[0].platform == "cpu" else lambda result: result
