"""Which positions of its rows a device of the context axis holds: in natural order, zigzag or
striped.
"""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from shardopt.core import PyTree, calling, check_count, leaves_with_paths, value_error
from shardopt.mesh import is_analysed, manual_context_axes, spec_axes
from shardopt.trace._marks import POSITIONS, marked

CONTEXT = "context"
Order = Literal["zigzag", "striped"]


def positions(length: int) -> Int[Array, " T"]:
    """Return the positions, in their row, of the tokens that this device holds.

    For use inside a loss.

    Args:
      length: how many positions the local arrays have, such as `tokens.shape[1]`.

    Returns:
      [length], int32.

    Raises:
      TypeError: if length is not an integer.
      ValueError: if length is below 1.

    Example:
      >>> positions(3).tolist()
      [0, 1, 2]

    Device i of the context axis holds i length, ..., i length + length - 1, with `length` positions
    a device. On one device, without a context axis and in `view="global"`, where a loss sees whole
    rows, they are 0, ..., length - 1.

    **Equivalence**: position embeddings (rope, learned ones) at these positions equal the
    embeddings on one device. A batch in another order (`so.nn.zigzag`) brings its own positions.
    **Communication**: none.
    """
    with calling("positions"):
        check_count("length", length, minimum=1)
    if is_analysed():
        return marked(POSITIONS, functools.partial(jnp.arange, length, dtype=jnp.int32))()
    local_positions = jnp.arange(length, dtype=jnp.int32)
    axes = tuple(manual_context_axes())
    return (
        local_positions + (jax.lax.axis_index(axes) * length).astype(jnp.int32)
        if axes
        else local_positions
    )


def row_length(length: int) -> int:
    """Return the number of positions of a whole row, if this device holds `length` of them."""
    return length if is_analysed() else length * math.prod(manual_context_axes().values())


@calling("zigzag")
def zigzag(
    batch: PyTree,
    mesh: Mesh,
    *,
    order: Order = "zigzag",
    axis: str | tuple[str, ...] = CONTEXT,
    inverse: bool = False,
) -> PyTree:
    """Permute the positions of a batch so that all devices of the context axis have the same amount
    of causal attention.

    Args:
      batch: pytree of arrays, numpy or jax; dim 1 of every leaf of two dims or more is permuted.
      mesh: the mesh with the context axis. Without this axis, or with size 1, the batch is returned
        unchanged.
      order: "zigzag" or "striped".
      axis: the name or names of the context axis, if the mesh does not call it "context".
      inverse: undo the permutation, for example of outputs [B, T, ...]. Then no order is added.

    Returns:
      The batch. If it is a dict, "order" is the position of each token in its original row: [B, T],
      int32. If the batch already has "order", that is permuted too, and still refers to the rows
      before the first permutation.

    Raises:
      ValueError: if 2C (zigzag) or C (striped) does not divide T; if the order is unknown; if no
        leaf has two dims. If an order is to be added and leaves differ in T.

    Example:
      >>> import jax, numpy as np, shardopt as so
      >>> mesh = so.make_mesh(context=2, devices=jax.devices()[:2])
      >>> so.nn.zigzag({"tokens": np.array([[5, 6, 7, 8]])}, mesh)["order"].tolist()
      [[0, 3, 1, 2]]

    With C devices and rows of T tokens, device i holds T/C of them:

        zigzag    chunks i and 2C - 1 - i of 2C equal chunks
        striped   tokens i, i + C, i + 2C, ...

    In natural order the last device has 2C - 1 times the work of the first, and all wait for it.
    With "zigzag" each device has (2C + 1) / (2C) of the mean. With "striped" each device has as
    much, up to one token in T/C.

    **Equivalence**: exact, if the loss passes the batch's "order" to `so.nn.attention` as
    `positions`, and takes position embeddings at these positions; the example models do. A batch's
    own "positions", such as the positions of packed documents, are permuted like any leaf. Make
    next-token targets before: afterwards the next token is at another place. **Communication**:
    none; this runs on the host, or on the array's devices.

    References:
      Brandon et al., "Striped Attention", 2023; zigzag is that of Llama 3's context parallelism
      (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2).
    """
    if order not in get_args(Order):
        raise value_error(f"unknown order {order!r}.", fix="use 'zigzag' or 'striped'.")
    num_devices = math.prod(mesh.shape.get(name, 1) for name in spec_axes([axis]))
    leaves_with_positions = {
        path: leaf for path, leaf in leaves_with_paths(batch) if np.ndim(leaf) > 1
    }
    if not leaves_with_positions:
        raise value_error("no leaf has a dim of positions.", fix="give arrays [B, T, ...].")
    if num_devices == 1:
        return batch
    _check_lengths(leaves_with_positions, order, num_devices)

    def permute(leaf: Any) -> Any:
        if np.ndim(leaf) < 2:
            return leaf
        order_of_positions = _permutation(leaf.shape[1], num_devices, order)
        return leaf[:, np.argsort(order_of_positions) if inverse else order_of_positions]

    result = jax.tree.map(permute, batch)
    if inverse or not isinstance(batch, dict) or "order" in batch:
        return result
    shapes = {leaf.shape[:2] for leaf in leaves_with_positions.values()}
    if len(shapes) > 1:
        listed = [f"{path}: shape {leaf.shape}" for path, leaf in leaves_with_positions.items()]
        problem = "leaves have rows of several lengths, so that one order does not fit all."
        raise value_error(problem, listed, "add 'order' [B, T] to the batch yourself.")
    rows, length = shapes.pop()
    order_of_positions = _permutation(length, num_devices, order).astype(np.int32)
    return {**result, "order": np.tile(order_of_positions, (rows, 1))}


def _check_lengths(leaves: dict[str, Any], order: str, num_devices: int) -> None:
    pieces = 2 * num_devices if order == "zigzag" else num_devices
    bad_leaves = [
        f"{path or 'batch'}: shape {leaf.shape}"
        for path, leaf in leaves.items()
        if leaf.shape[1] % pieces
    ]
    if bad_leaves:
        problem = (
            f"{order} over {num_devices} devices needs a number of positions (dim 1) divisible by"
            f" {pieces}."
        )
        raise value_error(problem, bad_leaves, f"pad the rows to a multiple of {pieces}.")


def _permutation(length: int, num_devices: int, order: str) -> np.ndarray:
    """Return the original position of each token in the new order."""
    positions = np.arange(length)
    if order == "striped":
        return positions.reshape(-1, num_devices).T.ravel()
    # Chunk i has few keys before it and chunk 2C - 1 - i many: together all pairs have as many.
    chunks = positions.reshape(2 * num_devices, -1)
    return np.stack([chunks[:num_devices], chunks[: num_devices - 1 : -1]], axis=1).ravel()
