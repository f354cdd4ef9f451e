"""The folder of a run: its files, when it may be used, and checkpoints that fit other replicas or
reducers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardopt as so
from shardopt.checkpoint._read import check_match, load
from shardopt.checkpoint._record import Meta, read_meta
from shardopt.checkpoint._run_folder import committed, step_folder
from shardopt.checkpoint._store import Leaf, StoredLeaves, describe, dtype_of
from shardopt.checkpoint._tree import JsonObject, LeafPath, leaves_by_path, nest, unescape
from shardopt.cli._options import (
    FolderOptions,
    Options,
    RunOptions,
    TrainOptions,
    TuneOptions,
    flag,
    from_json,
    to_json,
)
from shardopt.core._errors import calling, plural, value_error
from shardopt.core._types import PyTree, TrainState, merge_replicas
from shardopt.local_updates._state import PerReplica, Replicas
from shardopt.runtime._files import write_atomic
from shardopt.step._compressed import CompressedOptState

CONFIG, CHECKPOINTS, METRICS = "config.json", "checkpoints", "metrics.jsonl"
CURVE, SCHEDULE = "loss.png", "schedule.png"


def check_run_folder(options: RunOptions) -> None:
    """Refuse a folder that already holds a run, unless it is resumed.

    Refuse to resume a run with another model.
    """
    folder = options.run.run_dir
    if not options.run.resume:
        if steps := committed(folder / CHECKPOINTS):
            problem = f"there is a run in {str(folder)!r} already, saved at step {steps[-1]}."
            fix = f"go on with --resume, choose another --run-dir, or delete {str(folder)!r}."
            raise value_error(problem, fix=fix)
        return
    saved, current = read_options(folder, type(options)).model, options.model
    changes = [
        f"{flag(name)} was {getattr(saved, name)}, is now {getattr(current, name)}"
        for name in current.FIXED
        if getattr(saved, name) != getattr(current, name)
    ]
    if changes:
        problem = f"the run in {str(folder)!r} trains another model."
        fix = "leave these out, or choose another --run-dir."
        raise value_error(problem, changes, fix)


def checkpoint_settings(run: FolderOptions) -> dict[str, Any]:
    """Return the arguments of `so.Checkpoints` for a run: the last two and the best are kept."""
    return {
        "directory": run.run_dir / CHECKPOINTS,
        "every": run.checkpoint_every,
        "keep": 2,
        "best": "val_loss",
        "resume": run.resume,
        "memory_every": run.memory_every,
    }


def read_options(folder: Path, options_type: type[Options] = TrainOptions) -> Options:
    """Return the options of the run in a folder."""
    return from_json(_read_config(folder, options_type), options_type)


def order_changes(options: RunOptions, text_bytes: int) -> list[str]:
    """Return, for a resumed run, the changes that give its batches another order than before."""
    config = _read_config(options.run.run_dir, type(options))
    before = _order_of(from_json(config, type(options)), config.get("text_bytes", text_bytes))
    now = _order_of(options, text_bytes)
    return [
        f"{name} was {before[name]}, is now {now[name]}"
        for name in now
        if before[name] != now[name]
    ]


def _order_of(options: RunOptions, text_bytes: int) -> dict[str, object]:
    """Return what the order of the batches depends on."""
    return {
        "--length": options.model.length,
        "--batch-size": options.training.batch_size,
        "--seed": options.training.seed,
        "--data": options.training.data,
        "the size of the text": text_bytes,
    }


def write_options(options: RunOptions, text_bytes: int) -> None:
    """Write the options of a run and the size of its text into its folder.

    Make the folder if needed.
    """
    options.run.run_dir.mkdir(parents=True, exist_ok=True)
    saved = to_json(options) | {"text_bytes": text_bytes}
    write_atomic(options.run.run_dir / CONFIG, json.dumps(saved, indent=2) + "\n")


def keep_options(options: RunOptions, text_bytes: int) -> None:
    """Write the options again if somebody deleted the folder: without them the run could not be
    resumed.
    """
    if not (options.run.run_dir / CONFIG).exists():
        write_options(options, text_bytes)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics that the run has logged, `{"step": n, "loss": ..., ...}` each."""
    path = folder / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def loggers(options: RunOptions, text_bytes: int) -> list[Callable[..., object]]:
    """Return the functions that log the metrics of a run."""
    metrics = so.training.jsonl(options.run.run_dir / METRICS)
    return [metrics, lambda *_: keep_options(options, text_bytes)]


