"""Rows that compare kernels, and their gradients, with plain formulas in float32 on one device."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardopt import nn
from shardopt.kernels._grouped_product import _run as grouped_product
from shardopt.verify._rows import Devices, Measurement, NotRun, Row, agree, tolerance

Function = Callable[..., jax.Array]

_POSITIONS = 256
_HEADS = ((2, _POSITIONS, 4, 64), (2, _POSITIONS, 2, 64), (2, _POSITIONS, 2, 64))
_GROUPS = ((512, 128), (4, 128, 128))
_PRODUCT = ((2, 128, 128), (128, 128))
_LONGEST_SUM = 512
_INT8_TOLERANCE = 0.03
_FP8_TOLERANCE = 0.15
"""A number is rounded to 1/127 of the largest in int8, and to 1/8 of itself in fp8 gradients; sums
average that.
"""


class Kernel(NamedTuple):
    """A row of the table.

    Attributes:
      name: name of the kernel.
      run: the kernel; takes arrays of the shapes.
      formula: the plain formula of the same result.
      shapes: the shapes of the arguments.
      platforms: the platforms that can run it, or nothing for all.
      dtype: dtype of the arguments that it gets.
      tolerance: largest difference relative to the largest number; by default the rounding of a sum
        in `dtype`.
    """

    name: str
    run: Function
    formula: Function
    shapes: Sequence[tuple[int, ...]]
    platforms: tuple[str, ...] = ()
    dtype: str = "float32"
    tolerance: float | None = None


def _plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, window: int | None = None
) -> jax.Array:
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :]
    hidden = (distance < 0) | (distance >= (window or len(distance)))
    weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


_SIZES = np.array([200, 0, 150, 162], np.int32)


def _plain_groups(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("md,mdf->mf", rows, weights[np.repeat(np.arange(4), _SIZES)])


def _run_groups(implementation: str) -> Function:
    return lambda rows, weights: grouped_product(implementation, rows, weights, jnp.asarray(_SIZES))


_product = functools.partial(nn.quantized_einsum, "btd,df->btf")
_plain_product = functools.partial(jnp.einsum, "btd,df->btf")

_IDS = np.repeat([3, 0, 60], [900, 7, 3]).astype(np.int32)
"""Most rows of a batch have one id, as in text: their gradients are added one after another, or in
tiles.
"""


def _run_embedding(table: jax.Array) -> jax.Array:
    return nn.embedding(table, jnp.asarray(_IDS))


def _plain_embedding(table: jax.Array) -> jax.Array:
    return jnp.einsum("iv,vd->id", jnp.asarray(_IDS)[:, None] == jnp.arange(len(table)), table)


_splash = functools.partial(nn.attention, implementation="splash")
_cudnn = functools.partial(nn.attention, implementation="cudnn")
_xla = functools.partial(nn.attention, implementation="xla")


def _windowed(attention: Function) -> Function:
    return functools.partial(attention, window=100)


KERNELS = (
    Kernel("splash attention", _splash, _plain_attention, _HEADS),
    Kernel("splash attention, window", _windowed(_splash), _windowed(_plain_attention), _HEADS),
    Kernel("cudnn attention", _cudnn, _plain_attention, _HEADS, ("gpu",), "bfloat16"),
    Kernel(
        "cudnn attention, window",
        _windowed(_cudnn),
        _windowed(_plain_attention),
        _HEADS,
        ("gpu",),
        "bfloat16",
    ),
    Kernel("attention by XLA", _xla, _plain_attention, _HEADS),
    Kernel("grouped product, ragged_dot", _run_groups("ragged_dot"), _plain_groups, _GROUPS),
    Kernel("grouped product, megablox", _run_groups("megablox"), _plain_groups, _GROUPS, ("tpu",)),
    Kernel("grouped product, blocks", _run_groups("blocks"), _plain_groups, _GROUPS, ("cpu",)),
    Kernel(
        "int8 product",
        functools.partial(_product, precision="int8"),
        _plain_product,
        _PRODUCT,
        tolerance=_INT8_TOLERANCE,
    ),
    Kernel(
        "fp8 product",
        functools.partial(_product, precision="fp8"),
        _plain_product,
        _PRODUCT,
        tolerance=_FP8_TOLERANCE,
    ),
    Kernel("embedding", _run_embedding, _plain_embedding, [(64, 32)], dtype="bfloat16"),
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
        needed = " or ".join(kernel.platforms)
        raise NotRun("not on this platform", f"it needs {needed}, and these devices are {platform}")
    draw = np.random.default_rng(11)
    numbers = [draw.normal(size=shape).astype(np.float32) for shape in kernel.shapes]
    with jax.default_device(jax.local_devices()[0]), jax.default_matmul_precision("highest"):
        arguments = [jnp.asarray(array, kernel.dtype) for array in numbers]
        # both get numbers that the narrow dtype holds
        exact = [array.astype(jnp.float32) for array in arguments]
        pairs = zip(
            _with_gradients(kernel.run, arguments),
            _with_gradients(kernel.formula, exact),
            strict=True,
        )
        differences = agree(np.array([_relative(result, expected) for result, expected in pairs]))
    allowed = kernel.tolerance or tolerance("float32", _LONGEST_SUM)
    if kernel.tolerance is None and (kernel.dtype == "bfloat16" or platform == "tpu"):
        # matrix units of TPUs multiply float32 in kernels as bfloat16
        allowed = tolerance("bfloat16", 8)
    names = ["result", *(f"gradient {i}" for i in range(len(numbers)))]
    worst = int(np.argmax(differences))
    passed = bool(differences[worst] <= allowed)
    detail = f"{differences[worst]:.1e} of {allowed:.1e}"
    if not passed:
        detail += f", in {names[worst]}"
    if kernel.name.startswith("splash") and platform != "tpu":
        detail += ", interpreted"
    by_name = dict(zip(names, differences.tolist(), strict=True))
    return Measurement(passed, detail, {"differences": by_name, "tolerance": allowed})


def _with_gradients(function: Function, arrays: list) -> list[np.ndarray]:
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
