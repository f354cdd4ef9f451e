"""The bits of a strategy with `exact(tile_rows=...)`, compared with the same strategy on one device."""

from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

from shardopt.config._user_mesh import UserMesh
from shardopt.core import PyTree, leaves_with_paths
from shardopt.diagnose._difference import Difference, as_numbers, compare
from shardopt.diagnose._whole_steps import values_of
from shardopt.step._build import build
from shardopt.step._global_rows import GlobalRows
from shardopt.step._optimizer import ShardedOptimizer


def compare_bits(opt: ShardedOptimizer, params: PyTree, batches: Iterable[PyTree]) -> Difference:
    """Train on the mesh and on one device, and return the first leaf whose bits differ, if any.

    Leaves are metrics, optimizer state and parameters after a step, in this order.

    Args:
      opt: the strategy.
      params: the first parameters, on the host.
      batches: the global batch of each step.
    """
    strategies = opt, _on_one_device(opt)
    states = [strategy.init(params) for strategy in strategies]
    for number, batch in enumerate(GlobalRows(batches), 1):
        leaves = []
        for i, strategy in enumerate(strategies):
            states[i], metrics = strategy.step(states[i], batch)
            values = values_of({"metrics": metrics, **states[i]._asdict()})
            leaves.append(leaves_with_paths(values))
        for (path, actual), (_, expected) in zip(*leaves, strict=True):
            if as_numbers(actual).tobytes() != as_numbers(expected).tobytes():
                name = f"bits of {path} after step {number}"
                difference = compare(name, actual, expected, tolerance=0.0)
                # 0 and -0 are equal numbers of other bits
                relative = max(difference.relative, np.finfo(float).tiny)
                return difference._replace(relative=relative, is_of_bits=True)
    return Difference("bits of one device", 0.0, 0.0)


def _on_one_device(opt: ShardedOptimizer) -> ShardedOptimizer:
    """Return a strategy on the first device of this process."""
    config = opt.config
    axes = config.mesh.axis_names
    device = np.array(config.mesh.local_devices[:1]).reshape([1 for _ in axes])
    mesh = Mesh(device, axes, axis_types=config.mesh.axis_types)
    return build(config.replace(mesh=mesh, user_mesh=UserMesh(mesh, {})))
