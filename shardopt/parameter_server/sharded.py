"""Parameters and optimizer state over several servers, each with an equal range of every leaf."""

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
    Applied,
    Mathematics,
    PartPrograms,
    begin_states,
    copied,
    own,
    update_program,
)
from shardopt.parameter_server.rules import Rule
from shardopt.parameter_server.sparse import is_rows
from shardopt.parameter_server.sums import AXIS, two_phases
from shardopt.parameter_server.updates import Update, check_update, trained, untrained
from shardopt.transforms.shard_checks import check_elementwise

WHO = "parameter_server"
Devices = Sequence[jax.Device]


@partial(jax.tree_util.register_dataclass, data_fields=("trees", "rest"), meta_fields=("shapes",))
@dataclass(frozen=True)
class Parts:
    """Parameters over n servers.

    Attributes:
      trees: for each server the trained leaves [ceil(size / n), 1, ...], with as many dims as the whole leaf.
      rest: the parameters that are not trained, None for the others.
      shapes: of the whole trained leaves, in order.
    """

    trees: tuple[PyTree, ...]
    rest: PyTree
    shapes: tuple[tuple[int, ...], ...]


def shard(tree: PyTree, servers: int) -> tuple[PyTree, ...]:
    """Return what each server has of a tree: an equal range of every leaf, flat; views of numpy leaves.

    A leaf without dims is the first server's, and zero on the others, like the padding at the end of other leaves.

    Example:
      >>> [one["w"].tolist() for one in shard({"w": np.arange(3.0)}, 2)]
      [[0.0, 1.0], [2.0, 0.0]]
    """
    return tuple(jax.tree.map(partial(_range, servers=servers, index=i), tree) for i in range(servers))


