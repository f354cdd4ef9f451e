"""Parameters and optimizer state that are sharded over several servers: each has an equal range of every leaf."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, Weighted, abstract, wide_dtype
from shardopt.parameter_server.apply import (
    Mathematics,
    ShardPrograms,
    UpdateResult,
    begin_states,
    copy_states,
    copy_without_weak_type,
    update_program,
)
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.sparse import is_rows
from shardopt.parameter_server.sums import AXIS, split_at_sums
from shardopt.parameter_server.updates import Update, check_update, trained, untrained
from shardopt.transforms.shard_checks import check_elementwise

CALLER = "parameter_server"
Devices = Sequence[jax.Device]


@partial(jax.tree_util.register_dataclass, data_fields=("trees", "rest"), meta_fields=("shapes",))
@dataclass(frozen=True)
class ServerShards:
    """Parameters that are sharded over n servers. Checkpoints name their leaves `trees` and `rest`.

    Attributes:
      trees: for each server its shard of the trained leaves, [ceil(size / n), 1, ...], with as many dims as the full leaf.
      rest: the parameters that are not trained, with None for the trained ones.
      shapes: the shapes of the full trained leaves, in order.
    """

    trees: tuple[PyTree, ...]
    rest: PyTree
    shapes: tuple[tuple[int, ...], ...]


def shard(tree: PyTree, servers: int) -> tuple[PyTree, ...]:
    """Return the shard of each server: an equal range of every leaf, flat; shards of numpy leaves are views.

    A leaf without dims belongs to the first server, and is zero on the others. The ends of other leaves are padded
    with zeros.

    Example:
      >>> [server_shard["w"].tolist() for server_shard in shard({"w": np.arange(3.0)}, 2)]
      [[0.0, 1.0], [2.0, 0.0]]
    """
    return tuple(jax.tree.map(partial(_range, servers=servers, index=i), tree) for i in range(servers))


def _range(leaf: jax.Array | np.ndarray, *, servers: int, index: int) -> jax.Array | np.ndarray:
    xp = np if isinstance(leaf, np.ndarray | np.generic) else jnp
    length = -(-leaf.size // servers)
    values = xp.reshape(leaf, -1)[index * length : (index + 1) * length]
    if values.shape[0] < length:
        values = xp.concatenate([values, xp.zeros(length - values.shape[0], values.dtype)])
    return values.reshape((length,) + (1,) * (leaf.ndim - 1) if leaf.ndim else ())


def unshard(trees: Sequence[PyTree], shapes: Sequence[tuple[int, ...]]) -> PyTree:
    """Return the tree whose shards these are."""
    columns = zip(shapes, *map(jax.tree.leaves, trees), strict=True)
    leaves = []
    for shape, *ranges in columns:
        xp = np if isinstance(ranges[0], np.ndarray | np.generic) else jnp
        flat = xp.concatenate([values.reshape(-1) for values in ranges])
        leaves.append(flat[: int(np.prod(shape))].reshape(shape))
    return jax.tree.unflatten(jax.tree.structure(trees[0]), leaves)


_shard = jax.jit(shard, static_argnums=1)
_unshard = jax.jit(unshard, static_argnums=1)


def shapes_of(trained_params: PyTree) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of trained leaves, in order."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(trained_params))


def abstract_params(params: ServerShards) -> PyTree:
    """Return shapes and dtypes in place of the trained leaves, and the other leaves as they are."""
    leaves, treedef = jax.tree.flatten(params.trees[0])
    pairs = zip(params.shapes, leaves, strict=True)
    trained_params = treedef.unflatten([jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in pairs])
    return combine_leaves(trained_params, params.rest)


def full_params(params: ServerShards) -> PyTree:
    """Return the unsharded parameters, on the device of the first server."""
    device = _device_of(params.trees[0])
    return combine_leaves(_unshard([_put(tree, device) for tree in params.trees], params.shapes), params.rest)


def combine_leaves(trained_params: PyTree, untrained_params: PyTree) -> PyTree:
    """Return all parameters, from the trained and the untrained ones."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, trained_params, untrained_params, is_leaf=is_none)


def shard_programs(tx: optax.GradientTransformation, rule: Rule, servers: int, *, donate: bool) -> ShardPrograms:
    """Return the programs that each of `servers` runs on its shard; updates have the gradients of this shard."""
    run = update_program(tx, rule)
    sums, finish = split_at_sums(run, servers)
    jitted_sums = jax.jit(sums)
    donated = (1, 2) if donate else ()
    jitted_run = jax.jit(run, donate_argnums=donated)
    jitted_finish = jax.jit(finish, donate_argnums=[1 + i for i in donated])

    def arguments(shard: PyTree, states: tuple[PyTree, PyTree], updates: Sequence[Update], pulled: PyTree, delay: int):
        pushed = [(update.grads, update.loss, dict(update.metrics)) for update in updates]
        rows = np.asarray([update.rows for update in updates], np.float32)
        return shard, *states, pushed, rows, pulled, np.int32(delay)

    def has_sums(shard: PyTree) -> bool:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        states = jax.eval_shape(lambda shard: (tx.init(shard), rule.init(shard)), shard)
        update = Update(shard, Weighted(scalar, scalar), {}, 1)
        return bool(jax.eval_shape(sums, *arguments(shard, states, [update], None, 0)))

    def apply(server_sums, shard, opt_state, rule_state, updates, pulled, delay) -> UpdateResult:
        args = arguments(shard, (opt_state, rule_state), updates, pulled, delay)
        return jitted_finish(server_sums, *args) if server_sums and server_sums[0] else jitted_run(*args)

    def shard_sums(shard, opt_state, rule_state, updates, pulled, delay) -> list[jax.Array]:
        return jitted_sums(*arguments(shard, (opt_state, rule_state), updates, pulled, delay))

    return ShardPrograms(lambda shard: begin_states(tx, rule, shard), has_sums, shard_sums, apply)


