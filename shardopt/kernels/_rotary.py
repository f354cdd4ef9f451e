"""Rotary positions by a kernel for TPU, in one pass over heads as attention reads them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.kernels._devices import kernels_run_on, vmem
from shardopt.kernels._pallas import LANES, ROWS, by_strips, call_kernel, largest_block, pl, pltpu
from shardopt.mesh import device_kind_or_default


@jax.custom_vjp
def rotate_halves(
    x: Float[Array, "B T H K"], cos: Float[Array, "#B T 1 K/2"], sin: Float[Array, "#B T 1 K/2"]
) -> Float[Array, "B T H K"]:
    """Return x with component pairs i and i + K/2 rotated, by the kernel.

    Cosines and sines get no gradient.
    """
    heads = x.swapaxes(1, 2)
    B, H, T, K = heads.shape
    block = largest_block(T, 256, _bytes_per_row(x))

    def table(first, second):
        return jnp.concatenate([first, second], axis=-1)[:, :, 0]

    tables = [table(cos, cos), table(-sin, sin)]
    per_row = len(tables[0]) > 1
    head_spec = pl.BlockSpec((None, H, block, K), lambda b, i: (b, 0, i, 0))
    table_spec = pl.BlockSpec((None, block, K), lambda b, i: (b if per_row else 0, i, 0))
    (rotated,) = call_kernel(
        _rotate_halves,
        (B, T // block),
        [heads, *tables],
        [head_spec, table_spec, table_spec],
        [head_spec],
        [jax.ShapeDtypeStruct(heads.shape, x.dtype)],
        name="rotate_halves",
    )
    return rotated.swapaxes(1, 2)


def _rotate_halves(x: Any, cos: Any, sin: Any, out: Any) -> None:
    def rotate(head: Any) -> None:
        wide = x[head].astype(jnp.float32)
        swapped = pltpu.roll(wide, wide.shape[-1] // 2, 2)
        out[head] = (wide * cos[...][None] + swapped * sin[...][None]).astype(out.dtype)

    by_strips(x.shape[0], 1, rotate)


# the gradient is the opposite rotation
rotate_halves.defvjp(
    lambda x, cos, sin: (rotate_halves(x, cos, sin), (cos, sin)),
    lambda tables, grad: (rotate_halves(grad, tables[0], -tables[1]), None, None),
)


def takes_rotation(x: Float[Array, "B T H K"]) -> bool:
    """Return whether the kernel rotates x: on a TPU with whole rows, in multiples of 128.

    Tensor may shard heads.
    """
    if not kernels_run_on(device_kind_or_default(), x.shape[2]):
        return False
    is_whole = not (x.shape[1] % LANES or x.shape[3] % LANES)
    return is_whole and x.dtype.itemsize <= 4 and _bytes_per_row(x) * ROWS <= vmem()


def _bytes_per_row(x: Array) -> int:
    """Return the bytes of VMEM for a position: two buffers of its heads and their rotation, and of
    the tables.
    """
    _, _, H, K = x.shape
    return 4 * K * (H * x.dtype.itemsize + 8)
