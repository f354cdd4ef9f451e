"""Split passes of a block give what `jax.vjp` gives, whatever it is made of.

Each does its own share of the work.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from support.tiers import tiered

from shardopt.remat._split_backward import rematerialised, split_backward

ROWS = 3
WIDTH = 4


@jax.custom_vjp
def twice_in_reverse(x, w):
    """Its gradient differs from the derivative of its value, so an executor that differentiates
    again is found out.
    """
    return x * w


twice_in_reverse.defvjp(
    lambda x, w: (x * w, (x, w)),
    lambda residuals, dy: (2 * dy * residuals[1], 3 * (dy * residuals[0]).sum()),
)


@jax.custom_jvp
def bent(x):
    return jnp.abs(x)


bent.defjvp(lambda primals, tangents: (bent(*primals), 5 * tangents[0]))


def scanned(params, x):
    w, _ = params
    rows, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x[0], None, length=3)
    return [rows]


def unrolled(params, x):
    w, _ = params
    rows, _ = jax.lax.scan(
        lambda h, s: (jnp.tanh(h @ w * s), h.sum()), x[0], jnp.arange(3.0), unroll=True
    )
    return [rows]


def checkpointed(params, x):
    w, b = params
    return [x[0] + jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))(x[0], w) * b]


def branching(params, x):
    w, b = params
    return [jax.lax.cond(b > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w.T, x[0])]


def looping(params, x):
    w, b = params
    return [jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) * b + i, x[0])]


CONSTANT = np.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
BLOCKS = {
    "linear": lambda g, x: [x[0] @ g[0] + g[1]],
    "residual": lambda g, x: [x[0] + jnp.tanh(x[0] @ g[0]) @ g[0].T * g[1]],
    "relu": lambda g, x: [jax.nn.relu(x[0] @ g[0])],
    "softmax": lambda g, x: [jax.nn.softmax(x[0] @ g[0]) @ g[0]],
    "gelu": lambda g, x: [jax.nn.gelu(x[0] @ g[0]) * jax.nn.silu(x[0])],
    "norm": lambda g, x: [
        (x[0] - x[0].mean(-1, keepdims=True)) / (x[0].std(-1, keepdims=True) + 0.1) @ g[0]
    ],
    "custom_vjp": lambda g, x: [twice_in_reverse(x[0] @ g[0], g[1])],
    "custom_jvp": lambda g, x: [bent(x[0] @ g[0])],
    "constant": lambda g, x: [jnp.tanh(x[0] @ CONSTANT @ g[0])],
    "jit": lambda g, x: [jax.jit(lambda x, w: jnp.tanh(x @ w))(x[0], g[0]) * g[1]],
    "scanned": scanned,
    "unrolled": unrolled,
    "checkpointed": checkpointed,
    "branching": branching,
    "looping": looping,
    "identity": lambda g, x: list(x),
    "the weight passes through": lambda g, x: [x[0] + g[0][:ROWS]],
    "the input is not used": lambda g, x: [jnp.zeros_like(x[0]) + jnp.tanh(g[0][:ROWS])],
    "a weight is not used": lambda g, x: [jnp.sin(x[0]) * g[1]],
    "constant output": lambda g, x: [jnp.ones_like(x[0])],
    "stopped": lambda g, x: [
        x[0] @ jax.lax.stop_gradient(g[0]) + jax.lax.stop_gradient(x[0]) @ g[0]
    ],
    "sorted": lambda g, x: [jnp.sort(x[0] @ g[0], axis=-1)],
    "dropout": lambda g, x: [
        x[0] @ g[0] * jax.random.bernoulli(jax.random.key(7), 0.5, x[0].shape)
    ],
    "the same weight twice": lambda g, x: [x[0] @ g[0] @ g[0] @ g[0]],
}


def example():
    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.normal(size=(WIDTH, WIDTH))), jnp.asarray(0.7)]
    return (
        params,
        [jnp.asarray(draw.normal(size=(ROWS, WIDTH)))],
        [jnp.asarray(draw.normal(size=(ROWS, WIDTH)))],
    )


def check(f, params, x, dy, trained):
    """Compare every way through the passes with jax.vjp."""
    floating = [i for i, leaf in enumerate(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def plain(weights, inputs):
        new_params = list(params)
        new_inputs = list(x)
        for place, w in zip(trained, weights, strict=True):
            new_params[place] = w
        for place, entry in zip(floating, inputs, strict=True):
            new_inputs[place] = entry
        y = f(new_params, new_inputs)
        return [y[i] for i in floating], y

    @jax.jit
    def at_once(weights, inputs, dy):
        _, vjp, y = jax.vjp(plain, weights, inputs, has_aux=True)
        return vjp(dy), y

    (dw, dx), y = at_once([params[i] for i in trained], [x[i] for i in floating], dy)
    passes = split_backward(f, params, x, trained=trained)
    for entry in (passes, rematerialised(passes, x)):

        @jax.jit
        def run(params, x, dy, entry=entry):
            outputs, residuals = entry.forward(params, x)
            assert [(k.shape, k.dtype) for k in residuals] == [
                (k.shape, k.dtype) for k in entry.residuals
            ]
            dx, deferred = entry.backward(params, residuals, dy)
            assert [(k.shape, k.dtype) for k in deferred] == [
                (k.shape, k.dtype) for k in entry.deferred
            ]
            dw = entry.weight(params, [residuals[i] for i in entry.weight_residuals], deferred)
            return outputs, dx, dw, entry.both(params, residuals, dy)

        outputs, its_dx, its_dw, both = run(params, x, dy)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)
        for a, b in zip([*outputs, *its_dx, *its_dw], [*y, *dx, *dw], strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            close(a, b)
        for a, b in zip([*both[0], *both[1]], [*dx, *dw], strict=True):
            close(a, b)
    return passes


QUICK = (
    "custom_vjp", "custom_jvp", "constant", "scanned", "checkpointed", "branching",
    "the weight passes through", "the input is not used", "constant output", "the same weight twice",
)  # fmt: skip


@pytest.mark.parametrize("name", tiered(BLOCKS, lambda name: name in QUICK))
def test_the_passes_of_any_block_give_its_gradients(name, x64):
    check(BLOCKS[name], *example(), trained=[0, 1])


@pytest.mark.parametrize("trained", [[], [1], [0]], ids=str)
def test_the_passes_give_gradients_of_some_of_the_weights(trained, x64):
    check(BLOCKS["residual"], *example(), trained=trained)


def test_integer_leaves_of_what_travels_and_of_the_weights(x64):
    (w, b), (x,), (dy,) = example()

    def f(params, x):
        w, b, table, mask = params
        h = jnp.where(mask[x[1]][:, None], jnp.tanh(x[0] @ w), x[0]) * b
        return [h, (x[1] + table) % 4, x[2] + h[:, 0]]

    params = [w, b, jnp.int32(1), jnp.array([True, False, True, True])]
    travels = [x, jnp.array([0, 1, 3], jnp.int32), jnp.ones(ROWS)]
    passes = check(f, params, travels, [dy, jnp.arange(3.0)], trained=[0, 1])
    assert not [leaf for leaf in passes.deferred if jnp.issubdtype(leaf.dtype, jnp.integer)]


def test_the_passes_take_half_precision(x64):
    params, x, dy = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), example())
    check(BLOCKS["residual"], params, x, dy, trained=[0, 1])


def test_the_passes_take_complex_numbers(x64):
    params, x, dy = jax.tree.map(
        lambda leaf: leaf + 1j * leaf[..., ::-1] if leaf.ndim else leaf, example()
    )
    check(BLOCKS["residual"], params, x, dy, trained=[0])


def count(f, *args, primitive="dot_general"):
    jaxpr = jax.make_jaxpr(f)(*args)
    return sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


def test_each_inner_product_runs_once(x64):
    """There are two products forwards, two for the input and two for the weights. None of them runs
    twice.
    """
    params, x, dy = example()

    def mlp(g, x):
        return [x[0] + jnp.tanh(x[0] @ g[0]) @ g[1]]

    params = [params[0], params[0].T]
    passes = split_backward(mlp, params, x, trained=[0, 1])
    _, residuals = passes.forward(params, x)
    _, deferred = passes.backward(params, residuals, dy)
    assert count(passes.forward, params, x) == 2
    assert count(passes.backward, params, residuals, dy) == 2
    assert (
        count(passes.weight, params, [residuals[i] for i in passes.weight_residuals], deferred) == 2
    )
    assert count(passes.both, params, residuals, dy) == 4
    remat_passes = rematerialised(passes, x)
    _, deferred = remat_passes.backward(params, x, dy)
    assert count(remat_passes.backward, params, x, dy) >= 3
    assert count(remat_passes.weight, params, [], deferred) == 2


def test_no_weight_is_kept_nor_what_follows_from_weights_alone(x64):
    _, x, dy = example()
    big = jnp.ones((WIDTH, 50 * WIDTH))

    def f(g, x):
        return [x[0] @ jnp.tanh(g[0]) @ jnp.exp(g[0].T) * jax.random.uniform(jax.random.key(g[1]))]

    passes = split_backward(f, [big, jnp.int32(3)], x, trained=[0])
    sizes = [residual.size for residual in (*passes.residuals, *passes.deferred)]
    assert max(sizes) < big.size
    assert sum(residual.size for residual in passes.residuals) <= ROWS * (WIDTH + 50 * WIDTH)
    check(f, [big, jnp.int32(3)], x, dy, trained=[0])


def test_elementwise_results_are_not_kept(x64):
    params, x, _ = example()
    passes = split_backward(
        lambda g, x: [jnp.tanh(jnp.sin(jnp.exp(x[0] @ g[0])) * 3 + 1)], params, x, trained=[0]
    )
    assert [residual.shape for residual in passes.residuals] == [(ROWS, WIDTH)] * 2  # x, and x @ w


def test_a_product_inside_a_jit_is_taken_apart_too(x64):
    """`jax.nn` is full of jits.

    If a jit stayed whole, both gradients of its products would be computed at once.
    """
    params, x, dy = example()

    def f(g, x):
        return [jax.jit(lambda x, w: jax.nn.gelu(x @ w))(x[0], g[0])]

    passes = split_backward(f, params, x, trained=[0])
    _, residuals = passes.forward(params, x)
    _, deferred = passes.backward(params, residuals, dy)
    assert count(passes.backward, params, residuals, dy) == 1
    assert (
        count(passes.weight, params, [residuals[i] for i in passes.weight_residuals], deferred) == 1
    )


def test_a_checkpoint_is_taken_apart_unless_it_would_repeat_a_product(x64):
    """It is one equation of the trace.

    Whole, the weight's gradient would be computed early, and kept.
    """
    params, x, dy = example()
    params = [params[0], params[0].T]

    def products(f, *args):
        return str(jax.make_jaxpr(f)(*args)).count("dot_general[")

    def made(within):
        def f(g, x):
            return [x[0] + jax.checkpoint(within)(x[0] @ g[0], g[1])]

        passes = check(f, params, x, dy, trained=[0, 1])
        _, residuals = passes.forward(params, x)
        _, deferred = passes.backward(params, residuals, dy)
        weight_residuals = [residuals[i] for i in passes.weight_residuals]
        return (
            products(passes.backward, params, residuals, dy),
            products(passes.weight, params, weight_residuals, deferred),
            deferred,
        )

    backward, weight, deferred = made(lambda h, w: jax.nn.silu(h) @ w)
    assert (backward, weight) == (2, 2)
    assert [leaf.shape for leaf in deferred] == [(ROWS, WIDTH)] * 2  # of both products; no weight's
    backward, weight, _ = made(lambda h, w: jnp.tanh(jnp.tanh(h @ w) @ w))
    assert weight == 1


def test_effects_run_once_per_forward(x64, capfd):
    params, x, dy = example()

    def f(g, x):
        jax.debug.print("seen")
        return [jnp.tanh(x[0] @ g[0])]

    passes = split_backward(f, params, x, trained=[0])
    _, residuals = jax.jit(passes.forward)(params, x)
    jax.effects_barrier()
    assert capfd.readouterr().out == "seen\n"
    _, deferred = jax.jit(passes.backward)(params, residuals, dy)
    jax.jit(passes.weight)(params, [residuals[i] for i in passes.weight_residuals], deferred)
    jax.jit(passes.both)(params, residuals, dy)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""


def test_a_callback_that_reads_weights_alone_runs_once(x64):
    """Its results are stored: computed again, the gradient would be of other numbers."""
    params, x, dy = example()
    calls = []

    def scale(weights):
        calls.append(weights)
        return np.float64(len(calls))

    def f(g, x):
        kind = jax.ShapeDtypeStruct((), jnp.float64)
        number = io_callback(scale, kind, jax.lax.stop_gradient(g[0]))
        return [jnp.tanh(x[0] @ g[0]) * number]

    passes = split_backward(f, params, x, trained=[0])
    _, residuals = jax.jit(passes.forward)(params, x)
    jax.block_until_ready(jax.jit(passes.both)(params, residuals, dy))
    jax.effects_barrier()
    assert len(calls) == 1
