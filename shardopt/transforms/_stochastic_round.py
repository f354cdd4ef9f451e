"""`stochastic_round`: round bfloat16 parameters at random, without bias."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import PyTree, calling, check_count, check_params, check_transformation

CALLER = "stochastic_round"


class StochasticRoundState(NamedTuple):
    """The state of `stochastic_round`.

    Attributes:
      key: uint32 key data; step n draws from `fold_in(key, n)`.
      step: int32, the number of steps taken.
      inner: the state of the wrapped transformation, for parameters in fp32.
    """

    key: jax.Array
    step: jax.Array
    inner: PyTree


@calling(CALLER)
def stochastic_round(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Round bfloat16 parameters up or down at random after each step, so that small updates are not
    lost.

    `inner` gets parameters and gradients in fp32. Let p' = p + update. A bfloat16 parameter becomes
    one of the two bfloat16 numbers around p', with probabilities such that its expectation is p'.
    The returned update leads there exactly. Leaves of other dtypes get the update of `inner`
    unchanged.

    Args:
      inner: an optax transformation.
      seed: the seed of the random numbers.

    Returns:
      An optax transformation.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `seed` is negative; in `update`, without parameters.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.stochastic_round(optax.sgd(1.0))
      >>> params = jnp.ones(1000, jnp.bfloat16)  # the next smaller number is 1 - 2^-8
      >>> updates, _ = tx.update(jnp.full(1000, 2.0**-10), tx.init(params), params)
      >>> new = optax.apply_updates(params, updates)
      >>> sorted(set(new.tolist())), bool(abs(new.astype(jnp.float32).mean() - (1 - 2.0**-10)) < 2e-4)
      ([0.99609375, 1.0], True)

    **Equivalence**: a step equals `inner` in fp32 in expectation. Random numbers depend on seed,
    step and leaf, not on the number of devices, so training equals training on one device.

    **Placement**: the state of `inner` in fp32, and a key. There is no fp32 copy of the parameters.

    **Communication**: none, except the communication of `inner`.

    References:
      Zamirai, Zhang, Aberger and De Sa, "Revisiting BFloat16 Training", 2020, section 4.1.
    """
    tx = check_transformation("inner", inner)
    check_count("seed", seed, minimum=0)

    def init(params):
        key = jax.random.key_data(jax.random.key(seed))
        return StochasticRoundState(key, jnp.zeros((), jnp.int32), tx.init(_widen(params)))

    @calling(CALLER)
    def update(updates, state, params=None, **extra_args: Any):
        params = check_params(params)
        inner_updates, inner_state = tx.update(
            _widen(updates), state.inner, _widen(params), **extra_args
        )
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        leaves, treedef = jax.tree.flatten(inner_updates)
        rounded_updates = [
            # By the number of the leaf, and over its global shape: the bits do not depend on the
            # mesh.
            _rounded_update(jax.random.fold_in(key, i), p, u) if p.dtype == jnp.bfloat16 else u
            for i, (p, u) in enumerate(zip(treedef.flatten_up_to(params), leaves, strict=True))
        ]
        return treedef.unflatten(rounded_updates), StochasticRoundState(
            state.key, state.step + 1, inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def _rounded_update(key: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
    """Return the fp32 update from a bfloat16 parameter to one of the two bfloat16 numbers around
    param + update.
    """
    old_param = param.astype(jnp.float32)
    new_param = old_param + update.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(new_param, jnp.uint32)
    # bfloat16 is the upper half of a float32. Random bits added to the lower half carry into the
    # upper half with a probability of lower / 2^16, which makes the rounding unbiased.
    noise = jax.random.bits(key, new_param.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    # A carry could run through all bits of a NaN and leave -0.
    return jnp.where(jnp.isfinite(new_param), rounded, new_param) - old_param
