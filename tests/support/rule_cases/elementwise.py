"""Cases of equations that work entry by entry, and of equations that change no entry."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding, reshard

from shardopt.separability._relations import Same
from support.relation_meaning import Operand, RuleCase, draw_operands, draw_relation, draw_shapes

FLOATS = ("float64", "float64", "float32", "bfloat16", "float16")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
REALS = FLOATS + INTEGERS
COMPLEX = ("complex128", "complex64")
UNARY = """acos acosh asin asinh atan atanh bessel_i0e bessel_i1e ceil cos cosh digamma erf erf_inv erfc exp2
    expm1 lgamma log1p logistic round sinh tan""".split()  # noqa: SIM905
"""Functions of a float that have one rule: nothing is known of them but that they go entry by entry."""


def entry_by_entry(
    function: Callable[..., Any], arity: int, dtypes: tuple[str, ...], rng: np.random.Generator
) -> RuleCase:
    """Return a case of a function of operands of one shape and dtype."""
    num_pieces = int(rng.choice([2, 2, 3, 4]))
    shapes = draw_shapes(rng, num_pieces, int(rng.integers(0, 4)))
    dtype = jnp.dtype(rng.choice(dtypes))
    operands = draw_operands(rng, shapes, dtype, num_pieces, arity)
    return RuleCase(operands, (function, function), num_pieces)


def converted(rng: np.random.Generator) -> RuleCase:
    """Return a case of a conversion between any two dtypes."""
    dtypes = (*REALS, "bool", "float8_e4m3fn")
    target = jnp.dtype(rng.choice(dtypes))
    sources = [name for name in dtypes if _is_as_fine(jnp.dtype(name), target)]
    return entry_by_entry(lambda x: lax.convert_element_type(x, target), 1, tuple(sources), rng)


def _is_as_fine(dtype: np.dtype, target: np.dtype) -> bool:
    """Return whether numbers of a dtype, converted, have the target's range and roundings only."""
    if jnp.issubdtype(dtype, jnp.floating):
        return target.kind != "f" or dtype.itemsize >= target.itemsize
    return target != jnp.float16 or dtype.itemsize == 1


def selected(rng: np.random.Generator) -> RuleCase:
    """Return a case of a choice between two or three cases."""
    num_cases = int(rng.integers(2, 4))
    case = entry_by_entry(lax.select_n, 1 + num_cases, REALS, rng)
    shapes = case.operands[0].shapes
    index_dtype = np.dtype(bool if num_cases == 2 else np.int32)
    relation = draw_relation(rng, shapes, index_dtype, case.num_pieces)
    if rng.random() < 0.5:
        relation = draw_relation(rng, shapes, index_dtype, case.num_pieces, (Same,))
    index = Operand(
        relation,
        shapes,
        index_dtype,
        # 2 and 3 are out of bounds, but not after a division by a ratio
        lambda rng, shape, dtype: rng.integers(0, 2 * num_cases - 2, shape).astype(dtype),
    )
    return RuleCase([index, *case.operands[1:]], case.functions, case.num_pieces)


def counted(rng: np.random.Generator) -> RuleCase:
    """Return a case of a count along a dim: of rows, or of more numbers than the proof computes."""
    num_pieces = int(rng.choice([2, 3]))
    dim = int(rng.integers(2))
    length = int(rng.choice([3, 5000]))
    dtype = np.dtype(rng.choice(["int8", "uint32", "int64", "float32"]))
    times = num_pieces
    if rng.random() < 0.3:  # more than is computed
        length = 2**21 + 8
        dtype = np.dtype("int8")
        dim = 0
        times = 1

    def function(rows: int, length: int) -> Callable[..., Any]:
        shape = (length, rows) if dim == 0 else (rows, length)
        return lambda x: lax.broadcasted_iota(dtype, shape, dim)

    whole_length = length * int(rng.choice([1, 1, num_pieces]))
    functions = function(2 * times, whole_length), function(2, length)
    return RuleCase([Operand(Same(), ((), ()))], functions, num_pieces)


def divided_numbers(function: Callable[..., Any], rng: np.random.Generator) -> RuleCase:
    """Return a case of a quotient or a remainder of integers that the trace knows.

    The integers of a piece may be a little smaller.
    """
    dtype = np.dtype(rng.choice(["int8", "int32", "int64"]))
    number, divisor = rng.choice([-7, -4, -3, 4, 7]), rng.choice([-2, 2, 3])
    numbers = number, number - int(rng.integers(2))

    def of(number: int) -> Callable[[jax.Array], jax.Array]:
        quotient = functools.partial(function, np.asarray(number, dtype))
        return lambda x: x + quotient(jnp.asarray(divisor, dtype))

    return RuleCase([Operand(Same(), ((), ()))], (of(numbers[0]), of(numbers[1])), 2)


