"""Weights that are rounded to 8 bits, as blocks get them."""

import jax

from shardopt.low_precision._weight import RoundedForm, RoundedWeight


def rounded_weight(weight: jax.Array, form: RoundedForm) -> RoundedWeight:
    """Return a weight as a block gets it that gathered it; here one device has all of it."""
    encoded = form.encode(weight, ())
    return encoded.decode(encoded.arrays)
