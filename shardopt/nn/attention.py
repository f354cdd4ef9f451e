"""Attention by the kernel of the devices, splash on TPU, cudnn on GPU, else plain XLA; over context by ring, exchange or gather.

Suffixes: B sequences, T queries, S keys, H heads of queries, G heads of keys and values, K width of a head, V of its values.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from shardopt.collectives.per_device import TENSOR
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.mesh import axes_of_role, device_kind_or_default, is_analysed, mesh_under_trace
from shardopt.nn.exchange import exchanged_attention, gathered_attention
from shardopt.nn.flash import NAME, Marks, Rule, sees
from shardopt.nn.order import CONTEXT
from shardopt.nn.ring import Ring, ring_attention, ring_of
from shardopt.nn.splash import LANES, splash_attention

Implementation = Literal["splash", "cudnn", "xla"]
Method = Literal["ring", "all_to_all", "all_gather"]
_SHORT = 4096
"""Positions of a row up to which one gather is chosen: less is sent than it takes to start many sends."""


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G V"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    positions: Int[Array, "*B T"] | None = None,
    implementation: Implementation | None = None,
    method: Method | None = None,
) -> Float[Array, "B T H V"]:
    """Mix the values that each query may see: softmax(query key^T / sqrt(K)) value, head by head.

    Query head h uses key and value head h // (H / G). Softmax and sums are taken in float32 at least. Inside a strategy whose
    mesh has a context axis, T are the positions of this device, and queries see the keys of all devices of the axis.

    **Equivalence**: every implementation and method computes the same, up to summation order and, below float32, to the
    dtype in which products are rounded.

    **Placement**: inside a strategy heads may be sharded over tensor by rule, rows over the axes that carry them, and
    positions over context; each device runs on its own rows and heads.

    **Communication**: none but over a context axis. There, with C devices, b bytes a number, T positions a device, and
    KV = 2 B T G K b the bytes of its keys and values, each device sends a layer:

        ring          forward (C-1) KV, in C-1 hops; backward (C-1) KV again, and (C-1) KV w/b for the gradients of keys and
                      values, summed in w = 4 bytes (8 in float64). With a window of W positions in natural order
                      ceil((W-1) / T) hops, if fewer.
        all_gather    the same bytes in one gather each of keys and values, and one scatter each of their gradients
        all_to_all    forward 2 (d-1)/d B T (H + G) K b, in four exchanges; backward the same. d is the greatest divisor of C
                      that divides G; across the C/d groups of d neighbours a ring of blocks of d T positions and G/d heads.

    Positions and segment ids are sent only where they are given. On CPU a ring in a pipeline gathers at every hop.

    **Memory**: "splash" and "cudnn" never hold the T x T scores; "xla" does, but with `positions` or over a context axis it
    goes tile by tile, 512 x 512 scores, and leaves out tiles that the mask empties. What is mixed has the `checkpoint_name`
    "attention"; where it is kept, splash and the tiles are not run again in the backward pass, of "xla" the scores alone are
    computed again, and cudnn runs again for statistics that jax does not name. Of other devices a ring holds two blocks of
    keys and values at a time and keeps none; "all_gather" holds all C blocks, and their gradients, while it runs.

    Args:
      query: [B, T, H, K].
      key: [B, T, G, K], with G a divisor of H: grouped-query attention; position embeddings already applied.
      value: [B, T, G, V], with V up to K; where V is less, cudnn, positions and a context axis take it padded with zeros to K.
      causal: whether a query sees only keys at its own position and before.
      segment_ids: [B, T], integers; a query sees only keys of its own segment, such as a packed document. None: all.
      window: how many positions a query sees at most, its own and those before it; needs `causal`. None: all.
      positions: [B, T] or [T], integers: where each token stands in its row, which `causal` and `window` compare; the
        "order" of `so.nn.zigzag`. None: natural order, in which device i of a context axis holds i T, ..., i T + T - 1; packed
        documents in natural order need none beside their segment ids.
      implementation: "splash", jax's Pallas kernel for TPU (elsewhere it runs interpreted, which is for tests); "cudnn",
        flash attention of `jax.nn.dot_product_attention`, for half precision on GPU; "xla". None chooses by the
        devices of the mesh: splash on TPU from 128 positions on, cudnn on GPU in half precision, else xla. Where a kernel
        cannot be used None is xla, and to ask for the kernel is refused: either needs natural order (no positions); over
        context, cudnn whole rows ("all_to_all", d = C), splash these or the blocks of a ring of a multiple of 128 positions
        without a window, whose results it rounds to the dtype of query before they are summed.
      method: how devices of a context axis share keys: "ring", "all_to_all" (Ulysses), "all_gather"; elsewhere it changes
        nothing. None chooses "all_gather" for rows of at most 4096 positions, where starting sends takes longer than the bytes;
        else "all_to_all" where C divides G (of one tensor shard) and it sends no more bytes than the ring, since
        causal work is then equal in any order and the kernels can be used; else "ring".

    Returns:
      [B, T, H, V] in the dtype of value.

    Raises:
      TypeError: if positions are not integers.
      ValueError: if H is not a multiple of G, V is above K, a tensor axis does not divide G, G (of one tensor shard) and C have no common
        divisor for "all_to_all", `window` is given without `causal` or is below 1, positions have another shape, a
        kernel is asked for that cannot be used (see there), or `implementation` or `method` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> attention(query, key[:, :, :2], value[:, :, :2], window=3).shape
      (2, 5, 4, 8)

    References:
      Vaswani et al., "Attention Is All You Need", 2017, equation 1; Ainslie et al., "GQA", 2023; Dao et al.,
      "FlashAttention", 2022; jax.experimental.pallas.ops.tpu.splash_attention; Liu, Zaharia, Abbeel, "Ring Attention with
      Blockwise Transformers", 2023; Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    _check(query, key, value, causal=causal, window=window, implementation=implementation, method=method)
    if positions is not None:
        what = "works on rows in natural order, not with positions"
        _refuse_kernel(implementation, "splash", "cudnn", what=what, fix="give rows in natural order")
    rule, marks = Rule(causal, window), Marks(_as_rows(positions, query), segment_ids)
    if is_analysed():
        return _shown(query, key, value, marks, rule)
    mesh = mesh_under_trace()
    axes = tuple(axis for axis in axes_of_role(CONTEXT) if mesh.shape[axis] > 1)
    chosen = implementation or _default(query)
    if axes:
        run = functools.partial(_over_context, axes, rule, implementation, method)
    elif positions is not None:
        run = functools.partial(ring_attention, ring_of((), 1, query.shape[1], rule, natural=False))
    elif chosen == "xla":
        return _plain(query, key, value, marks, rule)
    else:
        run = _kernel(chosen, rule)
    if axes or positions is not None or chosen == "cudnn":
        run = _of_one_width(run)
    return _on_each_device(run, query, key, value, marks)


