"""`eight_bit`: moments of an optimizer in 8 bits a number, in small blocks with a scale each."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from shardopt.core.arguments import check_count, check_transformation
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.transforms.dynamic_map import decode, encode

WHO = "eight_bit"
_FEWEST = 16
"""Numbers of a block below which its scale would be a burden."""
_BLOCKS = 256
"""A first dim of two below this may count blocks of a model, which are sharded over pipelines."""


class EightBitState(NamedTuple):
    """The state of `eight_bit`.

    Attributes:
      state: that of `inner`, with uint8 codes, shaped as they were, in the place of its moments.
      scales: a tree like it: the largest magnitude of each block of codes; None where there are no codes.
    """

    state: PyTree
    scales: PyTree


def eight_bit(
    inner: optax.GradientTransformation,
    *,
    block_size: int = 64,
    min_elements: int = 2**16,
    signed: Sequence[str] = ("mu", "trace"),
    unsigned: Sequence[str] = ("nu", "nu_max", "sum_of_squares"),
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of an optimizer in 8 bits between steps.

    Each step decodes them, runs `inner`, and rounds them again, to the nearest of 256 numbers (the dynamic map)
    times the largest magnitude s of their block:

        update, m = inner(gradient, s_m decode(c_m)),   s_m = max |m|,   c_m = encode(m / s_m)

    A block is `block_size` neighbours that do not lie along the leaf's longest dim, which is the one that strategies shard: rows
    of an inner dim, and where that is too short, tiles. It depends on the shape of the leaf alone, so training is the
    same on any number of devices. Rounded is only what `inner`'s state has under one of the names given, with the key path and
    shape of a parameter; leaves of fewer than `min_elements`, or whose dims have too few powers of two for blocks of 16, stay
    as they are.

    **Equivalence**: not that of `inner`, but under any strategy equal to one device with `eight_bit(inner)`, up to
    summation order, but for numbers that lie half way between two codes.

    **Placement**: codes live as their parameter does, and so do scales where it is cut between blocks, elsewhere as any leaf. A
    moment takes 1 + itemsize / block_size bytes a parameter, so Adam in fp32 2 + 8 / 64 = 2.125 in place of 8. In between a
    step holds decoded moments as temporaries. Replicas that train apart are restored as many as they were: codes have no mean.

    **Communication**: none of its own where a block lies within a shard: if the longest dim is sharded, or another one into
    shards whose lengths are multiples of `block_size`. Otherwise the partitioner gathers.

    Args:
      inner: an optax transformation.
      block_size: numbers that share a scale, a power of two.
      min_elements: leaves with fewer numbers stay as they are: their scales would be too few to be sharded.
      signed: names in `inner`'s state of moments of any sign.
      unsigned: names of those that are never negative, which have one bit more.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if one is out of range; in `init`, if nothing of the state is rounded.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.eight_bit(optax.adam(1e-3))
      >>> state = tx.init({"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)})
      >>> state.state[0].mu["w"].dtype, state.scales[0].mu["w"].shape, state.state[0].mu["b"].dtype
      (dtype('uint8'), (512, 4), dtype('float32'))
      >>> sum(x.nbytes for x in jax.tree.leaves(state)) / (512 * 256)
      2.140655517578125

    References:
      Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021, section 2.
    """
    tx = check_transformation(WHO, "inner", inner)
    check_count(WHO, "block_size", block_size, least=_FEWEST)
    check_count(WHO, "min_elements", min_elements)
    if block_size & (block_size - 1):
        raise ValueError(f"{WHO}: block_size must be a power of two, got {block_size}.")
    for name, names in (("signed", signed), ("unsigned", unsigned)):
        if isinstance(names, str) or not all(isinstance(one, str) for one in names):
            raise TypeError(f"{WHO}: {name} must be a sequence of names, got {names!r}.")

    def rounded(leaf: jax.Array) -> bool:
        fits = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size >= min_elements
        return fits and math.prod(tile_of(leaf.shape, block_size)) >= _FEWEST

    def store(state: PyTree, signs: list[bool | None]) -> EightBitState:
        leaves, treedef = jax.tree.flatten(state)
        pairs = [
            (leaf, None) if sign is None else _encoded(leaf, tile_of(leaf.shape, block_size), signed=sign)
            for leaf, sign in zip(leaves, signs, strict=True)
        ]
        return EightBitState(*(treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1)))

    def signs_of(state: PyTree, params: PyTree) -> list[bool | None]:
        shapes = {tuple(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return [_sign(path, leaf.shape, shapes, signed, unsigned) for path, leaf in leaves]

    def init(params):
        state = tx.init(params)
        pairs = zip(signs_of(state, params), jax.tree.leaves(state), strict=True)
        signs = [sign if rounded(leaf) else None for sign, leaf in pairs]
        if all(sign is None for sign in signs):
            problem = f"nothing in the state of inner= is rounded to 8 bits: no leaf of {min_elements} numbers or more."
            names = ", ".join(map(repr, (*signed, *unsigned)))
            fix = f"lower min_elements, or name what to round in signed= or unsigned= (now {names})."
            raise ValueError(format_error(WHO, problem, fix=fix))
        return store(state, signs)

    def update(updates, state, params=None, **extra_args: Any):
        codes, treedef = jax.tree.flatten(state.state)
        scales = treedef.flatten_up_to(state.scales)
        pairs = zip(signs_of(state.state, updates), scales, strict=True)
        signs = [None if scale is None else sign for sign, scale in pairs]
        leaves = [
            leaf if sign is None else _decoded(leaf, scale, signed=sign)
            for leaf, scale, sign in zip(codes, scales, signs, strict=True)
        ]
        found, new = tx.update(updates, treedef.unflatten(leaves), params, **extra_args)
        return found, store(new, signs)

    return optax.GradientTransformationExtraArgs(init, update)


def tile_of(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return how far a block reaches along each dim: as many powers of two as divide the dims, `size` numbers at most.

    Along the longest dim only what the others leave; along a dim that may count blocks of a model, nothing.
    """
    if len(shape) == 0:
        return ()
    inner = range(1 if len(shape) > 2 else 0, len(shape))
    longest = max(inner, key=lambda dim: shape[dim])
    others = [dim for dim in reversed(inner) if dim != longest and (dim or shape[dim] >= _BLOCKS)]
    tile = [1] * len(shape)
    for dim in [*others, longest]:
        tile[dim] = min(size // math.prod(tile), shape[dim] & -shape[dim])
    return tuple(tile)


def _encoded(leaf: jax.Array, tile: tuple[int, ...], *, signed: bool) -> tuple[jax.Array, jax.Array]:
    tiles, dims = _tiles(leaf, tile)
    scales = jnp.max(jnp.abs(tiles), dims, keepdims=True)
    shares = tiles / jnp.where(scales > 0, scales, jnp.ones_like(scales))
    codes = encode(shares, signed=signed).reshape(leaf.shape)
    return codes, scales.reshape([length // edge for length, edge in zip(leaf.shape, tile, strict=True)])


def _decoded(codes: jax.Array, scales: jax.Array, *, signed: bool) -> jax.Array:
    tile = tuple(length // count for length, count in zip(codes.shape, scales.shape, strict=True))
    tiles, dims = _tiles(codes, tile)
    numbers = decode(tiles, scales.dtype, signed=signed)
    return (numbers * jnp.expand_dims(scales, dims)).reshape(codes.shape)


def _tiles(leaf: jax.Array, tile: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Return a leaf with each dim in two, [blocks, within], and which dims are those within."""
    shape = [part for length, edge in zip(leaf.shape, tile, strict=True) for part in (length // edge, edge)]
    return leaf.reshape(shape), tuple(range(1, len(shape), 2))


def _sign(
    path: KeyPath,
    shape: tuple[int, ...],
    mirrored: dict[KeyPath, tuple[int, ...]],
    signed: Sequence[str],
    unsigned: Sequence[str],
) -> bool | None:
    """Return whether a leaf of the state is a moment of any sign; None if it is no moment of a parameter."""
    starts = [start for start in range(len(path) + 1) if mirrored.get(tuple(path[start:])) == shape]
    if not starts or not _named(path[: starts[0]], (*signed, *unsigned)):
        return None
    return not _named(path[: starts[0]], unsigned)


def _named(path: KeyPath, names: Sequence[str]) -> bool:
    return any(getattr(key, "name", getattr(key, "key", None)) in names for key in path)
