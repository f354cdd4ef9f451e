"""Each reducer keeps its promises, on any shapes, sizes and settings that hypothesis finds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiers import tiered

import shardopt as so

R = so.reducers
quick = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=4)
SIZES = st.sampled_from([1, 2, 3, 8])
BLOCK = st.integers(1, 40)
KINDS = {
    "exact": st.sampled_from([None, jnp.bfloat16, jnp.float32]).map(R.exact),
    "int8": BLOCK.map(R.int8),
    "sign": BLOCK.map(lambda n: R.sign(8 * n)),
    "top_k": st.floats(0.01, 1).map(R.top_k),
    "power_sgd": st.builds(
        R.power_sgd,
        st.integers(1, 9),
        min_ratio=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    "warm_up": st.builds(R.warm_up, BLOCK.map(R.int8), st.integers(1, 2)),
}
FULL = SHAPES.filter(lambda shapes: sum(map(math.prod, shapes)) > 1)


def calls(reducer, count):
    """Reduce the same gradients some times; return the means and the last state."""

    def run(grads):
        state = reducer.init(grads)
        means = []
        for i in range(count):
            mean, state = reducer.reduce(
                jax.tree.map(lambda g, by=1 + i: g * by, grads), state, "data"
            )
            means.append(mean)
        return means, state

    return run


@pytest.mark.slow  # test_places.py shows it by default, of gradients of several dtypes
@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data(), shapes=FULL, size=st.sampled_from([2, 3, 8]), seed=st.integers(0, 99))
def test_error_feedback_conserves_mass(
    kind, data, shapes, size, seed, x64, on_devices, draw_gradients
):
    reducer = data.draw(KINDS[kind])
    grads = draw_gradients(shapes, size, seed=seed, dtype=np.float64)
    means, state = on_devices(calls(R.error_feedback(reducer), 3), size, grads)
    for name, g in grads.items():
        memory = state.memory.value[name].sum(0)
        sent = size * sum(mean[name][0] for mean in means)
        np.testing.assert_allclose(sent + memory, (1 + 2 + 3) * g.sum(0), rtol=1e-12, atol=1e-11)


@pytest.mark.slow  # local_updates/test_outer_reducers.py has a row of it
@quick
@given(shapes=FULL, size=SIZES, seed=st.integers(0, 99))
def test_density_one_gives_the_exact_mean(shapes, size, seed, x64, on_devices, draw_gradients):
    grads = draw_gradients(shapes, size, seed=seed, dtype=np.float64)
    (mean,), _ = on_devices(calls(R.top_k(1.0), 1), size, grads)
    for name, g in grads.items():
        np.testing.assert_allclose(
            mean[name], np.broadcast_to(g.mean(0), g.shape), rtol=1e-13, atol=1e-14
        )


@pytest.mark.slow  # test_power_sgd_is_one_step_of_power_iteration
@settings(quick, max_examples=3)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3)),
    size=SIZES,
    seed=st.integers(0, 99),
)
def test_full_rank_gives_the_exact_mean(shape, size, seed, x64, on_devices, draw_gradients):
    grads = draw_gradients([shape], size, seed=seed, dtype=np.float64)
    reducer = R.power_sgd(rank=99, min_ratio=0)
    assert jax.tree.leaves(reducer.init({"leaf0": grads["leaf0"][0]}).factors), (
        "it must be compressed"
    )
    (mean,), _ = on_devices(calls(reducer, 1), size, grads)
    np.testing.assert_allclose(mean["leaf0"][0], grads["leaf0"].mean(0), rtol=1e-9, atol=1e-9)


@quick
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    block=BLOCK,
    blocks=st.integers(1, 3),
    power=st.integers(-9, 9),
    seed=st.integers(0, 99),
)
def test_int8_is_exact_on_a_grid(size, block, blocks, power, seed, on_devices):
    """Each block has its largest code in front.

    Deviations from the mean cancel between pairs of devices.
    """
    draw = np.random.default_rng(seed)
    mean = draw.integers(-60, 61, size=size * blocks * block)
    off = draw.integers(-60, 61, size=mean.size)
    mean[::block], off[::block] = 127, 0
    signs = np.ones(size) if size == 1 else np.resize([1, -1], size)
    codes = mean[None] + (signs[:, None] * off[None] if size > 1 else 0)
    grads = jnp.asarray(codes * 2.0**power, jnp.float32)
    (reduced_grads,), _ = on_devices(calls(R.int8(block), 1), size, grads)
    np.testing.assert_array_equal(
        reduced_grads, np.broadcast_to(mean * 2.0**power, reduced_grads.shape).astype(np.float32)
    )


@pytest.mark.slow  # test_int8_is_exact_on_a_grid, whose numbers show any other scale
@quick
@given(size=SIZES, block=BLOCK, length=st.integers(1, 200), seed=st.integers(0, 99))
def test_int8_errs_by_half_a_step_each_time(size, block, length, seed, x64, on_devices):
    grads = np.random.default_rng(seed).normal(size=(size, length))
    (mean,), _ = on_devices(calls(R.int8(block), 1), size, jnp.asarray(grads))
    largest = np.abs(grads).max()
    assert np.abs(mean[0] - grads.mean(0)).max() <= 2 * largest / 127 / 2 * (1 + 1e-9)


@quick
@given(shapes=SHAPES, size=SIZES, reducer=st.one_of(*KINDS.values()))
def test_the_mean_is_bit_for_bit_the_same_on_all_devices(
    shapes, size, reducer, ways, draw_gradients
):
    grads = draw_gradients(shapes, size)
    (mean,), _ = ways["shard_map"](calls(reducer, 1), size)(grads)
    for leaf in map(np.asarray, jax.tree.leaves(mean)):
        assert all(leaf[i].tobytes() == leaf[0].tobytes() for i in range(size))


def test_sign_sends_mean_magnitudes_by_block(on_devices):
    """The gradient has two chunks of one block each.

    Each owner has its own part exactly, and signs of the mean are sent again.
    """
    grads = np.array([[1.0, -3, 2, 2, 4, -4, 4, 4, 1, 1, 1, 1, -1, 1, 1, 1]] * 2, np.float32)
    grads[1] *= 2
    (mean,), _ = on_devices(calls(R.sign(8), 1), 2, jnp.asarray(grads))
    signs = np.where(grads[0] >= 0, 1, -1)
    means = [(grads[0][:8] + signs[:8] * 6) / 2, (grads[1][8:] + signs[8:] * 1) / 2]
    expected = np.concatenate([np.abs(half).mean() * np.where(half >= 0, 1, -1) for half in means])
    np.testing.assert_allclose(mean[0], expected, rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.exact(), R.exact(jnp.bfloat16), R.int8(16), R.sign(16)],
        lambda scheme: "exact" not in scheme.name,
    ),
    ids=lambda reducer: reducer.name,
)
def test_padding_changes_no_mean(reducer, on_devices):
    """Numbers of one magnitude, equal on all devices, have an exact mean whatever their count.

    The mutations: padding counts in the scale of `sign`, so 5.0 arrives as 0.625; decoded padding
    counts in the mean."""
    signs = np.random.default_rng(0).choice([-1, 1], size=33)
    grads = [jnp.asarray([5.0 * signs[:length]] * 3, jnp.float32) for length in (1, 33)]
    compressor = R.compressor(reducer)

    def run(grads):
        means = [reducer.reduce(g, reducer.init(g), "data")[0] for g in grads]
        messages = [compressor.encode(g, compressor.init(g))[0] for g in grads]
        return means, [
            compressor.decode(message, g) for message, g in zip(messages, grads, strict=True)
        ]

    means, decoded = on_devices(run, 3, grads)
    for mean, message, g in zip(means, decoded, grads, strict=True):
        np.testing.assert_allclose(mean, g, rtol=1e-6)
        np.testing.assert_allclose(message, g, rtol=1e-6)


def test_top_k_keeps_the_largest_of_each_leaf(on_devices):
    grads = {"a": jnp.array([[1.0, -5, 2, 0]]), "b": jnp.array([[0.1, 0.2]]), "s": jnp.array([7.0])}
    (mean,), _ = on_devices(calls(R.top_k(0.5), 1), 1, grads)
    np.testing.assert_array_equal(mean["a"], [[0, -5, 2, 0]])
    np.testing.assert_array_equal(mean["b"], [[0, np.float32(0.2)]])
    np.testing.assert_array_equal(mean["s"], [7])


def test_power_sgd_is_one_step_of_power_iteration(x64, on_devices, draw_gradients):
    grads = draw_gradients([(12, 9)], 3, dtype=np.float64)
    reducer = R.power_sgd(2, min_ratio=0)
    start = np.asarray(reducer.init({"leaf0": grads["leaf0"][0]}).factors["leaf0"])[0]
    means, state = on_devices(calls(reducer, 2), 3, grads)
    q = start
    m = np.asarray(grads["leaf0"]).mean(0)
    for call, mean in enumerate(means):
        p = np.linalg.qr((1 + call) * m @ q)[0]
        q = ((1 + call) * m).T @ p
        np.testing.assert_allclose(mean["leaf0"][0], p @ q.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(state.factors["leaf0"][0, 0], q, rtol=1e-10, atol=1e-10)


def test_power_sgd_sends_everything_before_its_first_step(x64, on_devices, draw_gradients):
    grads = draw_gradients([(12, 9)], 2, dtype=np.float64)
    means, _ = on_devices(calls(R.warm_up(R.power_sgd(1, min_ratio=0), 1), 2), 2, grads)
    exact = np.asarray(grads["leaf0"]).mean(0)
    np.testing.assert_allclose(means[0]["leaf0"][0], exact, rtol=1e-13)
    assert np.abs(means[1]["leaf0"][0] - 2 * exact).max() > 0.01


def test_warm_up_hands_over_from_exact_means(x64, on_devices, draw_gradients):
    """Two calls are exact and keep nothing.

    Later calls send the same values as a run that begins there.
    """
    grads = draw_gradients([(12, 9)], 2, dtype=np.float64)
    reducer = R.power_sgd(2, min_ratio=0)
    means, state = on_devices(calls(R.error_feedback(R.warm_up(reducer, 2)), 4), 2, grads)
    for call in range(2):
        exact = (1 + call) * np.asarray(grads["leaf0"]).mean(0)
        np.testing.assert_allclose(means[call]["leaf0"][0], exact, rtol=1e-13)

    def later(grads):
        fed_back = R.error_feedback(reducer)
        third, state = fed_back.reduce(
            jax.tree.map(lambda g: 3 * g, grads), fed_back.init(grads), "data"
        )
        return third, *fed_back.reduce(jax.tree.map(lambda g: 4 * g, grads), state, "data")

    *expected, last = on_devices(later, 2, grads)
    for mean, want in zip(means[2:], expected, strict=True):
        np.testing.assert_allclose(mean["leaf0"], want["leaf0"], rtol=1e-13)
    np.testing.assert_allclose(state.memory.value["leaf0"], last.memory.value["leaf0"], rtol=1e-13)


def test_power_sgd_treats_each_block_as_a_matrix():
    params = {
        "blocks": {"w": np.ones((5, 40, 30))},
        "list": [np.ones((40, 30)), np.ones(40), np.ones((3, 3))],
    }
    factors = R.power_sgd(4).init(params).factors
    assert factors["blocks"]["w"].shape == (5, 30, 4)
    assert factors["list"][0].shape == (1, 30, 4)
    assert not jax.tree.leaves(factors["list"][1:]), "vectors and small matrices are not compressed"
    as_list = R.power_sgd(4).init({"blocks": [np.zeros((5, 40, 30))]}).factors["blocks"][0]
    assert as_list.shape == (1, 30, 4), "5 x 40 rows: a list of blocks is not stacked"


@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.exact(jnp.bfloat16), R.int8(64), R.sign(), R.top_k(0.1), R.power_sgd(2)],
        lambda scheme: scheme.name.startswith(("sign", "top_k", "power_sgd")),
    ),
)
def test_over_time_error_feedback_sends_everything(reducer, on_devices, draw_gradients):
    """The mean of many means of one gradient comes near it; without feedback the error stays."""
    grads = draw_gradients([(16, 16), (16,)], 4)
    exact = np.asarray(grads["leaf0"]).mean(0)

    def run(grads):
        def body(state, _):
            mean, state = R.error_feedback(reducer).reduce(grads, state, "data")
            return state, mean

        return jax.lax.scan(body, R.error_feedback(reducer).init(grads), None, length=200)[1]

    means = on_devices(run, 4, grads)["leaf0"][0]
    once = np.abs(means[0] - exact).max()
    often = np.abs(means.mean(0) - exact).max()
    assert often < once / 10
