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
# # 4. Less communication
#
# Links between machines are slow. Sending gradients then takes longer than computing them.
#
# **The idea: training can send far fewer bytes and still learn well, if it keeps the unsent part
# for later.** There are two ways: send fewer bits in each step, or send less often.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})

# %% [markdown]
# ## A problem
#
# A network learns to imitate another network, from examples that never repeat. We measure the loss
# on held-out examples.

# %%
sizes = [(16, 128), (128, 128), (128, 4)]


def init_fn(rng):
    """Draw the parameters."""
    keys = jax.random.split(rng, len(sizes))
    return [
        jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes, strict=True)
    ]


def apply(params, x):
    """Return the outputs of the network."""
    *hidden, last = params
    for w in hidden:
        x = jnp.tanh(2 * x @ w)
    return x @ last


def loss_fn(params, batch):
    """Return the mean squared error."""
    return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)


teacher = init_fn(jax.random.key(1))


@jax.jit
def batch_of(number):
    """Return batch number `number`, the same in every run."""
    x = jax.random.normal(jax.random.key(number), (256, 16))
    return {"x": x, "y": apply(teacher, x)}


num_steps = 300
batches = [jax.device_get(batch_of(number)) for number in range(num_steps)]
held_out = jax.device_get(batch_of(1_000_000))
tx = optax.adam(optax.cosine_decay_schedule(5e-3, num_steps))
mesh = so.make_mesh(data=4)

# %% [markdown]
# We train six times on four devices. Each time we keep the curve of the loss, and the bytes sent per device and step. The
# bytes do not come from a formula: `so.hlo.audit` reads them from the compiled program.

# %%
curves, bytes_per_step = {}, {}


def wire_bytes(opt, state):
    """Return the bytes that a device sends in the next step."""
    collectives = so.hlo.audit(opt.step, state, batches[0]).collectives
    return sum(collective.wire_bytes * collective.calls for collective in collectives)


def train(name, opt, sync_every=1):
    """Train, and store the curve and the bytes per step (the mean of `sync_every` steps) under a
    name.
    """
    state, curve, total = opt.init(init_fn, jax.random.key(0)), [], 0
    for step, batch in enumerate(batches):
        if step in (0, sync_every - 1):  # steps with and without synchronisation are two programs
            total += wire_bytes(opt, state) * (1 if step == sync_every - 1 else sync_every - 1)
        state, _ = opt.step(state, batch)
        if step % 10 == 9:
            curve.append((step + 1, float(opt.evaluate(state, held_out)["loss"])))
    curves[name], bytes_per_step[name] = np.array(curve), total / sync_every
    print(f"{name:21} loss {curve[-1][1]:.4f}, {bytes_per_step[name]:9,.0f} bytes a step")


train("exact", so.ddp(tx, mesh, loss_fn))

# %% [markdown]
# ## Fewer bits
#
# A reducer compresses gradients for the mean over devices. `int8` sends one byte per number instead
# of four. `power_sgd` sends two thin matrices whose product is near the gradient. `top_k` sends the
# two percent of numbers that are largest.
#
# Each of them loses a part of the gradient in every step. `error_feedback` keeps this error and
# adds it to the next gradient. So nothing is lost, only delayed.

# %%
feedback = so.reducers.error_feedback
train("int8, feedback", so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.int8())))
train(
    "power_sgd, feedback",
    so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.power_sgd(rank=4))),
)
train(
    "top_k, feedback", so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.top_k(density=0.02)))
)

# %% [markdown]
# What does error feedback gain? We train once without it.

# %%
train("power_sgd, forgetful", so.ddp(tx, mesh, loss_fn, reducer=so.reducers.power_sgd(rank=4)))

# %% [markdown]
# ## Less often
#
# Now each of the four devices is a replica that trains alone for twenty steps. Then the replicas
# synchronise. With DiLoCo they send the change of their parameters, and an outer optimizer uses the
# mean change as a gradient. The shared parameters do not change until the next synchronisation, so
# their curve has steps.

# %%
steps_per_round = 20
inner = so.ddp(tx, so.make_mesh(replica=4, data=1), loss_fn)
outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
train(
    "diloco, every 20", so.diloco(inner, sync_every=steps_per_round, outer=outer), steps_per_round
)

# %% [markdown]
# ## The curves, next to each other

# %%
styles = {
    "int8, feedback": ("#33608c", "-"),
    "power_sgd, feedback": ("#218c6b", "-"),
    "power_sgd, forgetful": ("#218c6b", ":"),
    "top_k, feedback": ("#b3882f", "-"),
    "diloco, every 20": ("#a34d7c", "-"),
}
figure, (bits_axes, rounds_axes) = plt.subplots(
    1, 2, figsize=(11.5, 4), sharey=True, layout="constrained"
)
for axes in (bits_axes, rounds_axes):
    axes.semilogy(*curves["exact"].T, color="0.75", linewidth=6, label="exact")
    axes.set(xlabel="step", xlim=(0, num_steps))
for name, (color, line_style) in styles.items():
    axes = rounds_axes if "diloco" in name else bits_axes
    axes.semilogy(*curves[name].T, line_style, color=color, linewidth=1.8, label=name)
bits_axes.set(title="fewer bits", ylabel="held-out loss")
rounds_axes.set(title="less often")
for axes in (bits_axes, rounds_axes):
    axes.set_yticks([0.1, 0.2, 0.4, 0.8], ["0.1", "0.2", "0.4", "0.8"])
    axes.minorticks_off()
    axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The bytes
#
# Points on the left send few bytes. Points at the bottom have a low loss.

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, curve in curves.items():
    color = styles.get(name, ("black",))[0]
    axes.semilogx(
        bytes_per_step[name] / 1000,
        curve[-1, 1],
        "o",
        color=color,
        fillstyle="none" if "forget" in name else "full",
    )
    axes.annotate(
        name,
        (bytes_per_step[name] / 1000, curve[-1, 1]),
        (0, 8),
        textcoords="offset points",
        horizontalalignment={"diloco, every 20": "left", "exact": "right"}.get(name, "center"),
        color=color,
    )
axes.set(xlabel="kB sent per device and step", ylabel="held-out loss at the end")
axes.set_xlim(5, 120)
axes.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
axes.minorticks_off()
axes.grid(alpha=0.3)
plt.show()

# %%
final_losses = {name: curve[-1, 1] for name, curve in curves.items()}
for name in curves:
    print(
        f"{name:21} {bytes_per_step['exact'] / bytes_per_step[name]:5.1f} times fewer bytes, loss {final_losses[name] / final_losses['exact']:.2f} times"
    )

assert bytes_per_step["int8, feedback"] < bytes_per_step["exact"] / 3.5
assert bytes_per_step["power_sgd, feedback"] < bytes_per_step["exact"] / 8
assert bytes_per_step["diloco, every 20"] < bytes_per_step["exact"] / 19
assert final_losses["int8, feedback"] < 1.05 * final_losses["exact"]
assert final_losses["power_sgd, feedback"] < 0.9 * final_losses["power_sgd, forgetful"]

# %% [markdown]
# Fewer bits cost almost nothing, if the error is kept. The solid and the hollow green dot send the same bytes. How far
# you can go depends on the model, and on the length of the training: all methods lag most at the beginning.
# `so.reducers.warm_up` sends exact means at the beginning. `docs/benchmarks.md` has longer runs with three seeds.
#
# You can combine both ways: `so.diloco(inner, reducer=...)` sends less often *and* fewer bits.
#
# **Next**: [5. Training without barriers](5_without_barriers.ipynb), for workers that stall.
