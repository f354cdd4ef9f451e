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
# Between machines links are slow. Then sending gradients takes longer than computing them.
#
# **The idea: you can send far less, at little cost in learning, if what was not sent is kept for later.** There are two
# ways. Send fewer bits each step, or send less often.

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
# A network learns to imitate another one, from examples that never repeat. We watch the loss on examples that it never
# trains on.

# %%
sizes = [(16, 128), (128, 128), (128, 4)]


def init_fn(rng):
    """Draw the parameters."""
    keys = jax.random.split(rng, len(sizes))
    return [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes, strict=True)]


def apply(params, x):
    """Return what the network answers."""
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
    """Return batch number `number`, the same for everybody."""
    x = jax.random.normal(jax.random.key(number), (256, 16))
    return {"x": x, "y": apply(teacher, x)}


num_steps = 300
batches = [jax.device_get(batch_of(number)) for number in range(num_steps)]
held_out = jax.device_get(batch_of(1_000_000))
tx = optax.adam(optax.cosine_decay_schedule(5e-3, num_steps))
mesh = so.make_mesh(data=4)

# %% [markdown]
# We train six times on four devices, and each time keep the curve and the bytes sent per device and step. The bytes
# are not a formula: `so.audit` reads them from the compiled program.

# %%
curves, sent = {}, {}


def wire_bytes(opt, state):
    """Return the bytes sent per device in the step that comes next."""
    return sum(found.wire_bytes * found.calls for found in so.audit(opt.step, state, batches[0]).collectives)


def train(name, opt, sync_every=1):
    """Train, and put the curve and the bytes a step, the mean over `sync_every` steps, under a name."""
    state, curve, total = opt.init(init_fn, jax.random.key(0)), [], 0
    for step, batch in enumerate(batches):
        if step in (0, sync_every - 1):  # a step that sends nothing, and one that does, are programs of their own
            total += wire_bytes(opt, state) * (1 if step == sync_every - 1 else sync_every - 1)
        state, _ = opt.step(state, batch)
        if step % 10 == 9:
            curve.append((step + 1, float(opt.evaluate(state, held_out)["loss"])))
    curves[name], sent[name] = np.array(curve), total / sync_every
    print(f"{name:21} loss {curve[-1][1]:.4f}, {sent[name]:9,.0f} bytes a step")


train("exact", so.ddp(tx, mesh, loss_fn))

# %% [markdown]
# ## Fewer bits
#
# A reducer says how a mean of gradients crosses the wire. `int8` sends a byte a number instead of four. `power_sgd`
# sends two thin matrices whose product is near the gradient. `top_k` sends the largest two in a hundred, and nothing of
# the rest.
#
# Each loses something at each step. `error_feedback` keeps what was lost and adds it to the next gradient. So nothing is
# lost, only delayed.

# %%
feedback = so.reducers.error_feedback
train("int8, feedback", so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.int8())))
train("power_sgd, feedback", so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.power_sgd(rank=4))))
train("top_k, feedback", so.ddp(tx, mesh, loss_fn, reducer=feedback(so.reducers.top_k(density=0.02))))

# %% [markdown]
# What does error feedback gain? We leave it out once.

# %%
train("power_sgd, forgetful", so.ddp(tx, mesh, loss_fn, reducer=so.reducers.power_sgd(rank=4)))

# %% [markdown]
# ## Less often
#
# Now each of the four is a replica that trains by itself for twenty steps. Then they synchronise. With DiLoCo they send
# the change of their parameters, and an outer optimizer treats its mean as a gradient. Until the next synchronisation
# the shared parameters do not change, so their curve has steps.

# %%
every = 20
inner = so.ddp(tx, so.make_mesh(replica=4, data=1), loss_fn)
outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
train("diloco, every 20", so.diloco(inner, sync_every=every, outer=outer), every)

# %% [markdown]
# ## The curves, beside each other

# %%
looks = {
    "int8, feedback": ("#33608c", "-"),
    "power_sgd, feedback": ("#218c6b", "-"),
    "power_sgd, forgetful": ("#218c6b", ":"),
    "top_k, feedback": ("#b3882f", "-"),
    "diloco, every 20": ("#a34d7c", "-"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4), sharey=True, layout="constrained")
for axes in (left, right):
    axes.semilogy(*curves["exact"].T, color="0.75", linewidth=6, label="exact")
    axes.set_xlabel("step")
for name, (color, line) in looks.items():
    axes = right if "diloco" in name else left
    axes.semilogy(*curves[name].T, line, color=color, linewidth=1.8, label=name)
left.set(title="fewer bits", ylabel="held-out loss")
right.set(title="less often")
for axes in (left, right):
    axes.set_yticks([0.1, 0.2, 0.4, 0.8], ["0.1", "0.2", "0.4", "0.8"])
    axes.minorticks_off()
    axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## And the bytes
#
# Left is cheap, down is good.

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, curve in curves.items():
    color = looks.get(name, ("black",))[0]
    axes.semilogx(sent[name] / 1000, curve[-1, 1], "o", color=color, fillstyle="none" if "forget" in name else "full")
    axes.annotate(
        name,
        (sent[name] / 1000, curve[-1, 1]),
        (8, 2 if "diloco" in name else -4),
        textcoords="offset points",
        color=color,
    )
axes.set(xlabel="kB sent per device and step", ylabel="held-out loss at the end")
axes.set_xlim(4, 300)
axes.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
axes.minorticks_off()
axes.grid(alpha=0.3)
plt.show()

# %%
final = {name: curve[-1, 1] for name, curve in curves.items()}
for name in curves:
    print(
        f"{name:21} {sent['exact'] / sent[name]:5.1f} times fewer bytes, loss {final[name] / final['exact']:.2f} times"
    )

assert sent["int8, feedback"] < sent["exact"] / 3.5
assert sent["power_sgd, feedback"] < sent["exact"] / 8
assert sent["diloco, every 20"] < sent["exact"] / 19
assert final["int8, feedback"] < 1.05 * final["exact"]
assert final["power_sgd, feedback"] < 0.9 * final["power_sgd, forgetful"]

# %% [markdown]
# Fewer bits can be nearly free, if what was lost is kept. The solid and the hollow green dot send the
# same bytes. How far you can go depends on the model, and on how much of the training is still to come: all of these
# lag most at the beginning. `so.reducers.warm_up` sends exact means there. `docs/benchmarks.md` has longer runs with three seeds.
#
# Both ways compose. `so.diloco(inner, reducer=...)` sends seldom *and* little.
#
# **Next**: [5. Training without barriers](5_without_barriers.ipynb), for workers that stall.
