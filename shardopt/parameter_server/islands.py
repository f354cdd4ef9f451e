"""An island's side of a run: some steps of a ring-1 strategy by itself, then its change as an outer gradient."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.core.errors import complaint
from shardopt.core.optimizer import ShardedOptimizer
from shardopt.core.types import PyTree, TrainState, Weighted, wide_dtype
from shardopt.parameter_server.compute import Compute, Streams, moved
from shardopt.parameter_server.encoder import make_encoder
from shardopt.parameter_server.trainable import trained
from shardopt.parameter_server.updates import Update, soundness
from shardopt.partition.paths import leaves_with_paths
from shardopt.reducers import Encoding

Islands = Mapping[int, ShardedOptimizer]
"""Worker -> its strategy."""


def make_island_compute(
    who: str,
    islands: Islands,
    local_steps: Sequence[int],
    batches_of: Callable[[int], Iterable[Any]],
    key: Any,
    code: Encoding | None = None,
) -> Compute:
    """Return workers that push theta - theta_i after H local steps.

    Args:
      who: the function that the user called, for messages.
      islands: the strategies.
      local_steps: H of each worker.
      batches_of: `batches_of(worker)`, its batches.
      key: random key data; an island draws from a key of its worker and of the clock at which it joined.
      code: how changes are encoded; None if they travel as they are.

    Raises:
      TypeError: if an argument is of the wrong kind.
    """
    streams, encoder = Streams(who, batches_of, local_steps), make_encoder(code)
    home = next(iter(islands.values())).mesh.devices.flat[0]
    states: dict[int, TrainState | None] = {}
    key = np.asarray(key, np.uint32)

    def begin(worker: int, position: int) -> None:
        streams.begin(worker, position)
        encoder.begin(worker)
        states[worker] = None  # whoever joins or goes on after a restore has no optimizer state

    def update(worker: int, params: PyTree, batches: list[Any], clock: int) -> Update:
        opt, state = islands[worker], states[worker]
        if state is None:
            own = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), worker)
            state = opt.init(_copy(params), jax.random.fold_in(own, clock))
        else:
            state = state._replace(params=_placed(params, state.params))
        found = []
        for batch in batches:
            state, metrics = opt.step(state, batch)
            found.append(metrics)
        states[worker] = state
        first = opt.mesh.devices.flat[0]
        end, found = jax.device_put((state.params, found), first)
        change, held = _change(jax.device_put(params, first), end, found)
        _check_held(who, opt, params, held)
        return jax.block_until_ready(moved(encoder.encode(worker, change._replace(rows=1)), home))

    header = {"rng": key.tolist(), "local_steps": [int(steps) for steps in local_steps]}
    header |= encoder.header
    return Compute(header, begin, streams.next_batch, update, lambda tree: jax.device_put(tree, home))


@jax.jit
def _change(start: PyTree, end: PyTree, found: list[dict[str, Any]]) -> tuple[Update, list[Any]]:
    """Return the update, and for every leaf whether it is as it was."""
    grads = jax.tree.map(jnp.subtract, trained(start), trained(end))
    means = {name: jnp.stack([_wide(one[name]) for one in found]).mean(0) for name in found[0]}
    one = jnp.ones((), means["loss"].dtype)
    aux = {name: Weighted(mean, jnp.ones((), mean.dtype)) for name, mean in means.items() if name != "loss"}
    update = Update(grads, Weighted(means["loss"], one), aux, None)
    held = [jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)]
    return update._replace(sound=soundness(update)), held


def _wide(value: Any) -> Any:
    return jnp.asarray(value, wide_dtype(jnp.asarray(value).dtype))


def _placed(params: PyTree, like: PyTree) -> PyTree:
    """Copy parameters to where an island has its own: its next step takes over their memory."""
    return jax.device_put(_copy(params), jax.tree.map(lambda leaf: leaf.sharding, like))


@jax.jit
def _copy(params: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, params)


def _check_held(who: str, opt: ShardedOptimizer, params: PyTree, held: list[Any]) -> None:
    """Refuse new values of frozen leaves: islands have no common value for them, and they would be lost."""
    frozen = opt.config.recipe.frozen
    paths = [
        (path, index)
        for index, (path, leaf) in enumerate(leaves_with_paths(params))
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or any(re.search(pattern, path) for pattern in frozen)
    ]
    if changed := [path for path, index in paths if not held[index]]:
        what = "loss_fn returns so.Updated, for which islands have no common value."
        raise ValueError(complaint(who, what, changed, "train such leaves with ddp, zero, fsdp or diloco."))
