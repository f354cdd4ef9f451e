"""An asynchronous run in virtual time: the same server, and workers that are only numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from shardopt.core.arguments import check_count
from shardopt.core.errors import complaint
from shardopt.core.types import LossFn, PyTree
from shardopt.parameter_server.arguments import check_number
from shardopt.parameter_server.compute import key_data, make_compute, no_compute
from shardopt.parameter_server.encoder import check_encoding
from shardopt.parameter_server.play import Play
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.run import AsyncResult, Run
from shardopt.parameter_server.server import make_server
from shardopt.parameter_server.simulated_worker import SimulatedWorker, simulated_workers
from shardopt.parameter_server.trainable import check_params, trained
from shardopt.parameter_server.workers import worker_meshes
from shardopt.reducers import Reducer

WHO = "simulate"


def simulate(
    workers: int | Sequence[SimulatedWorker],
    *,
    max_staleness: int | None = 0,
    num_updates: int | None = None,
    until: float = math.inf,
    rule: Rule | None = None,
    reducer: Reducer | None = None,
    nonfinite: str = "raise",
    message_bytes: float | None = None,
    server_seconds: float = 0.0,
    seed: int = 0,
    tx: optax.GradientTransformation | None = None,
    loss_fn: LossFn | None = None,
    params: PyTree = None,
    batches_of: Callable[[int], Iterable[Any]] | None = None,
    rng: jax.Array | None = None,
) -> AsyncResult:
    """Play an asynchronous run in virtual time, event by event, on the very server that real workers use.

    A worker pulls (latency + message_bytes / bandwidth), computes (step_seconds), sends its push (latency and bytes
    again), which the server takes in the order of arrival, server_seconds each; then it asks for its next step, and
    waits while the staleness bound says so. Ties in time go in the order in which they were scheduled.

    With `tx`, `loss_fn`, `params` and `batches_of` the mathematics is done too, for real, on one thread; without them
    it is about time only, and thousands of workers take seconds.

    **Equivalence**: the same arguments give the same log. A run on threads or a cluster whose events come in this
    order gives these parameters, bit for bit.

    Args:
      workers: the workers, or how many equal ones with steps of one second.
      max_staleness: as for `async_sgd`, in clocks; None for no bound.
      num_updates: stop when this many updates have been applied; with max_staleness=0 an update is a whole clock.
      until: stop at this virtual time, in seconds.
      rule: a staleness rule.
      reducer: as for `async_sgd`.
      nonfinite: as for `make_server`.
      message_bytes: size of a pull and of a push; by default that of the parameters, of a push as the reducer encodes
        them, or 0 without parameters.
      server_seconds: how long the server is busy with a push.
      seed: of the durations; each worker draws from a generator of its own.
      tx: the optimizer, for real mathematics.
      loss_fn: the loss, as for `async_sgd`.
      params: the parameters to start from.
      batches_of: `batches_of(worker)` gives its batches, anew at each join. A worker without batches leaves.
      rng: a random key for losses that take one.

    Returns:
      An `AsyncResult`, its times in virtual seconds.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if a number is out of range, neither `num_updates` nor a finite `until` says when to stop, or only
        some of `tx`, `loss_fn`, `params` and `batches_of` are given.
      NonFiniteUpdateError: as the server raises it.

    Example:
      >>> workers = [SimulatedWorker()] * 3 + [SimulatedWorker(step_seconds=4.0)]
      >>> waiting, free = (simulate(workers, max_staleness=s, until=400.0).metrics for s in (0, None))
      >>> waiting["pushes_per_second"], free["pushes_per_second"]
      (1.0, 3.25)
    """
    specs = simulated_workers(WHO, workers)
    _check(num_updates, until, message_bytes, server_seconds, seed)
    given = {"tx": tx, "loss_fn": loss_fn, "params": params, "batches_of": batches_of}
    code = check_encoding(WHO, reducer)
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing for real mathematics."
        raise ValueError(complaint(WHO, what, fix="pass tx, loss_fn, params and batches_of, or none of them."))
    if tx is None or batches_of is None:
        compute = no_compute()
    else:
        here = worker_meshes(WHO, [jax.local_devices()[0]] * len(specs))
        compute = make_compute(WHO, tx, loss_fn, here, batches_of, key_data(WHO, rng), code=code)
        check_params(WHO, params)
        params = compute.on_server(params)
    if message_bytes is None:
        pull_bytes = push_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        push_bytes = push_bytes if code is None or params is None else code.nbytes(trained(params))
    else:
        pull_bytes = push_bytes = message_bytes
    server = make_server(tx, max_staleness=max_staleness, rule=rule, nonfinite=nonfinite, reducer=reducer)
    transfers = [(spec.transfer_seconds(pull_bytes), spec.transfer_seconds(push_bytes)) for spec in specs]
    play = Play(specs, transfers, lambda now: Run(server, params, compute.header, now), compute, server_seconds, seed)
    return play.run.finish(play.until(num_updates, until))


def _check(num_updates: Any, until: Any, message_bytes: Any, server_seconds: Any, seed: Any) -> None:
    if num_updates is not None:
        check_count(WHO, "num_updates", num_updates, least=0)
    if until != math.inf:
        check_number(WHO, "until", until)
    elif num_updates is None:
        fix = "pass num_updates, or until in seconds."
        raise ValueError(complaint(WHO, "nothing says when to stop.", fix=fix))
    if message_bytes is not None:
        check_number(WHO, "message_bytes", message_bytes)
    check_number(WHO, "server_seconds", server_seconds)
    check_count(WHO, "seed", seed, least=0)
