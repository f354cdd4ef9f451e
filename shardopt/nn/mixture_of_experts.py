"""A mixture of experts: each token goes through the few that its router chooses, wherever they lie on the expert axis.

Suffixes: B sequences, T positions, D width, E experts, K experts that a token goes to, F hidden units of one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from shardopt.collectives.per_device import TENSOR
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import wide_dtype
from shardopt.mesh import axes_of_role, is_analysed, mesh_under_trace
from shardopt.nn.dispatch import combine, plan_exchange, send, sorted_by_expert, spread
from shardopt.nn.grouped_product import grouped_product
from shardopt.nn.order import CONTEXT
from shardopt.nn.router import RouterStatistics, Routes, Score, dense_weights, route
from shardopt.partition.plan import EXPERT

NAME, ARRIVED = "experts", "dispatched"
"""The `checkpoint_name` of what the first products give, and of the rows that go into them."""

Weights = Mapping[str, Array]
Activation = Callable[[Array], Array]


def mixture_of_experts(
    weights: Mapping[str, Float[Array, "E ..."]],
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    *,
    top_k: int,
    capacity_factor: float | None = None,
    score: Score = "softmax",
    normalize: bool = True,
    bias: Float[Array, " E"] | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    shared: Mapping[str, Array] | None = None,
    activation: Activation = jax.nn.silu,
    chunk: int | None = None,
) -> tuple[Float[Array, "B T D"], RouterStatistics]:
    """Send each token through the K experts of its highest scores, and add up what they give, each times its weight.

    With s = softmax(x router), or sigmoid, and e_1, ..., e_K the K highest of s + bias (of equal ones the first):

        y = shared(x) + sum_k w_k expert_{e_k}(x)        w_k = scale s_{e_k} / sum_j s_{e_j}
        expert_e(x) = (activation(x gate_e) * (x up_e)) down_e        without "gate": activation(x up_e) down_e

    Router and scores are computed in float32 at least. No token is dropped unless there is a `capacity_factor`.

    **Equivalence**: that of every token through its experts one by one, up to summation order, on one device and on many: tokens
    are sorted by expert, and each expert multiplies its own. With `capacity_factor` places are counted in each row of the
    batch, so the same tokens are dropped on any number of devices.

    **Placement**: inside a strategy rows lie over the axes that carry them. Where the weights here are those of E/X experts,
    device i of the X of the expert axis has experts i E/X, ..., (i+1) E/X - 1, and tokens travel; where they are all E, nothing
    does. F is split over tensor, if that divides it.

    **Communication** over expert, with N = B T tokens on a device and b bytes a number, each layer and micro-batch: forward N K
    rows go and come back, 2 N K D b (X-1)/X sent where loads are equal, and N K weights, 4 bytes each; backward the same. Under
    remat the rows go once more unless "dispatched" is kept. An all-gather of 4 X E bytes says how many. On TPU and GPU each way
    is one `jax.lax.ragged_all_to_all`, which sends what there is; on CPU, where XLA has none, an all-to-all of
    X min(K, E/X) N rows, padded. (On TPU a weight is a row of 512 bytes.) Over tensor a sum of [B, T, D].

    **Memory**: a device may get all tokens of all devices, so with X > 1 what is received is a buffer of X min(K, E/X) N rows of
    D numbers, the hidden units beside it two of F each. `chunk` tokens at a time divide it by N / chunk; then a chunk is computed
    again in the backward pass. Products multiply only the rows that came.

    **Remat**: "router" are the logits, "dispatched" the rows as they arrive, "experts" the products with gate and up.

    Args:
      weights: "up" [E, D, F] and "down" [E, F, D], and "gate" [E, D, F] for gated experts, in the dtype of x; dim 0 is E, or E/X
        on a device of an expert axis of size X.
      x: [B, T, D].
      router: [D, E].
      top_k: K.
      capacity_factor: c; then each expert takes the first ceil(c K T / E) tokens of a row that chose it, and the others of the
        row get nothing of it, the weights of their other choices staying as they are. None: every token is taken.
      score: "softmax" over the experts (Mixtral), or "sigmoid" of each (DeepSeek-V3).
      normalize: whether the K weights are divided by their sum.
      bias: [E], added to the scores for the choice alone, and not differentiated: see `so.nn.update_router_bias`.
      groups: (number of groups, how many are open): experts in groups of neighbours, of which a token may use those whose two
        best scores have the highest sum (DeepSeek-V3). None: all.
      scale: what weights are multiplied with.
      shared: an expert [D, F'], [F', D] that every token goes through with weight 1; F' need not be F.
      activation: of the hidden units.
      chunk: tokens of a device that are dispatched at a time. None: all.

    Returns:
      (y, statistics): y [B, T, D] in the dtype of x; statistics a `RouterStatistics` of what each row chose: load and
      probability [B, E], z_loss and dropped [B].

    Raises:
      TypeError: if top_k or chunk is not an integer, or weights have another dtype than x.
      ValueError: if a shape does not fit, top_k is above the experts that are open, `groups` does not divide E, the score is
        unknown, a number is not positive, weights have neither E nor E/X experts, or `capacity_factor` is used over a context
        axis, which splits rows.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> keys = jax.random.split(jax.random.key(0), 5)
      >>> shapes = {"gate": (8, 4, 16), "up": (8, 4, 16), "down": (8, 16, 4)}
      >>> weights = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys)}
      >>> x, router = jax.random.normal(keys[3], (2, 5, 4)), jax.random.normal(keys[4], (4, 8))
      >>> y, statistics = so.nn.mixture_of_experts(weights, x, router, top_k=2)
      >>> y.shape, statistics.load.shape, bool(jnp.allclose(statistics.load.sum(axis=1), 1))
      ((2, 5, 4), (2, 8), True)

    References:
      Shazeer et al., "Outrageously Large Neural Networks", 2017; Lepikhin et al., "GShard", 2020 (capacity by groups);
      Gale et al., "MegaBlocks", 2022 (dropless); Jiang et al., "Mixtral of Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024,
      equations 12 to 16.
    """
    E = router.shape[-1]
    _check(weights, x, router, shared, bias, top_k=top_k, score=score, groups=groups)
    if chunk is not None:
        check_count("mixture_of_experts", "chunk", chunk, least=1)
    mesh = mesh_under_trace()
    places = tuple(axis for axis in axes_of_role(CONTEXT) if mesh.shape[axis] > 1)
    if capacity_factor is not None:
        _check_capacity(capacity_factor, places)
    axes = tuple(axis for axis in axes_of_role(EXPERT) if mesh.shape[axis] > 1)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    held = weights["up"].shape[0]
    if held not in (E, E / devices):
        what = f"the router chooses among {E} experts, the weights here are those of {held}."
        local = f", or [{E // devices}, ...] of this device" if devices > 1 and E % devices == 0 else ""
        fix = f"give weights [{E}, ...]{local}."
        raise ValueError(format_error("mixture_of_experts", what, fix=fix))
    routing = functools.partial(
        route,
        top_k=top_k,
        score=score,
        normalize=normalize,
        groups=groups,
        scale=scale,
        capacity_factor=capacity_factor,
    )
    if is_analysed():
        y, statistics = _shown(dict(weights), x, router, bias, routing, activation, top_k)
    else:
        run = functools.partial(_routed, routing, activation, chunk)
        y, statistics = _on_each_device(run, dict(weights), x, router, bias, axes, travels=held < E)
    if shared is not None:
        hidden = _gated(shared, lambda name: jnp.einsum("btd,df->btf", x, shared[name]), activation)
        y = y + jnp.einsum("btf,fd->btd", hidden.astype(x.dtype), shared["down"])
    return y, statistics


def _routed(
    routing: Callable[..., Routes],
    activation: Activation,
    chunk: int | None,
    axes: tuple[str, ...],
    weights: Weights,
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    bias: Array | None,
) -> tuple[Float[Array, "B T D"], RouterStatistics]:
    """Run where every axis is manual: arrays are those of one device, and rows travel over `axes` if there are any."""
    B, T, D = x.shape
    routes = routing(x, router, bias)
    E, N, K = router.shape[1], B * T, routes.experts.shape[2]
    some = functools.partial(_dispatched, activation, axes, E, weights)
    flat = x.reshape(N, D), routes.experts.reshape(N, K), routes.weights.reshape(N, K)
    if chunk is None or chunk >= N:
        return some(*flat).reshape(B, T, D), routes.statistics
    pad = -N % chunk
    fill = 0, E, 0  # what is padded has no place
    cut = [
        jnp.pad(a, ((0, pad), (0, 0)), constant_values=value).reshape(-1, chunk, a.shape[1])
        for a, value in zip(flat, fill, strict=True)
    ]
    again = jax.checkpoint(some, prevent_cse=False)
    _, y = jax.lax.scan(lambda _, one: (None, again(*one)), None, cut)
    return y.reshape(-1, D)[:N].reshape(B, T, D), routes.statistics


def _dispatched(
    activation: Activation,
    axes: tuple[str, ...],
    num_experts: int,
    weights: Weights,
    x: Float[Array, "n D"],
    experts: Array,
    scales: Array,
) -> Float[Array, "n D"]:
    """Return what the experts give for n tokens."""
    n, K = experts.shape
    order, inverse, sizes = sorted_by_expert(experts, num_experts)
    rows = spread(x, order, inverse)
    scales = spread(scales.reshape(n * K, 1), order, inverse)
    if not axes:
        rows = checkpoint_name(rows, ARRIVED)
        return combine(_experts(activation, weights, rows, scales, sizes), order, inverse, n)
    exchange = plan_exchange(axes, sizes)
    devices, here = jax.lax.axis_size(axes), weights["up"].shape[0]
    most = min(K, here) * n
    to_experts = lambda a: send(axes, most, devices * most, a, exchange.there, exchange.back)  # noqa: E731
    rows, scales = checkpoint_name((to_experts(rows), to_experts(scales)), ARRIVED)
    out = _experts(activation, weights, rows, scales, exchange.sizes)
    return combine(send(axes, most, n * K, out, exchange.back, exchange.there), order, inverse, n)


def _experts(activation: Activation, weights: Weights, rows: Array, scales: Array, sizes: Array) -> Array:
    """Return what each row's expert gives, times its scale [M, 1]."""
    first = {name: grouped_product(rows, weights[name], sizes) for name in weights if name != "down"}
    first = checkpoint_name(first, NAME)

    @jax.checkpoint
    def down(first: Weights, scales: Array, weights: Array) -> Array:
        # scaled before the last product, which is linear: so what it gives is not needed for the gradient of the scales
        hidden = _gated(first, lambda name: first[name], activation) * scales
        return grouped_product(hidden.astype(weights.dtype), weights, sizes)

    return down(first, scales, weights["down"])


