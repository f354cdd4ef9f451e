"""jax's primitives that act element by element, and those that decompose matrices, by name, in all releases that are supported.

Of the former each element of the result is made of the elements at its place, and of nothing else; an operand has the
shape of the result, or is one number. What knows more of some of them (what they do to zeros, to sums, in what way they grow) says so
where it is needed.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARITHMETIC = _names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type cos cosh "
    "div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2 "
    "logistic lt lt_to max min mul ne neg nextafter not one_minus_square or polynomial population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "sub tan tanh xor"
)
"""What compilers fuse into whatever reads it."""

SPECIAL = _names(
    "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta"
)
"""Functions that are a series or a loop."""

IDENTITIES = _names("copy layout_constraint name pvary reshard sharding_constraint stop_gradient")
"""What changes no value, and says where it lives or what becomes of it. `device_put` has a result for each operand."""

ELEMENTWISE = ARITHMETIC | SPECIAL | IDENTITIES | {"bitcast_convert_type"}
"""Between widths `bitcast_convert_type` makes several elements of one, or one of several."""

DECOMPOSITIONS = _names(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product triangular_solve "
    "tridiagonal tridiagonal_solve"
)
"""Of the last two dims: all others count matrices."""
