"""Bundles of tokamax's attention kernels on tpu7x, with the words of the measured runs of Llama 70B.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true
        --xla_jf_dump_llo_pass_label_regex=final_bundles" PYTHON benchmarks/tokamax_schedules.py compile
    python benchmarks/tokamax_schedules.py read FOLDER

PYTHON is that of an environment with MaxText 0.2.5. `read` prints the bundles at which each branch of
a kernel's final schedule begins. step_times/tokamax_schedules.csv has them by hand. A visit takes what
is outside of branches. Its two largest branches are a tile in which all is visible ("tile"), and one
of the diagonal. What that takes more, and the end of a row of blocks, is "row".
"""

import os
import re
import sys
from pathlib import Path

BLOCK = 2048
HEADS = 8
LENGTH = 8192
WIDTH = 128


def compile_kernels() -> None:
    """Compile both kernels for a row on each device of tpu7x:2x2x1."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore
        splash_attention_mask as masks,
    )

    sides = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    config = splash.SplashConfig(
        **{f"block_{side}": BLOCK for side in sides},
        q_layout=splash.QKVLayout.SEQ_MINOR,
        k_layout=splash.QKVLayout.SEQ_MINOR,
        v_layout=splash.QKVLayout.HEAD_DIM_MINOR,
        use_fused_bwd_kernel=True,
        fuse_reciprocal=True,
        use_base2_exp=True,
    )
    mask = masks.CausalMask(shape=(LENGTH, LENGTH))
    kernel = splash.make_splash_mha(mask=mask, config=config, q_seq_shards=1)
    topology = topologies.get_topology_desc(topology_name="tpu7x:2x2x1", platform="tpu")
    mesh = Mesh(topology.devices, "x")
    split = PartitionSpec("x")

    def run(query, key, value, d_out, rows):
        ids = splash.SegmentIds(rows, rows)
        return jax.vjp(lambda *operands: jax.vmap(kernel)(*operands, ids), query, key, value)[1](
            d_out
        )

    def array(*shape, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, split)
        return jax.ShapeDtypeStruct((len(topology.devices), *shape), dtype, sharding=sharding)

    query, key = (array(heads, LENGTH, WIDTH) for heads in (HEADS, 1))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    lowered = jax.jit(mapped).lower(query, key, key, query, array(LENGTH, dtype=jnp.int32))
    lowered.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": "61440"})


def branches(text: str) -> list[int]:
    """Return the bundle of each branch in the text of final bundles."""
    at = 0
    starts = []
    for line in text.splitlines():
        match = re.match(r" *(0x[0-9a-f]+|0) *([A-Z]{2})?([ :>]*)\{", line)
        at = int(match[1], 16) if match else at
        if "sbr.rel" in line:
            starts.append(at)
    return starts


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_kernels()
    else:
        for path in Path(sys.argv[2]).glob("*splash_mha*-01-final_bundles.txt"):
            print(path.name, branches(path.read_text()))
