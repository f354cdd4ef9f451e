"""`so.reducers.exact(tile_rows=...)`: state, metrics and evaluation have the same bits on every mesh."""

import functools
import hashlib
import inspect
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT
from support.tiers import tiered

import shardopt as so
from shardopt.core import is_key
from shardopt.step import _same_bits as same_bits
from shardopt.step._fenced import _merged as merged

TILES = so.reducers.exact(tile_rows=2)
MESHES = [{"data": 1}, {"data": 2}, {"replica": 2, "data": 2}, {"data": 8}]
DRAW = np.random.default_rng(0)
PARAMS = {
    "in": DRAW.normal(size=(5, 16)).astype(np.float32),
    "hidden": DRAW.normal(size=(16, 16)).astype(np.float32) / 4,
    "out": DRAW.normal(size=(16, 7)).astype(np.float32) / 4,
    "scale": np.ones(16, np.float32),
}
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "lamb": optax.lamb(0.01),
    "muon": optax.contrib.muon(0.01),
    "adafactor": optax.adafactor(0.01),
    "multi_steps": optax.MultiSteps(optax.adam(0.01), 2),
    "novograd": optax.novograd(0.01),
    "noisy_sgd": optax.noisy_sgd(0.1, key=0),
}


PLACEMENTS = {
    "zero1": functools.partial(so.zero, stage=1, min_shard_elements=1),
    "zero2": functools.partial(so.zero, stage=2, min_shard_elements=1),
    "fsdp": functools.partial(so.fsdp, min_shard_elements=1),
}


def batch_of(rows, seed):
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, 5)).astype(np.float32),
        "y": draw.integers(0, 7, rows).astype(np.int32),
        "weight": draw.uniform(0.1, 2, rows).astype(np.float32),
    }


def logits_of(params, x):
    hidden = jax.nn.gelu(x @ params["in"])
    hidden *= jnp.broadcast_to(params["scale"], hidden.shape)
    return jnp.tanh(hidden @ params["hidden"]), params["out"]


def weighted(params, batch, rng):
    hidden, out = logits_of(params, batch["x"])
    keep = jax.random.bernoulli(rng, 0.8, hidden.shape)
    log_probabilities = jax.nn.log_softmax(jnp.where(keep, hidden / 0.8, 0.0) @ out)
    losses = -jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1)[:, 0]
    total = so.losses.Weighted((losses * batch["weight"]).sum(), batch["weight"].sum())
    return total, {"largest": so.losses.Max(losses.max()), "count": so.losses.Sum(losses.size)}


def two_terms(params, batch):
    hidden, out = logits_of(params, batch["x"])
    losses = ((hidden @ out) ** 2).mean(1)
    weights = batch["weight"].sum(), jnp.float32(losses.size)
    totals = (losses * batch["weight"]).sum(), jnp.abs(hidden).mean(1).sum()
    return so.losses.Weighted(totals, weights)


@so.per_row
def of_row(params, row, *, rng):
    hidden, out = logits_of(params, row["x"])
    return jnp.mean((hidden @ out + jax.random.normal(rng, (7,))) ** 2)


LOSSES = {"weighted": weighted, "two_terms": two_terms, "of_row": of_row}


def evaluated(params, batch):
    hidden, out = logits_of(params, batch["x"])
    return jnp.mean((hidden @ out) ** 2)


def digest(tree):
    digests = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digests.update(np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes())
    return digests.hexdigest()


def make(sizes, mesh_of, optimizer="adamw", loss="weighted", strategy=so.ddp, **options):
    options = {"reducer": TILES, **options}
    return strategy(OPTIMIZERS[optimizer], mesh_of(**sizes), LOSSES[loss], **options)


def history(opt, steps=4):
    """Return a digest of state and metrics for each step, and the last state."""
    state = opt.init(PARAMS, rng=jax.random.key(1))
    digests = []
    for seed in range(steps):
        state, metrics = opt.step(state, batch_of(16, seed))
        digests.append(digest((state.params, state.opt_state, metrics)))
    return tuple(digests), state


