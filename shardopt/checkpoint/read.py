"""`restore`: check everything, then read each shard where it is wanted."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import jax

from shardopt.checkpoint import store
from shardopt.checkpoint.multihost import on_primary_process
from shardopt.checkpoint.record import MANIFEST_NAME, RECORD_NAME, Meta, read_meta, verify
from shardopt.checkpoint.replicas import as_stored, to_wanted
from shardopt.checkpoint.run_folder import committed, interrupted, run_folder, step_folder
from shardopt.checkpoint.store import Leaf, describe, dtype_of
from shardopt.checkpoint.tree import LeafPath, leaves_by_path, rebuild, show
from shardopt.core.errors import (
    MAX_LISTED,
    CheckpointError,
    DamagedCheckpointError,
    StepNotFoundError,
    format_error,
    plural,
)
from shardopt.core.types import PyTree
from shardopt.engine.optimizer import ShardedOptimizer


def restore(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | PyTree,
    *,
    step: int | None = None,
    abstract_params: PyTree = None,
) -> PyTree:
    """Read a checkpoint into the placement of an optimizer: of any strategy, on any mesh.

    Before anything is loaded every file is compared with its SHA-256 in the manifest, and every leaf's key path,
    shape and dtype with what is wanted. A checkpoint is restored completely or not at all, and another one than the
    newest only when asked for.

    **Equivalence**: the restored arrays equal the saved ones bit for bit; on the same mesh and strategy training
    goes on bit for bit as if it had never stopped, elsewhere up to the order of summation.

    Where the number of replicas changes, the state that each replica of `local_sgd` and `diloco` has for itself is
    merged, and so is the error-feedback memory of a reducer where the number of devices does: every new replica gets
    the mean of the old ones of floating leaves, of integers and booleans the maximum, of random keys the first.

    **Memory**: each process reads only the shards of its own devices.

    With several processes all must call it.

    Args:
      directory: the folder of the run, as given to `save` or `Checkpoints`.
      target: the optimizer to go on with; it need not have seen parameters. Or an abstract state: a pytree of
        `jax.ShapeDtypeStruct` with shardings, such as `opt.abstract_state()`, in the form of what was saved. Of a folder
        that orbax wrote by itself only this; it may be a part of what was saved.
      step: which checkpoint; by default the newest.
      abstract_params: pytree of `jax.ShapeDtypeStruct`: the parameters, where an optimizer has not seen them. They
        are rebuilt from the checkpoint if their containers are dicts, lists, tuples and None only.

    Returns:
      The state, with the shardings of `opt.abstract_state(abstract_params)`, or of the abstract state.

    Raises:
      TypeError: if `target` is neither an optimizer nor an abstract state with shardings.
      StepNotFoundError: if there is no such checkpoint.
      DamagedCheckpointError: if a file is damaged or missing, by name.
      CheckpointError: if orbax wrote the folder by itself and `target` is an optimizer; or if a leaf is missing, left over, or of another shape or dtype, by key path. It is a ValueError,
        and the two above are CheckpointErrors.

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
    who = "restore"
    check_target(who, target, abstract_params)
    outside = _orbax_folder(who, directory, step)
    if outside is not None and not isinstance(target, ShardedOptimizer):
        return store.read_orbax(who, outside, target)
    return load(who, directory, target, step=step, abstract_params=abstract_params)[0]


def _orbax_folder(who: str, directory: str | os.PathLike[str], step: int | None) -> Path | None:
    """Return where orbax by itself wrote arrays: the folder, its step or an item of it; None if shardopt did, or nobody."""
    path = run_folder(who, directory)

    def find() -> str:
        steps = committed(path)
        chosen = step_folder(path, steps[-1] if step is None and steps else step or 0)
        if any((folder / name).exists() for folder in (path, chosen) for name in (MANIFEST_NAME, RECORD_NAME)):
            return ""
        items = sorted(chosen.iterdir()) if chosen.is_dir() else []
        return next((str(folder) for folder in (path, chosen, *items) if (folder / "_METADATA").exists()), "")

    found = on_primary_process(find)
    return Path(found) if found else None