def _over_context(
    axes: tuple[str, ...],
    rule: Rule,
    implementation: Implementation | None,
    method: Method | None,
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    marks: Marks,
) -> Float[Array, "B T H K"]:
    """Run a method where every axis is manual: arrays are those of one device."""
    size = math.prod(mesh_under_trace().shape[axis] for axis in axes)
    natural = marks.positions is None
    in_hops = functools.partial(_ring_of, axes, size, rule, implementation, natural=natural)
    hops = ring_of(axes, size, query.shape[1], rule, natural=natural).hops
    heads = {"heads": query.shape[2], "kv_heads": key.shape[2], "itemsize": query.dtype.itemsize}
    chosen = method or choose_method(
        size * query.shape[1], size, hops, **heads, kernel=implementation not in (None, "xla")
    )
    if chosen == "all_gather":
        what = "works on whole rows or the blocks of a ring, not by method='all_gather'"
        _refuse_kernel(implementation, "splash", "cudnn", what=what, fix="use method='all_to_all' or 'ring'")
        return gathered_attention(axes, rule, query, key, value, marks)
    if chosen == "ring":
        return ring_attention(in_hops(query), query, key, value, marks)
    degree = math.gcd(size, key.shape[2])
    if degree == 1:
        what = (
            f"{key.shape[2]} heads of keys and values on each device cannot be exchanged among {size} context devices."
        )
        fix = "use method='ring', repeat the heads of keys and values, or take another size of context or tensor."
        raise ValueError(format_error("attention", what, fix=fix))
    by = implementation or _default(query, size * query.shape[1])
    if natural and degree == size and by != "xla":
        run = _kernel(by, rule)
    else:
        run = lambda q, k, v, marks: ring_attention(in_hops(q, stride=degree), q, k, v, marks)  # noqa: E731
    return exchanged_attention(axes, size, degree, query, key, value, marks, run)


