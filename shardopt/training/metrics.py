"""Metrics on their way from the device, looked at one step late so that the host never delays the device."""

import math
import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from shardopt.checkpoint import Checkpoints
from shardopt.core.errors import CheckpointError, NonFiniteLossError, format_error
from shardopt.core.types import PyTree, TrainState, is_array_like


class Meter:
    """Takes the metrics of each step as device arrays, and returns them as numbers once they have arrived.

    `push` hands in a step just dispatched and settles the one before: its loss is checked, and if it was wanted
    all its metrics are fetched, in one transfer. `settle` does the same for the newest step, and so waits for the
    device: it is for moments that wait anyway, such as a checkpoint.

    Metrics come with `steps_per_second` and `examples_per_second` since the last ones fetched. The clock starts
    when the first step is done, so compilation does not count.
    """

    def __init__(self, checkpoints: Checkpoints | None = None):
        self._checkpoints = checkpoints
        self._pending: _Pending | None = None
        self._settled: dict[str, float] = {}
        self._since: float | None = None
        self._steps = self._examples = 0

    def push(
        self,
        step: int,
        position: int,
        metrics: Mapping[str, jax.Array],
        *,
        examples: int,
        wanted: bool,
        tolerated: jax.Array | None = None,
    ) -> tuple[int, dict[str, float]] | None:
        """Hand in a step (`step` counts it), drawn after `position` batches, its scalar metrics still being computed.

        Settles the step before: returns (step, metrics) of it if it was wanted and has not been settled yet. A loss that is
        not finite ends the run, but where `tolerated` is true.
        """
        if self._pending is None and not self._settled:
            _check_metrics(metrics)
        late, self._pending = self._pending, _Pending(step, position, metrics, examples, wanted, tolerated)
        if late is None:
            return None
        fetched = self._fetch(late, everything=late.wanted)
        return (late.step, fetched) if late.wanted else None

    def settle(self) -> dict[str, float]:
        """Return the metrics of the newest step, waiting for it; empty if there was no step."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._settled = self._fetch(pending, everything=True)
        return self._settled

    def restart(self) -> None:
        """Begin a new measurement of speed: time since the last one was not spent on training."""
        if self._since is not None:
            self._since, self._steps, self._examples = time.perf_counter(), 0, 0

    def _fetch(self, pending: "_Pending", *, everything: bool) -> dict[str, float]:
        chosen = {"loss": pending.metrics["loss"]} | (dict(pending.metrics) if everything else {})
        fetched = jax.device_get(chosen)
        values = {name: fetched[name].item() for name in chosen}  # jax sorts dicts; the loss shall come first
        if not math.isfinite(loss := values["loss"]) and not _is_true(pending.tolerated):
            _fail(f"the loss became {loss}", pending.step - 1, pending.position, self._checkpoints)
        return values | self._speed(pending.examples, finished=everything)

    def _speed(self, examples: int, *, finished: bool) -> dict[str, float]:
        now = time.perf_counter()
        if self._since is None:
            self._since = now
            return {}
        self._steps, self._examples = self._steps + 1, self._examples + examples
        if not finished:
            return {}
        seconds, steps, seen = max(now - self._since, 1e-9), self._steps, self._examples
        self._since, self._steps, self._examples = now, 0, 0
        return {"steps_per_second": steps / seconds, "examples_per_second": seen / seconds}


class _Pending(NamedTuple):
    step: int
    position: int
    metrics: Mapping[str, jax.Array]
    examples: int
    wanted: bool
    tolerated: jax.Array | None


def _is_true(value: jax.Array | None) -> bool:
    return value is not None and bool(jax.device_get(value))


def _check_metrics(metrics: Mapping[str, jax.Array]) -> None:
    strange = [
        f"metrics[{name!r}]: {f'shape {value.shape}' if is_array_like(value) else type(value).__name__}"
        for name, value in metrics.items()
        if not is_array_like(value) or value.shape != ()
    ]
    if strange:
        fix = "reduce it to one number in the aux dict of loss_fn."
        raise ValueError(format_error("fit", "metrics must be scalars.", strange, fix))


def check_state(
    state: TrainState, metrics: Mapping[str, float], *, step: int, position: int, checkpoints: Checkpoints | None = None
) -> None:
    """Refuse a state that the last step spoiled although its loss, taken before the update, was finite.

    Spoiled means NaN anywhere in the parameters or the optimizer state, or infinite parameters together with a
    gradient norm that is not finite: infinities alone may be meant (a mask of -inf), and so may a gradient that is
    not finite (`optax.apply_if_finite` skips it).

    Args:
      state: the state after the step.
      metrics: those of the step, with "grad_norm" where it is reported.
      step: the step that made the state, counted from 0.
      position: how many batches were drawn before that step's.
      checkpoints: where the last good state lies, to say so.

    Raises:
      NonFiniteLossError: if the state is spoiled.
    """
    grad_norm = metrics.get("grad_norm")
    any_nan, any_infinite = jax.device_get(_any_nan_or_infinite((state.params, state.opt_state), state.params))
    if any_nan or (any_infinite and grad_norm is not None and not math.isfinite(grad_norm)):
        kind = "NaN" if any_nan else "infinite"
        norm = "" if grad_norm is None else f" (its gradient norm was {grad_norm})"
        _fail(f"the update made parameters or optimizer state {kind}{norm}", step, position, checkpoints)


@jax.jit
def _any_nan_or_infinite(everything: PyTree, params: PyTree) -> tuple[jax.Array, jax.Array]:
    def any_of(test, tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return jnp.stack([test(leaf).any() for leaf in leaves]).any() if leaves else jnp.zeros((), bool)

    return any_of(jnp.isnan, everything), any_of(jnp.isinf, params)


def _fail(what: str, step: int, position: int, checkpoints: Checkpoints | None) -> NoReturn:
    saved = ["checkpoints: none were asked for"]
    if checkpoints is not None:
        saved = []
        try:
            checkpoints.wait()  # one may still be on its way to disk
        except CheckpointError as error:
            saved = [f"a checkpoint could not be written: {error}"]
        latest = checkpoints.latest()
        saved += [f"last checkpoint: {'none yet' if latest is None else f'step {latest}'}, in {checkpoints.directory}"]
    fix = (
        "lower the learning rate, clip the gradients (optax.clip_by_global_norm), or look at the batch: "
        f"next(itertools.islice(iter(batches), {position}, None)), with batches from their beginning."
    )
    where = f"{what} at step {step} (batch {position}, both counted from 0)."
    raise NonFiniteLossError(format_error("fit", where, saved, fix), step=step, position=position)