@functools.cache
def on_one_device(optimizer, loss):
    """Return the digests of each step on one device."""
    mesh = so.make_mesh(data=1, devices=jax.devices()[:1])
    return history(so.ddp(OPTIMIZERS[optimizer], mesh, LOSSES[loss], reducer=TILES))[0]


ROWS = [(optimizer, "weighted") for optimizer in OPTIMIZERS]
ROWS += [("adamw", loss) for loss in LOSSES if loss != "weighted"]


@pytest.mark.parametrize(
    ("optimizer", "loss"), tiered(ROWS, lambda row: row == ("adamw", "weighted"), ids=str)
)
def test_every_mesh_has_the_same_bits(optimizer, loss, mesh_of):
    for sizes in ({"replica": 2, "data": 2}, {"data": 8}):  # all of them in the slow tier
        opt = make(sizes, mesh_of, optimizer, loss)
        assert history(opt)[0] == on_one_device(optimizer, loss), sizes


SHARDED = [
    *itertools.product(PLACEMENTS, OPTIMIZERS, ["weighted"]),
    *itertools.product(PLACEMENTS, ["adamw"], ["two_terms", "of_row"]),
]
BY_DEFAULT = ("zero2", "adamw", "weighted"), ("fsdp", "muon", "weighted")


@pytest.mark.parametrize(
    ("placement", "optimizer", "loss"), tiered(SHARDED, lambda row: row in BY_DEFAULT, ids=str)
)
def test_sharded_state_has_the_same_bits(placement, optimizer, loss, mesh_of):
    sizes = {"replica": 2, "data": 4}
    sharded = make(sizes, mesh_of, optimizer, loss, strategy=PLACEMENTS[placement])
    assert history(sharded)[0] == on_one_device(optimizer, loss)


ALL_MESHES = [
    *MESHES,
    {"data": 4},
    {"replica": 2, "data": 1},
    {"replica": 2, "data": 4},
    {"replica": 4, "data": 1},
    {"replica": 4, "data": 2},
    {"replica": 8, "data": 1},
    {"data": 4, "expert": 1},
    {"data": 2, "context": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["ddp", *PLACEMENTS])
def test_every_mesh_has_the_same_bits_in_every_placement(placement, mesh_of):
    strategy = {"ddp": so.ddp, **PLACEMENTS}[placement]
    expected = history(make({"data": 1}, mesh_of), steps=2)[0]
    for sizes in ALL_MESHES:
        assert history(make(sizes, mesh_of, strategy=strategy), steps=2)[0] == expected, sizes


def blocks_of(params):
    """Return a model of two blocks, and its parameters."""

    def embed(outer, batch):
        return jnp.tanh(batch["x"] @ outer["in"])

    def block(weights, x):
        return x + jax.nn.gelu(x @ weights["hidden"]) * weights["scale"][None]

    def loss(outer, x, batch):
        log_probabilities = jax.nn.log_softmax(x @ outer["out"])
        return -jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1).mean()

    blocks = {name: np.stack([params[name], params[name] / 2]) for name in ("hidden", "scale")}
    outer = {name: params[name] for name in ("in", "out")}
    return so.BlockModel(embed, block, loss), {"blocks": blocks, **outer}


@pytest.mark.parametrize(
    "strategy", tiered([PLACEMENTS["fsdp"], so.hybrid], lambda strategy: strategy is so.hybrid)
)
def test_blocks_have_the_same_bits(strategy, mesh_of):
    model, params = blocks_of(PARAMS)
    digests = set()
    for make_strategy, sizes in [(so.ddp, {"data": 1}), (strategy, {"replica": 2, "data": 2})]:
        options = {"reducer": TILES, "micro_batches": 1}
        opt = make_strategy(OPTIMIZERS["adamw"], mesh_of(**sizes), model, **options)
        state = opt.init(params)
        for seed in range(3):
            state, metrics = opt.step(state, batch_of(16, seed))
        digests.add(digest((state.params, state.opt_state, metrics)))
    assert len(digests) == 1


