"""`average_params` keeps the average that a loop on one device would keep, in every strategy, and
`evaluate` reads it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.pipelines import block_problem
from support.problems import problem
from support.reference import jitted, relative_difference, same_bits
from support.table import STRATEGIES

import shardopt as so

DECAY = 0.8
STEPS = 4
INNER = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def averaging(inner, **options):
    return optax.chain(inner, so.transforms.average_params(**options or {"decay": DECAY}))


def reference_params(case, tx):
    """Return the parameters after each step of plain optax."""
    treedef = jax.tree.structure(case.params)
    leaves = jax.tree.leaves(case.params)
    trained = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def merge(new):
        replaced = dict(zip(trained, new, strict=True))
        return treedef.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])

    tx = jitted(tx)
    grad = jax.jit(jax.grad(lambda new, batch: case.reference(merge(new), batch)))
    params = [leaves[i] for i in trained]
    history = []
    names = [str(i) for i in trained]  # muon wants a tree of names
    opt_state = tx.init(dict(zip(names, params, strict=True)))
    for batch in case.batches:
        grads = dict(zip(names, grad(params, batch), strict=True))
        updates, opt_state = tx.update(grads, opt_state, dict(zip(names, params, strict=True)))
        params = [
            np.asarray(p) + np.asarray(updates[name]) for name, p in zip(names, params, strict=True)
        ]
        history.append(params)
    return history, merge


def debiased(history, decay=DECAY):
    """Return the bias-corrected mean of optax."""
    tx = jitted(optax.ema(decay, debias=True))
    state = tx.init(history[0])
    for params in history:
        average, state = tx.update(params, state)
    return average


def check(opt, case, inner):
    """Train, and compare the average, its loss and its metrics over a set with one device."""
    history, merge = reference_params(case, inner)
    expected = merge(debiased(history))
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    before = jax.device_get(state)
    average = so.replace(state, params="average")
    assert relative_difference(average.params, expected) <= 1e-10
    assert [x.sharding for x in jax.tree.leaves(average.params)] == [
        x.sharding for x in jax.tree.leaves(state.params)
    ]
    loss_of = jax.jit(case.reference)
    loss = float(loss_of(expected, case.batches[0]))
    # they differ
    assert abs(loss - loss_of(merge(history[-1]), case.batches[0])) > 1e-4 * abs(loss)
    np.testing.assert_allclose(
        opt.evaluate(state, case.batches[0], params="average")["loss"], loss, rtol=1e-10
    )
    evaluate = so.training.evaluation(opt, case.batches[:1], params="average")
    np.testing.assert_allclose(evaluate(state)["val_loss"], loss, rtol=1e-10)
    same_bits(state, before)
    return state


ROWS = [
    pytest.param("fsdp", {"data": 8}, "adamw", {}, marks=pytest.mark.fast),
    pytest.param("ddp", {"data": 8}, "adamw", {"view": "global"}, marks=pytest.mark.slow),
    pytest.param(
        "zero1", {"data": 4, "tensor": 2}, "adamw", {"micro_batches": 4}, marks=pytest.mark.slow
    ),
    pytest.param("zero2", {"replica": 2, "data": 4}, "muon", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", {"data": 8}, "muon", {"opt_state": "matrices"}, marks=pytest.mark.slow),
    pytest.param("fsdp", {"data": 8}, "adamw", {"opt_state": "host"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "mesh", "inner", "options"), ROWS)
def test_the_average_is_that_of_one_device(strategy, mesh, inner, options, mesh_of):
    with jax.enable_x64(True):
        case = problem("odd", weighted=True, steps=STEPS, dtype=jnp.float64)
        rules = case.rules if "tensor" in mesh else []
        opt = STRATEGIES[strategy](
            averaging(INNER[inner]()), mesh_of(**mesh), case.loss_fn, rules=rules, **options
        )
        check(opt, case, INNER[inner]())


@pytest.mark.slow  # test_the_average_is_that_of_one_device; the contract steps in pipelines
@pytest.mark.parametrize("layout", ["within", "matrices"])
def test_a_pipeline_averages_as_one_device(layout, mesh_of):
    with jax.enable_x64(True):
        case = block_problem("pytree", weighted=False, num_blocks=2, rows=8, steps=STEPS)
        mesh = mesh_of(data=2, pipeline=2)
        options = {"min_shard_elements": 8, "opt_state": layout}
        opt = so.hybrid(
            averaging(INNER["adamw"]()),
            mesh,
            case.loss_fn,
            micro_batches=2,
            placement="zero1",
            **options,
        )
        check(opt, case, INNER["adamw"]())


WIDTH = 16
BLOCKS = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch) ** 2),
)
BLOCK_PARAMS = {
    "blocks": {
        "up": np.ones((8, WIDTH, 32), np.float32),
        "down": np.ones((8, 32, WIDTH), np.float32),
    },
    "in": np.ones((8, WIDTH), np.float32),
}


def stacked_muon():
    def dimensions(params):
        return jax.tree.map(
            lambda x: optax.contrib.MuonDimensionNumbers((1,), (2,)) if x.ndim == 3 else None,
            params,
        )

    return optax.contrib.muon(1e-2, weight_decay=1e-2, muon_weight_dimension_numbers=dimensions)


@pytest.mark.fast
def test_the_average_lies_as_its_parameters(mesh_of):
    """Without its own place, the average of a stacked matrix would be at the owner, which has no
    parameters.
    """
    opt = STRATEGIES["fsdp"](
        averaging(stacked_muon()), mesh_of(data=8), BLOCKS, opt_state="matrices"
    )
    state = opt.abstract_state(BLOCK_PARAMS)
    average = state.opt_state[1].average
    assert [leaf.sharding for leaf in jax.tree.leaves(average)] == [
        leaf.sharding for leaf in jax.tree.leaves(state.params)
    ]
    assert not average["blocks"]["up"].sharding.is_fully_replicated


@pytest.mark.slow  # the test above is of where the average lies, which decides it
@pytest.mark.parametrize(("strategy", "layout"), [("zero1", "within"), ("fsdp", "matrices")])
def test_a_step_sends_nothing_more(strategy, layout, mesh_of):
    """Without its own place, the average of a stacked matrix would be at the owner, which has no
    parameters.
    """
    sent = []
    for tx in (stacked_muon(), averaging(stacked_muon())):
        opt = STRATEGIES[strategy](tx, mesh_of(data=8), BLOCKS, opt_state=layout)
        opt_state = opt.init(BLOCK_PARAMS)
        sent.append(
            [
                (c.kind, c.bytes)
                for c in so.hlo.audit(opt.step, opt_state, np.ones((8, 8), np.float32)).collectives
            ]
        )
    assert sent[0] == sent[1]
    average = opt_state.opt_state[1].average
    assert (
        average["blocks"]["up"].addressable_shards[0].data.size * 8 == average["blocks"]["up"].size
    )


def test_schedule_free_is_read_as_optax_reads_it(mesh_of):
    with jax.enable_x64(True):
        case = problem("odd", weighted=False, steps=STEPS, dtype=jnp.float64)
        tx = optax.contrib.schedule_free_adamw(1e-2, eps=1e-4)
        opt = STRATEGIES["zero1"](tx, mesh_of(data=8), case.loss_fn)
        state = opt.init(case.params)
        for batch in case.batches:
            state, _ = opt.step(state, batch)
        trained = {**jax.device_get(state.params), "count": None}
        expected = optax.contrib.schedule_free_eval_params(jax.device_get(state.opt_state), trained)
        average = so.replace(state, params="average").params
        assert average["count"] == 3
        assert relative_difference({**average, "count": None}, expected) <= 1e-12
        assert relative_difference({**average, "count": None}, trained) > 1e-4


def test_replicas_give_the_mean_of_their_averages(mesh_of):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    inner = so.ddp(averaging(optax.sgd(0.1)), mesh_of(replica=2, data=2), loss_fn)
    opt = so.local_sgd(inner, sync_every=3)
    rows = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    state = opt.init({"w": jnp.ones(3)})
    history = []
    for batch in rows:
        state, _ = opt.step(state, batch)
        history.append(jax.device_get(state.opt_state.params.value["w"]))
    expected = debiased(history).mean(0)
    np.testing.assert_allclose(so.replace(state, params="average").params["w"], expected, rtol=1e-6)
    assert abs(expected - 1).max() > 1e-3  # the shared parameters have not changed yet


def follow(tx, values):
    """Return the averages of a parameter that takes these values."""
    state = tx.init(jnp.float32(9.0))
    previous = 9.0
    averages = []
    for value in values:
        _, state = tx.update(jnp.float32(value - previous), state, jnp.float32(previous))
        previous = value
        averages.append(float(state.average))
    return averages


def test_without_a_decay_all_count_alike_from_start_on():
    tx = so.transforms.average_params(start=2, every=2)
    assert follow(tx, [1, 2, 3, 4, 5, 6, 7, 12]) == [1, 2, 3, 4, 4, 5, 5, pytest.approx(22 / 3)]


def test_a_half_life_counts_steps():
    assert follow(so.transforms.average_params(half_life=2, every=2), [5, 8, 5, 2]) == [
        5,
        8,
        8,
        pytest.approx(4),
    ]


def test_bfloat16_is_averaged_in_float32():
    tx = so.transforms.average_params(decay=0.999)
    params = jnp.ones((), jnp.bfloat16)
    state = tx.init(params)
    for update in (0.0, 2.0**-7):
        _, state = tx.update(jnp.asarray(update, jnp.bfloat16), state, params)
    assert state.average.dtype == jnp.float32
    np.testing.assert_allclose(state.average, 1 + 2.0**-7 / 1.999, rtol=1e-7)


def test_masked_leaves_and_batch_statistics_come_from_the_state(mesh_of):
    def loss_fn(params, batch):
        new_count = so.losses.Updated({"count": params["count"] + 1})
        return jnp.mean(batch) * (params["a"] + params["b"]), {"statistics": new_count}

    average = optax.masked(
        so.transforms.average_params(decay=0.5), {"a": True, "b": False, "count": None}
    )
    opt = so.ddp(
        optax.chain(optax.sgd(0.1), average), mesh_of(data=2), loss_fn, rules=[("count", "frozen")]
    )
    state = opt.init({"a": jnp.ones(()), "b": jnp.ones(()), "count": jnp.zeros(())})
    for _ in range(3):
        state, _ = opt.step(state, np.ones(4, np.float32))
    params = so.replace(state, params="average").params
    assert params["b"] == state.params["b"] < params["a"]
    assert params["count"] == 3


def test_a_checkpoint_holds_the_average_and_another_strategy_reads_it(mesh_of, tmp_path):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    opt = so.zero(
        averaging(optax.sgd(0.1)), mesh_of(data=8), loss_fn, stage=1, min_shard_elements=1
    )
    state = opt.init({"w": jnp.ones((8, 8))})
    rows = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    run = [rows] * 4
    evaluate = so.training.evaluation(opt, [rows], params="average")
    with so.Checkpoints(tmp_path, every=2, keep=1, best="val_loss") as checkpoints:
        result = so.fit(
            opt, state, run, num_steps=4, checkpoints=checkpoints, evaluate=evaluate, progress=False
        )
        state = result.state
        assert checkpoints.best_step() == 4
    assert result.history[-1]["val_loss"] == pytest.approx(
        float(opt.evaluate(so.replace(state, params="average"), rows)["loss"])
    )
    assert result.history[-1]["val_loss"] > 1.01 * opt.evaluate(state, rows)["loss"]
    other = so.fsdp(averaging(optax.sgd(0.1)), mesh_of(data=4), loss_fn, min_shard_elements=1)
    restored = so.restore(tmp_path, other)
    same_bits(
        so.replace(restored, params="average").params, so.replace(state, params="average").params
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "average_params: decay must be finite, above 0 and below 1; got 1.0."),
        ({"half_life": 0}, "average_params: half_life must be finite, above 0; got 0."),
        (
            {"decay": 0.9, "half_life": 2},
            "average_params: got decay=0.9 and half_life=2.\nFix: pass one of them.",
        ),
        ({"every": 0}, "average_params: every must be at least 1, got 0."),
        ({"start": -1}, "average_params: start must be at least 0, got -1."),
    ],
)
def test_a_wrong_argument_is_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as error:
        so.transforms.average_params(**options)
    assert str(error.value) == message


def test_a_state_without_an_average_is_refused(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), lambda params, batch: jnp.mean(batch) * params)
    state = opt.init(jnp.ones(()))
    batch = np.ones(4, np.float32)
    with pytest.raises(
        ValueError, match="the optimizer state has no average of the parameters"
    ) as error:
        opt.evaluate(state, batch, params="average")
    assert "average_params(decay=0.999)" in str(error.value)
    with pytest.raises(ValueError, match="params must be None or 'average', got 'ema'"):
        opt.evaluate(state, batch, params="ema")
    with pytest.raises(ValueError, match="evaluation: params must be None or 'average', got 'ema'"):
        so.training.evaluation(opt, [batch], params="ema")
