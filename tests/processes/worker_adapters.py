"""One of several processes that train adapters on an open model, save them for peft, and load them:
`python worker.py RANK PORT FOLDER`.

It prints JSON: the loss of the first step, and whether A and B came back.
"""

import json
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
from shardopt.adapters import lora  # noqa: E402
from shardopt.models import from_pretrained  # noqa: E402

model = from_pretrained(folder / "model")
adapted = lora(
    model.model,
    rank=2,
    targets=["attention/(q|out)$", "mlp/(up|down)$"],
    matrices=model.matrices,
    rules=model.rules,
    low_rank_products=True,
)
options = {"rules": adapted.rules, "min_shard_elements": 1}
opt = so.fsdp(optax.sgd(0.5), so.make_mesh(data=4, tensor=2), adapted.model, **options)
state = adapted.start(model, opt, jax.random.key(0), progress=False)
batch = {"tokens": np.arange(8 * 9, dtype=np.int32).reshape(8, 9) % 61}
losses = []
for _ in range(2):
    state, metrics = opt.step(state, so.GlobalRows(batch))
    losses.append(float(metrics["loss"]))
adapted.save(folder / "peft", state.params, model=model)
loaded = adapted.load(folder / "peft", state.params, model=model)
same = jax.tree.map(
    lambda before, after: all(
        np.array_equal(old.data, new.data)
        for old, new in zip(before.addressable_shards, after.addressable_shards, strict=True)
    ),
    state.params,
    loaded,
)
with so.Checkpoints(
    folder / "checkpoints", every=1, keep=1, hash_only=adapted.frozen
) as checkpoints:
    checkpoints.save(state, step=2)
    checkpoints.wait()
    restored, _ = checkpoints.restore(opt, params=state.params)
same_state = jax.tree.map(
    lambda before, after: (
        before is after
        or all(
            np.array_equal(old.data, new.data)
            for old, new in zip(before.addressable_shards, after.addressable_shards, strict=True)
        )
    ),
    state.params,
    restored.params,
)
print(json.dumps({"losses": losses, "same": all(jax.tree.leaves((same, same_state)))}))
