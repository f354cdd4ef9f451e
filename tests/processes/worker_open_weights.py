"""One of several processes that load open weights, take a step, and save: `python worker.py RANK
PORT FOLDER`.

It prints JSON: bytes that the kernel read for this process during the load, bytes of its shards,
and the rise of its memory."""

import json
import resource
import sys
from pathlib import Path

import jax

rank = int(sys.argv[1])
port = sys.argv[2]
folder = Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 4, rank)

import numpy as np  # noqa: E402
import optax  # noqa: E402

import shardopt as so  # noqa: E402
from shardopt.models import from_pretrained  # noqa: E402


def bytes_read():
    """The bytes that this process asked the kernel for, from /proc."""
    lines = Path("/proc/self/io").read_text().split("\n")
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def peak():
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


model = from_pretrained(folder / "model")
opt = so.fsdp(optax.sgd(0.0), so.make_mesh(data=8), model.model, min_shard_elements=1)
shardings = jax.tree.map(
    lambda leaf: leaf.sharding, opt.abstract_state(model.abstract_params).params
)
read_before = bytes_read()
peak_before = peak()
params = jax.block_until_ready(model.load_params(shardings, progress=False))
report = {"read": bytes_read() - read_before, "rise": peak() - peak_before}
report["shards"] = sum(
    shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
)
report["largest"] = max(tensor.view().nbytes for tensor in model.tensors.values())
batch = {"tokens": np.arange(8 * 9, dtype=np.int32).reshape(8, 9) % 61}
state, metrics = opt.step(opt.init(params), so.GlobalRows(batch))
model.save(folder / "out", state.params, max_file_bytes=20_000_000, progress=False)
print(json.dumps(report | {"loss": float(metrics["loss"])}))
