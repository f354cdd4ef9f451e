"""Rules of equations that move entries: reshape, transpose, slice, concatenate and their like."""

import math
from collections.abc import Sequence

import numpy as np

from shardopt.separability.elementwise import first_unknown, is_zero, join, not_linear, related
from shardopt.separability.relations import (
    Columns,
    Extreme,
    Known,
    Same,
    Shapes,
    Site,
    Split,
    Total,
    Unknown,
    Value,
    differing,
    growth,
)


def as_split(site: Site, value: Value, i: int = 0) -> Value:
    """Return equal entries along a dim that n pieces fill as what they are as well: the pieces' entries concatenated."""
    dims = differing(site.operand(i))
    if isinstance(value, Same) and len(dims) == 1 and growth(site.operand(i), dims) == site.pieces:
        return Split(dims[0], 1, value.ratio)
    return value


def reshape(site: Site, values: Sequence[Value]) -> list[Value]:
    """Cut the entries into other dims, in the same order.

    The order of entries is [outer, block, piece, j, inner] in the whole and [outer, block, j, inner] in a piece. A result
    dim that holds the pieces has blocks = outer entries that it takes in, so it is split again.
    """
    value, before, after = values[0], site.operand(), site.result()
    if site.params.get("dimensions") is not None:
        return [site.unknown("shape")]
    if isinstance(value, Same | Total | Extreme) and _keeps_differing(before, after):
        return [value]
    value = as_split(site, value)
    if not isinstance(value, Split):
        return [site.unknown("position" if isinstance(value, Same) else "shape")]
    if differing(before) != (value.dim,):
        return [site.unknown("shape")]
    dims = differing(after)
    if len(dims) != 1:
        return [site.unknown("shape")]
    (dim,) = dims
    outer = math.prod(before[1][: value.dim]) * value.blocks
    own = math.prod(after[1][:dim])
    if own == 0 or outer % own or after[0][dim] != after[1][dim] * site.pieces:
        return [site.unknown("shape")]
    blocks = outer // own
    if after[1][dim] % blocks or (
        value.order is not None and (blocks, after[1][dim]) != (value.blocks, before[1][value.dim])
    ):
        return [site.unknown("shape")]
    return [Split(dim, blocks, value.ratio, value.order)]


def _keeps_differing(before: Shapes, after: Shapes) -> bool:
    """Return whether dims of equal entries stay dims by themselves: as many entries in front of each, and as large."""

    def dims(shapes: Shapes) -> list[tuple[int, int, int]]:
        return [(math.prod(shapes[1][:dim]), shapes[0][dim], shapes[1][dim]) for dim in differing(shapes)]

    return dims(before) == dims(after)


def broadcast(site: Site, values: Sequence[Value]) -> list[Value]:
    """Repeat entries along new dims, along which they are equal then."""
    value, dims = values[0], site.params["broadcast_dimensions"]
    if isinstance(value, Split):
        at = dims[value.dim]
        kept = all(new[at] == old[value.dim] for new, old in zip(site.result(), site.operand(), strict=True))
        return [value.at(at) if kept else site.unknown("shape")]
    return [value]


def transpose(site: Site, values: Sequence[Value]) -> list[Value]:
    """Exchange dims."""
    value, order = values[0], tuple(site.params["permutation"])
    if isinstance(value, Split):
        return [value.at(order.index(value.dim))]
    return [value]


def squeeze(site: Site, values: Sequence[Value]) -> list[Value]:
    """Leave out dims of size 1."""
    value, gone = values[0], site.params["dimensions"]
    if isinstance(value, Split):
        dim = value.dim - sum(one < value.dim for one in gone)
        return [value.at(dim)]
    return [value]


def expand_dims(site: Site, values: Sequence[Value]) -> list[Value]:
    """Put in dims of size 1."""
    value, new = values[0], site.params["dimensions"]
    if isinstance(value, Split):
        kept = [dim for dim in range(len(site.result()[0])) if dim not in new]
        return [value.at(kept[value.dim])]
    return [value]


