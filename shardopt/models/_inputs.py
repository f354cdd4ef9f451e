"""Read and check a batch of tokens; the mean of its loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from shardopt.core import PyTree, Weighted, calling, format_error, type_error, value_error
from shardopt.nn._ids import IGNORED, as_int32

Params = dict[str, PyTree]
Batch = PyTree  # a dict of arrays; `read_inputs` refuses others
Tokens = Int[Array | np.ndarray, "B T"]
_OPTIONAL = "targets", "weights", "segment_ids", "positions", "order"
"""The leaves that a batch may have next to the tokens."""


def check_ids(caller: str, batch: PyTree, vocab_size: int, num_positions: int = 0) -> None:
    """Refuse ids in a batch on the host that the model does not have; no array of jax is read.

    Args:
      caller: the model, for errors.
      batch: the dict of `read_inputs`.
      vocab_size: V.
      num_positions: the rows of a table of positions; 0 if there is none.

    Raises:
      ValueError: if a token is not in 0, ..., V - 1, a target is neither that nor -100, or a
        position has no row in the table.
    """
    if not isinstance(batch, Mapping):
        return
    limits = {"tokens": vocab_size, "targets": vocab_size}
    if num_positions:
        limits["positions"] = num_positions
    problems = []
    for name, limit in limits.items():
        ids = batch.get(name)
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or not ids.size:
            continue
        lowest = int(ids.min())
        highest = int(ids.max())
        if name == "targets" and lowest == IGNORED:
            lowest = int(ids.min(where=ids != IGNORED, initial=0))
        if lowest < 0 or highest >= limit:
            wrong_id = lowest if lowest < 0 else highest
            problems.append(f"{name}: {wrong_id}, and the model has 0 to {limit - 1}")
    if problems:
        fix = "use the tokenizer of this model, and -100 for targets that are to be ignored."
        raise ValueError(
            format_error(caller, "ids of the batch are not those of the model.", problems, fix)
        )


class Inputs(NamedTuple):
    """The arrays of a batch.

    Attributes:
      tokens: [B, T], int32, the input tokens.
      targets: [B, T], int32, the next token of each; -100 if it is ignored.
      weights: [B, T], the weight of each target in the loss, 0 if it is ignored; None is 1 for all.
      segment_ids: [B, T], int32, the document of each token; None is one document per row.
      positions: [B, T], int32, the position of each token in its document, for position embeddings;
        None uses `order`.
      order: [B, T], int32, the position of each token in its row; None is natural order.
      whole: whether these are whole rows on each device, in natural order.
    """

    tokens: Array
    targets: Array
    weights: Array | np.ndarray | None
    segment_ids: Array | None
    positions: Array | None
    order: Array | None
    whole: bool = False


_EXPECTED = (
    "a batch is a dict with integer tokens [B, T + 1], or tokens and targets [B, T], T at least 1"
)


@calling("decoder")
def read_inputs(batch: PyTree) -> Inputs:
    """Return the checked arrays of a batch: a dict of "tokens" [B, T + 1], or of "tokens" and
    "targets" [B, T].

    Args:
      batch: the dict; optional "weights", "segment_ids", "positions" and "order" are [B, T] in
        either form.

    Raises:
      TypeError: if it is not a dict with tokens, or a leaf other than the weights does not hold
        integers.
      ValueError: if the batch has a leaf of another name, tokens have another shape, or another
        leaf does not have the shape of the inputs.
    """
    shape = _input_shape(batch)
    leaves = {name: batch[name] for name in _OPTIONAL if name in batch}
    weights = leaves.pop("weights", None)
    _check_leaves(leaves, weights, shape)
    tokens, integers = jax.tree.map(as_int32, (batch["tokens"], leaves))
    if "targets" in integers:
        targets = integers["targets"]
        is_counted = targets != IGNORED
        weights = is_counted if weights is None else jnp.where(is_counted, weights, 0)
    else:  # where no token may be -100
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
        targets = jnp.where(targets == IGNORED, -1, targets)
    return Inputs(
        tokens,
        targets,
        weights,
        integers.get("segment_ids"),
        integers.get("positions"),
        integers.get("order"),
        # a context axis cannot split T + 1 tokens
        whole=not {"targets", "positions", "order"} & set(integers),
    )


def _input_shape(batch: PyTree) -> tuple[int, int]:
    """Return [B, T] of a batch; refuse other leaves, and tokens of another kind or shape."""
    if not isinstance(batch, Mapping):
        raise type_error(f"{_EXPECTED}; got {type(batch).__name__}.")
    if "tokens" not in batch:
        raise type_error(f"{_EXPECTED}; got a dict with {sorted(batch)}.")
    unread = sorted(map(str, set(batch) - {"tokens", *_OPTIONAL}))
    if unread:
        fix = (
            f"leave them out, or use what it reads: {', '.join(_OPTIONAL)}. A mask of tokens is"
            " weights of 0 and 1. Labels are targets, shifted by one: the target of a token is the"
            " next one."
        )
        raise value_error("the model does not read all leaves of the batch.", unread, fix)
    tokens = batch["tokens"]
    num_shifted = 0 if "targets" in batch else 1
    if not _has_integers(tokens):
        raise type_error(f"{_EXPECTED}; got tokens of {tokens.dtype}.")
    if tokens.ndim != 2 or tokens.shape[1] <= num_shifted:
        raise value_error(f"{_EXPECTED}; got tokens of shape {tokens.shape}.")
    return tokens.shape[0], tokens.shape[1] - num_shifted


def _check_leaves(integers: Mapping[str, Any], weights: Any, shape: tuple[int, int]) -> None:
    leaves = integers if weights is None else {**integers, "weights": weights}
    bad_leaves = [
        f"{name}: shape {leaf.shape}" for name, leaf in leaves.items() if leaf.shape != shape
    ]
    if bad_leaves:
        raise value_error(f"a leaf of the batch is not of shape [B, T] = {shape}.", bad_leaves)
    bad_leaves = [
        f"{name}: {leaf.dtype}" for name, leaf in integers.items() if not _has_integers(leaf)
    ]
    if bad_leaves:
        raise type_error("a leaf of the batch does not hold integers.", bad_leaves)
    if weights is not None and jnp.iscomplexobj(weights):
        raise type_error(f"weights of the batch must be real, got {weights.dtype}.")


def _has_integers(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def mean_loss(nats: Float[Array, "B T"], inputs: Inputs) -> Float[Array, ""] | Weighted:
    """Return the mean over targets.

    If targets have weights, return the weighted mean over the global batch.
    """
    if inputs.weights is None:
        return jnp.mean(nats)
    weights = jnp.asarray(inputs.weights, nats.dtype)
    return Weighted(jnp.sum(nats * weights), jnp.sum(weights))
