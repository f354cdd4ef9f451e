"""`Rounding`: the model's choice for a weight that is rounded to 8 bits."""

from typing import Literal, NamedTuple

from jax.typing import DTypeLike

Precision = Literal["int8", "fp8"]


class Rounding(NamedTuple):
    """How `so.nn.quantized_einsum` rounds a weight.

    Attributes:
      precision: "int8" or "fp8".
      summed: how many of the first dims of the weight the product sums over. The others are
        channels.
      dtype: the dtype that the model casts the weight to before it is rounded; None keeps the dtype
        that it has.

    Example:
      >>> Rounding("int8", summed=2)  # of the weight [H, K, D] in the product "bthk,hkd->btd"
      Rounding(precision='int8', summed=2, dtype=None)
    """

    precision: Precision
    summed: int = 1
    dtype: DTypeLike | None = None

    @property
    def sum_dims(self) -> tuple[int, ...]:
        """The dims of the weight that the product sums over."""
        return tuple(range(self.summed))
