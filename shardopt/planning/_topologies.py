"""Topologies to compile for without a device: slices of TPUs by libtpu, nodes of GPUs by jax's CUDA
plugin.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardopt.core import Devices, calling, check_count, plural, type_error, value_error
from shardopt.core._extras import is_installed, require
from shardopt.planning._hardware import HARDWARE, Hardware


def parse_topology(topology: str) -> tuple[Hardware, tuple[int, ...]]:
    """Return the chip and the torus of a text such as "v5p:4x4x8", or the number of GPUs per node
    of "h100:8".

    Raises:
      TypeError: if `topology` is not a string.
      ValueError: if it cannot be read, the chip is unknown, or the chip's torus has another number
        of axes.
      ValueError: if a node has fewer GPUs.
    """
    forms = ", ".join(map(_form, HARDWARE.values()))
    if not isinstance(topology, str):
        raise type_error(f"topology must be a string, got {topology!r}.", fix=f"write {forms}.")
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", topology)
    if match is None or match[1] not in HARDWARE:
        problem = f"unknown topology {topology!r}."
        raise value_error(problem, fix=f"write chip and torus, with sizes of your own: {forms}.")
    chip = HARDWARE[match[1]]
    dims = tuple(map(int, match[2].split("x")))
    axes = chip.torus_dims or 1
    if len(dims) != axes:
        problem = f"topology {topology!r} has {plural(len(dims), 'axis')}, {chip.name} has {axes}."
        reason = (
            f"its chips form a torus of {axes} axes"
            if chip.torus_dims
            else "the GPUs of a node share a switch"
        )
        raise value_error(problem, fix=f"write it as {_form(chip)}; {reason}.")
    if not chip.torus_dims and not 1 <= dims[0] <= chip.pod_chips:
        problem = (
            f"topology {topology!r} has {dims[0]} GPUs, a node of {chip.name} has 1 to"
            f" {chip.pod_chips}."
        )
        raise value_error(problem, fix=f"write {_form(chip)}, and how many nodes as num_slices.")
    return chip, dims


def _form(chip: Hardware) -> str:
    return f"{chip.name}:{'x'.join(['4'] * chip.torus_dims) or chip.pod_chips}"


@calling("topology_devices")
def topology_devices(topology: str, *, num_slices: int = 1) -> Devices:
    """Return the abstract devices of a topology, to compile for.

    Raises:
      ModuleNotFoundError: if libtpu, or jax's plugin for CUDA, is not installed.
      ValueError: if the compiler does not know the topology.
    """
    return devices_of(topology, num_slices)


def devices_of(topology: str, num_slices: int) -> Devices:
    """Return what `topology_devices` returns; its errors name the function that the user called."""
    chip, dims = parse_topology(topology)
    check_count("num_slices", num_slices)
    if not chip.torus_dims:
        return _gpus(chip, dims[0], num_slices)
    require("libtpu", extra="tpu")
    from jax.experimental import topologies

    options: dict[str, object] = {"wrap": wraps(dims)}
    # the two cores of a chip are one device, as on a real slice; libtpu's default shows two
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"
    if num_slices > 1:
        options["num_slices"] = num_slices
    with _without_a_tpu():
        try:
            return topologies.get_topology_desc(
                topology_name=topology, platform="tpu", **options
            ).devices
        except Exception as error:  # the plugin raises errors of several types for unknown names
            problem = (
                f"the compiler does not take topology {topology!r} x {num_slices}:"
                f" {str(error).splitlines()[0]}"
            )
            fix = "choose sizes that Google offers, such as v5p:4x4x4, v5e:4x8 or v6e:16x16."
            raise value_error(problem, fix=fix) from error


def wraps(dims: Sequence[int]) -> tuple[bool, bool, bool]:
    """Return which axes of a slice have wrap-around links. The result always has three entries.

    A slice with three axes has wrap-around links if every size is a multiple of 4. A slice with two
    axes has them along an axis of size 16, the size of a pod. By default the compiler assumes that
    there are none, and replaces gathers by all-reduces.

    References:
      Google Cloud, "TPU v4" and "TPU v5p" (twisted and wrapped slices); MaxText,
      `accelerator_to_spec_map`.
    """
    if len(dims) == 3:
        torus = all(size % 4 == 0 for size in dims)
        return torus, torus, torus
    return dims[0] == 16, dims[1] == 16, False


class _Gpu(NamedTuple):
    """The properties of a GPU that XLA:GPU reads.

    They are compute capability, multiprocessors (`cores`), fp32 units per multiprocessor, clock,
    shared memory per multiprocessor in KiB, and bytes of L2 cache.
    """

    kind: str
    capability: int
    cores: int
    fp32: int
    ghz: float
    shared: int
    l2_bytes: int


_GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 164, 40 * 2**20),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 228, 50 * 2**20),
    "h200": _Gpu("NVIDIA H200", 9, 132, 128, 1.98, 228, 50 * 2**20),
    "b200": _Gpu("NVIDIA B200", 10, 148, 128, 1.965, 228, 126 * 2**20),
}
"""GPUs by their names in `HARDWARE`. A thread block may use 1 KiB less than the shared memory.

References:
  NVIDIA, "A100 Tensor Core GPU Architecture", table 4; "H100 Tensor Core GPU Architecture", table
  3; "CUDA C++ Programming Guide", technical specifications per compute capability.
"""

_PLUGINS = {"jax_cuda13_plugin": 13, "jax_cuda12_plugin": 12}


def _gpus(chip: Hardware, size: int, nodes: int) -> Devices:
    plugin = next((name for name in _PLUGINS if is_installed(name)), "jax_cuda12_plugin")
    require(plugin, extra="gpu")
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        topology_name=chip.name,
        platform="cuda",
        topology=f"1x{nodes}x{size}",  # slices, nodes, GPUs of a node
        target_config=_target(chip, _GPUS[chip.name], _PLUGINS[plugin]),
    ).devices


def _target(chip: Hardware, gpu: _Gpu, cuda: int) -> str:
    """Return XLA's `GpuTargetConfigProto` as text."""
    accelerated = " feature_extension: ACCELERATED_FEATURES" if gpu.capability >= 9 else ""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {gpu.capability}{accelerated} }}
          core_count: {gpu.cores} fpus_per_core: {gpu.fp32} clock_rate_ghz: {gpu.ghz}
          device_memory_size: {chip.memory_bytes} memory_bandwidth: {chip.memory_bandwidth:.0f} l2_cache_size: {gpu.l2_bytes}
          shared_memory_per_core: {gpu.shared * 1024} shared_memory_per_block_optin: {(gpu.shared - 1) * 1024}
          shared_memory_per_block: 49152 threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: {cuda} minor: 0 }}
        device_description_str: "{gpu.kind}"
    """


@contextmanager
def _without_a_tpu() -> Iterator[None]:
    """Set variables so that libtpu loads without querying the metadata server and without locking a
    TPU.
    """
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-32",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
