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
# # 3. Pipelines
#
# A deep model can be cut into stages. Each device holds a few blocks, and sends activations to the next device. A stage
# that waits for its neighbour is idle. So the batch is also split, into micro-batches that follow one another.
#
# **The idea: a schedule is a table of stages and times, and its empty boxes are idle time.** You can draw it before you
# run it.

# %%
# %matplotlib inline
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})


def draw(schedule):
    """Draw a row for each stage; a box is a pass, and its number is the micro-batch."""
    ticks, stage = schedule.ticks, np.asarray(schedule.ticks.stage_of)[:, None]
    lengths = {"forward": 1, "backward": 2 if ticks.weight is None else 1, "weight": 1}
    colors = {"forward": "tab:blue", "backward": "tab:green", "weight": "tab:orange"}
    busy, offsets = np.zeros((ticks.num_ticks, ticks.num_stages)), {}
    for kind, when in ticks.passes.items():  # the passes of a tick follow one another
        offsets[kind] = busy[when, stage]
        np.add.at(busy, (when, stage), lengths[kind])
    begins = np.concatenate([[0], np.cumsum(busy.max(axis=1))])
    _, axes = plt.subplots(figsize=(0.27 * begins[-1] / schedule.num_chunks**0.5, 1.8))
    axes.set(yticks=range(ticks.num_stages), ylabel="stage", xlim=(0, begins[-1]), xlabel="time")
    axes.invert_yaxis()
    for kind, when in ticks.passes.items():
        for v, lefts in enumerate(begins[when] + offsets[kind]):
            row, alpha = ticks.stage_of[v] - 0.45, 1 - 0.5 * ticks.chunk_of[v]
            extents = [(left, lengths[kind]) for left in lefts]
            look = {"color": colors[kind], "alpha": alpha, "edgecolor": "white"}
            axes.broken_barh(extents, (row, 0.9), label=kind if v == 0 else None, **look)
            for m, left in enumerate(lefts):
                axes.text(left + lengths[kind] / 2, row + 0.45, m, ha="center", va="center", size=6)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    plt.show()


# %% [markdown]
# ## The simplest schedule
#
# There are four stages and eight micro-batches. First come all forward passes, then all backward passes. A row is a
# stage, time goes to the right, and the number in a box is the micro-batch. A backward pass takes twice as long as a
# forward pass, because it computes two gradients.

# %%
draw(so.schedules.gpipe(4, 8))

# %% [markdown]
# The pale corners are the bubble: stages with nothing to do. For $S$ stages and $M$ micro-batches the share of the
# bubble is $\frac{S-1}{M+S-1}$.

# %%
gpipe = so.schedules.gpipe(4, 8)
print(f"bubble {gpipe.bubble_fraction:.1%}, formula {3 / (8 + 3):.1%}")
print("activations that each stage keeps at its worst tick:", gpipe.peak_activations)
assert gpipe.bubble_fraction == 3 / 11

# %% [markdown]
# Every micro-batch waits, with all its activations, until the last forward pass is done. That takes a lot of memory.
#
# ## Backward passes as soon as possible
#
# Forward and backward passes alternate (1F1B). The bubble is the same, but fewer activations wait. Here both run in
# every tick. `one_f_one_b` is the schedule of textbooks, with one pass per tick. It keeps half as many activations, and
# in one program it is idle for longer.

# %%
draw(so.schedules.eager_one_f_one_b(4, 8))

# %% [markdown]
# ## More and smaller stages
#
# `interleaved` gives each device two chunks of the model, pale and dark. A chunk takes half as long, so the corners
# are half as wide. But stages send more messages.

# %%
draw(so.schedules.interleaved(4, 8, num_chunks=2))

# %% [markdown]
# ## Fill the bubble with work
#
# A backward pass computes two gradients. The neighbour waits for the gradient of the input. No stage waits for the
# gradient of the weights. So this half can be delayed until the stage would be idle.

# %%
draw(so.schedules.zero_bubble_lockstep(4, 8))

# %% [markdown]
# ## More micro-batches
#
# With more micro-batches all bubbles become smaller. The activations in memory do not grow, except with `gpipe`.

# %%
builders = {
    "gpipe": so.schedules.gpipe,
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "interleaved, 2 chunks": functools.partial(so.schedules.interleaved, num_chunks=2),
    "zero_bubble_lockstep": so.schedules.zero_bubble_lockstep,
}
chunks = {name: 2 if "2 chunks" in name else 1 for name in builders}
counts = [4, 8, 16, 32]
tables = {name: [build(4, count) for count in counts] for name, build in builders.items()}

