"""Rows that compare kernels, and their gradients, with plain formulas in float32 on one device."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt import nn
from shardopt.core._rounding import Precision
from shardopt.kernels._grouped_product import _run as grouped_product
from shardopt.low_precision._expert_product import LOCAL, expert_products
from shardopt.verify._rows import Devices, Measurement, NotRun, Row, agree, tolerance

_POSITIONS, _HEADS, _WIDTH = 256, 4, 64
_LONGEST_SUM = 512
_INT8_TOLERANCE, _FP8_TOLERANCE = 0.03, 0.15
"""A number is rounded to 1/127 of the largest in int8, and to 1/8 of itself in fp8 gradients; sums
average that.
"""


class Kernel(NamedTuple):
    """A row of the table.

    Attributes:
      name: name of the kernel.
      run: the kernel; takes the arrays that `draw` returns.
      formula: the plain formula of the same result.
      draw: makes float32 arguments.
      platforms: the platforms that can run it, or nothing for all.
      dtype: dtype of the arguments that it gets.
      tolerance: largest difference relative to the largest number; by default the rounding of a sum
        in `dtype`.
    """

    name: str
    run: Callable[..., jax.Array]
    formula: Callable[..., jax.Array]
    draw: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    platforms: tuple[str, ...] = ()
    dtype: str = "float32"
    tolerance: float | None = None


def _draw_heads(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    query = draw.normal(size=(2, _POSITIONS, _HEADS, _WIDTH))
    return query, *draw.normal(size=(2, 2, _POSITIONS, _HEADS // 2, _WIDTH))


def _plain_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int | None = None,
    *,
    causal: bool = True,
) -> jax.Array:
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    hidden = (distance < 0 if causal else False) | (distance >= (window or len(distance)))
    weights = jax.nn.softmax(
        jnp.where(jnp.broadcast_to(hidden, scores.shape), -jnp.inf, scores), axis=-1
    )
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def _tiled_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return nn.attention(query, key, value, positions=jnp.arange(_POSITIONS))


def _draw_groups(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    return draw.normal(size=(512, 128)), draw.normal(size=(4, 128, 128))


_SIZES = np.array([200, 0, 150, 162], np.int32)


def _plain_groups(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("md,mdf->mf", rows, weights[np.repeat(np.arange(4), _SIZES)])


def _run_groups(implementation: str) -> Callable[..., jax.Array]:
    return lambda rows, weights: grouped_product(implementation, rows, weights, jnp.asarray(_SIZES))


def _run_experts(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return expert_products(rows, [weights], jnp.asarray(_SIZES), "int8", LOCAL)[0]


def _draw_product(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    return draw.normal(size=(2, 128, 128)), draw.normal(size=(128, 128))


def _run_product(precision: Precision) -> Callable[..., jax.Array]:
    return lambda x, weight: nn.quantized_einsum("btd,df->btf", x, weight, precision=precision)


def _plain_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("btd,df->btf", x, weight)


_IDS = np.repeat([3, 0, 60], [900, 7, 3]).astype(np.int32)
"""Most rows of a batch have one id, as in text: their gradients are added one after another, or in
tiles.
"""


def _run_embedding(table: jax.Array) -> jax.Array:
    return nn.embedding(table, jnp.asarray(_IDS))


def _plain_embedding(table: jax.Array) -> jax.Array:
    return jnp.einsum("iv,vd->id", jnp.asarray(_IDS)[:, None] == jnp.arange(len(table)), table)


_TARGETS = np.arange(2 * 64, dtype=np.int32).reshape(2, 64)


def _run_cross_entropy(x: jax.Array, head: jax.Array) -> jax.Array:
    return nn.cross_entropy(x, head, jnp.asarray(_TARGETS), chunk=32)


def _plain_cross_entropy(x: jax.Array, head: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", x, head))
    return -jnp.take_along_axis(scores, _TARGETS[..., None], axis=-1)[..., 0]


_windowed = functools.partial(_plain_attention, window=100)
_splash = functools.partial(nn.attention, implementation="splash")
_cudnn = functools.partial(nn.attention, implementation="cudnn")

KERNELS = (
    Kernel("splash attention", _splash, _plain_attention, _draw_heads),
    Kernel(
        "splash attention, window", functools.partial(_splash, window=100), _windowed, _draw_heads
    ),
    Kernel("cudnn attention", _cudnn, _plain_attention, _draw_heads, ("gpu",), "bfloat16"),
    Kernel(
        "cudnn attention, window",
        functools.partial(_cudnn, window=100),
        _windowed,
        _draw_heads,
        ("gpu",),
        "bfloat16",
    ),
    Kernel("attention in tiles", _tiled_attention, _plain_attention, _draw_heads),
    Kernel(
        "attention by XLA",
        functools.partial(nn.attention, implementation="xla"),
        _plain_attention,
        _draw_heads,
    ),
    Kernel("grouped product, ragged_dot", _run_groups("ragged_dot"), _plain_groups, _draw_groups),
    Kernel(
        "grouped product, megablox", _run_groups("megablox"), _plain_groups, _draw_groups, ("tpu",)
    ),
    Kernel("grouped product, blocks", _run_groups("blocks"), _plain_groups, _draw_groups, ("cpu",)),
    Kernel(
        "int8 product",
        _run_product("int8"),
        _plain_product,
        _draw_product,
        tolerance=_INT8_TOLERANCE,
    ),
    Kernel(
        "int8 product of experts",
        _run_experts,
        _plain_groups,
        _draw_groups,
        tolerance=_INT8_TOLERANCE,
    ),
    Kernel(
        "fp8 product", _run_product("fp8"), _plain_product, _draw_product, tolerance=_FP8_TOLERANCE
    ),
    Kernel(
        "embedding",
        _run_embedding,
        _plain_embedding,
        lambda draw: (draw.normal(size=(64, 32)),),
        dtype="bfloat16",
    ),
    Kernel(
        "cross-entropy in chunks",
        _run_cross_entropy,
        _plain_cross_entropy,
        lambda draw: (draw.normal(size=(2, 64, 32)), draw.normal(size=(128, 32))),
    ),
)


def kernel_rows() -> list[Row]:
    """Return one row for each kernel."""
    return [
        Row("kernels", kernel.name, functools.partial(measure_kernel, kernel)) for kernel in KERNELS
    ]


def measure_kernel(kernel: Kernel, devices: Devices) -> Measurement:
    """Compare the result of a kernel and the gradients of all arguments with the formula."""
    platform = devices[0].platform
    if kernel.platforms and platform not in kernel.platforms:
        raise NotRun(
            "not on this platform",
            f"it needs {' or '.join(kernel.platforms)}, and these devices are {platform}",
        )
    arrays = [x.astype(np.float32) for x in kernel.draw(np.random.default_rng(11))]
    # both get numbers that the narrow dtype holds
    arrays = [np.asarray(jnp.asarray(x, kernel.dtype), np.float32) for x in arrays]
    with jax.default_device(jax.local_devices()[0]), jax.default_matmul_precision("highest"):
        expected = _with_gradients(kernel.formula, arrays)
        results = _with_gradients(kernel.run, [jnp.asarray(x, kernel.dtype) for x in arrays])
    names = ("result", *(f"gradient {i}" for i in range(len(arrays))))
    differences = agree(np.array([_relative(a, b) for a, b in zip(results, expected, strict=True)]))
    # matrix units of TPUs multiply float32 in kernels as bfloat16
    half = kernel.dtype == "bfloat16" or platform == "tpu"
    rounding = tolerance("bfloat16", 8) if half else tolerance("float32", _LONGEST_SUM)
    allowed = kernel.tolerance or rounding
    worst = int(np.argmax(differences))
    passed = bool(differences[worst] <= allowed)
    interpreted = ", interpreted" if kernel.name.startswith("splash") and platform != "tpu" else ""
    place = "" if passed else f", in {names[worst]}"
    numbers = {
        "differences": dict(zip(names, differences.tolist(), strict=True)),
        "tolerance": allowed,
    }
    return Measurement(
        passed, f"{differences[worst]:.1e} of {allowed:.1e}{place}{interpreted}", numbers
    )


def _with_gradients(function: Callable[..., jax.Array], arrays: list) -> list[np.ndarray]:
    """Return the result, and the gradients of the sum of its products with fixed numbers."""

    def weighted_sum(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = function(*arrays)
        factors = jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
        return jnp.sum(result.astype(jnp.float32) * factors), result

    gradient = jax.value_and_grad(weighted_sum, argnums=tuple(range(len(arrays))), has_aux=True)
    (_, result), gradients = jax.jit(gradient)(*arrays)
    return [np.asarray(x, np.float32) for x in (result, *gradients)]


def _relative(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))
