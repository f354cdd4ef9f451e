"""The two questions that keep a broken state out of a run: is the loss a number, are the parameters?"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from shardopt.core.errors import CheckpointError, NonFiniteLossError, complaint


def check_loss(loss: float, *, step: int, position: int, checkpoints: Any = None) -> None:
    """Refuse a loss that is NaN or infinite.

    Args:
      loss: the loss of step `step`.
      step: counted from 0.
      position: how many batches were drawn before that step's.
      checkpoints: where the last good state lies, to say so.

    Raises:
      NonFiniteLossError: if the loss is not finite.
    """
    if not math.isfinite(loss):
        _fail(f"the loss became {loss}", step, position, checkpoints)


def check_state(state: Any, metrics: Mapping[str, float], *, step: int, position: int, checkpoints: Any = None) -> None:
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
    any_nan, any_infinite = jax.device_get(_damage((state.params, state.opt_state), state.params))
    if any_nan or (any_infinite and grad_norm is not None and not math.isfinite(grad_norm)):
        kind = "NaN" if any_nan else "infinite"
        norm = "" if grad_norm is None else f" (its gradient norm was {grad_norm})"
        _fail(f"the update made parameters or optimizer state {kind}{norm}", step, position, checkpoints)


@jax.jit
def _damage(everything: Any, params: Any) -> tuple[jax.Array, jax.Array]:
    def any_of(test, tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return jnp.stack([test(leaf).any() for leaf in leaves]).any() if leaves else jnp.zeros((), bool)

    return any_of(jnp.isnan, everything), any_of(jnp.isinf, params)


def _fail(what: str, step: int, position: int, checkpoints: Any) -> NoReturn:
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
    raise NonFiniteLossError(complaint("fit", where, saved, fix), step=step, position=position)
