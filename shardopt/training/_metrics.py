"""Metrics from the device, read one step late so that the host never delays the device."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.core import (
    CheckpointError,
    NonFiniteLossError,
    PyTree,
    TrainState,
    error_text,
    is_array_like,
    is_inexact,
    value_error,
)

HostMetrics = dict[str, float]
"""Metrics as numbers, on the host."""


class Meter:
    """Takes the metrics of each step as device arrays, and returns them as numbers once they have
    arrived.

    `push` takes the metrics of a step that was just dispatched, and reads the previous step: it
    checks the loss. If the step is to be reported, it fetches all metrics in one transfer. `settle`
    does the same for the newest step, so it waits for the device. Call it when the host has to wait
    anyway, such as before a checkpoint.

    Metrics include `steps_per_second` and `examples_per_second` since the last fetched metrics. The
    clock starts when the first step is done, so compilation does not count.

    Args:
      checkpoints: named in the error for a loss that is not finite.
      report_skipped: called with a step that the optimizer skipped, the position of its batch and
        its metrics.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        report_skipped: Callable[[int, int, HostMetrics], None],
    ):
        self._checkpoints = checkpoints
        self._report_skipped = report_skipped
        self._pending: _Pending | None = None
        self._newest_metrics: HostMetrics = {}
        self._measured_from: float | None = None
        self._steps = self._examples = 0

    def push(
        self,
        step: int,
        position: int,
        metrics: Mapping[str, jax.Array],
        *,
        examples: int,
        reported: bool,
        tolerated: jax.Array | None = None,
    ) -> tuple[int, HostMetrics] | None:
        """Take a step whose scalar metrics are still being computed.

        Return the metrics of the previous step, or None.

        None if the previous step is not to be reported, or was already read by `settle`.

        Args:
          step: the count of steps, this one included.
          position: how many batches were drawn before this step's batch.
          metrics: scalars on the device.
          examples: rows of the batch.
          reported: whether all metrics of this step are to be returned.
          tolerated: a boolean on the device; if true, the optimizer skipped the step, and a loss
            that is not finite does not end the run.

        Raises:
          NonFiniteLossError: if the loss of the previous step is not finite and not tolerated.
        """
        if self._pending is None and not self._newest_metrics:
            _check_metrics(metrics)
        # One step late: the devices run the newest step while the metrics of the one before are
        # read.
        previous = self._pending
        self._pending = _Pending(step, position, metrics, examples, reported, tolerated)
        if previous is None:
            return None
        fetched = self._fetch(previous, all_metrics=previous.reported)
        return (previous.step, fetched) if previous.reported else None

    def settle(self) -> HostMetrics:
        """Wait for the newest step and return its metrics; return {} if there was no step."""
        if self._pending is not None:
            self._newest_metrics = self._fetch(self._pending, all_metrics=True)
            self._pending = None
        return self._newest_metrics

    def resume(self, metrics: Mapping[str, float]) -> None:
        """Let `settle` return the metrics of a restored step."""
        self._newest_metrics = dict(metrics)

    def restart(self) -> None:
        """Start a new measurement of speed: the time since the last one was not spent on training."""
        if self._measured_from is not None:
            self._measured_from = time.perf_counter()
            self._steps = 0
            self._examples = 0

    def _fetch(self, pending: "_Pending", *, all_metrics: bool) -> HostMetrics:
        tolerated = pending.tolerated is not None and bool(jax.device_get(pending.tolerated))
        loss = pending.metrics["loss"]
        if all_metrics or tolerated or _has_transfer_guard():
            requested = {"loss": loss, **pending.metrics}  # the loss first
            fetched = jax.device_get(requested)
            # jax sorts dicts
            values = {name: fetched[name].item() for name in requested}
        else:  # one copy of one array is a fifth of the work
            copy = loss.addressable_data(0) if isinstance(loss, jax.Array) else loss
            values = {"loss": copy.item()}
        if tolerated:
            self._report_skipped(pending.step, pending.position, values)
        elif not math.isfinite(values["loss"]):
            cause = f"the loss became {values['loss']}"
            _fail(cause, pending.step - 1, pending.position, self._checkpoints)
        return values | self._speed(pending.examples, finished=all_metrics)

    def _speed(self, examples: int, *, finished: bool) -> HostMetrics:
        now = time.perf_counter()
        if self._measured_from is None:
            self._measured_from = now
            return {}
        self._steps = self._steps + 1
        self._examples = self._examples + examples
        if not finished:
            return {}
        seconds = max(now - self._measured_from, 1e-9)
        speed = {
            "steps_per_second": self._steps / seconds,
            "examples_per_second": self._examples / seconds,
        }
        self._measured_from = now
        self._steps = 0
        self._examples = 0
        return speed


