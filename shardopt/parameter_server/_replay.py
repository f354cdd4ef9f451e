"""Repeat a run from its log, on one thread, bit for bit."""

from collections import Counter

from shardopt.core._errors import type_error, value_error
from shardopt.core._types import PyTree
from shardopt.parameter_server._log import Log
from shardopt.parameter_server._run import WorkerCompute
from shardopt.parameter_server._server import ParameterServer
from shardopt.parameter_server._updates import digest


def check_log(log: Log, num_workers: int) -> None:
    """Refuse an argument that is not a `Log`, the log of a simulation without parameters, and the log
    of more workers than there are.
    """
    if not isinstance(log, Log):
        problem = f"log must be a parameter_server.Log, got {type(log).__name__}."
        raise type_error(problem, fix="pass result.log, or parameter_server.Log.load(path).")
    if log.header.get("initial") is None:
        fix = "give simulate an optimizer, a loss, parameters and data."
        raise value_error("this is the log of a simulation of time only.", fix=fix)
    needed = 1 + max((event.worker for event in log), default=0)
    if needed > num_workers:
        problem = f"the run had {needed} workers, and this optimizer has {num_workers}."
        raise value_error(problem, fix="make it for the workers of the run.")


def replay_events(
    log: Log, server: ParameterServer, compute: WorkerCompute, params: PyTree
) -> PyTree:
    """Return the parameters after the events of a log, computed on one thread.

    For the checks see `AsyncOptimizer.replay`.
    """
    header = log.header
    state = server.init(compute.on_server(params))
    if digest(state.params) != header["initial"]:
        fix = "pass the same values in the same dtypes, or make them the same way."
        raise value_error("the parameters are not those that the run began with.", fix=fix)

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
            raise value_error(problem, fix=fix)
    if header["final"] is not None and digest(state.params) != header["final"]:
        problem = (
            "the parameters at the end are not those of the run, although they were the same at the"
            " start."
        )
        fix = (
            "pass the data, loss and optimizer of the run; devices of another kind round"
            " differently."
        )
        raise value_error(problem, fix=fix)
    return state.params


def _next(compute: WorkerCompute, worker: int, clock: int) -> PyTree:
    batch = compute.next_batch(worker)
    if batch is None:
        problem = f"batches_of({worker}) ended before step {clock} of worker {worker}."
        raise value_error(problem, fix="pass the data of the run.")
    return batch
