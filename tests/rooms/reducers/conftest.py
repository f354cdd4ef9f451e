"""Fixtures that bind an axis, and draw gradients to reduce there."""

import numpy as np
import pytest
from support.ways import on_devices, ways

__all__ = ["draw_gradients", "on_devices", "ways"]


@pytest.fixture(scope="session")
def draw_gradients():
    """Return a function from shapes to gradients [size, *shape] of scales far apart."""

    def make(shapes, size, *, seed=0, dtype=np.float32):
        draw = np.random.default_rng(seed)
        scales = [10.0 ** (i % 3 - 1) for i in range(len(shapes))]
        arrays = [
            scale * draw.normal(size=(size, *shape))
            for scale, shape in zip(scales, shapes, strict=True)
        ]
        return {f"leaf{i}": np.asarray(x, dtype) for i, x in enumerate(arrays)}

    return make
