"""`eight_bit`: store the moments of an optimizer in 8 bits per number, in small blocks that each
have a scale.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from shardopt.core import PyTree, calling, check_count, check_transformation, format_error
from shardopt.transforms._dynamic_map import decode, encode
from shardopt.transforms._state_form import check_structure

CALLER = "eight_bit"
_MIN_BLOCK_SIZE = 16
"""The smallest number of elements in a block: with fewer elements, the scales would need too much
memory.
"""
_MAX_MODEL_BLOCKS = 256
"""If a leaf has two dims and the first is below this, the first dim may count blocks of a model.

Pipelines shard such a dim.
"""


class EightBitState(NamedTuple):
    """The state of `eight_bit`.

    Attributes:
      state: the state of `inner`; uint8 codes of the same shapes replace the moments.
      scales: a tree like `state`, with the largest magnitude of each block of codes; None for
        leaves without codes.
    """

    state: PyTree
    scales: PyTree


@calling(CALLER)
def eight_bit(
    inner: optax.GradientTransformation,
    *,
    block_size: int = 64,
    min_elements: int = 2**16,
    signed: Sequence[str] = ("mu", "trace"),
    unsigned: Sequence[str] = ("nu", "nu_max", "sum_of_squares"),
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of an optimizer in 8 bits between steps.

    Args:
      inner: an optax transformation.
      block_size: the number of elements that share a scale, a power of two.
      min_elements: leaves with fewer elements are not rounded, because their scales would be too
        few to be sharded.
      signed: names in `inner`'s state of moments of any sign.
      unsigned: names in `inner`'s state of moments that are never negative. Their codes have one
        more bit.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if an argument is out of range; in `init`, if no leaf of the state is rounded.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.eight_bit(optax.adam(1e-3))
      >>> state = tx.init({"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)})
      >>> state.state[0].mu["w"].dtype, state.scales[0].mu["w"].shape, state.state[0].mu["b"].dtype
      (dtype('uint8'), (512, 4), dtype('float32'))
      >>> sum(x.nbytes for x in jax.tree.leaves(state)) / (512 * 256)
      2.140655517578125

    Each step decodes the moments, runs `inner`, and rounds the new moments to codes. A code stands
    for one of 256 numbers (the dynamic map), times the largest magnitude s of the block:

        update, m = inner(gradient, s_m decode(c_m)),   s_m = max |m|,   c_m = encode(m / s_m)

    A block is `block_size` neighbouring elements. It avoids the leaf's longest dim, which
    strategies shard: a block is a row of an inner dim, or a tile if that dim is too short. Blocks
    depend only on the shape of the leaf, so training is the same on any number of devices.

    A leaf of `inner`'s state is rounded only if it is under a name in `signed` or `unsigned`, and
    if a parameter has its key path and shape. Not rounded are leaves

    - with fewer than `min_elements` elements, or
    - whose dims have too few factors of two for blocks of 16.

    **Equivalence**: not equal to `inner`. Under any strategy it equals one device with
    `eight_bit(inner)`, up to summation order, except for numbers half way between two codes.

    **Placement**: codes are placed like their parameter. Scales are too, if the parameter is
    sharded between blocks; otherwise they are placed like any leaf. A moment takes 1 + itemsize /
    block_size bytes per parameter: Adam in fp32 takes 2 + 8 / 64 = 2.125 bytes instead of 8. During
    a step, decoded moments are temporaries. A checkpoint of replicas that train apart can be
    restored only on the same number of replicas, because codes have no mean.

    **Communication**: none, except the communication of `inner`, if each block is within a shard.
    This holds if the longest dim is sharded, or another dim into shards whose lengths are multiples
    of `block_size`. Otherwise the partitioner gathers.

    References:
      Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
      2021, section 2.
    """
    tx = check_transformation("inner", inner)
    check_count("block_size", block_size, minimum=_MIN_BLOCK_SIZE)
    check_count("min_elements", min_elements)
    if block_size & (block_size - 1):
        raise ValueError(f"{CALLER}: block_size must be a power of two, got {block_size}.")
    for name, names in (("signed", signed), ("unsigned", unsigned)):
        if isinstance(names, str) or not all(isinstance(entry, str) for entry in names):
            raise TypeError(f"{CALLER}: {name} must be a sequence of names, got {names!r}.")

    functions = _EightBit(tx, block_size, min_elements, signed, unsigned)
    return optax.GradientTransformationExtraArgs(functions.init, functions.update)


