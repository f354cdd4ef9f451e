"""Remat by name: values that are kept, values that are computed again, equal steps, and names that
blocks do not have.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters.partial_eval import dce_jaxpr
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so
from benchmarks import transformer
from shardopt.core._block_remat import checkpointed
from shardopt.models import gpt
from shardopt.planning import Transformer
from shardopt.planning._models import RULES
from shardopt.remat._split_backward import split_backward

DIM = 8
HIDDEN = 24
ROWS = 8
TX = optax.sgd(0.05, momentum=0.9)


def block(w, x):
    inner = checkpoint_name(x @ w["in"], "inner")
    x = x + checkpoint_name(jnp.tanh(inner) @ w["out"], "outer")
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return x + jax.nn.silu(hidden) @ w["down"]


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["embed"],
    block=block,
    loss=lambda outer, x, batch: jnp.mean((x - batch["y"]) ** 2),
)


def params_of(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {
        "in": (3, DIM, DIM),
        "out": (3, DIM, DIM),
        "up": (3, DIM, HIDDEN),
        "down": (3, HIDDEN, DIM),
    }
    blocks = {name: 0.3 * rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return {"blocks": blocks, "embed": np.eye(DIM, dtype=dtype)}


def batches_of(steps):
    rng = np.random.default_rng(1)
    scale = np.linspace(0.2, 2.0, ROWS)[:, None]
    return [
        {"x": scale * rng.normal(size=(ROWS, DIM)), "y": rng.normal(size=(ROWS, DIM))}
        for _ in range(steps)
    ]


def fsdp(*args, **kwargs):
    return so.fsdp(*args, min_shard_elements=8, **kwargs)


POLICY = jax.checkpoint_policies.dots_saveable
STEPS = [
    (strategy, remat)
    for strategy in ("ddp", "fsdp")
    for remat in ("save:inner, hidden", "offload:outer", "full", "offload", POLICY)
]
QUICK = [("fsdp", "offload:outer")]


@pytest.mark.parametrize(
    ("strategy", "remat"),
    tiered(
        STEPS,
        lambda row: row in QUICK,
        ids=lambda row: f"{row[0]}-{getattr(row[1], '__name__', row[1])}",
    ),
)
def test_steps_are_those_of_one_device(strategy, remat, mesh_of, x64):
    params = params_of()
    batches = batches_of(4)
    make = fsdp if strategy == "fsdp" else so.ddp
    opt = make(TX, mesh_of(data=4), MODEL._replace(remat=remat), micro_batches=2)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    _, final = train(TX, MODEL.loss_fn, params, batches)
    assert relative_difference(state.params, final) <= 1e-12


def products(opt, abstract_params, batch):
    return (
        opt.step.lower(opt.abstract_state(abstract_params), batch)
        .as_text()
        .count("stablehlo.dot_general")
    )


AGAIN = {
    "full": 5,
    "offload": 5,
    "save:qkv": 4,
    "save:attention": 4,
    "offload:attention_out": 4,
    # the scores, whose exponentials the gradient reads
    "save:qkv,attention,attention_out,mlp_hidden": 1,
}


@pytest.mark.parametrize(
    "strategy", [pytest.param(so.ddp, marks=pytest.mark.slow), so.fsdp], ids=["ddp", "fsdp"]
)
@pytest.mark.parametrize(("remat", "repeats"), tiered(AGAIN.items(), lambda row: row[0] == "full"))
def test_a_value_that_is_kept_is_not_computed_again(strategy, remat, repeats, mesh_of):
    """The backward pass of "full" repeats five of the six products of a block: nothing reads the
    result of the last one.
    """
    config = gpt.config(vocab_size=64, dim=32, num_layers=2, num_heads=4)
    shapes = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = {"tokens": jax.ShapeDtypeStruct((4, 9), jnp.int32)}

    def repeated(remat):
        opt = strategy(TX, mesh_of(data=2), gpt.model(config, remat=remat))
        return products(opt, shapes, batch) - baseline

    baseline = 0
    baseline = repeated(None)
    assert repeated(remat) == repeats


def test_nothing_else_is_kept():
    block_params = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], jnp.float32)
        for name, leaf in params_of()["blocks"].items()
    }
    leaves, treedef = jax.tree.flatten(block_params)
    x = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)

    def kept(remat):
        run = checkpointed(remat, block)
        passes = split_backward(
            lambda w, x: [run(treedef.unflatten(w), x[0])], leaves, [x], trained=range(4)
        )
        return sorted(leaf.shape for leaf in passes.residuals)

    assert kept("full") == kept("offload") == [(ROWS, DIM)]
    assert kept("save:inner") == [(ROWS, DIM)] * 2
    assert kept("save:hidden") == kept("offload:hidden") == [(ROWS, DIM), (ROWS, HIDDEN)]
    # what only elementwise operations make of a value that is kept needs no place of its own
    assert kept("save:inner,hidden,outer") == [(ROWS, DIM)] * 3 + [(ROWS, HIDDEN)]


@pytest.mark.parametrize("strategy", [so.ddp, fsdp], ids=["ddp", "fsdp"])
def test_a_name_that_blocks_do_not_have_is_refused(strategy, mesh_of):
    opt = strategy(TX, mesh_of(data=2), MODEL._replace(remat="save:inner,atention"))
    params = params_of(np.float32)
    with pytest.raises(ValueError, match="remat names 1 value") as error:
        opt.step.lower(
            opt.abstract_state(params), {"x": np.ones((4, DIM), "f4"), "y": np.ones((4, DIM), "f4")}
        )
    assert (
        str(error.value)
        == "BlockModel: remat names 1 value that the blocks do not have.\n  atention\n"
        "Fix: use some of inner, outer, hidden; jax.ad_checkpoint.checkpoint_name names others."
    )


def test_blocks_without_names_say_how_to_name():
    model = MODEL._replace(block=lambda w, x: x @ w["in"], remat="offload:inner,outer")
    with pytest.raises(ValueError, match="remat names 2 values") as error:
        jax.eval_shape(model.loss_fn, params_of(), batches_of(1)[0])
    assert (
        str(error.value)
        == "BlockModel: remat names 2 values that the blocks do not have.\n  inner\n  outer\nFix:"
        " name what is to be kept, x = jax.ad_checkpoint.checkpoint_name(x, 'attention'), or use"
        " remat='full'."
    )


def test_the_kernel_is_not_run_again_where_its_result_is_kept():
    x = jnp.ones((1, 128, 2, 128))

    def kernels(remat):
        mix = checkpointed(remat, lambda x: so.nn.attention(x, x, x, implementation="splash"))
        used, _ = dce_jaxpr(
            jax.make_jaxpr(jax.value_and_grad(lambda x: mix(x).sum()))(x).jaxpr, [True, True]
        )
        return str(used).count("pallas_call[")

    # forward, forward again, and backward
    assert (kernels("full"), kernels("save:attention")) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_names_save_kernels_and_offload_to_the_host_on_tpu(tensor):
    """The test fails, rather than skips, if libtpu is not installed: pip install 'shardopt[tpu]'."""
    shape = Transformer("t", 512, 4, 8, 1024, 1024, 512, num_kv_heads=4)
    rules = RULES if tensor > 1 else ()

    def report(remat):
        def make(mesh):
            return so.fsdp(TX, mesh, transformer.model(shape, remat=remat), rules=rules)

        shapes = shape.abstract_params(), transformer.abstract_batch(shape, 8)
        return so.planning.aot(make, *shapes, topology="v5e:2x4", tensor=tensor)

    save = report("save:qkv,attention")
    offload = report("offload:qkv,attention")
    full = report("full")
    kernels = [
        re.findall(r"%splash_(\w+?)[.\d]* = .* custom-call\(", program.text)
        for program in (save, full)
    ]
    assert kernels == [["forward", "backward"], ["forward", "forward", "backward"]]
    in_host_memory = "S(5)"
    assert in_host_memory not in save.text
    assert in_host_memory in offload.text
