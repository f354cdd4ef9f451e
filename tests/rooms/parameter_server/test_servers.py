"""Several servers: the same bits as one, ranges of equal bytes, and what they cannot share is
refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference, same_bits
from support.tiers import tiered

import shardopt as so
from shardopt.core._errors import CheckpointError
from shardopt.parameter_server import SparseRows, make_server, make_update, replay, rules
from shardopt.parameter_server._sharded import shard, unshard

SHARDED_CLIP = so.transforms.clip_by_global_norm(0.5, "servers", split=True)


def as_if_by_one(log):
    """The same log, of one server."""
    one = so.parameter_server.Log.from_columns(log.header, log.columns())
    del one.header["servers"]
    return one


@pytest.mark.parametrize(
    ("max_staleness", "rule"),
    tiered([(0, None), (2, rules.dc_asgd_adaptive())], lambda row: row[0] == 2),
)
def test_the_same_bits_as_one_server(max_staleness, rule, regression):
    """Without staleness also run after run.

    Otherwise by the log of the run, replayed on one server.
    """
    tx, batches_of = optax.adamw(0.05), regression.batches_of(2)
    params = {**regression.params, "steps": jnp.int32(7)}  # not trained

    def loss_fn(params, batch):
        return regression.loss_fn({name: params[name] for name in "wb"}, batch)

    opt = so.async_sgd(
        tx,
        loss_fn,
        workers=jax.devices()[:1] * 2,
        servers=3,
        max_staleness=max_staleness,
        rule=rule,
    )
    result = opt.run(params, batches_of, num_updates=20)
    assert result.log.header["servers"] == 3
    same_bits(opt.replay(result.log, params, batches_of), result.params)
    same_bits(replay(as_if_by_one(result.log), tx, loss_fn, params, batches_of), result.params)
    if max_staleness == 0:
        one = so.async_sgd(tx, loss_fn, workers=2)
        same_bits(one.run(params, batches_of, num_updates=20).params, result.params)


@pytest.mark.slow  # test_the_same_bits_as_one_server, by the same servers
def test_islands_get_the_same_bits_as_with_one_server(regression):
    meshes = [so.make_mesh(devices=jax.devices()[2 * i : 2 * i + 2]) for i in range(2)]
    made = [so.ddp(optax.sgd(0.05), mesh, regression.loss_fn) for mesh in meshes]
    opt = so.async_local_sgd(made, local_steps=2, max_staleness=0, servers=3)
    result = opt.run(regression.params, regression.batches_of(2), num_updates=4)
    assert result.log.header["servers"] == 3
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(2)), result.params)
    one = so.async_local_sgd(made, local_steps=2, max_staleness=0)
    same_bits(
        one.replay(as_if_by_one(result.log), regression.params, regression.batches_of(2)),
        result.params,
    )


def test_what_servers_of_islands_cannot_be_combined_with_is_refused(regression, message_of):
    made = [so.ddp(optax.sgd(0.05), so.make_mesh(devices=jax.devices()[:2]), regression.loss_fn)]
    for name, given in (
        ("reducer", so.reducers.int8()),
        ("fragments", 2),
        ("delay", 1),
        ("mix", 0.5),
    ):
        found = message_of(
            ValueError, so.async_local_sgd, made, local_steps=2, servers=2, **{name: given}
        )
        both = name if name == "reducer" else "fragments, delay or mix"
        assert (
            found
            == f"async_local_sgd: servers=2 and {both} cannot be combined: each server gets a range"
            f" of every leaf of each push.\nFix: leave out servers or {both}."
        )


def test_a_global_norm_in_two_phases(regression):
    """Equal to optax's clip on one server up to summation order, and to its own log bit for bit."""
    batches_of = regression.batches_of(2)
    tx = optax.chain(SHARDED_CLIP, optax.sgd(0.1, momentum=0.9))
    here = jax.devices()[:1] * 2  # one program for all
    opt = so.async_sgd(tx, regression.loss_fn, workers=here, servers=3)
    result = opt.run(regression.params, batches_of, num_updates=20)
    same_bits(
        replay(result.log, tx, regression.loss_fn, regression.params, batches_of), result.params
    )
    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    one = so.async_sgd(plain, regression.loss_fn, workers=here).run(
        regression.params, batches_of, num_updates=20
    )
    assert relative_difference(one.params, regression.params) > 0
    assert relative_difference(one.params, result.params) <= 1e-6
    first = regression.batches[0]
    # the first gradient: it did clip
    assert np.linalg.norm(2 * first["x"].T @ first["y"] / len(first["y"])) > 1


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_the_bytes_of_a_server_halve(servers):
    """Adam's moments and the parameters, and a counter of 4 bytes.

    Each server on a device of its own.
    """
    devices = jax.devices()[:servers]
    server = make_server(optax.adam(0.1), servers=servers, devices=devices if servers > 1 else ())
    params = {"table": np.ones((10, 6), np.float32), "bias": np.ones(4, np.float32)}
    state = server.init(params)
    trees = [state.params] if servers == 1 else state.params.trees
    states = [state.opt_state] if servers == 1 else state.opt_state
    for i, part in enumerate(zip(trees, states, strict=True)):
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(part)) == 3 * 64 * 4 // servers + 4
        assert servers == 1 or {d for leaf in jax.tree.leaves(part) for d in leaf.devices()} == {
            devices[i]
        }
    same_bits(server.whole(state.params), params)