def of_platform(x: jax.Array) -> jax.Array:
    """Return another function of a value on each platform."""
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def with_callback(x: jax.Array) -> jax.Array:
    """Return a value that the host sees too."""
    jax.debug.callback(lambda _: None, x)
    return x


def printed(x: jax.Array) -> jax.Array:
    """Return a value that is printed."""
    jax.debug.print("{}", x)
    return x


def resharded(x: jax.Array) -> jax.Array:
    """Return a value that is placed on a mesh."""
    mesh = jax.make_mesh((1,), ("z",), axis_types=(jax.sharding.AxisType.Explicit,))
    return reshard(x, NamedSharding(mesh, PartitionSpec()))


def constrained(x: jax.Array) -> jax.Array:
    """Return a value that is placed on the first device."""
    return lax.with_sharding_constraint(x, SingleDeviceSharding(jax.devices()[0]))


def laid_out(x: jax.Array) -> jax.Array:
    """Return a value whose dims are stored in this order."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _rows(table: dict[str, Callable[..., Any]], arity: int, dtypes: tuple[str, ...]) -> dict:
    return {
        name: [functools.partial(entry_by_entry, function, arity, dtypes)]
        for name, function in table.items()
    }


CASES = {
    **_rows({"sin": jnp.sin, "tanh": lax.tanh, "exp": lax.exp, "log": lax.log, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt, "is_finite": lax.is_finite, "floor": lax.floor, "abs": lax.abs, "reduce_precision": lambda x: lax.reduce_precision(x, 8, 3)}, 1, FLOATS),
    **_rows({"neg": lax.neg, "sign": lax.sign, "square": lax.square, "integer_pow": lambda x: lax.integer_pow(x, 3), "stop_gradient": lambda x: jax.lax.stop_gradient(x), "copy": lax.copy_p.bind}, 1, REALS),
    **_rows({"add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min, "rem": lax.rem, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}, 2, REALS),
    **_rows({"atan2": lax.atan2, "pow": lax.pow, "nextafter": lax.nextafter}, 2, ("float64", "float32")),
    **_rows({"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}, 2, (*INTEGERS, "bool")),
    **_rows({"clamp": lax.clamp}, 3, REALS),
    "convert_element_type": [converted],
    "select_n": [selected],
    **_rows({name: getattr(lax, name) for name in UNARY}, 1, FLOATS),
    **_rows({name: getattr(lax, name) for name in ("clz", "population_count")}, 1, INTEGERS),
    **_rows({"not": lax.bitwise_not}, 1, (*INTEGERS, "bool")),
    **_rows({name: getattr(lax, name) for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical")}, 2, INTEGERS),
    **_rows({name: getattr(lax, name) for name in ("igamma", "igammac", "polygamma", "zeta")}, 2, ("float64", "float32")),
    **_rows({"igamma_grad_a": lax.igamma_grad_a}, 2, ("float64", "float32")),
    **_rows({"regularized_incomplete_beta": lax.betainc}, 3, ("float64", "float32")),
    **_rows({"add_any": primitives.add_jaxvals_p.bind}, 2, REALS),
    **_rows({"name": lambda x: checkpoint_name(x, "x"), "optimization_barrier": lax.optimization_barrier}, 1, REALS),
    **_rows({"bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")}, 1, FLOATS),
    **_rows({"complex": lax.complex}, 2, ("float64", "float32")),
    **_rows({"real": lax.real, "imag": lax.imag, "conj": lax.conj}, 1, COMPLEX),
    **_rows({"eq_to": primitives.eq_to_p.bind, "le_to": primitives.le_to_p.bind, "lt_to": primitives.lt_to_p.bind}, 2, FLOATS),
    **_rows({"reshard": resharded, "sharding_constraint": constrained, "layout_constraint": laid_out, "device_put": jax.device_put}, 1, REALS),
    **_rows({"debug_callback": with_callback, "debug_print": printed, "platform_index": of_platform}, 1, ("float64", "float32")),
    "iota": [counted],
}  # fmt: skip
for name in ("div", "rem"):
    CASES[name].append(functools.partial(divided_numbers, getattr(lax, name)))
if hasattr(lax, "log2_p"):  # jax 0.12
    CASES |= _rows({"log2": lax.log2, "one_minus_square": lax.one_minus_square}, 1, FLOATS)
if hasattr(lax, "polynomial"):  # jax 0.12.0.1
    CASES |= _rows(
        {"polynomial": lambda x, *coefficients: lax.polynomial(x, coefficients)}, 3, FLOATS
    )
