"""Attention over a context axis equals one device: values and gradients of query, key and value."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.contexts import difference, drawn, mesh_of, on_one_device, results
from support.pairwise import all_pairs, few
from support.tiers import tiered

import shardopt as so
from shardopt.kernels import _flash as flash
from shardopt.kernels._flash import MaskRule
from shardopt.mesh import analysis
from shardopt.nn import _ring as ring
from shardopt.trace._jaxprs import equations

attention = importlib.import_module("shardopt.nn._attention")

FACTORS = {
    "method": ["ring", "all_to_all", "all_gather"],
    "sight": ["causal", "both ways", "window", "wide window"],
    "groups": [8, 4, 2],
    "packed": [False, True],
    "order": [None, "zigzag", "striped"],
    "context": [2, 4, 8],
    "tile": [512, 3],
    "dtype": ["float64", "float32"],
}
SIGHTS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 5},
    "wide window": {"window": 14},
}
ROWS = all_pairs(FACTORS)
QUICK = few(ROWS)
ERRORS = {"float64": 1e-10, "float32": 2e-5}


@pytest.mark.parametrize(
    "row",
    tiered(
        ROWS,
        lambda row: row in QUICK,
        fast=lambda row: row in QUICK and row["method"] == "ring",
        ids=lambda row: "-".join(map(str, row.values())),
    ),
)
def test_it_equals_one_device(row, x64, monkeypatch):
    monkeypatch.setattr(flash, "TILE", row["tile"])
    batch = drawn(groups=row["groups"], packed=row["packed"], dtype=np.dtype(row["dtype"]))
    mesh = mesh_of(context=row["context"])
    error = difference(
        mesh, batch, order=row["order"], method=row["method"], **SIGHTS[row["sight"]]
    )
    assert error < ERRORS[row["dtype"]]


@pytest.mark.parametrize(
    ("sizes", "how"),
    tiered(
        [
            ({"data": 2, "context": 2, "tensor": 2}, {"method": "ring"}),
            ({"data": 2, "context": 2, "tensor": 2}, {"method": "all_to_all"}),
            ({"context": 4, "tensor": 2}, {"method": "all_to_all"}),  # two groups of two
            ({"context": 4, "tensor": 2}, {"method": "all_gather", "order": "zigzag"}),
            ({"data": 2, "context": 4}, {"method": None}),
            (
                {"data": 2, "context": 2, "tensor": 2},
                {"method": "ring", "order": "zigzag", "packed": True},
            ),
        ],
        lambda row: row[0].get("data") and row[1]["method"] == "ring" and not row[1].get("order"),
        ids=str,
    ),
)
def test_context_next_to_data_and_tensor_equals_one_device(sizes, how, x64):
    how = dict(how)
    batch = drawn(rows=4, groups=4, packed=how.pop("packed", False))
    assert difference(mesh_of(**sizes), batch, **how) < 1e-10


@pytest.mark.parametrize(
    "method", tiered(["ring", "all_to_all", "all_gather"], lambda method: method == "ring")
)
def test_attention_in_the_global_view_equals_one_device(method, x64):
    """Everything is left to the partitioner: the layer makes its own region over rows, positions
    and heads.
    """
    mesh = mesh_of(data=2, context=2, tensor=2)
    batch = drawn(rows=4)
    run = jax.jit(so.mesh.on_mesh(mesh, functools.partial(results, method=method)))
    outputs = run(jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data"))))
    for a, b in zip(outputs, on_one_device(batch, True, None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.slow  # contract/test_context.py
@pytest.mark.parametrize(
    "method", tiered(["ring", "all_to_all", "all_gather"], lambda method: method == "ring")
)
def test_attention_in_a_branch_that_one_stage_takes_ends(method, x64):
    """A pipeline runs blocks in a `cond` on the stage: a collective that waits for all devices
    would never return.
    """
    mesh = mesh_of(pipeline=2, context=4)
    batch = drawn()
    spec = PartitionSpec("data", "context")

    def one_stage(batch):
        run = functools.partial(results, method=method)

        def nothing(batch):
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(run, batch))

        mine = jax.lax.cond(jax.lax.axis_index("pipeline") == 1, run, nothing, batch)
        return jax.tree.map(lambda x: jax.lax.psum(x, "pipeline"), mine)

    outputs = jax.jit(
        jax.shard_map(one_stage, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(batch)
    for a, b in zip(outputs, on_one_device(batch, True, None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize(
    ("context", "how"),
    tiered(
        [
            (2, {"method": "ring", "packed": True}),
            (4, {"method": "ring"}),
            (2, {"method": "ring", "causal": False}),
            (2, {"method": "all_to_all"}),
            # two groups of two, whose rings go through splash as well
            (4, {"method": "all_to_all"}),
        ],
        lambda row: "packed" in row[1],
        ids=str,
    ),
)
def test_splash_over_context_equals_one_device(context, how):
    how = dict(how)
    shape = {"length": 128 * context, "heads": 4, "groups": 2, "packed": how.pop("packed", False)}
    batch = drawn(**shape, dtype=np.float32)
    assert difference(mesh_of(context=context), batch, implementation="splash", **how) < 2e-5


SCALE = 0.3


def with_sinks(query, key, value, sinks, *, softcap, groups):
    """Attention whose softmax has one more column, written out; heads are [B, T, H, K]."""
    key, value = (jnp.repeat(x, query.shape[2] // groups, axis=2) for x in (key, value))
    scores = softcap * jnp.tanh(SCALE * jnp.einsum("bthk,bshk->bhts", query, key) / softcap)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def gradients(attention):
    def loss(weight, args):
        return jnp.sum(attention(*args) * weight)

    return jax.value_and_grad(loss, 1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def sinks_on_one_device(weight, args, softcap, groups):
    return gradients(functools.partial(with_sinks, softcap=softcap, groups=groups))(weight, args)


SINK_ROWS = [
    ({"context": 4}, {"method": "ring"}),
    ({"data": 2, "context": 2, "tensor": 2}, {"method": "all_to_all"}),
    ({"context": 8}, {"method": "all_to_all"}),  # two groups of four, joined by rings
    ({"context": 4}, {"method": "all_gather"}),
    ({"context": 2}, {"method": "ring", "implementation": "splash"}),
    ({"context": 2}, {"method": "all_to_all", "implementation": "splash"}),
]


@pytest.mark.parametrize(
    ("sizes", "how", "view"),
    tiered(
        [(*row, view) for row in SINK_ROWS for view in ("global", "per device")],
        lambda row: (
            row
            in [
                (*SINK_ROWS[0], "per device"),
                (*SINK_ROWS[1], "global"),
                (*SINK_ROWS[3], "per device"),
            ]
        ),
        ids=str,
    ),
)
def test_sinks_a_soft_cap_and_a_factor_are_those_of_a_longer_softmax(sizes, how, view):
    if view == "per device" and "tensor" in sizes:
        sizes = {"context": 4}  # two groups of two here, since G is 2 then
    splash = "implementation" in how
    mesh = mesh_of(**sizes)
    cap = 1.5
    shape = {"length": 256, "heads": 4, "groups": 2} if splash else {}
    batch = drawn(**shape, dtype=np.float32 if splash else np.float64)
    heads, groups = (batch[name].shape[2] for name in ("query", "key"))
    args = (
        4 * batch["query"],
        batch["key"],
        batch["value"],
        np.linspace(-1, 2, heads).astype(batch["query"].dtype),
    )

    run = gradients(
        lambda *qkv_sinks: so.nn.attention(
            *qkv_sinks[:3], sinks=qkv_sinks[3], softcap=cap, scale=SCALE, **how
        )
    )
    spec = PartitionSpec("data", "context")
    replicated_spec = PartitionSpec()
    specs = spec, spec, spec, replicated_spec
    if view == "per device":
        local = run

        def run(weight, args):
            loss, (*d_qkv, d_sinks) = local(weight, args)
            return jax.lax.psum(loss, ("data", "context")), (
                *d_qkv,
                jax.lax.psum(d_sinks, ("data", "context")),
            )

        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(spec, specs),
            out_specs=(replicated_spec, specs),
            check_vma=False,
        )
        with jax.enable_x64(not splash):  # jax's kernel does not run with it
            ours = jax.jit(run)(batch["weight"], args)
    else:

        def place(x, spec):
            return jax.device_put(x, NamedSharding(mesh, spec))

        with jax.enable_x64(not splash):
            sharded = place(batch["weight"], spec), tuple(map(place, args, specs))
            ours = jax.jit(so.mesh.on_mesh(mesh, run))(*sharded)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (batch["weight"], args))
        expected_outputs = sinks_on_one_device(*exact, cap, groups)
    assert np.abs(expected_outputs[1][3]).min() > 1e-3
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected_outputs), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-4 if splash else 1e-10)


REPEAT = "repeat the heads of keys and values, or take"


@pytest.mark.parametrize(
    ("groups", "how", "error", "message"),
    [
        (
            4,
            {"method": "ulysses"},
            ValueError,
            (
                "unknown method 'ulysses'.\nFix: use 'ring', 'all_to_all', 'all_gather', or None to"
                " choose by heads and length."
            ),
        ),
        (
            1,
            {"method": "all_to_all"},
            ValueError,
            (
                "1 heads of keys and values on each device cannot be exchanged among 4 context"
                f" devices.\nFix: use method='ring', {REPEAT} another size of context or tensor."
            ),
        ),
        (
            4,
            {"positions": np.zeros((2, 5), int)},
            ValueError,
            ("positions have shape (2, 5).\nFix: give [T] = (8,) or [B, T] = (2, 8)."),
        ),
        (4, {"positions": np.zeros(8)}, TypeError, "positions must be integers, got float64."),
        (
            4,
            {"positions": np.arange(8), "implementation": "splash"},
            ValueError,
            (
                "splash works on rows in natural order, not with positions.\n"
                "Fix: leave implementation out, or give rows in natural order."
            ),
        ),
        (
            4,
            {"method": "ring", "implementation": "cudnn"},
            ValueError,
            (
                "cudnn works on whole rows, not in hops.\nFix: leave implementation out, or use"
                " method='all_to_all'."
            ),
        ),
        (
            4,
            {"method": "all_gather", "implementation": "splash"},
            ValueError,
            (
                "splash works on whole rows or the blocks of a ring, not by method='all_gather'.\n"
                "Fix: leave implementation out, or use method='all_to_all' or 'ring'."
            ),
        ),
        (
            4,
            {"method": "ring", "implementation": "splash"},
            ValueError,
            (
                "splash takes blocks of a multiple of 128 positions without a window, got 8"
                " positions and window=None.\nFix: leave implementation out, or use"
                " method='all_to_all' where context divides the heads."
            ),
        ),
    ],
)
def test_bad_input_is_refused(groups, how, error, message, x64):
    mesh = mesh_of(context=4)
    batch = drawn(groups=groups)

    def f(q, k, v):
        return so.nn.attention(q, k, v, **how)

    spec = PartitionSpec(None, "context")
    with pytest.raises(error) as caught:
        jax.eval_shape(
            jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
            batch["query"], batch["key"], batch["value"],
        )  # fmt: skip
    assert str(caught.value) == f"attention: {message}"


def test_a_row_that_context_does_not_divide_is_refused_in_the_global_view():
    mesh = mesh_of(context=4)
    batch = drawn(length=6, dtype=np.float32)
    with pytest.raises(
        ValueError,
        match=r"6 positions cannot be sharded over mesh axis 'context' \(size 4\)\.\n"
        r"Fix: pad the rows, or choose context=1, 2, 3 or 6\.",
    ):
        jax.eval_shape(so.mesh.on_mesh(mesh, results), batch)


def test_positions_in_another_order_attend_as_in_their_own():
    """What stands in another order attends as it would in its own."""
    batch = drawn(dtype=np.float32)
    take = np.random.default_rng(1).permutation(32)
    moved = jax.tree.map(lambda x: x[:, take], batch) | {"order": take[None].repeat(2, axis=0)}
    outputs = jax.jit(functools.partial(results, window=9))(moved)
    for a, b in zip(outputs, on_one_device(batch, True, 9), strict=True):
        np.testing.assert_allclose(a, np.asarray(b)[:, take], atol=2e-5)


def test_the_check_of_losses_sees_plain_attention_under_one_name():
    mesh = mesh_of(context=4)
    batch = drawn(dtype=np.float32)

    def loss(batch):
        at = so.nn.positions(batch["query"].shape[1])
        return so.nn.attention(batch["query"], batch["key"], batch["value"], positions=at)

    with analysis():
        traced = jax.make_jaxpr(so.mesh.on_mesh(mesh, loss))(batch)
    names = [eqn.params["name"] for eqn in traced.eqns if eqn.primitive.name == "jit"]
    assert names == ["shardopt_positions", "shardopt_attention"]
    assert not {"shard_map", "ppermute", "custom_vjp_call"} & {
        eqn.primitive.name for eqn in equations(traced.jaxpr)
    }


@pytest.mark.parametrize(
    ("length", "heads", "groups", "context", "how", "chosen"),
    [
        (4096, 32, 8, 8, {}, "all_gather"),
        (32768, 32, 8, 8, {}, "all_to_all"),
        (32768, 32, 8, 16, {}, "ring"),  # 16 does not divide 8
        (32768, 64, 8, 2, {}, "ring"),  # queries cost more to exchange than keys
        (32768, 32, 8, 8, {"window": 1024}, "ring"),  # one hop
        (4096, 32, 8, 8, {"implementation": "splash"}, "all_to_all"),
    ],
)
def test_the_default_method_follows_length_heads_and_context(
    length, heads, groups, context, how, chosen
):
    how = dict(how)
    window = how.pop("window", None)
    hops = ring.ring_of(
        ("context",), context, length // context, MaskRule(True, window), natural=True
    ).hops
    counts = {"heads": heads, "kv_heads": groups, "itemsize": 2}
    assert (
        attention.choose_method(length, context, hops, **counts, kernel="implementation" in how)
        == chosen
    )
