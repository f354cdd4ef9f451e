"""`average_params`: an average of the parameters in the optimizer state, exponential or equal."""

import math

import jax
import jax.numpy as jnp
import optax

from shardopt.core import (
    AverageParamsState,
    calling,
    check_count,
    check_number,
    check_params,
    value_error,
    wide_dtype,
)

CALLER = "average_params"


@calling(CALLER)
def average_params(
    decay: float | None = None, half_life: float | None = None, *, start: int = 0, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Keep an average of the parameters.

    Put it last in the chain, so that it sees the new parameters.

    Let p_1, p_2, ... be the parameters after steps start + every, start + 2 every, ... The average
    takes in one after another.

    Args:
      decay: the share of the old average that stays, above 0 and below 1, for each p_n.
      half_life: in place of decay, the number of steps after which a p_n counts half: decay =
        2^(-every / half_life).
      start: steps before the average begins.
      every: steps between two parameters that the average takes in.

    Returns:
      An optax transformation. Its `update` needs the parameters.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if an argument is out of range, or both decay and half_life are set; in `update`,
        without parameters.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = optax.chain(optax.sgd(1.0), so.transforms.average_params(decay=0.5))
      >>> params = jnp.array(3.0)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.array(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), round(float(state[1].average), 4)  # (0.5 * 2 + 1 * 1) / 1.5
      (1.0, 1.3333)

    After n of them the average is

        a_n = a_{n-1} + w_n (p_n - a_{n-1})    with    w_n = (1 - decay) / (1 - decay^n).

    This is the exponential moving average that starts from 0, divided by 1 - decay^n: the bias
    correction of `optax.ema`. With neither decay nor half_life, w_n = 1 / n: all count alike, as in
    stochastic weight averaging. Until p_1 the average equals the parameters. Updates pass
    unchanged.

    `opt.evaluate(state, batch, params="average")`, `so.training.evaluation(..., params="average")`
    and `so.replace(state, params="average")` use the average.

    **Equivalence**: in every strategy the average equals the average of one device. With local
    updates each replica averages its own parameters, and the average that is read is the mean over
    the replicas.

    **Placement**: one copy of the trained parameters, in fp32 at least, sharded as the strategy
    shards optimizer state: as the parameters with fsdp. With `opt_state="matrices"` it stays
    with the parameters. `offload` moves it too.

    **Communication**: none in a step. Reading it gathers it where the parameters are not sharded.

    References:
      Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Izmailov
      et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018.
    """
    if decay is not None and half_life is not None:
        raise value_error(f"got decay={decay} and half_life={half_life}.", fix="pass one of them.")
    check_count("start", start, minimum=0)
    check_count("every", every)
    log_decay = 0.0
    if decay is not None:
        check_number("decay", decay, below=1.0, positive=True)
        log_decay = math.log(decay)
    if half_life is not None:
        check_number("half_life", half_life, positive=True)
        log_decay = -math.log(2) * every / half_life

    def init(params):
        # without a copy, the average and the parameters could share a buffer, which a step would
        # donate twice
        average = jax.tree.map(lambda p: jnp.array(p, wide_dtype(p.dtype), copy=True), params)
        return AverageParamsState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), average)

    @calling(CALLER)
    def update(updates, state, params=None, **_):
        new_params = optax.apply_updates(check_params(params), updates)
        num_steps = jnp.asarray(optax.safe_increment(state.num_steps))
        included = (num_steps > start) & ((num_steps - start) % every == 0)
        num_averaged = jnp.where(
            included, jnp.asarray(optax.safe_increment(state.num_averaged)), state.num_averaged
        )
        weight = jnp.where(
            included, _weight(log_decay, num_averaged), (num_averaged == 0).astype(float)
        )

        def add(average: jax.Array, param: jax.Array) -> jax.Array:
            difference = param.astype(average.dtype) - average
            moved = average + weight.astype(jnp.finfo(average.dtype).dtype) * difference
            # a weight of 1 takes the parameter bit for bit
            return jnp.where(weight == 1, param.astype(average.dtype), moved)

        average = jax.tree.map(add, state.average, new_params)
        return updates, AverageParamsState(num_steps, num_averaged, average)

    return optax.GradientTransformationExtraArgs(init, update)


def _weight(log_decay: float, count: jax.Array) -> jax.Array:
    """Return (1 - decay) / (1 - decay^count), or 1 / count for a decay of 1, without cancellation
    near 1.
    """
    number = jnp.maximum(count, 1).astype(jnp.result_type(float))
    return (
        1 / number
        if log_decay == 0
        else jnp.expm1(jnp.full_like(number, log_decay)) / jnp.expm1(number * log_decay)
    )