@dataclasses.dataclass(frozen=True)
class _EightBit:
    """The functions of `eight_bit`, with its arguments."""

    tx: optax.GradientTransformationExtraArgs
    block_size: int
    min_elements: int
    signed: Sequence[str]
    unsigned: Sequence[str]

    def init(self, params: PyTree) -> EightBitState:
        state = self.tx.init(params)
        pairs = zip(self.signs_of(state, params), jax.tree.leaves(state), strict=True)
        signs = [sign if self.is_rounded(leaf) else None for sign, leaf in pairs]
        if all(sign is None for sign in signs):
            size = self.min_elements
            problem = (
                f"nothing in the state of inner= is rounded to 8 bits: no leaf of {size} numbers or"
                " more."
            )
            names = ", ".join(map(repr, (*self.signed, *self.unsigned)))
            fix = (
                f"lower min_elements, or name what to round in signed= or unsigned= (now {names})."
            )
            raise ValueError(format_error(CALLER, problem, fix=fix))
        return self.store(state, signs)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, EightBitState]:
        codes, treedef = jax.tree.flatten(state.state)
        scales = treedef.flatten_up_to(state.scales)
        # Which leaves are codes is read from the state: a leaf without a scale is stored as it is.
        pairs = zip(self.signs_of(state.state, updates), scales, strict=True)
        signs = [None if scale is None else sign for sign, scale in pairs]
        leaves = [
            leaf if sign is None else _decoded(leaf, scale, signed=sign)
            for leaf, scale, sign in zip(codes, scales, signs, strict=True)
        ]
        inner_updates, inner_state = self.tx.update(
            updates, treedef.unflatten(leaves), params, **extra_args
        )
        with calling(CALLER):
            check_structure(state.state, inner_state)
        return inner_updates, self.store(inner_state, signs)

    def is_rounded(self, leaf: jax.Array) -> bool:
        """Return whether a moment is large enough to be rounded, and its dims have enough factors
        of two.
        """
        is_large = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size >= self.min_elements
        return is_large and math.prod(tile_of(leaf.shape, self.block_size)) >= _MIN_BLOCK_SIZE

    def signs_of(self, state: PyTree, params: PyTree) -> list[bool | None]:
        """Return for each leaf of a state whether it has a sign.

        None for a leaf that is not rounded.
        """
        shapes = {
            tuple(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return [
            _sign(path, leaf.shape, shapes, self.signed, self.unsigned) for path, leaf in leaves
        ]

    def store(self, state: PyTree, signs: list[bool | None]) -> EightBitState:
        """Return the state with codes and scales in place of the leaves that have a sign."""
        leaves, treedef = jax.tree.flatten(state)
        pairs = [
            (
                (leaf, None)
                if sign is None
                else _encoded(leaf, tile_of(leaf.shape, self.block_size), signed=sign)
            )
            for leaf, sign in zip(leaves, signs, strict=True)
        ]
        return EightBitState(*(treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1)))


def tile_of(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of a block: powers of two that divide the dims, with at most `size` elements
    together.

    The longest dim takes only the factors of two that the other dims leave. A dim that may count
    blocks of a model takes none.
    """
    if len(shape) == 0:
        return ()
    inner_dims = range(1 if len(shape) > 2 else 0, len(shape))
    longest = max(inner_dims, key=lambda dim: shape[dim])
    shorter_dims = [
        dim
        for dim in reversed(inner_dims)
        if dim != longest and (dim or shape[dim] >= _MAX_MODEL_BLOCKS)
    ]
    tile = [1] * len(shape)
    for dim in [*shorter_dims, longest]:
        # n & -n: the largest power of two that divides n.
        tile[dim] = min(size // math.prod(tile), shape[dim] & -shape[dim])
    return tuple(tile)


def _encoded(
    leaf: jax.Array, tile: tuple[int, ...], *, signed: bool
) -> tuple[jax.Array, jax.Array]:
    tiles, dims = _tiles(leaf, tile)
    scales = jnp.max(jnp.abs(tiles), dims, keepdims=True)
    # A block of zeros has scale 0, and 0 / 0 is NaN, which has no code.
    normalized = tiles / jnp.where(scales > 0, scales, jnp.ones_like(scales))
    codes = encode(normalized, signed=signed).reshape(leaf.shape)
    return codes, scales.reshape(
        [length // edge for length, edge in zip(leaf.shape, tile, strict=True)]
    )


def _decoded(codes: jax.Array, scales: jax.Array, *, signed: bool) -> jax.Array:
    tile = tuple(length // count for length, count in zip(codes.shape, scales.shape, strict=True))
    tiles, dims = _tiles(codes, tile)
    numbers = decode(tiles, scales.dtype, signed=signed)
    return (numbers * jnp.expand_dims(scales, dims)).reshape(codes.shape)


def _tiles(leaf: jax.Array, tile: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Reshape each dim of a leaf to [number of blocks, length in a block].

    Return also the dims of the second kind.
    """
    shape = [
        size
        for length, edge in zip(leaf.shape, tile, strict=True)
        for size in (length // edge, edge)
    ]
    return leaf.reshape(shape), tuple(range(1, len(shape), 2))


def _sign(
    path: KeyPath,
    shape: tuple[int, ...],
    param_shapes: dict[KeyPath, tuple[int, ...]],
    signed: Sequence[str],
    unsigned: Sequence[str],
) -> bool | None:
    """Return True for a signed moment of a parameter, False for an unsigned moment, None for other
    leaves of the state.
    """
    starts = [
        start for start in range(len(path) + 1) if param_shapes.get(tuple(path[start:])) == shape
    ]
    if not starts or not _contains_name(path[: starts[0]], (*signed, *unsigned)):
        return None
    return not _contains_name(path[: starts[0]], unsigned)


def _contains_name(path: KeyPath, names: Sequence[str]) -> bool:
    return any(getattr(key, "name", getattr(key, "key", None)) in names for key in path)
