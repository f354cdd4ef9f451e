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
# # 5. Training without barriers
#
# In one program all devices wait for the slowest one, in every step. Sometimes a worker stalls: a
# full disk, a busy network, other jobs on the same machine. Then all devices wait.
#
# **The idea: workers may run ahead of each other, up to a bound, and a log records all events.**
# The bound limits the age of a gradient. With the log you can repeat the run, bit for bit.

# %%
# %matplotlib inline
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardopt as so

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})
server = so.parameter_server

# %% [markdown]
# ## A problem, and workers that stall
#
# Each worker has its own batches: `batches_of(worker)` yields them. Our batches come from a slow
# disk. Most take 20 ms, and one in ten takes 120 ms.

# %%
sizes = [(8, 32), (32, 1)]


def init_fn(rng):
    """Draw the parameters."""
    keys = jax.random.split(rng, len(sizes))
    return [
        jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes, strict=True)
    ]


def apply(params, x):
    """Return the outputs of a small network."""
    up, down = params
    return jnp.tanh(x @ up) @ down


def loss_fn(params, batch):
    """Return the mean squared error."""
    return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)


teacher = init_fn(jax.random.key(1))
params = init_fn(jax.random.key(0))


def batches_of(worker, seconds=0.0, stall=0.0):
    """Yield the batches of a worker, with a pause before each."""
    rng, pause_rng = np.random.default_rng(worker), np.random.default_rng(100 + worker)
    while True:
        time.sleep(stall if pause_rng.random() < 0.1 else seconds)
        x = rng.normal(size=(32, 8)).astype(np.float32)
        yield {"x": x, "y": np.asarray(apply(teacher, x))}


def slow_batches_of(worker):
    """Yield the same batches, but slowly."""
    return batches_of(worker, seconds=0.02, stall=0.12)


# %% [markdown]
# ## All workers wait
#
# With `max_staleness=0` the gradients of all four workers are averaged and applied once, as
# `so.ddp` does. If one worker stalls, all stop. (We leave out the beginning, when everything is
# compiled.)


# %%
def from_steady_state(log, skip=5):
    """Return the log from the time when every worker has taken `skip` steps.

    Times count from there.
    """
    start = max(event.time for event in log if event.kind == "push" and event.clock < skip)
    before = max(event.version for event in log if event.time <= start)
    steady = server.Log(log.header)
    for event in log:
        time, version = max(event.time - start, 0.0), max(event.version - before, 0)
        steady.append(event._replace(time=time, version=version))
    return steady


def run(max_staleness, num_updates):
    """Train on four threads, each with one device; return the optimizer and the result."""
    opt = so.async_sgd(optax.sgd(0.1), loss_fn, workers=4, max_staleness=max_staleness)
    return opt, opt.run(params, slow_batches_of, num_updates=num_updates)


DOINGS = {
    "step": ("#3369b2", "computing"),
    "data": ("#8fa3b8", "fetching data"),
    "wait": ("#dfa63a", "waiting for others"),
    "lost": ("#c04a3a", "lost"),
}


def draw(log, until):
    """Draw in which periods each worker computed or waited."""
    _, axes = plt.subplots(figsize=(11, 2.2), layout="constrained")
    unlabelled = dict(DOINGS)
    for worker, doing, start, end in log.timeline():
        if start >= until or end - start < until / 1000:
            continue  # out of sight, or too short to see
        color = DOINGS[doing][0]
        _, label = unlabelled.pop(doing, ("", None))  # the legend has an entry once
        axes.broken_barh(
            [(start, end - start)], (worker - 0.4, 0.8), color=color, ec="white", label=label
        )
    axes.set_yticks(range(4), [f"worker {worker}" for worker in range(4)])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, until))
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    plt.show()


_, waiting = run(max_staleness=0, num_updates=50)
draw(from_steady_state(waiting.log), until=1.5)

# %% [markdown]
# ## Few workers wait
#
# Now a worker may be up to eight steps ahead of the slowest worker. Each gradient is applied when
# it arrives. A stall stops only the worker that stalls. Amber appears only when other workers have
# reached the bound.

# %%
opt, ahead = run(max_staleness=8, num_updates=200)
draw(from_steady_state(ahead.log), until=1.5)

# %%
for name, result in {"max_staleness=0": waiting, "max_staleness=8": ahead}.items():
    total = sum(result.metrics["wait_seconds"].values())
    print(
        f"{name}: {result.metrics['pushes']} gradients, workers waited {total:.1f} s in all,",
        end=" ",
    )
    print(f"steps ahead: {result.metrics['staleness']}")
    assert result.metrics["stopped"] == "completed"
assert set(waiting.metrics["staleness"]) == {0}
assert max(ahead.metrics["staleness"]) <= 8

# %% [markdown]
# ## Replay
#
# Threads run in a different order each time, so no two such runs are equal. To investigate a run,
# use its log. The log has every pull and every push, in order:

# %%
for event in list(ahead.log)[4:10]:
    print(event)

# %% [markdown]
# `replay` repeats the run on one thread, gradient by gradient. Its parameters equal the parameters of the run, bit for bit.

# %%
path = Path(tempfile.mkdtemp()) / "run.jsonl"
ahead.log.save(path)
log = server.Log.load(path)

