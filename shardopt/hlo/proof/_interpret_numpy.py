"""The array operations of HLO in numpy.

A value is an array [devices, ...]: dim d of HLO is axis d + 1.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardopt.hlo._hlo_text import elements, numbers, window_dims
from shardopt.hlo.proof._cublas import TARGETS, Pairs, read_gemm
from shardopt.hlo.proof._interpret_shards import from_memory, to_memory
from shardopt.hlo.proof._lines import Line, Shape, read_shape

Operation = Callable[..., Any]


_SHORT_FLOAT = re.compile(r"\b(?:bf16|f16|f32)(?=\[)")


def widened(line: Line) -> Line:
    """Return the line with floats of 64 bits in place of 16 and 32.

    Floats of 8 bits stay: the program means their rounding.
    """
    shapes = tuple(_SHORT_FLOAT.sub("f64", shape) for shape in line.operand_shapes)
    opcode = "copy" if line.opcode == "reduce-precision" else line.opcode
    return line._replace(
        opcode=opcode, shape=_SHORT_FLOAT.sub("f64", line.shape), operand_shapes=shapes
    )


def exact_reciprocals(value: np.ndarray) -> np.ndarray:
    """Return constants with 1/n in place of its fp32 number: XLA multiplies by such a number where
    a program divides.
    """
    with np.errstate(all="ignore"):
        divisor = np.rint(1 / value)
        # fp32 rounds 1/n by at most 6e-8 of it. Above 2.5e6 every number is near some 1/n, and
        # changes by no more than 2e-7 of itself.
        near = np.isfinite(divisor) & (np.abs(1 / value - divisor) <= 2e-7 * np.abs(divisor))
        return np.where(near & (np.abs(divisor) > 1), 1 / divisor, value)


def wide_float(dtype: np.dtype) -> np.dtype:
    """Return float64 for a short float, and any other type itself."""
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _integer_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    # HLO leaves a division by zero open. XLA on CPU gives -1 (all bits set), and the number itself
    # as the remainder.
    safe = np.where(b == 0, 1, b)
    # numpy rounds down, HLO rounds to zero
    quotient = np.abs(a) // np.abs(safe) * (np.sign(a) * np.sign(safe))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _shift(a: np.ndarray, b: np.ndarray, shift: np.ufunc, kind: str) -> np.ndarray:
    """Shift the bits of signed or unsigned numbers; far shifts leave the sign, or zeros."""
    bits = a.dtype.itemsize * 8
    value = a.view(f"{kind}{bits}")
    count = b.astype(np.uint64)
    shifted = shift(value, np.minimum(count, np.uint64(bits - 1)).astype(value.dtype))
    if kind == "uint":
        shifted = np.where(count < bits, shifted, 0).astype(value.dtype)
    return shifted.view(a.dtype)


def _leading_zeros(a: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    values = a.view(f"uint{bits}").astype(np.float64 if bits <= 32 else np.longdouble)
    return bits - np.frexp(values)[1]


def _erf(a: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return erf(a.astype(np.float64))


def _high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype != np.uint32:
        raise ValueError(f"the high half of products of {a.dtype} is not computed")
    return a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)


UNARY: dict[str, Operation] = {
    "abs": np.abs,
    "negate": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "cbrt": np.cbrt,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "log": np.log,
    "log-plus-one": np.log1p,
    "tanh": np.tanh,
    "sine": np.sin,
    "cosine": np.cos,
    "tan": np.tan,
    "floor": np.floor,
    "ceil": np.ceil,
    "round-nearest-even": np.rint,
    "round-nearest-afz": lambda a: np.sign(a) * np.floor(np.abs(a) + 0.5),
    "sign": np.sign,
    "not": np.invert,
    "is-finite": np.isfinite,
    "logistic": lambda a: 1 / (1 + np.exp(-a)),
    "erf": _erf,
    "count-leading-zeros": _leading_zeros,
    "popcnt": np.bitwise_count,
}
BINARY: dict[str, Operation] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _integer_divide,
    "remainder": _remainder,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "atan2": np.arctan2,
    "mulhi": _high_product,
    "shift-left": lambda a, b: _shift(a, b, np.left_shift, "uint"),
    "shift-right-logical": lambda a, b: _shift(a, b, np.right_shift, "uint"),
    "shift-right-arithmetic": lambda a, b: _shift(a, b, np.right_shift, "int"),
}
COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
UFUNCS: dict[str, Any] = {
    opcode: BINARY[opcode]
    for opcode in ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
}


def reduce_rows(
    ufunc: Any, value: np.ndarray, axes: tuple[int, ...], initial: np.ndarray
) -> np.ndarray:
    """Reduce axes, and the first number of each device, in the type of the numbers."""
    reduced = ufunc.reduce(value, axis=axes, dtype=value.dtype)
    return ufunc(reduced, _spread(initial, reduced)).astype(value.dtype)


def elementwise(line: Line) -> Operation | None:
    """Return an operation on single numbers; None for other opcodes."""
    opcode = line.opcode
    function = UNARY.get(opcode) or BINARY.get(opcode)
    if function:
        dtype = line.result.dtype
        return lambda *values: function(*values).astype(dtype, copy=False)
    if opcode == "compare":
        return _compare(line)
    if opcode == "select":
        return lambda predicate, yes, no: np.where(_spread(predicate, yes), yes, no)
    if opcode == "clamp":
        return lambda low, value, high: np.minimum(
            np.maximum(value, _spread(low, value)), _spread(high, value)
        )
    if opcode == "convert":
        target = line.result.dtype
        return lambda value: _convert(value, target)
    return None


def _compare(line: Line) -> Operation:
    compare = COMPARE[line.attributes["direction"]]
    if line.attributes.get("type") != "TOTALORDER" or line.operand(0).dtype.kind in "biu":
        return lambda a, b: np.asarray(compare(a, b))

    def ordered(value: np.ndarray) -> np.ndarray:
        # The bits of positive floats have the order of integers. The bits of negative floats have
        # the reverse order, so they are flipped below all others, and -0 becomes -1.
        bits = value.view(f"int{value.dtype.itemsize * 8}").astype(np.int64)
        return np.where(bits < 0, np.int64(-(2 ** (value.dtype.itemsize * 8 - 1))) - bits - 1, bits)

    return lambda a, b: np.asarray(compare(ordered(a), ordered(b)))


def _spread(scalar: np.ndarray, value: np.ndarray) -> np.ndarray:
    return (
        scalar.reshape(len(scalar), *(1,) * (value.ndim - 1))
        if scalar.ndim < value.ndim
        else scalar
    )


def _convert(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return value != 0
    if dtype.kind in "iu" and value.dtype.kind not in "biu":  # XLA clamps, and a NaN becomes 0
        limits = np.iinfo(dtype)
        value = np.clip(np.nan_to_num(value.astype(np.longdouble)), limits.min, limits.max)
    return value.astype(dtype)


def shaped(line: Line) -> Operation | None:
    """Return an operation that moves numbers, or multiplies matrices; None for other opcodes."""
    builder = _SHAPED.get(line.opcode)
    return builder(line) if builder else None


def _bitcast(line: Line) -> Operation:
    source = line.operand(0)
    target = line.result
    # tiles pad other dims then, and the order is the same
    if source.without_ones() == target.without_ones():
        source = source._replace(tile=())
        target = target._replace(tile=())

    def apply(value):
        # The bytes stay, the dims or the type change. So numbers are first put into the order of
        # memory.
        flat = np.ascontiguousarray(to_memory(value, source))
        return from_memory(flat.view(target.dtype), target)

    return apply


def _bitcast_convert(line: Line) -> Operation:
    target = line.result

    def apply(value):
        wider = target.dtype.itemsize > value.dtype.itemsize
        value = np.ascontiguousarray(
            value if wider or value.dtype.itemsize == target.dtype.itemsize else value[..., None]
        )
        return value.view(target.dtype).reshape(len(value), *target.dims)

    return apply


def _broadcast(line: Line) -> Operation:
    dims = line.integers("dimensions")
    axes = (0, *(np.argsort(dims) + 1))
    target = line.dims

    def apply(value):
        sizes = [1] * len(target)
        for dim, size in zip(dims, value.shape[1:], strict=True):
            sizes[dim] = size
        value = value.transpose(axes)
        return np.broadcast_to(value.reshape(len(value), *sizes), (len(value), *target))

    return apply


def _transpose(line: Line) -> Operation:
    axes = (0, *line.axes)
    return lambda value: value.transpose(axes)


def _slice(line: Line) -> Operation:
    window = (slice(None), *(slice(*bounds) for bounds in line.bounds))
    return lambda value: value[window]


def _pad(line: Line) -> Operation:
    edges = [(*numbers(part), 0)[:3] for part in line.attributes["padding"].split("x") if part]
    return lambda value, fill: _padded(value, fill, edges)


def _padded(value: np.ndarray, fill: np.ndarray, edges: Sequence[Sequence[int]]) -> np.ndarray:
    """Return values with a number of each device between and around them.

    Args:
      value: the values.
      fill: the number.
      edges: for each dim the numbers before, behind and between; negative edges cut.
    """
    shape = [len(value)]
    into = [slice(None)]
    out = [slice(None)]
    for (low, high, inner), size in zip(edges, value.shape[1:], strict=True):
        # Element i lands at low + i * step. The first and the last that land inside are kept.
        step = inner + 1
        length = low + high + size + max(size - 1, 0) * inner
        first = max(0, -(low // step)) if low < 0 else 0
        last = max(first, min(size, (length - 1 - low) // step + 1))
        start = low + first * step
        shape.append(length)
        out.append(slice(first, last))
        into.append(slice(start, max(low + (last - 1) * step + 1, start), step))
    result = np.broadcast_to(_spread(fill, value), shape).copy()
    result[tuple(into)] = value[tuple(out)]
    return result


def iota(line: Line) -> Operation:
    """Return counts along a dim, for a number of devices."""
    shape = line.result
    dim = int(line.attributes.get("iota_dimension", "0"))
    sizes = [size if d == dim else 1 for d, size in enumerate(shape.dims)]
    values = np.broadcast_to(
        np.arange(shape.dims[dim]).astype(shape.dtype).reshape(sizes), shape.dims
    )
    return lambda devices: np.broadcast_to(values, (devices, *shape.dims))


def _concatenate(line: Line) -> Operation:
    (axis,) = line.axes
    return lambda *values: np.concatenate(values, axis)


def _inside(
    starts: Sequence[np.ndarray], operand: Sequence[int], lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return starts of windows that are moved into the operand."""
    return [
        np.clip(start.astype(np.int64), 0, size - length)
        for start, size, length in zip(starts, operand, lengths, strict=True)
    ]


