"""Random numbers in a loss: one draw for all rows is not a draw for each row.

Each piece has a key of its own. So a mean over pieces is right in expectation, and a quotient, an
extreme or a number that all pieces see is not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.piecewise import as_users_have_it
from support.tiers import tiered

import shardopt as so
from shardopt.core._trace_context import RowContext
from shardopt.core._types import abstract
from shardopt.losses._separable import Cut, LossCall, find_mixing

PARAMS = {"w": np.array([0.5, -1.0, 2.0])}
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(8, 3)) + np.arange(8)[:, None] / 4, "label": np.arange(8) % 3}


def errors(p, b):
    return (b["x"] @ p["w"] - 1) ** 2


def rows(b):
    return b["x"].shape[0]


def masked(mask):
    """Return the mean error of the rows that a mask keeps: `mask(rate_key, mask_key, b)`."""

    def loss(p, b, rng):
        weight = mask(*jax.random.split(rng), b).astype(float)
        return so.losses.Weighted(jnp.sum(errors(p, b) * weight), jnp.sum(weight) + 1e-3 * rows(b))

    return loss


def uniform(key, shape=()):
    return jax.random.uniform(key, shape)


def replicated():
    mesh = so.make_mesh(data=1, devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def of_row(key, i):
    return uniform(jax.random.fold_in(key, i))


SHARED = {
    "a masking rate": masked(lambda r, m, b: uniform(m, (rows(b),)) < uniform(r)),
    "a rate by its logarithm": masked(lambda r, m, b: uniform(m, (rows(b),)) < jnp.exp(-2 * uniform(r))),
    "a scale of all weights": masked(lambda r, m, b: uniform(m, (rows(b),)) * uniform(r) ** 4),
    "a chosen branch": masked(
        lambda r, m, b: jax.lax.cond(
            uniform(r) < 0.5, lambda: uniform(m, (rows(b),)), lambda: 9 * jnp.ones(rows(b))
        )
    ),
    "a number of turns": masked(
        lambda r, m, b: jax.lax.fori_loop(
            0, jax.random.randint(r, (), 0, 4), lambda _, x: x * 3.0, uniform(m, (rows(b),))
        )
    ),
    "one key for all rows": masked(
        lambda r, m, b: jax.vmap(uniform)(jnp.broadcast_to(r, (rows(b),))) ** 4
    ),
    "a draw for each class": masked(lambda r, m, b: jax.vmap(of_row, (None, 0))(r, b["label"]) ** 4),
    "the sum of a row and a draw": masked(lambda r, m, b: uniform(m, (rows(b),)) + 9 * uniform(r) ** 4),
    "in a scan over rows": masked(
        lambda r, m, b: jax.lax.scan(
            lambda c, x: (c, uniform(r) ** 4 + 0 * x[0]), 0.0, b["x"]
        )[1]
    ),
    "in a vmapped while": masked(
        lambda r, m, b: jax.vmap(
            lambda x, u: jax.lax.while_loop(
                lambda s: s[0] < x[0], lambda s: (s[0] + 1, 0.9 * s[1]), (0.0, u)
            )[1],
            (0, None),
        )(b["x"], uniform(r) ** 4)
    ),
    "scanned with rows": masked(
        lambda r, m, b: jax.lax.map(
            lambda x: x[1] ** 4 + 0 * x[0][0], (b["x"], jnp.broadcast_to(uniform(r), (rows(b),)))
        )
    ),
}  # fmt: skip


def carried(used, derived):
    """Return a loss of a scan that carries a key: numbers of a turn meet numbers of the turn
    before.

    A turn draws from `used(key)`, and from `used(derived(key))`. The next turn has the key `derived(key)`.
    """

    def loss(p, b, rng):
        def turn(carry, _):
            key, before, total = carry
            now = uniform(used(key), (rows(b),))
            after = uniform(used(derived(key)), (rows(b), 2))[:, 0]
            return (derived(key), after, total + before * now), None

        zeros = jnp.zeros(rows(b))
        return jnp.mean(jax.lax.scan(turn, (rng, zeros, zeros), length=3)[0][2])

    return loss


def twice(key_maker):
    """Return a loss that draws from a key for each row, and from the result of `key_maker`."""
    return lambda p, b, rng: jnp.mean(uniform(rng, (rows(b),)) * uniform(key_maker(rng)))


@jax.custom_vjp
def drawn_forward(x, key):
    return x


drawn_forward.defvjp(lambda x, key: (x * jnp.exp(2 * jax.random.normal(key)), None), lambda _, ct: (ct, None))  # fmt: skip


@jax.custom_jvp
def drawn_when_differentiated(x, u):
    return x


@drawn_when_differentiated.defjvp
def _(primals, tangents):
    return primals[0] * (1 + primals[1]), tangents[0]


BY_RULES = {
    "a weight that a forward rule draws": lambda p, b, rng: so.losses.Weighted(
        jnp.sum(errors(p, b)), jnp.sum(drawn_forward(b["x"][:, 0] ** 2, rng))
    ),
    "the largest number that a forward rule draws": lambda p, b, rng: (
        jnp.mean(errors(p, b)),
        {"largest": so.losses.Max(jnp.max(drawn_forward(b["x"][:, 0], rng)))},
    ),
    "a shared number that a forward rule draws": lambda p, b, rng: (
        jnp.mean(errors(p, b)),
        {"largest": so.losses.Max(drawn_forward(p["w"][0], rng))},
    ),
    "a weight that a rule of tangents draws": lambda p, b, rng: so.losses.Weighted(
        jnp.sum(errors(p, b)), jnp.sum(drawn_when_differentiated(b["x"][:, 0] ** 2, uniform(rng)))
    ),
}


def from_numbers(words):
    return jax.random.wrap_key_data(words.astype(jnp.uint32))


def stacked(key_of_turn, in_a_list=lambda keys: keys):
    """Return a loss that draws with the keys of two turns."""

    def loss(p, b, rng):
        keys = in_a_list(jax.lax.map(lambda turn: key_of_turn(rng, turn), jnp.arange(2)))
        return jnp.mean(uniform(keys[0], (rows(b),)) * uniform(keys[1]))

    return loss


def of_each_row(key):
    """Return the number that a key gives after a split."""
    return uniform(jax.random.split(key)[0])


def root_or_child(key, is_child):
    return jax.lax.cond(is_child, lambda: jax.random.split(key)[0], lambda: key)


def hidden(other_key, key):
    """Return a key by its words as integers, plus 0 times the words of another key."""
    words = jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)
    return from_numbers(words.astype(jnp.uint32) + 0 * jax.random.key_data(other_key))


def chained(p, b, rng):
    """Turns draw from the keys of rows, and pass on the key of the first row."""

    def turn(carry, _):
        key, before, total = carry
        keys = jax.random.split(key, rows(b))
        total = total + before * jax.vmap(uniform)(keys)
        return (jax.random.split(key)[0], jax.vmap(of_each_row)(keys), total), None

    zeros = jnp.zeros(rows(b))
    return jnp.mean(jax.lax.scan(turn, (rng, zeros, zeros), length=2)[0][2])


def list_of_turns(p, b, rng):
    """Keys of rows follow from a list: of a key, and of another one that is made of it."""
    keys = jax.lax.scan(lambda key, _: (jax.random.split(key)[0], key), rng, length=2)[1]
    of_rows = jax.vmap(lambda key: jax.random.split(key, rows(b)))(keys)
    return jnp.mean(jax.vmap(of_each_row)(of_rows[0]) * jax.vmap(uniform)(of_rows[1]))


REUSED = {
    "the bits of a row's key": lambda p, b, rng: jnp.mean(
        jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(rows(b))))
        == jax.random.key_data(jax.random.fold_in(rng, 2))
    ),
    "the bits of a key, and rows": lambda p, b, rng: jnp.mean(
        jax.random.key_data(jax.random.split(rng, rows(b)))[:, 0]
        % 1000
        * (jax.random.key_data(jax.random.split(rng)[0])[0] % 1000).astype(float)
    ),
    "two branches": lambda p, b, rng: jnp.mean(
        jax.vmap(of_each_row)(jax.random.split(root_or_child(rng, p["w"][0] > 9), rows(b)))
        * jax.vmap(uniform)(jax.random.split(root_or_child(rng, p["w"][0] < 9), rows(b)))
    ),
    "hidden in integers, added to another key": lambda p, b, rng: jnp.mean(
        uniform(hidden(*jax.random.split(rng)), (rows(b),)) * uniform(jax.random.split(rng)[1])
    ),
    "keys of rows in turns": chained,
    "keys of rows of a list that turns made": list_of_turns,
    "a number of the row keys' first": lambda p, b, rng: jnp.mean(
        jax.vmap(of_row, (None, 0))(rng, jnp.arange(rows(b))) * of_row(rng, 0)
    ),
    "two draws from one key": lambda p, b, rng: jnp.mean(uniform(rng, (rows(b),)) * uniform(rng)),
    "rows and features": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b), 3))[:, 1] * uniform(rng, (3,))[1]
    ),
    "rows of two shapes": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),)) * uniform(rng, (rows(b), 3))[:, 0]
    ),
    "keys of two splits": lambda p, b, rng: jnp.mean(
        jax.vmap(uniform)(jax.random.split(rng, rows(b))) * uniform(jax.random.split(rng)[0])
    ),
    "inside a call": lambda p, b, rng: jnp.mean(
        jax.jit(lambda k: uniform(k, (rows(b),)))(jax.random.fold_in(rng, 3))
        * jax.checkpoint(lambda k: uniform(jax.random.fold_in(k, 3)))(rng)
    ),
    "after rows, in a scan over rows": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),)) * jax.lax.map(lambda x: uniform(rng) + 0 * x[0], b["x"])
    ),
    "before a scan over rows": lambda p, b, rng: jnp.mean(
        jax.lax.map(lambda x: uniform(rng) + 0 * x[0], b["x"]) * uniform(rng, (rows(b),))
    ),
    "hidden in numbers, in a scan over rows": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),))
        * jax.lax.map(
            lambda x: uniform(from_numbers(jax.random.key_data(rng).astype(int))) + 0 * x[0], b["x"]
        )
    ),
    "its words, stacked again": twice(
        lambda k: from_numbers(jnp.stack([jax.random.key_data(k)[i] for i in (0, 1)]))
    ),
    "words of one split, stacked again": lambda p, b, rng: jnp.mean(
        uniform(jax.random.split(rng, ()), (rows(b),))
        * uniform(from_numbers(jnp.stack([*jax.random.key_data(jax.random.split(rng, ()))])))
    ),
    "its words, halved and added again": twice(
        lambda k: from_numbers(jax.random.key_data(k) // 2 + (jax.random.key_data(k) + 1) // 2)
    ),
    "in a scan, of a key outside": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),)) * jax.lax.scan(lambda c, _: (c, uniform(rng)), 0.0, length=2)[1][1]
    ),
    "a key that a scan makes": lambda p, b, rng: jnp.mean(
        uniform(jax.random.split(rng)[0], (rows(b),))
        * jax.lax.scan(lambda k, _: (jax.random.split(k)[0], uniform(k)), rng, length=3)[1][1]
    ),
    "one key in every turn": stacked(lambda k, _: jnp.squeeze(jax.random.split(k, 1))),
    "one list of a key in every turn": stacked(lambda k, _: jax.random.split(k, 1), jnp.squeeze),
    "one key in turns of a turn": stacked(
        lambda k, _: jax.lax.map(lambda _: jnp.squeeze(jax.random.split(k, 1)), jnp.arange(1)),
        jnp.squeeze,
    ),
    "turns that fold numbers in": carried(
        lambda k: jax.random.fold_in(k, 1), lambda k: jax.random.fold_in(k, 2)
    ),
    "turns that split": carried(lambda k: jax.random.split(k)[0], lambda k: jax.random.split(k)[1]),
    "turns that split in three": carried(
        lambda k: jax.random.fold_in(jax.random.split(k, 3)[2], 5),
        lambda k: jax.random.split(k, 3)[1],
    ),
    "bits that are wrapped again": twice(
        lambda k: jax.random.wrap_key_data(jax.random.key_data(k))
    ),
    "a barrier": twice(jax.lax.optimization_barrier),
    "a stack": twice(lambda k: jnp.stack([jax.random.fold_in(k, 1), k])[1]),
    "copies": twice(lambda k: jnp.broadcast_to(k, (3,))[1]),
    "a branch": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),))
        * uniform(jax.lax.cond(p["w"][0] > 0, lambda k: k, lambda k: jax.random.fold_in(k, 1), rng))
    ),
    "one of several, and all": lambda p, b, rng: jnp.mean(
        uniform(jax.random.split(rng, 3)[0], (rows(b),))
        * jax.vmap(uniform)(jax.random.split(rng, 3))[0]
    ),
    "slices that overlap": lambda p, b, rng: jnp.mean(
        uniform(jax.random.split(rng, 3)[0], (rows(b),)) * uniform(jax.random.split(rng, 3)[:2][0])
    ),
    "as many numbers as all rows": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b),)) * uniform(rng, (8,))[3]
    ),
    "features of all rows": lambda p, b, rng: jnp.mean(
        uniform(rng, (rows(b), 3)) * uniform(rng, (8, 3))[0]
    ),
    "as many numbers as all rows, in a call": lambda p, b, rng: jnp.mean(
        jax.random.normal(rng, (rows(b),))
        * jax.jit(jax.random.normal, static_argnums=1)(rng, (8,))[1]
    ),
    "keys of as many rows": lambda p, b, rng: jnp.mean(
        jax.vmap(uniform)(jax.random.split(rng, rows(b))) * uniform(jax.random.split(rng, 8)[2])
    ),
    "a number that may be equal": lambda p, b, rng: jnp.mean(
        uniform(jax.random.fold_in(rng, 0), (rows(b),))
        * uniform(jax.random.fold_in(rng, p["w"][0].astype(int)))
    ),
}
"""Losses that use one key twice. The mean over keys differs, although each term is right alone."""


def by_rows(key_of):
    """Return a loss that draws a number for each row from a key."""
    return lambda p, b, rng: jnp.mean(b["x"][:, 0] * uniform(key_of(p, rng), (rows(b),)))


def in_one_of_two(key_of):
    """Return the mean over rows of numbers of a key or, by a parameter, of another one."""
    return by_rows(lambda p, rng: jax.lax.cond(p["w"][0] > 0, lambda: key_of(rng), lambda: rng))


def with_bits(change):
    return by_rows(lambda p, rng: jax.random.wrap_key_data(change(p, jax.random.key_data(rng))))


ZERO_KEY = np.zeros(2, np.uint32)
NO_KEYS_OF_A_DEVICE = {
    "a constant one in one of two branches": in_one_of_two(lambda _: jax.random.key(0)),
    "a hidden one in one of two branches": in_one_of_two(
        lambda rng: hidden(*jax.random.split(rng))
    ),
    "a constant one that is chosen": with_bits(
        lambda p, bits: jnp.where(p["w"][0] > 0, ZERO_KEY, bits)
    ),
    "a constant one after turns": by_rows(
        lambda p, rng: jax.lax.fori_loop(
            0, p["w"][0].astype(int), lambda i, key: jax.random.key(0), rng
        )
    ),
    "a constant one of a list": with_bits(
        lambda p, bits: jax.lax.dynamic_index_in_dim(
            jnp.stack([ZERO_KEY, bits]), p["w"][0].astype(int), keepdims=False
        )
    ),
    "bits that a mask removes": with_bits(lambda p, bits: bits & p["w"][0].astype(jnp.uint32)),
    "bits times a number": with_bits(lambda p, bits: bits * p["w"][0].astype(jnp.uint32)),
    "bits that are sorted": with_bits(lambda p, bits: jnp.sort(bits)),
    "bits that are shifted": with_bits(lambda p, bits: bits >> 31),
    "a draw of few numbers": by_rows(
        lambda p, rng: jax.random.fold_in(jax.random.key(0), jax.random.bits(rng) & 1)
    ),
    "a seed of few numbers": by_rows(lambda p, rng: jax.random.key(jax.random.bits(rng) & 1)),
    "a place of a list that is not there": by_rows(
        lambda p, rng: jnp.take(jax.random.split(rng), p["w"][0].astype(int), mode="fill")
    ),
}
"""Losses whose rows draw from a key that may be the same on all devices."""
OWN = {
    "a rate for each row": masked(lambda r, m, b: uniform(m, (rows(b),)) < uniform(r, (rows(b),))),
    "a key for each row": masked(
        lambda r, m, b: jax.vmap(uniform)(jax.random.split(r, rows(b))) > 0.3
    ),
    "a key for each number": masked(
        lambda r, m, b: jax.vmap(of_row, (None, 0))(r, jnp.arange(rows(b)))
    ),
    "a scale of the errors": lambda p, b, rng: jnp.mean(errors(p, b) * uniform(rng)),
    "keys of one key": lambda p, b, rng: jnp.mean(
        uniform(jax.random.split(rng)[0], (rows(b),)) * uniform(jax.random.split(rng)[1], (rows(b), 3))[:, 0]
    ),
    "a key of each number": lambda p, b, rng: jnp.mean(
        uniform(jax.random.fold_in(rng, 0), (rows(b),)) * uniform(jax.random.fold_in(rng, 1))
    ),
    "a key of each layer": lambda p, b, rng: jax.lax.scan(
        lambda x, k: (x * jax.random.bernoulli(k, 0.9, x.shape), None), errors(p, b), jax.random.split(rng, 3)
    )[0].mean(),
    "a key that a scan carries": lambda p, b, rng: jax.lax.scan(
        lambda c, _: ((jax.random.split(c[0])[0], c[1] * uniform(jax.random.split(c[0])[1], c[1].shape)), None),
        (rng, errors(p, b)), length=3,
    )[0][1].mean(),
    "features that all rows drop": lambda p, b, rng: so.losses.Weighted(
        jnp.sum(errors(p, {"x": b["x"] * jax.random.bernoulli(rng, 0.5, (3,))})), rows(b)
    ),
    "noise": lambda p, b, rng: jnp.mean(errors(p, {"x": b["x"] + jax.random.normal(rng, b["x"].shape)})),
    "a key that moves to a device": by_rows(lambda p, rng: jax.device_put(rng)),
    "a key that is cloned, as by a scan of flax linen": by_rows(lambda p, rng: jax.random.clone(rng)),
    "a key with a name": with_bits(lambda p, bits: checkpoint_name(bits, "bits")),
    "a key with a constraint": by_rows(
        lambda p, rng: jax.lax.with_sharding_constraint(rng, replicated())
    ),
    "a key that is placed on a mesh, as by flax nnx": by_rows(
        lambda p, rng: jax.sharding.reshard(rng, replicated())
    ),
    "a key of a list that is looked up": by_rows(
        lambda p, rng: jax.random.split(rng, 3)[jnp.array([2, 0])][0]
    ),
    "a key that is repeated": by_rows(lambda p, rng: jnp.tile(rng[None], 2)[1]),
}  # fmt: skip


SHARED |= REUSED
UNBIASED = {"a chosen branch", "a number of turns", "the sum of a row and a draw"}
"""Shared draws that change the loss too little to be seen in its mean over keys."""


def mixing(loss_fn, pieces=2):
    with as_users_have_it():
        call = LossCall(key=jax.eval_shape(lambda: jax.random.key(0)))
        return find_mixing(loss_fn, *abstract((PARAMS, BATCH)), Cut(pieces), call)


def expectations(loss_fn, draws=1 << 17):
    """Return the expected loss of the whole batch, and of two pieces with keys of their own."""

    def parts(key, start, size):
        piece = {name: leaf[start : start + size] for name, leaf in BATCH.items()}
        value = loss_fn(PARAMS, piece, key)
        return value if isinstance(value, so.losses.Weighted) else (value * size, size)

    def both(key):
        keys = jax.random.split(key, 3)
        whole_sums = parts(keys[0], 0, 8)
        pieces = [parts(keys[1], 0, 4), parts(keys[2], 4, 4)]
        return whole_sums[0] / whole_sums[1], sum(x for x, _ in pieces) / sum(x for _, x in pieces)

    with as_users_have_it():
        values = jax.jit(jax.vmap(both))(jax.random.split(jax.random.key(1), draws))
        return [(float(jnp.mean(x)), float(jnp.std(x)) / draws**0.5) for x in values]


@pytest.mark.fast
@pytest.mark.parametrize("name", SHARED | BY_RULES)
def test_a_weight_that_follows_from_one_draw_for_all_rows_is_refused(name):
    assert mixing((SHARED | BY_RULES)[name]) is not None


@pytest.mark.fast
@pytest.mark.parametrize("name", OWN)
def test_draws_for_each_row_and_shared_factors_of_a_mean_are_accepted(name):
    assert mixing(OWN[name]) is None


@pytest.mark.parametrize(
    "name",
    tiered(sorted((SHARED.keys() | OWN.keys()) - UNBIASED), lambda name: name == "a masking rate"),
)
def test_labels_of_draws_are_those_of_many_keys(name):
    (whole_loss, error), (pieces, other_error) = expectations({**SHARED, **OWN}[name])
    deviations = abs(whole_loss - pieces) / max(np.hypot(error, other_error), 1e-9)
    assert deviations < 4 if name in OWN else deviations > 6, (whole_loss, pieces, deviations)


@jax.custom_vjp
def scaled_by_all_rows(w, x):
    return w * jnp.mean(x)


scaled_by_all_rows.defvjp(
    lambda w, x: (w * jnp.mean(x), so.losses.batch_sum(x) / x.shape[0]),
    lambda mean, ct: (ct * mean, None),
)


@pytest.mark.fast
@pytest.mark.parametrize("name", NO_KEYS_OF_A_DEVICE)
def test_rows_do_not_draw_from_a_key_that_devices_may_share(name):
    problem = mixing(NO_KEYS_OF_A_DEVICE[name])
    assert problem is not None
    assert problem.reason.startswith("devices may have this random key in common.")


@pytest.mark.fast
def test_words_of_a_key_that_are_looked_up_are_known_on_pieces_of_one_row():
    def loss(p, b, rng):
        words = jnp.broadcast_to(jax.random.key_data(jax.random.split(rng)[0]), (rows(b), 2))
        first = jnp.take_along_axis(words, jnp.zeros((rows(b), 1), int), axis=1, mode="clip")
        return jnp.mean(jax.random.key_data(jax.random.split(rng, rows(b)))[:, :1] == first)

    assert mixing(loss, pieces=8) is not None


@jax.custom_jvp
def drawn_tangent(x, key):
    return x * 1.0


@drawn_tangent.defjvp
def _(primals, tangents):
    return primals[0] * 1.0, tangents[0] * uniform(primals[1]).astype(tangents[0].dtype)


@jax.custom_vjp
def drawn_cotangent(x, key):
    return x * 1.0


drawn_cotangent.defvjp(
    lambda x, key: (x * 1.0, key), lambda key, cotangent: (cotangent * uniform(key), None)
)


@pytest.mark.fast
@pytest.mark.parametrize("f", [drawn_tangent, drawn_cotangent])
def test_a_derivative_that_is_drawn_is_refused_if_its_result_is_not(f):
    """Else a sum over devices multiplies draws of two devices, where one device squares its own."""

    def loss(p, b, rng):
        return f(so.losses.batch_mean(f(b * p, rng)), rng)

    call = LossCall(
        key=jax.eval_shape(lambda: jax.random.key(0)),
        context=RowContext(("data",), 2),
        axis_sizes={"data": 2},
    )
    arguments = abstract((jnp.float32(0), jnp.zeros(8, jnp.float32)))
    with as_users_have_it():
        assert find_mixing(loss, *arguments, Cut(2), call) is not None


@pytest.mark.fast
def test_a_rule_that_asks_for_all_rows_is_refused():
    def loss(p, b):
        return scaled_by_all_rows(p["w"][0], b["x"][:, 0])

    call = LossCall(context=RowContext(("data",), 2), axis_sizes={"data": 2})
    with as_users_have_it():
        problem = find_mixing(loss, *abstract((PARAMS, BATCH)), Cut(2), call)
    assert problem is not None


@pytest.mark.fast
@pytest.mark.parametrize("kind", [so.losses.Max, so.losses.Min])
@pytest.mark.parametrize("value", [lambda e, k: uniform(k), lambda e, k: jnp.max(e * uniform(k)), lambda e, k: -jnp.min(e + uniform(k))])  # fmt: skip
def test_an_extreme_of_one_draw_for_all_rows_is_refused(kind, value):
    def loss(p, b, rng):
        return jnp.mean(errors(p, b)), {"metric": kind(value(errors(p, b), rng))}

    problem = mixing(loss)
    assert problem is not None
    assert problem.result == "metric 'metric'"


@pytest.mark.fast
def test_the_message_names_the_weight_and_the_remedy():
    problem = mixing(SHARED["a masking rate"])
    assert problem is not None
    assert problem.result == "the weight of the loss"
    assert problem.reason == (
        "it follows from one random number for all rows, and each device draws another one. Draw one"
        " for each row."
    )
