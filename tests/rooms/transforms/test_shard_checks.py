"""What may stand inside of `shard_updates`: only what a shard computes as the whole would, or a
collective completes.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so

T, N = so.transforms, 4
PARAMS = {
    "w": np.linspace(-1.0, 2.0, 10).reshape(5, 2),
    "b": np.ones(3),
    "s": np.array(10.0),
    "t": np.array(-2.0),
}
GRADS = {
    name: np.random.default_rng(0).normal(size=(N, *np.shape(x))) + 1 for name, x in PARAMS.items()
}
WAYS = ["vmap", "shard_map", "checked shard_map"]
CLIP = T.clip_by_global_norm(0.5, "data", split=True)
FIX = (
    "\nFix: use so.zero, which runs any optimizer; or one that works element by element, with "
    "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
)


def stateless(f):
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda u, state, params=None: (f(u), state)
    )


def norm_of(updates, complete):
    return jnp.sqrt(complete(sum(jnp.sum(x * x) for x in jax.tree.leaves(updates))))


def own_clip(updates):
    """As users write it: one number is summed over the axis."""
    norm = norm_of(updates, lambda total: jax.lax.psum(total, "data"))
    return jax.tree.map(lambda x: x / jnp.maximum(1.0, norm / 0.5), updates)


def largest(updates):
    top = jax.lax.pmax(
        jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(updates)]).max(), "data"
    )
    return jax.tree.map(lambda x: x / top, updates)


def whole_largest(updates):
    top = jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(updates)]).max()
    return jax.tree.map(lambda x: x / top, updates)


def steps(tx):
    """Return run(local gradients) -> the updates of three steps."""

    def run(grads):
        params = jax.tree.map(jnp.asarray, PARAMS)
        state, seen = tx.init(params), []
        for scale in (1.0, 0.1, 3.0):
            updates, state = tx.update(jax.tree.map(lambda g, c=scale: c * g, grads), state, params)
            params = optax.apply_updates(params, updates)
            seen.append(updates)
        return seen

    return run


def check_equal(tx, reference, way):
    means = jax.tree.map(lambda g: g.mean(0), GRADS)
    expected = jax.tree.map(lambda x: np.stack([x] * N), jax.jit(steps(reference))(means))
    found = way(steps(tx), N)(jax.tree.map(jnp.asarray, GRADS))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected
    )


OPTAX_CLIP = optax.clip_by_global_norm(0.5)
ALLOWED = {
    "clip, then momentum": (
        optax.chain(CLIP, optax.sgd(0.1, momentum=0.9)),
        optax.chain(OPTAX_CLIP, optax.sgd(0.1, momentum=0.9)),
    ),
    "decay, then clip": (
        optax.chain(optax.adamw(0.1, weight_decay=0.5), CLIP),
        optax.chain(optax.adamw(0.1, weight_decay=0.5), OPTAX_CLIP),
    ),
    "a clip of one's own": (
        optax.chain(stateless(own_clip), optax.adam(0.1)),
        optax.chain(OPTAX_CLIP, optax.adam(0.1)),
    ),
    "the largest element": (stateless(largest), stateless(whole_largest)),
    "rings of the past": (
        optax.chain(T.delay_gradients(2, T.delay_compensation()), optax.sgd(0.1)),
        optax.chain(T.delay_gradients(2, T.delay_compensation()), optax.sgd(0.1)),
    ),
    "a branch": (
        T.accumulate(optax.chain(CLIP, optax.adam(0.1)), 2),
        T.accumulate(optax.chain(OPTAX_CLIP, optax.adam(0.1)), 2),
    ),
    "elements clipped, then all": (
        optax.chain(optax.clip(1.0), CLIP, optax.sgd(0.1)),
        optax.chain(optax.clip(1.0), OPTAX_CLIP, optax.sgd(0.1)),
    ),
    "rows by a loop": (
        stateless(lambda u: {**u, "w": jax.lax.map(lambda row: 2 * row, u["w"])}),
        stateless(lambda u: {**u, "w": 2 * u["w"]}),
    ),
}


QUICK = ("the largest element", "rows by a loop")


@pytest.mark.parametrize("name", tiered(ALLOWED, lambda name: name in QUICK))
def test_what_collectives_complete_is_as_on_one_device(name, ways, x64):
    """With two leaves without dims, the larger part of the norm, so counting them N times would
    show.
    """
    inner, reference = ALLOWED[name]
    for way in WAYS if name == "clip, then momentum" else WAYS[:2]:
        check_equal(T.shard_updates(inner, "data"), reference, ways[way])


def test_types_say_that_shards_are_split(ways, x64):
    """With types that track what varies, the clip needs no `split`."""
    inner = optax.chain(T.clip_by_global_norm(0.5, "data"), optax.sgd(0.1))
    reference = optax.chain(OPTAX_CLIP, optax.sgd(0.1))
    check_equal(T.shard_updates(inner, "data"), reference, ways["checked shard_map"])


def scaled_by_a_leaf(updates):
    return {**updates, "w": updates["w"] * updates["s"]}


def running_sum(updates):
    def add(kept, row):
        return kept + row, kept + row

    return {**updates, "w": jax.lax.scan(add, jnp.zeros_like(updates["w"][0]), updates["w"])[1]}


def halved_while_large(updates):
    def one(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y * y) > 1.0, lambda y: y / 2, x)

    return jax.tree.map(one, updates)


def negated_if_large(updates):
    return jax.tree.map(
        lambda x: jax.lax.cond(jnp.sum(x) > 1.0, lambda y: -y, lambda y: y, x), updates
    )


def by_sum_of_norms(updates):
    total = jax.lax.psum(norm_of(updates, lambda own: own), "data")
    return jax.tree.map(lambda x: x / total, updates)


def by_largest_sum(updates):
    return jax.tree.map(lambda x: x / jax.lax.pmax(jnp.sum(x * x), "data"), updates)


def by_sum_of_largest(updates):
    return jax.tree.map(lambda x: x / jax.lax.psum(jnp.max(x), "data"), updates)


def leaves(f):
    """One leaf with dims at a time."""
    return stateless(lambda updates: jax.tree.map(lambda x: f(x) if x.ndim else x, updates))


def matrix(f):
    return stateless(lambda updates: {**updates, "w": f(updates["w"])})


def decayed_by_fan_in(updates, state, params):
    return (
        jax.tree.map(lambda g, p: g + 0.1 * p / (p.shape[0] if p.ndim else 1), updates, params),
        state,
    )


def permuted(x):
    return x.ravel()[np.random.default_rng(0).permutation(x.size)].reshape(x.shape)


def summed(f):
    """Scaled by a sum over all shards of what is not 0 at padding."""
    return leaves(lambda x: x * jax.lax.psum(jnp.sum(f(x)), "data"))


SOME_SPLIT = {"w": True, "b": True, "s": False, "t": False}
REFUSED = {
    "clip, lamb": (optax.chain(CLIP, optax.lamb(0.1)), "reduce_sum"),
    "lamb, clip": (optax.chain(optax.lamb(0.1), CLIP), "reduce_sum"),
    "clip, adafactor": (optax.chain(CLIP, optax.adafactor(0.1, min_dim_size_to_factor=2)), None),
    "a sum of local norms": (stateless(by_sum_of_norms), "reduce_sum"),
    "the largest sum": (stateless(by_largest_sum), "pmax, reduce_sum"),
    "the sum of the largest": (stateless(by_sum_of_largest), "reduce_max"),
    "averages of shards": (optax.chain(T.average_gradients("data"), CLIP), None),
    "leaves said to be whole": (T.clip_by_global_norm(0.5, "data", split=SOME_SPLIT), "div"),
    "a leaf that scales another": (optax.chain(CLIP, stateless(scaled_by_a_leaf)), "mul"),
    "a running sum": (optax.chain(CLIP, stateless(running_sum)), "scan"),
    "a loop until": (optax.chain(CLIP, stateless(halved_while_large)), "reduce_sum, while"),
    "a branch if": (optax.chain(CLIP, stateless(negated_if_large)), "cond, reduce_sum"),
    "a branch that is rare": (
        matrix(lambda x: jax.lax.cond(jnp.sum(x) > 1e9, jnp.zeros_like, jnp.sin, x)),
        "reduce_sum",
    ),
}
PLACES = {
    "masked by size": (
        optax.masked(optax.scale(0.1), lambda t: jax.tree.map(lambda x: x.size > 2, t)),
        None,
    ),
    "scaled by fan-in": (leaves(lambda x: x / np.sqrt(x.shape[0])), None),
    "decayed by fan-in": (
        optax.GradientTransformation(lambda p: optax.EmptyState(), decayed_by_fan_in),
        None,
    ),
    "scaled by size": (leaves(lambda x: x / x.size), None),
    "rolled": (leaves(lambda x: jnp.roll(x, 1)), "slice"),
    "reversed": (leaves(jnp.flip), "rev"),
    "permuted": (matrix(permuted), None),
    "transposed": (matrix(lambda x: x.T.reshape(x.shape)), "transpose"),
    "triangle": (matrix(jnp.tril), "iota"),
    "first row frozen": (leaves(lambda x: x.at[0].set(0.0)), "scatter"),
    "by position": (
        leaves(lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)),
        "iota",
    ),
    "by an array": (leaves(lambda x: x * np.arange(x.size).reshape(x.shape)), None),
    "differences": (leaves(lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]])), None),
    "counted rows": (
        leaves(lambda x: jax.lax.scan(lambda n, row: (n + 1, row * n), 1.0, x)[1]),
        "scan",
    ),
    "by the first row": (matrix(lambda x: jax.lax.map(lambda row: row * x[0], x)), "scan"),
    "sums of rows": (
        matrix(lambda x: x * jax.lax.psum(x.sum(1, keepdims=True), "data")),
        "reduce_sum",
    ),
    "the least element": (leaves(lambda x: x * jax.lax.pmin(jnp.min(x), "data")), "reduce_min"),
    "the largest, below 0": (
        leaves(lambda x: x * jax.lax.pmax(jnp.max(-x * x), "data")),
        "reduce_max",
    ),
    "counts with padding": (summed(jnp.ones_like), "reduce_sum"),
    "exponentials with padding": (summed(jnp.exp), "reduce_sum"),
    "a sum and 1": (leaves(lambda x: x * jax.lax.psum(jnp.sum(x) + 1.0, "data")), "reduce_sum"),
    "a sum of integers": (
        leaves(lambda x: x * jax.lax.psum(jnp.sum(x).astype(int), "data")),
        "reduce_sum",
    ),
    "by device": (leaves(lambda x: x * (1 + jax.lax.axis_index("data"))), "axis_index"),
    "by number of devices": (leaves(lambda x: x / jax.lax.axis_size("data")), None),
}
"""By where an element is, how many there are, or what stands at padding. None: seen in the shapes
of the traces.
"""


def said(primitives):
    if primitives is None:
        return (
            "shard_updates: inner computes something else for shards: it depends on shapes, or on"
            " the number of devices." + FIX
        )
    return (
        f"shard_updates: inner mixes elements of a leaf ({primitives}), which means something else"
        " on a shard of it." + FIX
    )


@pytest.mark.parametrize("name", PLACES)
def test_what_depends_on_place_or_number_is_refused(name, ways):
    inner, primitives = PLACES[name]
    assert refusal(T.shard_updates(inner, "data"), ways["vmap"]) == said(primitives)


def test_an_array_that_fits_shards_by_accident(ways):
    """A column [4, 1] scales the rows of a leaf [4, 4], and of each shard [4, 1] the elements."""
    inner = leaves(lambda x: x * np.arange(4.0, dtype=np.float32)[:, None])
    with pytest.raises(ValueError, match="element by element") as caught:
        ways["vmap"](
            lambda g: T.shard_updates(inner, "data").update(
                g, T.shard_updates(inner, "data").init(g)
            )[0],
            4,
        )(jnp.ones((4, 4, 4)))
    assert str(caught.value) == said("mul")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_refused_for_a_reason(name, ways, x64, monkeypatch):
    """Let through, it would compute something else than on one device, where an axis of size 1 is
    bound.
    """
    module = importlib.import_module("shardopt.transforms._shard_updates")
    monkeypatch.setattr(module, "check_elementwise", lambda *args: None)
    inner = PLACES[name][0]
    means = jax.tree.map(lambda g: jnp.asarray(g.mean(0))[None], GRADS)
    found = ways["vmap"](steps(T.shard_updates(inner, "data")), N)(jax.tree.map(jnp.asarray, GRADS))
    expected = ways["vmap"](steps(inner), 1)(means)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert max(np.abs(a[0] - b[0]).max() / (np.abs(b[0]).max() + 1e-9) for a, b in pairs) > 1e-2


def refusal(tx, way):
    """What is said of it."""
    with pytest.raises(ValueError, match="shard_updates: inner") as caught:
        way(steps(tx), N)(jax.tree.map(jnp.asarray, GRADS))
    return str(caught.value)


@pytest.mark.parametrize("name", tiered(REFUSED, lambda name: name in list(REFUSED)[::2]))
def test_a_collective_excuses_nothing_else(name, ways):
    inner, primitives = REFUSED[name]
    for way in WAYS[:2]:
        assert refusal(T.shard_updates(inner, "data"), ways[way]) == said(primitives)


def from_old_key(updates):
    return jax.tree.map(
        lambda x: x * jax.random.bernoulli(jax.random.PRNGKey(0), 0.5, x.shape), updates
    )


def generated(updates):
    def one(x):
        bits = jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape, dtype=jnp.uint32)[1]
        return x * (bits % 2)

    return jax.tree.map(one, updates)


def noise():
    return optax.add_noise(1.0, 0.0, jax.random.key(0))


DRAWS = {
    "noise": (noise(), "random_bits"),
    "noise after a clip": (optax.chain(CLIP, noise()), "random_bits"),
    "a key of the old kind": (stateless(from_old_key), "random_bits"),
    "a generator": (stateless(generated), "rng_bit_generator"),
    "noise in a branch": (T.accumulate(optax.chain(noise(), optax.sgd(0.1)), 2), "random_bits"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_draws_are_refused(name, ways):
    inner, primitives = DRAWS[name]
    for way in WAYS[:2]:
        assert (
            refusal(T.shard_updates(inner, "data"), ways[way])
            == f"shard_updates: inner draws random numbers ({primitives}), which would be the same"
            " on each shard.\nFix: draw them before it:"
            " optax.chain(so.transforms.average_gradients(...), what draws,"
            " so.transforms.shard_updates(...))."
        )


@pytest.mark.slow
def test_noise_as_the_message_says(ways, x64):
    """Drawn before it, for the whole mean: what one device would draw."""
    tx = optax.chain(T.average_gradients("data"), noise(), T.shard_updates(optax.adam(0.1), "data"))
    for way in WAYS[:2]:
        check_equal(tx, optax.chain(noise(), optax.adam(0.1)), ways[way])
