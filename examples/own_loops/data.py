"""The data and the first weights of every loop: a regression with rows of different scale."""

import numpy as np


def batches(count: int = 6, rows: int = 32, dtype: str = "float32") -> list[dict[str, np.ndarray]]:
    """Return batches of inputs x [rows, 16] and targets y [rows, 8]."""
    draw = np.random.default_rng(1)
    scale = np.linspace(0.3, 1.5, rows)[:, None]
    return [
        {
            "x": (scale * draw.normal(size=(rows, 16))).astype(dtype),
            "y": draw.normal(size=(rows, 8)).astype(dtype),
        }
        for _ in range(count)
    ]


def weights(dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return the weights of two layers: up [16, 32], down [32, 8]."""
    draw = np.random.default_rng(0)
    return {
        "up": (0.3 * draw.normal(size=(16, 32))).astype(dtype),
        "down": (0.3 * draw.normal(size=(32, 8))).astype(dtype),
    }