def _ring_of(
    axes: tuple[str, ...],
    size: int,
    rule: Rule,
    implementation: Implementation | None,
    query: Array,
    *,
    natural: bool,
    stride: int = 1,
) -> Ring:
    """Return the ring, with splash for its blocks where that is asked for or is the default, and can be."""
    length = query.shape[1]
    _refuse_kernel(implementation, "cudnn", what="works on whole rows, not in hops", fix="use method='all_to_all'")
    able = natural and rule.window is None and length % LANES == 0
    if not able:
        what = f"takes blocks of a multiple of {LANES} positions without a window, got {length} positions"
        what, fix = f"{what} and window={rule.window}", "use method='all_to_all' where context divides the heads"
        _refuse_kernel(implementation, "splash", what=what, fix=fix)
    splash = able and (implementation or _default(query)) == "splash"
    return ring_of(axes, size, length, rule, natural=natural, stride=stride, splash=splash)


def choose_method(
    length: int, size: int, hops: int, *, heads: float, kv_heads: float, itemsize: int, kernel: bool = False
) -> Method:
    """Return the method that is taken where none is asked for.

    Args:
      length: positions of a row.
      size: C, devices of the context axis.
      hops: of the ring, C - 1 without a window.
      heads: H, of queries, on a device.
      kv_heads: G, of keys and values.
      itemsize: bytes of a number.
      kernel: whether a kernel is asked for.
    """
    if kernel:
        return "all_to_all" if kv_heads % size == 0 else "ring"
    if length <= _SHORT:
        return "all_gather"
    # bytes per position of a device and component of a head, forward and backward
    ring = hops * kv_heads * (4 * itemsize + 2 * max(4, itemsize))
    exchange = 4 * (size - 1) / size * (heads + kv_heads) * itemsize
    return "all_to_all" if kv_heads % size == 0 and exchange <= ring else "ring"


def _of_one_width(run: Callable[[Array, Array, Array, Marks], Array]) -> Callable[[Array, Array, Array, Marks], Array]:
    """Return attention for values that are narrower than keys, of one for values as wide: zeros add what is cut off."""

    def padded(query: Array, key: Array, value: Array, marks: Marks) -> Array:
        width, wide = value.shape[3], query.shape[3]
        if width == wide:
            return run(query, key, value, marks)
        value = jnp.pad(value, ((0, 0),) * 3 + ((0, wide - width),))
        return run(query, key, value, marks)[..., :width]

    return padded


def _refuse_kernel(implementation: Implementation | None, *names: str, what: str, fix: str) -> None:
    if implementation in names:
        fix = f"leave implementation out, or {fix}."
        raise ValueError(format_error("attention", f"{implementation} {what}.", fix=fix))


def _as_rows(positions: Array | None, query: Array) -> Array | None:
    """Return positions as [1 or B, T]."""
    if positions is None:
        return None
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"attention: positions must be integers, got {positions.dtype}.")
    B, T = query.shape[:2]
    if positions.shape not in ((T,), (B, T)):
        what = f"positions have shape {positions.shape}, for queries {query.shape}."
        raise ValueError(format_error("attention", what, fix=f"give [T] = ({T},) or [B, T] = ({B}, {T})."))
    return positions.reshape(-1, T).astype(jnp.int32)


def _shown(query: Array, key: Array, value: Array, marks: Marks, rule: Rule) -> Array:
    """Return plain attention of these rows in one jitted function, by whose name the check of losses knows it."""

    def shardopt_attention(query: Array, key: Array, value: Array, marks: Marks) -> Array:
        return _plain(query, key, value, marks, rule)

    return jax.jit(shardopt_attention)(query, key, value, marks)


def _plain(query: Array, key: Array, value: Array, marks: Marks, rule: Rule) -> Array:
    return masked_attention(query, key, value, _mask(marks, rule, query.shape[1]))


