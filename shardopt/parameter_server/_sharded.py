"""Parameters and optimizer state that are sharded over several servers: each has an equal range of
every leaf.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core._errors import calling, error_text, format_error
from shardopt.core._types import Devices, PyTree, Weighted, abstract, wide_dtype
from shardopt.parameter_server._apply import (
    Programs,
    Pushes,
    UpdateResult,
    run_arguments,
    update_program,
)
from shardopt.parameter_server._mathematics import ServerArrays, copy_states
from shardopt.parameter_server._sparse import has_rows
from shardopt.parameter_server._sums import AXIS
from shardopt.parameter_server._updates import Update, check_update, trained, untrained
from shardopt.parameter_server.rules import Rule
from shardopt.step._inputs import copied
from shardopt.transforms._shard_checks import check_elementwise

CALLER = "parameter_server"


@partial(jax.tree_util.register_dataclass, data_fields=("trees", "rest"), meta_fields=("shapes",))
@dataclass(frozen=True)
class ServerShards:
    """Parameters that are sharded over n servers. Checkpoints name their leaves `trees` and `rest`.

    Attributes:
      trees: for each server its shard of the trained leaves, [ceil(size / n), 1, ...], with as many
        dims as the full leaf.
      rest: the parameters that are not trained, with None for the trained ones.
      shapes: the shapes of the full trained leaves, in order.
    """

    trees: tuple[PyTree, ...]
    rest: PyTree
    shapes: tuple[tuple[int, ...], ...]

    def full(self) -> PyTree:
        """Return the unsharded parameters."""
        return _combined(unshard(self.trees, self.shapes), self.rest)

    def trained_types(self) -> PyTree:
        """Return shapes and dtypes of the full trained leaves, with None for all others."""
        leaves, treedef = jax.tree.flatten(self.trees[0])
        full_leaves = [
            jax.ShapeDtypeStruct(s, leaf.dtype) for s, leaf in zip(self.shapes, leaves, strict=True)
        ]
        return treedef.unflatten(full_leaves)


def shard(tree: PyTree, servers: int) -> tuple[PyTree, ...]:
    """Return the shard of each server: an equal range of every leaf, flat.

    Shards of numpy leaves are views.

    A leaf without dims belongs to the first server, and is zero on the others. The ends of other
    leaves are padded with zeros.

    Example:
      >>> [server_shard["w"].tolist() for server_shard in shard({"w": np.arange(3.0)}, 2)]
      [[0.0, 1.0], [2.0, 0.0]]
    """
    return tuple(
        jax.tree.map(partial(_range, servers=servers, index=i), tree) for i in range(servers)
    )


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


def _combined(trained_params: PyTree, untrained_params: PyTree) -> PyTree:
    """Return all parameters, from the trained and the untrained ones."""

    def is_none(leaf):
        return leaf is None

    return jax.tree.map(
        lambda a, b: b if a is None else a, trained_params, untrained_params, is_leaf=is_none
    )


@dataclass(frozen=True)
class LocalServers:
    """The mathematics of several servers in this process.

    Attributes:
      programs: the programs of one server.
      devices: the devices of the servers, in turn.
      has_sums: the structure of parameters -> whether the optimizer needs sums over all servers.
    """

    programs: Programs
    devices: Devices = ()
    has_sums: dict[Hashable, bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    copy = staticmethod(copy_states)

    @calling(CALLER)
    def begin(self, params: PyTree) -> ServerArrays:
        """Return the shards of the parameters and the initial states of each server."""
        check_shardable(self.programs.tx, self.programs.rule, params, self.programs.servers)
        params = copied(params)
        trained_params = trained(params)
        trees = self._placed(_shard(trained_params, self.programs.servers))
        # zeros are made on the default device
        states = self._placed([self.programs.begin(tree) for tree in trees])
        shards = ServerShards(trees, untrained(params), shapes_of(trained_params))
        return shards, *map(tuple, zip(*states, strict=True))

    def adopt(self, arrays: ServerArrays) -> ServerArrays:
        """Place the shards and states from a checkpoint on the devices of the servers."""
        params, opt_state, rule_state = arrays
        shards = replace(params, trees=self._placed(params.trees))
        return shards, self._placed(opt_state), self._placed(rule_state)

    def changed_by(self, update: Update, params: ServerShards) -> PyTree:
        """Return shapes and dtypes of the trained parameters: an update changes all."""
        return params.trained_types()

    def full_params(self, params: ServerShards) -> PyTree:
        """Return the unsharded parameters, on the device of the first server."""
        trees = jax.device_put(params.trees, _device_of(params.trees[0]))
        return _combined(_unshard(trees, params.shapes), params.rest)

    def check(self, update: Update | None, params: ServerShards, worker: int) -> Update:
        """Return the update, or refuse it if it is sparse or does not match the parameters."""
        if isinstance(update, Update) and has_rows(update.grads):
            problem = f"a sparse push cannot be shared out over {self.programs.servers} servers."
            raise ValueError(
                format_error(CALLER, problem, fix="push dense gradients, or use one server.")
            )
        return check_update(update, params.trained_types(), worker)

    def apply(
        self,
        arrays: ServerArrays,
        updates: Sequence[Update],
        pulled: ServerShards | None,
        delay: int,
    ) -> UpdateResult:
        """Update the shard of each server, after the sums over servers if the optimizer has any."""
        params, opt_state, rule_state = arrays
        grad_shards = [_shard(update.grads, self.programs.servers) for update in updates]
        server_args = []
        for i, tree in enumerate(params.trees):
            device = _device_of(tree)
            shard_updates = [
                jax.device_put(
                    update._replace(grads=grads[i], rows=None, is_finite=None), device
                )._replace(rows=update.rows)
                for update, grads in zip(updates, grad_shards, strict=True)
            ]
            pulled_shard = None if pulled is None else pulled.trees[i]
            server_args.append(
                run_arguments(
                    (tree, opt_state[i], rule_state[i]), shard_updates, pulled_shard, delay
                )
            )
        key = jax.tree.structure(params)
        if key not in self.has_sums:
            self.has_sums[key] = self.programs.has_sums(params.trees[0])
        server_sums = (
            [jax.device_get(self.programs.sums(args)) for args in server_args]
            if self.has_sums[key]
            else []
        )
        results = [self.programs.finish(server_sums, args) for args in server_args]
        trees, opt_states, rule_states, metrics = zip(*results, strict=True)
        return UpdateResult(replace(params, trees=trees), opt_states, rule_states, metrics[0])

    def _placed(self, trees: Sequence[PyTree]) -> tuple[PyTree, ...]:
        if not self.devices:
            return tuple(trees)
        return tuple(
            jax.device_put(tree, self.devices[i % len(self.devices)])
            for i, tree in enumerate(trees)
        )


def check_shardable(
    tx: optax.GradientTransformation, rule: Rule, params: PyTree, servers: int
) -> None:
    """Refuse an optimizer or a rule that is not proved to treat ranges of leaves as it treats full
    leaves.

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
        result = run(params, state, Pushes(pushed, jnp.ones(1), pulled, jnp.int32(1)))
        return result.params, (result.opt_state, result.rule_state)

    # An optax transformation with the same mathematics, which `check_elementwise` can trace.
    update_and_rule = optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]

    def check() -> jax.Array:
        inputs, input_shards = ((tree, (tree, tree)) for tree in (trained_params, shards))
        check_elementwise(update_and_rule, (AXIS,), inputs, input_shards, {})
        return jnp.zeros(())

    try:
        jax.make_jaxpr(check, axis_env=[(AXIS, servers)])()
    except ValueError as error:
        reason = (
            str(error)
            .split("\n")[0]
            .partition(": ")[2]
            .replace("inner", "the optimizer or the rule", 1)
        )
        problem = f"servers={servers} gives each server a range of every leaf, and {reason}"
        fix = (
            "use what works element by element (sgd, adam, adamw, lion, ...); for clipping by the"
            ' global norm so.transforms.clip_by_global_norm(max_norm, "servers", split=True); or'
            " servers=1, which takes any optimizer."
        )
        raise ValueError(error_text(problem, fix=fix)) from error


def _device_of(tree: PyTree) -> Any:
    (device,) = jax.tree.leaves(tree)[0].devices()
    return device