def _has_transfer_guard() -> bool:
    """Return whether only `jax.device_get` may read an array."""
    jax_options: Any = jax.config  # type checkers do not know its attributes
    return jax_options.jax_transfer_guard_device_to_host not in (None, "allow")


class _Pending(NamedTuple):
    step: int
    position: int
    metrics: Mapping[str, jax.Array]
    examples: int
    reported: bool
    tolerated: jax.Array | None


def _check_metrics(metrics: Mapping[str, jax.Array]) -> None:
    not_scalars = [
        f"metrics[{name!r}]:"
        f" {f'shape {value.shape}' if is_array_like(value) else type(value).__name__}"
        for name, value in metrics.items()
        if not is_array_like(value) or value.shape != ()
    ]
    if not_scalars:
        fix = "reduce it to one number in the aux dict of loss_fn."
        raise value_error("metrics must be scalars.", not_scalars, fix)


def check_state(
    state: TrainState,
    metrics: Mapping[str, float],
    *,
    step: int,
    position: int,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Refuse a state with NaN or infinities from the last update, whose loss was finite before that
    update.

    Two cases are refused:

    - NaN anywhere in the parameters or the optimizer state;
    - infinite parameters together with a gradient norm that is not finite.

    Infinite parameters alone may be intended (a mask of -inf). So may a gradient that is not
    finite: `optax.apply_if_finite` skips it.

    Args:
      state: the state after the step.
      metrics: the metrics of the step, with "grad_norm" if it is reported.
      step: the step that made the state, counted from 0.
      position: how many batches were drawn before that step's batch.
      checkpoints: named in the error, with the last saved step.

    Raises:
      NonFiniteLossError: in these two cases.
    """
    grad_norm = metrics.get("grad_norm")
    any_nan, any_infinite = jax.device_get(
        _any_nan_or_infinite((state.params, state.opt_state), state.params)
    )
    if any_nan or (any_infinite and grad_norm is not None and not math.isfinite(grad_norm)):
        kind = "NaN" if any_nan else "infinite"
        norm = "" if grad_norm is None else f" (its gradient norm was {grad_norm})"
        _fail(
            f"the update made parameters or optimizer state {kind}{norm}",
            step,
            position,
            checkpoints,
        )


def is_finite_on_host(state: TrainState, metrics: Mapping[str, float]) -> bool:
    """Return whether `check_state` passes, as far as the shards of this process show.

    It runs no program, so that a thread may call it while the devices compute.
    """
    may_be_infinite = math.isfinite(metrics.get("grad_norm", 0.0))
    if not may_be_infinite and any(np.isinf(shard).any() for shard in _host_shards(state.params)):
        return False
    trained = state.params, state.opt_state
    return not any(np.isnan(shard).any() for shard in _host_shards(trained))


def _host_shards(tree: PyTree) -> Iterator[np.ndarray]:
    """Yield the different shards of floats that this process holds."""
    for leaf in jax.tree.leaves(tree):
        if is_inexact(leaf):
            shards = {str(shard.index): shard for shard in leaf.addressable_shards}
            yield from (np.asarray(shard.data) for shard in shards.values())


@jax.jit
def _any_nan_or_infinite(
    params_and_opt_state: PyTree, params: PyTree
) -> tuple[jax.Array, jax.Array]:
    def any_of(test, tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
        return (
            jnp.stack([test(leaf).any() for leaf in leaves]).any()
            if leaves
            else jnp.zeros((), bool)
        )

    return any_of(jnp.isnan, params_and_opt_state), any_of(jnp.isinf, params)


def _fail(cause: str, step: int, position: int, checkpoints: Checkpoints | None) -> NoReturn:
    checkpoint_lines = ["checkpoints: none were asked for"]
    if checkpoints is not None:
        checkpoint_lines = []
        try:
            checkpoints.wait()  # a checkpoint may still be in progress
        except CheckpointError as error:
            checkpoint_lines = [f"a checkpoint could not be written: {error}"]
        latest = checkpoints.latest()
        checkpoint_lines += [
            f"last checkpoint: {'none yet' if latest is None else f'step {latest}'}, in"
            f" {checkpoints.directory}"
        ]
    fix = (
        "lower the learning rate, clip the gradients (optax.clip_by_global_norm), or look at the"
        f" batch: next(itertools.islice(iter(batches), {position}, None)), with batches from their"
        " beginning."
    )
    problem = f"{cause} at step {step} (batch {position}, both counted from 0)."
    raise NonFiniteLossError(
        error_text(problem, checkpoint_lines, fix), step=step, position=position
    )