def _gated(weights: Weights, product: Callable[[str], Array], activation: Activation) -> Array:
    up = product("up")
    wide = lambda a: a.astype(wide_dtype(a.dtype))  # noqa: E731
    if "gate" not in weights:
        return activation(wide(up))
    return activation(wide(product("gate"))) * wide(up)


def _shown(
    weights: Weights,
    x: Array,
    router: Array,
    bias: Array | None,
    routing: Callable[..., Routes],
    activation: Activation,
    top_k: int,
) -> tuple[Array, RouterStatistics]:
    """Return every expert of every token times its weight: rows and positions visibly apart, for the check of losses.

    It has a name in the trace, with K, for that check and for `so.planning.trace`.
    """

    def run(weights: Weights, x: Array, router: Array, bias: Array | None) -> tuple[Array, RouterStatistics]:
        routes = routing(x, router, bias)
        dense = dense_weights(routes.experts, routes.weights, router.shape[1])
        rows = checkpoint_name(x, ARRIVED)  # names that `BlockModel.remat` may use are looked up here
        first = lambda name: checkpoint_name(jnp.einsum("btd,edf->btef", rows, weights[name]), NAME)  # noqa: E731
        hidden = _gated(weights, first, activation)
        hidden = (hidden * dense[..., None]).astype(x.dtype)
        return jnp.einsum("btef,efd->btd", hidden, weights["down"]), routes.statistics

    run.__name__ = f"shardopt_experts_{top_k}"
    return jax.jit(run)(weights, x, router, bias)


