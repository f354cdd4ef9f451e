"""Contract 2 and 3: specs are true, nothing recompiles, buffers are reused, bytes follow the
formulas.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.problems import MODELS, problem
from support.reference import OPTIMIZERS
from support.table import MESHES, STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.models import gpt
from shardopt.step import _init as step_init

CASES = [
    (strategy, i % len(MESHES), list(MODELS)[i % 4], list(OPTIMIZERS)[i % 6])
    for i, strategy in enumerate([*STRATEGIES] * 2)
]


def build(strategy, mesh, model, optimizer, mesh_of, **options):
    case = problem(model, weighted=True, steps=3, dtype=jnp.float32)
    rules = case.rules if mesh.get("tensor", 1) > 1 else ()
    opt = STRATEGIES[strategy](
        OPTIMIZERS[optimizer](), mesh_of(**mesh), case.loss_fn, rules=rules, **options
    )
    return case, opt


@pytest.mark.parametrize(
    ("strategy", "mesh", "model", "optimizer"), tiered(CASES, lambda row: CASES.index(row) == 9)
)
def test_specs_are_the_shardings_and_the_second_step_compiles_nothing(
    strategy, mesh, model, optimizer, mesh_of
):
    case, opt = build(strategy, MESHES[mesh], model, optimizer, mesh_of)
    specs = opt.specs(jax.eval_shape(lambda: case.params))
    expected = jax.tree.map(
        lambda spec: NamedSharding(opt.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    state = opt.init(case.params)
    abstract = opt.abstract_state()

    def check(state):
        for leaf, sharding, promised in zip(
            jax.tree.leaves(state),
            jax.tree.leaves(expected),
            jax.tree.leaves(abstract),
            strict=True,
        ):
            assert leaf.sharding == sharding == promised.sharding
            assert (leaf.shape, leaf.dtype) == (promised.shape, promised.dtype)

    check(state)
    old = jax.tree.leaves(state)
    state, _ = opt.step(state, case.batches[0])
    check(state)
    assert all(leaf.is_deleted() for leaf in old if leaf.size > 1)
    with jax.log_compiles(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax._src.compiler,
            "compile_or_get_cached",
            lambda *_, **__: pytest.fail("compiled again"),
        )
        state, _ = opt.step(state, case.batches[1])
    check(state)


def adam_bytes(strategy, params_bytes, data):
    """Bytes per device of parameters and of optimizer state, from the table of algorithms.md: fp32
    Adam.
    """
    shares = {"ddp": (1, 2), "zero1": (1, 2 / data), "zero2": (1, 2 / data)}
    share = shares.get(strategy, (1 / data, 2 / data))
    return share[0] * params_bytes, share[1] * params_bytes


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    tiered(
        itertools.product(
            STRATEGIES, [{"data": 8}, {"data": 4, "tensor": 2}, {"replica": 2, "data": 4}]
        ),
        lambda row: "replica" in row[1] and row[0] in ("zero1", "fsdp"),
        ids=str,
    ),
)
def test_bytes_per_device_follow_the_formula(strategy, sizes, mesh_of):
    rules = [("up", P(None, "tensor")), ("down", P("tensor"))] if "tensor" in sizes else ()

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    opt = STRATEGIES[strategy](optax.adam(1e-3), mesh_of(**sizes), loss_fn, rules=rules)
    params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    state = opt.init(params)
    held = [0, 0]
    for i, tree in enumerate((state.params, state.opt_state)):
        held[i] = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    params_bytes = 2 * 64 * 256 * 4 // sizes.get("tensor", 1)
    np.testing.assert_allclose(held, adam_bytes(strategy, params_bytes, sizes["data"]), rtol=0.01)
    report = opt.config.report()
    assert [report.params_bytes, report.opt_state_bytes] == held
    compiled = opt.step.lower(state, np.ones((32, 64), np.float32)).compile()
    batch_bytes = 32 * 64 * 4 // sizes["data"] // sizes.get("replica", 1)
    assert abs(compiled.memory_analysis().argument_size_in_bytes - sum(held) - batch_bytes) < 64
    # all of the state is written into its own buffers
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(held)


def test_init_from_a_function_never_holds_a_split_leaf_whole(mesh_of, monkeypatch):
    def init_fn(rng):
        return {"w": jax.random.normal(rng, (1024, 1024))}

    peaks = []

    def spy(config, compiled, init_fn):
        jitted = init_program(config, compiled, init_fn)
        memory = jitted.lower(jax.random.key(3)).compile().memory_analysis()
        peaks.append(memory.output_size_in_bytes + memory.temp_size_in_bytes)
        return jitted

    init_program = step_init.init_program
    monkeypatch.setattr(step_init, "init_program", spy)
    opt = so.fsdp(
        optax.adam(1e-3), mesh_of(data=8), lambda params, batch: jnp.sum(params["w"]) * batch.mean()
    )
    state = opt.init(init_fn, jax.random.key(3))
    np.testing.assert_allclose(state.params["w"], init_fn(jax.random.key(3))["w"], rtol=1e-6)
    leaf_bytes = 4 * 1024 * 1024
    assert (
        peaks[0] <= leaf_bytes / 8 * 4 + 1024
    )  # its shard, and the random bits that it is made from


def test_init_leaves_the_users_arrays_alone(mesh_of):
    params = {"w": jnp.ones((8, 8)), "n": np.ones((8,), np.float32)}

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["n"][None, :]) ** 2)

    for sizes in ({"data": 1}, {"data": 8}):
        opt = so.ddp(optax.contrib.schedule_free_sgd(0.1), mesh_of(**sizes), loss_fn)
        state = opt.init(params)
        for _ in range(2):
            state, _ = opt.step(state, np.ones((8, 8), np.float32))
        assert params["w"].tolist() == np.ones((8, 8)).tolist()
        assert params["n"].tolist() == [1.0] * 8


def test_report_lists_what_stays_whole_and_why(mesh_of):
    opt = so.zero(
        optax.adam(1e-3), mesh_of(data=4), lambda params, batch: params["odd"].sum() * batch.mean()
    )
    with pytest.raises(ValueError, match="zero: no parameters have been seen yet"):
        opt.config.report()
    opt.specs(
        {
            "odd": jax.ShapeDtypeStruct((45, 33), jnp.float32),
            "small": jax.ShapeDtypeStruct((8,), jnp.float32),
        }
    )
    report = opt.config.report()
    assert {row.path: row.replicated_because for row in report.replicated} == {
        "odd": "shape (45, 33): no dim is divisible by data=4",
        "small": "8 elements, fewer than min_shard_elements=1024",
    }
    assert "no dim is divisible by data=4" in str(report)
    assert [(state_row.path, state_row.because) for state_row in report.replicated_state] == [
        ("0/mu/odd", "shape (45, 33): no dim is divisible by data=4"),
        ("0/mu/small", "8 elements, fewer than min_shard_elements=1024"),
        ("0/nu/odd", "shape (45, 33): no dim is divisible by data=4"),
        ("0/nu/small", "8 elements, fewer than min_shard_elements=1024"),
    ]
    assert "optimizer state 0/mu/odd [45, 33], 5,940 bytes, stays replicated: " in str(report)
    assert report.rows[0].bytes_per_device == 45 * 33 * 4


def of_gpt(layers, length):
    config = gpt.config(dim=256, num_layers=layers, num_heads=4)
    params = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
    return gpt.model(config), params, {"tokens": jax.ShapeDtypeStruct((8, length + 1), jnp.int32)}


def of_two_products(layers, length):
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T) ** 2),
    )
    shapes = {"blocks": {"up": (layers, 512, 1024), "down": (layers, 1024, 512)}, "in": (16, 512)}

    def to_abstract(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = jax.tree.map(to_abstract, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return model, params, to_abstract((8, length, 16))


@pytest.mark.parametrize(
    "problem_of", tiered([of_two_products, of_gpt], lambda make: make is of_two_products)
)
def test_fsdp_of_blocks_holds_at_most_two_blocks_whole(problem_of, mesh_of):
    """Temporary memory is linear in the blocks, and beyond saved activations a block costs only its
    gradient's shard.
    """

    def temporary(layers, length):
        model, params, batch = problem_of(layers, length)
        opt = so.fsdp(optax.adamw(1e-3), mesh_of(data=8), model, view="per_device")
        state = opt.abstract_state(params)
        block_bytes = (
            sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params["blocks"])) / layers
        )
        outer = sum(leaf.size * 4 for name, leaf in state.params.items() if name != "blocks")
        return (
            opt.step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes,
            block_bytes,
            outer,
        )

    two, block, outer = temporary(2, 16)
    four = temporary(4, 16)[0]
    six = temporary(6, 16)[0]
    short = temporary(4, 8)[0] - temporary(2, 8)[0]
    a_block = (four - two) / 2
    another = (six - four) / 2
    np.testing.assert_allclose(a_block, another, rtol=0.1)
    activations = 2 * (a_block - short / 2)  # what grows with the length
    np.testing.assert_allclose(a_block - activations, block / 8, rtol=0.15)
    assert two - 2 * a_block <= 2 * block + 2 * outer
