"""`stochastic_round`: parameters in bfloat16 that lose nothing on average."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.arguments import check_count, check_params, check_transformation
from shardopt.core.types import PyTree

WHO = "stochastic_round"


class StochasticRoundState(NamedTuple):
    """The state of `stochastic_round`.

    Attributes:
      key: uint32 key data; step n draws from `fold_in(key, n)`.
      step: int32, steps taken.
      inner: the state of the wrapped transformation, of parameters in fp32.
    """

    key: jax.Array
    step: jax.Array
    inner: PyTree


def stochastic_round(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Round bfloat16 parameters up or down at random after each step, so that small updates are not lost.

    `inner` sees parameters and gradients in fp32. With p' = p + its update, a bfloat16 parameter becomes one of the two bfloat16
    numbers around p', each as likely as the other one is far, so that its expectation is p'; the update that is returned leads
    there exactly. Leaves of other dtypes get the update of `inner` as it is.

    **Equivalence**: to `inner` in fp32 in expectation of a step. What is drawn depends on seed, step and leaf, not on the number of
    devices, so that training is equal to one device.

    **Placement**: the state of `inner`, in fp32, and a key; no fp32 copy of the parameters.

    **Communication**: none of its own.

    Args:
      inner: an optax transformation.
      seed: of what is drawn.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `seed` is negative; in `update`, without parameters.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.stochastic_round(optax.sgd(1.0))
      >>> params = jnp.ones(1000, jnp.bfloat16)  # the next below is 1 - 2^-8
      >>> updates, _ = tx.update(jnp.full(1000, 2.0**-10), tx.init(params), params)
      >>> new = optax.apply_updates(params, updates)
      >>> sorted(set(new.tolist())), bool(abs(new.astype(jnp.float32).mean() - (1 - 2.0**-10)) < 2e-4)
      ([0.99609375, 1.0], True)

    References:
      Zamirai, Zhang, Aberger and De Sa, "Revisiting BFloat16 Training", 2020, section 4.1.
    """
    tx = check_transformation(WHO, "inner", inner)
    check_count(WHO, "seed", seed, least=0)

    def init(params):
        key = jax.random.key_data(jax.random.key(seed))
        return StochasticRoundState(key, jnp.zeros((), jnp.int32), tx.init(_wide(params)))

    def update(updates, state, params=None, **extra_args: Any):
        params = check_params(WHO, params)
        found, inner_state = tx.update(_wide(updates), state.inner, _wide(params), **extra_args)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        leaves, treedef = jax.tree.flatten(found)
        new = [
            _rounded(jax.random.fold_in(key, i), p, u) if p.dtype == jnp.bfloat16 else u
            for i, (p, u) in enumerate(zip(treedef.flatten_up_to(params), leaves, strict=True))
        ]
        return treedef.unflatten(new), StochasticRoundState(state.key, state.step + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def _rounded(key: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the update in fp32 that leads from a bfloat16 parameter to one of the two nearest to their sum."""
    start = param.astype(jnp.float32)
    wanted = start + update.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wanted, jnp.uint32)
    noise = jax.random.bits(key, wanted.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(wanted), rounded, wanted) - start
