"""A mixture of experts: each token goes through the few experts that its router chooses, on any
device of the expert axis.

Suffixes: B sequences, T positions, D width, E experts, K experts that a token goes to, F hidden
units of an expert.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from shardopt.collectives._per_device import TENSOR
from shardopt.core import calling, check_count, check_floating, type_error, value_error, wide_dtype
from shardopt.kernels._grouped_product import grouped_product
from shardopt.mesh import axes_of_role, is_analysed, mesh_under_trace, not_manual_axes, size_along
from shardopt.nn._dispatch import combine, plan_exchange, send, sorted_by_expert, spread
from shardopt.nn._low_rank import as_array
from shardopt.nn._order import CONTEXT
from shardopt.nn._regions import Axes, dividing_axes
from shardopt.nn._router import RouterStatistics, Routing, Score, dense_weights, route
from shardopt.partition._plan import EXPERT
from shardopt.trace._marks import EXPERTS, marked

NAME = "experts"
ARRIVED = "dispatched"
"""The `checkpoint_name` of the first products, and of the rows that go into them."""

Weights = Mapping[str, Array]
Activation = Callable[[Array], Array]


@calling("mixture_of_experts")
def mixture_of_experts(
    weights: Mapping[str, Float[Array, "E ..."]],
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    *,
    top_k: int,
    score: Score = "softmax",
    normalize: bool = True,
    bias: Float[Array, " E"] | None = None,
    router_bias: Float[Array, " E"] | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    shared: Mapping[str, Array] | None = None,
    activation: Activation = jax.nn.silu,
    chunk: int | None = None,
) -> tuple[Float[Array, "B T D"], RouterStatistics]:
    """Send each token through the K experts with its highest scores, and return the weighted sum of
    their outputs.

    With s = softmax(x router), or sigmoid, and e_1, ..., e_K the K highest of s + bias (the first
    of equal scores):

        y = shared(x) + sum_k w_k expert_{e_k}(x)        w_k = scale s_{e_k} / sum_j s_{e_j}
        expert_e(x) = (activation(x gate_e) * (x up_e)) down_e        without "gate": activation(x up_e) down_e

    Router and scores are computed in float32 at least. No token is dropped.

    Args:
      weights: "up" [E, D, F] and "down" [E, F, D], and "gate" [E, D, F] for gated experts, in the
        dtype of x. Dim 0 is E, or E/X on a device of an expert axis of size X. The biases
        "gate_bias" and "up_bias" [E, F] and "down_bias" [E, D] are added to the products. Without a
        gate, "up" may be [E, D, n F]: the activation then returns F units (GPT-OSS).
      x: [B, T, D].
      router: [D, E].
      top_k: K.
      score: "softmax" over the experts (Mixtral), or "sigmoid" of each (DeepSeek-V3).
      normalize: whether the K weights are divided by their sum.
      bias: [E], added to the scores for the choice alone, and not differentiated: see
        `so.nn.update_router_bias`.
      router_bias: [E], added to the logits x router (GPT-OSS).
      groups: (number of groups, how many are open): experts are in groups of neighbours. A token
        may use the groups whose two best scores have the highest sum (DeepSeek-V3). None: all
        groups.
      scale: the factor of all weights.
      shared: an expert [D, F'], [F', D] that every token goes through with weight 1; F' need not be
        F.
      activation: the activation of the hidden units.
      chunk: how many tokens of a device are dispatched at a time. None: all.

    Returns:
      (y, statistics): y is [B, T, D] in the dtype of x. The statistics are a `RouterStatistics` of
      the choices of each row: load and probability [B, E], and z_loss [B]. A token whose scores are
      NaN has the result NaN. No load counts it.

    Raises:
      TypeError: if top_k or chunk is not an integer, an array is not floating, or weights have
        another dtype than x.
      ValueError: if a shape does not fit, or weights have neither E nor E/X experts.
      ValueError: if a number is not positive, top_k is above the number of open experts, `groups`
        does not divide E, or the score is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, shardopt as so
      >>> keys = jax.random.split(jax.random.key(0), 5)
      >>> shapes = {"gate": (8, 4, 16), "up": (8, 4, 16), "down": (8, 16, 4)}
      >>> weights = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys)}
      >>> x, router = jax.random.normal(keys[3], (2, 5, 4)), jax.random.normal(keys[4], (4, 8))
      >>> y, statistics = so.nn.mixture_of_experts(weights, x, router, top_k=2)
      >>> y.shape, statistics.load.shape, bool(jnp.allclose(statistics.load.sum(axis=1), 1))
      ((2, 5, 4), (2, 8), True)

    **Equivalence**: the result equals sending every token through its experts one by one, up to
    summation order, on any number of devices. Tokens are sorted by expert, and each expert
    multiplies its own tokens.

    **Placement**: inside a strategy, rows are sharded over the axes that carry them. If the local
    weights are E/X experts, device i of the X devices of the expert axis has the experts i E/X,
    ..., (i+1) E/X - 1, and tokens travel. If the local weights are all E experts, no token travels.
    F is sharded over tensor, if tensor divides it.

    **Communication** over expert, per layer and micro-batch, with N = B T tokens on a device and b
    bytes a number:

    - Forward, N K rows are sent and returned: 2 N K D b (X-1)/X bytes if loads are equal. N K
      weights of 4 bytes are sent too. Backward the same. Under remat the rows are sent once more,
      unless "dispatched" is saved.
    - An all-gather of 4 X E bytes tells how many rows each device sends.
    - On TPU and GPU each direction is one `jax.lax.ragged_all_to_all`, which sends only real rows.
      On TPU a weight is a row of 512 bytes.
    - XLA:CPU has no ragged all-to-all. There each direction is an all-to-all of X min(K, E/X) N
      padded rows.

    Over tensor it is a sum of [B, T, D].

    **Memory**: a device may receive all tokens of all devices. With X > 1 the receive buffer has X
    min(K, E/X) N rows of D numbers, and the hidden units are two such buffers with F numbers a row.
    `chunk` divides these by N / chunk; a chunk is then computed again in the backward pass.
    Products multiply only the rows that arrived.

    **Remat**: "router" names the logits, "dispatched" the rows as they arrive, "experts" the
    products with gate and up.

    References:
      Shazeer et al., "Outrageously Large Neural Networks", 2017; Lepikhin et al., "GShard", 2020
      (capacity by groups); Gale et al., "MegaBlocks", 2022 (dropless); Jiang et al., "Mixtral of
      Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024, equations 12 to 16.
    """
    E = router.shape[-1]
    weights = {name: as_array(weight) for name, weight in weights.items()}
    shared = shared and {name: as_array(weight) for name, weight in shared.items()}
    routing = Routing(top_k, score, normalize, groups, scale)
    check_floating(x=x, router=router, bias=bias, router_bias=router_bias)
    _check_arrays(weights, x, router, shared, (bias, router_bias))
    routing.check(E)
    if chunk is not None:
        check_count("chunk", chunk)
    mesh = mesh_under_trace()
    expert_axes = tuple(axis for axis in axes_of_role(EXPERT) if mesh.shape[axis] > 1)
    devices = size_along(mesh.shape, expert_axes)
    num_held = weights["up"].shape[0]
    if num_held not in (E, E / devices):
        problem = f"the router chooses among {E} experts, the weights here are those of {num_held}."
        local_shape = (
            f", or [{E // devices}, ...] of this device" if devices > 1 and E % devices == 0 else ""
        )
        raise value_error(problem, fix=f"give weights [{E}, ...]{local_shape}.")
    inputs = _Inputs(dict(weights), x, router, bias, router_bias)
    if is_analysed():
        y, statistics = _analysed_experts(inputs, routing, activation)
    else:
        run_experts = functools.partial(_route_and_run, _Settings(routing, activation, chunk))
        y, statistics = _on_each_device(run_experts, inputs, expert_axes, travels=num_held < E)
    if shared is not None:
        first_products = {
            name: jnp.einsum("btd,df->btf", x, shared[name])
            for name in ("up", "gate")
            if name in shared
        }
        hidden = _hidden_units(first_products, activation)
        y = y + jnp.einsum("btf,fd->btd", hidden.astype(x.dtype), shared["down"])
    return y, statistics


class _Inputs(NamedTuple):
    """The arrays of a layer of experts."""

    weights: Weights
    x: Float[Array, "B T D"]
    router: Float[Array, "D E"]
    bias: Array | None
    router_bias: Array | None


@dataclass(frozen=True)
class _Settings:
    """The settings of a layer of experts; see `mixture_of_experts`."""

    routing: Routing
    activation: Activation
    chunk: int | None


class _Axes(NamedTuple):
    """Mesh axes within a region that is manual over all.

    Attributes:
      expert: the axes that rows travel over.
      tensor: the axes that shard hidden units.
    """

    expert: Axes = ()
    tensor: Axes = ()


def _route_and_run(
    settings: _Settings, axes: _Axes, inputs: _Inputs
) -> tuple[Float[Array, "B T D"], RouterStatistics]:
    """Run in a region that is manual over every axis: arrays are shards of one device, and rows
    travel over `axes.expert`, if any.
    """
    weights, x, router, *biases = inputs
    B, T, D = x.shape
    routes = route(settings.routing, x, router, *biases)
    chunk = settings.chunk
    # A token with NaN scores goes to no expert. Its output would be 0 and hide the NaN.
    nan_or_zero = jnp.where(routes.is_nan, jnp.nan, 0)[..., None].astype(x.dtype)
    E = router.shape[1]
    N = B * T
    K = routes.experts.shape[2]
    run_experts = functools.partial(_dispatch_and_combine, settings, axes, E, weights)
    flat_tokens = x.reshape(N, D), routes.experts.reshape(N, K), routes.weights.reshape(N, K)
    if chunk is None or chunk >= N:
        return run_experts(*flat_tokens).reshape(B, T, D) + nan_or_zero, routes.statistics
    padding = -N % chunk
    fill = 0, E, 0  # the expert number E means that padded tokens have no place
    chunks = [
        jnp.pad(array, ((0, padding), (0, 0)), constant_values=value).reshape(
            -1, chunk, array.shape[1]
        )
        for array, value in zip(flat_tokens, fill, strict=True)
    ]
    recomputed_experts = jax.checkpoint(run_experts, prevent_cse=False)
    _, y = jax.lax.scan(
        lambda _, chunk_inputs: (None, recomputed_experts(*chunk_inputs)), None, chunks
    )
    return y.reshape(-1, D)[:N].reshape(B, T, D) + nan_or_zero, routes.statistics


def _dispatch_and_combine(
    settings: _Settings,
    axes: _Axes,
    num_experts: int,
    weights: Weights,
    x: Float[Array, "n D"],
    experts: Array,
    scales: Array,
) -> Float[Array, "n D"]:
    """Send n tokens to their experts, and return the weighted sum of the outputs."""
    n, K = experts.shape
    order, inverse, sizes = sorted_by_expert(experts, num_experts)
    rows = spread(x, order, inverse)
    scales = spread(scales.reshape(n * K, 1), order, inverse)
    run_experts = functools.partial(_run_experts, settings.activation, weights)
    if not axes.expert:
        rows = checkpoint_name(rows, ARRIVED)
        return combine(run_experts(rows, scales, sizes), order, inverse, n)
    exchange = plan_exchange(axes.expert, sizes)
    devices = jax.lax.axis_size(axes.expert)
    num_local = weights["up"].shape[0]
    # A token sends at most one row to each of a device's experts, and has K choices. So no row is
    # ever dropped, whatever the router does.
    max_rows = min(K, num_local) * n

    def send_to_experts(a: Array) -> Array:
        return send(
            axes.expert, max_rows, devices * max_rows, a, exchange.to_experts, exchange.to_tokens
        )

    rows, scales = checkpoint_name((send_to_experts(rows), send_to_experts(scales)), ARRIVED)
    out = run_experts(rows, scales, exchange.sizes)
    return combine(
        send(axes.expert, max_rows, n * K, out, exchange.to_tokens, exchange.to_experts),
        order,
        inverse,
        n,
    )


def _run_experts(
    activation: Activation, weights: Weights, rows: Array, scales: Array, sizes: Array
) -> Array:
    """Return the output of each row's expert, times the row's scale [M, 1]."""

    def bias_rows(name, rows):
        return grouped_product(rows, weights[f"{name}_bias"][:, None], sizes)

    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    first_products = {}
    for name in ("gate", "up"):
        if name in weights:
            first_products[name] = grouped_product(rows, weights[name], sizes)
        if f"{name}_bias" in weights:
            first_products[name] += bias_rows(name, ones)
    first_products = checkpoint_name(first_products, NAME)

    @jax.checkpoint
    def down(first_products: Weights, scales: Array, weights: Array) -> Array:
        # The last product is linear, so scales can multiply its input. Then their gradient does not
        # need its output.
        hidden = _hidden_units(first_products, activation) * scales
        return grouped_product(hidden.astype(weights.dtype), weights, sizes)

    out = down(first_products, scales, weights["down"])
    return out + bias_rows("down", scales.astype(rows.dtype)) if "down_bias" in weights else out


def _hidden_units(first_products: Weights, activation: Activation) -> Array:
    def widened(name: str) -> Array:
        return first_products[name].astype(wide_dtype(first_products[name].dtype))

    if "gate" not in first_products:
        return activation(widened("up"))
    return activation(widened("gate")) * widened("up")


def _analysed_experts(
    inputs: _Inputs, routing: Routing, activation: Activation
) -> tuple[Array, RouterStatistics]:
    """Return every expert's output for every token times its weight, so that the check of losses
    sees independent rows.

    The check and `so.planning.trace` recognise the experts by their mark.
    """

    def run(
        weights: Weights, x: Array, router: Array, *biases: Array | None
    ) -> tuple[Array, RouterStatistics]:
        routes = route(routing, x, router, *biases)
        weights_of_all = dense_weights(routes.experts, routes.weights, router.shape[1])
        rows = checkpoint_name(x, ARRIVED)  # `BlockModel.remat` finds its names in this trace

        def first_product(name: str) -> Array:
            products = jnp.einsum("btd,edf->btef", rows, weights[name])
            if f"{name}_bias" in weights:
                products = products + weights[f"{name}_bias"][None, None]
            return checkpoint_name(products, NAME)

        first_products = {name: first_product(name) for name in ("up", "gate") if name in weights}
        hidden = _hidden_units(first_products, activation)
        hidden = (hidden * weights_of_all[..., None]).astype(x.dtype)
        y = jnp.einsum("btef,efd->btd", hidden, weights["down"])
        if "down_bias" in weights:
            y = y + jnp.einsum("bte,ed->btd", weights_of_all.astype(x.dtype), weights["down_bias"])
        return y, routes.statistics

    return marked(EXPERTS, run, top_k=routing.top_k)(*inputs)


def _on_each_device(
    run: Callable[[_Axes, _Inputs], tuple[Array, RouterStatistics]],
    inputs: _Inputs,
    axes: Axes,
    *,
    travels: bool,
) -> tuple[Array, RouterStatistics]:
    """Call `run` on local rows and hidden units, in a region that is manual over every axis that is
    still automatic.
    """
    sizes = mesh_under_trace().shape
    auto_axes = {axis for axis in not_manual_axes() if sizes[axis] > 1}
    if not auto_axes:
        return run(_Axes(axes if travels else ()), inputs)
    row_axes = dividing_axes(inputs.x.shape[0], auto_axes, "replica", "data", EXPERT)
    context_axes = dividing_axes(inputs.x.shape[1], auto_axes, CONTEXT)
    E, _, F = inputs.weights["up"].shape
    tensor_axes = dividing_axes(F, auto_axes, TENSOR)
    # replicated experts are split over their axis if its size divides them: slicing a replicated
    # array costs nothing
    expert_axes = dividing_axes(E, auto_axes, EXPERT)
    specs = _weight_specs(inputs.weights, expert_axes, tensor_axes)
    if "down_bias" in inputs.weights:  # each tensor shard adds its part
        num_shards = size_along(sizes, tensor_axes)
        down_bias = inputs.weights["down_bias"] / num_shards
        inputs = inputs._replace(weights={**inputs.weights, "down_bias": down_bias})
    token_spec = PartitionSpec(row_axes, context_axes, None)
    axes_of_region = _Axes(axes if travels else expert_axes, tensor_axes)

    def region(*arrays: Any) -> tuple[Array, RouterStatistics]:
        y, statistics = run(axes_of_region, _Inputs(*arrays))
        # Load and probability are means over positions, of which each device has some.
        if context_axes:
            statistics = jax.tree.map(lambda array: jax.lax.pmean(array, context_axes), statistics)
        return y[None], statistics

    y, statistics = jax.shard_map(
        region,
        in_specs=(specs, token_spec, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(tensor_axes, *token_spec), PartitionSpec(row_axes)),
        axis_names=auto_axes,
        check_vma=False,
    )(*inputs)
    # each tensor shard returns the part of its hidden units
    return jnp.sum(y, axis=0, dtype=wide_dtype(y.dtype)).astype(inputs.x.dtype), statistics


def _check_arrays(
    weights: Weights,
    x: Array,
    router: Array,
    shared: Weights | None,
    biases: tuple[Array | None, ...],
) -> None:
    if x.ndim != 3 or not x.size or router.ndim != 2 or router.shape[0] != x.shape[2]:
        problem = f"x has shape {x.shape}, the router {router.shape}."
        raise value_error(problem, fix="give x [B, T, D] and router [D, E].")
    E = router.shape[1]
    for label, leaves, dims in (
        ("weights", weights, ("E", "D", "F")),
        ("shared weights", shared, ("D", "F")),
    ):
        if leaves is not None:
            _check_weights(label, leaves, dims, x)
    for name, bias in zip(("bias", "router_bias"), biases, strict=True):
        if bias is not None and bias.shape != (E,):
            raise value_error(f"{name} has shape {bias.shape}.", fix=f"give [{E}].")
    for name in ("gate", "up", "down"):
        bias = weights.get(f"{name}_bias")
        if bias is not None and bias.shape != (*weights[name].shape[:1], weights[name].shape[2]):
            problem = f"{name}_bias has shape {bias.shape}, for {name} {weights[name].shape}."
            raise value_error(problem, fix="give a bias for each expert and output.")


def _check_weights(label: str, weights: Weights, dims: tuple[str, ...], x: Array) -> None:
    other_dtypes = [
        f"{name}: {leaf.dtype}" for name, leaf in weights.items() if leaf.dtype != x.dtype
    ]
    if other_dtypes:
        problem = f"the {label} are not of the dtype of x, {x.dtype}."
        raise type_error(problem, other_dtypes, "cast one to the other.")
    width = x.shape[2]
    shapes = {
        name: tuple(leaf.shape) for name, leaf in weights.items() if not name.endswith("_bias")
    }
    names = {"up", "down"} | ({"gate"} & set(shapes))
    is_valid = (
        set(shapes) == names and len({len(shape) for shape in shapes.values()} | {len(dims)}) == 1
    )
    if is_valid:
        *expert_dims, _, hidden_dim = shapes["up"]
        num_units = (
            shapes["down"][-2]
            if "gate" not in shapes and hidden_dim % shapes["down"][-2] == 0
            else hidden_dim
        )
        up_shape = (*expert_dims, width, hidden_dim)
        down_shape = (*expert_dims, num_units, width)
        is_valid = all(
            shape == (down_shape if name == "down" else up_shape) for name, shape in shapes.items()
        )
    if not is_valid:
        up_shape = ", ".join(dims)
        down_shape = ", ".join((*dims[:-2], dims[-1], dims[-2]))
        fix = (
            f"give 'up' [{up_shape}], 'down' [{down_shape}] and, for gated experts, 'gate'"
            f" [{up_shape}], with D = {width}."
        )
        shapes_text = [f"{name}: shape {shape}" for name, shape in shapes.items()]
        raise value_error(f"the {label} do not fit.", shapes_text, fix)


def _weight_specs(
    weights: Weights, expert_axes: Axes, tensor_axes: Axes
) -> dict[str, PartitionSpec]:
    """Return how the region shards each weight: experts, and hidden units."""
    specs = {
        "down": PartitionSpec(expert_axes, tensor_axes, None),
        "down_bias": PartitionSpec(expert_axes),
        "gate_bias": PartitionSpec(expert_axes, tensor_axes),
        "up_bias": PartitionSpec(expert_axes, tensor_axes),
    }
    default = PartitionSpec(expert_axes, None, tensor_axes)
    return {name: specs.get(name, default) for name in weights}
