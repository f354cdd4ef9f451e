"""`restore`: check everything, then read each shard where it is wanted."""

import os
from pathlib import Path
from typing import Any

import jax

from shardopt.checkpoint import store
from shardopt.checkpoint.multihost import on_primary_process
from shardopt.checkpoint.record import MANIFEST_NAME, Meta, read_meta, verify
from shardopt.checkpoint.replicas import as_stored, carry_over
from shardopt.checkpoint.run_folder import committed, interrupted, run_folder, step_folder
from shardopt.checkpoint.store import Leaf, describe, dtype_of
from shardopt.checkpoint.tree import LeafPath, leaves_by_path, rebuild, show
from shardopt.core.errors import MAX_LISTED, CheckpointError, format_error, plural
from shardopt.core.types import TrainState
from shardopt.engine.optimizer import ShardedOptimizer

# What to restore into: the optimizer's own abstract state, or one made from the stored structure.


def target_state(who: str, opt: ShardedOptimizer, meta: Meta, abstract_params: Any = None) -> Any:
    """Return `opt.abstract_state`, of the given parameters, of those that opt has seen, or of the stored ones.

    Raises:
      CheckpointError: if opt has seen no parameters and the stored structure cannot be rebuilt.
    """
    if abstract_params is not None:
        return opt.abstract_state(abstract_params)
    try:
        return opt.abstract_state()
    except ValueError:  # the contract's word for "no parameters seen"
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf))
            for path, leaf in meta.leaves.items()
            if path[0] == "params"
        ]
        return opt.abstract_state(rebuild(who, meta.params, leaves))


# Does what is stored fit what is wanted? Every leaf that is missing, left over or different, in one error.


def check_match(who: str, what: str, stored: dict[LeafPath, Leaf], target: Any) -> None:
    """Refuse a target that differs from what is stored, before anything is read.

    Where there are more than eight, containers that are missing or left over as a whole are listed for their leaves.

    Args:
      who: the function that complains.
      what: what is stored, for instance "step 3 in /runs/a".
      stored: the records of the stored leaves.
      target: the wanted pytree of `jax.ShapeDtypeStruct`.

    Raises:
      CheckpointError: if a leaf is missing, left over, or of another shape or dtype.
    """
    wanted = {path: describe(leaf) for path, leaf in leaves_by_path(target).items()}
    missing = {path: leaf for path, leaf in wanted.items() if path not in stored}
    left_over = {path: leaf for path, leaf in stored.items() if path not in wanted}
    different = [path for path in wanted if path in stored and wanted[path] != stored[path]]
    if not (missing or left_over or different):
        return
    listed = [f"{show(path)}: the checkpoint holds {stored[path]}, opt wants {wanted[path]}" for path in different]
    room = max(2, MAX_LISTED - len(different)) // (2 if missing and left_over else 1)
    listed += _listing(missing, stored, "missing from the checkpoint", room)
    listed += _listing(left_over, wanted, "left over in the checkpoint", room)
    counts = f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)} different"
    raise CheckpointError(format_error(who, f"{what} does not fit opt: {counts}.", listed, fix=_remedy(listed)))


def _listing(leaves: dict[LeafPath, Leaf], others: dict[LeafPath, Leaf], verdict: str, room: int) -> list[str]:
    """List leaf by leaf, or by ever larger containers of which the other side knows nothing, until there is room."""
    known = {path[:length] for path in others for length in range(len(path) + 1)}
    lines: list[str] = []
    for depth in range(max(map(len, leaves), default=0), -1, -1):
        groups: dict[LeafPath, list[LeafPath]] = {}
        for path in leaves:
            groups.setdefault(path[: _first_unknown(path, known) + depth], []).append(path)
        lines = [
            f"{show(members[0])}: {leaves[members[0]]}, {verdict}"
            if len(members) == 1
            else f"{show(group)}: {plural(len(members), 'leaf')} {verdict}"
            for group, members in groups.items()
        ]
        if len(lines) <= room:
            break
    return lines


def _first_unknown(path: LeafPath, known: set[LeafPath]) -> int:
    # The whole path counts as unknown: the other side may know it as a container, but not as a leaf.
    return next((length for length in range(1, len(path)) if path[:length] not in known), len(path))


def _remedy(offenders: list[str]) -> str:
    if all(offender.startswith(("opt_state/", "opt_state:")) for offender in offenders):
        return (
            "build opt with the optax chain that the checkpoint was saved with; or start another chain on its "
            "parameters: new_opt.init(restore(directory, old_opt).params)."
        )
    return "build opt for the model and the optax chain that the checkpoint was saved with."


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
    chosen = on_primary_process(lambda: _choose(who, path, step))
    _check_whole(who, path, chosen)
    folder = step_folder(path, chosen)
    meta = read_meta(who, folder)
    target = target_state(who, opt, meta, abstract_params)
    what = f"step {chosen} in {path}"
    readable, changes = as_stored(who, what, meta.leaves, target)
    check_match(who, what, meta.leaves, readable)
    return carry_over(store.read_arrays(folder, readable), changes), meta


def _choose(who: str, directory: Path, step: int | None) -> int:
    steps = committed(directory)
    if step is None and steps:
        return steps[-1]
    if step is not None and step in steps:
        return int(step)
    if (directory / MANIFEST_NAME).exists():
        what = f"{directory} is the folder of one step, not of a run."
        fix = f"pass {str(directory.parent)!r} and step={directory.name}."
    elif step is None or not steps:
        what = f"there is no checkpoint in {directory}" + ("." if directory.is_dir() else ", which does not exist.")
        fix = "pass the folder that was given to save or Checkpoints."
    else:
        what = f"there is no step {step} in {directory}"
        what += ": its save was interrupted." if interrupted(directory, step) else "."
        fix = f"choose one of the steps {', '.join(map(str, steps[-8:]))}, or leave step out for the newest."
    raise CheckpointError(format_error(who, what, fix=fix))


def _check_whole(who: str, directory: Path, step: int) -> None:
    damaged = verify(step_folder(directory, step))
    if not damaged:
        return
    # Going back silently would lose work, or hide a dying disk; so the older step is found, and named.
    older = [earlier for earlier in on_primary_process(lambda: committed(directory)) if earlier < step]
    whole = next((earlier for earlier in reversed(older) if not verify(step_folder(directory, earlier))), None)
    what = f"step {step} in {directory} is damaged."
    fix = "bring the files back from a copy; no earlier step is whole."
    if whole is not None:
        back = f"pass step={whole}, or delete {step_folder(directory, step)}"
        fix = f"bring the files back from a copy, or go back to step {whole}, which is whole ({back})."
    raise CheckpointError(format_error(who, what, damaged, fix=fix))
