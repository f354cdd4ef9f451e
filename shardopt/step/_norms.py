"""Norms of the gradient, update and parameters of every leaf, and of every layer of stacked blocks,
in one collective.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout
from shardopt.core import Arrays, widened
from shardopt.mesh import spec_axes
from shardopt.partition import LeafPlan
from shardopt.step._results import Change


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Norms:
    """Euclidean norms of the trainable leaves in a step: `state, metrics, norms =
    opt.step.with_norms(state, batch)`.

    `norms.gradients`, `norms.updates` and `norms.params` are dicts from key path to norm. A stacked
    leaf of blocks has one norm for each layer, [L]. Reading them waits for the step. A norm above
    1e19 is infinite, since its square overflows in float32; in float64 the limit is 1e154.

    Attributes:
      values: [3, n], the norms on the device, of all leaves and layers in a row: gradients,
        updates, parameters.
      layers: (key path, number of layers) of each trainable leaf; the number is None for a leaf
        that is not stacked.
    """

    values: jax.Array
    layers: tuple[tuple[str, int | None], ...] = dataclasses.field(metadata={"static": True})

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """The norms of the gradient that the optax transformation received."""
        return self._by_path(0)

    @property
    def updates(self) -> dict[str, np.ndarray]:
        """The norms of the update that the optax transformation returned."""
        return self._by_path(1)

    @property
    def params(self) -> dict[str, np.ndarray]:
        """The norms of the parameters before the update."""
        return self._by_path(2)

    def metrics(self) -> dict[str, float]:
        """Return the norms as metrics for a log: "gradient_norm/PATH",
        "gradient_norm/PATH/layer_0", and so on.
        """
        named = {
            "gradient_norm": self.gradients,
            "update_norm": self.updates,
            "param_norm": self.params,
        }
        return {
            f"{kind}/{path}{suffix}": float(norm)
            for kind, norms in named.items()
            for path, of_leaf in norms.items()
            for suffix, norm in (
                [("", of_leaf)]
                if not of_leaf.ndim
                else [(f"/layer_{i}", x) for i, x in enumerate(of_leaf)]
            )
        }

    def _by_path(self, row: int) -> dict[str, np.ndarray]:
        values = np.asarray(jax.device_get(self.values))[row]
        start = 0
        norms = {}
        for path, length in self.layers:
            norms[path] = values[start] if length is None else values[start : start + length]
            start += 1 if length is None else length
        return {path: np.asarray(norm) for path, norm in norms.items()}


def norms_of(config: StrategyConfig, layout: Layout, change: Change) -> Norms:
    """Return the norms of a change, in the global view, replicated.

    Each device squares its shards, in fp32 at least, and puts the sums at their places in one
    vector. A leaf that several devices hold is counted on the first of them. One all-reduce sums
    the vectors over all axes, tensor included.
    """
    sharded = config.placement.opt_state
    specs = [plan.spec(sharded=sharded) for plan in layout.trained]
    trees = [layout.trained_leaves(layout.treedef.flatten_up_to(tree)) for tree in change]

    def local_norms(*trees: Arrays) -> jax.Array:
        squares = [
            _squares(plan, spec, leaf, config.mesh.axis_names)
            for leaves in trees
            for plan, spec, leaf in zip(layout.trained, specs, leaves, strict=True)
        ]
        dtype = np.result_type(*(square.dtype for square in squares))
        vector = jnp.concatenate([square.astype(dtype) for square in squares])
        return jnp.sqrt(jax.lax.psum(vector, config.mesh.axis_names)).reshape(len(trees), -1)

    run = jax.shard_map(
        local_norms,
        mesh=config.mesh,
        in_specs=tuple(specs for _ in trees),
        out_specs=PartitionSpec(),
        axis_names=set(config.mesh.axis_names),
        check_vma=False,
    )
    layers = tuple((plan.path, plan.shape[0] if plan.stacked else None) for plan in layout.trained)
    return Norms(run(*trees), layers)


def _squares(
    plan: LeafPlan, spec: PartitionSpec, leaf: jax.Array, mesh_axes: tuple[str, ...]
) -> jax.Array:
    """Return the sums of squares that this device adds: [1], or [L] with zeros for layers of other
    devices.
    """
    squares = jnp.square(jnp.abs(widened(leaf)))
    total = jnp.sum(squares, axis=tuple(range(1, leaf.ndim)) if plan.stacked else None).reshape(-1)
    copied_over = [axis for axis in mesh_axes if axis not in spec_axes(spec)]
    if copied_over:
        is_first = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in copied_over]).all()
        # The caller sums over all axes. Copies must add nothing, or their leaf would count several
        # times.
        total = jnp.where(is_first, total, jnp.zeros_like(total))
    if not plan.stacked or total.size == plan.shape[0]:
        return total
    layer_axes = tuple(spec_axes(spec[:1]))
    all_layers = jnp.zeros(plan.shape[0], total.dtype)
    # This device has some layers. At their places among all layers, the one sum over devices also
    # joins the layers.
    return jax.lax.dynamic_update_slice(
        all_layers, total, (jax.lax.axis_index(layer_axes) * total.size,)
    )
