"""Attention with the fastest kernel of the devices: splash on TPU, cudnn on GPU, otherwise plain
XLA.

Over a context axis, keys and values travel by a ring, an exchange of heads, or a gather.

Suffixes: B sequences, T queries, S keys, H heads of queries, G heads of keys and values, K width of
a head, V of its values.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from shardopt.collectives._per_device import TENSOR
from shardopt.core import (
    calling,
    check_count,
    check_floating,
    check_is_number,
    check_number,
    value_error,
    wide_dtype,
)
from shardopt.kernels._devices import is_local
from shardopt.kernels._flash import NAME, Marks, MaskRule, capped, factor_of_scores, sees
from shardopt.kernels._pallas import LANES
from shardopt.kernels._splash import splash_attention
from shardopt.mesh import (
    axes_of_role,
    device_kind_or_default,
    is_analysed,
    mesh_under_trace,
    not_manual_axes,
    size_along,
)
from shardopt.nn._blocks_of_keys import Attention, Operands, attend
from shardopt.nn._cpu import queries_at_a_time
from shardopt.nn._exchange import GatheredKeys, exchanged_attention
from shardopt.nn._ids import as_int32, integers
from shardopt.nn._order import CONTEXT
from shardopt.nn._regions import Axes, axes_of_roles, dividing_axes
from shardopt.nn._ring import Ring, ring_of
from shardopt.partition._divisible import sizes_that_divide
from shardopt.trace._marks import ATTENTION, marked

Implementation = Literal["splash", "cudnn", "xla"]
Method = Literal["ring", "all_to_all", "all_gather"]
_MAX_GATHERED_LENGTH = 4096
"""The longest row for which one gather is chosen: its bytes take less time than the start of many
sends.
"""


@calling("attention")
def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G V"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    positions: Int[Array, "*B T"] | None = None,
    implementation: Implementation | None = None,
    method: Method | None = None,
) -> Float[Array, "B T H V"]:
    """Return softmax(scale query key^T) value for each head, over the keys that each query may see.

    Query head h uses key and value head h // (H / G). Softmax and sums are computed in float32 at
    least. Inside a strategy whose mesh has a context axis, T is the number of positions on this
    device. Queries see the keys of all devices of the axis.

    Args:
      query: [B, T, H, K].
      key: [B, T, G, K], with G a divisor of H: grouped-query attention. Position embeddings are
        already applied.
      value: [B, T, G, V], with V up to K. If V is less, cudnn, positions and a context axis pad
        values with zeros to K.
      causal: whether a query sees only keys at its own position and before.
      segment_ids: [B, T], integers; a query sees only keys of its own segment, such as a packed
        document. None: all keys.
      window: the most positions that a query sees: its own and the ones before it. Needs `causal`.
        None: no limit.
      scale: the factor of scores. None: 1 / sqrt(K).
      softcap: c: scores s become c tanh(s / c) before the mask (Gemma 2). cudnn cannot compute it.
        None: no cap.
      sinks: [H]: each query also sees a key with this score and a value of zeros (GPT-OSS). cudnn
        cannot compute them. None: no sinks.
      positions: [B, T] or [T], integers: the position of each token in its row, which `causal` and
        `window` compare. The "order" of `so.nn.zigzag` is such an array. None: natural order:
        device i of a context axis holds the positions i T, ..., i T + T - 1. Packed documents in
        natural order need only their segment ids.
      implementation: "splash", "cudnn", "xla", or None to choose by the devices of the mesh; see
        **Implementations**.
      method: how devices of a context axis share keys: "ring", "all_to_all" (Ulysses),
        "all_gather", or None to choose; see **Methods**. It has no effect without a context axis.

    Returns:
      [B, T, H, V] in the dtype of value.

    Raises:
      TypeError: if positions or segment ids are not integers, or other arrays not real floating
        numbers.
      ValueError: if shapes do not fit: H is no multiple of G, V is above K, or sinks, positions
        or segment ids have another shape. If positions or segment ids of the host are beyond int32.
      ValueError: if the mesh does not fit: a tensor axis does not divide G, or for "all_to_all" G
        (of one tensor shard) and C have no common divisor.
      ValueError: if an option is out of range or unknown, or does not go with another: `window`
        without `causal`, or a kernel that cannot be used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> attention(query, key[:, :, :2], value[:, :, :2], window=3).shape
      (2, 5, 4, 8)

    **Implementations**: None chooses splash on TPU from 128 positions on, cudnn on GPU in half
    precision, and xla otherwise. It also chooses xla if the kernel cannot be used.

    - "splash": jax's Pallas kernel for TPU. On other devices it runs interpreted, for tests. It
      needs natural order (no `positions`). Over context it takes whole rows ("all_to_all" with d =
      C), or the blocks of a ring without a window, each a multiple of 128 positions. It rounds the
      results of blocks to the dtype of query before they are summed.
    - "cudnn": flash attention of `jax.nn.dot_product_attention`, for half precision on GPU. It
      needs natural order. Over context it takes whole rows only.
    - "xla": plain XLA. On CPU causal attention takes 64 queries at a time, with the keys that they
      may see.

    **Methods**: None chooses the first that applies:

    - "all_gather" for rows of at most 4096 positions, if no kernel is asked for: their bytes take
      less time than the start of many sends;
    - "all_to_all" if C divides G (of one tensor shard), and it sends no more bytes than the ring.
      Causal work is then equal in any order, and the kernels can be used;
    - "ring".

    **Equivalence**: every implementation and method computes the same result, up to summation
    order. Below float32 it is the same up to the dtype of the rounded products.

    **Placement**: inside a strategy, rules may shard heads over tensor. Rows are sharded over the
    axes that carry them, and positions over context. Each device computes its own rows and heads.

    **Communication**: none without a context axis. Let there be C context devices, b bytes a number
    and T positions a device. KV = 2 B T G K b are the bytes of a device's keys and values. Each
    device sends per layer:

        ring          forward (C-1) KV in C-1 hops; backward the same (C-1) KV, and (C-1) KV w/b for the gradients of keys
                      and values, which are summed in w = 4 bytes (8 in float64). With a window of W
                      positions in natural order, ceil((W-1) / T) hops if that is fewer.
        all_gather    the same bytes, in one gather each of keys and values, and one scatter each of their gradients
        all_to_all    forward 2 (d-1)/d B T (H + G) K b in four exchanges; backward the same. d is the greatest divisor of C
                      that divides G. Across the C/d groups of d neighbours runs a ring, with blocks
                      of d T positions and G/d heads.

    Positions and segment ids are sent only if they are given. On CPU, a ring in a pipeline gathers
    at every hop.

    **Memory**: "splash" and "cudnn" never hold the T x T scores. The implementation "xla" holds
    them, except with `positions` or over a context axis. Then it computes tiles of 512 x 512
    scores, and skips tiles that the mask hides. A ring holds two blocks of other devices' keys and
    values at a time, and stores none of them. "all_gather" holds all C blocks and their gradients
    while it runs.

    **Remat**: the output has the `checkpoint_name` "attention". If that is saved, the backward pass
    does not run splash or the tiles again. "xla" recomputes the scores alone. cudnn runs again, for
    statistics that jax does not name.

    References:
      Vaswani et al., "Attention Is All You Need", 2017, equation 1; Ainslie et al., "GQA", 2023;
      Dao et al., "FlashAttention", 2022; jax.experimental.pallas.ops.tpu.splash_attention; Liu,
      Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; Jacobs et al., "DeepSpeed
      Ulysses", 2023.
    """
    _check(
        query,
        key,
        value,
        causal=causal,
        window=window,
        implementation=implementation,
        method=method,
    )
    _check_scores(query, softcap, sinks, implementation)
    check_floating(query=query, key=key, value=value, sinks=sinks)
    if positions is not None:
        problem = "works on rows in natural order, not with positions"
        _refuse_kernel(
            implementation, "splash", "cudnn", problem=problem, fix="give rows in natural order"
        )
    if scale is not None:
        check_is_number("scale", scale)
        scale = float(scale)  # one of numpy would widen the queries
    rule = MaskRule(causal, window, softcap, scale)
    rows = {"[B, T]": query.shape[:2]}
    marks = Marks(
        _as_rows("positions", positions, {"[T]": query.shape[1:2], **rows}),
        _as_rows("segment_ids", segment_ids, rows),
    )
    operands = Operands(query, key, value, marks, sinks)
    # The proof of rows reads plain operations, and no kernel. The mark tells it that this is
    # attention.
    if is_analysed():
        return marked(ATTENTION, functools.partial(_plain_attention, rule))(operands)
    mesh = mesh_under_trace()
    context_axes = tuple(axis for axis in axes_of_role(CONTEXT) if mesh.shape[axis] > 1)
    kernel = implementation or _default_implementation(query)
    if kernel == "cudnn" and (softcap is not None or sinks is not None):
        kernel = "xla"
    if context_axes:
        run_attention = _pad_values(
            _AttentionOverContext(context_axes, rule, implementation, method)
        )
    # Positions in any order: `_flash` makes the mask tile by tile. A whole mask would be T x T.
    elif positions is not None:
        ring = ring_of((), 1, query.shape[1], rule, natural=False)
        run_attention = _pad_values(functools.partial(attend, ring))
    elif kernel == "xla":
        return _plain_attention(rule, operands)
    else:
        run_attention = _kernel(kernel, rule)
        if kernel == "cudnn":
            run_attention = _pad_values(run_attention)
    return _on_each_device(run_attention, operands)


@dataclass(frozen=True)
class _AttentionOverContext:
    """Attention over a context axis, in a region that is manual over every axis: arrays are the
    shards of one device.

    Attributes:
      axes: names of the context axis.
      rule: which positions see which.
      implementation: the kernel that the user asks for; None to choose by device.
      method: the method that the user asks for; None to choose.
    """

    axes: Axes
    rule: MaskRule
    implementation: Implementation | None
    method: Method | None

    def __call__(self, operands: Operands) -> Float[Array, "B T H K"]:
        query, key, *_ = operands
        size = jax.lax.axis_size(self.axes)
        natural = operands.marks.positions is None
        method = self.method or self._default_method(query, key, natural)
        if method == "all_gather":
            problem = "works on whole rows or the blocks of a ring, not by method='all_gather'"
            _refuse_kernel(
                self.implementation,
                "splash",
                "cudnn",
                problem=problem,
                fix="use method='all_to_all' or 'ring'",
            )
            return attend(GatheredKeys(self.axes, self.rule), operands)
        if method == "ring":
            return attend(self._ring(query, natural), operands)
        # As many devices as divide the heads exchange them; over the others keys go around in
        # rings.
        degree = math.gcd(size, key.shape[2])
        if degree == 1:
            problem = (
                f"{key.shape[2]} heads of keys and values on each device cannot be exchanged among"
                f" {size} context devices."
            )
            fix = (
                "use method='ring', repeat the heads of keys and values, or take another size of"
                " context or tensor."
            )
            raise value_error(problem, fix=fix)
        kernel = self.implementation or _default_implementation(query, size * query.shape[1])
        by_kernel = kernel == "splash" or (
            kernel == "cudnn" and self.rule.softcap is None and operands.sinks is None
        )
        # Each device then has whole rows in order, for some heads: a kernel's own case.
        if natural and degree == size and by_kernel:
            run_attention = _kernel(kernel, self.rule)  # pyright: ignore[reportAssignmentType]
        else:

            def run_attention(operands):  # pyright: ignore[reportRedeclaration]
                return attend(self._ring(operands.query, natural, degree), operands)

        return exchanged_attention(self.axes, degree, operands, run_attention)

    def _default_method(self, query: Array, key: Array, natural: bool) -> Method:
        size = jax.lax.axis_size(self.axes)
        length = query.shape[1]
        hops = ring_of(self.axes, size, length, self.rule, natural=natural).hops
        return choose_method(
            size * length,
            size,
            hops,
            heads=query.shape[2],
            kv_heads=key.shape[2],
            itemsize=query.dtype.itemsize,
            kernel=self.implementation not in (None, "xla"),
        )

    def _ring(self, query: Array, natural: bool, stride: int = 1) -> Ring:
        """Return the ring.

        It uses splash for its blocks if splash is asked for or is the default, and can be used.
        """
        length = query.shape[1]
        rule = self.rule
        fix = "use method='all_to_all'"
        _refuse_kernel(
            self.implementation, "cudnn", problem="works on whole rows, not in hops", fix=fix
        )
        splash_fits = natural and rule.window is None and length % LANES == 0
        if not splash_fits:
            problem = (
                f"takes blocks of a multiple of {LANES} positions without a window, got {length}"
                " positions"
            )
            problem = f"{problem} and window={rule.window}"
            fix = f"{fix} where context divides the heads"
            _refuse_kernel(self.implementation, "splash", problem=problem, fix=fix)
        splash = splash_fits and (self.implementation or _default_implementation(query)) == "splash"
        size = jax.lax.axis_size(self.axes)
        return ring_of(self.axes, size, length, rule, natural=natural, stride=stride, splash=splash)


def choose_method(
    length: int,
    size: int,
    hops: int,
    *,
    heads: float,
    kv_heads: float,
    itemsize: int,
    kernel: bool = False,
) -> Method:
    """Return the method that `attention` uses if the caller names none.

    Args:
      length: positions of a row.
      size: C, devices of the context axis.
      hops: the hops of the ring, C - 1 without a window.
      heads: H, the heads of queries on a device.
      kv_heads: G, the heads of keys and values on a device.
      itemsize: bytes of a number.
      kernel: whether the caller asks for a kernel.
    """
    if kernel:
        return "all_to_all" if kv_heads % size == 0 else "ring"
    if length <= _MAX_GATHERED_LENGTH:
        return "all_gather"
    # bytes per position of a device and component of a head, forward and backward
    # Keys and values go around twice, and their gradients once, in float32 at least.
    ring = hops * kv_heads * (4 * itemsize + 2 * max(4, itemsize))
    # Queries, results, keys and values, each forwards and backwards.
    exchange = 4 * (size - 1) / size * (heads + kv_heads) * itemsize
    return "all_to_all" if kv_heads % size == 0 and exchange <= ring else "ring"


def _pad_values(run_attention: Attention) -> Attention:
    """Return attention for values narrower than keys: pad values with zeros, and cut the result to
    their width.
    """

    def padded_attention(operands: Operands) -> Array:
        value_width = operands.value.shape[3]
        padding = operands.query.shape[3] - value_width
        if not padding:
            return run_attention(operands)
        value = jnp.pad(operands.value, ((0, 0),) * 3 + ((0, padding),))
        return run_attention(operands._replace(value=value))[..., :value_width]

    return padded_attention


def _refuse_kernel(
    implementation: Implementation | None, *names: str, problem: str, fix: str
) -> None:
    if implementation in names:
        fix = f"leave implementation out, or {fix}."
        raise value_error(f"{implementation} {problem}.", fix=fix)


def _as_rows(name: str, ids: Array | None, shapes: dict[str, tuple[int, ...]]) -> Array | None:
    """Return positions or segment ids as [1 or B, T], int32.

    An integer of the host that does not fit is refused: the nearest one would be another place.
    """
    if ids is None:
        return None
    array = integers("attention", name, ids, shapes)
    if isinstance(array, np.ndarray) and (array.astype(np.int32) != array).any():
        limits = f"{array.min()} to {array.max()}"
        raise value_error(f"{name} must fit into int32, got {limits}.")
    return as_int32(array).reshape(-1, array.shape[-1])


def _plain_attention(rule: MaskRule, operands: Operands) -> Array:
    query, key, value, marks, sinks = operands
    length = query.shape[1]
    mask = _mask(marks, rule, length)

    def attend(queries: slice, keys: slice) -> Array:
        return masked_attention(
            query[:, queries],
            key[:, keys],
            value[:, keys],
            mask[:, queries, keys],
            softcap=rule.softcap,
            scale=rule.scale,
            sinks=sinks,
        )

    in_order = rule.causal and marks.positions is None
    size = queries_at_a_time(length) if in_order else length
    if size >= length:
        return attend(slice(None), slice(None))
    mixed = []
    for start in range(0, length, size):
        end = start + size
        # Queries of a slice see no key before the window of the first one, nor after the last one.
        # So the square of scores shrinks to a staircase.
        first_key = 0 if rule.window is None else max(0, start + 1 - rule.window)
        mixed.append(attend(slice(start, end), slice(first_key, end)))
    return jnp.concatenate(mixed, axis=1)


def _mask(marks: Marks, rule: MaskRule, length: int) -> Bool[Array, "#B T T"]:
    if marks.positions is not None:
        return sees(marks, marks, rule)
    mask = visible(length, causal=rule.causal, window=rule.window)[None]
    if marks.segments is None:
        return mask
    return mask & (marks.segments[:, :, None] == marks.segments[:, None, :])


def masked_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G V"],
    mask: Bool[Array, "..."],
    *,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H V"]:
    """Return attention by plain XLA; `mask` [1 or B, T, S] says which keys a query sees.

    The others are as in `attention`.

    The softmax is divided by its sum after the values are mixed. So K numbers per query are
    divided, not S. The exponentials are the only arrays of size S that are stored for the backward
    pass.
    """
    B, T, H, K = query.shape
    wide = wide_dtype(query.dtype)
    query_dims = "h"
    key_dims = "h"
    if (G := key.shape[2]) != H:  # R heads of queries to each of the G heads of keys
        query = query.reshape(B, T, G, H // G, K)
        query_dims = "gr"
        key_dims = "g"
    mask_bias = jnp.expand_dims(
        jnp.where(mask, 0, -1e30).astype(wide), range(1, 1 + len(query_dims))
    )
    scores = jnp.einsum(
        f"bt{query_dims}k,bs{key_dims}k->b{query_dims}ts", query, key, preferred_element_type=wide
    )
    scores = capped(scores * factor_of_scores(scale, K), softcap) + mask_bias
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(wide).reshape(1, *scores.shape[1:-2], 1, 1)
        top = jnp.maximum(top, jnp.broadcast_to(sinks, top.shape))
    # The softmax does not depend on `top`, so its gradient is zero and need not be computed.
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    mixed = jnp.einsum(
        f"b{query_dims}ts,bs{key_dims}k->bt{query_dims}k",
        weights.astype(value.dtype),
        value,
        preferred_element_type=wide,
    )
    mixed = checkpoint_name(mixed, NAME)  # before the division, whose gradient reads it
    total = jnp.einsum(f"b{query_dims}ts->bt{query_dims}", weights)[..., None]
    if sinks is not None:
        total = total + jnp.moveaxis(jnp.exp(sinks - top), -2, 1)
    mixed = mixed / total
    return mixed.reshape(B, T, H, value.shape[3]).astype(value.dtype)


def visible(length: int, *, causal: bool, window: int | None) -> Bool[Array, "T T"]:
    """Return [T, T]: whether the query at the first index sees the key at the second."""
    positions = jnp.arange(length)
    distance = positions[:, None] - positions[None, :]
    mask = distance >= 0 if causal else jnp.ones((length, length), bool)
    return mask if window is None else mask & (distance < window)


def _check(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool,
    window: int | None,
    implementation: str | None,
    method: str | None,
) -> None:
    are_4d = query.ndim == key.ndim == value.ndim == 4
    widths_and_rows = [(x.shape[-1:], x.shape[:2]) for x in (query, key)]
    if not are_4d or len({*widths_and_rows}) > 1 or key.shape[:3] != value.shape[:3]:
        problem = f"query has shape {query.shape}, key {key.shape}, value {value.shape}."
        fix = (
            "give [B, T, H, K], [B, T, G, K] and [B, T, G, V]. For keys of other positions, call"
            " jax.nn.dot_product_attention."
        )
        raise value_error(problem, fix=fix)
    H = query.shape[2]
    G = key.shape[2]
    K = query.shape[3]
    value_width = value.shape[3]
    if window is not None:
        check_count("window", window, minimum=1)
    rules = [
        (
            H % G > 0,
            f"{H} heads of queries are not a multiple of {G} heads of keys and values.",
            "give keys and values a number of heads that divides it.",
        ),
        (
            value_width > K,
            f"values are {value_width} wide, wider than the {K} of queries and keys.",
            "pad queries and keys with zeros, and give `scale`.",
        ),
        (
            window is not None and not causal,
            "a window looks back from each position, so it needs causal=True.",
            "pass causal=True, or leave window out.",
        ),
        (
            implementation not in (None, *get_args(Implementation)),
            f"unknown implementation {implementation!r}.",
            "use 'splash', 'cudnn', 'xla', or None to choose by device.",
        ),
        (
            method not in (None, *get_args(Method)),
            f"unknown method {method!r}.",
            "use 'ring', 'all_to_all', 'all_gather', or None to choose by heads and length.",
        ),
    ]
    for is_wrong, problem, fix in rules:
        if is_wrong:
            raise value_error(problem, fix=fix)


def _check_scores(
    query: Array, softcap: float | None, sinks: Array | None, implementation: Implementation | None
) -> None:
    if softcap is not None:
        check_number("softcap", softcap, positive=True)
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise value_error(f"sinks have shape {sinks.shape}.", fix=f"give [H] = {query.shape[2:3]}.")
    if softcap is not None or sinks is not None:
        problem = "computes neither softcap nor sinks"
        _refuse_kernel(implementation, "cudnn", problem=problem, fix="use implementation='xla'")


def _default_implementation(query: Array, length: int | None = None) -> Implementation:
    device_kind = device_kind_or_default()
    if device_kind.startswith("TPU"):
        return "splash" if (length or query.shape[1]) >= LANES else "xla"
    if device_kind == "cpu" or query.dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    return "cudnn"


def _on_each_device(run: Attention, operands: Operands) -> Array:
    """Call `run` on local rows, positions and heads, in a region that is manual over every axis
    that is still automatic.
    """
    mesh = mesh_under_trace()
    auto_axes = not_manual_axes()
    if is_local():
        return run(operands)
    query, key, _, marks, sinks = operands
    row_axes = dividing_axes(query.shape[0], auto_axes, "replica", "data", "expert")
    position_axes = axes_of_roles(auto_axes, CONTEXT)
    head_axes = axes_of_roles(auto_axes, TENSOR)
    for axes, count, counted, remedy in (
        (head_axes, key.shape[2], "heads of keys and values", "repeat them"),
        (position_axes, query.shape[1], "positions", "pad the rows"),
    ):
        size = size_along(mesh.shape, axes)
        if count % size and (axes, count) != (head_axes, 1):
            axis_names = " x ".join(map(repr, axes))
            problem = (
                f"{count} {counted} cannot be sharded over mesh axis {axis_names} (size {size})."
            )
            sizes = sizes_that_divide(" x ".join(axes), [count])
            raise value_error(problem, fix=f"{remedy}, or choose {sizes}.")
    spec = PartitionSpec(row_axes, position_axes, head_axes, None)
    mark_specs = jax.tree.map(
        lambda x: PartitionSpec(row_axes if x.shape[0] == query.shape[0] else None, position_axes),
        marks,
    )
    # the queries of every device use a single head of keys and values
    kv_spec = spec if key.shape[2] > 1 else PartitionSpec(row_axes, position_axes)
    sinks_spec = None if sinks is None else PartitionSpec(head_axes)
    specs = (spec, kv_spec, kv_spec, mark_specs, sinks_spec)
    region = jax.shard_map(
        lambda *arrays: run(Operands(*arrays)),
        in_specs=specs,
        out_specs=spec,
        axis_names=auto_axes,
        check_vma=False,
    )
    return region(*operands)


def _kernel(implementation: Implementation, rule: MaskRule) -> Attention:
    """Return the kernel as a function, for rows in natural order."""
    kernel = splash_attention if implementation == "splash" else _cudnn

    def run(operands: Operands) -> Array:
        query, key, value, marks, sinks = operands
        return kernel(query, key, value, marks.segments, sinks, rule)

    return run


def _cudnn(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    sinks: Array | None,
    rule: MaskRule,
) -> Array:
    assert sinks is None
    assert rule.softcap is None
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None],
        scale=rule.scale,
        is_causal=rule.causal,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation="cudnn",
    )
    return checkpoint_name(mixed, NAME)
