"""`save`: one checkpoint, now."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardopt.checkpoint import store
from shardopt.checkpoint.agree import from_first
from shardopt.checkpoint.steps import committed, run_folder, step_folder, tidy, try_out
from shardopt.checkpoint.write import failed, start
from shardopt.core import lock
from shardopt.core.errors import CheckpointError, complaint
from shardopt.core.lock import Lock


def save(directory: str | os.PathLike[str], state: Any, *, step: int | None = None) -> Path:
    """Write a checkpoint of a training state, and return once it is whole on the disk.

    The checkpoint is `directory/<step>/`: the arrays under `state/` in orbax's format, each leaf under its key path
    with its logical shape, so that it can be restored onto any mesh and strategy, or read by orbax alone;
    `shardopt.json`, which describes them; and `MANIFEST.json` with size and SHA-256 of every file. It appears by
    one rename when all of this is written: a job killed at any moment leaves no half checkpoint.

    With several processes all must call it, on a folder that all of them see.

    Args:
      directory: the folder of the run; made if it does not exist.
      state: pytree of arrays, usually a `TrainState`.
      step: the number of the checkpoint; by default `state.step`.

    Returns:
      The folder of the checkpoint.

    Raises:
      TypeError: if a leaf is not an array, or `step` is not an integer.
      ValueError: if `step` is negative, or `state` was donated to a later step.
      CheckpointError: if the folder already holds this step, another job writes there, or writing fails. It is a
        ValueError.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, shardopt as so
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> so.save(tempfile.mkdtemp(), state, step=7).name
      '7'
    """
    who = "save"
    path = run_folder(who, directory)
    number = check_step(who, step, state)
    held: list[Lock] = []
    try:
        from_first(lambda: _open(who, path, number, held))
        with contextlib.closing(store.Writer()) as writer:
            start(who, writer, path, state, lambda: lock.holds(held[0]), step=number)()
    finally:
        for one in held:
            lock.release(one)
    return step_folder(path, number)


def check_step(who: str, step: Any, state: Any) -> int:
    """Return the step's number, from the state if it is None.

    Raises:
      TypeError: if it is not an integer, or None and the state has no `step`.
      ValueError: if it is negative.
    """
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            what = f"step must be given, because the state ({type(state).__name__}) has none."
            raise TypeError(complaint(who, what, fix="pass step=."))
        step = int(np.asarray(jax.device_get(step)))
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(complaint(who, f"step must be an integer, got {step!r} ({type(step).__name__})."))
    if step < 0:
        raise ValueError(complaint(who, f"step must not be negative, got {step}.", fix="count steps from 0."))
    return int(step)


def _open(who: str, directory: Path, step: int, held: list[Lock]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held.append(lock.acquire(who, directory))
        tidy(directory)
        try_out(directory, step)
    except OSError as error:
        raise failed(who, directory, step, error) from error
    if step in committed(directory):
        what = f"{directory} already holds step {step}, and nothing is overwritten."
        raise CheckpointError(complaint(who, what, fix="pass another step= or directory, or delete that folder first."))
