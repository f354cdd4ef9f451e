"""nnx modules through so.interop.nnx: statistics, new masks each step, trained leaves, and the way
back into a module.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardopt as so

DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(32, 6)).astype(np.float32), "y": DRAW.integers(0, 3, 32)}


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.up = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(16, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(6))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x * self.scale[None])


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.LoRALinear(6, 3, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def kept(model, batch):
    """Return, as the loss, a number that tells which inputs were dropped; 1 if none was."""
    out = model(jnp.ones_like(batch["x"]))
    places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
    masked_mean = jnp.sum(out * places) / jnp.sum(places)
    return masked_mean, {"told": masked_mean}


def test_a_module_trains_as_nnx_trains_it_with_its_statistics(mesh_of):
    tx = optax.sgd(0.1, momentum=0.9)
    model = Net(nnx.Rngs(3))
    params, loss_fn, rules = so.interop.nnx(model, cross_entropy)
    opt = so.fsdp(tx, mesh_of(data=1), loss_fn, rules=rules, min_shard_elements=1)
    state = opt.init(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(cross_entropy)(model, batch)
        optimizer.update(model, grads)
        return loss

    for _ in range(3):
        state, metrics = opt.step(state, BATCH)
        losses.append((float(metrics["loss"]), float(train_step(model, optimizer, BATCH))))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
    other = Net(nnx.Rngs(9))
    nnx.update(other, state.params)
    assert other.calls[...] == model.calls[...] == 3
    for leaf, two in zip(
        jax.tree.leaves(nnx.state(other)), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            np.testing.assert_allclose(leaf, two, rtol=2e-5, atol=2e-6)

    evaluated = opt.evaluate(state, BATCH)["loss"]
    other.eval()
    np.testing.assert_allclose(evaluated, nnx.jit(cross_entropy)(other, BATCH), rtol=1e-5)
    assert state.params["calls"][...] == 3  # evaluating changes nothing


@pytest.mark.slow
def test_every_step_has_a_mask_of_its_own_and_evaluation_none(mesh_of):
    params, loss_fn, rules = so.interop.nnx(Dropped, kept)
    assert rules == ()
    key = jax.random.key(0)
    keys = jax.random.split(key, 4)
    initial_params = params(key)
    assert sorted(initial_params) == ["scale"]
    losses = {float(loss_fn(initial_params, BATCH, rng=mask_key)[0]) for mask_key in keys}
    assert len(losses) == 4
    assert float(loss_fn(initial_params, BATCH)[0]) == 1.0
    opt = so.ddp(optax.sgd(0.0), mesh_of(data=2), loss_fn, view="unproved")
    state = opt.init(params, key)
    seen = []
    for _ in range(3):
        state, metrics = opt.step(state, BATCH)
        seen.append(float(metrics["told"]))
    assert len(set(seen)) == 3
    assert opt.evaluate(state, BATCH)["told"] == 1.0


@pytest.mark.slow
def test_stacked_modules_have_a_key_each():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return Dropped(rngs)

    @nnx.vmap(in_axes=(0, None))
    def run(model, x):
        return model(x)

    params, loss_fn, _ = so.interop.nnx(
        lambda rngs: stack(rngs), lambda model, x: run(model, x).sum(0)[0, 0]
    )
    outputs = {
        float(loss_fn(params(jax.random.key(0)), jnp.ones((1, 6)), rng=jax.random.key(n)))
        for n in range(9)
    }
    assert outputs <= {0.0, 2.0, 4.0, 6.0}
    assert not outputs <= {0.0, 6.0}  # as it would be were the masks the same


def test_what_wrt_leaves_out_is_frozen(mesh_of):
    params, loss_fn, rules = so.interop.nnx(Adapted(nnx.Rngs(0)), cross_entropy, wrt=nnx.LoRAParam)
    assert rules == (("^linear/bias/value$", "frozen"), ("^linear/kernel/value$", "frozen"))
    opt = so.zero(optax.adam(1e-2), mesh_of(data=2), loss_fn, rules=rules)
    state, _ = opt.step(opt.init(params), BATCH)
    np.testing.assert_array_equal(
        state.params["linear"]["kernel"][...], params["linear"]["kernel"][...]
    )
    lora = [tree["linear"]["lora"]["lora_b"][...] for tree in (state.params, params)]
    assert (lora[0] != lora[1]).any()
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * 2


def test_a_model_with_its_keys_passed_as_parameters_is_refused(mesh_of):
    graph, module_state = nnx.split(Dropped(nnx.Rngs(0)))

    def loss_fn(params, batch):
        return nnx.merge(graph, params)(batch["x"]).mean()

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn).init(module_state)
    assert (
        str(caught.value)
        == "ddp: 1 parameter leaf would be the same random key at every step, with the same"
        " dropout.\n  dropout/rngs/key/value\nFix: let the loss take a keyword rng, a new key"
        " each step, and leave keys out of the parameters (so.interop.nnx does both for an nnx"
        " module); or freeze them by rules=[(regex, 'frozen')] if they are to stay as they are."
    )
    so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn, rules=[("rngs/key", "frozen")]).specs(
        module_state
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: so.interop.nnx(3, cross_entropy),
            TypeError,
            "interop.nnx: model must be an nnx.Module, or a function rngs -> nnx.Module, got int.",
        ),
        (
            lambda: so.interop.nnx(lambda rngs: 3, cross_entropy),
            TypeError,
            (
                "interop.nnx: model must be an nnx.Module, or a function rngs -> nnx.Module, got"
                " function."
            ),
        ),
        (
            lambda: so.interop.nnx(Dropped, cross_entropy, wrt=nnx.LoRAParam),
            ValueError,
            (
                "interop.nnx: wrt=<class 'flax.nnx.nn.lora.LoRAParam'> matches nothing that Dropped"
                " holds.\nFix: pass a filter of nnx, such as nnx.Param."
            ),
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
