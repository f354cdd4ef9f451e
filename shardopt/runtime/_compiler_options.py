"""Compiler options of the train step, by platform and generation of the chips."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

CompilerOptions = Mapping[str, str | bool | int | float]

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORE = tuple(
    _OFFLOAD + kind
    for kind in (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "2d_all_gather",
        "3d_all_gather",
        "nd_reduce_scatter",
    )
)
_FAILING_CHIP_COUNT = 4096
"""From this many chips on, libtpu 0.0.52 divides by zero when it compiles scatters over several
axes ("nd_reduce_scatter").
"""
_WITH_SPARSE_CORE = ("TPU v5", "TPU v6 lite", "TPU7x")
"""Kinds of chips whose SparseCore moves collectives; v5p calls itself "TPU v5"."""
_VMEM_KIB = {"TPU v5": 48 * 1024, "TPU v5 lite": 48 * 1024, "TPU v6 lite": 96 * 1024}
"""The memory of a core (VMEM, 64 MiB on v5p, 128 on v5e and v6e) that one operation may use;
libtpu's default is 16 or 32 MiB.
"""
_NO_COLLECTIVE_MATMUL = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
"""The option turns collective matmul off. XLA uses it from a size in MiB on, and no array is as
large as this one.
"""


def compiler_options(mesh: Mesh) -> CompilerOptions:
    """Return the compiler options that strategies compile their steps with, for the devices of a
    mesh.

    Args:
      mesh: the mesh whose devices are compiled for; they need not exist.

    Returns:
      Option name -> value, as `compiler_options` of `jax.jit` takes them. A strategy's
      `compiler_options=` replaces them; `{**so.runtime.compiler_options(mesh), "name": value}` adds to
      them.

    Example:
      >>> import shardopt as so
      >>> so.runtime.compiler_options(so.make_mesh())
      {}

    - **TPU v5p, v6e and 7x**: gathers, scatters and reductions run on the SparseCore, in parallel
      to the TensorCore. Scatters over several axes of the torus stay scatters instead of becoming
      all-reduces. The compiler estimates for Llama 3 8B with fsdp on v5p:4x4x4, 2048 tokens per
      chip: 624 ms a step without these options, 472 with them. Without them 92.8 GB are sent, with
      them 61.2. From 4096 chips on, scatters over several axes are left out, because libtpu 0.0.52
      crashes on a division by zero (SIGFPE).
    - **TPU v6e**: an operation may take 96 MiB of a core's VMEM. The same model, 8192 tokens per
      chip on v6e:8x8, all blocks computed again: 955 ms a step, and 1023 with 48 MiB. The compiler
      takes 1.6 times as long.
    - **TPU v5e and v5p**: an operation may take 48 MiB of a core's VMEM. Products then work on
      larger tiles, at 98% of the peak instead of 84 to 95. The same model, 4096 tokens per chip on
      v5p:4x4x4: 712 ms a step without it, 649 with it. On v5e:16x16 with 2048 tokens: 1181 and
      1036. The compiler takes about twice as long.
    - **TPU with a tensor axis**: gathers and scatters over tensor stay whole. XLA would send them
      in pieces between pieces of a product (collective matmul), with more passes over the
      activations than it hides. The same model with tensor=4 and `sequence_parallel`, 4096 tokens
      per chip on v5p:4x4x4, all products kept: 638 ms a step in pieces, 604 whole.
    - GPU: none. XLA's latency-hiding scheduler is on by default. Llama 3 8B with fsdp was compiled
      for 64 H100s with two options: loops unrolled twice
      (`xla_gpu_enable_while_loop_double_buffering`), and collectives joined up to 1 GiB. Neither
      changes the memory of 5.28 GB, nor which gathers overlap with products. The option
      `xla_gpu_enable_pipelined_all_gather` no longer exists.
    - Other platforms: none. No option of XLA:CPU was measured.

    jax before 0.11 gets no options: its jaxlib cannot read such a program back ("async-update
    instruction should have 1 operand").

    References:
      XLA flags of MaxText's `xla_flags_library` (SparseCore offload, no collective matmul).
      MaxText's scripts and Levanter's launcher set the limit of VMEM (48 to 120 MiB). The figures
      were computed by `so.planning.aot` with libtpu 0.0.52.
    """
    kind = getattr(mesh.devices.flat[0], "device_kind", "")
    if jax.__version_info__ < (0, 11):
        return {}
    too_many_chips = mesh.devices.size >= _FAILING_CHIP_COUNT
    offloaded = _SPARSE_CORE if kind in _WITH_SPARSE_CORE else ()
    options = {
        name: True
        for name in offloaded
        if not (too_many_chips and name.endswith("nd_reduce_scatter"))
    }
    options |= {"xla_tpu_scoped_vmem_limit_kib": _VMEM_KIB[kind]} if kind in _VMEM_KIB else {}
    has_tensor = kind.startswith("TPU") and mesh.shape.get("tensor", 1) > 1
    return options | (_NO_COLLECTIVE_MATMUL if has_tensor else {})
