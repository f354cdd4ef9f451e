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
# # 1. First steps
#
# You know optax: a loss, some parameters, an optimizer, a loop. Here that loop moves from one device to eight.
#
# **The idea: more devices, the same numbers.** You choose which device stores which values. Training takes the same
# steps as before.
#
# You need no accelerator. We ask jax for eight simulated devices on the CPU. They behave like real devices in everything
# but speed. If you have real devices, leave out the two lines with `jax.config`.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})
print(len(jax.devices()), "devices")

# %% [markdown]
# ## A problem
#
# Two spirals wind around each other. A small network learns which spiral a point lies on.


# %%
def spirals(num_points):
    """Return points x [n, 2] on two spirals, and the spiral of each point, y [n]."""
    rng = np.random.default_rng(0)
    arm = np.arange(num_points) % 2
    radius = np.sqrt(rng.uniform(0.02, 1, num_points))
    angle = 3 * np.pi * radius + np.pi * arm
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += rng.normal(scale=0.015, size=x.shape)
    return {"x": x.astype(np.float32), "y": arm.astype(np.float32)}


def init_fn(rng):
    """Draw the parameters."""
    sizes = [(2, 128), (128, 128), (128, 1)]
    keys = jax.random.split(rng, len(sizes))
    return [
        {"w": jax.random.normal(key, size) * (2 / size[0]) ** 0.5, "b": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]


def logits(params, x):
    """Return one number per point: positive for the second spiral."""
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ last["w"] + last["b"])[:, 0]


def loss_fn(params, batch):
    """Return the mean loss over the points of a batch."""
    return jnp.mean(
        optax.losses.sigmoid_binary_cross_entropy(logits(params, batch["x"]), batch["y"])
    )


batch = spirals(512)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
num_steps = 200

# %% [markdown]
# ## One device, as you know it


