"""Asynchronous Local SGD: islands train independently, and push the change of their parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.config._check import check_optimizer
from shardopt.core import (
    Devices,
    PyTree,
    TrainState,
    calling,
    check_count,
    is_integer,
    type_error,
    value_error,
)
from shardopt.local_updates._build import check_synchronous
from shardopt.parameter_server._async_sgd import check_not_shared
from shardopt.parameter_server._clock import check_max_staleness
from shardopt.parameter_server._islands import Island, Islands, copy_params
from shardopt.parameter_server._optimizer import AsyncOptimizer, check_backend
from shardopt.parameter_server._run import BatchesOf, RunSpec, WorkerCompute
from shardopt.parameter_server._server import ServerSettings
from shardopt.parameter_server._worker import (
    Streams,
    WorkerCompressors,
    check_codec,
    check_sgd_params,
    codec_header,
)
from shardopt.parameter_server.rules import StalenessRule
from shardopt.reducers import Reducer
from shardopt.reducers._compressor import Compressor
from shardopt.step._optimizer import ShardedOptimizer

CALLER = "async_local_sgd"

MakeIsland = Callable[[Devices], ShardedOptimizer]
"""`devices -> strategy`, called in the process of an island."""


@calling(CALLER)
def async_local_sgd(
    strategies: Sequence[ShardedOptimizer | MakeIsland],
    *,
    outer: optax.GradientTransformation | None = None,
    local_steps: int | Sequence[int],
    max_staleness: int | None = None,
    rule: StalenessRule | None = None,
    reducer: Reducer | None = None,
    backend: str = "threads",
    nonfinite: str = "raise",
    devices: int = 1,
    address: str | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
) -> AsyncOptimizer:
    """Train islands independently, and apply an outer optimizer to the change of each island when
    it arrives.

    Island i pulls the parameters theta. It takes H steps of its strategy on its own batches, which
    change theta to theta_i, and pushes Delta_i = theta - theta_i. The server does theta' <- theta'
    + outer.update(rule(Delta_i)), with its current parameters theta'. The island keeps its
    optimizer state and continues from the next pull.

    Args:
      strategies: the islands, from `ddp`, `zero`, `fsdp` or `hybrid`, each on its own devices. They
        train the same parameters; optimizers, meshes and micro-batches may differ. On Ray, for each
        island a function `devices -> strategy`, which is called in the island's process with its
        devices.
      outer: the outer optimizer, by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With
        several islands and no bound, stale changes enter its momentum one by one. Liu et al. then
        found that `optax.sgd(0.7)` with `rules.delayed_nesterov(every=n)` trains well.
      local_steps: H; or one number for each island, for instance in proportion to its speed (Liu et
        al.), so that all push at about the same time.
      max_staleness: the bound in pushes; None for no bound.
      rule: the treatment of late changes, from `parameter_server.rules`.
      reducer: the encoding of changes on their way to the server, as for `async_sgd`.
      backend: "threads", with islands in this process; or "ray", with a process for each island.
      nonfinite: the treatment of changes that are not finite: "raise", which ends the run, or
        "skip".
      devices: on Ray, the number of devices of each island.
      address: the address of the Ray cluster, as for `async_sgd`.
      max_restarts: on Ray, how often each island is restarted.
      hang_timeout: on Ray, as for `async_sgd`.

    Returns:
      An `AsyncOptimizer`. `num_updates` of its `run` counts pushes. Each push takes H of the
      global batches of `batches_of(worker)`. `metrics["history"]` has the means over these steps of
      all metrics of the strategies. `so.losses.Sum` is added up over the steps; `so.losses.Max` and
      `so.losses.Min` are the largest and the smallest.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if there are no islands, two islands share devices, a number is out of range, the
        backend is unknown, or one sender cannot encode the reducer.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)
      >>> make = lambda devices: so.fsdp(optax.adam(0.02), so.make_mesh(devices=devices), loss_fn)
      >>> islands = [make(jax.devices()[:2]), make(jax.devices()[2:4])]
      >>> opt = so.parameter_server.async_local_sgd(islands, outer=optax.sgd(0.7), local_steps=5)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}
      >>> result = opt.run({"w": jnp.zeros(())}, lambda worker: iter([batch] * 400), num_updates=60)
      >>> result.metrics["stopped"], abs(float(result.params["w"]) - 1) < 0.1
      ('completed', True)

    **Equivalence**: with max_staleness=0 the changes of a round are averaged and applied once. The
    result is equal to `diloco` with `sync_every=local_steps`, up to summation order. Otherwise the result is equal to the replay of its own event log, bit for
    bit.

    **State**: an island that joins again begins with a fresh optimizer state. A loss with `rng`
    draws from a key that depends on the island and on the clock at which it joined.

    **Placement**: each island places its parameters by its strategy. The server keeps parameters
    and the outer optimizer's state, replicated, on the first device of the first island.

    **Communication** for each push, every H steps: the parameters to the island, and their change
    to the server.

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024; Douillard et al.,
      "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """
    check_max_staleness(max_staleness)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    check_optimizer(outer)
    check_backend(backend, address, max_restarts, hang_timeout)
    check_count("devices", devices, minimum=1)
    if backend == "ray":
        island_makers: Sequence[ShardedOptimizer | MakeIsland] = _check_makers(strategies)
        # These islands only serve to check the strategies and to get their meshes.
        islands = _check_islands(_local_islands(island_makers, jax.local_devices()[:devices]))
    else:
        island_makers = islands = _check_islands(strategies)
        check_not_shared([island.mesh for island in islands], "island")
    steps = _check_local_steps(local_steps, len(islands))
    codec = check_codec(reducer)
    settings = ServerSettings(max_staleness, rule, nonfinite, reducer)
    spec = RunSpec(
        CALLER,
        len(islands),
        settings.maker(outer),
        IslandsProblem(island_makers, devices, steps, codec).make_compute,
        {"local_steps": steps, **codec_header(codec)},
        backend,
        devices=[int(devices)] * len(islands),
        address=address,
        max_restarts=int(max_restarts),
        hang_timeout=hang_timeout,
        check_params=check_sgd_params,
    )
    meshes = tuple(island.mesh for island in islands)
    return AsyncOptimizer(spec, spec.make_server(donate=True), meshes, outer, max_staleness, rule)