def load(
    who: str,
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | PyTree,
    *,
    step: int | None = None,
    abstract_params: PyTree = None,
) -> tuple[PyTree, Meta]:
    """Return what `restore` returns, and the checkpoint's record."""
    check_target(who, target, abstract_params)
    path = run_folder(who, directory)
    if (outside := _orbax_folder(who, directory, step)) is not None:
        what = f"{outside} was written by orbax, not by shardopt: it has no record of what a train state is."
        fix = (
            "read its arrays with so.restore(directory, abstract tree), whose leaves are jax.ShapeDtypeStruct with shardings "
            "and whose containers are those saved; then so.adopt(opt, params, opt_state, step=...)."
        )
        raise CheckpointError(format_error(who, what, fix=fix))
    chosen = on_primary_process(lambda: _choose(who, path, step))
    _check_undamaged(who, path, chosen)
    folder = step_folder(path, chosen)
    meta = read_meta(who, folder)
    return fill(
        who, f"step {chosen} in {path}", meta, target, abstract_params, lambda like: store.read_arrays(folder, like)
    ), meta


def check_target(who: str, target: ShardedOptimizer | PyTree, abstract_params: PyTree = None) -> None:
    """Refuse, by a TypeError, what nothing can be restored into."""
    if isinstance(target, ShardedOptimizer):
        return
    if abstract_params is not None:
        raise TypeError(format_error(who, "abstract_params are for an optimizer, not for an abstract state."))
    leaves = leaves_by_path(target)
    strange = [
        f"{show(path) or 'target'}: {type(leaf).__name__}{' without a sharding' * isinstance(leaf, jax.ShapeDtypeStruct)}"
        for path, leaf in leaves.items()
        if any(getattr(leaf, name, None) is None for name in ("shape", "dtype", "sharding"))
    ]
    if strange or not leaves:
        what = "target must be an optimizer, or a pytree of jax.ShapeDtypeStruct with shardings."
        raise TypeError(format_error(who, what, strange, fix=_TARGET_FIX))


_TARGET_FIX = (
    "pass opt, or opt.abstract_state(abstract_params); or make leaves by jax.ShapeDtypeStruct(shape, dtype, "
    "sharding=jax.sharding.NamedSharding(mesh, spec))."
)


def fill(
    who: str,
    what: str,
    meta: Meta,
    target: ShardedOptimizer | PyTree,
    abstract_params: PyTree,
    read: Callable[[PyTree], PyTree],
) -> PyTree:
    """Return the target's state, by `read(abstract state that fits what is stored)`; raise CheckpointError if none does.

    `what` names what is stored, for instance "step 3 in /runs/a"; `meta` is its record.
    """
    name, wanted = "the abstract state", target
    if isinstance(target, ShardedOptimizer):
        name, wanted = "opt", _abstract_state(who, target, meta, abstract_params)
    readable, changes = as_stored(who, what, meta.leaves, wanted, name)
    check_match(who, what, meta.leaves, readable, name)
    return to_wanted(read(readable), changes)


def check_match(who: str, what: str, stored: dict[LeafPath, Leaf], wanted_state: PyTree, name: str = "opt") -> None:
    """Raise CheckpointError if a leaf is missing, left over, or of another shape or dtype than what is stored.

    Where there are more than eight, containers that are missing or left over as a whole are listed for their leaves.
    """
    wanted = {path: describe(leaf) for path, leaf in leaves_by_path(wanted_state).items()}
    missing = {path: leaf for path, leaf in wanted.items() if path not in stored}
    left_over = {path: leaf for path, leaf in stored.items() if path not in wanted}
    different = [path for path in wanted if path in stored and wanted[path] != stored[path]]
    if not (missing or left_over or different):
        return
    listed = [f"{show(path)}: the checkpoint holds {stored[path]}, {name} wants {wanted[path]}" for path in different]
    room = max(2, MAX_LISTED - len(different)) // (2 if missing and left_over else 1)
    listed += _listing(missing, stored, "missing from the checkpoint", room)
    listed += _listing(left_over, wanted, "left over in the checkpoint", room)
    counts = f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)} different"
    fix = "build opt for the model and the optax chain that the checkpoint was saved with."
    if name != "opt":
        fix = "pass an abstract state of the form that was saved."
    elif all(line.startswith(("opt_state/", "opt_state:")) for line in listed):
        fix = (
            "build opt with the optax chain that the checkpoint was saved with; or start another chain on its "
            "parameters: new_opt.init(restore(directory, old_opt).params)."
        )
    raise CheckpointError(format_error(who, f"{what} does not fit {name}: {counts}.", listed, fix=fix))


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