OPTIMISED = """
import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
from shardopt.models import gpt

draw = np.random.default_rng(0)
config = gpt.config(dim=32, num_layers=4, num_heads=2)
gpt_params = jax.device_get(gpt.init(config, jax.random.key(0)))
tokens = draw.integers(0, 256, size=(32, 17), dtype=np.int32)
matrices = {"in": draw.normal(size=(8, 16)), "out": draw.normal(size=(16, 4))}
batch = {"x": draw.normal(size=(32, 8)), "y": draw.normal(size=(32, 4))}

def mlp(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)

def result(strategy, sizes, tx, loss_fn, params, batch):
    mesh = so.make_mesh(**sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])
    opt = strategy(tx, mesh, loss_fn, reducer=so.reducers.exact(tile_rows=4))
    state = opt.init(params)
    for _ in range(2):
        state, metrics = opt.step(state, batch)
    leaves = jax.tree.leaves(jax.device_get((state.params, state.opt_state, metrics)))
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves)

clip = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
problem = clip, gpt.model(config), gpt_params, {"tokens": tokens}
# on four devices a shard of the norms is [4, 8]: jax 0.12 rounds products and sums of it otherwise
assert result(so.ddp, {"data": 1}, *problem) == result(so.fsdp, {"data": 4}, *problem)
# small leaves stay whole beside shards, and the norm is of both
problem = optax.adamw(1e-2), mlp, *jax.tree.map(np.float32, (matrices, batch))
assert result(so.ddp, {"data": 1}, *problem) == result(so.fsdp, {"data": 8}, *problem)
"""