def make_sharded_mathematics(
    tx: optax.GradientTransformation,
    rule: Rule,
    servers: int,
    *,
    donate: bool,
    devices: Devices = (),
) -> Mathematics:
    """Return the mathematics of several servers in this process, on `devices` in turn."""
    programs = shard_programs(tx, rule, servers, donate=donate)

    def begin(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        check_shardable(CALLER, tx, rule, params, servers)
        params = jax.tree.map(copy_without_weak_type, params)
        trained_params = trained(params)
        trees = placed(_shard(trained_params, servers))
        states = placed([programs.begin(tree) for tree in trees])  # zeros are made on the default device
        shards = ServerShards(trees, untrained(params), shapes_of(trained_params))
        return shards, *map(tuple, zip(*states, strict=True))

    def placed(trees: Sequence[PyTree]) -> tuple[PyTree, ...]:
        if not devices:
            return tuple(trees)
        return tuple(_put(tree, devices[i % len(devices)]) for i, tree in enumerate(trees))

    def adopt(params: ServerShards, opt_state: PyTree, rule_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return ServerShards(placed(params.trees), params.rest, params.shapes), placed(opt_state), placed(rule_state)

    def apply(
        params: ServerShards,
        opt_state: Sequence[PyTree],
        rule_state: Sequence[PyTree],
        updates: Sequence[Update],
        pulled: ServerShards | None,
        delay: int,
    ) -> UpdateResult:
        grad_shards = [_shard(update.grads, servers) for update in updates]
        server_args = []
        for i, tree in enumerate(params.trees):
            device = _device_of(tree)
            shard_updates = [
                _put(update._replace(grads=grads[i], rows=None, is_finite=None), device)._replace(rows=update.rows)
                for update, grads in zip(updates, grad_shards, strict=True)
            ]
            pulled_shard = None if pulled is None else pulled.trees[i]
            server_args.append((tree, opt_state[i], rule_state[i], shard_updates, pulled_shard, delay))
        server_sums = [jax.device_get(programs.sums(*args)) for args in server_args] if needs_sums(params) else []
        results = [programs.apply(server_sums, *args) for args in server_args]
        new = ServerShards(tuple(result.params for result in results), params.rest, params.shapes)
        opt_states, rule_states = (tuple(result[1] for result in results), tuple(result[2] for result in results))
        return UpdateResult(new, opt_states, rule_states, results[0].metrics)

    needs_sums_of: dict[Hashable, bool] = {}

    def needs_sums(params: ServerShards) -> bool:
        key = jax.tree.structure(params)
        if key in needs_sums_of:
            return needs_sums_of[key]
        return needs_sums_of.setdefault(key, programs.has_sums(params.trees[0]))

    def check(update: Update | None, params: ServerShards, worker: int) -> Update:
        if isinstance(update, Update) and any(is_rows(x) for x in jax.tree.leaves(update.grads, is_leaf=is_rows)):
            problem = f"a sparse push cannot be shared out over {servers} servers."
            raise ValueError(format_error(CALLER, problem, fix="push dense gradients, or use one server."))
        return check_update(update, abstract_params(params), worker)

    return Mathematics(begin, adopt, abstract_params, full_params, check, apply, copy_states, programs)


def check_shardable(caller: str, tx: optax.GradientTransformation, rule: Rule, params: PyTree, servers: int) -> None:
    """Refuse an optimizer or a rule that is not proved to treat ranges of leaves as it treats full leaves.

    Raises:
      ValueError: if that cannot be proved.
    """
    trained_params = trained(abstract(params))
    shards = jax.eval_shape(partial(shard, servers=servers), trained_params)[0]
    run = update_program(tx, rule)

    def init(params_and_pulled: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return tx.init(params_and_pulled[0]), rule.init(params_and_pulled[0])

    def update(
        grads: PyTree, state: tuple[PyTree, PyTree], params_and_pulled: PyTree = None, **_: Any
    ) -> tuple[PyTree, PyTree]:
        params, pulled = params_and_pulled
        wide = wide_dtype(jax.tree.leaves(grads)[0].dtype)
        pushed = [(grads, Weighted(jnp.ones((), wide), jnp.ones((), wide)), {})]
        result = run(params, *state, pushed, jnp.ones(1), pulled, jnp.int32(1))
        return result.params, (result.opt_state, result.rule_state)

    # An optax transformation with the same mathematics, which `check_elementwise` can trace.
    update_and_rule = optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]

    def check() -> jax.Array:
        inputs, input_shards = ((tree, (tree, tree)) for tree in (trained_params, shards))
        check_elementwise(caller, update_and_rule, (AXIS,), inputs, input_shards, {})
        return jnp.zeros(())

    try:
        jax.make_jaxpr(check, axis_env=[(AXIS, servers)])()
    except ValueError as error:
        reason = str(error).split("\n")[0].removeprefix(f"{caller}: ").replace("inner", "the optimizer or the rule", 1)
        problem = f"servers={servers} gives each server a range of every leaf, and {reason}"
        fix = (
            "use what works element by element (sgd, adam, adamw, lion, ...); for clipping by the global norm "
            'so.transforms.clip_by_global_norm(max_norm, "servers", split=True); or servers=1, which takes any optimizer.'
        )
        raise ValueError(format_error(caller, problem, fix=fix)) from error


def _put(tree: PyTree, device: Any) -> PyTree:
    return jax.device_put(tree, device)


def _device_of(tree: PyTree) -> Any:
    (device,) = jax.tree.leaves(tree)[0].devices()
    return device
