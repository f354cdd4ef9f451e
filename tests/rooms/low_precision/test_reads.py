"""A block reads its rounded weights in products of 8 bits alone: through functions and loops too,
and any other read is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference

import shardopt as so
from shardopt.nn import Rounding

RNG = np.random.default_rng(0)
PARAMS = {"blocks": {"w": RNG.normal(size=(2, 8, 8)), "switch": np.array([1.0, -1.0])}}
BATCHES = [RNG.normal(size=(8, 3, 8)) for _ in range(3)]


def product(x, w):
    return jnp.tanh(so.nn.quantized_einsum("btd,df->btf", x, w["w"], precision="int8"))


def looped(x, w):
    return jax.lax.scan(lambda x, _: (product(x, w), None), x, None, length=2)[0]


def carried(x, w):
    return jax.lax.scan(
        lambda x_and_w, _: ((product(*x_and_w), x_and_w[1]), None), (x, w), None, length=2
    )[0][0]


def while_looped(x, w):
    x, w = jax.lax.stop_gradient((x, w))  # such a loop has no gradient

    def turn(turn_and_x):
        return (turn_and_x[0] + 1, product(turn_and_x[1], w))

    return jax.lax.while_loop(lambda turn_and_x: turn_and_x[0] < 2, turn, (0, x))[1]


def changed(change):
    """Return the product with the weight after `jax.tree.map` of a change; the switch stays."""
    return lambda x, w: product(x, {"w": jax.tree.map(change, w["w"])})


def reversed_in_a_loop(x, w):
    def turn(turn_and_w):
        return (turn_and_w[0] + 1, jax.tree.map(lambda leaf: leaf[::-1], turn_and_w[1]))

    return product(
        x, {"w": jax.lax.while_loop(lambda turn_and_w: turn_and_w[0] < 2, turn, (0, w["w"]))[1]}
    )


PRODUCTS = {
    "jit": lambda x, w: jax.jit(product)(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(product)(x, w),
    "scan": looped,
    "carry": carried,
    "while": while_looped,
    "cond": lambda x, w: jax.lax.cond(
        w["switch"] > 0, product, lambda x, w: product(2 * x, w), x, w
    ),
    "stop_gradient": lambda x, w: product(x, jax.lax.stop_gradient(w)),
    "barrier": lambda x, w: product(x, jax.lax.optimization_barrier(w)),
}
OTHERS = {
    "neg": changed(lambda leaf: -leaf),
    "mul": changed(lambda leaf: leaf * 2),
    "rev": jax.jit(changed(lambda leaf: leaf[::-1])),
    "add": jax.checkpoint(changed(lambda leaf: leaf + leaf)),
    "sub": lambda x, w: jax.lax.cond(
        w["switch"] > 0, product, changed(lambda leaf: leaf - leaf), x, w
    ),
    "select_n": lambda x, w: changed(lambda leaf: jnp.where(w["switch"] > 0, leaf, leaf))(x, w),
    "while": reversed_in_a_loop,
    "square": lambda x, w: product(x, w) / (1 + optax.tree.norm(w)),
    "convert_element_type": changed(lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype)),
    "the block, which made other arrays for it": changed(lambda leaf: jnp.full_like(leaf, 2)),
    "reduce_sum": lambda x, w: product(x, w) + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(w)),
}


def strategy_of(block, rounded, opt=so.fsdp, sizes=None, **options):
    mesh = so.make_mesh(**(sizes or {"data": 2}), devices=jax.devices()[: 4 if sizes else 2])
    model = so.BlockModel(
        lambda outer, x: x,
        lambda w, x: x + block(x, w),
        lambda outer, x, _: jnp.mean(x**2),
        rounded=rounded,
    )
    return opt(optax.sgd(0.1, momentum=0.9), mesh, model, min_shard_elements=1, **options)


def traced(*args, **options):
    """Trace a step, which is where reads are refused: nothing has to compile for that."""
    strategy = strategy_of(*args, **options)
    strategy.step.lower(strategy.abstract_state(PARAMS), BATCHES[0])


def trained(*args, **options):
    strategy = strategy_of(*args, **options)
    state = strategy.init(PARAMS)
    for batch in BATCHES:
        state, _ = strategy.step(state, batch)
    return jax.device_get(state.params)


PLACES = {
    "functions": ["jit", "checkpoint", "stop_gradient", "barrier"],
    "loops": ["scan", "carry", "while", "cond"],
}


@pytest.mark.parametrize("places", PLACES)
def test_products_may_be_anywhere(places, x64):
    """A block reads its weight in all of them, so that two programs tell."""

    def block(x, w):
        return sum(PRODUCTS[name](x, w) for name in PLACES[places])

    rounded = trained(block, {"w": Rounding("int8")})
    assert relative_difference(rounded, trained(block, {})) < 1e-10


@pytest.mark.fast
@pytest.mark.parametrize("reader", OTHERS)
def test_any_other_read_is_refused(reader):
    with pytest.raises(
        TypeError,
        match=(
            r"^fsdp: a block reads a weight that BlockModel.rounded names.*(?s:.)*read by"
            rf" {reader}\n"
        ),
    ):
        traced(OTHERS[reader], {"w": Rounding("int8")})


def test_a_pipeline_refuses_it_too():
    pipeline = {"sizes": {"data": 2, "pipeline": 2}, "micro_batches": 2, "placement": "fsdp"}
    with pytest.raises(TypeError, match=r"read by neg"):
        traced(OTHERS["neg"], {"w": Rounding("int8")}, so.hybrid, **pipeline)


@pytest.mark.fast
def test_a_cast_that_the_rounding_names_must_happen():
    for block in (product, lambda x, w: product(x, {"w": w["w"].astype(jnp.float32)})):
        with pytest.raises(
            TypeError, match=r"was rounded in bfloat16, and the block did not cast it to that"
        ):
            trained(block, {"w": Rounding("int8", dtype=jnp.bfloat16)})


@pytest.mark.fast
@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.T,
        lambda w: w.sum(),
        lambda w: w**2,
        lambda w: 2 * w,
        lambda w: -w,
        lambda w: w[0],
        lambda w: np.ones((8, 8)) @ w,
        jnp.asarray,
    ],
    ids=["attribute", "method", "power", "number", "negative", "index", "numpy", "jax.numpy"],
)
def test_a_read_as_an_array_is_told_the_remedy(read):
    message = (
        r"was used as an array.*\nFix: multiply it by so\.nn\.quantized_einsum alone, or take its"
        r" name out"
    )
    with pytest.raises((TypeError, AttributeError), match=message):
        traced(lambda x, w: product(x, w) * jnp.mean(read(w["w"])), {"w": Rounding("int8")})


@pytest.mark.fast
def test_a_gradient_inside_of_a_block_is_refused():
    """No product reads the arrays that have the gradient of a rounded weight, so the weight would
    have no gradient.
    """

    def force(x, w):
        return -jax.grad(lambda x: jnp.sum(jnp.cos(product(x, w))))(jax.lax.stop_gradient(x))

    with pytest.raises(
        TypeError,
        match=r"^quantized_einsum: the gradient of a product in 8 bits was differentiated",
    ):
        traced(force, {"w": Rounding("int8")}, view="unproved")
