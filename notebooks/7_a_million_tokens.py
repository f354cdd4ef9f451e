# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. A million tokens
#
# A long text does not fit into the memory of one device. A transformer keeps activations for the
# backward pass, and they grow with every token.
#
# **The idea: split the tokens of a row over devices, on the mesh axis `context`.** Most layers of a
# transformer look at one token at a time, so nothing changes for them. Attention is the exception:
# a token looks at all tokens before it. So devices send keys and values to each other.

# %%
# %matplotlib inline
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so
from shardopt import data
from shardopt.models import gpt

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})

# %% [markdown]
# ## One more axis
#
# A GPT needs no change. A batch needs separate leaves for inputs and targets, because the next
# token may be on the next device: `data.next_token` makes them. We train the same model on one
# device, and on eight devices, where four devices share every row.

# %%
config = gpt.config(dim=64, num_layers=2, num_heads=4)
windows, _ = data.split(data.open_corpus(), 256)
batches = [data.next_token(batch) for batch in data.spread_batches(windows, 8, 12)]
tx = optax.adam(3e-3)
model = gpt.model(config)


def losses_of(opt):
    """Return the loss of each step."""
    state, losses = opt.init(lambda rng: gpt.init(config, rng), jax.random.key(0)), []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


losses_on_one = losses_of(so.ddp(tx, so.make_mesh(data=1, devices=jax.devices()[:1]), model))
losses_on_eight = losses_of(so.fsdp(tx, so.make_mesh(data=2, context=4), model))
print("one device:   ", losses_on_one[[0, 5, 11]].round(4))
print("eight devices:", losses_on_eight[[0, 5, 11]].round(4))
assert np.allclose(losses_on_one, losses_on_eight, rtol=1e-4)

# %% [markdown]
# ## Which device holds which tokens
#
# A token looks only at the tokens before it. If the row is cut in order, the first device has
# little work, the last device has much, and all wait for it. `so.nn.zigzag` distributes the tokens
# so that every device has an early and a late piece.
#
# In each picture a line is a token. A dot is a token that it looks at. The colour is the device
# that does the work.

# %%
mesh, length = so.make_mesh(data=2, context=4), 32
colours = np.array(["#33608c", "#218c6b", "#a34d7c", "#b3882f"])
row = {"tokens": np.arange(length)[None]}
orders = {
    "in order": row["tokens"][0],
    "zigzag": so.nn.zigzag(row, mesh)["tokens"][0],
    "striped": so.nn.zigzag(row, mesh, order="striped")["tokens"][0],
}
figure, panels = plt.subplots(1, 3, figsize=(9, 3.4), sharey=True)
for axes, (name, order) in zip(panels, orders.items(), strict=True):
    device_of = np.empty(length, int)
    device_of[order] = np.arange(length) * 4 // length
    token, seen = np.nonzero(np.tril(np.ones((length, length))))
    axes.scatter(seen, token, s=5, c=colours[device_of[token]])
    work = np.bincount(device_of[token], minlength=4)
    axes.set_title(f"{name}\nwork {', '.join(map(str, work))}", fontsize=9)
    axes.set(xlabel="token that is seen", aspect="equal")
panels[0].invert_yaxis()
panels[0].set_ylabel("token that looks")
plt.tight_layout()

# %% [markdown]
# ## Three methods of attention
#
# `so.nn.attention` has three methods.
#
# - **Ring**: keys and values go from neighbour to neighbour. Each device sees one piece at a time, and keeps none.
# - **All-to-all**: devices exchange tokens for heads. Each device gets some heads of all tokens.
# - **All-gather**: each device fetches all keys and values at once.
#
# We read the bytes that they send from compiled programs: the forward pass of one layer with 16
# heads, a row of 1024 tokens, and 16 or 4 heads of keys.


