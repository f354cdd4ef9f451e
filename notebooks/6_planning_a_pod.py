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
# You have a model, and could rent 64 chips. Does the model fit? Which layout is best? How long does
# a step take?
#
# **The idea: you can compute memory and traffic from the layout, so you can compare all layouts on
# a laptop.** This notebook needs no accelerator.

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
# A layout combines sizes of the mesh axes with a placement, a schedule, micro-batches and
# recomputation (`remat`). `so.plan` drops the layouts that do not fit, and ranks the others by
# predicted step time.

# %%
plans = so.plan("llama3-8b", hardware="v5p", chips=64, batch_size=128)
print(plans)

# %% [markdown]
# ## Memory and traffic
#
# We show the fastest layout of each kind: with and without a pipeline, with and without tensor
# sharding, and for each placement. The dashed line is the usable memory of a chip. Every block must
# wait for the bytes over `tensor`. The bytes of `fsdp` over `data` can be sent while other blocks
# compute.


# %%
def kind_of(plan):
    """Return the kind of a plan's layout."""
    return plan.layout.placement, plan.layout.pipeline > 1, plan.layout.tensor > 1


fastest = {}
for plan in plans.ranked:
    fastest.setdefault(kind_of(plan), plan)
shown = list(fastest.values())[:10]
names = [str(plan.layout) for plan in shown]
figure, (memory_axes, traffic_axes) = plt.subplots(
    1, 2, figsize=(12.8, 1.5 + 0.3 * len(shown)), sharey=True, layout="constrained"
)
for axes, parts, unit in (
    (memory_axes, [plan.memory._asdict() for plan in shown], "estimated GB per device"),
    (traffic_axes, [plan.wire_bytes for plan in shown], "estimated GB sent per device and step"),
):
    starts = np.zeros(len(shown))
    for part in dict.fromkeys(name for row in parts for name in row):
        gigabytes = np.array([row.get(part, 0.0) for row in parts]) / 1e9
        axes.barh(names, gigabytes, left=starts, label=part)
        starts += gigabytes
    axes.set_xlabel(unit)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8)
memory_axes.axvline(plans.limit / 1e9, color="black", linestyle="--")
memory_axes.invert_yaxis()
plt.show()

# %% [markdown]
# ## Layouts that do not fit
#
# These layouts nearly fit. The text says how much memory is missing:

# %%
for dropped in plans.dropped[:4]:
    print(f"{dropped.layout}: {dropped.why}")

# %% [markdown]
# If no layout fits, the error says which changes would help.

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
# The batch stays the same, 128 rows of 8192 tokens. With more chips, each chip computes less and
# sends as much. To save time we only try `fsdp`, with one schedule.

# %%
counts = [32, 64, 128, 256, 512]
one_kind = {"placements": ("fsdp",), "schedules": ("eager_one_f_one_b",)}
best = [
    so.plan("llama3-8b", hardware="v5p", chips=count, batch_size=128, **one_kind).best
    for count in counts
]
assert plans.workload.tokens == 8192

figure, (time_axes, mfu_axes) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
ideal = [best[0].time.total * counts[0] / count for count in counts]
time_axes.loglog(counts, ideal, color="0.75", linewidth=6, label="twice the chips, half the time")
time_axes.loglog(
    counts, [plan.time.total for plan in best], "o-", color="#33608c", label="best layout"
)
time_axes.set(title="estimated seconds a step", xlabel="chips")
time_axes.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
time_axes.legend(frameon=False)
mfu_axes.semilogx(counts, [100 * plan.mfu for plan in best], "o-", color="#33608c")
mfu_axes.set(
    title="estimated % of the peak that goes into the model (MFU)", xlabel="chips", ylim=(0, 100)
)
for axes in (time_axes, mfu_axes):
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
plt.show()

for count, plan in zip(counts, best, strict=True):
    print(f"{count:4} chips: {plan.time.total:6.2f} s, MFU {plan.mfu:.0%}, {plan.layout}")
assert all(
    more_chips.time.total < fewer_chips.time.total
    for fewer_chips, more_chips in itertools.pairwise(best)
)

# %% [markdown]
# ## How far can you trust it?
#
# Memory and bytes come from formulas for the strategies. Times come from a roofline of published
# peak rates; no factor was fitted to a run. So real runs are slower. We compare with three runs
# that were published with their MFU:

