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
# # 2. Placements
#
# Training stores parameters, gradients and optimizer state. Each of the three may be replicated on
# every device, or sharded.
#
# **The idea: the placement of values decides which bytes a step sends.** You can look at both
# before you train.

# %%
# %matplotlib inline
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so
from shardopt.models import gpt

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})

# %% [markdown]
# ## A model, as shapes
#
# We take a small GPT. For now its shapes are enough: `jax.eval_shape` allocates nothing.

# %%
config = gpt.config(dim=64, num_layers=2, num_heads=4)


def init_fn(rng):
    """Draw the parameters."""
    return gpt.init(config, rng)


shapes = jax.eval_shape(init_fn, jax.random.key(0))
batch = {"tokens": np.zeros((16, 33), np.int32)}
tx = optax.adamw(1e-3)
psi = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
print(f"{psi:,} bytes of parameters")

# %% [markdown]
# ## Four placements
#
# | strategy | parameters | gradients | optimizer state |
# |---|---|---|---|
# | `so.ddp` | replicated | replicated | replicated |
# | `so.zero(stage=1)` | replicated | replicated | **sharded** |
# | `so.zero(stage=2)` | replicated | **sharded** | **sharded** |
# | `so.fsdp` | **sharded** | **sharded** | **sharded** |
#
# The strategies differ in nothing else.

# %%
mesh = so.make_mesh(data=8)
model = gpt.model(config)
strategies = {
    "ddp": so.ddp(tx, mesh, model),
    "zero 1": so.zero(tx, mesh, model, stage=1),
    "zero 2": so.zero(tx, mesh, model, stage=2),
    "fsdp": so.fsdp(tx, mesh, model),
}

# %% [markdown]
# ## The placement of each leaf
#
# Each row is a leaf. A grey row is replicated on every device. A row of boxes is sharded, and each
# box is a shard. First `ddp`, then `fsdp`:


# %%
def draw(opt):
    """Draw the shards of each leaf as boxes."""
    rows = opt.config.report(shapes).rows
    _, axes = plt.subplots(figsize=(9, 0.3 * len(rows) + 0.5), layout="constrained")
    for i, row in enumerate(rows):
        count = row.bytes_total // row.bytes_per_device
        boxes = [(box / count, 1 / count) for box in range(count)]
        color = "#33608c" if count > 1 else "#c3c8d0"
        axes.broken_barh(boxes, (i - 0.4, 0.8), facecolor=color, edgecolor="white")
    axes.set_yticks(range(len(rows)), [f"{row.path} {list(row.shape)}" for row in rows])
    axes.invert_yaxis()
    axes.set(xticks=[], xlim=(0, 1))
    plt.show()


draw(strategies["ddp"])

# %%
draw(strategies["fsdp"])

# %% [markdown]
# The report shows the same as a table. It adds the optimizer state. If a leaf stays replicated although the strategy
# shards, it gives the reason:

# %%
print(strategies["fsdp"].config.report(shapes))

# %% [markdown]
# The report is computed from shapes. To check it, we create the state for two strategies, and count the bytes on the
# first device.