# %%
def bytes_sent(method, context, kv_heads):
    """Return the bytes that a device sends over context."""
    mesh = so.make_mesh(data=1, context=context, devices=jax.devices()[:context])
    spec = jax.P(None, "context")
    attend = jax.shard_map(
        lambda q, k, v: so.nn.attention(q, k, v, method=method),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    shape = lambda heads: jax.ShapeDtypeStruct((1, 1024, heads, 8), jnp.float32)
    collectives = so.hlo.audit(
        jax.jit(attend), shape(16), shape(kv_heads), shape(kv_heads), mesh=mesh
    ).collectives
    return sum(collective.wire_bytes * collective.calls for collective in collectives)


sizes, marks = [2, 4, 8], {"ring": "o-", "all_to_all": "s--", "all_gather": "x:"}
figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
for axes, kv_heads in zip(panels, (16, 4), strict=True):
    for method, mark in marks.items():
        possible_sizes = [size for size in sizes if method != "all_to_all" or kv_heads % size == 0]
        axes.plot(
            possible_sizes,
            [bytes_sent(method, size, kv_heads) / 2**20 for size in possible_sizes],
            mark,
            label=method,
        )
    axes.set(
        title=f"16 heads, {kv_heads} of keys and values",
        xlabel="devices along context",
        xticks=sizes,
    )
    axes.set_ylim(0)
panels[0].set_ylabel("MiB sent a device, forward")
panels[0].legend(frameon=False)
plt.tight_layout()

# %% [markdown]
# The ring sends all keys past every device, so the bytes do not change with more devices. All-to-all sends the heads of
# each token once, so each device sends less with more devices. With few heads of keys the ring sends less. All-to-all then
# works on at most as many devices as there are heads of keys.
#
# ## Memory
#
# Attention works tile by tile, so the scores of all pairs of tokens are never in memory at once.
# The memory of a device grows only with its own tokens. These numbers are from compiled programs
# for attention and its gradient.


# %%
def temporaries(length, context):
    """Return the temporary bytes that a device needs for attention and its gradient."""
    shape = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)

    def run(q, k, v):
        return jax.grad(lambda q: jnp.sum(so.nn.attention(q, k, v, method="ring") ** 2))(q)

    if context > 1:
        mesh, spec = (
            so.make_mesh(data=1, context=context, devices=jax.devices()[:context]),
            jax.P(None, "context"),
        )
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
        )
    return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


lengths = [1024, 2048, 4096, 8192]
for context, mark in ((1, "o-"), (8, "s-")):
    label = "one device, all scores" if context == 1 else "eight, in a ring"
    plt.loglog(
        lengths,
        [temporaries(length, context) / 2**20 for length in lengths],
        mark,
        base=2,
        label=label,
    )
plt.gca().set(
    xlabel="tokens of a row", ylabel="MiB a device", title="temporary memory of attention"
)
plt.xticks(lengths, lengths)
plt.yticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024])
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A million
#
# What about a real model? The XLA:TPU compiler can tell, without a TPU.
# `benchmarks/long_context.py` compiled Llama 3 8B with long rows. Compilation takes minutes for
# each row, so we show its saved results. The memory is for one chip.

# %%
results = json.loads(Path("../benchmarks/results/long_context.json").read_text())["results"]
for result in sorted(results, key=lambda result: (result["length"], result["context"])):
    print(
        f"{result['topology']:10} {result['length']:>9,} tokens, context={result['context']:<3} "
        f"{result['peak_bytes'] / 1e9:5.1f} of {result['hbm_bytes'] / 1e9:.0f} GB"
    )
assert all(result["peak_bytes"] < result["hbm_bytes"] for result in results)

# %% [markdown]
# Which sizes of data, tensor and context are best for a model, a row length and a number of chips? `so.plan` ranks them.

# %%
shape = so.planning.MODELS["llama3-8b"]
plans = so.plan(dataclasses.replace(shape, length=131_072), hardware="v5p", chips=64, batch_size=8)
print(plans.best.layout)
print(
    f"{plans.best.memory.total / 1e9:.0f} GB a chip, {plans.best.time.total:.1f} s a step if all ran at its peak"
)

# %% [markdown]
# **Next**: [8. Check your devices](8_check_your_devices.ipynb) runs `shardopt verify` on them. `docs/data_parallel.md` says which method to use when. `docs/models.md` says how
# to pack documents into long rows.