def _read_config(folder: Path, options_type: type[RunOptions]) -> JsonObject:
    path = folder / CONFIG
    if not path.is_file():
        fix = "leave out --resume to start one, or name its folder with --run-dir."
        raise value_error(f"there is no run in {str(folder)!r} to go on with.", fix=fix)
    try:
        config = json.loads(path.read_text())
        from_json(config, options_type)
    except (ValueError, AttributeError, TypeError) as error:
        problem = f"{str(path)!r} is damaged: {error}."
        fix = "bring it back, or start again in another --run-dir."
        raise value_error(problem, fix=fix) from error
    if ("epochs" in config.get("training", {})) != (options_type is TuneOptions):
        problem = f"the run in {str(folder)!r} is one of another command."
        raise value_error(problem, fix="go on with that command, or choose another --run-dir.")
    return config


_REPLICA_PARAMS = ("opt_state", "params", "value")
_REPLICA_STATE = ("opt_state", "optimizer", "value")
_REDUCERS = (("opt_state", "reducer"), ("opt_state", "inner_reducer"))


class ConvertingCheckpoints(so.Checkpoints):
    """Checkpoints that can be restored with other replicas, local updates and reducers than the
    saved ones.

    If the stored state fits, it is restored unchanged. Otherwise only parameters and optimizer
    state are restored:

    - stored replicas are merged by `merge_replicas`;
    - new replicas with local updates get a copy each;
    - the state of outer optimizers and reducers is reset.

    Attributes:
      base: the strategy without local updates and reducers, on the same mesh.
      abstract_params: the parameters, as `jax.ShapeDtypeStruct`.
      say: prints a message about the restored parts.
    """

    def __init__(
        self,
        *arguments: Any,
        base: so.ShardedOptimizer,
        abstract_params: PyTree,
        say: Callable[[str], None],
        **settings: Any,
    ):
        """Become the writer of a folder, with the other arguments of `so.Checkpoints`."""
        super().__init__(*arguments, **settings)
        self.base, self.abstract_params, self.say = base, abstract_params, say

    @calling("train")
    def restore(
        self, target: so.ShardedOptimizer, *, step: int | None = None, params: PyTree = None
    ) -> tuple[TrainState, JsonObject]:
        """Return the state of a checkpoint in the form of `target`, and its `extra`."""
        self.wait()
        chosen_step = self.latest() if step is None else step
        if chosen_step not in self.steps():
            return super().restore(target, step=step, params=params)
        meta = read_meta(step_folder(self.directory, chosen_step))
        wanted = {
            path: describe(leaf) for path, leaf in leaves_by_path(target.abstract_state()).items()
        }
        if wanted == meta.leaves or not (_is_combined(wanted) or _is_combined(meta.leaves)):
            return super().restore(target, step=step, params=params)
        try:
            return super().restore(target, step=step, params=params)
        except so.errors.DamagedCheckpointError:
            raise
        except so.errors.CheckpointError:  # the state has another form: restore the parts that fit
            base, extra = _read_base(self, target.mesh, meta)
        state, note = _convert(target, base)
        replicas = _num_replicas(meta.leaves)
        mean_text = f", the mean of {plural(replicas, 'replica')}" if replicas else ""
        self.say(f"Kept of step {chosen_step}: parameters and optimizer state{mean_text}{note}.")
        return state, extra


def _is_combined(leaves: StoredLeaves) -> bool:
    return bool(_num_replicas(leaves)) or any(path[:2] in _REDUCERS for path in leaves)


def _num_replicas(leaves: StoredLeaves) -> int:
    """Return the number of replicas with local updates; 0 without local updates."""
    return next((leaf.shape[0] for path, leaf in leaves.items() if path[:3] == _REPLICA_PARAMS), 0)