def _mask(marks: Marks, rule: Rule, length: int) -> Bool[Array, "#B T T"]:
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
) -> Float[Array, "B T H V"]:
    """Return attention by plain XLA, where `mask` [1 or B, T, S] says which keys a query sees.

    The softmax is divided by its sum after the values are mixed: K numbers a query are divided then, not S, and nothing of
    size S but the exponentials is kept for the backward pass.
    """
    B, T, H, K = query.shape
    wide, h, g = jnp.promote_types(query.dtype, jnp.float32), "h", "h"
    if (G := key.shape[2]) != H:  # R heads of queries to each of the G heads of keys
        query, h, g = query.reshape(B, T, G, H // G, K), "gr", "g"
    hidden = jnp.expand_dims(jnp.where(mask, 0, -1e30).astype(wide), range(1, 1 + len(h)))
    scores = jnp.einsum(f"bt{h}k,bs{g}k->b{h}ts", query, key, preferred_element_type=wide)
    scores = scores * K**-0.5 + hidden
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum(f"b{h}ts,bs{g}k->bt{h}k", weights.astype(value.dtype), value, preferred_element_type=wide)
    mixed = checkpoint_name(mixed, NAME)  # before the division, whose gradient reads it
    mixed = mixed / jnp.einsum(f"b{h}ts->bt{h}", weights)[..., None]
    return mixed.reshape(B, T, H, value.shape[3]).astype(value.dtype)


def visible(length: int, *, causal: bool, window: int | None) -> Bool[Array, "T T"]:
    """Return which key position (second dim) each query position (first dim) sees."""
    at = jnp.arange(length)
    ahead = at[:, None] - at[None, :]
    seen = ahead >= 0 if causal else jnp.ones((length, length), bool)
    return seen if window is None else seen & (ahead < window)


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
    H, G = query.shape[2], key.shape[2]
    if H % G:
        what = f"{H} heads of queries are not a multiple of {G} heads of keys and values."
        raise ValueError(format_error("attention", what, fix="give keys and values a number of heads that divides it."))
    if value.shape[3] > query.shape[3]:
        what = f"values are {value.shape[3]} wide, wider than the {query.shape[3]} of queries and keys."
        raise ValueError(format_error("attention", what, fix="pad queries and keys with zeros, and scale the queries."))
    if window is not None:
        check_count("attention", "window", window, least=1)
        if not causal:
            what = "a window looks back from each position, so it needs causal=True."
            raise ValueError(format_error("attention", what, fix="pass causal=True, or leave window out."))
    if implementation is not None and implementation not in get_args(Implementation):
        what = f"unknown implementation {implementation!r}."
        raise ValueError(
            format_error("attention", what, fix="use 'splash', 'cudnn', 'xla', or None to choose by device.")
        )
    if method is not None and method not in get_args(Method):
        fix = "use 'ring', 'all_to_all', 'all_gather', or None to choose by heads and length."
        raise ValueError(format_error("attention", f"unknown method {method!r}.", fix=fix))


def _default(query: Array, length: int | None = None) -> Implementation:
    kind = device_kind_or_default()
    if kind.startswith("TPU"):
        return "splash" if (length or query.shape[1]) >= LANES else "xla"
    if kind == "cpu" or query.dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    return "cudnn"


def _on_each_device(
    run: Callable[[Array, Array, Array, Marks], Array], query: Array, key: Array, value: Array, marks: Marks
) -> Array:
    """Call it on local rows, positions and heads: a region that is manual over every axis that is left to the partitioner."""
    mesh = mesh_under_trace()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = {axis for axis, kind in types.items() if kind != AxisType.Manual and mesh.shape[axis] > 1}
    if not left:
        return run(query, key, value, marks)
    rows = tuple(axis for role in ("replica", "data", "expert") for axis in axes_of_role(role) if axis in left)
    places = tuple(axis for axis in axes_of_role(CONTEXT) if axis in left)
    heads = tuple(axis for axis in axes_of_role(TENSOR) if axis in left)
    for axes, count, what, fix in (
        (
            heads,
            key.shape[2],
            "heads of keys and values",
            "repeat the heads of keys and values, or take a smaller axis.",
        ),
        (places, query.shape[1], "positions", "pad the rows, or take a smaller axis."),
    ):
        size = math.prod(mesh.shape[axis] for axis in axes)
        if count % size:
            named = " x ".join(map(repr, axes))
            what = f"{count} {what} cannot be sharded over mesh axis {named} (size {size})."
            raise ValueError(format_error("attention", what, fix=fix))
    spec = PartitionSpec(rows or None, places or None, heads or None, None)
    of_marks = jax.tree.map(
        lambda x: PartitionSpec((rows or None) if x.shape[0] == query.shape[0] else None, places or None), marks
    )
    region = jax.shard_map(run, in_specs=(spec, spec, spec, of_marks), out_specs=spec, axis_names=left, check_vma=False)
    return region(query, key, value, marks)


def _kernel(implementation: Implementation, rule: Rule) -> Callable[[Array, Array, Array, Marks], Array]:
    """Return a kernel for rows in natural order."""
    run = splash_attention if implementation == "splash" else _cudnn
    return lambda query, key, value, marks: run(query, key, value, marks.segments, rule)


def _cudnn(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    rule: Rule,
) -> Array:
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None],
        is_causal=rule.causal,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation="cudnn",
    )
    return checkpoint_name(mixed, NAME)
