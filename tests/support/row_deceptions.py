"""Further classes of losses that a proof of separability can get wrong. They have loops of another
length than the rows, functions inside of primitives, or names of jax's own functions. Some have
rules that look at differentiated operands, or metrics that look like a sum or an extreme over rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.lax import gather_p

import shardopt as so
from support.row_classes import Case, cases, errors, hidden, rows_of


def per_turn(p: Any) -> jax.Array:
    return jnp.sum(p["w"] ** 2)


def added(turns: Any) -> Any:
    """Return the mean error plus a penalty that is added `turns(rows)` times, over the rows."""

    def loss(p: Any, b: Any) -> jax.Array:
        total = jax.lax.fori_loop(0, turns(rows_of(b)), lambda _, c: c + per_turn(p), 0.0)
        return jnp.mean(errors(p, b)) + total / rows_of(b)

    return loss


def scanned(p: Any, b: Any, length: int) -> jax.Array:
    return jax.lax.scan(lambda c, _: (c + per_turn(p), per_turn(p)), 0.0, None, length=length)[0]


LOOPS = cases({
    "all turns but one": added(lambda B: B - 1),
    "a turn more": added(lambda B: B + 1),
    "as many turns as pairs of rows": added(lambda B: B * (B - 1) // 2),
    "half of the turns, rounded up": added(lambda B: (B + 1) // 2 + 1),
    "a constant and the rows": added(lambda B: B + 7),
    "a scan of another length": lambda p, b: jnp.mean(errors(p, b)) + scanned(p, b, rows_of(b) - 2) / rows_of(b),
    "a weight that a loop counts": lambda p, b: so.losses.Weighted(
        jnp.sum(errors(p, b)), jax.lax.fori_loop(0, rows_of(b) - 1, lambda _, c: c + 1.0, 0.0)
    ),
    "a sum that a loop counts": lambda p, b: (
        jnp.mean(errors(p, b)),
        {"turns": so.losses.Sum(jax.lax.fori_loop(0, rows_of(b) - 1, lambda _, c: c + 1.0, 0.0))},
    ),
    "vectors of a loop": lambda p, b: jnp.mean(errors(p, b)) + jnp.sum(
        jax.lax.fori_loop(0, rows_of(b) + 2, lambda _, c: c + p["scale"], jnp.zeros(4))
    ) / rows_of(b),
    "rows backwards, one less": lambda p, b: jax.lax.scan(
        lambda c, x: (c + jnp.sum(x * p["scale"]), None), 0.0, b["x"][1:], reverse=True
    )[0] / rows_of(b),
    "counted into a bin": lambda p, b: jnp.mean(errors(p, b)) + jax.lax.fori_loop(
        0, rows_of(b) - 1, lambda _, c: c.at[0].add(per_turn(p)), jnp.zeros(3)
    )[0] / rows_of(b),
})  # fmt: skip


# --- rules that look at the differentiated operands ------------------------------------------------


@jax.custom_vjp
def product(x, y):
    return x * y


def product_forward(x, y):
    return x.value * y.value, (x.value, y.value, x.perturbed)


def product_backward(residuals, ct):
    x, y, x_is_differentiated = residuals
    slope = ct * x
    return ct * y, slope if x_is_differentiated else slope - slope.mean(0)


product.defvjp(product_forward, product_backward, symbolic_zeros=True)


@jax.custom_vjp
def plain_product(x, y):
    return x * y


def plain_backward(residuals, ct):
    x, y = residuals
    slope = ct * x
    return ct * y, slope


plain_product.defvjp(lambda x, y: (x * y, (x, y)), plain_backward)


@jax.custom_jvp
def product_by_tangents(x, y):
    return x * y


def _product_tangents(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    if isinstance(x_dot, SymbolicZero):
        return x * y, x * y_dot - (x * y_dot).mean(0)
    return x * y, x_dot * y + x * y_dot


product_by_tangents.defjvp(_product_tangents, symbolic_zeros=True)


@jax.custom_vjp
def both_outputs(x):
    return jnp.sin(x), jnp.cos(x)


def _both_backward(x, cts):
    of_sin, of_cos = cts
    if isinstance(of_cos, SymbolicZero):
        return (of_sin * jnp.cos(x) - (of_sin * jnp.cos(x)).mean(0),)
    return (of_sin * jnp.cos(x) - of_cos * jnp.sin(x),)


both_outputs.defvjp(
    lambda x: ((jnp.sin(x.value), jnp.cos(x.value)), x.value), _both_backward, symbolic_zeros=True
)


@jax.custom_jvp
def scaled_by_count(x, y):
    return x * y


def _scaled_tangents(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    share = 1 / x.shape[0] if isinstance(x_dot, SymbolicZero) else 1.0
    x_term = 0.0 if isinstance(x_dot, SymbolicZero) else x_dot * y
    return x * y, x_term + x * y_dot * share


scaled_by_count.defjvp(_scaled_tangents, symbolic_zeros=True)

SYMBOLIC_ZEROS = cases({
    "a backward rule": lambda p, b: jnp.mean(product(b["x"], b["x"] * p["scale"])),
    "a jvp rule": lambda p, b: jnp.mean(product_by_tangents(b["x"], b["x"] * p["scale"]) * b["x"]),
    "a result without a cotangent": lambda p, b: jnp.mean(both_outputs(b["x"] * p["scale"])[0] * b["x"]),
    "over the count": lambda p, b: jnp.mean(scaled_by_count(b["x"], b["x"] * p["scale"])),
    "on a piece alone": lambda p, b: jnp.mean(
        (plain_product if rows_of(b) == 8 else product)(b["x"], b["x"] * p["scale"])
    ),
    "in a scan": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, _: (product(b["x"], c), None), b["x"] * p["scale"], None, length=2)[0]
    ),
    "in jit": lambda p, b: jnp.mean(jax.jit(product_by_tangents)(b["x"], b["x"] * p["scale"]) * b["x"]),
})  # fmt: skip


# --- functions inside of primitives ----------------------------------------------------------------


def _mean_twice(p: Any, b: Any) -> jax.Array:
    means = jnp.stack([jnp.mean(errors(p, b)), jnp.mean(hidden(p, b))])
    return jax.lax.stop_gradient(means)  # a function in a scatter has no derivative


SUB_PROGRAMS = cases({
    "a sine of a mean": lambda p, b: jnp.sum(_mean_twice(p, b).at[0].apply(jnp.sin)),
    "a square of a mean": lambda p, b: jnp.sum(_mean_twice(p, b).at[jnp.array([0, 1])].apply(jnp.square)),
    "a shifted mean, over the count": lambda p, b: jnp.sum(
        _mean_twice(p, b).at[1].apply(lambda x: x * 3.0 + x**2)
    ),
    "a sum to a power": lambda p, b: jnp.sum(_mean_twice(p, b).at[0].power(2)),
    "a product of all rows": lambda p, b: jax.lax.reduce(
        1 + 0.1 * errors(p, b), np.float64(1), jax.lax.mul, (0,)
    ),
    "a reduction by a function": lambda p, b: jax.lax.reduce(
        errors(p, b), np.float64(0), lambda x, y: x + y + 0.1 * x * y, (0,)
    ) / rows_of(b),
})  # fmt: skip


# --- names of others --------------------------------------------------------------------------------


def imitated(name: str, f: Any) -> Any:
    """Return a primitive that has the name of another one, and computes `f`."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(f)
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=False))
    ad.primitive_jvps[primitive] = lambda primals, tangents: jax.jvp(f, primals, tangents)
    batching.primitive_batchers[primitive] = lambda args, dims: (jax.vmap(f)(*args), 0)
    return primitive.bind


