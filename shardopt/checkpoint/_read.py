"""`restore`: check everything, then read each shard on the process of its device."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from shardopt.checkpoint import _store as store
from shardopt.checkpoint._hashed import KEY, check_hash, with_hashed, without_hashed
from shardopt.checkpoint._listing import listing, tell
from shardopt.checkpoint._match import NewChain
from shardopt.checkpoint._multihost import on_primary_process
from shardopt.checkpoint._new_chain import Chain, Read, fill_new_chain, without_params
from shardopt.checkpoint._record import MANIFEST_NAME, RECORD_NAME, Meta, read_meta, verify
from shardopt.checkpoint._replicas import as_stored, to_wanted
from shardopt.checkpoint._run_folder import committed, interrupted, run_folder, step_folder
from shardopt.checkpoint._store import StoredLeaves, describe, dtype_of
from shardopt.checkpoint._sums import check_sums
from shardopt.checkpoint._tree import leaves_by_path, rebuild, show
from shardopt.core import (
    MAX_LISTED,
    CheckpointError,
    DamagedCheckpointError,
    PyTree,
    StepNotFoundError,
    TrainState,
    calling,
    error_text,
    plural,
    type_error,
)
from shardopt.step._optimizer import ShardedOptimizer


@calling("restore")
def restore(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | PyTree,
    *,
    step: int | None = None,
    abstract_params: PyTree = None,
    params: PyTree = None,
    new_chain: NewChain = False,
) -> PyTree:
    """Read a checkpoint into the placement of an optimizer: of any strategy, on any mesh.

    Every file is compared with its SHA-256 in the manifest, and every leaf's key path, shape and
    dtype with the target. One process compares large files of arrays while it reads them; all else
    comes first. If a file differs, no state is returned. For an optimizer, a checkpoint is restored
    completely or not at all. If the newest checkpoint is damaged, an older one is
    restored only if `step` asks for it.

    With several processes all must call it.

    Args:
      directory: the folder of the run, the same as for `save` or `Checkpoints`.
      target: the optimizer to continue with; it need not have seen parameters. Or an abstract
        state: a pytree of `jax.ShapeDtypeStruct` with shardings, in the form of the saved state,
        such as `opt.abstract_state()`, or a part of it, such as `{"params": {"backbone": ...}}`.
        Only the arrays of the part are read, so large files of arrays are compared by size alone.
        The names of other leaves are printed. A `TrainState` is no part, unless a field of it is
        None or ().
      step: the number of the checkpoint; by default the newest.
      abstract_params: pytree of `jax.ShapeDtypeStruct`: the parameters, if the optimizer has not
        seen them. Without this, they are rebuilt from the checkpoint, if their containers are only
        dicts, lists, tuples and None.
      params: the parameters with the leaves that the checkpoint has only a hash of, see `hash_only`
        of `Checkpoints`. They are placed as the target wants them. With `new_chain` also the leaves
        that it does not have, or has in another shape, such as a new head: they come from here, and
        their moments start.
      new_chain: True if the optax chain of the optimizer may be another one than the saved chain.
        Each state of the optimizer is then matched by its fields, such as `mu` and `count`, and by
        its parameters, wherever it lies in the chain. Other states start again from the restored
        parameters. `restore` prints which states were matched, started and dropped. Or a dict that
        says which stored state is which: `{"opt_state/1": "opt_state/0"}`, and None for one that
        starts again.

    Returns:
      The state, with the shardings of `opt.abstract_state(abstract_params)`, or of the abstract
      state.

    Raises:
      TypeError: if `target` is neither an optimizer nor an abstract state with shardings.
      StepNotFoundError: if there is no such checkpoint.
      DamagedCheckpointError: if a file is damaged or missing, or a leaf does not have the sum that
        `fit(cross_check_every=...)` stored; the message names it.
      ValueError: if `new_chain` names a state that is not there.
      CheckpointError: if shardopt did not write the folder. Also if several stored states fit one
        state of a new chain. Also if a leaf is missing, left over, or of another shape or dtype;
        the message lists key paths. Also if `params` have another hash than the checkpoint. It is
        a ValueError, and the two errors above are CheckpointErrors.

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

    **Equivalence**: the restored arrays equal the saved ones bit for bit. On the same mesh and
    strategy, training continues bit for bit as if it had never stopped; elsewhere it is equal up to
    the order of summation.

    If the number of replicas changes, the state of each replica of `local_sgd` and `diloco` is
    merged. If the number of devices changes, the error-feedback memory of a reducer is merged.
    Every new replica or device gets:

    - the mean of the old values, for floating leaves;
    - the maximum, for integers and booleans;
    - the first value, for random keys.

    **Memory**: each process reads only the shards of its own devices.
    """
    return load(
        directory,
        target,
        step=step,
        abstract_params=abstract_params,
        params=params,
        new_chain=new_chain,
    )[0]


def load(
    directory: str | os.PathLike[str],
    target: ShardedOptimizer | PyTree,
    *,
    step: int | None = None,
    abstract_params: PyTree = None,
    params: PyTree = None,
    new_chain: NewChain = False,
) -> tuple[PyTree, Meta]:
    """Return the state that `restore` returns, and the record of the checkpoint."""
    check_target(target, abstract_params, new_chain)
    path = run_folder(directory)
    chosen_step = on_primary_process(lambda: _choose_step(path, step))
    folder = step_folder(path, chosen_step)
    # Sizes and small files first, which takes no time. The bytes of arrays are hashed while they
    # are read.
    _check_undamaged(path, chosen_step, verify(folder, arrays=False))
    meta = read_meta(folder)
    # A part reads few of the bytes. Hashing all of them would cost more than it reads.
    is_part = (
        not isinstance(target, ShardedOptimizer)
        and not meta.leaves.keys() <= _asked_for(meta.leaves, target).keys()
    )
    source = f"step {chosen_step} in {path}"

    def read(abstract_state: PyTree) -> PyTree:
        state = store.read_arrays(folder, abstract_state)
        check_sums(source, state, meta.sums)
        return state

    with contextlib.nullcontext() if is_part else _comparing(path, chosen_step):
        record = meta.extra.pop(KEY, None)
        has_hash = record is not None and not (is_part and params is None)
        if not has_hash and not isinstance(target, ShardedOptimizer):
            return _fill_part(source, meta, target, read), meta
        patterns = check_hash(source, record, params) if has_hash else ()
        wanted_state: PyTree = target
        if isinstance(target, ShardedOptimizer):
            has_params = params is not None and (has_hash or new_chain is not False)
            shapes = jax.eval_shape(lambda: params) if has_params else abstract_params
            wanted_state = _abstract_state(target, meta, shapes)

        def with_all_params(state: PyTree) -> PyTree:
            return with_hashed(state, wanted_state.params, params, patterns) if patterns else state

        chain = None
        if new_chain is not False:
            chain = Chain(
                new_chain, lambda state: target.init(with_all_params(state).params), params
            )
        stored_state = without_hashed(wanted_state, patterns) if patterns else wanted_state
        return with_all_params(_fill(source, meta, stored_state, read, chain)), meta


def check_target(
    target: ShardedOptimizer | PyTree, abstract_params: PyTree, new_chain: NewChain
) -> None:
    """Refuse a target that is neither an optimizer nor an abstract state with shardings. Refuse
    arguments that only an optimizer takes.

    Raises:
      TypeError: if the target or another argument is of the wrong kind.
    """
    if not isinstance(new_chain, bool | Mapping):
        problem = f"new_chain must be True, False or a dict of paths, got {new_chain!r:.80}."
        raise type_error(problem)
    if isinstance(target, ShardedOptimizer):
        return
    if abstract_params is not None or new_chain is not False:
        name = "new_chain is" if abstract_params is None else "abstract_params are"
        raise type_error(f"{name} for an optimizer, not for an abstract state.")
    leaves = leaves_by_path(target)
    invalid_leaves = [
        f"{show(path) or 'target'}:"
        f" {type(leaf).__name__}{' without a sharding' * isinstance(leaf, jax.ShapeDtypeStruct)}"
        for path, leaf in leaves.items()
        if any(getattr(leaf, name, None) is None for name in ("shape", "dtype", "sharding"))
    ]
    if invalid_leaves or not leaves:
        problem = "target must be an optimizer, or a pytree of jax.ShapeDtypeStruct with shardings."
        raise type_error(problem, invalid_leaves, fix=_TARGET_FIX)


_TARGET_FIX = (
    "pass opt, or opt.abstract_state(abstract_params); or make leaves by"
    " jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))."
)


def _fill(
    source: str,
    meta: Meta,
    wanted_state: PyTree,
    read: Read,
    chain: Chain | None,
) -> PyTree:
    """Return the state of an optimizer, with the stored values."""
    if chain is not None and chain.is_new(meta, wanted_state):
        new_params = chain.new_params(meta, wanted_state)
        stored, wanted = without_params(meta, wanted_state, new_params)
        check_match(source, stored, wanted)
        return fill_new_chain(source, meta, wanted_state, read, chain, new_params)
    readable, changes = as_stored(source, meta.leaves, wanted_state, "opt")
    check_match(source, meta.leaves, readable)
    return to_wanted(read(readable), changes)


def _fill_part(source: str, meta: Meta, target: PyTree, read: Read) -> PyTree:
    """Return an abstract state, which may be a part of the stored one, with the stored values."""
    name = "the abstract state"
    stored = _asked_for(meta.leaves, target)
    readable, changes = as_stored(source, stored, target, name)
    check_match(source, stored, readable, name)
    state = to_wanted(read(readable), changes)
    if len(stored) < len(meta.leaves):
        _tell_part(source, meta.leaves, stored)
    return state


def _asked_for(stored: StoredLeaves, target: PyTree) -> StoredLeaves:
    """Return the stored leaves that an abstract state asks for.

    A train state asks for all of its fields, so that a moment that nobody asked for is noticed; a
    field that is None or () is left out. Any other tree is a part.
    """
    if not isinstance(target, TrainState):
        return {path: stored[path] for path in leaves_by_path(target) if path in stored}
    fields = {
        name
        for name, value in target._asdict().items()
        if not (value is None or (type(value) is tuple and not value))
    }
    return {path: leaf for path, leaf in stored.items() if path[0] in fields}


def _tell_part(source: str, leaves: StoredLeaves, part: StoredLeaves) -> None:
    """Print which leaves of a checkpoint were left out."""
    left = {path: leaf for path, leaf in leaves.items() if path not in part}
    lines = listing(left, part, "left in the checkpoint", MAX_LISTED)
    text = f"{source}: {len(part)} of {plural(len(leaves), 'leaf')} were read."
    tell("\n  ".join([text, *lines]))


def check_match(
    source: str, stored: StoredLeaves, wanted_state: PyTree, target_name: str = "opt"
) -> None:
    """Raise CheckpointError if a leaf is missing, left over, or has another shape or dtype than the
    stored leaf.

    If there are more than eight such leaves, a container that is completely missing or left over is
    listed once.

    Args:
      source: the name of the stored state, for messages.
      stored: the stored leaves by path.
      wanted_state: pytree of abstract arrays.
      target_name: the name of the target, for messages.
    """
    wanted = {path: describe(leaf) for path, leaf in leaves_by_path(wanted_state).items()}
    missing = {path: leaf for path, leaf in wanted.items() if path not in stored}
    left_over = {path: leaf for path, leaf in stored.items() if path not in wanted}
    different = [path for path in wanted if path in stored and wanted[path] != stored[path]]
    if not (missing or left_over or different):
        return
    lines = [
        f"{show(path)}: the checkpoint holds {stored[path]}, {target_name} wants {wanted[path]}"
        for path in different
    ]
    max_lines = max(2, MAX_LISTED - len(different)) // (2 if missing and left_over else 1)
    lines += listing(missing, stored, "missing from the checkpoint", max_lines)
    lines += listing(left_over, wanted, "left over in the checkpoint", max_lines)
    counts = (
        f"{plural(len(missing), 'leaf')} missing, {len(left_over)} left over, {len(different)}"
        " different"
    )
    problem = f"{source} does not fit {target_name}: {counts}."
    raise CheckpointError(error_text(problem, lines, fix=_misfit_fix(lines, target_name)))


def _misfit_fix(lines: list[str], target_name: str) -> str:
    if target_name != "opt":
        return (
            "pass key paths, shapes and dtypes that were saved; of a part in a dict, such as"
            ' {"params": ...}.'
        )
    if all(line.startswith(("opt_state/", "opt_state:")) for line in lines):
        return (
            "build opt with the optax chain that the checkpoint was saved with; or pass"
            " new_chain=True (to Checkpoints resume='new_chain'), which keeps the states that both"
            " chains have."
        )
    return (
        "build opt for the model and the optax chain that the checkpoint was saved with; or pass"
        " new_chain=True, and as params= parameters with the leaves that the checkpoint does not"
        " have."
    )


def _abstract_state(opt: ShardedOptimizer, meta: Meta, abstract_params: PyTree) -> PyTree:
    """Return `opt.abstract_state` of the first parameters that are available.

    They are `abstract_params`, then the parameters that opt has seen, then the stored parameters.
    """
    if abstract_params is not None:
        return opt.abstract_state(abstract_params)
    try:
        return opt.abstract_state()
    except ValueError:  # opt has not seen parameters
        params = {path: leaf for path, leaf in meta.leaves.items() if path[0] == "params"}
        leaves = [jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf)) for leaf in params.values()]
        return opt.abstract_state(rebuild(meta.params, leaves))


def _choose_step(directory: Path, step: int | None) -> int:
    steps = committed(directory)
    chosen_step = max(steps, default=None) if step is None else step
    if chosen_step in steps:
        _check_is_ours(step_folder(directory, chosen_step))
        return int(chosen_step)
    if (directory / MANIFEST_NAME).exists():
        problem = f"{directory} is the folder of one step, not of a run."
        fix = f"pass {str(directory.parent)!r} and step={directory.name}."
    elif directory.is_file():
        problem = f"{directory} is a file, and checkpoints are folders."
        fix = "pass the folder that was given to save or Checkpoints."
    elif step is None or not steps:
        problem = f"there is no checkpoint in {directory}" + (
            "." if directory.is_dir() else ", which does not exist."
        )
        fix = "pass the folder that was given to save or Checkpoints."
    else:
        problem = f"there is no step {step} in {directory}"
        problem += ": its save was interrupted." if interrupted(directory, step) else "."
        fix = (
            f"choose one of the steps {', '.join(map(str, steps[-8:]))}, or leave step out for the"
            " newest."
        )
    raise StepNotFoundError(error_text(problem, fix=fix))


def _check_is_ours(folder: Path) -> None:
    if not any((folder / name).exists() for name in (MANIFEST_NAME, RECORD_NAME)):
        problem = (
            f"{folder} was not written by shardopt: it has no record of what a train state is."
        )
        fix = (
            "if orbax wrote it, read its arrays with orbax; then"
            " so.replace(opt.init(params), opt_state=..., step=...)."
        )
        raise CheckpointError(error_text(problem, fix=fix))


@contextlib.contextmanager
def _comparing(directory: Path, step: int) -> Iterator[None]:
    """Compare all bytes of a step with their digests while a block reads them. Refuse a damaged step
    when the block ends, also if reading it failed.
    """
    with ThreadPoolExecutor(1) as thread:
        damage_lines = thread.submit(verify, step_folder(directory, step))
        if jax.process_count() > 1:
            # orbax waits for all processes: none may begin to read if another would fail
            _check_undamaged(directory, step, damage_lines.result())
        try:
            yield
        finally:
            _check_undamaged(directory, step, damage_lines.result())


def _check_undamaged(directory: Path, step: int, damage_lines: list[str]) -> None:
    """Refuse a step if `verify` found files that differ from the files that were written."""
    if not damage_lines:
        return
    damage_lines = verify(step_folder(directory, step))  # of arrays too
    # A silent return to an older step would lose work or hide a failing disk. So the message names
    # an intact step.
    fix = "bring the files back from a copy; no earlier step is intact."
    for earlier in reversed(on_primary_process(lambda: committed(directory))):
        if earlier < step and not verify(step_folder(directory, earlier)):
            fix = (
                f"bring the files back from a copy, or go back to step {earlier}, which is intact"
                f" (pass step={earlier}, or delete {step_folder(directory, step)})."
            )
            break
    raise DamagedCheckpointError(
        error_text(f"step {step} in {directory} is damaged.", damage_lines, fix=fix)
    )
