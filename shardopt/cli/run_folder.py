"""The folder of a run: what is in it, when it may be used, and its checkpoints read with other replicas or reducers."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardopt as so
from shardopt.checkpoint.read import check_match, load
from shardopt.checkpoint.record import Meta, read_meta
from shardopt.checkpoint.run_folder import committed, step_folder
from shardopt.checkpoint.store import Leaf, describe, dtype_of
from shardopt.checkpoint.tree import Json, LeafPath, leaves_by_path, nest, unescape
from shardopt.cli.options import TrainOptions, from_json, to_json
from shardopt.core.errors import format_error, plural
from shardopt.core.types import PyTree, TrainState, merge_replicas
from shardopt.engine.compression import CompressedOptState
from shardopt.local_updates.state import PerReplica, Replicas
from shardopt.runtime.files import write_atomic

CONFIG, CHECKPOINTS, METRICS = "config.json", "checkpoints", "metrics.jsonl"
CURVE, SCHEDULE = "loss.png", "schedule.png"

_FIXED = ("model", "dim", "layers", "heads", "experts", "top_k", "balance")
"""Options of the model that decide the shapes of its parameters."""


def check_run_folder(options: TrainOptions) -> None:
    """Refuse a folder that holds a run already, unless it is to be resumed, and a resume that cannot be one."""
    folder = options.run.run_dir
    if not options.run.resume:
        if steps := committed(folder / CHECKPOINTS):
            what = f"there is a run in {str(folder)!r} already, saved at step {steps[-1]}."
            fix = f"go on with --resume, choose another --run-dir, or delete {str(folder)!r}."
            raise ValueError(format_error("train", what, fix=fix))
        return
    before, now = read_options(folder).model, options.model
    changed = [
        f"--{name.replace('_', '-')} was {getattr(before, name)}, is now {getattr(now, name)}"
        for name in _FIXED
        if getattr(before, name) != getattr(now, name)
    ]
    if changed:
        what = f"the run in {str(folder)!r} trains another model."
        raise ValueError(format_error("train", what, changed, "leave these out, or choose another --run-dir."))


def read_options(folder: Path) -> TrainOptions:
    """Return the options of the run in a folder."""
    return from_json(_read(folder))


def order_changes(options: TrainOptions, text_bytes: int) -> list[str]:
    """Return, for a run to be resumed, what makes the order of its batches another than before."""
    saved = _read(options.run.run_dir)
    before = from_json(saved)
    pairs = {
        "--length": (before.model.length, options.model.length),
        "--batch-size": (before.training.batch_size, options.training.batch_size),
        "--seed": (before.training.seed, options.training.seed),
        "--data": (before.training.data, options.training.data),
        "the size of the text": (saved.get("text_bytes", text_bytes), text_bytes),
    }
    return [f"{name} was {old}, is now {new}" for name, (old, new) in pairs.items() if old != new]


def write_options(options: TrainOptions, text_bytes: int) -> None:
    """Write the options of a run, and the size of its text, into its folder, which is made when needed."""
    options.run.run_dir.mkdir(parents=True, exist_ok=True)
    saved = to_json(options) | {"text_bytes": text_bytes}
    write_atomic(options.run.run_dir / CONFIG, json.dumps(saved, indent=2) + "\n")


def keep_options(options: TrainOptions, text_bytes: int) -> None:
    """Write the options again if the folder was deleted meanwhile: without them the run could not be resumed."""
    if not (options.run.run_dir / CONFIG).exists():
        write_options(options, text_bytes)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what the run logged so far, `{"step": n, "loss": ..., ...}` each."""
    path = folder / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _read(folder: Path) -> dict[str, Json]:
    path = folder / CONFIG
    if not path.is_file():
        fix = "leave out --resume to start one, or name its folder with --run-dir."
        raise ValueError(format_error("train", f"there is no run in {str(folder)!r} to go on with.", fix=fix))
    try:
        saved = json.loads(path.read_text())
        from_json(saved)
    except (ValueError, AttributeError, TypeError) as error:
        what = f"{str(path)!r} is damaged: {error}."
        fix = "bring it back, or start again in another --run-dir."
        raise ValueError(format_error("train", what, fix=fix)) from error
    return saved


_OWN_PARAMS, _OWN_STATE = ("opt_state", "params", "value"), ("opt_state", "optimizer", "value")
_REDUCERS = (("opt_state", "reducer"), ("opt_state", "inner_reducer"))


class ConvertingCheckpoints(so.Checkpoints):
    """Checkpoints that can be restored with other replicas, local updates and reducers than they were saved with.

    Where what is stored fits, it is restored as it is. Else parameters and optimizer state are kept: of the replicas of
    local updates what `merge_replicas` makes of them, for replicas with local updates a copy each. The state of outer
    optimizers and reducers is reset.

    Attributes:
      base: the strategy without local updates and reducers, on the same mesh.
      abstract_params: the parameters.
      say: is told what was kept.
    """

    def __init__(
        self,
        directory: Path,
        every: int,
        keep: int | None,
        *,
        base: so.ShardedOptimizer,
        abstract_params: PyTree,
        say: Callable[[str], None],
        best: str | None = None,
        resume: bool = True,
        memory_every: int | None = None,
    ):
        """Become the writer of a folder, as `so.Checkpoints`."""
        super().__init__(directory, every, keep, best=best, resume=resume, memory_every=memory_every)
        self.base, self.abstract_params, self.say = base, abstract_params, say

    def restore(self, target: so.ShardedOptimizer, *, step: int | None = None) -> tuple[TrainState, dict[str, Json]]:
        """Return the state of a checkpoint in the form of `target`, and its `extra`."""
        self.wait()
        chosen = self.latest() if step is None else step
        if chosen not in self.steps():
            return super().restore(target, step=step)
        meta = read_meta("train", step_folder(self.directory, chosen))
        wanted = {path: describe(leaf) for path, leaf in leaves_by_path(target.abstract_state()).items()}
        if wanted == meta.leaves or not (_is_combined(wanted) or _is_combined(meta.leaves)):
            return super().restore(target, step=step)
        try:
            return super().restore(target, step=step)
        except so.DamagedCheckpointError:
            raise
        except so.CheckpointError:  # another form: if that is all, what can be kept is kept
            base, extra = _read_base(self, target.mesh, meta)
        state, note = _convert(target, base)
        replicas = _num_replicas(meta.leaves)
        mean = f", the mean of {plural(replicas, 'replica')}" if replicas else ""
        self.say(f"Kept of step {chosen}: parameters and optimizer state{mean}{note}.")
        return state, extra


