"""A small transformer whose positions see each other by `so.nn.attention`, with packed and weighted
batches.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardopt as so

ROWS = 8
LENGTH = 16
WIDTH = 16
HEADS = 8
GROUPS = 4
HEAD = 4
VOCAB = 32
LAYERS = 4
RULES = (
    ("^blocks/[qkv]$", P(None, "tensor", None)),
    ("^blocks/out$", P("tensor", None, None)),
    ("^blocks/up$", P(None, "tensor")),
    ("^blocks/down$", P("tensor", None)),
)


class Sequences(NamedTuple):
    """A strategy gets `model`; `reference` is the same loss for one device."""

    params: Any
    model: so.BlockModel
    reference: Any
    batches: list[Any]


def sequences(
    method: str | None = None,
    *,
    packed: bool = False,
    window: int | None = None,
    order=None,
    steps: int = 2,
) -> Sequences:
    """Build the model with an attention method, and batches in an order: `order(batch)`."""

    def embed(outer, batch):
        x = so.nn.embedding(outer["embedding"], batch["tokens"])
        return {"x": x} | {
            name: batch[name] for name in ("segment_ids", "positions", "order") if name in batch
        }

    def block(weights, inputs):
        x = inputs["x"]
        order = inputs.get("order")
        positions = inputs.get(
            "positions", so.nn.positions(x.shape[1])[None] if order is None else order
        )
        query, key, value = (jnp.einsum("btd,dhk->bthk", x, weights[name]) for name in "qkv")
        marks = {"segment_ids": inputs.get("segment_ids"), "positions": order}
        mixed = so.nn.attention(
            rotated(query, positions),
            rotated(key, positions),
            value,
            window=window,
            method=method,
            **marks,
        )
        x = x + jnp.einsum("bthk,hkd->btd", mixed, weights["out"])
        return inputs | {"x": x + jnp.tanh(x @ weights["up"]) @ weights["down"]}

    def loss(outer, inputs, batch):
        nats = so.nn.cross_entropy(inputs["x"], outer["head"], batch["targets"], chunk=4)
        return so.losses.Weighted((nats * batch["weights"]).sum(), batch["weights"].sum())

    draw = np.random.default_rng(3)

    def normal(*shape):
        return 0.2 * draw.normal(size=shape)

    blocks = {
        "q": normal(LAYERS, WIDTH, HEADS, HEAD),
        "k": normal(LAYERS, WIDTH, GROUPS, HEAD),
        "v": normal(LAYERS, WIDTH, GROUPS, HEAD),
        "out": normal(LAYERS, HEADS, HEAD, WIDTH),
        "up": normal(LAYERS, WIDTH, 32),
        "down": normal(LAYERS, 32, WIDTH),
    }
    params = {"embedding": normal(VOCAB, WIDTH), "head": normal(VOCAB, WIDTH), "blocks": blocks}
    model = so.BlockModel(embed, block, loss, tables=("embedding",))
    batches = [(order or (lambda batch: batch))(_batch(draw, packed)) for _ in range(steps)]

    def reference(params, batch):
        weighted_loss = model.loss_fn(params, batch)
        return weighted_loss.total / weighted_loss.weight

    return Sequences(params, model, reference, batches)


def rotated(x, positions):
    """Turn pairs of components by angles that grow with the position."""
    angle = positions[..., None] * (0.1 ** jnp.arange(x.shape[-1] // 2))[None, None]
    cos = jnp.cos(angle)[:, :, None].astype(x.dtype)
    sin = jnp.sin(angle)[:, :, None].astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _batch(draw, packed):
    batch = {
        "tokens": draw.integers(0, VOCAB, size=(ROWS, LENGTH)),
        "targets": draw.integers(0, VOCAB, size=(ROWS, LENGTH)),
        "weights": np.maximum(0.0, draw.uniform(-0.5, 2.0, size=(ROWS, LENGTH))),
    }
    if packed:  # documents that end anywhere, also within a device's part
        ends = np.sort(draw.integers(1, LENGTH, size=(ROWS, 2)), axis=1)
        at = np.arange(LENGTH)[None]
        batch["segment_ids"] = (at >= ends[:, :1]).astype(np.int32) + (at >= ends[:, 1:])
        starts = np.concatenate([np.zeros((ROWS, 1), np.int32), ends.astype(np.int32)], axis=1)
        batch["positions"] = at.astype(np.int32) - np.take_along_axis(
            starts, batch["segment_ids"], axis=1
        )
    return batch
