"""A run as a checkpoint: parameters and optimizer state as a train state, clocks and log beside them."""

import base64
import io
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import CheckpointError, format_error
from shardopt.core.types import PyTree, TrainState
from shardopt.parameter_server.clock import PersistentMap, make_clock
from shardopt.parameter_server.log import Log
from shardopt.parameter_server.run import Run
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.state import ServerState


class Snapshot(NamedTuple):
    """A run right after an update: what `restore_run` goes on from.

    Attributes:
      state: `step` is the version, `opt_state` has the states of the optimizer and of the rule.
      about: clocks, log and history, as JSON.
    """

    state: TrainState
    about: dict[str, Any]


def snapshot(run: Run) -> Snapshot:
    """Copy a run right after an update, when no push waits for others.

    The optimizer's state is copied, because the next update takes over its memory; parameters are not.
    """
    state, clock = run.state, run.state.clock
    if state.waiting:
        raise AssertionError("a snapshot is taken right after an update, when no push waits")
    copied = jax.tree.map(jnp.copy, {"optimizer": state.opt_state, "rule": state.rule_state})
    train_state = TrainState(np.int32(state.version), state.params, copied, np.zeros(2, np.uint32))
    about = {
        "header": run.log.header,
        "steps": sorted(clock.steps.items()),
        "fastest": clock.fastest,
        "slowest": clock.slowest,
        "unsent": sorted((worker, float(value)) for worker, value in run.unsent.items()),
        "arrays": _pack(run),
    }
    return Snapshot(train_state, about)


def restore_run(who: str, run: Run, found: Snapshot) -> None:
    """Let a run, which is new, go on from a snapshot.

    Raises:
      ValueError: if the settings of the run are others than those of the snapshot's.
    """
    state, about = found
    header = about["header"]
    _check_header(who, header, run.log.header)
    clock = make_clock(run.server.max_staleness)._replace(
        slowest=about["slowest"], fastest=about["fastest"], counts=_counts(at for _, at in about["steps"])
    )
    steps: PersistentMap[int] = PersistentMap()
    for worker, at in about["steps"]:
        steps = steps.put(worker, at)
    log, history = _unpack(about["arrays"], {**header, **_devices(header, run.log.header)})
    optimizer, rule = state.opt_state["optimizer"], state.opt_state["rule"]
    restored = ServerState(state.params, optimizer, rule, int(state.step), clock._replace(steps=steps))
    run.restore(restored, log, history, dict(about.get("unsent", ())))


def load_snapshot(who: str, checkpoints: Any, server: Server, params: PyTree, step: int | None = None) -> Snapshot:
    """Read a snapshot from `Checkpoints`, onto the device of the parameters.

    Raises:
      CheckpointError: if it cannot be read, or is of another kind of run. It is a ValueError.
    """

    def first(params: PyTree) -> TrainState:
        begun = server.init(params)
        states = {"optimizer": begun.opt_state, "rule": begun.rule_state}
        return TrainState(jnp.int32(0), begun.params, states, jnp.zeros(2, jnp.uint32))

    state = jax.eval_shape(first, params)
    (device,) = jax.tree.leaves(params)[0].devices()
    here = jax.sharding.SingleDeviceSharding(device)
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), state)
    found, extra = checkpoints.restore(SimpleNamespace(abstract_state=lambda *_: target), step=step)
    if "server" not in extra:
        what = f"the checkpoints in {checkpoints.directory} are not of an asynchronous run."
        raise CheckpointError(format_error(who, what, fix="choose another folder."))
    return Snapshot(found, extra["server"])


def _check_header(who: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    ignored = ("initial", "final", "devices")  # the parameters of the caller are not used
    names = [name for name in {**saved, **mine} if name not in ignored]
    others = [
        f"{name}: {saved.get(name)} in the checkpoint, {mine.get(name)} now"
        for name in names
        if saved.get(name) != mine.get(name)
    ]
    devices = list(zip(saved.get("devices") or [], mine.get("devices") or [], strict=False))
    others += [f"devices of worker {i}: {a} then, {b} now" for i, (a, b) in enumerate(devices) if a != b]
    if others:
        what = "the checkpoint is of a run with other settings."
        raise ValueError(format_error(who, what, others, "use the same settings, or another folder."))


def _devices(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    return {"devices": max(saved["devices"], mine["devices"], key=len)} if "devices" in saved else {}


def _counts(clocks: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for at in clocks:
        counts[at] = counts.get(at, 0) + 1
    return counts


def _pack(run: Run) -> str:
    """Return log and history as text: 15 to 20 bytes an event."""
    rows = jax.device_get(run.history())
    history = {name: np.asarray([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    columns: dict[str, Any] = {  # a file of numpy knows no bfloat16
        f"history/{name}": column.astype(np.float32) if column.dtype.kind == "V" else column
        for name, column in history.items()
    }
    file = io.BytesIO()
    columns |= {f"log/{name}": value for name, value in run.log.columns().items()}
    np.savez_compressed(file, **columns)
    return base64.b64encode(file.getvalue()).decode()


def _unpack(text: str, header: dict[str, Any]) -> tuple[Log, Sequence[Mapping[str, Any]]]:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
        arrays = dict(file)
    log = Log.from_columns(header, {name[4:]: value for name, value in arrays.items() if name.startswith("log/")})
    history = {name[8:]: value for name, value in arrays.items() if name.startswith("history/")}
    length = len(next(iter(history.values()), ()))
    return log, [{name: value[i] for name, value in history.items()} for i in range(length)]