def _on_each_device(
    run: Callable[..., tuple[Array, RouterStatistics]],
    weights: Weights,
    x: Array,
    router: Array,
    bias: Array | None,
    axes: tuple[str, ...],
    *,
    travels: bool,
) -> tuple[Array, RouterStatistics]:
    """Call it on local rows and hidden units: a region that is manual over every axis that is left to the partitioner."""
    mesh = mesh_under_trace()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = {axis for axis, kind in types.items() if kind != AxisType.Manual and mesh.shape[axis] > 1}
    if not left:
        return run(axes if travels else (), weights, x, router, bias)
    rows = tuple(axis for role in ("replica", "data", EXPERT) for axis in axes_of_role(role) if axis in left)
    places = tuple(axis for axis in axes_of_role(CONTEXT) if axis in left)
    tensor = tuple(axis for axis in axes_of_role(TENSOR) if axis in left)
    if weights["up"].shape[2] % math.prod(mesh.shape[axis] for axis in tensor):
        tensor = ()
    # seen whole, experts are split where they can be: slicing what is replicated costs nothing
    spread_out = axes and set(axes) <= left and router.shape[1] % math.prod(mesh.shape[axis] for axis in axes) == 0
    first, hidden = (axes if spread_out else None), tensor or None
    inner = PartitionSpec(first, None, hidden)
    specs = {name: PartitionSpec(first, hidden, None) if name == "down" else inner for name in weights}
    tokens, of_rows = PartitionSpec(rows or None, places or None, None), PartitionSpec(rows or None)
    over = axes if travels or spread_out else ()

    def region(weights: Weights, x: Array, router: Array, bias: Array | None) -> tuple[Array, RouterStatistics]:
        y, statistics = run(over, weights, x, router, bias)
        if places:
            statistics = jax.tree.map(lambda a: jax.lax.pmean(a, places), statistics)
        return y[None], statistics

    y, statistics = jax.shard_map(
        region,
        in_specs=(specs, tokens, PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(tensor or None, *tokens), of_rows),
        axis_names=left,
        check_vma=False,
    )(weights, x, router, bias)
    # each tensor shard gives the part of its hidden units
    return jnp.sum(y, axis=0, dtype=wide_dtype(y.dtype)).astype(x.dtype), statistics