@pytest.mark.slow
def test_optimised_code_has_the_same_bits():
    """The code that users have: the other tests generate code without optimisation."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", OPTIMISED], env=os.environ | flags, check=True)


@pytest.mark.fast
def test_quotients_by_one_number_of_each_row_are_products_with_one_inverse():
    """XLA may turn such quotients into products on one device, and only one of them on several."""
    columns, row_sums = np.ones((4, 3)), np.ones((4, 1))
    program = jax.make_jaxpr(lambda x, y, total: (x / total, y / total))(columns, columns, row_sums)
    names = [eqn.primitive.name for eqn in merged(program).jaxpr.eqns]
    assert names == ["div", "broadcast_in_dim", "mul", "mul"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "gathers"), [("ddp", 1), ("zero1", 2), ("zero2", 2), ("fsdp", 2)]
)
def test_gradients_are_exchanged_once_and_gathered_once_for_norm_and_clipping(
    placement, gathers, mesh_of
):
    """ddp sends the bytes of an all-reduce; the others gather new parameters too."""
    opt = make({"data": 8}, mesh_of, strategy=PLACEMENTS.get(placement, so.ddp))
    lowered = opt.step.lower(opt.init(PARAMS), batch_of(16, 0))
    sent = dict.fromkeys(["all-to-all", "all-gather"], 0)
    for collective in so.hlo.audit(lowered.compile()).collectives:
        sent[collective.kind] += collective.wire_bytes
    num_bytes = sum(leaf.nbytes for leaf in PARAMS.values())
    assert sent["all-to-all"] == num_bytes * 7 // 8
    metrics = sent["all-gather"] - gathers * num_bytes * 7 // 8
    assert 0 < metrics <= 7 * 4 * 5  # five numbers of each tile


@pytest.mark.slow
def test_without_tiles_meshes_differ(mesh_of):
    """Else the test above would see nothing."""
    digests = {history(make(sizes, mesh_of, reducer=None))[0] for sizes in MESHES}
    assert len(digests) > 1


@pytest.mark.parametrize("rows", tiered([11, 16, 3], lambda rows: rows == 11))
def test_evaluations_have_the_same_bits(rows, mesh_of):
    """Rows that tiles do not divide are tiles of one row."""
    values = set()
    for sizes, strategy in (({"data": 1}, so.ddp), ({"replica": 2, "data": 4}, PLACEMENTS["fsdp"])):
        opt = make(sizes, mesh_of, strategy=strategy, evaluate_fn=evaluated)
        evaluate = so.training.evaluation(opt, [batch_of(rows, 10)])
        values.add(digest(evaluate(opt.init(PARAMS))))
    assert len(values) == 1


@pytest.mark.slow
def test_micro_batches_change_no_bit(mesh_of):
    """A tile is a micro-batch."""
    first, second = (make({"data": 2}, mesh_of, micro_batches=count) for count in (1, 4))
    assert history(first)[0] == history(second)[0]


@pytest.mark.slow
def test_parameters_gathered_in_half_precision_have_the_same_bits(mesh_of):
    options = {"strategy": PLACEMENTS["fsdp"], "gather_dtype": jnp.bfloat16}
    first, second = (make(sizes, mesh_of, **options) for sizes in (MESHES[0], MESHES[2]))
    assert history(first)[0] == history(second)[0]


SHARDED_MESHES = [(PLACEMENTS["zero2"], {"data": 4}), (PLACEMENTS["fsdp"], {"data": 4})]


def with_statistics(params, batch):
    """The loss of weights in bfloat16, with a running mean that no gradient trains."""
    hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["in"])
    mean = 0.9 * params["mean"] + 0.1 * batch["x"].mean(0)
    updates = {"statistics": so.losses.Updated({"mean": mean})}
    return jnp.mean((hidden @ params["out"]).astype(jnp.float32) ** 2), updates


@pytest.mark.slow
def test_half_precision_and_running_statistics_have_the_same_bits(mesh_of):
    params = {
        "in": jnp.asarray(PARAMS["in"], jnp.bfloat16),
        "out": jnp.asarray(PARAMS["out"], jnp.bfloat16),
        "mean": np.zeros(5, np.float32),
    }
    digests = set()
    for strategy, sizes in [*zip([so.ddp] * 4, MESHES, strict=True), *SHARDED_MESHES]:
        opt = strategy(
            optax.adamw(0.01),
            mesh_of(**sizes),
            with_statistics,
            reducer=TILES,
            rules=[("^mean$", "frozen")],
        )
        state = opt.init(params)
        for seed in range(3):
            state, metrics = opt.step(state, batch_of(16, seed))
        assert np.any(np.asarray(state.params["mean"]))
        digests.add(digest((state.params, state.opt_state, metrics)))
    assert len(digests) == 1


@pytest.mark.slow
def test_a_run_that_changes_its_mesh_and_placement_has_the_same_bits(mesh_of, tmp_path):
    expected = history(make({"data": 1}, mesh_of))[0][-1]
    for step, (sizes, strategy) in enumerate(
        [
            ({"data": 8}, PLACEMENTS["fsdp"]),
            ({"data": 2}, PLACEMENTS["zero2"]),
            ({"replica": 2, "data": 2}, PLACEMENTS["fsdp"]),
            ({"data": 1}, so.ddp),
        ]
    ):
        opt = make(sizes, mesh_of, strategy=strategy)
        if step:
            state = so.restore(tmp_path / str(step), opt)
        else:
            state = opt.init(PARAMS, rng=jax.random.key(1))
        state, metrics = opt.step(state, batch_of(16, step))
        so.save(tmp_path / str(step + 1), state)
    assert digest((state.params, state.opt_state, metrics)) == expected


@pytest.mark.slow
def test_the_step_is_the_step_of_one_device(mesh_of):
    opt = make({"data": 4}, mesh_of, loss="two_terms")
    so.check(opt, opt.init(PARAMS), batch_of(16, 0))  # raises if they differ


@pytest.mark.slow
def test_check_names_the_first_leaf_and_step_whose_bits_differ(mesh_of, monkeypatch):
    opt = make({"data": 2}, mesh_of, loss="two_terms", strategy=so.fsdp)
    report = so.check(opt, opt.init(PARAMS), batch_of(8, 0))
    assert report.differences[-1] == ("bits of one device", 0.0, 0.0, False)

    def slightly_larger(rows, sum_pairs=same_bits._sum_pairs):
        total = sum_pairs(rows)
        is_of_devices = rows.ndim > 1 and len(rows) == 2
        return total * np.float32(1 + 2**-14) if is_of_devices else total

    monkeypatch.setattr(same_bits, "_sum_pairs", slightly_larger)
    opt = make({"data": 2}, mesh_of, loss="two_terms", strategy=so.fsdp)
    with pytest.raises(so.errors.NotSeparableError) as refusal:
        so.check(opt, opt.init(PARAMS), batch_of(8, 0))
    named = "bits of metrics/grad_norm after step 1: 6.1e-05, of which 0.0e+00 may be rounding"
    assert named in str(refusal.value)
    assert "leave tile_rows out if rounding may depend on the mesh." in str(refusal.value)


def sam():
    return optax.contrib.sam(optax.sgd(0.01), optax.sgd(0.1), sync_period=2, opaque_mode=True)


REFUSED = {
    "three devices": (
        "3 devices hold rows, and a tree of two branches needs 1, 2, 4, 8, ...",
        {"data": 3},
        {},
    ),
    "global view": (
        "the partitioner orders the sums of view='global'",
        {"data": 2},
        {"view": "global"},
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_the_same_bits_is_refused(case, mesh_of):
    reason, sizes, options = REFUSED[case]
    with pytest.raises(ValueError, match="the same bits on every mesh") as refusal:
        make(sizes, mesh_of, **options)
    assert reason in str(refusal.value)


PAGE = (ROOT / "docs" / "same_bits.md").read_text().partition("\n## What is refused")[2]
PROMISES = re.findall(r"^\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
"""What a row of the page's table is about, and what holds."""
AXES = [name for name in inspect.signature(so.make_mesh).parameters if name != "devices"]


