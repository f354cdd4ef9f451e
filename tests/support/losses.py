"""Losses that are no mean over rows, as people write them: each device's share of rows alone gives
another number.

Right as they stand on one device and in the global view; in the per-device view they are refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS = 32


class MixingLoss(NamedTuple):
    """A loss whose part of a row depends on other rows.

    Attributes:
      loss_fn: `loss_fn(params, batch) -> scalar`.
      params: the start of training, float64 numpy arrays. Eight devices divide the dims of most of
        them.
      make_batch: `make_batch(draw, rows=32)`, whose rows differ in scale and weight, so that every
        share of them shows.
    """

    loss_fn: Callable[..., Any]
    params: dict[str, np.ndarray]
    make_batch: Callable[..., dict[str, np.ndarray]]

    def batches(
        self, steps: int, dtype: Any = np.float64, rows: int = ROWS
    ) -> list[dict[str, np.ndarray]]:
        """Return as many batches, floating leaves of this dtype."""
        draw = np.random.default_rng(5)
        return [cast(self.make_batch(draw, rows), dtype) for _ in range(steps)]


def cast(tree: Any, dtype: Any) -> Any:
    """Return a tree whose floating leaves have this dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x, tree
    )


def clip(params, batch):
    """Contrastive loss over the pairs of the batch: every other text is a negative of an image."""
    image = batch["image"] @ params["image"]
    text = batch["text"] @ params["text"]
    image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
    text = text / jnp.linalg.norm(text, axis=-1, keepdims=True)
    logits = image @ text.T * jnp.exp(params["temperature"])
    rows = jnp.arange(logits.shape[0])

    def right(logits):
        return jnp.mean(jax.nn.log_softmax(logits)[rows, rows])

    return -(right(logits) + right(logits.T)) / 2


def advantages(params, batch):
    """The clipped objective of PPO, with advantages normalised over the batch."""
    log_policy = jax.nn.log_softmax(jnp.tanh(batch["x"] @ params["up"]) @ params["down"])
    chosen = jnp.take_along_axis(log_policy, batch["label"][:, None], axis=1)[:, 0]
    advantage = (batch["value"] - batch["value"].mean()) / (batch["value"].std() + 1e-8)
    ratio = jnp.exp(chosen - batch["old"])
    return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.5, 1.5) * advantage))


def sum_of_rows(params, batch):
    """A sum where a mean was meant."""
    return jnp.sum(_errors(params, batch)) / 64


def two_normalisers(params, batch):
    """A masked term divided by the mask, and a mean: no one weight serves both."""
    masked = jnp.sum(_errors(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])
    return masked + 0.1 * jnp.mean(jnp.tanh(batch["x"] @ params["up"]) ** 2)


def inner_gradient(params, batch):
    """MAML: the loss on other targets after a gradient step on the batch."""
    inner = jax.grad(lambda params: jnp.mean(_errors(params, batch)))(params)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
    return jnp.mean((_forward(moved, batch["x"]) - batch["y"][:, ::-1]) ** 2)


def constant_key(params, batch):
    """Denoising with a key that is written into the loss: devices would draw the same noise for
    other rows.
    """
    noisy = batch["x"] + jax.random.normal(jax.random.key(0), batch["x"].shape, batch["x"].dtype)
    return jnp.mean((_forward(params, noisy) - batch["y"]) ** 2)


def batch_norm(params, batch):
    """Normalise by the mean and variance of the batch."""
    x = batch["x"] @ params["up"]
    x = (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)
    x = jnp.tanh(x * params["scale"][None, :])
    return jnp.mean((x @ params["down"] - batch["y"]) ** 2)


def weighted_by_data(params, batch):
    """Divide by the weights of the batch, written without `Weighted`."""
    return jnp.sum(_errors(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])


def top_half(params, batch):
    """The mean of the half of the rows that fit worst."""
    ordered = jnp.sort(_errors(params, batch))
    return jnp.mean(ordered[ordered.shape[0] // 2 :])


def quantile(params, batch):
    """The rows below a quantile of the batch's errors count fully, the others a tenth."""
    errors = _errors(params, batch)
    return jnp.mean(
        jnp.where(errors <= jax.lax.stop_gradient(jnp.quantile(errors, 0.7)), errors, 0.1 * errors)
    )


def balance(params, batch):
    """A mixture of experts' balance term: the share of rows times the mean probability, expert by
    expert.
    """
    gates = jax.nn.softmax(batch["x"] @ params["up"])
    chosen = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1], dtype=gates.dtype)
    term = gates.shape[-1] * jnp.sum(chosen.mean(0) * gates.mean(0))
    return jnp.mean((gates @ params["down"] - batch["y"]) ** 2) + term


def root_of_mean(params, batch):
    """Return the root mean square error."""
    return jnp.sqrt(jnp.mean(_errors(params, batch)))


def _forward(params, x):
    return jnp.tanh(x @ params["up"] * params["scale"][None, :]) @ params["down"]


def _errors(params, batch):
    return jnp.mean((_forward(params, batch["x"]) - batch["y"]) ** 2, axis=-1)


def _network() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)

    def normal(*shape):
        return draw.normal(size=shape) * 0.4

    return {"up": normal(12, 16), "scale": 1 + normal(16), "down": normal(16, 5)}


def _rows(draw: np.random.Generator, rows: int = ROWS) -> dict[str, np.ndarray]:
    scale = np.linspace(0.2, 2.0, rows)[:, None]
    return {
        "x": scale * draw.normal(size=(rows, 12)),
        "y": scale * draw.normal(size=(rows, 5)),
        "weight": np.linspace(0.1, 1.9, rows) * draw.uniform(0.5, 1.5, size=rows),
        "mask": (draw.uniform(size=rows) < np.linspace(0.3, 0.9, rows)).astype(np.float64),
        "label": draw.integers(0, 5, size=rows),
        "value": scale[:, 0] * draw.normal(size=rows) + np.linspace(-1, 1, rows),
        "old": draw.uniform(-2.0, -1.0, size=rows),
    }


def _pairs(draw: np.random.Generator, rows: int = ROWS) -> dict[str, np.ndarray]:
    return {"image": draw.normal(size=(rows, 12)), "text": draw.normal(size=(rows, 10))}


def _towers() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {
        "image": draw.normal(size=(12, 16)),
        "text": draw.normal(size=(10, 16)),
        "temperature": np.array(0.5),
    }


LOSSES: dict[str, MixingLoss] = {"clip": MixingLoss(clip, _towers(), _pairs)} | {
    loss_fn.__name__: MixingLoss(loss_fn, _network(), _rows)
    for loss_fn in (
        advantages,
        sum_of_rows,
        two_normalisers,
        inner_gradient,
        constant_key,
        batch_norm,
        weighted_by_data,
        top_half,
        quantile,
        balance,
        root_of_mean,
    )
}
"""The table of "any loss", by name."""
