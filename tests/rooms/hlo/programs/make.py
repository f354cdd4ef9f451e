"""Write the `.hlo` files next to this script: small programs compiled for accelerators that this
machine has not.

- `python make.py tpu v5e:2x4`: needs `pip install libtpu`
- `python make.py slices v5e:2x4`: likewise
- `python make.py sparse v6e:4x4`: likewise, with jax 0.11 or later; once for each libtpu
- `python make.py memory v6e:2x2`: likewise
- `python make.py gpu`: needs `pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt` of jaxlib's version
"""

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(platform, topology):
    if platform == "tpu":
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    jax.devices()  # registers the plugin
    options = {"topology": topology.split(":")[1], "target_config": H100}
    return topologies.get_topology_desc(topology_name=topology, platform="cuda", **options).devices


def collectives(devices):
    """Every collective once, in nested loops of 5 and 3 turns, in a branch, and at the top."""
    mesh = so.make_mesh(data=len(devices) // 4, tensor=2, pipeline=2, devices=devices)

    def program(x):
        def inner(carry, _):
            return lax.psum(jnp.tanh(carry), "tensor"), None

        def outer(carry, _):
            carry, _ = lax.scan(inner, carry, None, length=3)
            gathered = lax.all_gather(jnp.sin(carry), "data", tiled=True)
            return lax.psum_scatter(jnp.cos(gathered), "data", tiled=True), None

        x, _ = lax.scan(outer, x, None, length=5)
        x = lax.all_to_all(x, "pipeline", 0, 0, tiled=True)
        x = lax.ppermute(jnp.tanh(x), "tensor", [(0, 1), (1, 0)])
        x = lax.cond(x[0, 0] > 0, lambda v: lax.psum(v, "data"), lambda v: v * 2, x)
        return lax.pmax(x, ("data", "pipeline", "tensor"))

    mapped = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(
        jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    )


def fsdp(devices):
    """Two micro-batches through four blocks of two weights, 1024 x 4096 and back."""
    mesh = so.make_mesh(data=len(devices) // 2, tensor=2, devices=devices)
    model = so.BlockModel(
        lambda outer, batch: batch,
        lambda block, x: x + jnp.tanh(x @ block["up"]) @ block["down"],
        lambda outer, x, batch: jnp.mean(x**2),
    )
    rules = [("up", P(None, "tensor")), ("down", P("tensor"))]
    opt = so.fsdp(optax.adam(1e-3), mesh, model, rules=rules, micro_batches=2)
    blocks = {"up": (4, 1024, 4096), "down": (4, 4096, 1024)}
    params = {
        "blocks": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in blocks.items()}
    }
    batch = jax.ShapeDtypeStruct(
        (8 * len(devices), 1024), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    return opt.step.lower(opt.abstract_state(params), batch)


def two_slices(topology):
    """One weight split over data, copied over two slices."""
    from shardopt.planning import topology_devices

    mesh = so.make_mesh(replica=2, data=8, devices=topology_devices(topology, num_slices=2))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    opt = so.fsdp(optax.sgd(0.1), mesh, loss_fn, min_shard_elements=1)
    state = opt.abstract_state({"w": jax.ShapeDtypeStruct((512, 128), jnp.float32)})
    return opt.step.lower(state, jax.ShapeDtypeStruct((64, 512), jnp.float32))


def sparse_core(topology):
    """A weight of 4096 x 1024, gathered and its gradient scattered in each of 3 turns, on the
    SparseCore; and a sum.
    """
    from shardopt.planning import topology_devices

    mesh = so.make_mesh(data=16, devices=topology_devices(topology))

    def program(w, x):
        def turn(carry, _):
            gathered = lax.all_gather(jnp.sin(carry), "data", tiled=True)
            return lax.psum_scatter(x.T @ jnp.tanh(x @ gathered), "data", tiled=True), None

        w, _ = lax.scan(turn, w, None, length=3)
        return w, lax.psum(jnp.sum(w), "data")

    sharded = P("data")
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(sharded, sharded), out_specs=(sharded, P()), check_vma=False
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, sharded))
        for shape in ((4096, 1024), (4096, 4096))
    ]
    return jax.jit(mapped, compiler_options=dict(so.runtime.compiler_options(mesh))).lower(*shapes)


def memory_bound(topology):
    """Copies of n numbers of 16 and of 32 bits, and one computation by XLA and by a kernel."""
    from jax.experimental import pallas as pl

    from shardopt.planning import topology_devices

    mesh = so.make_mesh(data=4, devices=topology_devices(topology))

    def scale(x):
        return (x.astype(jnp.float32) * 2 + 1).astype(x.dtype)

    def kernel(x, out):
        out[...] = scale(x[...])

    def program(half, whole, first, second):
        block = pl.BlockSpec((256, half.shape[1]), lambda row: (row, 0))
        by_kernel = pl.pallas_call(
            kernel,
            grid=(half.shape[0] // 256,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(half.shape, half.dtype),
            name="scaled_by_kernel",
        )
        return jnp.copy(half), jnp.copy(whole), scale(first), by_kernel(second)

    mapped = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct((4096, 8192), dtype, sharding=NamedSharding(mesh, P()))
        for dtype in (jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16)
    ]
    return jax.jit(mapped).lower(*shapes)


_READ = (
    r'"known_trip_count":\{.*?\}|"is_sync":\w+|"async_collective_fusion_config":\{.*?\}'
    r'|"estimated_cycles":"\d+"|"emitter":".*?"|"offload":"\w+"'
)


def trimmed(text):
    """Leave out words that no audit reads: source positions, names of other instructions' origin,
    tuning results.
    """
    text = re.sub(r"\n\nFileNames.*?\n\n\n", "\n\n", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        head, _, config = line.partition(", backend_config=")
        config_fields = re.findall(_READ, config)
        if config_fields and "is_sync" in config_fields[0]:
            config_fields = [f'"collective_backend_config":{{{config_fields[0]}}}']
        name = re.search(r'op_name="(.*?)"', head)
        head = re.sub(r", metadata=\{.*?\}", "", head)
        if name and ("replica_groups" in head or "source_target_pairs" in head):
            head += f', metadata={{op_name="{name[1]}"}}'
        lines.append(
            head + (f", backend_config={{{','.join(config_fields)}}}" if config_fields else "")
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__" and sys.argv[1] == "slices":
    text = two_slices(sys.argv[2]).compile().as_text()
    Path(__file__).with_name(f"{sys.argv[2].split(':')[0]}_two_slices.hlo").write_text(
        trimmed(text)
    )
elif __name__ == "__main__" and sys.argv[1] == "memory":
    text = memory_bound(sys.argv[2]).compile().as_text()
    name = f"{sys.argv[2].split(':')[0]}_memory_bound.hlo"
    Path(__file__).with_name(name).write_text(trimmed(text))
elif __name__ == "__main__" and sys.argv[1] == "sparse":
    text = sparse_core(sys.argv[2]).compile().as_text()
    name = f"{sys.argv[2].split(':')[0]}_sparse_core_{version('libtpu')}.hlo"
    Path(__file__).with_name(name).write_text(trimmed(text))
elif __name__ == "__main__":
    platform = sys.argv[1]
    topology = sys.argv[2] if len(sys.argv) > 2 else "h100:1x1x8"
    options = {"xla_gpu_autotune_level": "0"} if platform == "gpu" else {}
    for make in (collectives, fsdp):
        text = make(devices(platform, topology)).compile(compiler_options=options).as_text()
        name = f"{topology.split(':')[0]}_{make.__name__}.hlo"
        Path(__file__).with_name(name).write_text(trimmed(text))
