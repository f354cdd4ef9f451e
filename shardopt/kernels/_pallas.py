"""Shared parts of Pallas kernels: calls, blocks, strips and products."""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from shardopt.kernels._devices import vmem
from shardopt.mesh import device_kind_or_default

LANES = 128
"""The kernels need tiles of a multiple of so many positions, and pad heads to a multiple of it."""


ROWS = 32
"""Rows of a register of int8; a whole number of registers in wider dtypes."""


class _Late:
    """A module that is imported when an attribute is read, since the import takes long."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pl: Any = _Late("jax.experimental.pallas")
pltpu: Any = _Late("jax.experimental.pallas.tpu")


def product(a: Array, b: Array, dim_a: int, dim_b: int, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the product of two matrices over a dim of each, summed in a dtype."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


def by_strips(size: int, strip: int, run: Any) -> None:
    """Run a function on each strip of a block: a loop has less code, which compiles faster."""
    lax.fori_loop(
        0, size // strip, lambda i, _: run(pl.ds(pl.multiple_of(i * strip, strip), strip)), None
    )


def largest_block(size: int, largest: int, bytes_per_index: int) -> int:
    """Return the largest block of a dim between `ROWS` and `largest`, which are powers of 2,
    that fits into VMEM.
    """
    block = math.gcd(size, largest)
    while block > ROWS and block * bytes_per_index > vmem():
        block //= 2
    return block


def call_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: list[Array],
    in_specs: list[Any],
    out_specs: list[Any],
    out_shape: list[Any],
    *,
    name: str,
    flops: int = 0,
    transcendentals: int = 0,
    scratch_shapes: Any = (),
) -> Any:
    """Run a kernel, whose grid steps run in any order and on any core."""
    semantics: Any = ("parallel",) * len(grid)
    bytes_accessed = sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*inputs, *out_shape)
    )
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch_shapes,
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=vmem()
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=transcendentals, bytes_accessed=bytes_accessed
        ),
        name=name,
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    # jax 0.10 keeps a kernel whose results nothing reads, and drops a jitted function
    return jax.jit(call)(*inputs)
