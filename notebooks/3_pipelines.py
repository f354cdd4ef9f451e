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
# A deep model can be cut into stages. Each device holds a few blocks, and sends activations to the next. A stage that
# waits for its neighbour is idle. So the batch is split too, into micro-batches, which follow one another.
#
# **The idea: a schedule is a table of what each stage does when, and idle time is its empty boxes.** You can draw it
# before you run it.

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

# %% [markdown]
# ## The simplest schedule
#
# Four stages, eight micro-batches. First all forwards, then all backwards. A row is a stage, time goes to the right,
# the number in a box is the micro-batch. A backward takes twice as long as a forward, as it computes two gradients.

# %%
so.schedules.gpipe(4, 8).plot()

# %% [markdown]
# The pale corners are the bubble: stages with nothing to do. For $S$ stages and $M$ micro-batches its share is
# $\frac{S-1}{M+S-1}$.

# %%
gpipe = so.schedules.gpipe(4, 8)
print(f"bubble {gpipe.bubble_fraction:.1%}, formula {3 / (8 + 3):.1%}")
print("activations that each stage keeps at its worst tick:", gpipe.peak_activations)
assert gpipe.bubble_fraction == 3 / 11

# %% [markdown]
# Every micro-batch waits, with all its activations, until the last forward is done. That takes a lot of memory.
#
# ## Backwards as soon as possible
#
# One forward, one backward, in turn (1F1B). The bubble is the same, but fewer activations wait. Here both run on every
# tick; `one_f_one_b` is the textbook's, with one of them a tick. It keeps half as much, and in one program idles more.

# %%
so.schedules.eager_one_f_one_b(4, 8).plot()

# %% [markdown]
# ## Smaller stages, more of them
#
# `interleaved` gives each device two chunks of the model, pale and dark. A chunk takes half as long, so the corners
# are half as wide. In turn more messages are sent.

# %%
so.schedules.interleaved(4, 8, num_chunks=2).plot()

# %% [markdown]
# ## Fill the bubble with work
#
# A backward computes two things. The neighbour waits for the gradient of the input. Nothing waits for the gradient
# of the weights. So that half can be delayed until the stage would be idle.

# %%
so.schedules.zero_bubble_lockstep(4, 8).plot()

# %% [markdown]
# ## More micro-batches
#
# All bubbles shrink as micro-batches become more. What is kept in memory does not grow with them, except for `gpipe`.

# %%
makers = {
    "gpipe": so.schedules.gpipe,
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "interleaved, 2 chunks": functools.partial(so.schedules.interleaved, num_chunks=2),
    "zero_bubble_lockstep": so.schedules.zero_bubble_lockstep,
}
chunks = {name: 2 if "2 chunks" in name else 1 for name in makers}
counts = [4, 8, 16, 32]
tables = {name: [make(4, count) for count in counts] for name, make in makers.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for (name, row), style in zip(tables.items(), ["o-", "s--", "^-", "D:"], strict=True):
    left.plot(counts, [100 * table.program_bubble_fraction for table in row], style, label=name)
    right.plot(counts, [max(table.peak_activations) / chunks[name] for table in row], style, label=name)
left.set(title="idle share of the program, 4 stages", xlabel="micro-batches", ylabel="%", ylim=(0, None))
right.set(title="activations that a stage keeps", xlabel="micro-batches", ylabel="micro-batches of a stage")
right.set_ylim(bottom=0)
for axes in (left, right):
    axes.set_xticks(counts)
left.legend(frameon=False)
plt.show()

for name, row in tables.items():
    bubbles = ", ".join(f"{table.program_bubble_fraction:5.1%}" for table in row)
    print(f"{name:22} idle {bubbles}   keeps {[max(table.peak_activations) for table in row]} activations of a chunk")
    assert sorted(row, key=lambda table: -table.program_bubble_fraction) == row
    assert name == "gpipe" or row[-1].peak_activations == row[1].peak_activations

# %% [markdown]
# ## Now run them
#
# A pipeline must know where the blocks are. A `so.BlockModel` says what comes before the blocks, one block, and what
# comes after. The parameters of all blocks are stacked.

# %%
width, depth = 32, 8


def init_fn(rng):
    """Draw the parameters: stacked blocks, and the outer ones."""
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

draw = np.random.default_rng(0)
x = draw.uniform(-1, 1, (256, 2)).astype(np.float32)
batch = {"x": x, "y": np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:])}
tx = optax.adam(2e-3)
num_steps = 60

# %% [markdown]
# For comparison: one device, and optax alone.


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
# And pipelines: four stages, two devices in each (`data=2`), eight micro-batches.

# %%
mesh = so.make_mesh(data=2, pipeline=4)
losses = {}
for name in ("eager_one_f_one_b", "interleaved, 2 chunks", "zero_bubble_lockstep"):
    opt = so.hybrid(tx, mesh, model, schedule=makers[name], micro_batches=8, placement="zero1")
    state, losses[name] = opt.init(init_fn, jax.random.key(0)), []
    for _ in range(num_steps):
        state, metrics = opt.step(state, batch)
        losses[name].append(float(metrics["loss"]))
    worst = np.max(np.abs(np.array(losses[name]) - plain))
    print(f"{name:22} loss {losses[name][0]:.3f} -> {losses[name][-1]:.4f}, at most {worst:.0e} from one device")
    assert worst < 1e-3

print("the blocks are split over the stages:", state.params["blocks"]["up"].sharding.spec)

# %%
figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
axes.semilogy(plain, color="0.75", linewidth=7, label="optax, one device")
for (name, values), style in zip(losses.items(), ["-", "--", ":"], strict=True):
    axes.semilogy(values, style, linewidth=2, label=name)
axes.set(title="three schedules, one curve", xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# A schedule changes when things are computed, not what. So choose by how much is idle and how much is kept.
#
# Our simulated devices share the cores of one machine, so here a pipeline saves no time. On real ones the empty boxes
# are idle time.
#
# You can also write a schedule of your own. It is a table, and it is checked before it runs: see CONTRIBUTING.
#
# **Next**: [4. Less communication](4_less_communication.ipynb), for links that are slow.
