"""A loop that runs until all rows are done: the proof sees it on the whole batch, and traces no
piece.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so

ROWS = np.arange(16.0, dtype=np.float32).reshape(8, 2) / 10
traced_rows: list[int] = []


def halved_until(done, params, batch):
    """Return a loss that halves `x` until `done(x)`."""
    traced_rows.append(batch.shape[0])
    x = jax.lax.fori_loop(0, 2, lambda _, x: x * 1.5, batch * params)
    x = jax.lax.while_loop(lambda carry: ~done(carry), lambda carry: carry / 2, x)
    return jnp.mean(jax.lax.stop_gradient(x) + batch * params)


def own_rows_done(params, batch):
    return halved_until(lambda x: jnp.all(x < 1), params, batch)


def whole_batch_done(params, batch):
    return halved_until(lambda x: jnp.all(so.losses.batch_mean(x) < 1), params, batch)


def unused_loop(params, batch):
    own_rows_done(params, batch)
    return jnp.mean(batch * params)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("loss_fn", "view", "sizes"),
    [
        (own_rows_done, "global", {8}),
        (whole_batch_done, "per_device", {8, 4}),
        (unused_loop, "per_device", {8, 4}),
    ],
)
@pytest.mark.filterwarnings("ignore:ddp")
def test_a_loop_over_rows_is_refused_before_a_piece_is_traced(loss_fn, view, sizes):
    traced_rows.clear()
    opt = so.ddp(
        optax.sgd(0.1, momentum=0.9), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn
    )
    _, metrics = opt.step(opt.init(jnp.ones(())), ROWS)
    assert opt.config.report().view.startswith(f"view: {view}")
    assert set(traced_rows) == sizes
    np.testing.assert_allclose(metrics["loss"], loss_fn(jnp.ones(()), ROWS), rtol=1e-6)


def turns_of_each_row(per_turn):
    """Return a loss whose rows take `x` turns each, every turn with `per_turn(batch)`."""

    def loss(params, batch):
        def of_row(x):
            def turn(carry):
                return carry[0] + 1, carry[1] / 2 + per_turn(batch)

            return jax.lax.while_loop(lambda carry: carry[0] < x, turn, (0.0, x))[1]

        return jnp.mean(jax.vmap(of_row)(batch[:, 0]) * params)

    return loss


@pytest.mark.fast
@pytest.mark.parametrize(
    ("per_turn", "view"),
    [
        (lambda batch: 0.5, "per_device"),
        (lambda batch: so.losses.batch_mean(batch[:, 0]), "global"),
        (lambda batch: so.losses.batch_sum(batch[:, 1]), "global"),
        (lambda batch: so.losses.gather_batch(batch)[2, 1], "global"),
    ],
)
@pytest.mark.filterwarnings("ignore:ddp")
def test_collectives_in_a_loop_with_turns_of_its_own_on_each_device_are_refused(per_turn, view):
    """The devices that take fewer turns would let the others wait."""
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    opt = so.ddp(optax.sgd(0.1), mesh, turns_of_each_row(per_turn))
    _, metrics = opt.step(opt.init(jnp.ones(())), ROWS)
    assert opt.config.report().view.startswith(f"view: {view}")
    np.testing.assert_allclose(
        metrics["loss"], turns_of_each_row(per_turn)(jnp.ones(()), ROWS), rtol=1e-6
    )