def _windows(
    starts: Sequence[np.ndarray], lengths: Sequence[int], shown: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Return index arrays [devices, ...batch, ...shown dims] of windows; the first is the device.

    Args:
      starts: the first index of each window in each dim, [devices, ...batch].
      lengths: of the windows.
      shown: the dims of the windows; the others have one element.
    """
    batch = starts[0].ndim - 1
    rank = batch + len(shown)
    indexes = [np.arange(len(starts[0])).reshape(-1, *(1,) * rank)]
    for dim, start in enumerate(starts):
        index = start.reshape(*start.shape, *(1,) * len(shown))
        if dim in shown:
            shape = [1] * (rank + 1)
            shape[1 + batch + shown.index(dim)] = lengths[dim]
            index = index + np.arange(lengths[dim]).reshape(shape)
        indexes.append(index)
    return tuple(indexes)


def _dynamic_slice(line: Line) -> Operation:
    lengths = line.integers("dynamic_slice_sizes")

    def apply(value, *starts):
        if not starts:
            return value
        # HLO moves a window that would stick out; it does not cut it.
        inside = _inside(starts, value.shape[1:], lengths)
        return value[_windows(inside, lengths, range(len(lengths)))]

    return apply


def _dynamic_update_slice(line: Line) -> Operation:
    def apply(value, update, *starts):
        if not starts:
            return update
        result = value.copy()
        lengths = update.shape[1:]
        inside = _inside(starts, value.shape[1:], lengths)
        result[_windows(inside, lengths, range(len(lengths)))] = update
        return result

    return apply


def _dot(line: Line) -> Operation:
    return _product(line, line.result, *line.dot_dims)


def _product(line: Line, result: Shape, batch: Pairs, contracting: Pairs) -> Operation:
    """Return the inner product of two operands: dims in the order batch, left, right."""
    lhs = line.operand(0).dims
    rhs = line.operand(1).dims
    (lb, rb), (lc, rc) = (
        ([dim for dim, _ in pairs], [dim for _, dim in pairs]) for pairs in (batch, contracting)
    )
    lf = [dim for dim in range(len(lhs)) if dim not in (*lb, *lc)]
    rf = [dim for dim in range(len(rhs)) if dim not in (*rb, *rc)]
    batch_sizes = [lhs[dim] for dim in lb]
    m, k = (math.prod(lhs[dim] for dim in dims) for dims in (lf, lc))
    n = math.prod(rhs[dim] for dim in rf)
    # batch, left, summed  @  batch, summed, right  ->  batch, left, right     (after the device)
    wide = wide_float(result.dtype)

    def matrices(value, dims, *sizes):
        ordered = value.astype(wide).transpose(0, *(dim + 1 for dim in dims))
        return ordered.reshape(len(value), *batch_sizes, *sizes)

    def apply(a, b):
        product = matrices(a, (*lb, *lf, *lc), m, k) @ matrices(b, (*rb, *rc, *rf), k, n)
        return product.astype(result.dtype).reshape(len(a), *result.dims)

    return apply


def _convolution(line: Line) -> Operation:
    lhs_labels, kernel_labels, out_labels = re.split("_|->", line.attributes["dim_labels"])
    spatial = sorted(label for label in lhs_labels if label.isdigit())
    windows = window_dims(line.attributes)
    groups, batches = (
        int(line.attributes.get(f"{name}_group_count", "1")) for name in ("feature", "batch")
    )
    if groups * batches > 1:
        raise ValueError("convolutions in groups are not interpreted")
    result = line.result
    wide = wide_float(result.dtype)

    def ordered(array, labels, first_labels):
        order = (labels.index(label) + 1 for label in [*first_labels, *spatial])
        return array.astype(wide).transpose(0, *order)

    def apply(value, kernel):
        value = ordered(value, lhs_labels, "bf")
        kernel = ordered(kernel, kernel_labels, "io")
        edges = [(0, 0, 0)] * 2 + [(dim.low, dim.high, dim.spread - 1) for dim in windows]
        value = _padded(value, np.zeros(len(value), wide), edges)
        sizes = [result.dims[out_labels.index(label)] for label in spatial]
        # value [devices, b, f, ...], kernel [devices, f, o, ...]
        #
        # The loop is over the places of the kernel, not of the result: each round is one product
        # of matrices, for the numbers of all windows that meet this place.
        total = np.zeros((len(value), value.shape[1], kernel.shape[2], *sizes), wide)
        for place in itertools.product(*(range(size) for size in kernel.shape[3:])):
            window = []
            kernel_place = []
            for i, dim, size in zip(place, windows, sizes, strict=True):
                start = i * dim.dilation
                window.append(slice(start, start + (size - 1) * dim.stride + 1, dim.stride))
                kernel_place.append(dim.size - 1 - i if dim.reverse else i)
            total += np.einsum(
                "nbf...,nfo->nbo...",
                value[(..., *window)],
                kernel[(*[slice(None)] * 3, *kernel_place)],
                optimize=True,
            )
        order = [0, *(1 + ["b", "f", *spatial].index(label) for label in out_labels)]
        return total.transpose(order).astype(result.dtype)

    return apply


class _GatherDims(NamedTuple):
    """How the dims of a gather or scatter correspond.

    A scatter is a gather of the places that it writes.
    """

    window: tuple[int, ...]
    hidden: tuple[int, ...]
    starts: tuple[int, ...]
    operand_batch: tuple[int, ...]
    index_batch: tuple[int, ...]
    vector: int

    @classmethod
    def of(cls, line: Line, *keys: str) -> "_GatherDims":
        """Read the attributes of these names."""
        return cls._make([*map(line.integers, keys), int(line.attributes["index_vector_dim"])])

    def places(self, rank: int, indexes: np.ndarray) -> list[np.ndarray]:
        """Return the first index of the window in each dim of the operand, [devices, ...batch of
        the indexes].
        """
        vectors = (
            indexes[..., None]
            if self.vector == indexes.ndim - 1
            else np.moveaxis(indexes, self.vector + 1, -1)
        )
        vectors = vectors.astype(np.int64)
        batch = vectors.shape[1:-1]
        starts = [np.zeros((len(indexes), *batch), np.int64) for _ in range(rank)]
        for column, dim in enumerate(self.starts):
            starts[dim] = vectors[..., column]
        for dim, index_dim in zip(self.operand_batch, self.index_batch, strict=True):
            axis = index_dim - (index_dim > self.vector)
            shape = [1] * (len(batch) + 1)
            shape[axis + 1] = batch[axis]
            starts[dim] = np.broadcast_to(np.arange(batch[axis]).reshape(shape), starts[dim].shape)
        return starts

    def shown(self, rank: int) -> list[int]:
        """Return the dims of the operand that windows have."""
        return [d for d in range(rank) if d not in self.hidden and d not in self.operand_batch]


def _gather(line: Line) -> Operation:
    dims = _GatherDims.of(
        line,
        "offset_dims",
        "collapsed_slice_dims",
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
    )
    lengths = line.integers("slice_sizes")
    rank = len(line.dims)

    def apply(value, indexes):
        # A gather moves windows inside, as a dynamic slice does. A scatter leaves them out, see
        # below.
        starts = _inside(dims.places(len(lengths), indexes), value.shape[1:], lengths)
        result = value[_windows(starts, lengths, dims.shown(len(lengths)))]
        outer = iter(range(1, rank - len(dims.window) + 1))
        inner = {dim: rank - len(dims.window) + 1 + place for place, dim in enumerate(dims.window)}
        return result.transpose(
            0, *(inner[dim] if dim in inner else next(outer) for dim in range(rank))
        )

    return apply


def scatter(line: Line, combine: str) -> Operation:
    """Return a scatter that combines by a ufunc of `UFUNCS`, or replaces (`set`)."""
    if len(line.operand_shapes) != 3:
        raise ValueError("scatters of several arrays are not interpreted")
    dims = _GatherDims.of(
        line,
        "update_window_dims",
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "input_batching_dims",
        "scatter_indices_batching_dims",
    )
    operand_rank = len(line.operand(0).dims)
    updates_rank = len(line.operand(2).dims)
    batch = [dim for dim in range(updates_rank) if dim not in dims.window]
    shown = dims.shown(operand_rank)

    def apply(value, indexes, updates):
        lengths = [1] * operand_rank
        for dim, window_dim in zip(shown, dims.window, strict=True):
            lengths[dim] = updates.shape[1 + window_dim]
        starts = dims.places(operand_rank, indexes)
        inside = np.ones(starts[0].shape, bool)
        for start, size, length in zip(starts, value.shape[1:], lengths, strict=True):
            # A window that sticks out in any dim is dropped whole: none of its numbers is written.
            inside &= (start >= 0) & (start <= size - length)
        places = _windows([np.where(inside, start, 0) for start in starts], lengths, shown)
        updates = updates.transpose(0, *(dim + 1 for dim in (*batch, *dims.window)))
        full = [np.broadcast_to(place, updates.shape) for place in places]
        mask = np.broadcast_to(
            inside.reshape(*inside.shape, *(1,) * len(dims.window)), updates.shape
        )
        targets = tuple(place[mask] for place in full)
        wide = wide_float(value.dtype)
        result = value.astype(wide)
        if combine == "set":
            result[targets] = updates[mask].astype(wide)
        else:
            # Places may repeat. `result[targets] += ...` would count only the last of them; `at`
            # combines all.
            UFUNCS[combine].at(result, targets, updates[mask].astype(wide))
        return result.astype(value.dtype)

    return apply


def reduce_window(line: Line, combine: str) -> Operation:
    """Return a reduction over windows by a ufunc of `UFUNCS`."""
    windows = window_dims(line.attributes)
    if any(dim.dilation != 1 or dim.spread != 1 for dim in windows):
        raise ValueError("dilated windows are not interpreted")
    sizes = [dim.size for dim in windows]
    strides = [slice(None, None, dim.stride) for dim in windows]
    edges = [(dim.low, dim.high, 0) for dim in windows]
    ufunc = UFUNCS[combine]

    def apply(value, initial):
        wide = _padded(value, initial, edges)
        views = np.lib.stride_tricks.sliding_window_view(wide, sizes, tuple(range(1, value.ndim)))
        views = views[(slice(None), *strides)]
        return reduce_rows(ufunc, views, tuple(range(value.ndim, 2 * value.ndim - 1)), initial)

    return apply


def top_k(line: Line) -> Operation:
    """Return the custom call TopK: the largest numbers of the last dim and their places, equal ones
    in order.
    """
    values, _ = (read_shape(part) for part in elements(line.shape))
    count = values.dims[-1]

    def apply(value):
        places = np.argsort(-value.astype(np.float64), axis=-1, kind="stable")[..., :count]
        return np.take_along_axis(value, places, -1), places.astype(np.int32)

    return apply


def _lapack(name: str, count: int, line: Line) -> Operation:
    """Return a function of LAPACK, matrix by matrix, with its first `count` results."""
    from scipy.linalg import lapack

    def apply(*values):
        batch = values[0].shape[:-2]
        (function,) = lapack.get_lapack_funcs((name,), values)
        rows = [value.reshape(-1, *value.shape[len(batch) :]) for value in values]
        results = [function(*arrays)[:count] for arrays in zip(*rows, strict=True)]
        columns = [np.stack(column) for column in zip(*results, strict=True)]
        return line.results([column.reshape(*batch, *column.shape[1:]) for column in columns])

    return apply


def gemm(line: Line) -> Operation:
    """Return a matrix product of cuBLAS; its workspaces are left out."""
    config = read_gemm(line.attributes)
    assert config is not None
    shape = read_shape(elements(line.shape)[0])
    wide = shape._replace(dtype=wide_float(shape.dtype))
    product = _product(line, wide, config.batch, config.contracting)

    def apply(lhs, rhs, *addends):
        result = config.alpha * product(lhs, rhs)
        if config.beta:
            result = result + config.beta * addends[0]
        if config.bias:
            result = result + addends[-1].reshape(len(lhs), *(1,) * (result.ndim - 2), -1)
        if config.function:
            result = _FUNCTIONS[config.function](result)
        return (result, np.zeros((len(lhs), 0))) if line.shape.startswith("(") else result

    return apply


_FUNCTIONS = {
    "RELU": lambda a: np.maximum(a, 0),
    "GELU": lambda a: a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
}


def _same(line: Line) -> Operation:
    return lambda value, *_: value


CUSTOM_CALLS: dict[str, Callable[[Line], Operation]] = {
    "TopK": top_k,
    **dict.fromkeys(TARGETS, gemm),
    **dict.fromkeys(("AssumeGatherIndicesInBound", "LayoutConstraint"), _same),
}
# a QR factorisation, and the product of its Householder reflections
for _name, _count in (("geqrf", 2), ("orgqr", 1)):
    _function = functools.partial(_lapack, _name, _count)
    CUSTOM_CALLS |= {f"lapack_{letter}{_name}_ffi": _function for letter in "sd"}


def _tuple(line: Line) -> Operation:
    return lambda *values: values


def _get_tuple_element(line: Line) -> Operation:
    index = int(line.attributes["index"])
    return lambda value: value[index]


def _reshape(line: Line) -> Operation:
    dims = line.dims
    return lambda value: value.reshape(len(value), *dims)


def _reverse(line: Line) -> Operation:
    return lambda value: np.flip(value, line.axes)


_SHAPED: dict[str, Callable[[Line], Operation]] = {
    "bitcast": _bitcast,
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "reverse": _reverse,
    "slice": _slice,
    "topk": top_k,
    "transpose": _transpose,
    "tuple": _tuple,
    "get-tuple-element": _get_tuple_element,
    **dict.fromkeys(("copy", "optimization-barrier", "opt-barrier"), _same),
    "after-all": lambda line: lambda *_: (),
}
