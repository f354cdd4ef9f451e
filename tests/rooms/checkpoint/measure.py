"""One of two processes that restore a large array, half each: `python measure.py RANK PORT FOLDER`.

It prints by how many bytes the peak of its memory was above its memory before. See test_store.py.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import shardopt as so
from shardopt.checkpoint._read import restore

SHAPE = (4096, 16384)


def resident(field):
    """Return VmRSS or VmHWM, the peak since it was last reset, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def main(folder):
    opt = so.fsdp(
        optax.sgd(0.1), so.make_mesh(), lambda params, batch: jnp.mean(batch @ params["w"])
    )
    restore(folder / "small", opt)  # imports, thread pools and programs are not measured
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    state = restore(
        folder / "large", opt, abstract_params={"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    )
    jax.block_until_ready(state)
    print(
        resident("VmHWM") - before,
        sum(shard.data.nbytes for shard in state.params["w"].addressable_shards),
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    so.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    main(Path(sys.argv[3]))
