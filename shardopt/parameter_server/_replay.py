"""Repeat a run from its log, on one thread, bit for bit."""

import json
from collections import Counter

import jax
import numpy as np
import optax

from shardopt.core._block_model import LossFn
from shardopt.core._errors import calling, format_error
from shardopt.core._types import PyTree
from shardopt.mesh import make_mesh
from shardopt.parameter_server._log import Header, Log
from shardopt.parameter_server._run import BatchesOf, WorkerCompute
from shardopt.parameter_server._server import ParameterServer, ServerSettings
from shardopt.parameter_server._updates import digest
from shardopt.parameter_server._worker import check_codec, sgd_spec
from shardopt.parameter_server.rules import StalenessRule, from_config
from shardopt.reducers import Reducer

CALLER = "replay"


@calling(CALLER)
def replay(
    log: Log,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    params: PyTree,
    batches_of: BatchesOf,
    *,
    rule: StalenessRule | None = None,
    reducer: Reducer | None = None,
) -> PyTree:
    """Return the final parameters of a run, by repeating the events of its log in order.

    Each pull takes a batch, each push computes its gradient from the parameters of its pull, and
    each event goes to the same pure server. The replay checks that the server makes the same events
    as the log, and that the checksums of the parameters before and after the run are the same.

    Args:
      log: the log of `async_sgd(...).run` or `simulate`, or `Log.load(path)`.
      tx: the optimizer of the run.
      loss_fn: the loss of the run.
      params: the initial parameters of the run.
      batches_of: the data of the run: `batches_of(worker)` returns the same batches again; it is
        called at each join.
      rule: the rule of the run. Rules of `parameter_server.rules` need not be passed: the log has
        their settings.
      reducer: the reducer of the run; the log has only its name.

    Returns:
      The parameters.

    Raises:
      TypeError: if `log` is not a `Log`, or another argument is of the wrong kind.
      ValueError: if the run had other parameters, another rule or another reducer, the batches end
        too soon, an event of the server differs from the log, or the result differs from the result
        of the run.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] - params["w"]) ** 2)
      >>> batches_of = lambda worker: ({"x": np.full(4, worker + i % 3, np.float32)} for i in range(100))
      >>> tx, params = optax.adam(0.1), {"w": jnp.zeros(4)}
      >>> opt = so.async_sgd(tx, loss_fn, workers=2, max_staleness=3)
      >>> result = opt.run(params, batches_of, num_updates=20)
      >>> again = so.parameter_server.replay(result.log, tx, loss_fn, params, batches_of)
      >>> bool((again["w"] == result.params["w"]).all())
      True

    **Equivalence**: bit for bit, if the loss is deterministic and the devices are of the same kind
    as in the run.
    """
    check_log(log)
    header = log.header
    if "local_steps" in header:
        fix = (
            "call opt.replay(log, params, batches_of) of the AsyncOptimizer that so.parameter_server.async_local_sgd"
            " returns."
        )
        raise ValueError(
            format_error(CALLER, "this is the log of a run of async_local_sgd.", fix=fix)
        )
    _check_reducer(header.get("reducer"), reducer)
    meshes = [
        make_mesh(data=size, devices=jax.local_devices()[:size]) for size in header["devices"]
    ]
    recorded_rule = _rule(header["rule"], rule)
    settings = ServerSettings(header["max_staleness"], recorded_rule, header["nonfinite"], reducer)
    spec = sgd_spec(CALLER, tx, loss_fn, meshes, settings)
    compute = spec.make_compute(batches_of, np.asarray(header["rng"], np.uint32))
    return replay_events(log, spec.make_server(donate=False), compute, params)


def check_log(log: Log) -> None:
    """Refuse an argument that is not a `Log`, and the log of a simulation without parameters."""
    if not isinstance(log, Log):
        problem = f"log must be a parameter_server.Log, got {type(log).__name__}."
        raise TypeError(
            format_error(
                CALLER, problem, fix="pass result.log, or parameter_server.Log.load(path)."
            )
        )
    if log.header.get("initial") is None:
        fix = "give simulate an optimizer, a loss, parameters and data."
        raise ValueError(
            format_error(CALLER, "this is the log of a simulation of time only.", fix=fix)
        )


def replay_events(
    log: Log, server: ParameterServer, compute: WorkerCompute, params: PyTree
) -> PyTree:
    """Return the parameters after the events of a log, computed on one thread.

    For the checks see `replay`.
    """
    header = log.header
    state = server.init(compute.on_server(params))
    if digest(state.params) != header["initial"]:
        fix = "pass the same values in the same dtypes, or make them the same way."
        raise ValueError(
            format_error(CALLER, "the parameters are not those that the run began with.", fix=fix)
        )

    positions: Counter[int] = Counter()
    steps: dict[int, tuple[PyTree, PyTree]] = {}
    for number, recorded in enumerate(log):
        worker = recorded.worker
        positions[worker] += recorded.ends_round
        if recorded.kind in ("join", "resume"):
            compute.begin(worker, positions[worker])
            steps.pop(worker, None)
            state, event = (server.join if recorded.kind == "join" else server.resume)(
                state, worker
            )
        elif recorded.kind == "pull":
            steps[worker] = (state.params, _next(compute, worker, recorded.clock))
            state, event = server.pull(state, worker)
        elif recorded.kind == "leave":
            state, event = server.leave(state, worker)
        else:
            update = compute.update(worker, *steps.pop(worker), recorded.clock)
            state, event = server.push(state, worker, update, recorded.pulled)
        if event != recorded.without_times():
            problem = (
                f"event {number} of the log is {recorded.without_times()}, and the server comes to"
                f" {event}."
            )
            fix = "the log is damaged, or its data or loss is not that of the run."
            raise ValueError(format_error(CALLER, problem, fix=fix))
    if header["final"] is not None and digest(state.params) != header["final"]:
        problem = (
            "the parameters at the end are not those of the run, although they were the same at the"
            " start."
        )
        fix = (
            "pass the data, loss and optimizer of the run; devices of another kind round"
            " differently."
        )
        raise ValueError(format_error(CALLER, problem, fix=fix))
    return state.params


def _next(compute: WorkerCompute, worker: int, clock: int) -> PyTree:
    batch = compute.next_batch(worker)
    if batch is None:
        problem = f"batches_of({worker}) ended before step {clock} of worker {worker}."
        raise ValueError(format_error(CALLER, problem, fix="pass the data of the run."))
    return batch


def _check_reducer(recorded: str | None, reducer: Reducer | None) -> None:
    codec = check_codec(reducer)
    name = None if codec is None else codec.name
    if name != recorded:
        problem = (
            f"the run had {'no reducer' if recorded is None else f'the reducer {recorded}'}, got"
            f" {name or 'none'}."
        )
        raise ValueError(format_error(CALLER, problem, fix="pass the reducer of the run."))


def _rule(recorded: Header, rule: StalenessRule | None) -> StalenessRule:
    """Return the rule of the run: the argument, or without one a rule of this package from its
    recorded settings.
    """
    name, config = recorded["name"], _as_json(recorded["config"])
    if rule is None and (recorded_rule := from_config(name, recorded["config"])) is not None:
        return recorded_rule
    if rule is None or (rule.name, _as_json(rule.config)) != (name, config):
        got = "none" if rule is None else f"{rule.name} {dict(rule.config)}"
        problem = f"the run had the rule {name} {recorded['config']}, got {got}."
        raise ValueError(format_error(CALLER, problem, fix="pass the rule of the run."))
    return rule


def _as_json(config: Header) -> Header:
    return json.loads(json.dumps(dict(config)))