# %%
published = [
    # model, chip, number of chips, rows per chip, length, MFU, source; the first source states no
    # rows, we assume 4
    ("llama2-70b", "v5p", 512, 4, 4096, 0.654, "MaxText, docs/reference/models/tiering.md"),
    ("llama3-70b", "v6e", 256, 5, 8192, 0.5033, "MaxText, the same, recipe with 5 rows"),
    ("llama3-405b", "v6e", 256, 1, 8192, 0.3855, "MaxText, the same"),
]
predictions = []
for name, chip, chips, rows, length, _, _ in published:
    shape = so.planning.MODELS[name]
    assert shape.length in (length, 4096)
    layout = so.planning.ParallelLayout(data=chips, remat=True, gather_dtype=jnp.bfloat16)
    hardware = so.planning.HARDWARE[chip]
    predictions.append(
        so.planning.predict(shape.workload(), layout, hardware=hardware, batch_size=rows * chips)
    )

figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
positions = np.arange(len(predictions))
axes.bar(
    positions - 0.2,
    [100 * prediction.mfu for prediction in predictions],
    0.38,
    color="#8fb0cf",
    label="estimated, an upper bound",
)
axes.bar(
    positions + 0.2, [100 * row[5] for row in published], 0.38, color="#33608c", label="published"
)
axes.set_xticks(positions, [f"{row[0]}\n{row[2]} x {row[1]}" for row in published])
axes.set(ylabel="MFU, %", ylim=(0, 100))
axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
plt.show()

for row, prediction in zip(published, predictions, strict=True):
    print(
        f"{row[0]:12} predicted {prediction.mfu:.1%}, published {row[5]:.1%}: {prediction.mfu / row[5]:.2f} times"
    )
    assert 1 < prediction.mfu / row[5] < 2

# %% [markdown]
# So use predicted times only to rank layouts.
#
# ## Your own model
#
# `so.planning.trace` reads the costs from the trace of any `so.BlockModel`. Then you plan as
# before. `.mesh` and `.strategy` of a plan are the arguments that build its mesh and its strategy.

# %%
config = gpt.config(dim=64, num_layers=4, num_heads=4)
shapes = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
batch = {"tokens": np.zeros((64, 33), np.int32)}
workload = so.planning.trace(
    gpt.model(config), shapes, batch, rules=gpt.rules, tokens=32, name="my gpt"
)
my_plans = so.plan(workload, hardware="h100", chips=8, batch_size=64)
print(my_plans.table(3))

# %% [markdown]
# We have eight simulated devices here. We build the best plan, compile its step, and compare the bytes of the compiled
# step with the prediction.

# %%
tx = optax.adamw(1e-3)
opt = so.hybrid(tx, so.make_mesh(**my_plans.best.mesh), gpt.model(config), **my_plans.best.strategy)
audit = so.hlo.audit(opt.step, opt.abstract_state(shapes), batch)
compiled_bytes = sum(traffic.wire_bytes for traffic in audit.by_axis().values())
predicted_bytes = sum(my_plans.best.wire_bytes.values())
print(
    f"{my_plans.best.layout}: predicted {predicted_bytes:,.0f} bytes a step, compiled program {compiled_bytes:,}"
)
assert abs(compiled_bytes / predicted_bytes - 1) < 0.05

# %% [markdown]
# ## Ask the real compiler
#
# `so.planning.aot` compiles the step for a TPU with the real XLA:TPU compiler, on a machine without
# a TPU. It needs `libtpu`: `pip install 'shardopt[tpu]'`. If `libtpu` is missing, this cell shows
# how to call `so.planning.aot`.

# %%
call = """so.planning.aot(
    lambda mesh: so.fsdp(tx, mesh, gpt.model(config)),
    shapes,
    jax.eval_shape(lambda: batch),
    topology="v5e:2x4",
)"""
if importlib.util.find_spec("libtpu"):
    print(eval(call))
else:
    print(
        "libtpu is not installed. With it, this prints memory, flops and collectives of a chip:\n"
    )
    print(call)

# %% [markdown]
# Three pages in `docs/` say more. `docs/choose.md` helps you to choose a strategy. `docs/planning.md` says how close the
# predictions are. `docs/clusters.md` shows how to start a run on several machines.
#
# **Next**: [7. A million tokens](7_a_million_tokens.ipynb), with rows that no single device could
# hold.
