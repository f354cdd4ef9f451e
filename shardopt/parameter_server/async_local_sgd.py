"""Asynchronous Local SGD: islands train by themselves, and push how far they have come."""

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
from shardopt.parameter_server.fragments import Fragments, Part, check_fragments
from shardopt.parameter_server.optimizer import AsyncOptimizer, ReplayFn, check_backend, make_run
from shardopt.parameter_server.ray_groups import on_this_process
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
    make_compressors,
    to_device,
)
from shardopt.reducers import Compressor, Reducer

WHO = "async_local_sgd"

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
    """Let islands train by themselves, and apply an outer optimizer to each one's change as it comes.

    Island i pulls the parameters theta, takes H steps of its strategy on batches of its own to theta_i, and pushes
    Delta_i = theta - theta_i; the server does theta' <- theta' + outer.update(rule(Delta_i)) with the theta' that it has
    by then. The island keeps its optimizer state and goes on from what it pulls next.

    With P fragments, a delay or a mix it is Streaming DiLoCo: push k of an island, after every H / P steps, is of fragment
    f = k mod P alone, dealt out as by `diloco`. The island goes on while that travels, and `delay` steps later takes the
    fragment as the server has it by then, theta_f <- (1 - mix) theta'_f + mix theta_i,f. Each fragment has an outer
    optimizer state of its own. A pull then brings one fragment too, but for the first, which brings all.

    **Equivalence**: with max_staleness=0, where the changes of a round are averaged and applied once, equal to `diloco`
    with `sync_every=local_steps` and the same fragments, delay and mix, up to summation order. Otherwise equal to its own event log, replayed, bit for bit.

    **Placement**: on an island as its strategy says. The server keeps parameters and the outer optimizer's state,
    replicated, on the first device of the first island; of n servers each has 1/n of them, on that of the next in turn.

    **Communication** for each push, once every H / P steps: a fragment of the parameters one way, its change the other,
    both during the next `delay` steps.

    Args:
      strategies: the islands, from `ddp`, `zero`, `fsdp` or `hybrid`, each on devices of its own. They train the same
        parameters; optimizers, meshes and micro-batches may differ. On Ray, for each a function `devices -> strategy`,
        called in the island's process with its devices.
      outer: the outer optimizer, by default `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With several islands and no
        bound, stale changes enter its momentum one by one: then `optax.sgd(0.7)` with `rules.delayed_nesterov(every=n)`
        is what Liu et al. found to train well.
      local_steps: H, or one for each island, for instance from `rules.dynamic_local_steps`.
      max_staleness: in pushes; None for no bound.
      rule: what to do about late changes, from `parameter_server.rules`.
      fragments: P, how many parts the parameters are pushed in, one after another; divides H.
      delay: steps that an island takes while a push and its answer travel; below H / P. It waits only for what takes longer.
      mix: the share of its own parameters that an island keeps when it takes the server's, from 0 to 1.
      reducer: how changes are encoded on their way; as for `async_sgd`, like `backend`, `address` and `max_restarts`.
      backend: "threads", islands in this process; or "ray", each a process of its own, or several.
      nonfinite: what to do about changes that are not finite: "raise", which ends the run, or "skip".
      devices: on Ray, how many devices each process of an island has.
      hosts_per_island: on Ray, of how many processes an island is made, which join by `jax.distributed`; its function gets the
        devices of all of them. The first alone talks to the server. An island that loses one is started again as a whole.
      servers: n, over how many servers parameters and the outer optimizer's state are sharded, as of `async_sgd`; not with
        a reducer or fragments.
      address: of the Ray cluster.
      max_restarts: on Ray, for each island.
      hang_timeout: on Ray, as for `async_sgd`: an island is ended as a whole, whichever of its processes stands still.

    Returns:
      An `AsyncOptimizer`. `num_updates` of its `run` counts pushes, of which each takes H / P of the global batches that
      `batches_of(worker)` gives. An island that joins again begins with a fresh optimizer state. A loss with `rng`
      draws from a key of the island and of the clock at which it joined. `metrics["history"]` has the means over H
      steps of all that the strategies' steps return; `so.Sum` adds up over them, `so.Max` and `so.Min` take the largest
      and the smallest.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if there are no islands, two share devices, a number is out of range, the backend unknown, the
        reducer cannot be encoded by one sender, or there are more fragments than blocks and leaves.

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

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024; Douillard et al., "DiLoCo: Distributed
      Low-Communication Training of Language Models", 2023; Douillard et al., "Streaming DiLoCo with overlapping
      communication", 2025.
    """
    check_max_staleness(WHO, max_staleness)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    check_optimizer(WHO, outer)
    check_backend(WHO, backend, address, max_restarts, hang_timeout)
    check_count(WHO, "devices", devices, least=1)
    check_count(WHO, "hosts_per_island", hosts_per_island, least=1)
    if hosts_per_island > 1 and backend != "ray":
        what = f"hosts_per_island={hosts_per_island} needs processes, and backend='threads' has one."
        raise ValueError(format_error(WHO, what, fix="use backend='ray', or leave hosts_per_island out."))
    everywhere = devices * hosts_per_island
    if backend == "ray":
        members: Sequence[ShardedOptimizer | MakeIsland] = _check_makers(strategies)
        islands = _check_islands(
            _islands_here(members, jax.local_devices()[:everywhere])
        )  # to check them, and for their meshes
    else:
        members = islands = _check_islands(strategies)
        check_not_shared(WHO, [one.mesh for one in islands], "island")
    steps, codec = _check_local_steps(local_steps, len(islands)), check_codec(WHO, reducer)
    check_streaming(WHO, steps, fragments, delay, mix)
    streaming, is_streaming = None, (fragments, delay, mix) != (1, 0, 0)
    check_servers(WHO, servers, {"reducer": reducer is not None, "fragments, delay or mix": is_streaming})
    if is_streaming:
        config = islands[0].config
        dealt = Fragments(int(fragments), as_block_model(config.loss_fn) is not None, tuple(config.frozen))
        streaming = Streaming(dealt, int(delay), float(mix))
    spec = RunSpec(
        WHO,
        len(islands),
        partial(
            make_server,
            outer,
            max_staleness=max_staleness,
            rule=rule,
            nonfinite=nonfinite,
            reducer=reducer,
            servers=servers,
            devices=[] if backend == "ray" or servers == 1 else [_first_here(one) for one in islands],
            fragments=None if streaming is None else streaming.fragments,
        ),
        partial(_make_compute, members, everywhere, steps, codec, streaming),
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
    meshes = tuple(one.mesh for one in islands)
    return AsyncOptimizer(make_run(spec), ReplayFn(spec), meshes, outer, max_staleness, rule, backend)


def _islands_here(strategies: Sequence[ShardedOptimizer | MakeIsland], here: Devices) -> list[ShardedOptimizer]:
    """Return strategies on devices of this process, also of islands that have a process of their own."""
    return [one if isinstance(one, ShardedOptimizer) else one(here) for one in strategies]


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
    """Return islands that push theta - theta_i after H local steps: all, or one on all devices of its processes."""
    if worker is None:
        islands = dict(enumerate(_islands_here(strategies, jax.local_devices()[:devices])))
    else:
        islands = dict(zip([worker], _islands_here([strategies[worker]], jax.devices()), strict=True))
    fragments = 1 if streaming is None else streaming.fragments.num_fragments
    streams = Streams(WHO, batches_of, [steps // fragments for steps in local_steps])
    compressors, home = make_compressors(codec), _first_here(next(iter(islands.values())))

    def first_state(worker: int, params: PyTree, clock: int) -> TrainState:
        own = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), worker)
        return islands[worker].init(_copy(params), jax.random.fold_in(own, clock))

    if streaming is not None:
        there = {worker: Island(opt, streaming, _first_here(opt)) for worker, opt in islands.items()}
        return _streaming_compute(streaming, there, first_state, streams, compressors, home)
    states: dict[int, TrainState | None] = {}

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        compressors.begin(worker)
        states[worker] = None  # whoever joins or goes on after a restore has no optimizer state

    def update(worker: int, params: PyTree, batches: Sequence[PyTree], clock: int) -> Update:
        opt, state = islands[worker], states[worker]
        if state is None:
            state = first_state(worker, params, clock)
        else:
            state = state._replace(params=_placed(params, state.params))
        found = []
        for batch in batches:
            state, metrics = opt.step.with_kinds(state, batch)
            found.append(metrics)
        states[worker] = state
        first = _first_here(opt)
        end, found = jax.device_put(on_this_process((state.params, found)), first)
        change, unchanged = _change(jax.device_put(params, first), end, found)
        _check_frozen(opt, params, unchanged)
        return jax.block_until_ready(to_device(compressors.encode(worker, change._replace(rows=1)), home))

    return Compute(begin, streams.next_batch, update, lambda tree: jax.device_put(tree, home))


def _streaming_compute(
    streaming: Streaming,
    islands: dict[int, Island],
    first_state: Callable[[int, PyTree, int], TrainState],
    streams: Streams,
    compressors: WorkerCompressors,
    home: Any,
) -> Compute:
    """Return islands that push fragment k mod P in their round k, and take that of the round before in the midst of it."""
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
            island.step(batches[len(island.found) : streaming.delay])  # in a replay, where nothing was done ahead
            island.merge((clock - 1) % count, params)
        island.step(batches[len(island.found) :])
        (start, frozen), (end, still), found = island.ends(number)
        if changed := [path for path in frozen if not jnp.array_equal(frozen[path], still[path])]:
            _refuse_updated(changed)
        change, _ = _change(start, end, found)
        encoded = compressors.encode((worker, number), change._replace(rows=1))
        return jax.block_until_ready(to_device(encoded._replace(grads=Part(encoded.grads, number)), home))

    return Compute(begin, streams.next_batch, update, lambda tree: jax.device_put(tree, home), ahead)


def _first_here(opt: ShardedOptimizer) -> Any:
    """Return the first device of an island that belongs to this process."""
    return next(device for device in opt.mesh.devices.flat if device.process_index == jax.process_index())


def _placed(params: PyTree, like: PyTree) -> PyTree:
    """Return a copy of parameters, placed as others are: the next step takes over its memory."""
    if jax.process_count() == 1:
        return jax.device_put(_copy(params), jax.tree.map(lambda leaf: leaf.sharding, like))

    def place(leaf: jax.Array | np.ndarray, other: jax.Array) -> jax.Array:
        rows = np.asarray(leaf)
        return jax.make_array_from_callback(rows.shape, other.sharding, lambda index: rows[index])

    return jax.tree.map(place, params, like)


@jax.jit
def _copy(params: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, params)


@jax.jit
def _change(start: PyTree, end: PyTree, found: list[dict[str, jax.Array | Metric]]) -> tuple[Update, list[jax.Array]]:
    """Return the update, and for every leaf whether it is as it was."""
    grads = jax.tree.map(jnp.subtract, trained(start), trained(end))
    metrics = {name: _over_steps([one[name] for one in found]) for name in found[0]}
    loss = metrics.pop("loss")
    assert isinstance(loss, Weighted)
    update = Update(grads, loss, metrics, None)
    pairs = zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)
    return update._replace(is_finite=finiteness(update)), [jnp.array_equal(a, b) for a, b in pairs]