def less_mean(x: jax.Array) -> jax.Array:
    return x - x.mean(0)


def named(name: str, f: Any) -> Any:
    f.__name__ = name
    return jax.jit(f)


def _reversed_rows(x: jax.Array, i: jax.Array) -> jax.Array:
    return x[::-1] if x.shape[0] == 8 else x * (i >= 0)


def less_the_mean_of_rows(values: Any, indices: Any, **params: Any) -> jax.Array:
    return gather_p.bind(values - values.mean(0, keepdims=True), indices, **params)


def shape_of_gather(values: Any, indices: Any, **params: Any) -> jax.core.ShapedArray:
    gathered = jax.eval_shape(lambda *args: gather_p.bind(*args, **params), values, indices)
    return jax.core.ShapedArray(gathered.shape, gathered.dtype)


GATHER = Primitive("gather")
GATHER.def_impl(less_the_mean_of_rows)
GATHER.def_abstract_eval(shape_of_gather)
mlir.register_lowering(GATHER, mlir.lower_fun(less_the_mean_of_rows, multiple_results=False))


@jax.jit
def looked_up_along(values: Any, indices: Any) -> jax.Array:
    """Do the equations of `jnp.take_along_axis`, with another primitive in place of its gather."""
    call = jax.make_jaxpr(lambda x, i: jnp.take_along_axis(x, i, 1))(values, indices).eqns[0]
    closed = call.params["jaxpr"]
    numbers = dict(zip(closed.jaxpr.invars, (values, indices), strict=True))
    for eqn in closed.jaxpr.eqns:
        primitive = GATHER if eqn.primitive is gather_p else eqn.primitive
        operands = [x.val if isinstance(x, Literal) else numbers[x] for x in eqn.invars]
        numbers[eqn.outvars[0]] = primitive.bind(*operands, **eqn.params)
    return numbers[closed.jaxpr.outvars[0]]


