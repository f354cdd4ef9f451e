"""Which positions of its rows a device of the context axis holds: in natural order, zigzag or striped."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, leaves_with_paths
from shardopt.mesh import axes_of_role, is_analysed, mesh_under_trace

CONTEXT = "context"
Order = Literal["zigzag", "striped"]


def positions(length: int) -> Int[Array, " T"]:
    """Return the positions in their row of the tokens that this device holds; for use inside a loss.

    Device i of the context axis holds i length, ..., i length + length - 1, with `length` positions a device. On one device,
    without a context axis and in `view="global"`, where a loss sees whole rows, they are 0, ..., length - 1.

    **Equivalence**: position embeddings (rope, learned ones) taken at these positions are those of one device. A batch in
    another order (`so.nn.zigzag`) brings its own. **Communication**: none.

    Args:
      length: how many positions the arrays at hand have, such as `tokens.shape[1]`.

    Returns:
      [length], int32.

    Raises:
      TypeError: if length is not an integer.
      ValueError: if it is below 1.

    Example:
      >>> positions(3).tolist()
      [0, 1, 2]
    """
    check_count("positions", "length", length, least=1)
    if is_analysed():

        def shardopt_positions() -> Array:
            return jnp.arange(length, dtype=jnp.int32)

        return jax.jit(shardopt_positions)()
    at = jnp.arange(length, dtype=jnp.int32)
    mesh = mesh_under_trace()
    axes = tuple(axis for axis in axes_of_role(CONTEXT) if axis in mesh.manual_axes and mesh.shape[axis] > 1)
    return at + (jax.lax.axis_index(axes) * length).astype(jnp.int32) if axes else at


def zigzag(
    batch: PyTree,
    mesh: Mesh,
    *,
    order: Order = "zigzag",
    axis: str | tuple[str, ...] = CONTEXT,
    inverse: bool = False,
) -> PyTree:
    """Permute the positions of a batch so that every device of the context axis has as much causal attention to do.

    With C devices and rows of T tokens, device i holds T/C of them:

        zigzag    chunks i and 2C - 1 - i of 2C equal ones
        striped   tokens i, i + C, i + 2C, ...

    In natural order the last device has 2C - 1 times the work of the first, and all wait for it. Under "zigzag" each has
    (2C + 1) / (2C) of the mean; under "striped" each has it up to one token in T/C.

    **Equivalence**: exact, if the loss gives the "order" that comes with the batch to `so.nn.attention`, as `positions`, and takes
    position embeddings there; the example models do. "positions" that the batch has of its own, such as those of packed
    documents, are permuted like any leaf. Next-token targets must be made before: the token that follows is elsewhere.
    **Communication**: none; this runs on the host, or on the array's devices.

    Args:
      batch: pytree of arrays, numpy or jax; dim 1 of every leaf of two dims or more is permuted.
      mesh: the mesh, of whose context axis the size is read; without one, or of size 1, the batch is returned as it is.
      order: "zigzag" or "striped".
      axis: the name of the context axis, or names, where the mesh calls it otherwise.
      inverse: undo it, as for outputs [B, T, ...]; then no order is added.

    Returns:
      The batch; if it is a dict, "order" says where each token stood in its row: [B, T], int32. One that the batch has is
      permuted too, and so still says it of the rows that were permuted first.

    Raises:
      ValueError: if 2C (zigzag) or C (striped) does not divide T, the order is unknown, no leaf has two dims, or leaves differ
        in T where the order is to be added.

    Example:
      >>> import jax, numpy as np, shardopt as so
      >>> mesh = so.make_mesh(context=2, devices=jax.devices()[:2])
      >>> so.nn.zigzag({"tokens": np.array([[5, 6, 7, 8]])}, mesh)["order"].tolist()
      [[0, 3, 1, 2]]

    References:
      Brandon et al., "Striped Attention", 2023; zigzag is that of Llama 3's context parallelism (Grattafiori et al., "The
      Llama 3 Herd of Models", 2024, section 3.3.2).
    """
    if order not in get_args(Order):
        raise ValueError(format_error("zigzag", f"unknown order {order!r}.", fix="use 'zigzag' or 'striped'."))
    axes = (axis,) if isinstance(axis, str) else axis
    count = int(np.prod([mesh.shape.get(one, 1) for one in axes]))
    pieces = 2 * count if order == "zigzag" else count
    long = [(path, leaf) for path, leaf in leaves_with_paths(batch) if np.ndim(leaf) > 1]
    if not long:
        raise ValueError(format_error("zigzag", "no leaf has a dim of positions.", fix="give arrays [B, T, ...]."))
    if count == 1:
        return batch
    if bad := [f"{path or 'batch'}: shape {leaf.shape}" for path, leaf in long if leaf.shape[1] % pieces]:
        what = f"{order} over {count} devices needs a number of positions (dim 1) divisible by {pieces}."
        raise ValueError(format_error("zigzag", what, bad, f"pad the rows to a multiple of {pieces}."))

    def moved(leaf: Any) -> Any:
        if np.ndim(leaf) < 2:
            return leaf
        take = _taken(leaf.shape[1], count, order)
        return leaf[:, np.argsort(take) if inverse else take]

    result = jax.tree.map(moved, batch)
    if inverse or not isinstance(batch, dict) or "order" in batch:
        return result
    shapes = {leaf.shape[:2] for _, leaf in long}
    if len(shapes) > 1:
        listed = [f"{path}: shape {leaf.shape}" for path, leaf in long]
        what = "leaves have rows of several lengths, so that one order does not fit all."
        raise ValueError(format_error("zigzag", what, listed, "add 'order' [B, T] to the batch yourself."))
    rows, length = shapes.pop()
    take = _taken(length, count, order).astype(np.int32)
    return {**result, "order": np.tile(take, (rows, 1))}


def _taken(length: int, count: int, order: str) -> np.ndarray:
    """Return the position of each token in the new order."""
    at = np.arange(length)
    if order == "striped":
        return at.reshape(-1, count).T.ravel()
    chunks = at.reshape(2 * count, -1)
    return np.stack([chunks[:count], chunks[: count - 1 : -1]], axis=1).ravel()
