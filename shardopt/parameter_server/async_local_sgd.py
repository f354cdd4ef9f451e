"""Asynchronous Local SGD: islands train independently, and push the change of their parameters."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core.arguments import check_count, is_integer
from shardopt.core.block_model import as_block_model
from shardopt.core.errors import format_error
from shardopt.core.types import Metric, PyTree, TrainState, Weighted, leaves_with_paths, wide_dtype
from shardopt.engine.config import check_optimizer
from shardopt.engine.metrics import combined
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.parameter_server.async_sgd import check_not_shared, check_servers
from shardopt.parameter_server.clock import check_max_staleness
from shardopt.parameter_server.fragments import Fragment, FragmentPlan, check_fragments
from shardopt.parameter_server.optimizer import AsyncOptimizer, ReplayFn, check_backend, make_run
from shardopt.parameter_server.ray_groups import gather_to_local_device
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.run import BatchesOf, Compute, RunSpec
from shardopt.parameter_server.server import make_server
from shardopt.parameter_server.streaming import Island, Streaming, check_streaming
from shardopt.parameter_server.updates import Update, finiteness, trained
from shardopt.parameter_server.worker import (
    Streams,
    WorkerCompressors,
    check_codec,
    check_sgd_params,
    codec_header,
    to_device,
)
from shardopt.reducers import Compressor, Reducer

CALLER = "async_local_sgd"

Devices = Sequence[jax.Device]
MakeIsland = Callable[[Devices], ShardedOptimizer]
"""`devices -> strategy`, called in the process of an island."""


def async_local_sgd(
    strategies: Sequence[ShardedOptimizer | MakeIsland],
    *,
    outer: optax.GradientTransformation | None = None,
    local_steps: int | Sequence[int],
    max_staleness: int | None = None,
    rule: Rule | None = None,
    reducer: Reducer | None = None,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    backend: str = "threads",
    nonfinite: str = "raise",
    devices: int = 1,
    hosts_per_island: int = 1,
    servers: int = 1,
    address: str | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
) -> AsyncOptimizer:
    """Train islands independently, and apply an outer optimizer to the change of each island when it arrives.

    Island i pulls the parameters theta. It takes H steps of its strategy on its own batches, which change theta to
    theta_i, and pushes Delta_i = theta - theta_i. The server does theta' <- theta' + outer.update(rule(Delta_i)), with
    its current parameters theta'. The island keeps its optimizer state and continues from the next pull.

    With P fragments, a delay or a mix this is Streaming DiLoCo. An island pushes after every H / P steps: push k has only
    fragment f = k mod P, with the same fragments as `diloco`. The island continues to train while the push travels. `delay`
    steps later it takes the server's current fragment: theta_f <- (1 - mix) theta'_f + mix theta_i,f. Each fragment has
    its own outer optimizer state. A pull has one fragment too; only the first pull has all.

    Args:
      strategies: the islands, from `ddp`, `zero`, `fsdp` or `hybrid`, each on its own devices. They train the same
        parameters; optimizers, meshes and micro-batches may differ. On Ray, for each island a function
        `devices -> strategy`, which is called in the island's process with its devices.
      outer: the outer optimizer, by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With several islands and no
        bound, stale changes enter its momentum one by one. Liu et al. then found that `optax.sgd(0.7)` with
        `rules.delayed_nesterov(every=n)` trains well.
      local_steps: H; or one number for each island, for instance from `rules.dynamic_local_steps`.
      max_staleness: the bound in pushes; None for no bound.
      rule: the treatment of late changes, from `parameter_server.rules`.
      fragments: P, the number of fragments, which are pushed one after another; divides H.
      delay: steps that an island takes while a push and its answer travel; below H / P. After these steps the island waits.
      mix: the share of its own parameters that an island keeps when it takes the server's, from 0 to 1.
      reducer: the encoding of changes on their way to the server, as for `async_sgd`.
      backend: "threads", with islands in this process; or "ray", with one process or several for each island.
      nonfinite: the treatment of changes that are not finite: "raise", which ends the run, or "skip".
      devices: on Ray, the number of devices of each process of an island.
      hosts_per_island: on Ray, the number of processes of each island, which join by `jax.distributed`. The island's
        function gets the devices of all of them. Only the first process talks to the server. An island that loses a
        process is restarted with all its processes.
      servers: n, the number of servers that parameters and the outer optimizer's state are sharded over, as for
        `async_sgd`; not with a reducer or fragments.
      address: the address of the Ray cluster, as for `async_sgd`.
      max_restarts: on Ray, how often each island is restarted.
      hang_timeout: on Ray, as for `async_sgd`. If one process of an island hangs, all its processes are killed.

    Returns:
      An `AsyncOptimizer`. `num_updates` of its `run` counts pushes. Each push takes H / P of the global batches of
      `batches_of(worker)`. `metrics["history"]` has the means over these steps of all metrics of the strategies. `so.Sum`
      is added up over the steps; `so.Max` and `so.Min` are the largest and the smallest.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if there are no islands, two islands share devices, a number is out of range, the backend is unknown, one
        sender cannot encode the reducer, or there are more fragments than blocks and leaves.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)
      >>> make = lambda devices: so.fsdp(optax.adam(0.02), so.make_mesh(devices=devices), loss_fn)
      >>> islands = [make(jax.devices()[:2]), make(jax.devices()[2:4])]
      >>> opt = so.async_local_sgd(islands, outer=optax.sgd(0.7), local_steps=5)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}
      >>> result = opt.run({"w": jnp.zeros(())}, lambda worker: iter([batch] * 400), num_updates=60)
      >>> result.metrics["stopped"], abs(float(result.params["w"]) - 1) < 0.1
      ('completed', True)

    **Equivalence**: with max_staleness=0 the changes of a round are averaged and applied once. The result is equal to
    `diloco` with `sync_every=local_steps` and the same fragments, delay and mix, up to summation order. Otherwise the
    result is equal to the replay of its own event log, bit for bit.

    **State**: an island that joins again begins with a fresh optimizer state. A loss with `rng` draws from a key that
    depends on the island and on the clock at which it joined.

    **Placement**: each island places its parameters by its strategy. The server keeps parameters and the outer optimizer's
    state, replicated, on the first device of the first island. With n servers each has 1/n of them. Server i is
    on the first device of island i modulo the number of islands.

    **Communication** for each push, every H / P steps: a fragment of the parameters to the island, and its change to the
    server, both during the next `delay` steps.

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024; Douillard et al., "DiLoCo: Distributed
      Low-Communication Training of Language Models", 2023; Douillard et al., "Streaming DiLoCo with overlapping
      communication", 2025.
    """
    check_max_staleness(CALLER, max_staleness)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    check_optimizer(CALLER, outer)
    check_backend(CALLER, backend, address, max_restarts, hang_timeout)
    check_count(CALLER, "devices", devices, minimum=1)
    check_count(CALLER, "hosts_per_island", hosts_per_island, minimum=1)
    if hosts_per_island > 1 and backend != "ray":
        problem = f"hosts_per_island={hosts_per_island} needs processes, and backend='threads' has one."
        raise ValueError(format_error(CALLER, problem, fix="use backend='ray', or leave hosts_per_island out."))
    devices_per_island = devices * hosts_per_island
    if backend == "ray":
        island_makers: Sequence[ShardedOptimizer | MakeIsland] = _check_makers(strategies)
        # These islands only serve to check the strategies and to get their meshes.
        islands = _check_islands(_local_islands(island_makers, jax.local_devices()[:devices_per_island]))
    else:
        island_makers = islands = _check_islands(strategies)
        check_not_shared(CALLER, [island.mesh for island in islands], "island")
    steps, codec = _check_local_steps(local_steps, len(islands)), check_codec(CALLER, reducer)
    check_streaming(CALLER, steps, fragments, delay, mix)
    streaming, is_streaming = None, (fragments, delay, mix) != (1, 0, 0)
    check_servers(CALLER, servers, {"reducer": reducer is not None, "fragments, delay or mix": is_streaming})
    if is_streaming:
        config = islands[0].config
        plan = FragmentPlan(int(fragments), as_block_model(config.loss_fn) is not None, tuple(config.frozen))
        streaming = Streaming(plan, int(delay), float(mix))
    spec = RunSpec(
        CALLER,
        len(islands),
        partial(
            make_server,
            outer,
            max_staleness=max_staleness,
            rule=rule,
            nonfinite=nonfinite,
            reducer=reducer,
            servers=servers,
            devices=[] if backend == "ray" or servers == 1 else [_first_local_device(island) for island in islands],
            fragments=None if streaming is None else streaming.fragments,
        ),
        partial(_make_compute, island_makers, devices_per_island, steps, codec, streaming),
        {"local_steps": steps, **codec_header(codec), **({} if streaming is None else streaming.header())},
        backend,
        devices=[int(devices)] * len(islands),
        address=address,
        max_restarts=int(max_restarts),
        hang_timeout=hang_timeout,
        check_params=partial(check_sgd_params, outer, rule, servers)
        if streaming is None
        else partial(check_fragments, streaming.fragments),
        servers=int(servers),
        hosts=int(hosts_per_island),
    )
    meshes = tuple(island.mesh for island in islands)
    return AsyncOptimizer(make_run(spec), ReplayFn(spec), meshes, outer, max_staleness, rule, backend)


def _local_islands(strategies: Sequence[ShardedOptimizer | MakeIsland], devices: Devices) -> list[ShardedOptimizer]:
    """Return the strategies; call the functions among them with devices of this process."""
    return [strategy if isinstance(strategy, ShardedOptimizer) else strategy(devices) for strategy in strategies]


def _make_compute(
    strategies: Sequence[ShardedOptimizer | MakeIsland],
    devices: int,
    local_steps: Sequence[int],
    codec: Compressor | None,
    streaming: Streaming | None,
    batches_of: BatchesOf,
    key: np.ndarray,
    worker: int | None = None,
) -> Compute:
    """Return islands that push theta - theta_i after H local steps: all islands, or one on all devices of its processes."""
    if worker is None:
        islands = dict(enumerate(_local_islands(strategies, jax.local_devices()[:devices])))
    else:
        islands = dict(zip([worker], _local_islands([strategies[worker]], jax.devices()), strict=True))
    fragments = 1 if streaming is None else streaming.fragments.num_fragments
    streams = Streams(CALLER, batches_of, [steps // fragments for steps in local_steps])
    compressors, server_device = WorkerCompressors(codec), _first_local_device(next(iter(islands.values())))

    def first_state(worker: int, params: PyTree, clock: int) -> TrainState:
        island_key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), worker)
        return islands[worker].init(_copy(params), jax.random.fold_in(island_key, clock))

    if streaming is not None:
        streaming_islands = {
            worker: Island(opt, streaming, _first_local_device(opt)) for worker, opt in islands.items()
        }
        return _streaming_compute(streaming, streaming_islands, first_state, streams, compressors, server_device)
    states: dict[int, TrainState | None] = {}

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        compressors.begin(worker)
        states[worker] = None  # an island that joins, or resumes from a checkpoint, has no optimizer state

    def update(worker: int, params: PyTree, batches: Sequence[PyTree], clock: int) -> Update:
        opt, state = islands[worker], states[worker]
        if state is None:
            state = first_state(worker, params, clock)
        else:
            state = state._replace(params=_placed(params, state.params))
        step_metrics = []
        for batch in batches:
            state, metrics = opt.step.with_kinds(state, batch)
            step_metrics.append(metrics)
        states[worker] = state
        device = _first_local_device(opt)
        end, step_metrics = jax.device_put(gather_to_local_device((state.params, step_metrics)), device)
        change, unchanged = _change(jax.device_put(params, device), end, step_metrics)
        _check_frozen(opt, params, unchanged)
        return jax.block_until_ready(to_device(compressors.encode(worker, change._replace(rows=1)), server_device))

    return Compute(begin, streams.next_batch, update, lambda tree: jax.device_put(tree, server_device))


def _streaming_compute(
    streaming: Streaming,
    islands: dict[int, Island],
    first_state: Callable[[int, PyTree, int], TrainState],
    streams: Streams,
    compressors: WorkerCompressors,
    server_device: Any,
) -> Compute:
    """Return islands that push fragment k mod P in round k, and take the previous fragment after `delay` steps of it."""
    count = streaming.fragments.num_fragments

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        for number in range(count):
            compressors.begin((worker, number))
        islands[worker].leave()

    def ahead(worker: int, batches: Sequence[PyTree]) -> None:
        if islands[worker].state is not None:
            islands[worker].step(batches[: streaming.delay])

    def update(worker: int, params: PyTree, batches: Sequence[PyTree], clock: int) -> Update:
        island, number = islands[worker], clock % count
        if island.state is None:
            island.join(first_state(worker, params, clock), params)
        else:
            island.step(
                batches[len(island.step_metrics) : streaming.delay]
            )  # for a replay, which does not call `ahead`
            island.merge((clock - 1) % count, params)
        island.step(batches[len(island.step_metrics) :])
        (start, start_frozen), (end, end_frozen), step_metrics = island.take_push(number)
        if changed := [path for path in start_frozen if not jnp.array_equal(start_frozen[path], end_frozen[path])]:
            _refuse_updated(changed)
        change, _ = _change(start, end, step_metrics)
        encoded = compressors.encode((worker, number), change._replace(rows=1))
        return jax.block_until_ready(to_device(encoded._replace(grads=Fragment(encoded.grads, number)), server_device))

    return Compute(begin, streams.next_batch, update, lambda tree: jax.device_put(tree, server_device), ahead)


def _first_local_device(opt: ShardedOptimizer) -> Any:
    """Return the island's first device that belongs to this process."""
    return next(device for device in opt.mesh.devices.flat if device.process_index == jax.process_index())