NAMES = cases({
    "the gather of take_along_axis": Case(
        lambda p, b: jnp.mean(looked_up_along(b["x"], b["label"][:, None] % 2) * p["w"][0, 0]), pieces=8
    ),
    "tanh": lambda p, b: jnp.mean(imitated("tanh", less_mean)(b["x"] @ p["w"]) ** 2),
    "neg": lambda p, b: jnp.mean(imitated("neg", less_mean)(hidden(p, b)) ** 2),
    "copy": lambda p, b: jnp.mean(imitated("copy", less_mean)(hidden(p, b)) ** 2),
    "stop_gradient": lambda p, b: jnp.mean(imitated("stop_gradient", less_mean)(hidden(p, b)) ** 2),
    "reduce_precision": lambda p, b: imitated("name", jnp.square)(jnp.mean(hidden(p, b))),
    "take_along_axis": lambda p, b: jnp.mean(
        named("take_along_axis", lambda x, i: _reversed_rows(x, i))(errors(p, b), b["label"])
        * b["x"][:, 0]
    ),
    "shardopt_row_maximum": lambda p, b: jnp.mean(
        named("shardopt_row_maximum", lambda x: x - x.mean(0))(hidden(p, b)) ** 2
    ),
})  # fmt: skip


# --- metrics ----------------------------------------------------------------------------------------


def with_metric(metric: Any) -> Any:
    return lambda p, b: (jnp.mean(errors(p, b)), {"metric": metric(p, b)})


METRICS = cases({name: with_metric(metric) for name, metric in {
    "the bits of all labels": lambda p, b: so.losses.Max(jnp.bitwise_or.reduce(1 << b["tokens"][:, 0])),
    "the bits that all labels have": lambda p, b: so.losses.Min(jnp.bitwise_and.reduce(63 - (1 << b["tokens"][:, 0]))),
    "the largest, wrapped": lambda p, b: so.losses.Max((b["label"] * 100).max().astype(jnp.int8)),
    "the largest, as unsigned": lambda p, b: so.losses.Max((b["label"] - 2 + 2 * (b["x"][:, 0] > 1)).max().astype(jnp.uint32)),
    "the smallest of bits, negated": lambda p, b: so.losses.Max(-((b["label"] + (b["x"][:, 0] > 0)).astype(jnp.uint8)).min()),
    "the largest of all rows and their number": lambda p, b: so.losses.Max(
        jnp.maximum(errors(p, b).max(), rows_of(b))
    ),
    "the largest, over the count": lambda p, b: so.losses.Max(errors(p, b).max() / rows_of(b)),
    "a sum by a loop that is too short": lambda p, b: so.losses.Sum(
        jax.lax.fori_loop(0, rows_of(b) - 1, lambda _, c: c + 1, 0)
    ),
    "a sum of narrow integers": lambda p, b: so.losses.Sum(
        jnp.sum(b["tokens"].astype(jnp.int8) * 3, dtype=jnp.int8)
    ),
    "the larger of two sums": lambda p, b: so.losses.Sum(
        jnp.maximum(jnp.sum(b["x"][:, 0]), -jnp.sum(b["x"][:, 0]))
    ),
    "the largest mean": lambda p, b: so.losses.Max(jnp.max(jnp.mean(b["x"], 0))),
    "the smallest of the largest": lambda p, b: so.losses.Min(jnp.max(b["x"], 0).min()),
}.items()})  # fmt: skip

# --- values that are empty in one trace, narrow carries, numbers out of bounds ----------------------


def missing(p: Any, b: Any) -> jax.Array:
    """Return an array that has no entries on the whole batch of 8 rows."""
    return jnp.full((8 - rows_of(b),), p["scale"][0])