def take(site: Site, value: Split, whole: np.ndarray, piece: np.ndarray, sizes: tuple[int, int]) -> Value:
    """Return the relation of entries taken along the split dim, by their numbers in the whole and in a piece.

    Entry [block, i, j] of the whole must be taken where [block, j] of piece i is: this is looked up number by number. If
    only the same entries are taken, in another order, the result is in that order.

    Args:
      site: the equation.
      value: the relation of the operand.
      whole: which entry of the split dim each entry of the result is, in the whole.
      piece: the same in a piece.
      sizes: the sizes of the operand's split dim, in the whole and in a piece.
    """
    pieces, inner = site.pieces, sizes[1] // value.blocks
    if value.order is not None or whole.size != piece.size * pieces or piece.size == 0:
        return site.unknown("mixes")
    block, j = np.divmod(piece, inner)
    for blocks in (value.blocks, *(one for one in range(1, 2 * value.blocks + 1) if one != value.blocks)):
        if piece.size % blocks:
            continue
        per_piece = np.stack([block * pieces * inner + i * inner + j for i in range(pieces)]).reshape(
            pieces, blocks, -1
        )
        if np.array_equal(per_piece.swapaxes(0, 1).reshape(-1), whole):
            return Split(value.dim, blocks, value.ratio)
    per_piece = np.concatenate([block * pieces * inner + i * inner + j for i in range(pieces)])
    if np.array_equal(np.sort(per_piece), np.sort(whole)):
        return Split(value.dim, 1, value.ratio, (sizes, value.blocks, whole.tobytes(), piece.tobytes()))
    return site.unknown("mixes")


def slice_entries(site: Site, values: Sequence[Value]) -> list[Value]:
    """Take entries at places that are numbers in the trace.

    Dims that are not split must be sliced alike; of equal entries any may be taken.
    """
    value, old = values[0], site.operand()
    places = [
        [
            range(*one)
            for one in zip(
                params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(old[0]), strict=True
            )
        ]
        for params in (site.whole.params, site.piece.params)
    ]
    split_dim = value.dim if isinstance(value, Split) else None
    uneven = [dim for dim in range(len(old[0])) if dim != split_dim and places[0][dim] != places[1][dim]]
    if any(old[0][dim] == old[1][dim] for dim in uneven):  # another part of what is the same: `table[:rows]`
        return [site.unknown("position")]
    if isinstance(value, Split):
        whole, piece = (np.asarray(one[value.dim]) for one in places)
        sizes = old[0][value.dim], old[1][value.dim]
        return [value if (whole.size, piece.size) == sizes else take(site, value, whole, piece, sizes)]
    if isinstance(value, Columns):
        last = len(old[0]) - 1
        fine = all(len(places[0][dim]) == old[0][dim] for dim in range(last)) and places[0][last] == places[1][last]
        return [Columns(tuple(value.columns[i] for i in places[0][last])) if fine else site.unknown("shape")]
    return [value]


def rev(site: Site, values: Sequence[Value]) -> list[Value]:
    """Turn dims around."""
    value = values[0]
    if isinstance(value, Split) and value.dim in site.params["dimensions"]:
        sizes = site.operand()[0][value.dim], site.operand()[1][value.dim]
        return [take(site, value, np.arange(sizes[0])[::-1], np.arange(sizes[1])[::-1], sizes)]
    return [value]


def tile(site: Site, values: Sequence[Value]) -> list[Value]:
    """Repeat all entries of dims, one copy after the other.

    Copies of what is the same are the pieces' copies concatenated, if the whole has n times as many. Copies of rows are further
    blocks.
    """
    value, repeats = values[0], site.params_of("reps")
    uneven = [dim for dim in range(len(repeats[0])) if repeats[0][dim] != repeats[1][dim]]
    longer = [dim for dim in uneven if site.operand()[0][dim] != 1 or site.operand()[1][dim] != 1]
    if isinstance(value, Split):
        times = repeats[0][value.dim]
        fine = not longer and value.dim not in uneven and value.order is None
        return [Split(value.dim, value.blocks * times, value.ratio) if fine else site.unknown("mixes")]
    if not longer:
        return [value]
    if isinstance(value, Same) and uneven == longer == [longer[0]] and not differing(site.operand()):
        times = repeats[0][longer[0]] == repeats[1][longer[0]] * site.pieces
        return [Split(longer[0], 1, value.ratio) if times else site.unknown("position")]
    return [site.unknown("position")]