def _placed(params: PyTree, like: PyTree) -> PyTree:
    """Return a copy of the parameters with the placement of `like`; the next step takes over its memory."""
    if jax.process_count() == 1:
        return jax.device_put(_copy(params), jax.tree.map(lambda leaf: leaf.sharding, like))

    def place(leaf: jax.Array | np.ndarray, reference_leaf: jax.Array) -> jax.Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, reference_leaf.sharding, lambda index: values[index])

    return jax.tree.map(place, params, like)


@jax.jit
def _copy(params: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, params)


@jax.jit
def _change(
    start: PyTree, end: PyTree, step_metrics: list[dict[str, jax.Array | Metric]]
) -> tuple[Update, list[jax.Array]]:
    """Return the update, and for every leaf whether it is unchanged."""
    grads = jax.tree.map(jnp.subtract, trained(start), trained(end))
    metrics = {name: _over_steps([step[name] for step in step_metrics]) for name in step_metrics[0]}
    loss = metrics.pop("loss")
    assert isinstance(loss, Weighted)
    update = Update(grads, loss, metrics, None)
    pairs = zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)
    return update._replace(is_finite=finiteness(update)), [jnp.array_equal(a, b) for a, b in pairs]


def _over_steps(values: Sequence[jax.Array | Metric]) -> Metric:
    """Return a metric over several steps: combined as its kind (`Weighted`, `Sum`, `Max`, `Min`), else the mean."""
    if metrics := [value for value in values if isinstance(value, Metric)]:
        return reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), metrics)
    mean = jnp.stack([jnp.asarray(value, wide_dtype(jnp.asarray(value).dtype)) for value in values]).mean(0)
    return Weighted(mean, jnp.ones((), mean.dtype))