# %%
@jax.jit
def plain_step(params, opt_state, batch):
    """Take one step with optax only."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init_fn(jax.random.key(0))
opt_state = tx.init(params)
plain = []
for _ in range(num_steps):
    params, opt_state, loss = plain_step(params, opt_state, batch)
    plain.append(float(loss))
print(f"loss {plain[0]:.3f} -> {plain[-1]:.4f}")

# %% [markdown]
# ## Eight devices
#
# Three things change.
#
# 1. A **mesh** gives the devices an order and names. `data=8` means that eight devices share the rows of a batch.
# 2. A **strategy** takes your optimizer, the mesh and your loss. `so.fsdp` shards parameters and optimizer state, so
#    each device holds an eighth of them.
# 3. `opt.init` and `opt.step` replace `tx.init` and the step above.
#
# You still pass the global batch. shardopt gives each device its share of the rows.

# %%
mesh = so.make_mesh(data=8)
opt = so.fsdp(tx, mesh, loss_fn)
state = opt.init(init_fn, jax.random.key(0))

fsdp = []
for _ in range(num_steps):
    state, metrics = opt.step(state, batch)
    fsdp.append(float(metrics["loss"]))
print(f"loss {fsdp[0]:.3f} -> {fsdp[-1]:.4f}")

# %% [markdown]
# ## Where are the parameters now?
#
# The large matrix is sharded into eight strips, one per device. `init` already created it in strips, so no device ever
# held all of it.

# %%
w = state.params[1]["w"]
print(w.shape, w.sharding.spec, "- on each device", w.addressable_shards[0].data.shape)
jax.debug.visualize_array_sharding(w)

# %% [markdown]
# Small leaves stay replicated, because sharding them would save almost nothing. The report lists every leaf, and says
# why it is replicated.

# %%
print(opt.config.report())

# %% [markdown]
# ## Another strategy is another word
#
# `so.ddp` replicates everything on each device. `so.zero` shards the optimizer state and replicates the parameters. We
# also train with these two, and then count the bytes on the first device.


# %%
def bytes_on_first_device(state):
    """Return the bytes on the first device: (parameters, optimizer state)."""
    trees = (state.params, state.opt_state)
    return [
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for tree in trees
    ]


def train(opt):
    """Return the losses, and the bytes on the first device."""
    state, losses = opt.init(init_fn, jax.random.key(0)), []
    for _ in range(num_steps):
        state, metrics = opt.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, bytes_on_first_device(state)


results = {
    "so.ddp": train(so.ddp(tx, mesh, loss_fn)),
    "so.zero": train(so.zero(tx, mesh, loss_fn)),
    "so.fsdp": (fsdp, bytes_on_first_device(state)),
}

# %%
figure, (loss_axes, distance_axes, memory_axes) = plt.subplots(
    1, 3, figsize=(12, 3.4), layout="constrained"
)
loss_axes.plot(plain, color="0.75", linewidth=6, label="optax, one device")
for (name, (losses, _)), style in zip(results.items(), ["-", "--", ":"], strict=True):
    loss_axes.plot(losses, style, linewidth=1.8, label=name)
    distance_axes.semilogy(
        np.abs(np.array(losses) - plain) + 1e-9, style, linewidth=1.2, label=name
    )
loss_axes.set(title="loss", xlabel="step", xlim=(0, num_steps))
loss_axes.legend(frameon=False)
distance_axes.semilogy(plain, color="0.75", linewidth=6)
distance_axes.annotate("the loss itself", (100, 0.5), color="0.45")
distance_axes.set(
    title="distance to one device", xlabel="step", xlim=(0, num_steps), ylim=(1e-9, 1)
)
distance_axes.legend(frameon=False, loc="center right")

kilobytes = np.array([bytes_held for _, bytes_held in results.values()]) / 1000
memory_axes.bar(list(results), kilobytes[:, 0], color="#33608c", label="parameters")
memory_axes.bar(
    list(results), kilobytes[:, 1], bottom=kilobytes[:, 0], color="#b3882f", label="optimizer state"
)
memory_axes.set(title="held per device", ylabel="kB")
memory_axes.legend(frameon=False)
plt.show()

# %% [markdown]
# On the left the four curves coincide. The middle shows how little they differ: eight devices round their sums in
# another order than one device. The right shows what you gain: less memory per device, and the same training.
#
# This holds for every optax optimizer but lookahead and dpsgd, including the clipping by the global norm above. Your optimizer
# sees all gradients, as if they were on one device. We check this:

# %%
for name, (losses, bytes_held) in results.items():
    largest_distance = np.max(np.abs(np.array(losses) - plain))
    print(
        f"{name:8} at most {largest_distance:.1e} from one device, {sum(bytes_held):7,} bytes per device"
    )
    assert largest_distance < 1e-3
assert sum(results["so.fsdp"][1]) < sum(results["so.zero"][1]) < sum(results["so.ddp"][1])

# %% [markdown]
# ## The trained model

# %%
grid = np.stack(np.meshgrid(*[np.linspace(-1.1, 1.1, 150, dtype=np.float32)] * 2), axis=-1)
probability = jax.nn.sigmoid(logits(state.params, grid.reshape(-1, 2))).reshape(150, 150)

figure, axes = plt.subplots(figsize=(4.2, 4), layout="constrained")
axes.imshow(
    probability,
    extent=(-1.1, 1.1, -1.1, 1.1),
    origin="lower",
    cmap="RdBu",
    alpha=0.5,
    vmin=0,
    vmax=1,
)
axes.scatter(*batch["x"].T, c=batch["y"], cmap="RdBu", s=8, edgecolor="0.3", linewidth=0.3)
axes.set(title="trained on eight devices", xticks=[], yticks=[])
plt.show()

accuracy = np.mean((np.asarray(logits(state.params, batch["x"])) > 0) == batch["y"])
print(f"{accuracy:.1%} of the points are classified correctly")
assert accuracy > 0.95

# %% [markdown]
# Sharded parameters are ordinary jax arrays. You can call your functions on them, as we just did.
#
# **Next**: [2. Placements](2_placements.ipynb) shows which device stores each leaf, and how many bytes a step sends.