def _check(
    weights: Weights,
    x: Array,
    router: Array,
    shared: Weights | None,
    bias: Array | None,
    *,
    top_k: int,
    score: str,
    groups: tuple[int, int] | None,
) -> None:
    check_count("mixture_of_experts", "top_k", top_k, least=1)
    if x.ndim != 3 or router.ndim != 2 or router.shape[0] != x.shape[2]:
        what = f"x has shape {x.shape}, the router {router.shape}."
        raise ValueError(format_error("mixture_of_experts", what, fix="give x [B, T, D] and router [D, E]."))
    E = router.shape[1]
    for what, tree, dims in (("weights", weights, ("E", "D", "F")), ("shared weights", shared, ("D", "F"))):
        if tree is not None:
            _check_weights(what, tree, dims, x)
    if bias is not None and bias.shape != (E,):
        raise ValueError(format_error("mixture_of_experts", f"bias has shape {bias.shape}.", fix=f"give [{E}]."))
    if score not in get_args(Score):
        fix = "use 'softmax' or 'sigmoid'."
        raise ValueError(format_error("mixture_of_experts", f"unknown score {score!r}.", fix=fix))
    num_open = E
    if groups is not None:
        count, best = groups
        check_count("mixture_of_experts", "groups[0]", count, least=1)
        check_count("mixture_of_experts", "groups[1]", best, least=1)
        if E % count or best > count:
            what = f"groups={groups}: {count} groups of {E} experts, {best} of them open."
            fix = "take a number of groups that divides the experts, and open at most as many."
            raise ValueError(format_error("mixture_of_experts", what, fix=fix))
        num_open = E // count * best
    if top_k > num_open:
        what = f"top_k={top_k}, but a token can go to {num_open} experts only."
        raise ValueError(format_error("mixture_of_experts", what, fix=f"take at most {num_open}."))


def _check_weights(what: str, weights: Weights, dims: tuple[str, ...], x: Array) -> None:
    width = x.shape[2]
    if other := [f"{name}: {leaf.dtype}" for name, leaf in weights.items() if leaf.dtype != x.dtype]:
        what = f"the {what} are not of the dtype of x, {x.dtype}."
        raise TypeError(format_error("mixture_of_experts", what, other, "cast one to the other."))
    names = {"up", "down"} | ({"gate"} & set(weights))
    shapes = {name: tuple(leaf.shape) for name, leaf in weights.items()}
    fits = set(weights) == names and len({len(shape) for shape in shapes.values()} | {len(dims)}) == 1
    if fits:
        *first, _, hidden = shapes["up"]
        inner, down = (*first, width, hidden), (*first, hidden, width)
        fits = all(shape == (down if name == "down" else inner) for name, shape in shapes.items())
    if not fits:
        inner, down = ", ".join(dims), ", ".join((*dims[:-2], dims[-1], dims[-2]))
        fix = f"give 'up' [{inner}], 'down' [{down}] and, for gated experts, 'gate' [{inner}], with D = {width}."
        listed = [f"{name}: shape {shape}" for name, shape in shapes.items()]
        raise ValueError(format_error("mixture_of_experts", f"the {what} do not fit.", listed, fix))


def _check_capacity(factor: float, places: tuple[str, ...]) -> None:
    if not factor > 0:
        what = f"capacity_factor must be above 0, got {factor}."
        raise ValueError(format_error("mixture_of_experts", what, fix="None takes every token."))
    if places:
        what = f"capacity_factor={factor} counts places in each row, which mesh axis {places[0]!r} splits."
        raise ValueError(format_error("mixture_of_experts", what, fix="leave it out (dropless), or take context=1."))
