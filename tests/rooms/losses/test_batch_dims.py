"""Batch leaves that are not [rows, ...]: time first, tables that all rows share, graphs.

They train as on one device, in both views.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.compilations import compilations
from support.reference import relative_difference, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.step._inputs import place_batch

LENGTH = 5
ROWS = 16
WIDTH = 4
TX = optax.sgd(0.05, momentum=0.9)
DIMS = [("^frames$", 1), ("^table$", None)]
RULES = [("^w$", P(None, "tensor")), ("^v$", P("tensor"))]


def params():
    draw = np.random.default_rng(0)
    return {"w": draw.normal(size=(WIDTH, 16)), "v": draw.normal(size=16)}


def batches(steps=3):
    """Frames come [T, B, F].

    Rows differ in size and weight, so that each must count as it should.
    """
    draw = np.random.default_rng(1)
    size = np.linspace(0.2, 2.0, ROWS)[:, None]
    return [
        {
            "frames": size * draw.normal(size=(LENGTH, ROWS, WIDTH)),
            "target": draw.normal(size=ROWS),
            "weight": np.maximum(0.1, draw.uniform(-0.5, 1.0, size=ROWS)),
            "table": draw.normal(size=(3, WIDTH)),
            "offset": 0.5,
        }
        for _ in range(steps)
    ]


def total_and_weight(params, batch):
    """The square of a sum over time does not split along time; the table enters every row."""
    hidden = jnp.tanh(batch["frames"] @ params["w"]).sum(0)
    keys = jnp.tanh(batch["table"] @ params["w"])
    predictions = (
        hidden @ params["v"]
        + jax.nn.softmax(hidden @ keys.T) @ keys @ params["v"]
        - batch["offset"]
    )
    return (batch["weight"] * (predictions - batch["target"]) ** 2).sum(), batch["weight"].sum()


def weighted(params, batch):
    total, weight = total_and_weight(params, batch)
    return so.losses.Weighted(total, weight), {
        "rows": so.losses.Sum(jnp.ones_like(batch["target"], int).sum())
    }


def on_one_device(params, batch):
    total, weight = total_and_weight(params, batch)
    return total / weight


def first_rows(batch, count):
    cut = {name: batch[name][:count] for name in ("target", "weight")}
    return {**batch, **cut, "frames": batch["frames"][:, :count]}


def trains_as_one_device(opt, loss, params, batches):
    """Train, and compare losses, norms and parameters; return the last state and metrics."""
    expected, final = train(TX, loss, params, batches)
    state = opt.init(params)
    losses_and_norms = []
    for batch in batches:
        state, metrics = opt.step(state, batch)
        losses_and_norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(losses_and_norms, expected, rtol=1e-10)
    assert relative_difference(state.params, final) <= 1e-10
    return state, metrics


EIGHT = {"data": 8}
SQUARE = {"data": 2, "tensor": 2}
TABLE = [
    ("ddp", EIGHT, 1, "per_device"),
    ("ddp", SQUARE, 2, "per_device"),
    ("zero1", EIGHT, 2, "per_device"),
    ("zero2", SQUARE, 1, "per_device"),
    ("fsdp", SQUARE, 2, "per_device"),
    ("fsdp", {"replica": 2, "data": 4}, 2, "per_device"),
    ("ddp", SQUARE, 2, "global"),
    ("zero2", EIGHT, 1, "global"),
    ("fsdp", EIGHT, 2, "global"),
    ("fsdp", SQUARE, 1, "global"),
]
QUICK = [TABLE[4]]


def row_id(row):
    name, mesh, micro_batches, view = row
    return "-".join(
        [name, *(f"{axis}{size}" for axis, size in mesh.items()), str(micro_batches), view]
    )


@pytest.mark.parametrize(
    ("name", "mesh", "micro_batches", "view"), tiered(TABLE, lambda row: row in QUICK, ids=row_id)
)
def test_equals_one_device(name, mesh, micro_batches, view, mesh_of, x64):
    """Steps, metrics, and the evaluation of rows that the devices do not divide.

    One program does for all steps.
    """
    options = {
        "rules": RULES if "tensor" in mesh else (),
        "micro_batches": micro_batches,
        "view": view,
    }
    opt = STRATEGIES[name](TX, mesh_of(**mesh), weighted, batch_dims=DIMS, **options)
    state, metrics = trains_as_one_device(opt, on_one_device, params(), batches())
    assert int(metrics["rows"]) == ROWS
    short_batch = first_rows(batches()[0], 5)
    val_metrics = so.training.evaluation(opt, [short_batch, batches()[1]])(state)
    parts = [
        jax.jit(total_and_weight)(jax.device_get(state.params), held_out)
        for held_out in (short_batch, batches()[1])
    ]
    np.testing.assert_allclose(
        val_metrics["val_loss"], sum(p[0] for p in parts) / sum(p[1] for p in parts), rtol=1e-10
    )
    assert val_metrics["val_rows"] == 5 + ROWS
    with compilations() as compiled:
        opt.step(state, batches()[1])
    assert compiled == []


BLOCKS = so.BlockModel(
    embed=lambda outer, batch: (
        jnp.tanh(batch["frames"] @ outer["w"]).sum(0)
        + batch["table"].mean(0, keepdims=True) @ outer["w"]
    ),
    block=lambda weights, x: x + jnp.tanh(x @ weights["a"]),
    loss=lambda outer, x, batch: so.losses.Weighted(
        (batch["weight"] * (x @ outer["v"] - batch["target"]) ** 2).sum(), batch["weight"].sum()
    ),
)


@pytest.mark.parametrize(
    ("mesh", "view"),
    tiered(
        [({"data": 2, "pipeline": 2}, "unproved"), ({"data": 4}, "global")],
        lambda row: "pipeline" in row[0],
    ),
)
def test_blocks_with_other_batch_dims_train_as_one_device(mesh, view, mesh_of, x64):
    def loss(params, batch):
        weighted_loss = BLOCKS.loss_fn(params, batch)
        return weighted_loss.total / weighted_loss.weight

    start = params() | {"blocks": {"a": np.random.default_rng(3).normal(size=(2, 16, 16)) * 0.3}}
    options = {"micro_batches": 2, "batch_dims": DIMS, "view": view}
    opt = so.hybrid(TX, mesh_of(**mesh), BLOCKS, min_shard_elements=8, **options)
    trains_as_one_device(opt, loss, start, batches(2))


@pytest.mark.slow  # test_equals_one_device
@pytest.mark.parametrize("view", tiered(["unproved", "global"], lambda view: view == "global"))
def test_replicas_that_train_apart_share_the_table(view, mesh_of, x64):
    """DiLoCo with H=1, inner SGD with rate a and outer SGD with rate 1 equals ddp with SGD and rate
    a.

    The loss is a mean, as the replicas' are averaged.
    """
    tx = optax.sgd(0.05)

    def mean(params, batch):
        return total_and_weight(params, batch)[0] / batch["weight"].size

    options = {
        "batch_dims": DIMS,
        "min_shard_elements": 8,
        "view": view,
        "micro_batches": 2,
    }
    opt = so.diloco(
        so.fsdp(tx, mesh_of(replica=2, data=2), mean, **options), outer=optax.sgd(1.0), sync_every=1
    )
    _, final = train(tx, mean, params(), batches())
    state = opt.init(params())
    for batch in batches():
        state, _ = opt.step(state, batch)
    assert relative_difference(opt.synchronize(state).params, final) <= 1e-10


def test_a_batch_that_is_one_array(mesh_of, x64):
    """Its key path is empty, and what says which rows of it count has rows in dim 0 all the same."""
    frames = batches()[0]["frames"]
    start = params()

    def loss(params, batch):
        return (jnp.tanh(batch @ params["w"]).sum(0) @ params["v"]).mean()

    opt = so.zero(TX, mesh_of(data=2), loss, stage=1, batch_dims=[("", 1)], micro_batches=2)
    val_loss = so.training.evaluation(opt, [frames[:, :7]])(opt.init(start))["val_loss"]
    np.testing.assert_allclose(val_loss, jax.jit(loss)(start, frames[:, :7]), rtol=1e-12)


def test_positions_are_the_other_dim(mesh_of, x64):
    """On a context axis the positions of frames [T, B, ...] are their dim 0, and a table has none."""

    def loss(params, batch):
        predictions = jnp.tanh(batch["frames"] @ params["w"]) @ params["v"] + batch["table"].sum()
        return ((predictions - batch["targets"]) ** 2).mean()

    dims = [("^(frames|targets)$", 1), ("^table$", None)]
    opt = so.fsdp(
        TX, mesh_of(data=2, context=2), loss, batch_dims=dims, min_shard_elements=8, micro_batches=2
    )
    draw = np.random.default_rng(4)
    turned = [
        {
            "frames": draw.normal(size=(6, 8, WIDTH)),
            "targets": draw.normal(size=(6, 8)),
            "table": np.ones((3, 3)),
        }
        for _ in range(2)
    ]
    trains_as_one_device(opt, loss, params(), turned)
    placed = jax.tree.map(lambda x: x.sharding.spec, place_batch(opt.config, turned[0]))
    assert placed == {"frames": P("context", "data"), "targets": P("context", "data"), "table": P()}


def test_leaves_are_split_along_their_batch_dim(mesh_of):
    opt = so.ddp(TX, mesh_of(data=4), weighted, batch_dims=[*DIMS, ("frames", 2)])
    specs = jax.tree.map(
        lambda x: x.sharding.spec, place_batch(opt.config, batches()[0] | {"offset": np.float32(1)})
    )
    rows = P("data")
    assert specs == {
        "frames": P(None, "data"),
        "target": rows,
        "weight": rows,
        "table": P(),
        "offset": P(),
    }
    shards = place_batch(opt.config, batches()[0])["frames"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(LENGTH, 4, WIDTH)] * 4


def graph(nodes=13, edges=24, seed=0):
    draw = np.random.default_rng(seed)
    return {
        "nodes": draw.normal(size=(nodes, 8)),
        "senders": draw.integers(0, nodes, edges),
        "receivers": draw.integers(0, nodes, edges),
        "globals": draw.normal(size=3),
        "labels": draw.normal(size=nodes),
    }


def graph_loss(params, batch):
    """A round of messages between nodes [N, F] along edges [E].

    Devices divide E, and F, but not N.
    """
    sent = jnp.tanh(batch["nodes"] @ params["w"])[batch["senders"]]
    got = (
        jax.ops.segment_sum(sent, batch["receivers"], len(batch["nodes"])) * batch["globals"].sum()
    )
    return ((got @ params["v"] - batch["labels"]) ** 2).mean()


def graph_params():
    draw = np.random.default_rng(5)
    return {"w": draw.normal(size=(8, 16)) * 0.3, "v": draw.normal(size=16)}


@pytest.mark.parametrize(
    ("name", "mesh"),
    tiered([("ddp", EIGHT), ("fsdp", EIGHT), ("zero1", SQUARE)], lambda row: row[0] == "fsdp"),
)
def test_graphs_run_whole_in_the_global_view(name, mesh, mesh_of, x64):
    rules = RULES if "tensor" in mesh else ()
    opt = STRATEGIES[name](TX, mesh_of(**mesh), graph_loss, rules=rules, view="global")
    state, _ = trains_as_one_device(
        opt, graph_loss, graph_params(), [graph(seed=seed) for seed in range(3)]
    )
    with compilations() as compiled:
        opt.step(state, graph(seed=4))
    assert compiled == []


def test_graphs_are_split_where_the_devices_divide_them(mesh_of):
    opt = so.ddp(TX, mesh_of(data=8), graph_loss, view="global", batch_dims=[("^globals$", None)])
    specs = jax.tree.map(
        lambda x: x.sharding.spec, place_batch(opt.config, graph() | {"globals": np.ones(16)})
    )
    edges = P("data")
    assert specs == {
        "nodes": P(None, "data"),
        "senders": edges,
        "receivers": edges,
        "globals": P(),
        "labels": P(),
    }


def test_the_evaluation_of_graphs_counts_each_as_one(mesh_of, x64):
    opt = so.fsdp(TX, mesh_of(data=8), graph_loss, view="global", min_shard_elements=8)
    graphs = [graph(), graph(nodes=7, edges=9, seed=1)]
    state = opt.init(graph_params())
    with pytest.warns(
        UserWarning, match="leaves of a batch differ in rows, so it counts as one row"
    ):
        val_loss = so.training.evaluation(opt, graphs)(state)["val_loss"]
    expected = [jax.jit(graph_loss)(graph_params(), graph_batch) for graph_batch in graphs]
    np.testing.assert_allclose(val_loss, np.mean(expected), rtol=1e-12)
    np.testing.assert_allclose(opt.evaluate(state, graphs[1])["loss"], expected[1])


def test_an_asynchronous_worker_of_several_devices_takes_a_graph(mesh_of, x64):
    opt = so.async_sgd(TX, graph_loss, workers=[mesh_of(data=4)])
    result = opt.run(
        graph_params(), lambda worker: [graph(seed=seed) for seed in range(3)], num_updates=3
    )
    _, final = train(TX, graph_loss, graph_params(), [graph(seed=seed) for seed in range(3)])
    assert relative_difference(result.params, final) <= 1e-10


@pytest.mark.parametrize(
    ("loss", "options", "batch", "message"),
    [
        (
            graph_loss,
            {},
            graph(),
            (
                "ddp: micro_batches=2, but the whole batch runs at once: its leaves do not agree on"
                " a number of rows.\n  globals: shape (3,); dim 0 has 3 rows\n  labels: shape"
                " (13,); dim 0 has 13 rows\n  nodes: shape (13, 8); dim 0 has 13 rows\n  receivers:"
                " shape (24,); dim 0 has 24 rows\n  senders: shape (24,); dim 0 has 24 rows\nFix:"
                " use micro_batches=1, which is the same; or name the dim of rows of a leaf, or"
                " None if all rows share it: batch_dims=[(regex, dim or None)]."
            ),
        ),
    ],
    ids=["graph"],
)
def test_a_batch_that_is_not_cut_runs_whole_and_it_is_said(
    loss, options, batch, message, mesh_of, x64
):
    opt = so.ddp(TX, mesh_of(data=2), loss, micro_batches=2, view="global", **options)
    start = graph_params() if loss is graph_loss else params()
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        trains_as_one_device(opt, loss, start, [batch])


@pytest.mark.slow
def test_fit_counts_examples_and_check_compares(mesh_of, x64, capsys):
    opt = so.fsdp(TX, mesh_of(data=2), weighted, batch_dims=DIMS, micro_batches=2)
    report = so.check(opt, opt.init(params()), batches()[0])
    names = [difference.name for difference in report.differences if "state" not in difference.name]
    leaves = [f"{kind} of {leaf}" for kind in ("gradient", "update") for leaf in sorted(params())]
    value_names = ["first parameters", "loss", "step", "evaluated loss", "evaluated rows"]
    assert sorted(names) == sorted([*value_names, "metric grad_norm", "metric rows", *leaves])
    assert capsys.readouterr().out == f"{report}\n"
    result = so.fit(opt, opt.init(params()), batches(), num_steps=3, log_every=1, progress=False)
    last = result.history[-1]
    assert last["examples_per_second"] == pytest.approx(ROWS * last["steps_per_second"])


def mean_over_time(params, batch):
    """A mean over dim 0 of frames, and no mean over their rows, which are dim 1."""
    return ((jnp.tanh(batch["frames"] @ params["w"]) @ params["v"]).sum(1) ** 2).mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_mixes_rows_is_refused_wherever_they_are(micro_batches, mesh_of):
    opt = so.ddp(
        TX,
        mesh_of(data=2),
        mean_over_time,
        batch_dims=DIMS,
        micro_batches=micro_batches,
        view="per_device",
    )
    state = opt.init(params())
    message = r"a \(weighted\) mean over rows"
    for call in (opt.step, opt.evaluate):
        with pytest.raises(so.errors.NotSeparableError, match=message):
            call(state, batches()[0])
    with pytest.raises(so.errors.NotSeparableError, match=message):
        so.training.evaluation(opt, batches(1))(state)


DISAGREE = (
    "batch leaves must agree on a number of rows, the global batch.\n  frames: shape (5, 16, 4);"
    " dim 0 has 5 rows\n  offset: shape (); no rows\n  table: shape (3, 4); dim 0 has 3 rows\n "
    " target: shape (16,); dim 0 has 16 rows\n  weight: shape (16,); dim 0 has 16 rows\nFix: name"
    " the dim of rows of a leaf, or None if all rows share it: batch_dims=[(regex, dim or None)]"
)


def local_sgd(*args, **options):
    return so.local_sgd(so.ddp(*args, **options), sync_every=1)


@pytest.mark.parametrize(
    ("strategy", "mesh", "options", "message"),
    [
        (
            so.ddp,
            EIGHT,
            {"view": "per_device"},
            f'ddp: {DISAGREE}; or use view="global", which takes leaves of any shapes.',
        ),
        (local_sgd, {"replica": 2, "data": 4}, {"view": "global"}, f"local_sgd: {DISAGREE}."),
        (
            so.ddp,
            EIGHT,
            {"batch_dims": [(".", None)], "view": "per_device"},
            (
                "ddp: no batch leaf has rows.\n  frames: shape (5, 16, 4); no rows\n  offset: shape"
                " (); no rows\n  table: shape (3, 4); no rows\n  target: shape (16,); no rows\n "
                " weight: shape (16,); no rows\nFix: name the dim of rows of a leaf, or None if all"
                ' rows share it: batch_dims=[(regex, dim or None)]; or use view="global", which'
                " takes leaves of any shapes."
            ),
        ),
        (
            so.ddp,
            EIGHT,
            {"batch_dims": [("^target$|offset", 1), ("^weight$", -1), *DIMS], "view": "global"},
            (
                "ddp: batch_dims do not fit the batch.\n  target: shape (16,); no dim 1 for rows\n "
                " weight: shape (16,); no dim -1 for rows\nFix: name a dim that the leaf has, or"
                " None for a leaf that all rows share."
            ),
        ),
        (
            so.ddp,
            {"data": 2, "context": 2},
            {"batch_dims": [("^frames$", (1, 1)), *DIMS]},
            (
                "ddp: batch_dims do not fit the batch.\n  frames: shape (5, 16, 4); dim 1 counts"
                " rows\nFix: name a dim that the leaf has and that does not count rows, or None."
            ),
        ),
        (
            so.ddp,
            {"data": 3},
            {"batch_dims": DIMS},
            (
                "ddp: a global batch of 16 is not divisible by 3 devices along data = 3.\n"
                "Fix: use a batch of 15 or 18, or another mesh or micro_batches."
            ),
        ),
    ],
    ids=["disagree", "replicas", "no rows", "missing", "positions", "uneven"],
)
def test_batches_are_refused_before_anything_compiles(strategy, mesh, options, message, mesh_of):
    opt = strategy(TX, mesh_of(**mesh), weighted, **{"view": "unproved"} | options)
    state = opt.init(params())
    with compilations() as compiled, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        opt.step(state, batches()[0])
    assert compiled == []


FORM_OF_DIMS = "(regex of key paths, row dim), or of (regex, (row dim, position dim))"
FIX_OF_DIMS = "Fix: write batch_dims=[('^frames$', 1), ('^table$', None), ('^image$', (0, 2))]."


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        (
            "x",
            TypeError,
            (f"batch_dims must be a sequence of {FORM_OF_DIMS}, got 'x'.\n{FIX_OF_DIMS}"),
        ),
        (
            [("x", 1.0)],
            TypeError,
            (f"batch_dims must be a sequence of {FORM_OF_DIMS}, got [('x', 1.0)].\n{FIX_OF_DIMS}"),
        ),
        (
            [("x", (0, 1, 2))],
            TypeError,
            (
                f"batch_dims must be a sequence of {FORM_OF_DIMS}, got [('x', (0, 1,"
                f" 2))].\n{FIX_OF_DIMS}"
            ),
        ),
        (
            [("(", 1)],
            ValueError,
            (
                "batch_dims must be regular expressions.\n  '(': missing ), unterminated subpattern"
                " at position 0\nFix: escape what is meant literally, with re.escape."
            ),
        ),
    ],
)
@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp", "hybrid"])
def test_batch_dims_are_checked(name, dims, error, message, mesh_of):
    make = {"hybrid": functools.partial(so.hybrid, micro_batches=1)}.get(name, getattr(so, name))
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        make(TX, mesh_of(data=2), BLOCKS, batch_dims=dims)
