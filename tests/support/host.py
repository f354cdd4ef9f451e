"""Parameters that are drawn on the host."""

import jax
import numpy as np


def host_params(init, config, seed: int = 0):
    """Draw parameters of a model as its `init` does, on the host and without a program for each
    shape.
    """
    shapes = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    draw = np.random.default_rng(seed)

    def leaf(path, shape):
        name = path[-1].key
        if name.endswith("norm"):
            return np.ones(shape.shape, shape.dtype)
        if name.endswith("bias") or name in ("sinks", "router_load"):
            return np.zeros(shape.shape, shape.dtype)
        return (0.02 * draw.normal(size=shape.shape)).astype(shape.dtype)

    return jax.tree.map_with_path(leaf, shapes)