def _check_frozen(opt: ShardedOptimizer, params: PyTree, unchanged: Sequence[jax.Array]) -> None:
    """Refuse new values of frozen leaves: they are not pushed, so each island would have others, and the run would lose them."""
    frozen = FragmentPlan(1, stacked=False, frozen=tuple(opt.config.frozen)).untrained(params)
    pairs = zip(leaves_with_paths(params), unchanged, strict=True)
    if changed := [path for (path, _), is_unchanged in pairs if path in frozen and not is_unchanged]:
        _refuse_updated(changed)


def _refuse_updated(changed: list[str]) -> NoReturn:
    problem = "loss_fn returns so.Updated, for which islands have no common value."
    raise ValueError(format_error(CALLER, problem, changed, "train such leaves with ddp, zero, fsdp or diloco."))


def _check_islands(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[ShardedOptimizer]:
    fix = "pass a list of so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...), one an island."
    if isinstance(strategies, str | ShardedOptimizer) or not isinstance(strategies, Sequence):
        problem = f"strategies must be a sequence of synchronous strategies, got {type(strategies).__name__}."
        raise TypeError(format_error(CALLER, problem, fix=fix))
    if not strategies:
        raise ValueError(format_error(CALLER, "strategies must be at least 1, got none.", fix=fix))
    islands: list[ShardedOptimizer] = []
    for number, strategy in enumerate(strategies):
        if not isinstance(strategy, ShardedOptimizer) or strategy.config.local_updates is not None:
            got = strategy.config.strategy if isinstance(strategy, ShardedOptimizer) else type(strategy).__name__
            problem = f"strategies[{number}] must be a synchronous strategy, got {got}."
            raise TypeError(format_error(CALLER, problem, fix=fix))
        islands.append(strategy)
    return islands


def _check_makers(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[MakeIsland]:
    if isinstance(strategies, str | ShardedOptimizer) or not isinstance(strategies, Sequence) or not strategies:
        problem = f"on Ray strategies must be a sequence of functions, got {type(strategies).__name__}."
    elif not_functions := [maker for maker in strategies if isinstance(maker, tuple) or not callable(maker)]:
        problem = f"on Ray strategies must be functions, got {type(not_functions[0]).__name__}: devices cannot cross."
    else:
        return [maker for maker in strategies if not isinstance(maker, ShardedOptimizer)]
    fix = "pass [lambda devices: so.fsdp(tx, so.make_mesh(devices=devices), loss_fn)] * 4, for four islands."
    raise TypeError(format_error(CALLER, problem, fix=fix))


def _check_local_steps(local_steps: int | Sequence[int], num_islands: int) -> list[int]:
    if is_integer(local_steps):
        check_count(CALLER, "local_steps", local_steps, minimum=1)
        return [int(local_steps)] * num_islands
    if isinstance(local_steps, str) or not isinstance(local_steps, Sequence | np.ndarray):
        problem = f"local_steps must be an integer or one for each island, got {local_steps!r}"
        raise TypeError(f"{CALLER}: {problem} ({type(local_steps).__name__}).")
    if len(local_steps) != num_islands:
        problem = f"local_steps has {len(local_steps)} numbers for {num_islands} islands."
        raise ValueError(format_error(CALLER, problem, fix="pass one number, or one for each island."))
    for number, steps in enumerate(local_steps):
        check_count(CALLER, f"local_steps[{number}]", steps, minimum=1)
    return [int(steps) for steps in local_steps]