replayed = opt.replay(log, params, batches_of)
is_equal = [
    bool((first == second).all()) for first, second in zip(replayed, ahead.params, strict=True)
]
print("equal bit for bit:", is_equal)
assert all(is_equal)

# %% [markdown]
# The replay does not need the slow disk, because the times are in the log. It does need the same data. With other data
# it raises an error:

# %%
try:
    opt.replay(log, params, lambda worker: batches_of(worker + 1))
except ValueError as error:
    print(error)
else:
    raise AssertionError("other data went unnoticed")

# %% [markdown]
# ## What do late gradients cost?
#
# A late gradient was computed with parameters that have changed since then. To measure the cost of
# late gradients, and the cost of waiting, we use the simulator. It runs the same server in virtual
# time. There are eight workers, steps take a second, and one step in ten stalls for ten seconds.
# The gradients are real.
#
# For a fair comparison the averaged run has eight times the learning rate. Then one update with
# eight gradients counts as much as eight updates with one gradient.


# %%
def step_seconds(rng):
    """Draw the seconds of a step."""
    return rng.lognormal(0.0, 0.2) + 10.0 * (rng.random() < 0.1)


workers = [server.SimulatedWorker(step_seconds=step_seconds)] * 8
work = {"loss_fn": loss_fn, "params": params, "batches_of": batches_of}
simulated = {
    "max_staleness=0": server.simulate(
        workers, max_staleness=0, num_updates=120, tx=optax.sgd(0.16), **work
    ),
    "max_staleness=4": server.simulate(
        workers, max_staleness=4, num_updates=960, tx=optax.sgd(0.02), **work
    ),
    "no bound": server.simulate(
        workers, max_staleness=None, num_updates=960, tx=optax.sgd(0.02), **work
    ),
}

# %%
figure, (gradient_axes, time_axes) = plt.subplots(
    1, 2, figsize=(11, 3.8), sharey=True, layout="constrained"
)
colors = ["black", "#33608c", "#b3882f"]
for (name, result), color in zip(simulated.items(), colors, strict=True):
    losses = result.metrics["history"]["loss"]
    gradients = np.arange(1, 961, 960 // len(losses))
    seconds = {
        event.version: event.time for event in reversed(list(result.log)) if event.kind == "push"
    }
    times = np.array([seconds[version] for version in range(1, len(losses) + 1)])
    width = len(losses) // 20  # each point is the mean of a twentieth of the run
    mean = np.convolve(losses, np.ones(width) / width, "valid")
    gradient_axes.semilogy(gradients[width - 1 :], mean, color=color, label=name)
    time_axes.semilogy(times[width - 1 :], mean, color=color, label=name)
    print(f"{name:16} {result.metrics['seconds']:5.0f} virtual seconds, loss {mean[-1]:.3f}")
gradient_axes.set(title="over gradients: what being late costs", xlabel="gradients", ylabel="loss")
time_axes.set(title="over time: what waiting costs", xlabel="virtual seconds")
for axes in (gradient_axes, time_axes):
    axes.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    axes.minorticks_off()
    axes.legend(frameon=False)
plt.show()

finals = [
    np.mean(result.metrics["history"]["loss"][-len(result.metrics["history"]["loss"]) // 20 :])
    for result in simulated.values()
]
assert max(finals) < 1.1 * min(finals)
seconds = [result.metrics["seconds"] for result in simulated.values()]
assert seconds[0] > 1.5 * seconds[1] > 1.5 * seconds[2]

# %% [markdown]
# On the left: all runs learn about equally well per gradient. On the right: without waiting, a run ends much sooner.
#
# ## When a bound does not help
#
# One worker is always four times slower. The others run ahead until they reach the bound, here four
# steps. After that they are as slow as the slowest worker.

# %%
uneven = [server.SimulatedWorker()] * 3 + [server.SimulatedWorker(step_seconds=4.0)]
draw(server.simulate(uneven, max_staleness=4, until=40.0).log, until=40.0)

# %% [markdown]
# So a bound helps against stalls that pass. It does not help against a worker that is always slow. Then remove the bound
# (`max_staleness=None`), or give the worker less work (`so.parameter_server.async_local_sgd`).

# %%
bounds = [0, 1, 2, 4, 8, 16, 32]
cases = {"stalls that pass": workers[:4], "one always four times slower": uneven}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, group), style in zip(cases.items(), ["o-", "s-"], strict=True):
    unbounded_rate = server.simulate(group, max_staleness=None, until=2000.0).metrics[
        "pushes_per_second"
    ]
    rates = [
        server.simulate(group, max_staleness=s, until=2000.0).metrics["pushes_per_second"]
        for s in bounds
    ]
    shares = 100 * np.array(rates) / unbounded_rate
    axes.plot(range(len(bounds)), shares, style, label=name)
    print(f"{name:30}", " ".join(f"{share:3.0f}%" for share in shares))
    assert (shares[4] > 80) == (name == "stalls that pass")
axes.set_xticks(range(len(bounds)), bounds)
axes.set(xlabel="max_staleness", ylabel="% of the speed without a bound", ylim=(0, 105))
axes.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# With `backend="ray"` workers are processes that may join, leave or be killed. The log and its replay stay the same.
#
# **Next**: [6. Planning a pod](6_planning_a_pod.ipynb), before you rent one.
