"""Names of jax's elementwise primitives and matrix decompositions, in all supported releases.

Each element of an elementwise result depends only on the elements at the same position of the
operands. An operand has the shape of the result, or is a single number. More facts about some
primitives (their effect on zeros and sums, how their values grow) stand in the analyses that need
them.
"""

import sys

from jax.extend.core import Primitive

_LIBRARY: set[Primitive] = set()
_FOREIGN: set[Primitive] = set()


def library_name(primitive: Primitive) -> str:
    """Return the name of a primitive that jax or equinox defines.

    "" for any other primitive: it may have the name of one of theirs and do something else.
    """
    if primitive in _LIBRARY:
        return primitive.name
    if primitive not in _FOREIGN:
        _LIBRARY.update(defined_primitives())
        if primitive in _LIBRARY:
            return primitive.name
        _FOREIGN.add(primitive)
    return ""


def defined_primitives() -> set[Primitive]:
    """Return all primitives that modules of jax and equinox define."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("jax", "equinox")
    ]
    return {
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, Primitive)
    }


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


ARITHMETIC = words(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj"
    " convert_element_type cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag"
    " integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul ne neg"
    " nextafter not one_minus_square or polynomial population_count pow real reduce_precision rem"
    " round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt"
    " square sub tan tanh xor"
)
"""Cheap primitives: compilers fuse them into the operation that reads their result."""

SPECIAL = words(
    "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac polygamma"
    " regularized_incomplete_beta zeta"
)
"""Expensive primitives: functions that are computed by a series or a loop."""

IDENTITIES = words(
    "copy layout_constraint name pvary random_clone reshard sharding_constraint stop_gradient"
)
"""Primitives that change no value, only its placement, name or gradient. `device_put` is left out:
it has one result per operand.
"""

ELEMENTWISE = ARITHMETIC | SPECIAL | IDENTITIES | {"bitcast_convert_type"}
"""`bitcast_convert_type` between dtypes of different widths turns one element into several, or
several into one.
"""

DECOMPOSITIONS = words(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd"
    " symmetric_product triangular_solve tridiagonal tridiagonal_solve"
)
"""These act on the last two dims; all other dims count matrices."""
