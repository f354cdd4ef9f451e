"""Bad input is refused, at construction where it can be, and the message says what to do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

pytestmark = pytest.mark.fast

R = so.reducers
CONSTRUCTION = [
    (lambda: R.exact(tile_rows=1), ValueError, "exact: tile_rows must be at least 2, got 1."),
    (
        lambda: R.exact(jnp.bfloat16, tile_rows=4),
        ValueError,
        (
            "exact: gradients in bfloat16 on the wire are rounded on each mesh in another way.\n"
            "Fix: leave dtype or tile_rows out."
        ),
    ),
    (
        lambda: R.exact(tile_rows=4).wire_bytes({"w": jnp.ones(3)}, 2),
        ValueError,
        (
            "exact(tile_rows=4): the mean of some gradients has no tiles of rows.\n"
            "Fix: pass it to a strategy, so.ddp(..., reducer=...)."
        ),
    ),
    (lambda: R.int8(0), ValueError, "int8: block_size must be at least 1, got 0."),
    (lambda: R.int8(2.0), TypeError, "int8: block_size must be an integer, got 2.0 (float)."),
    (lambda: R.sign(0), ValueError, "sign: block_size must be at least 1, got 0."),
    (
        lambda: R.sign(12),
        ValueError,
        (
            "sign: block_size must be a multiple of 8, because bits are packed into bytes; got"
            " 12.\nFix: use 8 or 16."
        ),
    ),
    (
        lambda: R.top_k(0.0),
        ValueError,
        (
            "top_k: density must be above 0 and at most 1, got 0.0.\n"
            "Fix: use 1 to send everything, 0.01 to send one entry in a hundred."
        ),
    ),
    (
        lambda: R.top_k(float("nan")),
        ValueError,
        (
            "top_k: density must be above 0 and at most 1, got nan.\n"
            "Fix: use 1 to send everything, 0.01 to send one entry in a hundred."
        ),
    ),
    (
        lambda: R.top_k(1.5),
        ValueError,
        (
            "top_k: density must be above 0 and at most 1, got 1.5.\n"
            "Fix: use 1 to send everything, 0.01 to send one entry in a hundred."
        ),
    ),
    (lambda: R.top_k("1%"), TypeError, "top_k: density must be a number, got '1%' (str)."),
    (lambda: R.power_sgd(0), ValueError, "power_sgd: rank must be at least 1, got 0."),
    (lambda: R.power_sgd(True), TypeError, "power_sgd: rank must be an integer, got True (bool)."),
    (
        lambda: R.power_sgd(min_ratio=-1.0),
        ValueError,
        "power_sgd: min_ratio must not be negative, got -1.0.",
    ),
    (
        lambda: R.power_sgd(stacked="("),
        ValueError,
        (
            "power_sgd: stacked='(' is no regular expression: missing ), unterminated subpattern at"
            " position 0."
        ),
    ),
    (
        lambda: R.power_sgd(stacked=3),
        TypeError,
        "power_sgd: stacked must be a regular expression, got 3.",
    ),
    (
        lambda: R.exact(jnp.int8),
        ValueError,
        (
            "exact: dtype must be a floating dtype of 16 bits or more, got int8.\n"
            "Fix: use bfloat16, or so.reducers.int8() for fewer bits."
        ),
    ),
    (
        lambda: R.exact("bf17"),
        TypeError,
        "exact: dtype must be a dtype, got 'bf17'.\nFix: pass one such as jax.numpy.bfloat16.",
    ),
    (
        lambda: R.error_feedback(R.int8),
        TypeError,
        (
            "error_feedback: reducer must be a Reducer, got int8.\nFix: pass one such as"
            " so.reducers.int8(), called."
        ),
    ),
    (
        lambda: R.error_feedback(R.error_feedback(R.int8())),
        ValueError,
        (
            "error_feedback: error_feedback(int8(block_size=256)) has error feedback already.\nFix:"
            " wrap a reducer once."
        ),
    ),
    (lambda: R.warm_up(R.sign(), -1), ValueError, "warm_up: steps must be at least 0, got -1."),
    (
        lambda: R.warm_up(R.sign(), 1.5),
        TypeError,
        "warm_up: steps must be an integer, got 1.5 (float).",
    ),
    (
        lambda: R.warm_up(R.error_feedback(R.sign(8)), 3),
        ValueError,
        (
            "warm_up: error_feedback(sign(block_size=8)) has error feedback, which must see both"
            " what is sent at first and later.\nFix: use error_feedback(warm_up(...)), the other"
            " way round."
        ),
    ),
    (
        lambda: R.exact().wire_bytes({}, 0),
        ValueError,
        "exact(): axis_size must be at least 1, got 0.",
    ),
    (
        lambda: R.sign().wire_bytes({"count": jnp.int32(3)}, 2),
        TypeError,
        (
            "sign(block_size=1024): 1 leaf cannot be reduced: a mean needs floating or complex"
            " arrays.\n  count: int32\nFix: leave such leaves out, for instance with optax.masked."
        ),
    ),
    (
        lambda: R.exact().init({"name": "w", "n": jnp.arange(2)}),
        TypeError,
        (
            "exact(): 2 leaves cannot be reduced: a mean needs floating or complex arrays.\n"
            "  n: int32\n  name: str\nFix: leave such leaves out, for instance with optax.masked."
        ),
    ),
    (
        lambda: so.transforms.on_mesh(
            optax.adam(0.1), so.make_mesh(data=4, devices=jax.devices()[:4]), "data"
        ).resized({"inner": R.PerDevice({"mu": jnp.ones((2, 3))})}),
        ValueError,
        (
            "on_mesh.resized: state that belongs to its device cannot be carried to another axis"
            " size.\n  inner\nFix: make it again with init, or use so.zero or so.ddp, whose state can"
            " be resharded."
        ),
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CONSTRUCTION)
def test_bad_arguments_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_an_axis_that_is_not_bound():
    reducer = R.int8()
    with pytest.raises(ValueError, match="not bound") as caught:
        reducer.reduce(jnp.ones(3), (), "data")
    assert (
        str(caught.value)
        == "int8(block_size=256): axis 'data' is not bound here.\nFix: call it inside jax.shard_map"
        " over a mesh with axis 'data' (manual, not left to the partitioner), or inside jax.pmap"
        " or jax.vmap with axis_name='data'. Under jax.jit, wrap an optax chain in"
        " so.transforms.on_mesh."
    )
    with pytest.raises(TypeError) as caught:
        reducer.reduce(jnp.ones(3), (), 3)
    assert (
        str(caught.value)
        == "int8(block_size=256): an axis name is a string or a tuple of strings, got 3.\n"
        'Fix: pass the name of a mesh axis, such as "data".'
    )
    with pytest.raises(ValueError, match="differ") as caught:
        jax.vmap(lambda g: reducer.reduce(g, (), ("data", "data"))[0], axis_name="data")(
            jnp.ones((2, 3))
        )
    assert (
        str(caught.value) == "int8(block_size=256): axis names must differ, got ('data', 'data')."
    )


def test_gradients_that_are_summed_already(mesh_of):
    """The gradient of a replicated parameter, with types that track it: a mean would be N times too
    large.
    """

    def step(w, x):
        grads = jax.grad(lambda w: jnp.sum(w * x))(w)
        return R.exact().reduce({"w": grads}, (), "data")[0]

    with pytest.raises(ValueError, match="does not vary") as caught:
        jax.shard_map(step, mesh=mesh_of(data=2), in_specs=(P(), P("data")), out_specs=P())(
            jnp.ones(()), jnp.ones(2)
        )
    assert (
        str(caught.value)
        == "exact(): 1 gradient leaf does not vary along 'data': jax has summed the gradient of"
        " a replicated parameter, jax.lax.pmean or an earlier link has averaged it, or"
        " optax.MultiSteps is around.\n  w\nFix:"
        " differentiate with respect to jax.lax.pcast(params, 'data', to='varying'); and leave out"
        " what averages gradients before. optax.MultiSteps belongs after the mean."
    )


def test_gradients_unlike_the_memory_are_refused(on_devices):
    reducer = R.error_feedback(R.int8())
    state = reducer.init({"w": jnp.ones((2, 3))})

    def reduce(g):
        return reducer.reduce(g, state, "data")[0]

    with pytest.raises(ValueError, match="another shape") as caught:
        on_devices(reduce, 2, {"w": jnp.ones((2, 3, 2))})
    assert (
        str(caught.value)
        == "int8(block_size=256): 1 gradient leaf has another shape than the memory.\n  w: (3, 2),"
        " was (2, 3)"
    )
    with pytest.raises(ValueError, match="structure") as caught:
        on_devices(reduce, 2, [jnp.ones((2, 3))])
    assert (
        str(caught.value)
        == "int8(block_size=256): the gradients have another tree structure than the memory."
    )
