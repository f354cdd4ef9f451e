"""`check` compares promises with the compiled program, also when somebody breaks a strategy."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.tiers import tiered
from support.traffic import Expected, check_traffic

import shardopt as so
from shardopt.hlo import audit

pytestmark = pytest.mark.fast

SIZE = 64 * 16 * 4


def look(mesh_of, reduce, **sizes):
    """Audit four micro-batches whose gradients `reduce(grads, inside)` reduces in the loop and
    after it.
    """
    mesh = mesh_of(**sizes)

    def step(params, batch):
        def micro(total, rows):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(params)
            return (total[0] + loss, total[1] + reduce(grad, True)), None

        (loss, grads), _ = lax.scan(micro, (0.0, jnp.zeros_like(params)), batch.reshape(4, -1, 64))
        return params - reduce(grads, False), lax.pmean(loss, "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return audit(
        jax.jit(jax.shard_map(step, mesh=mesh, **specs)),
        jnp.ones((64, 16)),
        jnp.ones((64, 64)),
        mesh=mesh,
    )


def after(grads, inside):
    return grads if inside else lax.pmean(grads, "data")


GOOD = [Expected("all-reduce", "data", SIZE, calls=1, in_loop=False)]


def test_a_reduction_after_the_loop_is_as_promised(mesh_of):
    # the compiler may merge the loss into it: its four bytes are then part of the sum
    report = look(mesh_of, after, data=4, tensor=2)
    check_traffic(report, [Expected("all-reduce", "data", SIZE)], min_bytes=64, rtol=4 / SIZE)
    with pytest.raises(AssertionError, match="expected 4,000 bytes, found 4,"):
        check_traffic(report, [Expected("all-reduce", "data", 4000)], min_bytes=64)


BREAKS = {
    "no reduction": lambda grads, inside: grads,
    "one a micro-batch": lambda grads, inside: lax.pmean(grads, "data") if inside else grads,
    "another axis": lambda grads, inside: grads if inside else lax.pmean(grads, "tensor"),
    "both axes": lambda grads, inside: grads if inside else lax.pmean(grads, ("data", "tensor")),
    "half of it": lambda grads, inside: (
        grads if inside else grads.at[:32].set(lax.pmean(grads[:32], "data"))
    ),
    "twice": lambda grads, inside: (
        grads if inside else lax.pmean(jnp.sin(lax.pmean(grads, "data")), "data")
    ),
    "gathered": lambda grads, inside: grads if inside else lax.all_gather(grads, "data").mean(0),
    "narrowed": lambda grads, inside: (
        grads if inside else lax.pmax(grads.astype(jnp.int8), "data").astype(grads.dtype)
    ),
}


@pytest.mark.parametrize(
    "broken",
    tiered(
        BREAKS,
        lambda broken: broken in ("one a micro-batch", "both axes", "half of it", "narrowed"),
    ),
)
def test_a_broken_reducer_is_noticed(broken, mesh_of):
    report = look(mesh_of, BREAKS[broken], data=4, tensor=2)
    with pytest.raises(AssertionError, match="does not send what it was meant to"):
        check_traffic(report, GOOD, min_bytes=64, rtol=0.01)


def test_the_message_has_every_difference_and_the_table(mesh_of):
    report = look(mesh_of, BREAKS["one a micro-batch"], data=4, tensor=2)
    message = (
        "audit: the compiled program does not send what it was meant to (3 differences).\n"
        "  all-reduce over data outside of loops: expected 4,096 bytes in 1 call, found none\n"
        "  all-gather over data x tensor: expected 8 bytes, found none\n"
        "  all-reduce over data in a loop: not expected, found 16,384 bytes in 4 calls\n"
        f"{report.of(min_bytes=64)}"
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        check_traffic(report, [*GOOD, Expected("all-gather", ("tensor", "data"), 8)], min_bytes=64)


def test_rows_add_up_and_axes_of_size_one_drop_out(mesh_of):
    report = look(mesh_of, after, data=8)
    rows = [
        Expected("all-reduce", ("data", "tensor"), SIZE // 2),
        Expected("all-reduce", "data", SIZE // 2),
        Expected("all-gather", "tensor", 12345),
    ]
    check_traffic(report, rows, min_bytes=64, rtol=4 / SIZE)


def test_rows_may_tell_loops_apart(mesh_of):
    def both(grads, inside):
        return lax.pmean(jnp.sin(grads), "data")

    report = look(mesh_of, both, data=8).of(min_bytes=64)
    check_traffic(report, [Expected("all-reduce", "data", 5 * SIZE, calls=5)], rtol=0.001)
    check_traffic(
        report,
        [Expected("all-reduce", "data", SIZE), Expected("all-reduce", "data", 4 * SIZE, 4, True)],
        rtol=0.001,
    )
    with pytest.raises(
        AssertionError,
        match=r"in a loop: expected 16,384 bytes in 3 calls, found 16,384 bytes in 4 calls",
    ):
        check_traffic(
            report,
            [
                Expected("all-reduce", "data", SIZE),
                Expected("all-reduce", "data", 4 * SIZE, 3, True),
            ],
            rtol=0.001,
        )


def test_an_unknown_trip_count_never_passes(mesh_of):
    mesh = mesh_of(data=8)

    def program(x, n):
        return lax.fori_loop(0, n, lambda i, x: lax.psum(x, "data"), x)

    shards = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    report = audit(jax.jit(shards), jnp.ones(16), jnp.int32(3), mesh=mesh)
    with pytest.raises(AssertionError, match="found 1 instruction in a loop of unknown trip count"):
        check_traffic(report, [Expected("all-reduce", "data", 0)])


@pytest.mark.parametrize(
    "strategy", tiered([so.ddp, so.zero, so.fsdp], lambda make: make is so.zero)
)
def test_strategies_can_be_audited_as_they_are(strategy, mesh_of):
    import optax

    params = {"w": jnp.ones((64, 64))}
    opt = strategy(
        optax.adam(1e-3),
        mesh_of(data=8),
        lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    )
    report = audit(opt.step, opt.init(params), jnp.ones((8, 64))).of(min_bytes=1024)
    size = 64 * 64 * 4
    rows = {
        so.ddp: [Expected("all-reduce", "data", size)],
        so.zero: [Expected("reduce-scatter", "data", size), Expected("all-gather", "data", size)],
        # no second gather in the backward pass: the gradient of the only layer does not need its
        # weights
        so.fsdp: [Expected("reduce-scatter", "data", size), Expected("all-gather", "data", size)],
    }
    check_traffic(report, rows[strategy], rtol=0.01)