@pytest.mark.fast
@pytest.mark.parametrize("axis", AXES)
def test_axes_are_refused_if_the_page_says_so(axis, mesh_of):
    (promise,) = (text for subject, text in PROMISES if re.search(rf"axes.*\b{axis}\b", subject))

    def make_hybrid():
        model, _ = blocks_of(PARAMS)
        so.hybrid(optax.sgd(0.1), mesh_of(**{axis: 2}), model, reducer=TILES, micro_batches=2)

    if promise.startswith("refused"):
        with pytest.raises(ValueError, match=f"mesh axis '{axis}' cuts sums inside of a tile"):
            make_hybrid()
    else:
        make_hybrid()


@pytest.mark.fast
def test_weights_that_are_gathered_in_8_bits_are_refused(mesh_of):
    model = blocks_of(PARAMS)[0]._replace(rounded={"hidden": so.nn.Rounding("int8")})
    with pytest.raises(ValueError, match="weights that a BlockModel rounds are gathered in 8 bits"):
        so.fsdp(optax.sgd(0.1), mesh_of(data=2), model, reducer=TILES)


def test_an_optimizer_that_differentiates_the_loss_is_refused(mesh_of):
    opt = so.ddp(sam(), mesh_of(data=2), two_terms, reducer=TILES)
    with pytest.raises(ValueError, match="the optimizer differentiates the loss itself"):
        opt.step(opt.init(PARAMS), batch_of(16, 0))


@pytest.mark.parametrize(("rows", "strategy"), [(4, so.ddp), (14, so.hybrid)])
def test_rows_that_are_no_tiles_on_each_device_are_refused(rows, strategy, mesh_of):
    model, params = blocks_of(PARAMS)
    opt = strategy(optax.sgd(0.1), mesh_of(data=4), model, reducer=TILES, micro_batches=1)
    with pytest.raises(ValueError, match=f"batch of {rows} is not divisible by 4 .* x 2 rows of a"):
        opt.step(opt.init(params), batch_of(rows, 0))


@pytest.mark.parametrize("combinator", [so.local_sgd, so.diloco])
def test_replicas_that_train_apart_are_refused(combinator, mesh_of):
    opt = combinator(make({"replica": 2, "data": 2}, mesh_of), sync_every=2)
    with pytest.raises(ValueError, match="replicas that train apart"):
        opt.step(opt.init(PARAMS), batch_of(16, 0))


def test_cross_checks_are_refused(mesh_of):
    opt = make({"data": 2}, mesh_of)
    with pytest.raises(ValueError, match="a cross-check adds the bits of each device's own"):
        so.fit(opt, opt.init(PARAMS), [batch_of(16, 0)], num_steps=1, cross_check_every=1)
