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
# Training keeps three things: parameters, gradients, optimizer state. Each may be replicated on every device, or sharded.
#
# **The idea: where things live decides what has to move.** You can look at both before you train.

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
config = gpt.GPTConfig(dim=64, num_layers=2, num_heads=4)


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
# That is all the difference between them.

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
# ## Where each leaf lives
#
# A row is a leaf. A grey row is replicated on every device. A row of boxes is sharded, each box a shard. First `ddp`, then
# `fsdp`:

# %%
so.planning.plot_placement(strategies["ddp"], shapes)

# %%
so.planning.plot_placement(strategies["fsdp"], shapes)

# %% [markdown]
# The same as a table, with the optimizer state, and with the reason where a leaf stays replicated although the
# strategy shards:

# %%
print(strategies["fsdp"].config.report(shapes))

# %% [markdown]
# The report is computed from shapes. To check it we create the state twice, and count the bytes on the first device.


# %%
def on_first_device(tree):
    """Return the bytes of a tree of arrays that lie on device 0."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


reports = {name: opt.config.report(shapes) for name, opt in strategies.items()}
held = {name: (report.params_bytes, report.opt_state_bytes) for name, report in reports.items()}
for name, (params_bytes, opt_state_bytes) in held.items():
    print(f"{name:7} parameters {params_bytes:8,}   optimizer state {opt_state_bytes:9,}")

for name in ("ddp", "fsdp"):
    state = strategies[name].init(init_fn, jax.random.key(0))
    assert held[name] == (on_first_device(state.params), on_first_device(state.opt_state))

# %% [markdown]
# ## What moves
#
# `so.audit` compiles the training step and reads every collective off the compiled program. It does not run anything,
# so shapes are enough again. For `ddp` that is one all-reduce of the gradients, with a few bytes more in the same
# bucket, such as the loss.

# %%
audits = {name: so.audit(opt.step, opt.abstract_state(shapes), batch) for name, opt in strategies.items()}
print(audits["ddp"])

# %% [markdown]
# For `fsdp` weights are all-gathered where they are used, forward and backward, and gradients are reduce-scattered. The blocks
# are gathered in a loop, one at a time.

# %%
print(audits["fsdp"])

# %% [markdown]
# ## Both at once
#
# Memory on the left, bytes sent per device and step on the right.

# %%
kinds = {"all-reduce": "#33608c", "all-gather": "#218c6b", "reduce-scatter": "#b3882f", "all-to-all": "#a34d7c"}
sent = {
    name: {kind: found.by_kind()[kind].wire_bytes if kind in found.by_kind() else 0 for kind in kinds}
    for name, found in audits.items()
}

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
numbers = np.array(list(held.values())) / 1e6
left.bar(list(held), numbers[:, 0], color="#6e94b8", label="parameters")
left.bar(list(held), numbers[:, 1], bottom=numbers[:, 0], color="#d9a441", label="optimizer state")
left.set(title="held per device between steps", ylabel="MB")
left.legend(frameon=False)
bottom = np.zeros(len(sent))
for kind, color in kinds.items():
    values = np.array([row[kind] for row in sent.values()]) / 1e6
    right.bar(list(sent), values, bottom=bottom, color=color, label=kind)
    bottom += values
right.set(title="sent per device and step", ylabel="MB")
right.set_ylim(top=1.35 * bottom.max())
right.legend(frameon=False, loc="upper left", ncols=4, fontsize=8, columnspacing=1)
plt.show()

# %% [markdown]
# An all-reduce is a reduce-scatter and an all-gather. So sharding the optimizer state costs nothing on the wire.
# Sharding the parameters too means gathering the blocks twice, in the forward and again in the backward pass: 1.5 times
# as much for them. With $N$ devices and $\Psi$ bytes of parameters, ring collectives send $2\frac{N-1}{N}\Psi$ for the first
# three, and $3\frac{N-1}{N}\Psi$ for the blocks of `fsdp`.
#
# One leaf of `fsdp` is never gathered: the embedding. A device needs few of its rows, so the tokens go to all devices, and the rows
# come by an all-to-all, as their gradients go. The compiled programs agree, to one percent:

# %%
in_blocks = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes["blocks"]))
table, tokens = 4 * shapes["embedding"].size, 16 * 32
looked_up = 4 * tokens + 2 * 4 * tokens // 8 * config.dim  # all tokens; this device's rows, there and back
gathered = 2 * (psi - table) + in_blocks
formulas = dict.fromkeys(strategies, 2 * 7 / 8 * psi) | {"fsdp": 7 / 8 * (gathered + looked_up)}
for name, said in formulas.items():
    read = sum(sent[name].values())
    print(f"{name:7} formula {said:9,.0f}   compiled program {read:9,}   ratio {read / said:.3f}")
    assert abs(read / said - 1) < 0.01

# %% [markdown]
# ## A second axis
#
# A mesh can have more axes than one. With `tensor=2` each block is sharded over two devices: a rule says for each leaf
# over which dim. The four pairs of devices then shard the rest as before. Two strips in a row are two sharded dims.

# %%
print(*gpt.rules, sep="\n")
both = so.fsdp(tx, so.make_mesh(data=4, tensor=2), model, rules=gpt.rules)
so.planning.plot_placement(both, shapes)

# %% [markdown]
# Now activations move too: they are summed over `tensor`, inside every block:

# %%
found = so.audit(both.step, both.abstract_state(shapes), batch)
for axes, traffic in found.by_axis().items():
    print(f"over {' and '.join(axes):16} {traffic.wire_bytes:8,} bytes in {traffic.calls} calls")
assert {("data",), ("tensor",)} <= set(found.by_axis())

# %% [markdown]
# Less memory costs more traffic. Start with `so.ddp`. When memory runs out go down the table.
#
# **Next**: [3. Pipelines](3_pipelines.ipynb) cuts the model into stages, and sends activations instead of weights.
