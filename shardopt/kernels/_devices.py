"""The devices, the shards and the memory that a kernel for TPU runs on."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from shardopt.collectives._per_device import TENSOR
from shardopt.mesh import device_kind_or_default, is_analysed, mesh_under_trace, not_manual_axes


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