def _is_combined(leaves: dict[LeafPath, Leaf]) -> bool:
    return bool(_num_replicas(leaves)) or any(path[:2] in _REDUCERS for path in leaves)


def _num_replicas(leaves: dict[LeafPath, Leaf]) -> int:
    """Return the number of replicas with local updates; 0 for none."""
    return next((leaf.shape[0] for path, leaf in leaves.items() if path[:3] == _OWN_PARAMS), 0)


def _read_base(checkpoints: ConvertingCheckpoints, mesh: Mesh, meta: Meta) -> tuple[TrainState, dict[str, Json]]:
    """Return the state of `checkpoints.base`, and what was kept beside it."""
    replicas, like = _num_replicas(meta.leaves), checkpoints.base.abstract_state(checkpoints.abstract_params)
    wrapped = any(path[:2] in _REDUCERS for path in meta.leaves)
    wanted = leaves_by_path(like)
    where = {path: _stored_path(path, replicas=replicas, wrapped=wrapped) for path in wanted}
    found = {path: meta.leaves[at] for path, at in where.items() if at in meta.leaves}
    stacked = {path for path, at in where.items() if at[:3] in (_OWN_PARAMS, _OWN_STATE) and replicas}
    one = {path: leaf._replace(shape=leaf.shape[1:]) if path in stacked else leaf for path, leaf in found.items()}
    check_match("train", f"step {meta.step} in {checkpoints.directory}", one, like)

    shardings = {where[path]: leaf.sharding for path, leaf in wanted.items()}
    of_replicas = {where[path] for path in stacked}
    target = nest(
        {
            tuple(map(unescape, path)): _abstract(leaf, path in of_replicas, shardings.get(path), mesh)
            for path, leaf in meta.leaves.items()
        }
    )
    state, meta = load("train", checkpoints.directory, target, step=meta.step)  # exactly what is there
    stored = leaves_by_path(state)

    def merge(leaves: dict[LeafPath, jax.Array]) -> list[jax.Array]:
        return [merge_replicas(leaf) if path in stacked else leaf for path, leaf in leaves.items()]

    kept = [stored[at] for at in where.values()]
    merged = jax.jit(
        lambda leaves: merge(dict(zip(wanted, leaves, strict=True))),
        out_shardings=[leaf.sharding for leaf in wanted.values()],
    )(kept)
    return jax.tree.unflatten(jax.tree.structure(like), merged), meta.extra


def _stored_path(path: LeafPath, *, replicas: int, wrapped: bool) -> LeafPath:
    """Return where a leaf of the base strategy is stored."""
    if replicas and path[0] == "params":
        return (*_OWN_PARAMS, *path[1:])
    if path[0] == "opt_state" and (replicas or wrapped):
        return (*(_OWN_STATE if replicas else _OWN_STATE[:2]), *path[1:])
    return path


def _abstract(leaf: Leaf, stacked: bool, sharding: NamedSharding | None, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return how a leaf is read: placed as the base places it, replicas over their axis; what is not kept over dim 0."""
    spec = PartitionSpec() if sharding is None else sharding.spec
    if stacked:
        even = leaf.shape[0] % mesh.shape.get("replica", leaf.shape[0] + 1) == 0
        spec = PartitionSpec("replica" if even else None, *spec)
    elif sharding is None and leaf.shape and leaf.shape[0] % mesh.size == 0:
        spec = PartitionSpec(mesh.axis_names)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), sharding=NamedSharding(mesh, spec))


def _convert(opt: so.ShardedOptimizer, base: TrainState) -> tuple[TrainState, str]:
    """Return a state of `opt` with the parameters and optimizer state of the base strategy, and what is reset in it."""
    fresh = opt.init(base.params)
    state, note, reset = fresh.opt_state, "", []
    if isinstance(state, Replicas):
        replicas = opt.mesh.shape["replica"]
        placed = jax.tree.map(lambda leaf: leaf.sharding, state.optimizer.value)
        stack = lambda x: jnp.broadcast_to(x, (replicas, *x.shape))  # noqa: E731
        copies = jax.jit(lambda tree: jax.tree.map(stack, tree), out_shardings=placed)(base.opt_state)
        opt_state = state._replace(optimizer=PerReplica(copies))
        note = f", a copy for each of {replicas} replicas"
        reset = ["the outer optimizer"] if jax.tree.leaves(state.outer) else []
    elif isinstance(state, CompressedOptState):
        opt_state = state._replace(optimizer=base.opt_state)
    else:
        opt_state = base.opt_state
    if jax.tree.leaves(getattr(state, "reducer", None)):
        reset.append("the reducer")
    if reset:
        note += f"; {' and '.join(reset)} {'is' if len(reset) == 1 else 'are'} reset"
    return fresh._replace(step=base.step, opt_state=opt_state, rng=base.rng), note