@calling("train")
def _read_base(
    checkpoints: ConvertingCheckpoints, mesh: Mesh, meta: Meta
) -> tuple[TrainState, JsonObject]:
    """Return the stored state in the form of `checkpoints.base`, and its `extra`."""
    base = checkpoints.base
    abstract_state = base.abstract_state(checkpoints.abstract_params)
    wanted_leaves = leaves_by_path(abstract_state)
    replicas = _num_replicas(meta.leaves)
    wrapped = any(path[:2] in _REDUCERS for path in meta.leaves)
    stored_paths = {
        path: _stored_path(path, replicas=replicas, wrapped=wrapped) for path in wanted_leaves
    }

    def is_stacked(stored_path):
        return replicas > 0 and stored_path[:3] in (_REPLICA_PARAMS, _REPLICA_STATE)

    def unstacked(stored_path):
        leaf = meta.leaves[stored_path]
        return leaf._replace(shape=leaf.shape[1:]) if is_stacked(stored_path) else leaf

    stored_leaves = {
        path: unstacked(stored_path)
        for path, stored_path in stored_paths.items()
        if stored_path in meta.leaves
    }
    check_match(f"step {meta.step} in {checkpoints.directory}", stored_leaves, abstract_state)
    shardings = {stored_paths[path]: leaf.sharding for path, leaf in wanted_leaves.items()}
    target = nest(
        {
            tuple(map(unescape, path)): _abstract(leaf, is_stacked(path), shardings.get(path), mesh)
            for path, leaf in meta.leaves.items()
        }
    )
    state, meta = load(checkpoints.directory, target, step=meta.step)  # exactly the stored form
    arrays = leaves_by_path(state)

    def merge(leaves):
        return [
            merge_replicas(leaf) if is_stacked(stored_path) else leaf
            for stored_path, leaf in zip(shardings, leaves, strict=True)
        ]

    merged = jax.jit(merge, out_shardings=list(shardings.values()))(
        [arrays[stored_path] for stored_path in shardings]
    )
    return jax.tree.unflatten(jax.tree.structure(abstract_state), merged), meta.extra


def _stored_path(path: LeafPath, *, replicas: int, wrapped: bool) -> LeafPath:
    """Return the path under which a leaf of the base strategy is stored."""
    if replicas and path[0] == "params":
        return (*_REPLICA_PARAMS, *path[1:])
    if path[0] == "opt_state" and (replicas or wrapped):
        return (*(_REPLICA_STATE if replicas else _REPLICA_STATE[:2]), *path[1:])
    return path


def _abstract(
    leaf: Leaf, stacked: bool, sharding: NamedSharding | None, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """Return the abstract array for reading a leaf.

    It has the sharding of the base strategy, with stacked replicas over the axis `replica`. A leaf
    that is not restored is sharded over dim 0, if that is divisible.
    """
    spec = PartitionSpec() if sharding is None else sharding.spec
    if stacked:
        is_divisible = leaf.shape[0] % mesh.shape.get("replica", leaf.shape[0] + 1) == 0
        spec = PartitionSpec("replica" if is_divisible else None, *spec)
    elif sharding is None and leaf.shape and leaf.shape[0] % mesh.size == 0:
        spec = PartitionSpec(mesh.axis_names)
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf), sharding=NamedSharding(mesh, spec))


def _convert(opt: so.ShardedOptimizer, base: TrainState) -> tuple[TrainState, str]:
    """Return a state of `opt` with the parameters and optimizer state of the base strategy, and a
    note for people.
    """
    new_state = opt.init(base.params)
    new_opt_state, opt_state = new_state.opt_state, base.opt_state
    note, reset_parts = "", []
    if isinstance(new_opt_state, Replicas):
        replicas = opt.mesh.shape["replica"]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, new_opt_state.optimizer.value)

        def copy_for_each(tree):
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), tree)

        copies = jax.jit(copy_for_each, out_shardings=shardings)(opt_state)
        opt_state = new_opt_state._replace(optimizer=PerReplica(copies))
        note = f", a copy for each of {replicas} replicas"
        if jax.tree.leaves(new_opt_state.outer):
            reset_parts.append("the outer optimizer")
    elif isinstance(new_opt_state, CompressedOptState):
        opt_state = new_opt_state._replace(optimizer=opt_state)
    if jax.tree.leaves(getattr(new_opt_state, "reducer", None)):
        reset_parts.append("the reducer")
    if reset_parts:
        note += f"; {' and '.join(reset_parts)} {'is' if len(reset_parts) == 1 else 'are'} reset"
    return new_state._replace(step=base.step, opt_state=opt_state, rng=base.rng), note