def _local_islands(
    strategies: Sequence[ShardedOptimizer | MakeIsland], devices: Devices
) -> list[ShardedOptimizer]:
    """Return the strategies; call the functions among them with devices of this process."""
    return [
        strategy if isinstance(strategy, ShardedOptimizer) else strategy(devices)
        for strategy in strategies
    ]


@dataclass(frozen=True)
class IslandsProblem:
    """Islands that push theta - theta_i after H local steps, before they have data.

    Attributes:
      strategies: the islands, or on Ray the functions that make them.
      devices: the number of devices of an island on Ray.
      local_steps: H of each island.
      codec: the encoder of pushes, or None.
    """

    strategies: Sequence[ShardedOptimizer | MakeIsland]
    devices: int
    local_steps: Sequence[int]
    codec: Compressor | None

    def make_compute(
        self, batches_of: BatchesOf, key: np.ndarray, worker: int | None = None
    ) -> WorkerCompute:
        """Return all islands; or with `worker` one of them, on all devices of its processes."""
        if worker is None:
            islands = dict(
                enumerate(_local_islands(self.strategies, jax.local_devices()[: self.devices]))
            )
        else:
            islands = dict(
                zip([worker], _local_islands([self.strategies[worker]], jax.devices()), strict=True)
            )

        def first_state(worker: int, params: PyTree, clock: int) -> TrainState:
            island_key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), worker)
            return islands[worker].init(copy_params(params), jax.random.fold_in(island_key, clock))

        streams = Streams(CALLER, batches_of, self.local_steps)
        made_islands = {worker: Island(opt) for worker, opt in islands.items()}
        return Islands(made_islands, first_state, streams, WorkerCompressors(self.codec)).compute()


def _check_islands(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[ShardedOptimizer]:
    fix = "pass a list of so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...), one an island."
    if isinstance(strategies, str | ShardedOptimizer) or not isinstance(strategies, Sequence):
        problem = (
            "strategies must be a sequence of synchronous strategies, got"
            f" {type(strategies).__name__}."
        )
        raise type_error(problem, fix=fix)
    if not strategies:
        raise value_error("strategies must be at least 1, got none.", fix=fix)
    return [
        check_synchronous(strategy, f"strategies[{number}] must be a synchronous strategy", fix)
        for number, strategy in enumerate(strategies)
    ]


def _check_makers(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[MakeIsland]:
    if (
        isinstance(strategies, str | ShardedOptimizer)
        or not isinstance(strategies, Sequence)
        or not strategies
    ):
        problem = (
            f"on Ray strategies must be a sequence of functions, got {type(strategies).__name__}."
        )
    elif not_functions := [
        maker for maker in strategies if isinstance(maker, tuple) or not callable(maker)
    ]:
        problem = (
            f"on Ray strategies must be functions, got {type(not_functions[0]).__name__}: devices"
            " cannot cross."
        )
    else:
        return [maker for maker in strategies if not isinstance(maker, ShardedOptimizer)]
    fix = (
        "pass [lambda devices: so.fsdp(tx, so.make_mesh(devices=devices), loss_fn)] * 4, for four"
        " islands."
    )
    raise type_error(problem, fix=fix)


def _check_local_steps(local_steps: int | Sequence[int], num_islands: int) -> list[int]:
    if is_integer(local_steps):
        check_count("local_steps", local_steps, minimum=1)
        return [int(local_steps)] * num_islands
    if isinstance(local_steps, str) or not isinstance(local_steps, Sequence | np.ndarray):
        problem = f"local_steps must be an integer or one for each island, got {local_steps!r}"
        raise TypeError(f"{CALLER}: {problem} ({type(local_steps).__name__}).")
    if len(local_steps) != num_islands:
        problem = f"local_steps has {len(local_steps)} numbers for {num_islands} islands."
        raise value_error(problem, fix="pass one number, or one for each island.")
    for number, steps in enumerate(local_steps):
        check_count(f"local_steps[{number}]", steps, minimum=1)
    return [int(steps) for steps in local_steps]
