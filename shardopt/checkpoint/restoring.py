"""`restore`: check everything, then read each shard where it is wanted."""

import os
from pathlib import Path
from typing import Any

from shardopt.checkpoint import manifest, store
from shardopt.checkpoint.agree import from_first
from shardopt.checkpoint.match import check_match
from shardopt.checkpoint.meta import Meta, read_meta
from shardopt.checkpoint.rows import as_stored, carry_over
from shardopt.checkpoint.steps import committed, interrupted, run_folder, step_folder
from shardopt.checkpoint.target import target_state
from shardopt.core.errors import CheckpointError, complaint
from shardopt.core.optimizer import ShardedOptimizer
from shardopt.core.types import TrainState


def restore(
    directory: str | os.PathLike[str],
    opt: ShardedOptimizer,
    *,
    step: int | None = None,
    abstract_params: Any = None,
) -> TrainState:
    """Read a checkpoint into the placement of an optimizer: of any strategy, on any mesh.

    Before anything is loaded every file is compared with its SHA-256 in the manifest, and every leaf's key path,
    shape and dtype with what `opt` wants. A checkpoint is restored whole or not at all, and another one than the
    newest only when asked for.

    **Equivalence**: the restored arrays equal the saved ones bit for bit; on the same mesh and strategy training
    goes on bit for bit as if it had never stopped, elsewhere up to the order of summation.

    State of `local_sgd` and `diloco` may go to another number of replicas, and the error memory of a reducer to another
    number of devices: each new row is the mean of the old ones (of integers the maximum).

    **Memory**: each process reads only the shards of its own devices.

    With several processes all must call it.

    Args:
      directory: the folder of the run, as given to `save` or `Checkpoints`.
      opt: the optimizer to go on with; it need not have seen parameters.
      step: which checkpoint; by default the newest.
      abstract_params: pytree of `jax.ShapeDtypeStruct`: the parameters, where `opt` has not seen them. They are
        rebuilt from the checkpoint if their containers are dicts, lists, tuples and None only.

    Returns:
      The state, with the shardings of `opt.abstract_state(abstract_params)`.

    Raises:
      CheckpointError: if there is no such checkpoint; if a file is damaged or missing, by name; if a leaf is
        missing, left over, or of another shape or dtype, by key path. It is a ValueError.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, shardopt as so
      >>> from jax.sharding import PartitionSpec as P
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), loss_fn)
      >>> folder = tempfile.mkdtemp()
      >>> _ = so.save(folder, opt.init({"w": jnp.ones((64, 32))}))
      >>> other = so.ddp(optax.adam(0.1), so.make_mesh(data=4, tensor=2), loss_fn, rules=[("w", P(None, "tensor"))])
      >>> so.restore(folder, other).params["w"].addressable_shards[0].data.shape
      (64, 16)
    """
    return load("restore", directory, opt, step=step, abstract_params=abstract_params)[0]


def load(
    who: str,
    directory: str | os.PathLike[str],
    opt: ShardedOptimizer,
    *,
    step: int | None = None,
    abstract_params: Any = None,
) -> tuple[Any, Meta]:
    """Return what `restore` returns, and the checkpoint's record."""
    path = run_folder(who, directory)
    chosen = from_first(lambda: _choose(who, path, step))
    _check_whole(who, path, chosen)
    folder = step_folder(path, chosen)
    meta = read_meta(who, folder)
    target = target_state(who, opt, meta, abstract_params)
    what = f"step {chosen} in {path}"
    readable, changes = as_stored(who, what, meta.leaves, target)
    check_match(who, what, meta.leaves, readable)
    return carry_over(store.read(folder, readable), changes), meta


def _choose(who: str, directory: Path, step: int | None) -> int:
    steps = committed(directory)
    if step is None and steps:
        return steps[-1]
    if step is not None and step in steps:
        return int(step)
    if (directory / manifest.NAME).exists():
        what = f"{directory} is the folder of one step, not of a run."
        fix = f"pass {str(directory.parent)!r} and step={directory.name}."
    elif step is None or not steps:
        what = f"there is no checkpoint in {directory}" + ("." if directory.is_dir() else ", which does not exist.")
        fix = "pass the folder that was given to save or Checkpoints."
    else:
        what = f"there is no step {step} in {directory}"
        what += ": its save was interrupted." if interrupted(directory, step) else "."
        fix = f"choose one of the steps {', '.join(map(str, steps[-8:]))}, or leave step out for the newest."
    raise CheckpointError(complaint(who, what, fix=fix))


def _check_whole(who: str, directory: Path, step: int) -> None:
    damaged = manifest.damage(step_folder(directory, step))
    if not damaged:
        return
    # Going back silently would lose work, or hide a dying disk; so the older step is found, and named.
    older = [earlier for earlier in from_first(lambda: committed(directory)) if earlier < step]
    whole = next((earlier for earlier in reversed(older) if not manifest.damage(step_folder(directory, earlier))), None)
    what = f"step {step} in {directory} is damaged."
    fix = "bring the files back from a copy; no earlier step is whole."
    if whole is not None:
        back = f"pass step={whole}, or delete {step_folder(directory, step)}"
        fix = f"bring the files back from a copy, or go back to step {whole}, which is whole ({back})."
    raise CheckpointError(complaint(who, what, damaged, fix=fix))