# %%
def bytes_on_first_device(tree):
    """Return the bytes of a tree of arrays on device 0."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


reports = {name: opt.config.report(shapes) for name, opt in strategies.items()}
held_bytes = {
    name: (report.params_bytes, report.opt_state_bytes) for name, report in reports.items()
}
for name, (params_bytes, opt_state_bytes) in held_bytes.items():
    print(f"{name:7} parameters {params_bytes:8,}   optimizer state {opt_state_bytes:9,}")

for name in ("ddp", "fsdp"):
    state = strategies[name].init(init_fn, jax.random.key(0))
    assert held_bytes[name] == (
        bytes_on_first_device(state.params),
        bytes_on_first_device(state.opt_state),
    )

# %% [markdown]
# ## Traffic
#
# `so.hlo.audit` compiles the training step and lists every collective of the compiled program. It
# runs nothing, so shapes are enough again. For `ddp` the list has one all-reduce of the gradients.
# A few other bytes travel with it, such as the loss.

# %%
audits = {
    name: so.hlo.audit(opt.step, opt.abstract_state(shapes), batch)
    for name, opt in strategies.items()
}
print(audits["ddp"])

# %% [markdown]
# For `fsdp` the weights are all-gathered where they are used, in the forward and in the backward pass. The gradients are
# reduce-scattered. The blocks are gathered in a loop, one at a time.

# %%
print(audits["fsdp"])

# %% [markdown]
# ## Memory and traffic together
#
# The left plot shows the memory, the right plot the bytes sent per device and step.

# %%
kinds = {
    "all-reduce": "#33608c",
    "all-gather": "#218c6b",
    "reduce-scatter": "#b3882f",
    "all-to-all": "#a34d7c",
}
sent_bytes = {
    name: {
        kind: audit.by_kind()[kind].wire_bytes if kind in audit.by_kind() else 0 for kind in kinds
    }
    for name, audit in audits.items()
}

figure, (memory_axes, traffic_axes) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
megabytes = np.array(list(held_bytes.values())) / 1e6
memory_axes.bar(list(held_bytes), megabytes[:, 0], color="#6e94b8", label="parameters")
memory_axes.bar(
    list(held_bytes),
    megabytes[:, 1],
    bottom=megabytes[:, 0],
    color="#d9a441",
    label="optimizer state",
)
memory_axes.set(title="held per device between steps", ylabel="MB")
memory_axes.legend(frameon=False)
bottom = np.zeros(len(sent_bytes))
for kind, color in kinds.items():
    values = np.array([row[kind] for row in sent_bytes.values()]) / 1e6
    traffic_axes.bar(list(sent_bytes), values, bottom=bottom, color=color, label=kind)
    bottom += values
traffic_axes.set(title="sent per device and step", ylabel="MB")
traffic_axes.set_ylim(top=1.35 * bottom.max())
traffic_axes.legend(frameon=False, loc="upper left", ncols=4, fontsize=8, columnspacing=1)
plt.show()

# %% [markdown]
# An all-reduce sends as much as a reduce-scatter and an all-gather. So sharding the optimizer state costs nothing on the
# wire. Sharding the parameters as well means gathering the blocks twice, in the forward and in the backward pass. That
# is 1.5 times as much for the blocks. With $N$ devices and $\Psi$ bytes of parameters, ring collectives send
# $2\frac{N-1}{N}\Psi$ for the first three strategies, and $3\frac{N-1}{N}\Psi$ for the blocks of `fsdp`.
#
# `fsdp` never gathers one leaf: the embedding. A device needs few of its rows. So the tokens are
# sent to all devices, and an all-to-all returns the rows. Another one sends the gradients of the
# rows back. The compiled programs agree with these formulas to one percent:

# %%
block_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes["blocks"]))
table_bytes, tokens = 4 * shapes["embedding"].size, 16 * 32
lookup_bytes = (
    4 * tokens + 2 * 4 * tokens // 8 * config.dim
)  # all tokens; rows of this device and their gradients
gathered_bytes = 2 * (psi - table_bytes) + block_bytes
formulas = dict.fromkeys(strategies, 2 * 7 / 8 * psi) | {
    "fsdp": 7 / 8 * (gathered_bytes + lookup_bytes)
}
for name, predicted_bytes in formulas.items():
    compiled_bytes = sum(sent_bytes[name].values())
    print(
        f"{name:7} formula {predicted_bytes:9,.0f}   compiled program {compiled_bytes:9,}   ratio {compiled_bytes / predicted_bytes:.3f}"
    )
    assert abs(compiled_bytes / predicted_bytes - 1) < 0.01

# %% [markdown]
# ## A second axis
#
# A mesh can have several axes. With `tensor=2` each block is sharded over two devices; rules say on
# which dim of each leaf. The four pairs of devices then shard the leaves over `data` as before. Rows
# of eight boxes have two sharded dims, rows of two or four have one.

# %%
print(*gpt.rules, sep="\n")
tensor_opt = so.fsdp(tx, so.make_mesh(data=4, tensor=2), model, rules=gpt.rules)
draw(tensor_opt)

# %% [markdown]
# Now a step also sends activations: they are summed over `tensor` inside every block.

# %%
tensor_audit = so.hlo.audit(tensor_opt.step, tensor_opt.abstract_state(shapes), batch)
for axes, traffic in tensor_audit.by_axis().items():
    print(f"over {' and '.join(axes):16} {traffic.wire_bytes:8,} bytes in {traffic.calls} calls")
assert {("data",), ("tensor",)} <= set(tensor_audit.by_axis())

# %% [markdown]
# Less memory costs more traffic. Start with `so.ddp`. If the model does not fit, go down the table.
#
# **Next**: [3. Pipelines](3_pipelines.ipynb) cuts the model into stages, and sends activations
# instead of weights.
