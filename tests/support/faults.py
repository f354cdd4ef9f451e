"""Faults of one device, put into a step on purpose: flipped bits, stuck bits and wrong tiles, at
each site of a step.

A batch has a leaf "fault" with a code in each row. A device reads the code of its first row, so one
compiled program has all faults. A transient fault is in the first run of a step only. A stuck fault
is in every run, wherever its device takes part."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.diagnose._verified import VerifiedStep
from shardopt.step import _step
from shardopt.step._gradients import ExactSum, MicroBatches, PerDeviceView
from shardopt.training._verify import Verification

SITES = ("none", "shard", "weight", "activation", "gradient", "reduced", "update")
"""What is hit: a stored shard, a weight as the loss reads it (after its gather), an activation, a
local gradient, a gradient after its reduction, the result of the update."""
KINDS = ("flip", "stuck", "tile")
ROWS = 2  # of each device
WIDTH = 8


class Fault(NamedTuple):
    """A fault: its device, its site, and the leaf and the bits that it changes."""

    device: int
    site: str
    kind: str
    index: int
    bit: int
    leaf: int

    @property
    def code(self):
        return [SITES.index(self.site), KINDS.index(self.kind), self.index, self.bit, self.leaf]


def draw(rng, devices):
    """Return a random fault."""
    site = rng.choice(SITES[1:])
    kind = rng.choice(KINDS)
    return Fault(
        int(rng.integers(devices)),
        str(site),
        str(kind),
        *(int(rng.integers(n)) for n in (2**16, 32, 2**8)),
    )


def damaged(x, code, active):
    """Return a float32 array with the fault of a code, if it is active."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    place, (_, kind, index, bit, _) = jnp.arange(bits.size), code
    bit_mask = jnp.uint32(1) << bit.astype(jnp.uint32)
    flipped = jnp.where(place == index % bits.size, bits ^ bit_mask, bits)
    lane = place % 4 == index % 4
    stuck = jnp.where(lane, jnp.where(index % 2 == 0, bits | bit_mask, bits & ~bit_mask), bits)
    tile = jnp.where(place // 4 == (index % bits.size) // 4, jnp.roll(bits, 4), bits)
    faulty = jnp.where(kind == 0, flipped, jnp.where(kind == 1, stuck, tile))
    return jax.lax.bitcast_convert_type(
        jnp.where(active, faulty, bits).reshape(x.shape), jnp.float32
    )


def at_site(site, x, code, leaf=None, leaves=1):
    active = code[0] == SITES.index(site)
    active = active if leaf is None else active & (code[4] % leaves == leaf)
    # bits have no gradient: the backward pass runs as if the device had computed x right
    run = jax.custom_vjp(damaged)
    run.defvjp(lambda *args: (damaged(*args), None), lambda _, dx: (dx, None, None))
    return run(x, code, active)


def of_gradient(x, code, leaf, leaves):
    """Return x, whose gradient has the fault."""
    run = jax.custom_vjp(lambda x, code: x)
    run.defvjp(
        lambda x, code: (x, code),
        lambda code, dx: (at_site("gradient", dx, code, leaf, leaves), None),
    )
    return run(x, code)


def loss(params, batch):
    code = batch["fault"][0]
    weights = {}
    for leaf, name in enumerate(sorted(params)):
        weight = at_site("weight", params[name], code, leaf, len(params))
        weights[name] = of_gradient(weight, code, leaf, len(params))
    hidden = at_site("activation", jnp.tanh(batch["x"] @ weights["w1"] + weights["b"][None]), code)
    return jnp.mean((hidden @ weights["w2"] - batch["y"]) ** 2)


def expert_loss(params, batch):
    """The loss of a mixture of experts, with the same sites."""
    code = batch["fault"][0]
    leaves, treedef = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        leaves[i] = of_gradient(at_site("weight", leaf, code, i, len(leaves)), code, i, len(leaves))
    weights = treedef.unflatten(leaves)
    mixed, _ = so.nn.mixture_of_experts(
        weights["experts"], batch["x"][:, None], weights["router"], top_k=2
    )
    hidden = at_site("activation", mixed[:, 0], code)
    return jnp.mean((hidden @ weights["w"] - batch["y"]) ** 2)


def first_params(name="ddp"):
    draws = np.random.default_rng(0)
    shapes = {"w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH), "b": (WIDTH,)}
    if name.startswith("experts"):
        experts = {"up": (4, WIDTH, WIDTH), "down": (4, WIDTH, WIDTH)}
        shapes = {"experts": experts, "router": (WIDTH, 4), "w": (WIDTH, WIDTH)}

    def draw(shape):
        return (draws.normal(size=shape) / 3).astype(np.float32)

    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def batches(devices):
    """Yield batches without faults."""
    for seed in itertools.count():
        draws = np.random.default_rng(seed)
        rows = {
            name: draws.normal(size=(ROWS * devices, WIDTH)).astype(np.float32)
            for name in ("x", "y")
        }
        yield rows | {"fault": np.zeros((ROWS * devices, 5), np.int32)}


def strategies(devices):
    """Return name -> optimizer, on four devices that exchange nothing before the reduction of the
    gradients.
    """
    mesh = so.make_mesh(data=4, devices=devices[:4])
    options = {"min_shard_elements": 1, "view": "unproved"}
    tx = optax.adam(0.01)
    return {
        "ddp": lambda: so.ddp(tx, mesh, loss, view="unproved"),
        "zero1": lambda: so.zero(tx, mesh, loss, stage=1, **options),
        "zero2": lambda: so.zero(tx, mesh, loss, stage=2, **options),
        "fsdp": lambda: so.fsdp(tx, mesh, loss, **options),
        "hsdp": lambda: so.fsdp(
            tx, so.make_mesh(replica=2, data=2, devices=devices[:4]), loss, **options
        ),
    }


def further_strategies(devices):
    """Return name -> optimizer: Muon on whole matrices, and experts, whose devices exchange tokens
    within a step.
    """
    mesh, expert_mesh = (
        so.make_mesh(**sizes, devices=devices[:4])
        for sizes in ({"data": 4}, {"data": 2, "expert": 2})
    )
    options = {"min_shard_elements": 1, "view": "unproved"}
    muon = optax.contrib.muon(0.01)
    experts = {"rules": [("^experts/", "experts")], "view": "unproved"}
    return {
        "Muon, zero1": lambda: so.zero(muon, mesh, loss, stage=1, opt_state="matrices", **options),
        "Muon, fsdp": lambda: so.fsdp(muon, mesh, loss, opt_state="matrices", **options),
        "experts, ddp": lambda: so.ddp(optax.adam(0.01), expert_mesh, expert_loss, **experts),
        "experts, fsdp": lambda: so.fsdp(
            optax.adam(0.01), expert_mesh, expert_loss, min_shard_elements=1, **experts
        ),
    }


def hit_runs(patch):
    """Put the code of a fault into the batch of each run of a verified step: faults of the loss
    need no more.

    Returns:
      A dict: `fault` is the fault of the next runs, `stuck` whether it is in all of them, and
      `runs` counts them.
    """
    now = {"fault": None, "stuck": False, "runs": 0}
    run = VerifiedStep.run

    def with_fault(verified, state, batch, shift=0):
        now["runs"] += 1
        active = now["fault"] is not None and (now["stuck"] or now["runs"] == 1)
        result = run(verified, state, faulty(batch, now["fault"] if active else None, shift), shift)
        if now["runs"] == 1:
            now["first result"] = result[0]
        return result

    patch.setattr(VerifiedStep, "run", with_fault)
    return now


def install(patch, break_function):
    """Put the faults after the reduction and in the update into the step too.

    Return the dict of `hit_runs`.
    """
    now = hit_runs(patch)
    differentiate = MicroBatches.gradients
    reduce = ExactSum.__call__
    make_gradients = PerDeviceView.gradients
    apply_update = _step.apply_update

    def with_code(self, config, layout, inputs):
        now["local code"] = inputs.batch["fault"][0]
        return differentiate(self, config, layout, inputs)

    def with_faulty_result(*args):
        grads, reducer = reduce(*args)
        return [
            at_site("reduced", x, now["local code"], i, len(grads)) for i, x in enumerate(grads)
        ], reducer

    def with_codes(self, config, layout):
        gradients = make_gradients(self, config, layout)

        def of_batch(params, batch, *args):
            now["codes"] = batch["fault"]
            return gradients(params, batch, *args)

        return of_batch

    def with_faulty_update(config, layout, *args):
        update = apply_update(config, layout, *args)
        specs = [plan.spec(sharded=config.placement.opt_state) for plan in layout.plans]
        specs += jax.tree.leaves(
            layout.specs.opt_state, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )
        leaves, treedef = jax.tree.flatten((update.params, update.opt_state))

        def run(codes, leaves):
            count = len(leaves)
            return [
                at_site("update", x, codes[0], i, count) if x.dtype == jnp.float32 else x
                for i, x in enumerate(leaves)
            ]

        rows = jax.sharding.PartitionSpec(config.axes.rows)
        run = jax.shard_map(
            run, mesh=config.mesh, in_specs=(rows, specs), out_specs=specs, check_vma=False
        )
        params, opt_state = treedef.unflatten(run(now["codes"], leaves))
        return update._replace(params=params, opt_state=opt_state)

    patch.setattr(MicroBatches, "gradients", with_code)
    patch.setattr(ExactSum, "__call__", with_faulty_result)
    patch.setattr(PerDeviceView, "gradients", with_codes)
    break_function(patch, apply_update, with_faulty_update, callers=(_step,))
    return now


def faulty(batch, fault, shift=0):
    """Return a batch with the code of a fault in the rows that its device gets."""
    codes = np.zeros(batch["fault"].shape, np.int32)
    if fault is not None and fault.site != "shard":
        position = (fault.device + shift) % (len(codes) // ROWS)
        codes[position * ROWS : (position + 1) * ROWS] = fault.code
    old = batch["fault"]
    return batch | {
        "fault": jax.device_put(codes, old.sharding) if isinstance(old, jax.Array) else codes
    }


def with_faulty_shard(state, fault, mesh):
    """Return a state that has the fault in the shard of one float leaf on one device."""
    leaves, treedef = jax.tree.flatten(state)
    floats = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]
    chosen = floats[fault.leaf % len(floats)]
    device = mesh.devices.flat[fault.device]
    code = jnp.asarray(fault.code)
    shards = []
    for shard in leaves[chosen].addressable_shards:
        data = np.asarray(shard.data)
        if shard.device == device:
            data = np.asarray(_damaged(data, code, True))
        shards.append(jax.device_put(data, shard.device))
    leaves[chosen] = jax.make_array_from_single_device_arrays(
        leaves[chosen].shape, leaves[chosen].sharding, shards
    )
    return treedef.unflatten(leaves)


_damaged = jax.jit(damaged)


def same_bits(a, b):
    """Return whether all shards of two states are equal bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes()
        for x, y in pairs
        for shard, other in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )


class Window(NamedTuple):
    """The result of a window of steps.

    Attributes:
      changed: whether the state after it differs from the state without the fault.
      error: the error of its verified step, or None.
    """

    changed: bool
    error: so.errors.SilentCorruptionError | None

    def names(self, device):
        """Return whether the error names this device alone."""
        return self.error is not None and self.error.devices == (device.id,)

    def suspects(self, device):
        """Return whether the error names this device, alone or with others."""
        return self.error is not None and device.id in self.error.devices


class Rig:
    """Runs windows of k steps, the last of them verified, with a fault in one of them."""

    def __init__(self, name, now, devices):
        self.name = name
        self.now = now
        self.opt = (strategies(devices) | further_strategies(devices))[name]()
        self.mesh = self.opt.mesh
        self.batches = list(itertools.islice(batches(4), 16))
        self.verification = Verification(self.opt, 1, None, num_steps=10**9)
        self.now.update(fault=None, stuck=False, runs=0)
        first = self.opt.init(first_params(name))
        self.state, _ = self.verification.take_step(first, self.batches[-1], 0, 0)
        self.recorded = self.verification.recorded
        self.clean = {}

    def window(self, every, first, fault=None, at=0, *, stuck=False):
        """Run `every` steps from the same state, on the batches from number `first`.

        The fault is in step `at` of the window; if it is stuck, also in the later ones.
        """
        key = every, first % len(self.batches)
        if key not in self.clean and fault is not None:
            self.window(every, first)
        state, error, self.verification.recorded = self.state, None, self.recorded
        for number in range(every):
            active = fault is not None and (number == at or (stuck and number > at))
            if active and fault.site == "shard" and number == at:
                state = with_faulty_shard(state, fault, self.mesh)
            batch = self.batches[(first + number) % len(self.batches)]
            if number < every - 1:
                state, _ = self.opt.step(copied(state), faulty(batch, fault if active else None))
                continue
            self.now.update(fault=fault if active else None, stuck=stuck, runs=0)
            try:
                self.verification.take_step(state, batch, 1 + number, 0)
            except so.errors.SilentCorruptionError as found:
                error = found
        last = self.now["first result"]
        if fault is None:
            self.clean[key] = last
        return Window(not same_bits(self.clean[key], last), error)


@jax.jit
def _copied(state):
    return jax.tree.map(jnp.copy, state)


def copied(state):
    """Return a copy of a state: a step takes over the memory of the state that it is given."""
    return _copied(state)