def pad(site: Site, values: Sequence[Value]) -> list[Value]:
    """Put a number around entries, along other dims than those of rows."""
    changed = {
        dim
        for shapes in (site.operand(), site.result())
        for dim in differing(shapes)
        if any(site.params["padding_config"][dim])
    }
    if changed:
        return [first_unknown(values) or site.unknown("mixes")]
    return [join(site, values)]


def concatenate(site: Site, values: Sequence[Value]) -> list[Value]:
    """Join operands along a dim.

    Along the split dim, operands whose blocks are as long follow one another as further blocks. Along other dims each
    operand has its own entries, so what holds of all of them holds of the result.
    """
    along = site.params["dimension"]
    if along not in differing(site.result()):
        if any(along in differing(site.operand(i)) for i in range(len(values))):
            return [first_unknown(values) or site.unknown("position")]
        joined = join(site, values)
        if isinstance(joined, Unknown) and along == len(site.result()[0]) - 1 and (columns := _columns(site, values)):
            return [columns]
        return [joined]
    operands = related(site, values)
    if unknown := first_unknown(operands):
        return [unknown]
    splits = [one if isinstance(one, Split) else as_split(site, one, i) for i, one in enumerate(operands)]
    blocks, inner = 0, None
    for i, one in enumerate(splits):
        if not isinstance(one, Split) or one.dim != along or one.order is not None:
            return [_not_joined(site, one)]
        length = site.operand(i)[1][along]
        if inner is None:
            inner = length // one.blocks
        if one.blocks * inner != length and not (isinstance(operands[i], Same) and length % inner == 0):
            return [site.unknown("mixes")]
        blocks += length // inner
    ratios = [one.ratio for i, one in enumerate(splits) if isinstance(one, Split) and not is_zero(values[i])]
    if not all(site.equal(one, ratios[0]) for one in ratios):
        return [site.unknown("count")]
    return [Split(along, blocks, ratios[0] if ratios else 1.0)]


def _not_joined(site: Site, value: Value) -> Unknown:
    if isinstance(value, Total | Extreme):
        return not_linear(site, value)
    return site.unknown("position" if isinstance(value, Same) else "mixes")


def _columns(site: Site, values: Sequence[Value]) -> Columns | None:
    """Return what is known of each column where operands are indices of different dims."""
    columns: list[Value] = []
    last = len(site.result()[0]) - 1
    for i, value in enumerate(values):
        width = site.operand(i)[0][last]
        if isinstance(value, Columns):
            columns += value.columns
        elif isinstance(value, Known) and width > 1:
            for k in range(width):
                whole, piece = (one.take([min(k, one.shape[last] - 1)], last) for one in (value.whole, value.piece))
                columns.append(Known(whole, piece, value.op))
        elif isinstance(value, Known | Same | Split):
            columns += [value] * width
        else:
            return None
    return Columns(tuple(columns))


def split(site: Site, values: Sequence[Value]) -> list[Value]:
    """Cut a dim into parts, each of which is a slice."""
    value, axis, parts = values[0], site.params["axis"], site.params_of("sizes")
    if isinstance(value, Split) and value.dim == axis:
        whole, piece = (np.cumsum((0, *one)) for one in parts)
        sizes = site.operand()[0][axis], site.operand()[1][axis]
        return [
            take(site, value, np.arange(whole[k], whole[k + 1]), np.arange(piece[k], piece[k + 1]), sizes)
            for k in range(site.num_results)
        ]
    if parts[0] != parts[1] and axis not in differing(site.operand()):
        return [site.unknown("position")] * site.num_results
    return [value] * site.num_results


def unstack(site: Site, values: Sequence[Value]) -> list[Value]:
    """Cut a dim into its entries, which all are of the same rows."""
    value, axis = values[0], site.params["axis"]
    if axis in differing(site.operand()):
        return [site.unknown("mixes")] * site.num_results
    if isinstance(value, Split):
        value = value.at(value.dim - (value.dim > axis))
    return [value] * site.num_results


def stack(site: Site, values: Sequence[Value]) -> list[Value]:
    """Join operands along a new dim."""
    joined, axis = join(site, values), site.params["axis"]
    if isinstance(joined, Split):
        joined = joined.at(joined.dim + (joined.dim >= axis))
    return [joined]