def _range(leaf: jax.Array | np.ndarray, *, servers: int, index: int) -> jax.Array | np.ndarray:
    xp = np if isinstance(leaf, np.ndarray | np.generic) else jnp
    length = -(-leaf.size // servers)
    part = xp.reshape(leaf, -1)[index * length : (index + 1) * length]
    if part.shape[0] < length:
        part = xp.concatenate([part, xp.zeros(length - part.shape[0], part.dtype)])
    return part.reshape((length,) + (1,) * (leaf.ndim - 1) if leaf.ndim else ())


def unshard(trees: Sequence[PyTree], shapes: Sequence[tuple[int, ...]]) -> PyTree:
    """Return the tree whose shards these are."""
    columns = zip(shapes, *map(jax.tree.leaves, trees), strict=True)
    leaves = []
    for shape, *ranges in columns:
        xp = np if isinstance(ranges[0], np.ndarray | np.generic) else jnp
        flat = xp.concatenate([one.reshape(-1) for one in ranges])
        leaves.append(flat[: int(np.prod(shape))].reshape(shape))
    return jax.tree.unflatten(jax.tree.structure(trees[0]), leaves)


_shard = jax.jit(shard, static_argnums=1)
_unshard = jax.jit(unshard, static_argnums=1)


def shapes_of(part: PyTree) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of trained leaves, in order."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(part))


def like(params: Parts) -> PyTree:
    """Return the parameters as shapes and dtypes; those that are not trained as they are."""
    leaves, treedef = jax.tree.flatten(params.trees[0])
    pairs = zip(params.shapes, leaves, strict=True)
    part = treedef.unflatten([jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in pairs])
    return merged(part, params.rest)


def whole(params: Parts) -> PyTree:
    """Return the parameters, on the device of the first server."""
    device = _device_of(params.trees[0])
    return merged(_unshard([_put(tree, device) for tree in params.trees], params.shapes), params.rest)


def merged(part: PyTree, rest: PyTree) -> PyTree:
    """Return the parameters from those that are trained and the others."""
    return jax.tree.map(lambda a, b: b if a is None else a, part, rest, is_leaf=lambda leaf: leaf is None)


def part_programs(tx: optax.GradientTransformation, rule: Rule, servers: int, *, donate: bool) -> PartPrograms:
    """Return what each of `servers` does; updates have the gradients of its part."""
    run = update_program(tx, rule)
    sums, rest = two_phases(run, servers)
    jitted_sums = jax.jit(sums)
    donated = (1, 2) if donate else ()
    jitted, jitted_rest = jax.jit(run, donate_argnums=donated), jax.jit(rest, donate_argnums=[1 + i for i in donated])

    def arguments(part: PyTree, states: tuple[PyTree, PyTree], updates: Sequence[Update], pulled: PyTree, delay: int):
        pushed = [(one.grads, one.loss, dict(one.metrics)) for one in updates]
        return part, *states, pushed, np.asarray([one.rows for one in updates], np.float32), pulled, np.int32(delay)

    def has_sums(part: PyTree) -> bool:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        states = jax.eval_shape(lambda part: (tx.init(part), rule.init(part)), part)
        update = Update(part, Weighted(scalar, scalar), {}, 1)
        return bool(jax.eval_shape(sums, *arguments(part, states, [update], None, 0)))

    def apply(sums_of, part, opt_state, rule_state, updates, pulled, delay) -> Applied:
        args = arguments(part, (opt_state, rule_state), updates, pulled, delay)
        return jitted_rest(sums_of, *args) if sums_of and sums_of[0] else jitted(*args)

    def sums_of_part(part, opt_state, rule_state, updates, pulled, delay) -> list[jax.Array]:
        return jitted_sums(*arguments(part, (opt_state, rule_state), updates, pulled, delay))

    return PartPrograms(lambda part: begin_states(tx, rule, part), has_sums, sums_of_part, apply)


def on_servers(
    tx: optax.GradientTransformation,
    rule: Rule,
    servers: int,
    *,
    donate: bool,
    devices: Devices = (),
) -> Mathematics:
    """Return the mathematics of several servers in this process, on `devices` in turn."""
    programs = part_programs(tx, rule, servers, donate=donate)

    def begin(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        check_shardable(WHO, tx, rule, params, servers)
        params = jax.tree.map(own, params)
        part = trained(params)
        trees = placed(_shard(part, servers))
        states = placed([programs.begin(tree) for tree in trees])  # zeros are made on the default device
        return Parts(trees, untrained(params), shapes_of(part)), *map(tuple, zip(*states, strict=True))

    def placed(trees: Sequence[PyTree]) -> tuple[PyTree, ...]:
        if not devices:
            return tuple(trees)
        return tuple(_put(tree, devices[i % len(devices)]) for i, tree in enumerate(trees))

    def adopt(params: Parts, opt_state: PyTree, rule_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return Parts(placed(params.trees), params.rest, params.shapes), placed(opt_state), placed(rule_state)

    def apply(
        params: Parts,
        opt_state: Sequence[PyTree],
        rule_state: Sequence[PyTree],
        updates: Sequence[Update],
        pulled: Parts | None,
        delay: int,
    ) -> Applied:
        split = [_shard(one.grads, servers) for one in updates]
        args = []
        for i, tree in enumerate(params.trees):
            device = _device_of(tree)
            own = [
                _put(one._replace(grads=grads[i], rows=None, is_finite=None), device)._replace(rows=one.rows)
                for one, grads in zip(updates, split, strict=True)
            ]
            old = None if pulled is None else pulled.trees[i]
            args.append((tree, opt_state[i], rule_state[i], own, old, delay))
        sums_of = [jax.device_get(programs.sums(*one)) for one in args] if needs_sums(params) else []
        found = [programs.apply(sums_of, *one) for one in args]
        new = Parts(tuple(one.params for one in found), params.rest, params.shapes)
        opt_states, rule_states = (tuple(one[1] for one in found), tuple(one[2] for one in found))
        return Applied(new, opt_states, rule_states, found[0].metrics)

    known: dict[Hashable, bool] = {}

    def needs_sums(params: Parts) -> bool:
        key = jax.tree.structure(params)
        return known[key] if key in known else known.setdefault(key, programs.has_sums(params.trees[0]))

    def check(update: Update | None, params: Parts, worker: int) -> Update:
        if isinstance(update, Update) and any(is_rows(x) for x in jax.tree.leaves(update.grads, is_leaf=is_rows)):
            what = f"a sparse push cannot be shared out over {servers} servers."
            raise ValueError(format_error(WHO, what, fix="push dense gradients, or use one server."))
        return check_update(update, like(params), worker)

    return Mathematics(begin, adopt, like, whole, check, apply, copied, programs)


def check_shardable(who: str, tx: optax.GradientTransformation, rule: Rule, params: PyTree, servers: int) -> None:
    """Refuse an optimizer or a rule that cannot be shown to do with ranges of leaves what it does with leaves.

    Raises:
      ValueError: if it cannot be shown.
    """
    part = trained(abstract(params))
    shards = jax.eval_shape(partial(shard, servers=servers), part)[0]
    run = update_program(tx, rule)

    def init(both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return tx.init(both[0]), rule.init(both[0])

    def update(grads: PyTree, state: tuple[PyTree, PyTree], both: PyTree = None, **_: Any) -> tuple[PyTree, PyTree]:
        wide = wide_dtype(jax.tree.leaves(grads)[0].dtype)
        pushed = [(grads, Weighted(jnp.ones((), wide), jnp.ones((), wide)), {})]
        found = run(both[0], *state, pushed, jnp.ones(1), both[1], jnp.int32(1))
        return found.params, (found.opt_state, found.rule_state)

    pseudo = optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]

    def check() -> jax.Array:
        check_elementwise(who, pseudo, (AXIS,), (part, (part, part)), (shards, (shards, shards)), {})
        return jnp.zeros(())

    try:
        jax.make_jaxpr(check, axis_env=[(AXIS, servers)])()
    except ValueError as error:
        why = str(error).split("\n")[0].removeprefix(f"{who}: ").replace("inner", "the optimizer or the rule", 1)
        what = f"servers={servers} gives each server a range of every leaf, and {why}"
        fix = (
            "use what works element by element (sgd, adam, adamw, lion, ...); for clipping by the global norm "
            'so.transforms.clip_by_global_norm(max_norm, "servers", split=True); or servers=1, which takes any optimizer.'
        )
        raise ValueError(format_error(who, what, fix=fix)) from error


def _put(tree: PyTree, device: Any) -> PyTree:
    return jax.device_put(tree, device)


def _device_of(tree: PyTree) -> Any:
    (device,) = jax.tree.leaves(tree)[0].devices()
    return device