def _over_steps(found: Sequence[jax.Array | Metric]) -> Metric:
    """Return a metric of several steps: their sum, largest or smallest where it says so, else their mean."""
    if kinds := [one for one in found if isinstance(one, Metric)]:
        return reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), kinds)
    mean = jnp.stack([jnp.asarray(value, wide_dtype(jnp.asarray(value).dtype)) for value in found]).mean(0)
    return Weighted(mean, jnp.ones((), mean.dtype))


def _check_frozen(opt: ShardedOptimizer, params: PyTree, unchanged: Sequence[jax.Array]) -> None:
    """Refuse new values of frozen leaves: islands have no common value for them, and they would be lost."""
    frozen = Fragments(1, stacked=False, frozen=tuple(opt.config.frozen)).untrained(params)
    pairs = zip(leaves_with_paths(params), unchanged, strict=True)
    if changed := [path for (path, _), same in pairs if path in frozen and not same]:
        _refuse_updated(changed)


def _refuse_updated(changed: list[str]) -> NoReturn:
    what = "loss_fn returns so.Updated, for which islands have no common value."
    raise ValueError(format_error(WHO, what, changed, "train such leaves with ddp, zero, fsdp or diloco."))


def _check_islands(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[ShardedOptimizer]:
    fix = "pass a list of so.ddp(...), so.zero(...), so.fsdp(...) or so.hybrid(...), one an island."
    if isinstance(strategies, str | ShardedOptimizer) or not isinstance(strategies, Sequence):
        what = f"strategies must be a sequence of synchronous strategies, got {type(strategies).__name__}."
        raise TypeError(format_error(WHO, what, fix=fix))
    if not strategies:
        raise ValueError(format_error(WHO, "strategies must be at least 1, got none.", fix=fix))
    islands: list[ShardedOptimizer] = []
    for number, one in enumerate(strategies):
        if not isinstance(one, ShardedOptimizer) or one.config.local_updates is not None:
            given = one.config.strategy if isinstance(one, ShardedOptimizer) else type(one).__name__
            what = f"strategies[{number}] must be a synchronous strategy, got {given}."
            raise TypeError(format_error(WHO, what, fix=fix))
        islands.append(one)
    return islands


def _check_makers(strategies: Sequence[ShardedOptimizer | MakeIsland]) -> list[MakeIsland]:
    if isinstance(strategies, str | ShardedOptimizer) or not isinstance(strategies, Sequence) or not strategies:
        what = f"on Ray strategies must be a sequence of functions, got {type(strategies).__name__}."
    elif strange := [one for one in strategies if isinstance(one, tuple) or not callable(one)]:
        what = f"on Ray strategies must be functions, got {type(strange[0]).__name__}: devices cannot cross."
    else:
        return [one for one in strategies if not isinstance(one, ShardedOptimizer)]
    fix = "pass [lambda devices: so.fsdp(tx, so.make_mesh(devices=devices), loss_fn)] * 4, for four islands."
    raise TypeError(format_error(WHO, what, fix=fix))


def _check_local_steps(local_steps: int | Sequence[int], num_islands: int) -> list[int]:
    if is_integer(local_steps):
        check_count(WHO, "local_steps", local_steps, least=1)
        return [int(local_steps)] * num_islands
    if isinstance(local_steps, str) or not isinstance(local_steps, Sequence | np.ndarray):
        what = f"local_steps must be an integer or one for each island, got {local_steps!r}"
        raise TypeError(f"{WHO}: {what} ({type(local_steps).__name__}).")
    if len(local_steps) != num_islands:
        what = f"local_steps has {len(local_steps)} numbers for {num_islands} islands."
        raise ValueError(format_error(WHO, what, fix="pass one number, or one for each island."))
    for number, steps in enumerate(local_steps):
        check_count(WHO, f"local_steps[{number}]", steps, least=1)
    return [int(steps) for steps in local_steps]