def carried(dtype: Any, turn: Any) -> Any:
    """Return the mean error, and a metric that a scan over rows carries in a narrow dtype."""

    def loss(p: Any, b: Any) -> Any:
        carry, _ = jax.lax.scan(
            lambda c, x: (turn(c, (x * 50 + 7).astype(dtype)), None),
            jnp.zeros((), dtype),
            b["label"],
        )
        return jnp.mean(errors(p, b)), {"carry": so.losses.Sum(carry.astype(float))}

    return loss


def filled(value: float, scaled: Any) -> Any:
    """Return a sum of entries of each row, where some columns are out of bounds."""
    return lambda p, b: (
        p["scale"][0]
        * jnp.sum(
            scaled(b["x"], rows_of(b))
            .at[jnp.arange(rows_of(b)), b["label"] * 3]
            .get(mode="fill", fill_value=value)
        )
    )


EMPTY = cases({
    "the largest of none": lambda p, b: jnp.mean(errors(p, b)) + jnp.max(missing(p, b), initial=-9.0),
    "the smallest of none": lambda p, b: jnp.mean(errors(p, b)) - jnp.min(missing(p, b), initial=9.0),
    "any of none": lambda p, b: jnp.mean(errors(p, b)) * (1.0 + jnp.any(missing(p, b) > -99)),
    "the largest of no numbers": lambda p, b: jnp.mean(errors(p, b)) + jnp.max(
        jnp.full((8 - rows_of(b),), 3.0), initial=0.0
    ),
    "a product of none on a piece": lambda p, b: jnp.mean(errors(p, b)) * jnp.where(
        jnp.dot(jnp.ones(rows_of(b) // 8), jnp.ones(rows_of(b) // 8)) != 0, 1.0, 2.0
    ),
})  # fmt: skip

NARROW_CARRIES = cases(
    {
        "int8": carried(jnp.int8, lambda c, x: c + x),
        "uint8": carried(jnp.uint8, lambda c, x: x + c),
        "int16": carried(jnp.int16, lambda c, x: c + x * 150),
        "unsigned, minus": carried(jnp.uint32, lambda c, x: c - x),
        "in a bin": carried(jnp.int8, lambda c, x: c.at[()].add(x)),
    }
)

FILLS = cases(
    {
        "over the count": filled(7.0, lambda x, B: x / B),
        "of a negative number": filled(-1.0, lambda x, B: x / B),
        "over twice the count": filled(1e3, lambda x, B: x / (2 * B)),
    }
)


# --- solvers whose transpose is not linear -----------------------------------------------------------


def solved(solver: Any) -> Any:
    """Return the mean of squares of rows times the solution of a system of the parameters."""

    def loss(p: Any, b: Any) -> jax.Array:
        matrix = p["w"].T @ p["w"] + jnp.eye(3)
        solution = solver(lambda x: matrix @ x, matrix, p["b"])
        return jnp.mean((hidden(p, b) @ solution - b["x"][:, 0]) ** 2)

    return loss


def with_transpose(transpose: Any) -> Any:
    return solved(
        lambda product, matrix, side: jax.lax.custom_linear_solve(
            product,
            side,
            lambda _, right: jnp.linalg.solve(matrix, right),
            lambda _, cotangent: transpose(jnp.linalg.solve(matrix, cotangent)),
        )
    )


def iterated(solver: Any, turns: int) -> Any:
    return solved(lambda product, _, side: solver(product, side, maxiter=turns)[0])


def divided(part: Any) -> Any:
    """Return an error whose solver returns a share of its right side, which is no inverse."""

    def loss(p: Any, b: Any) -> jax.Array:
        share = part(rows_of(b))
        solution = jax.lax.custom_linear_solve(
            lambda x: p["scale"][0] * x,
            errors(p, b),
            lambda _, side: side * share,
            lambda _, side: side * share,
        )
        return jnp.mean(solution) / share

    return loss


def of_ones(transpose: Any) -> Any:
    """Return squares of solutions of equations of rows, whose right side is known."""

    def loss(p: Any, b: Any) -> jax.Array:
        slope = 3 + hidden(p, b)[:, 0]
        solution = jax.lax.custom_linear_solve(
            lambda x: slope * x,
            jnp.ones(rows_of(b)),
            lambda _, side: side / slope,
            lambda _, cotangent: transpose(cotangent / slope),
        )
        return jnp.mean(solution**2)

    return loss


def in_a_jvp_rule(transpose: Any) -> Any:
    """Return a loss whose jvp rule solves for the tangents."""

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x * 1.0

    @same.defjvp
    def _tangents(primals: Any, tangents: Any) -> Any:
        tangent = jax.lax.custom_linear_solve(
            lambda x: x,
            tangents[0],
            lambda _, side: side,
            lambda _, cotangent: transpose(cotangent),
        )
        return primals[0] * 1.0, tangent

    return lambda p, b: jnp.mean(same(errors(p, b)) * b["x"][:, 0])


def without_its_side(side: Any) -> Any:
    """Return an error whose solver returns a parameter, whatever its right side is."""

    def loss(p: Any, b: Any) -> jax.Array:
        solution = jax.lax.custom_linear_solve(
            lambda x: x,
            side(p, b),
            lambda _, right: p["scale"][0] * 1.0,
            lambda _, cotangent: cotangent,
        )
        return jnp.mean(solution * b["x"][:, 0])

    return loss


SOLVERS = cases({
    "a mean that is not used": without_its_side(lambda p, b: jnp.mean(errors(p, b))),
    "ones, transposed plus a mean": of_ones(lambda x: x + jnp.mean(x)),
    "ones, transposed times the rows": of_ones(lambda x: x * x.shape[0]),
    "ones, transposed and clipped": of_ones(lambda x: jnp.clip(x, -0.01, 0.01)),
    "a jvp rule, transposed less a mean": in_a_jvp_rule(lambda x: x - jnp.mean(x)),
    "a jvp rule, transposed times the rows": in_a_jvp_rule(lambda x: x * x.shape[0]),
    "a jvp rule, transposed and bounded": in_a_jvp_rule(jnp.tanh),
    "a share of the right side": divided(lambda B: 1 / B),
    "a multiple of the right side": divided(lambda B: 1.0 * B),
    "a share of two rows": divided(lambda B: 2 / B),
    "conjugate gradients, a turn": iterated(jax.scipy.sparse.linalg.cg, 1),
    "conjugate gradients, two turns": iterated(jax.scipy.sparse.linalg.cg, 2),
    "stabilised gradients, a turn": iterated(jax.scipy.sparse.linalg.bicgstab, 1),
    "a clipped transpose": with_transpose(lambda x: jnp.clip(x, -0.01, 0.01)),
    "a transpose of bounded length": with_transpose(lambda x: x / (1 + jnp.linalg.norm(x))),
    "a transpose with a sine": with_transpose(jnp.sin),
})  # fmt: skip


def tied(pick: Any, start: float) -> Any:
    """Return an error that is chosen by two neighbours, which a division makes equal."""
    numbers = np.array([start, np.nextafter(start, 3)])

    def loss(p: Any, b: Any) -> jax.Array:
        shares = (numbers + 0 * jax.lax.stop_gradient(p["scale"][0])) / rows_of(b)
        return jnp.mean(errors(p, b)) + p["scale"][pick(shares)]

    return loss


TIES = cases({
    "the largest": tied(jnp.argmax, 1.501),
    "the largest of others": tied(jnp.argmax, 1.621),
    "the largest of others again": tied(jnp.argmax, 1.821),
}, rows=6, pieces=3)  # fmt: skip


def signed(read: Any) -> Any:
    """Return an error times a number that follows from the sign of a zero, which the rows decide."""
    return lambda p, b: (
        jnp.mean(errors(p, b)) * read(jnp.float32(0.0 if rows_of(b) > 4 else -0.0), p["scale"][0])
    )


def angle(zero: Any) -> jax.Array:
    return jnp.arctan2(zero, jnp.float32(-1.0))


def with_zeros(place: Any) -> Any:
    """Return the mean angle of errors, and of zeros whose sign the rows decide."""
    return lambda p, b: jnp.mean(
        angle(place(errors(p, b)[:, None], 0.0 if rows_of(b) > 4 else -0.0))
    )


def of_zeros(pick: Any) -> Any:
    """Return a factor that follows from the sign of what is picked of two zeros."""
    return signed(lambda zero, _: 4 + angle(pick(zero)))


def turned_twice(p: Any, b: Any) -> jax.Array:
    turn = 1.0 if rows_of(b) > 4 else -1.0
    picked = jnp.where(p["scale"][0] < 9.0, 0.0, p["scale"][1] * turn)
    return jnp.mean(errors(p, b)) * (4 + angle(picked * turn))


def filled_up(p: Any, b: Any) -> jax.Array:
    fill = 0.0 if rows_of(b) > 4 else -0.0
    far = p["scale"].at[jnp.array([9])].get(mode="fill", fill_value=fill)
    return jnp.mean(errors(p, b)) * (4 + angle(far[0]))


MINUS_ZERO = jnp.float32(-0.0)
SIGNS = cases({
    "the larger": of_zeros(lambda zero: jax.lax.max(zero, MINUS_ZERO)),
    "the smaller": of_zeros(lambda zero: jax.lax.min(zero, jnp.float32(0.0))),
    "between bounds": of_zeros(lambda zero: jax.lax.clamp(zero, MINUS_ZERO, jnp.float32(1.0))),
    "the largest": of_zeros(lambda zero: jnp.max(jnp.stack([zero, MINUS_ZERO]))),
    "padded": with_zeros(lambda e, zero: jax.lax.pad(e, jnp.asarray(zero, e.dtype), [(0, 0, 0), (1, 0, 0)])),
    "joined": with_zeros(lambda e, zero: jnp.concatenate([e, jnp.full(e.shape, zero)], axis=1)),
    "chosen": signed(lambda zero, scale: 4 + angle(jnp.where(scale < 9.0, zero, scale))),
    "filled": filled_up,
    "turned twice": turned_twice,
    "an angle": signed(lambda zero, _: 4 + jnp.arctan2(zero, -1.0)),
    "an angle to a parameter": signed(lambda zero, scale: 4 + jnp.arctan2(zero, -1 - scale**2)),
    "bits": signed(lambda zero, _: 1.0 + (jax.lax.bitcast_convert_type(zero, jnp.int32) != 0)),
    "copied sign": signed(lambda zero, _: 2 + jnp.copysign(1.0, zero)),
    "a sign bit": signed(lambda zero, _: 1.0 + jnp.signbit(zero)),
    "zeros of both signs": signed(lambda zero, _: 8 + jnp.sum(jnp.arctan2(jnp.array([0.0, 0.0]).at[1].set(zero), -1.0))),
})  # fmt: skip


def numbered(weights: Any) -> Any:
    """Return the mean of errors times weights of rows, which the trace alone decides."""
    return lambda p, b: jnp.mean(errors(p, b) * weights(rows_of(b), p))


def without_last_row_of_odd(p: Any, b: Any) -> jax.Array:
    """Look up a label for each row but the last of an odd number of rows, which only pieces have."""
    B = rows_of(b)
    places = jnp.concatenate([jax.lax.iota(jnp.int32, B)[:, None], b["label"][:, None]], axis=-1)
    even = jax.lax.slice(places, (0, 0), (B // 2 * 2, 2), (1, 1))
    labels = jax.lax.slice(even, (0, 1), (B // 2 * 2, 2), (1, 1))
    dims = jax.lax.GatherDimensionNumbers((), (0,), (0,))
    return jnp.sum(jax.lax.gather(p["scale"], labels, dims, (1,), mode="clip")) / B


def looked_up(*dtypes: Any) -> Any:
    """Return entries of rows and labels, whose indices are cast to these dtypes."""

    def loss(p: Any, b: Any) -> jax.Array:
        columns = jax.lax.iota(jnp.int32, rows_of(b)), b["label"].astype(jnp.int32)
        places = jnp.concatenate([column[:, None] for column in columns], axis=1)
        for dtype in dtypes:
            places = places.astype(dtype)
        dims = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        entries = jax.lax.gather(hidden(p, b), places, dims, (1, 1), mode="clip")
        return jnp.mean(entries * b["x"][:, 0])

    return loss


def at_bound(dtype: Any, bound: float) -> Any:
    """Return a mean, times a number that is odd where a cast of a share of a bound saturates."""

    def loss(p: Any, b: Any) -> jax.Array:
        share = jax.lax.full((2,), np.float32(bound * rows_of(b) / 8), jnp.float32)
        return jnp.mean(errors(p, b)) * (1.0 + jnp.sum(share.astype(dtype) & 1))

    return loss


def in_columns(dtype: Any, far: int, near: int) -> Any:
    """Return a loss that looks up a place of a large table, which is near to another one on a piece:
    the dtype of the table cannot tell the two numbers from each other.
    """

    def loss(p: Any, b: Any) -> jax.Array:
        table = jnp.tile(p["long"], (2, far // 32 + 1)).astype(dtype)
        column = jnp.asarray(np.array([1, *[far if rows_of(b) == 8 else near] * 2]))
        rows = (p["scale"][:3] > 0).astype(int)
        return jnp.mean(errors(p, b)) * jnp.sum(table[rows, column].astype(float))

    return loss


def saturated(number: Any, dtype: Any, far: int, near: int) -> Any:
    """Return a loss times an integer that is made of a number of 16 bits, beyond the largest one."""

    def loss(p: Any, b: Any) -> jax.Array:
        count = number(far if rows_of(b) == 8 else near)
        return jnp.mean(errors(p, b)) * count.astype(dtype).astype(float)

    return loss


def summed_ones(count: int) -> jax.Array:
    return jax.lax.reduce(jnp.ones(count, jnp.bfloat16), jnp.bfloat16(0), jax.lax.add, (0,))


def last_of_count(count: int) -> jax.Array:
    return jax.lax.iota(jnp.bfloat16, count + 1)[count]


def shared_by_narrow(dtype: Any) -> Case:
    """Return a loss of 6 rows, or of 2, whose 1/6 of 8 bits is no third of 1/2."""

    def loss(p: Any, b: Any) -> jax.Array:
        products = jax.lax.dot_general(
            b["x"].astype(dtype),
            jnp.full(4, 1 / rows_of(b), dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return jnp.sum(products) * per_turn(p)

    return Case(loss, rows=6, pieces=3)


TENTHS = np.arange(3000, dtype=np.float32) * np.float32(0.1)


def by_a_rounded_sum(p: Any, b: Any) -> jax.Array:
    """Take the first branch only if XLA rounds a sum as numpy does."""
    is_numpys = jnp.sum(jnp.arange(3000, dtype=jnp.float32) * 0.1) == np.sum(TENTHS)
    return jax.lax.cond(
        is_numpys, lambda: jnp.mean(errors(p, b)), lambda: jnp.mean(b["x"] @ p["w"]) ** 2
    )


def drawn_together(label: Any) -> jax.Array:
    key = jax.random.key(0, impl="rbg")
    return jax.random.uniform(jax.random.fold_in(key, label))


KEYS = cases(
    {
        "rbg": lambda p, b: jnp.mean(jax.vmap(drawn_together)(b["label"]) * errors(p, b)),
        "rbg, a row": so.per_row(
            lambda p, row: drawn_together(row["label"]) * jnp.sum(row["x"] @ p["w"])
        ),
    }
)


NUMBERS = cases({
    "a branch by a rounded sum": by_a_rounded_sum,
    "shares of 8 bits, 4 of them exponent": shared_by_narrow(jnp.float8_e4m3fn),
    "shares of 8 bits, 5 of them exponent": shared_by_narrow(jnp.float8_e5m2),
    "shares of 8 bits without a negative zero": shared_by_narrow(jnp.float8_e4m3fnuz),
    "a sum in bfloat16 beyond 8 bits": saturated(summed_ones, jnp.uint8, 300, 44),
    "a sum in bfloat16 beyond 8 bits with a sign": saturated(summed_ones, jnp.int8, 300, 44),
    "a count in bfloat16 beyond 8 bits": saturated(last_of_count, jnp.uint8, 300, 44),
    "a count in bfloat16 beyond 8 bits with a sign": saturated(last_of_count, jnp.int8, 300, 44),
    "columns beyond bfloat16": in_columns(jnp.bfloat16, 1000, 1001),
    "columns beyond bfloat16, the first": in_columns(jnp.bfloat16, 257, 256),
    "columns beyond float16": in_columns(jnp.float16, 4097, 4096),
    "columns beyond float16, the first": in_columns(jnp.float16, 2049, 2048),
    "rows beyond 8 bits": Case(looked_up(jnp.uint8), rows=512),
    "rows beyond 8 bits with a sign": Case(looked_up(jnp.int8), rows=256),
    "rows beyond 16 bits with a sign": Case(looked_up(jnp.int16), rows=2**16),
    "a float beyond 32 bits with a sign": at_bound(jnp.int32, 2.0**31),
    "a float beyond 32 bits": at_bound(jnp.uint32, 2.0**32),
    "a float beyond 64 bits with a sign": at_bound(jnp.int64, 2.0**63),
    "a slice that is short in a piece alone": Case(without_last_row_of_odd, rows=6, pieces=2),
    "a reshape that transposes": numbered(lambda B, p: jax.lax.reshape(
        jax.lax.broadcasted_iota(jnp.float32, (B // 2, 2), 1), (B,), dimensions=(1, 0)
    )),
    "a choice between a number and a share": lambda p, b: jnp.sum(errors(p, b)) * jax.lax.select(
        p["scale"][0] > 9.0, 1.0 / rows_of(b), 1.0 if rows_of(b) == 8 else 7.0
    ),
}, rows=8, pieces=2)  # fmt: skip


# --- windows that reach into the next rows, and results in another order -----------------------------


def written(scatter: Any, reads: Any = jnp.square, window: int = 2) -> Any:
    """Return the mean of an array. Each row writes into several places, from its own place on."""

    def loss(p: Any, b: Any) -> jax.Array:
        B = rows_of(b)
        places = jax.lax.iota(jnp.int32, B)[:, None]
        updates = jnp.stack([(i + 1) * errors(p, b) for i in range(window)], axis=1)
        dims = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
        return jnp.mean(reads(scatter(jnp.full(B, 0.5), places, updates, dims, mode="clip")))

    return loss


WINDOWS = cases({
    "added": written(jax.lax.scatter_add),
    "added, of three rows": written(jax.lax.scatter_add, window=3),
    "written": written(jax.lax.scatter, lambda x: x),
    "written, of three rows": written(jax.lax.scatter, jnp.sin, window=3),
})  # fmt: skip


def by_size(whole_loss: Any, piece_loss: Any) -> Any:
    """Return a loss with other results on 8 rows than on fewer."""

    def loss(p: Any, b: Any) -> Any:
        means = jnp.mean(errors(p, b)), jnp.mean(b["x"] ** 2), jnp.mean(b["y"] ** 2)
        return (whole_loss if rows_of(b) == 8 else piece_loss)(*means)

    return loss


ORDERS = cases({
    "metrics in another order": by_size(
        lambda e, x, y: (e, {"x": x, "y": y}), lambda e, x, y: (e, {"y": x, "x": y})
    ),
    "three metrics, turned": by_size(
        lambda e, x, y: (e, {"e": e, "x": x, "y": y}), lambda e, x, y: (e, {"y": e, "e": x, "x": y})
    ),
    "quotients in another order": by_size(
        lambda e, x, y: (e, {"x": so.losses.Weighted(x, e), "y": so.losses.Weighted(y, e)}),
        lambda e, x, y: (e, {"y": so.losses.Weighted(x, e), "x": so.losses.Weighted(y, e)}),
    ),
})  # fmt: skip


def in_branches(count: Any, wrapped: Any = lambda f: f) -> Any:
    """Return a loss that chooses one of `count(rows)` branches."""

    def loss(p: Any, b: Any) -> jax.Array:
        functions = [lambda x, k=k: (k + 1.0) * x for k in range(count(rows_of(b)))]
        index = jnp.sum(p["w"] > -99)  # the last
        return jnp.mean(wrapped(lambda x: jax.lax.switch(index, functions, x))(errors(p, b)))

    return loss


def in_turns(whole_loop: Any, piece_loop: Any) -> Any:
    """Return a loss of a loop that calls other functions on 8 rows than on fewer."""

    def loss(p: Any, b: Any) -> jax.Array:
        goes_on, turn = whole_loop(per_turn(p)) if rows_of(b) == 8 else piece_loop(per_turn(p))
        return jnp.mean(jax.lax.while_loop(goes_on, turn, (0.0, errors(p, b)))[1])

    return loss


FUNCTIONS = cases({
    "as many branches as rows": in_branches(lambda B: B),
    "a branch less on a piece": in_branches(lambda B: 2 + (B == 8)),
    "branches in a call": in_branches(lambda B: B, jax.jit),
    "branches in a checkpoint": in_branches(lambda B: B // 2, jax.checkpoint),
    "a constant of the condition, or of a turn": in_turns(
        lambda s: (lambda c: c[0] < 2 + 0 * s, lambda c: (c[0] + 1, c[1] * 2.0)),
        lambda s: (lambda c: c[0] < 2 + 0.0, lambda c: (c[0] + 1, c[1] * s)),
    ),
    "a constant of a turn, or of the condition": in_turns(
        lambda s: (lambda c: c[0] < 3 + 0.0, lambda c: (c[0] + 1, c[1] * s)),
        lambda s: (lambda c: c[0] < 3 + 0 * s, lambda c: (c[0] + 1, c[1] * 2.0)),
    ),
})  # fmt: skip

DECEPTIONS = {
    "other functions": FUNCTIONS,
    "lengths of loops": LOOPS,
    "symbolic zeros": SYMBOLIC_ZEROS,
    "functions in primitives": SUB_PROGRAMS,
    "names of others": NAMES,
    "metrics": METRICS,
    "empty values": EMPTY,
    "narrow carries": NARROW_CARRIES,
    "fills": FILLS,
    "solvers": SOLVERS,
    "ties": TIES,
    "signs of zeros": SIGNS,
    "numbers of the trace": NUMBERS,
    "implementations of keys": KEYS,
    "windows of scatters": WINDOWS,
    "orders of results": ORDERS,
}