def _abstract_state(who: str, opt: ShardedOptimizer, meta: Meta, abstract_params: PyTree) -> PyTree:
    """Return `opt.abstract_state`, of the given parameters, of those that opt has seen, or of the stored ones."""
    if abstract_params is not None:
        return opt.abstract_state(abstract_params)
    try:
        return opt.abstract_state()
    except ValueError:  # the contract's word for "no parameters seen"
        params = {path: leaf for path, leaf in meta.leaves.items() if path[0] == "params"}
        leaves = [jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf)) for leaf in params.values()]
        return opt.abstract_state(rebuild(who, meta.params, leaves))


def _choose(who: str, directory: Path, step: int | None) -> int:
    steps = committed(directory)
    if step is None and steps:
        return steps[-1]
    if step is not None and step in steps:
        return int(step)
    if (directory / MANIFEST_NAME).exists():
        what = f"{directory} is the folder of one step, not of a run."
        fix = f"pass {str(directory.parent)!r} and step={directory.name}."
    elif (file := _of_flax(directory)) is not None:
        what = f"{file} was written by flax (msgpack), not by shardopt."
        fix = (
            "read it by tree = flax.serialization.msgpack_restore(pathlib.Path(file).read_bytes()), then "
            "so.adopt(opt, tree['params'], tree['opt_state'], step=int(tree['step']))."
        )
    elif directory.is_file():
        what = f"{directory} is a file, and checkpoints are folders."
        fix = "pass the folder that was given to save or Checkpoints; so.from_bytes reads what so.to_bytes returned."
    elif step is None or not steps:
        what = f"there is no checkpoint in {directory}" + ("." if directory.is_dir() else ", which does not exist.")
        fix = "pass the folder that was given to save or Checkpoints."
    else:
        what = f"there is no step {step} in {directory}"
        what += ": its save was interrupted." if interrupted(directory, step) else "."
        fix = f"choose one of the steps {', '.join(map(str, steps[-8:]))}, or leave step out for the newest."
    raise StepNotFoundError(format_error(who, what, fix=fix))


def _of_flax(path: Path) -> Path | None:
    """Return the file that flax wrote: the path, or the newest of its folder; they are named so, and hold a msgpack map."""
    files = sorted(path.iterdir(), key=_number) if path.is_dir() else [path]
    return next((file for file in reversed(files) if _is_of_flax(file)), None)


def _number(file: Path) -> tuple[int, str]:
    digits = re.search(r"\d+$", file.stem)
    return int(digits[0]) if digits else -1, file.name


def _is_of_flax(file: Path) -> bool:
    if not (file.suffix == ".msgpack" or re.fullmatch(r".*_\d+", file.name)) or not file.is_file():
        return False
    with file.open("rb") as opened:
        first = opened.read(1)
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _check_undamaged(who: str, directory: Path, step: int) -> None:
    damaged = verify(step_folder(directory, step))
    if not damaged:
        return
    # Going back silently would lose work, or hide a dying disk; so the older step is found, and named.
    older = [earlier for earlier in on_primary_process(lambda: committed(directory)) if earlier < step]
    back = next((earlier for earlier in reversed(older) if not verify(step_folder(directory, earlier))), None)
    fix = "bring the files back from a copy; no earlier step is intact."
    if back is not None:
        how = f"pass step={back}, or delete {step_folder(directory, step)}"
        fix = f"bring the files back from a copy, or go back to step {back}, which is intact ({how})."
    raise DamagedCheckpointError(format_error(who, f"step {step} in {directory} is damaged.", damaged, fix=fix))
