"""Equal loads for experts: by an auxiliary loss, over the global batch or row by row, or by biases
that change the choice.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from shardopt.core import wide_dtype


def load_balancing_loss(
    load: Float[Array, "*dims E"], probability: Float[Array, "*dims E"]
) -> Float[Array, "*dims"]:
    """Return E sum_e load_e probability_e, the auxiliary loss of Switch: 1 if both are equal for
    all experts.

    Args:
      load: [..., E], the experts' shares of the choices, as in `RouterStatistics`. It is not
        differentiated, since it counts.
      probability: [..., E], mean probabilities.

    Returns:
      [...], in float32 at least.

    Raises:
      ValueError: if the two differ in shape.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> float(so.nn.load_balancing_loss(jnp.full(4, 0.25), jnp.full(4, 0.25)))
      1.0

    The loss is a product of two means. For the published loss, take both means over the global
    batch first. This needs a loss without micro-batches and pipeline:

        load, probability = so.losses.batch_mean((statistics.load, statistics.probability))
        loss += 0.01 * so.nn.load_balancing_loss(load, probability).mean()

    The loss of each row (DeepSeek-V3's sequence-wise loss) needs no other rows, and works
    everywhere:

        loss += 1e-4 * so.nn.load_balancing_loss(statistics.load, statistics.probability).mean()

    **Equivalence**: both are exact on any mesh. **Communication**: none by itself;
    `so.losses.batch_mean` sums 2 E numbers.

    References:
      Fedus, Zoph, Shazeer, "Switch Transformers", 2021, equation 4; DeepSeek-AI, "DeepSeek-V3",
      2024, equation 17.
    """
    _check_same_shape("load_balancing_loss", probability=probability, load=load)
    wide = wide_dtype(probability.dtype)
    return load.shape[-1] * jnp.sum(load.astype(wide) * probability.astype(wide), axis=-1)


def update_router_bias(
    bias: Float[Array, "*dims E"], load: Float[Array, "*dims E"], rate: float
) -> Float[Array, "*dims E"]:
    """Return bias + rate sign(mean(load) - load): balance the experts without a loss.

    Args:
      bias: [..., E], added to the scores; begin with 0.
      load: [..., E], the experts' shares of the choices in the last step; begin with 0, which
        changes nothing.
      rate: how much a bias changes in a step; 0.001 in DeepSeek-V3.

    Returns:
      [..., E], in the dtype of bias.

    Raises:
      ValueError: if the two differ in shape.

    Example:
      >>> import jax.numpy as jnp, shardopt as so
      >>> so.nn.update_router_bias(jnp.zeros(3), jnp.array([0.5, 0.25, 0.25]), 0.5).tolist()
      [-0.5, 0.5, 0.5]

    An expert that got more than its share becomes less likely to be chosen, by a fixed rate. Store
    two frozen leaves, `bias` and `load`. Begin the loss with the bias that follows from the load of
    the last step:

        bias = so.nn.update_router_bias(params["bias"], params["load"], 1e-3)
        y, statistics = so.nn.mixture_of_experts(..., bias=bias)
        aux["router"] = so.losses.Updated({"bias": bias, "load": statistics.load.mean(axis=0)})

    **Equivalence**: exact with micro-batches, in pipelines and on any number of devices. New loads
    are means over rows. All devices compute the same bias, since they compute it from stored
    numbers. **Communication**: 2 E numbers, by `so.losses.Updated`.

    References:
      Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
      algorithm 1; DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2.
    """
    _check_same_shape("update_router_bias", bias=bias, load=load)
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load).astype(bias.dtype)


def _check_same_shape(caller: str, **arrays: Array) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
        raise ValueError(f"{caller}: {listed}.")