@pytest.mark.fast
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_shards_are_ranges_and_come_together_again(servers):
    draw = np.random.default_rng(0)
    tree = {
        str(shape): draw.normal(size=shape).astype(np.float32)
        for shape in [(), (1,), (5,), (3, 4), (2, 3, 2)]
    }
    parts = shard(tree, servers)
    assert {leaf.ndim for leaf in parts[0].values()} == {0, 1, 2, 3}
    assert all(np.shares_memory(parts[0][name], tree[name]) for name in ("(3, 4)", "(2, 3, 2)"))
    same_bits(unshard(parts, [leaf.shape for leaf in jax.tree.leaves(tree)]), tree)
    assert all(parts[i]["()"] == 0 for i in range(1, servers))


FIX = (
    "\nFix: use what works element by element (sgd, adam, adamw, lion, ...); for clipping by the"
    ' global norm so.transforms.clip_by_global_norm(max_norm, "servers", split=True); or servers=1,'
    " which takes any optimizer."
)
GIVES = "servers=2 gives each server a range of every leaf, and the optimizer or the rule "
TWICE = optax.chain(SHARDED_CLIP, optax.sgd(0.1), SHARDED_CLIP)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            (
                f"{GIVES}mixes elements of a leaf (reduce_sum), which means something else on a"
                f" shard of it.{FIX}"
            ),
        ),
        (
            optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
            (
                f"{GIVES}draws random numbers (random_bits), which would be the same on each"
                f" shard.{FIX}"
            ),
        ),
        (
            TWICE,
            (
                "the optimizer cannot run on several servers: one sum over the servers needs"
                " another one first.\nFix: use one so.transforms.clip_by_global_norm(max_norm,"
                ' "servers", split=True), not inside of another rule.'
            ),
        ),
    ],
    ids=["norm", "noise", "two sums"],
)
def test_what_servers_cannot_share_is_refused(tx, message, regression, message_of):
    opt = so.async_sgd(tx, regression.loss_fn, workers=1, servers=2)
    found = message_of(
        ValueError, opt.run, regression.params, regression.batches_of(1), num_updates=1
    )
    assert found.split(": ", 1)[1] == message


@pytest.mark.fast
def test_arguments_are_refused(message_of):
    loss_fn, tx = lambda params, batch: jnp.sum(params["w"]), optax.sgd(0.1)
    assert (
        message_of(ValueError, so.async_sgd, tx, loss_fn, workers=2, servers=0)
        == "async_sgd: servers must be at least 1, got 0."
    )
    for option in ({"reducer": so.reducers.int8()}, {"sparse": ["w"]}):
        (name,) = option
        assert (
            message_of(ValueError, so.async_sgd, tx, loss_fn, workers=2, servers=2, **option)
            == f"async_sgd: servers=2 and {name} cannot be combined: each server gets a range of"
            f" every leaf of each push.\nFix: leave out servers or {name}."
        )


def test_a_push_that_does_not_fit_is_refused(message_of):
    server = make_server(optax.sgd(0.1), servers=2, max_staleness=None)
    state, _ = server.join(server.init({"w": np.ones(3, np.float32)}), 0)
    state, pulled = server.pull(state, 0)

    def push(grads):
        return server.push(state, 0, make_update(grads), pulled.version)

    assert "w: float32[2], the parameter is float32[3]" in message_of(
        ValueError, push, {"w": jnp.ones(2)}
    )
    with pytest.raises(so.parameter_server.NonFiniteUpdateError, match="w: not finite"):
        push({"w": jnp.array([1.0, jnp.nan, 0.0])})
    rows = SparseRows(np.array([0], np.int32), np.ones(1, np.float32))
    assert message_of(ValueError, push, {"w": rows}).startswith(
        "parameter_server: a sparse push cannot be shared out"
    )


@pytest.mark.slow  # test_the_same_bits_as_one_server
def test_checkpoints_and_another_number_of_servers(regression, tmp_path, message_of):
    """A run that goes on ends where an unbroken one does, bit for bit.

    On another number of servers it is refused.
    """
    here = jax.devices()[:1] * 2  # one program for all
    opt = so.async_sgd(optax.adam(0.05), regression.loss_fn, workers=here, servers=2)
    unbroken = opt.run(regression.params, regression.batches_of(2), num_updates=12)
    with so.Checkpoints(tmp_path, every=5, keep=2) as checkpoints:
        opt.run(regression.params, regression.batches_of(2), num_updates=7, checkpoints=checkpoints)
        result = opt.run(
            regression.params, regression.batches_of(2), num_updates=12, checkpoints=checkpoints
        )
        assert result.metrics["resumed_from"] == 7
        same_bits(result.params, unbroken.params)
        three = so.async_sgd(optax.adam(0.05), regression.loss_fn, workers=here, servers=3)
        with pytest.raises(
            CheckpointError, match=r"params/trees/2/w: float32\[2\], missing from the checkpoint"
        ):
            three.run(
                regression.params, regression.batches_of(2), num_updates=14, checkpoints=checkpoints
            )