figure, (idle_axes, activation_axes) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for (name, row), style in zip(tables.items(), ["o-", "s--", "^-", "D:"], strict=True):
    idle_axes.plot(
        counts, [100 * table.program_bubble_fraction for table in row], style, label=name
    )
    activation_axes.plot(
        counts, [max(table.peak_activations) / chunks[name] for table in row], style, label=name
    )
idle_axes.set(
    title="idle share of the program, 4 stages", xlabel="micro-batches", ylabel="%", ylim=(0, None)
)
activation_axes.set(
    title="activations that a stage keeps",
    xlabel="micro-batches",
    ylabel="micro-batches of a stage",
)
activation_axes.set_ylim(bottom=0)
for axes in (idle_axes, activation_axes):
    axes.set_xticks(counts)
idle_axes.legend(frameon=False)
plt.show()

for name, row in tables.items():
    bubbles = ", ".join(f"{table.program_bubble_fraction:5.1%}" for table in row)
    print(
        f"{name:22} idle {bubbles}   keeps {[max(table.peak_activations) for table in row]} activations of a chunk"
    )
    assert sorted(row, key=lambda table: -table.program_bubble_fraction) == row
    assert name == "gpipe" or row[-1].peak_activations == row[1].peak_activations

# %% [markdown]
# ## Run the schedules
#
# A pipeline must know the blocks of the model. A `so.BlockModel` has three functions: `embed` runs before the blocks,
# `block` is one block, and `loss` runs after the blocks. The parameters of all blocks are stacked.

# %%
width, depth = 32, 8


def init_fn(rng):
    """Draw the parameters: the stacked blocks, and the outer parameters."""
    up, down, first = jax.random.split(rng, 3)
    return {
        "blocks": {
            "up": jax.random.normal(up, (depth, width, 2 * width)) / width**0.5,
            "down": jax.random.normal(down, (depth, 2 * width, width)) / width**0.5 / depth,
        },
        "in": jax.random.normal(first, (2, width)),
        "out": jnp.zeros((width, 1)),
    }


model = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["out"] - batch["y"]) ** 2),
)

rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (256, 2)).astype(np.float32)
batch = {"x": x, "y": np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:])}
tx = optax.adam(2e-3)
num_steps = 60

# %% [markdown]
# For comparison, we train on one device with optax only.


# %%
@jax.jit
def plain_step(params, opt_state):
    """Take one step without a pipeline."""
    loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init_fn(jax.random.key(0))
opt_state, plain = tx.init(params), []
for _ in range(num_steps):
    params, opt_state, loss = plain_step(params, opt_state)
    plain.append(float(loss))

# %% [markdown]
# Then we train three pipelines, with four stages, two devices in each stage (`data=2`) and eight micro-batches.

# %%
mesh = so.make_mesh(data=2, pipeline=4)
losses = {}
for name in ("eager_one_f_one_b", "interleaved, 2 chunks", "zero_bubble_lockstep"):
    opt = so.hybrid(tx, mesh, model, schedule=builders[name], micro_batches=8, placement="zero1")
    state, losses[name] = opt.init(init_fn, jax.random.key(0)), []
    for _ in range(num_steps):
        state, metrics = opt.step(state, batch)
        losses[name].append(float(metrics["loss"]))
    largest_distance = np.max(np.abs(np.array(losses[name]) - plain))
    print(
        f"{name:22} loss {losses[name][0]:.3f} -> {losses[name][-1]:.4f}, at most {largest_distance:.0e} from one device"
    )
    assert largest_distance < 1e-3

print("the blocks are split over the stages:", state.params["blocks"]["up"].sharding.spec)

# %%
figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
axes.semilogy(plain, color="0.75", linewidth=7, label="optax, one device")
for (name, values), style in zip(losses.items(), ["-", "--", ":"], strict=True):
    axes.semilogy(values, style, linewidth=2, label=name)
axes.set(title="three schedules, one curve", xlabel="step", ylabel="loss", xlim=(0, num_steps))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# A schedule changes the order of computations, not their results. So choose a schedule by its idle time and its memory.
#
# Our simulated devices share the cores of one machine, so here a pipeline saves no time. On real devices the empty boxes
# are idle time.
#
# You can also write your own schedule. It is a table, and shardopt checks it before it runs: see CONTRIBUTING.
#
# **Next**: [4. Less communication](4_less_communication.ipynb), for slow links between devices.
