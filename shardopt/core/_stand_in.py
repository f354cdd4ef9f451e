"""`StandIn`: an object in place of an array that a model does not have whole.

One function alone reads it.
"""

from typing import Any, ClassVar, Never

import jax

from shardopt.core._errors import format_error
from shardopt.trace._primitives import words

_OPERATORS = words(
    "abs add getitem matmul mul neg pow radd rmatmul rmul rpow rsub rtruediv sub truediv"
)


class StandIn:
    """An object in place of an array.

    Whatever would read it as an array is refused, with the remedy.

    Attributes:
      caller: the function that reads it.
      problem: a sentence that describes the object.
      fix: the right way to read it.
    """

    caller: ClassVar[str]
    problem: ClassVar[str]
    fix: ClassVar[str]

    def _refuse(self, *_: object) -> Never:
        """Refuse to be an array.

        Raises:
          TypeError: always.
        """
        raise TypeError(format_error(self.caller, self.problem, fix=self.fix))

    __jax_array__ = _refuse
    __array_ufunc__ = None  # numpy leaves operators to this class

    def __getattr__(self, name: str) -> Any:
        """Refuse the attributes of arrays, such as `T` and `reshape`.

        Raises:
          AttributeError: always.
        """
        is_of_arrays = not name.startswith("__") and hasattr(jax.Array, name)
        reason = (
            format_error(self.caller, self.problem, fix=self.fix)
            if is_of_arrays
            else f"no attribute {name!r}"
        )
        raise AttributeError(reason)


for _operator in _OPERATORS:
    setattr(StandIn, f"__{_operator}__", StandIn._refuse)
