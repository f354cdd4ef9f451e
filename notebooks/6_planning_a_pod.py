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
# # 6. Planning a pod
#
# You have a model, and could rent 64 chips. Does it fit? How should it be laid out? How long does a step take?
#
# **The idea: memory and traffic follow from the layout, so you can compare all layouts on a laptop.** Nothing here
# needs an accelerator.

# %%
# %matplotlib inline
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so
from shardopt.models import gpt

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})

# %% [markdown]
# ## All layouts, ranked
#
# `so.plan` combines sizes of the mesh axes with placements, schedules, micro-batches and recomputing (`remat`). It
# drops what does not fit, and ranks the rest by predicted step time.

# %%
plans = so.plan("llama3-8b", hardware="v5p", chips=64, batch_size=128)
print(plans)

# %% [markdown]
# ## What fills the memory
#
# We take the fastest layout of each kind: with and without pipeline, with and without tensor sharding, each placement.
# The dashed line is the usable memory of a chip.


# %%
def kind(one):
    """Return what we want one layout of each of."""
    return one.layout.placement, one.layout.pipeline > 1, one.layout.tensor > 1


fastest = {}
for one in plans.ranked:
    fastest.setdefault(kind(one), one)
shown = list(fastest.values())[:10]
so.planning.plot_memory(shown, limit=plans.limit)

# %% [markdown]
# ## What is sent
#
# The same layouts. Bytes over `tensor` must be waited for inside every block. Those of `fsdp` over `data` can travel
# while other blocks compute.

# %%
so.planning.plot_traffic(shown)

# %% [markdown]
# ## What does not fit
#
# The nearest misses, and by how much:

# %%
for dropped in plans.dropped[:4]:
    print(f"{dropped.layout}: {dropped.why}")

# %% [markdown]
# If nothing fits at all, the error says what would help.

# %%
try:
    so.plan("llama3-70b", hardware="h100", chips=8, batch_size=8)
except ValueError as error:
    print(error)
else:
    raise AssertionError("it fits after all")

# %% [markdown]
# ## How many chips?
#
# The batch stays the same, 128 rows of 8192 tokens. Each chip computes less and sends as much. To save time
# we look at `fsdp` alone, with one schedule.

# %%
counts = [32, 64, 128, 256, 512]
few = {"placements": ("fsdp",), "schedules": ("eager_one_f_one_b",)}
best = [so.plan("llama3-8b", hardware="v5p", chips=count, batch_size=128, **few).best for count in counts]
assert plans.workload.tokens == 8192

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
ideal = [best[0].time.total * counts[0] / count for count in counts]
left.loglog(counts, ideal, color="0.75", linewidth=6, label="twice the chips, half the time")
left.loglog(counts, [one.time.total for one in best], "o-", color="#33608c", label="best layout")
left.set(title="seconds a step", xlabel="chips")
left.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
left.legend(frameon=False)
right.semilogx(counts, [100 * one.mfu for one in best], "o-", color="#33608c")
right.set(title="% of the peak that goes into the model (MFU)", xlabel="chips", ylim=(0, 100))
for axes in (left, right):
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
plt.show()

for count, one in zip(counts, best, strict=True):
    print(f"{count:4} chips: {one.time.total:6.2f} s, MFU {one.mfu:.0%}, {one.layout}")
assert all(more.time.total < fewer.time.total for fewer, more in itertools.pairwise(best))

# %% [markdown]
# ## How far can you trust it?
#
# Memory and bytes are formulas of what the strategies do. Time is a roofline of published peaks, in which no factor was
# fitted to any run. So real runs are slower. Three that were published with their MFU:

# %%
published = [
    # model, chip, chips, rows a chip, length, MFU, source; rows of the first are not stated there, taken as 4
    ("llama2-70b", "v5p", 512, 4, 4096, 0.654, "MaxText, docs/reference/models/tiering.md"),
    ("llama3-70b", "v6e", 256, 5, 8192, 0.5033, "MaxText, the same, recipe with 5 rows"),
    ("llama3-405b", "v6e", 256, 1, 8192, 0.3855, "MaxText, the same"),
]
told = []
for name, chip, chips, rows, length, _, _ in published:
    shape = so.planning.MODELS[name]
    assert shape.length in (length, 4096)
    layout = so.planning.Layout(data=chips, remat=True, gather_dtype=jnp.bfloat16)
    hardware = so.planning.find_hardware("notebook", chip)
    told.append(so.planning.predict(shape.workload(), layout, hardware=hardware, batch_size=rows * chips))

figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
at = np.arange(len(told))
axes.bar(at - 0.2, [100 * one.mfu for one in told], 0.38, color="#8fb0cf", label="predicted, an upper bound")
axes.bar(at + 0.2, [100 * row[5] for row in published], 0.38, color="#33608c", label="published")
axes.set_xticks(at, [f"{row[0]}\n{row[2]} x {row[1]}" for row in published])
axes.set(ylabel="MFU, %", ylim=(0, 115))
axes.legend(frameon=False, loc="upper right", ncols=2)
plt.show()

for row, one in zip(published, told, strict=True):
    print(f"{row[0]:12} predicted {one.mfu:.1%}, published {row[5]:.1%}: {one.mfu / row[5]:.2f} times")
    assert 1 < one.mfu / row[5] < 2

# %% [markdown]
# So use predicted times for ranking.
#
# ## Your own model
#
# `so.planning.trace` reads the costs off the trace of any `so.BlockModel`. Then plan as before. `.mesh` and `.strategy`
# of a plan are the arguments that build it.

# %%
config = gpt.GPTConfig(dim=64, num_layers=4, num_heads=4)
shapes = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
batch = {"tokens": np.zeros((64, 33), np.int32)}
workload = so.planning.trace(gpt.model(config), shapes, batch, rules=gpt.rules, tokens=32, name="my gpt")
mine = so.plan(workload, hardware="h100", chips=8, batch_size=64)
print(mine.table(3))

# %% [markdown]
# Here are eight simulated devices. We build the best plan, compile its step, and compare what it sends with what was
# predicted.

# %%
tx = optax.adamw(1e-3)
opt = so.hybrid(tx, so.make_mesh(**mine.best.mesh), gpt.model(config), **mine.best.strategy)
found = so.audit(opt.step, opt.abstract_state(shapes), batch)
sent = sum(traffic.wire_bytes for traffic in found.by_axis().values())
predicted = sum(mine.best.wire_bytes.values())
print(f"{mine.best.layout}: predicted {predicted:,.0f} bytes a step, compiled program {sent:,}")
assert abs(sent / predicted - 1) < 0.05

# %% [markdown]
# ## Asking the real compiler
#
# `so.aot` compiles the step for a TPU with the real XLA:TPU compiler, on a machine without a TPU. It needs `libtpu`:
# `pip install 'shardopt[tpu]'`. Where that is missing, this cell shows how to call it.

# %%
call = """so.aot(
    lambda mesh: so.fsdp(tx, mesh, gpt.model(config)),
    shapes,
    jax.eval_shape(lambda: batch),
    topology="v5e:2x4",
)"""
if importlib.util.find_spec("libtpu"):
    print(eval(call))
else:
    print("libtpu is not installed. With it, this prints memory, flops and collectives of a chip:\n")
    print(call)

# %% [markdown]
# The pages in `docs/` say more: `docs/choose.md` which strategy when, `docs/planning.md` how close the predictions are, and
# `docs/clusters.md` how to start a run on several machines.
#
# **Next**: [7. A million tokens](7_a_million_tokens.ipynb), rows that no device could hold.
