"""Shared parts of Pallas kernels: where they run, their calls, products and masks of a tile, and
the memory that they may use.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from shardopt.collectives._per_device import TENSOR
from shardopt.mesh import device_kind_or_default, is_analysed, mesh_under_trace, not_manual_axes
from shardopt.nn._flash import HIDDEN, Rule

LANES = 128
"""The kernels need tiles of a multiple of so many positions, and pad heads to a multiple of it."""
ROWS = 32
"""Rows of a register of int8; a whole number of registers in wider dtypes."""


def product(a: Array, b: Array, dim_a: int, dim_b: int, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the product of two matrices over a dim of each, summed in a dtype."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


def hide(scores: Array, query_lead: Any, dim: int, same_segment: Array | None, rule: Rule) -> Array:
    """Return the scores of a tile, or of several heads' tiles, with `HIDDEN` where a query does not
    see a key.

    Args:
      scores: [..., block, block].
      query_lead: position of the first query minus position of the first key.
      dim: 0 if rows of a tile are queries, 1 if they are keys.
      same_segment: [block, block], or None.
      rule: what a query sees by position.
    """
    shape = scores.shape[-2:]
    gap = (
        query_lead
        + lax.broadcasted_iota(jnp.int32, shape, dim)
        - lax.broadcasted_iota(jnp.int32, shape, 1 - dim)
    )
    masks = [] if same_segment is None else [same_segment]
    if rule.causal:
        masks.append(gap >= 0)
    if rule.window is not None:
        masks.append(gap < rule.window)
    return jnp.where(functools.reduce(jnp.logical_and, masks), scores, HIDDEN) if masks else scores


def padded(width: int) -> int:
    """Return the width that a head has in memory."""
    return -(-width // LANES) * LANES


def divisors(heads: int) -> list[int]:
    """Return how many heads of queries may share a step of a kernel, if so many heads share keys.

    A step with several heads has longer products, and its masks and bookkeeping are shared.
    """
    return [count for count in range(1, 5) if heads % count == 0]


def kernels_run_on(kind: str, sharded: int = 1) -> bool:
    """Return whether kernels for TPU run here, on a kind of device, and the program is not
    analysed.

    Args:
      kind: of device.
      sharded: size of a dim that `on_tensor_shards` shards. 1: arrays have to be local.
    """
    shards = num_shards()
    return kind.startswith("TPU") and not is_analysed() and shards > 0 and sharded % shards == 0


def num_shards() -> int:
    """Return the size of tensor if XLA partitions over it alone, 1 if arrays under trace are local,
    and otherwise 0.
    """
    mesh = mesh_under_trace()
    sizes = {axis: mesh.shape[axis] for axis in not_manual_axes() if mesh.shape[axis] > 1}
    if sizes.keys() == {TENSOR} and mesh.axis_types[mesh.axis_names.index(TENSOR)] == AxisType.Auto:
        return sizes[TENSOR]
    return 0 if sizes else 1


def on_tensor_shards(run: Callable, in_dims: Any, out_dims: Any) -> Callable:
    """Return `run` on shards of its arguments where tensor is automatic, since XLA cannot partition
    a kernel.

    Args:
      run: the function.
      in_dims: for each argument, the dim that tensor shards; -1 if every device has all of it.
      out_dims: the same for each result.
    """
    if is_local():
        return run

    def specs(dims):
        return jax.tree.map(
            lambda dim: PartitionSpec() if dim < 0 else PartitionSpec(*[None] * dim, TENSOR), dims
        )

    axes = not_manual_axes()
    return jax.shard_map(
        run, in_specs=specs(in_dims), out_specs=specs(out_dims), axis_names=axes, check_vma=False
    )


def is_local() -> bool:
    """Return whether one device holds the whole of arrays under trace: each mesh axis is manual, or
    has size 1.
    """
    return num_shards() == 1


def vmem(kind: str | None = None) -> int:
    """Return the bytes of VMEM that a kernel may use: a core has 16 MiB up to TPU v4, 128 on v6e,
    and 64 or more on others.
    """
    mebibytes = {"TPU v2": 16, "TPU v3": 16, "TPU v4": 16, "TPU v6 lite": 96}.get(
        kind or device_kind_or_default(), 48
    )
    return mebibytes * 2**20


def by_strips(size: int, strip: int, run: Any) -> None:
    """Run a function on each strip of a block: a loop has less code, which compiles faster."""
    from jax.experimental import pallas as pl

    lax.fori_loop(
        0, size // strip, lambda i, _: run(pl.ds(pl.multiple_of(i * strip, strip), strip)), None
    )


def largest_block(size: int, largest: int, smallest: int, bytes_per_index: int) -> int:
    """Return the largest block of a dim between `smallest` and `largest`, which are powers of 2,
    that fits into VMEM.
    """
    block = math.gcd(size, largest)
    while block > smallest and block * bytes_per_index > vmem():
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
    scratch_shapes: Any = (),
    sequential: int = 0,
    scalars: Sequence[Array] = (),
) -> Any:
    """Run a kernel.

    The last `sequential` dims of its grid run in order, and the others on any core.

    `scalars` are arrays of integers that it gets before the inputs, and index maps after the
    indices of the grid.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    semantics: Any = ("parallel",) * (len(grid) - sequential) + ("arbitrary",) * sequential
    bytes_accessed = sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*inputs, *out_shape)
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=vmem()
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=bytes_accessed
        ),
        name=name,
        interpret=not device_kind_or_default().startswith("TPU"),
    )
    # jax 0.10 keeps a kernel whose results nothing reads, and drops a jitted function
    return jax.jit(call)(*scalars, *inputs)
