"""Do a run again from its log, on one thread, bit for bit."""

import json

import jax
import numpy as np
import optax

from shardopt.core.block_model import LossFn
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.mesh import make_mesh
from shardopt.parameter_server.log import Header, Log, Positions
from shardopt.parameter_server.rules import Rule, from_config
from shardopt.parameter_server.run import BatchesOf, Compute
from shardopt.parameter_server.server import Server
from shardopt.parameter_server.updates import digest
from shardopt.parameter_server.worker import check_codec, sgd_spec
from shardopt.reducers import Reducer

WHO = "replay"


def replay(
    log: Log,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    params: PyTree,
    batches_of: BatchesOf,
    *,
    rule: Rule | None = None,
    reducer: Reducer | None = None,
) -> PyTree:
    """Return the parameters that a run ended with, by doing again what its log says, one event after the other.

    Each pull takes a batch, each push computes its gradient from the parameters of that pull, each event goes to the
    same pure server. The server must say of every event what the log says, and the checksums of the parameters before
    and after must be those of the run.

    **Equivalence**: bit for bit, on devices of the kind that the run had, where the loss is deterministic.

    Args:
      log: of `async_sgd(...).run` or `simulate`, or `Log.load(path)`.
      tx: the optimizer of the run.
      loss_fn: the loss of the run.
      params: the parameters that the run began with.
      batches_of: the data of the run: `batches_of(worker)` gives the same batches again; called at each join.
      rule: the rule of the run, if it is not one of `parameter_server.rules`, which the log knows itself.
      reducer: the reducer of the run, of which the log knows only the name.

    Returns:
      The parameters.

    Raises:
      TypeError: if `log` is not a `Log`, or another argument of the wrong kind.
      ValueError: if the parameters, the rule or the reducer are not those of the run, the batches end too soon, the
        server comes to another event than the log, or the result differs from that of the run.

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
    """
    check_log(log)
    header = log.header
    if "local_steps" in header:
        fix = "call opt.replay(log, params, batches_of) of the AsyncOptimizer that so.async_local_sgd returns."
        raise ValueError(format_error(WHO, "this is the log of a run of async_local_sgd.", fix=fix))
    _check_reducer(header.get("reducer"), reducer)
    spec = sgd_spec(
        WHO,
        tx,
        loss_fn,
        [make_mesh(data=size, devices=jax.local_devices()[:size]) for size in header["devices"]],
        max_staleness=header["max_staleness"],
        rule=_rule(header["rule"], rule),
        nonfinite=header["nonfinite"],
        reducer=reducer,
        sparse=header.get("sparse", ()),
        servers=header.get("servers", 1),
    )
    compute = spec.make_compute(batches_of, np.asarray(header["rng"], np.uint32))
    return replay_events(log, spec.make_server(donate=False), compute, params)


def check_log(log: Log) -> None:
    """Refuse what is not the log of a run with parameters."""
    if not isinstance(log, Log):
        what = f"log must be a parameter_server.Log, got {type(log).__name__}."
        raise TypeError(format_error(WHO, what, fix="pass result.log, or parameter_server.Log.load(path)."))
    if log.header.get("initial") is None:
        fix = "give simulate an optimizer, a loss, parameters and data."
        raise ValueError(format_error(WHO, "this is the log of a simulation of time only.", fix=fix))


def replay_events(log: Log, server: Server, compute: Compute, params: PyTree) -> PyTree:
    """Return the parameters that a log's events lead to, on one thread; `replay` says what is checked."""
    header = log.header
    state = server.init(compute.on_server(params))
    if digest(server.whole(state.params)) != header["initial"]:
        fix = "pass the same values in the same dtypes, or make them the same way."
        raise ValueError(format_error(WHO, "the parameters are not those that the run began with.", fix=fix))

    positions = Positions()
    steps: dict[int, tuple[PyTree, PyTree]] = {}
    for number, recorded in enumerate(log):
        worker = recorded.worker
        positions.record(recorded)
        if recorded.kind in ("join", "resume"):
            compute.begin(worker, positions.of(worker))
            steps.pop(worker, None)
            state, event = (server.join if recorded.kind == "join" else server.resume)(state, worker)
        elif recorded.kind == "pull":
            steps[worker] = (server.whole(state.params), _next(compute, worker, recorded.clock))
            state, event = server.pull(state, worker)
        elif recorded.kind == "leave":
            state, event = server.leave(state, worker)
        else:
            update = compute.update(worker, *steps.pop(worker), recorded.clock)
            state, event = server.push(state, worker, update, recorded.pulled)
        if event != recorded.without_times():
            what = f"event {number} of the log is {recorded.without_times()}, and the server comes to {event}."
            fix = "the log is damaged, or its data or loss is not that of the run."
            raise ValueError(format_error(WHO, what, fix=fix))
    if header["final"] is not None and digest(server.whole(state.params)) != header["final"]:
        what = "the parameters at the end are not those of the run, although they were the same at the start."
        fix = "pass the data, loss and optimizer of the run; devices of another kind round differently."
        raise ValueError(format_error(WHO, what, fix=fix))
    return server.whole(state.params)


def _next(compute: Compute, worker: int, clock: int) -> PyTree:
    batch = compute.next_batch(worker)
    if batch is None:
        what = f"batches_of({worker}) ended before step {clock} of worker {worker}."
        raise ValueError(format_error(WHO, what, fix="pass the data of the run."))
    return batch


def _check_reducer(recorded: str | None, given: Reducer | None) -> None:
    codec = check_codec(WHO, given)
    name = None if codec is None else codec.name
    if name != recorded:
        what = f"the run had {'no reducer' if recorded is None else f'the reducer {recorded}'}, got {name or 'none'}."
        raise ValueError(format_error(WHO, what, fix="pass the reducer of the run."))


def _rule(recorded: Header, given: Rule | None) -> Rule:
    name, config = recorded["name"], _as_json(recorded["config"])
    if given is None and (known := from_config(name, recorded["config"])) is not None:
        return known
    if given is None or (given.name, _as_json(given.config)) != (name, config):
        got = "none" if given is None else f"{given.name} {dict(given.config)}"
        what = f"the run had the rule {name} {recorded['config']}, got {got}."
        raise ValueError(format_error(WHO, what, fix="pass the rule of the run."))
    return given


def _as_json(config: Header) -> Header:
    return json.loads(json.dumps(dict(config)))
