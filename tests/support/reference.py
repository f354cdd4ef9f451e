"""Single-device training in plain jax and optax: what every synchronous strategy is compared with."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core._types import leaves_with_paths
from support.mean_of import mean_and_updated

# eps well above the rounding of fp32 gradients: with the usual 1e-8 Adam turns the rounding of a
# gradient near zero into a whole step.
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4, weight_decay=1e-2),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, weight_decay_rate=1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-4)),
}


def train(
    tx,
    loss_fn,
    params,
    batches: Sequence,
    *,
    value_fn: bool = False,
    asks: Sequence[str] | None = None,
):
    """Return the losses, gradient norms and final parameters of plain training on whole batches.

    Leaves of floats that the loss returns as `Updated` get these values. `asks` names the extra arguments that the optimizer gets: by default value, gradient and, if
    asked for, value_fn."""
    trained = [
        i
        for i, leaf in enumerate(jax.tree.leaves(params))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    treedef = jax.tree.structure(params)

    def split(tree):
        return treedef.unflatten(
            [x if i in trained else None for i, x in enumerate(jax.tree.leaves(tree))]
        )

    def merge(tree):
        new = iter(jax.tree.leaves(tree))
        return treedef.unflatten(
            [next(new) if i in trained else x for i, x in enumerate(jax.tree.leaves(params))]
        )

    @jax.jit
    def step(part, opt_state, batch):
        def returned_at(part):
            return mean_and_updated(loss_fn(merge(part), batch))

        def loss_at(part, *_):
            return returned_at(part)[0]

        (loss, updated), grads = jax.value_and_grad(returned_at, has_aux=True)(part)
        known = {
            "value": loss,
            "grad": grads,
            "value_fn": loss_at,
            "obj_fn": loss_at,
            "grad_fn": jax.grad(loss_at),
        }
        names = ["value", "grad", *["value_fn"] * value_fn] if asks is None else asks
        extra = {name: known[name] for name in names}
        updates, opt_state = optax.with_extra_args_support(tx).update(
            grads, opt_state, part, **extra
        )
        leaves = dict(leaves_with_paths(optax.apply_updates(part, updates)))
        assert updated.keys() <= leaves.keys()
        part = jax.tree.structure(part).unflatten((leaves | updated).values())
        return part, opt_state, loss, optax.tree.norm(grads)

    part = split(params)
    opt_state = jax.jit(tx.init)(split(params))
    history = []
    for batch in batches:
        part, opt_state, loss, norm = step(part, opt_state, batch)
        history.append((float(loss), float(norm)))
    return history, jax.device_get(merge(part))


def jitted(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose `init` and `update` are one program each, for a loop that calls
    them op by op.
    """
    return optax.GradientTransformationExtraArgs(jax.jit(tx.init), jax.jit(tx.update))


def relative_difference(actual, expected) -> float:
    """Return the largest difference of any leaf, relative to that leaf's largest magnitude.

    NaN if there is a NaN.
    """
    worst = 0.0
    for a, b in zip(
        jax.tree.leaves(jax.device_get(actual)), jax.tree.leaves(expected), strict=True
    ):
        scale = np.max(np.abs(b)) or 1.0
        difference = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))) / scale
        worst = np.maximum(worst, difference)  # max() would drop a NaN
    return float(worst)


def trains_as_one_device(opt, case, tx):
    """Evaluate and train a strategy on a problem, and compare losses, norms and parameters with one
    device at 1e-10.
    """
    expected, final = train(tx, case.reference, case.params, case.batches)
    state = opt.init(case.params)
    np.testing.assert_allclose(
        opt.evaluate(state, case.batches[0])["loss"], expected[0][0], rtol=1e-10
    )
    history = []
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
        history.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert relative_difference(state.params, final) <= 1e-10
    np.testing.assert_allclose(history, expected, rtol=1e-10)


def same_bits(a, b):
    """Assert that two trees have the same leaves, bit for bit."""
    for x, y in zip(
        jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True
    ):
        assert (x.dtype, x.tobytes()) == (y.dtype, y.tobytes())
