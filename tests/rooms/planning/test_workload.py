"""The costs of a model: closed forms against traces, published sizes, refusals."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from support.layouts import SHAPE, active_parameters
from support.scripts import imported
from support.tiers import tiered

import shardopt as so
from benchmarks import transformer
from shardopt.models import gpt
from shardopt.planning import MODELS, ParallelLayout, Transformer, trace
from shardopt.planning._models import RULES, find_model
from shardopt.planning._workload import count_flops

with imported("step_times") as step_times:
    step_flops = step_times.step_flops


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


@pytest.mark.slow  # test_predictions.py compares with compiled steps
@pytest.mark.parametrize("gated", tiered([True, False], bool))
def test_the_closed_form_is_the_trace(gated):
    shape = Transformer(
        "t",
        64,
        3,
        8,
        160,
        256,
        32,
        num_kv_heads=2,
        gated=gated,
        fused_attention=False,
        dtype=jnp.float32,
    )
    work = shape.workload()
    params = shape.abstract_params()
    batch = transformer.abstract_batch(shape, 4)
    traced = trace(transformer.model(shape), params, batch, rules=RULES)
    assert traced.block_flops == work.block_flops
    assert traced.recompute_flops == work.recompute_flops
    assert traced.ends_flops == work.ends_flops
    assert traced.boundary_bytes == work.boundary_bytes
    assert traced.num_parameters == work.num_parameters == shape.num_parameters
    # out and down are sharded by row; q, kv and up by column
    assert traced.tensor_sums == work.tensor_sums == (2, 3)
    assert traced.named == work.named
    assert (traced.tables, traced.table_ids, traced.table_numbers) == (("embedding",), 32, 32 * 64)
    assert (work.tables, work.table_ids, work.table_numbers) == (("embedding",), 32, 32 * 64)
    assert traced.remat_choices() == work.remat_choices()
    # of the mlp, each hidden unit and token costs 6 numbers, or in a pipeline the results of
    # products alone
    wide_shape = dataclasses.replace(shape, hidden=320)
    wide_work = wide_shape.workload()
    wide_batch = transformer.abstract_batch(wide_shape, 4)
    wide_traced = trace(
        transformer.model(wide_shape), wide_shape.abstract_params(), wide_batch, rules=RULES
    )
    for name, numbers in {
        "residuals": 6,
        "stage_residuals": 1 + gated,
        "deferred": 1 + gated,
    }.items():

        def difference(wide, narrow, name=name):
            return getattr(wide, name).sharded - getattr(narrow, name).sharded

        assert difference(wide_work, work) == numbers * 160 * 4 * 32
        # jax 0.10.2 stores 6 numbers for GELU, and jax 0.12 stores 5
        allowed = {numbers, 5} if name == "residuals" and not gated else {numbers}
        assert difference(wide_traced, traced) / (160 * 4 * 32) in allowed
    # at least what inner products need, at most what nothing recomputed keeps
    assert work.boundary_bytes <= work.stage_residuals.on(1) <= traced.residuals.on(1)


@pytest.mark.slow
def test_the_trace_of_the_gpt_counts_its_weights():
    config = gpt.config(dim=64, num_layers=2, num_heads=4)
    params = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
    work = trace(gpt.model(config), params, {"tokens": jnp.zeros((2, 33), jnp.int32)}, tokens=32)
    D = 64
    F = 192
    T = 32
    assert work.block_flops == 2 * T * (4 * D * D + 3 * D * F) + 4 * T * T * D
    assert work.ends_flops == 2 * T * D * 256
    assert work.tensor_sums == (0, 0)
    assert trace(
        gpt.model(config), params, {"tokens": jnp.zeros((2, 33), jnp.int32)}, rules=gpt.rules
    ).tensor_sums == (
        2,
        2,
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.12444),
        ("gpt2-xl", 1.55761),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
    ],
)
def test_models_have_their_published_numbers_of_parameters(name, billions):
    """The counts equal the released checkpoints.

    Gpt2 lacks its biases, which are under a thousandth.
    """
    assert find_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_step_costs_six_flops_a_parameter_and_token_and_some_for_attention():
    for shape in MODELS.values():
        ratio = shape.workload().model_flops / (6 * active_parameters(shape) * shape.length)
        # attention over 128 x 192 dims in a width of 7168
        assert 1.0 < ratio < (1.1 if shape.latent is None else 1.3)


def test_experts_are_counted_as_published():
    """The paper "Mixtral of Experts", 2024, section 2, states 47B and 13B active.

    The paper "DeepSeek-V3", 2024, states 671B and 37B active, with three dense layers.
    """
    mixtral = MODELS["mixtral-8x7b"]
    deepseek = MODELS["deepseek-v3"]
    assert (round(mixtral.num_parameters / 1e9, 1), round(active_parameters(mixtral) / 1e9, 1)) == (
        46.7,
        12.9,
    )
    dense = 3 * (
        deepseek.num_parameters / 58
        - 3 * 7168 * 2048 * 257
        + 3 * 7168 * 18432
        - 2 * 129280 * 7168 / 58
    )
    assert round((deepseek.num_parameters + dense) / 1e9) == 671
    # less the table of the embedding
    assert round((active_parameters(deepseek) + dense - 129280 * 7168) / 1e9) == 37


def test_attention_on_a_tpu_is_what_splash_computes():
    """Products of 512 x 512 tiles, 36 of 64, as wide as keys and as values: 1 and 1 forwards, 3 and
    2 backwards.

    And one each way with a permutation of the components that are rotated, of queries and keys.
    """
    for name, keys, rotated in (
        ("mixtral-8x7b", 128, (32 + 8) * 128**2),
        ("deepseek-v3", 192, (128 + 1) * 64**2),
    ):
        shape = dataclasses.replace(MODELS[name], length=4096)
        each = 2 * shape.num_heads * 36 * 512**2
        turn = 2 * 4096 * rotated
        forward = each * (keys + 128) + turn
        backward = each * (3 * keys + 2 * 128) + turn
        exact = (
            3
            * 2
            * shape.num_heads
            * 4096**2
            // 2
            * (shape.width + (shape.latent.rope if shape.latent else 0) + 128)
        )
        for remat, passes in ((False, 1), ("save:attention", 1), (True, 2), ("save:qkv", 2)):
            work = shape.workload()
            layout = ParallelLayout(data=8, remat=remat)
            plain, splash_flops = (
                step_flops(work, layout, batch_size=8, on_tpu=on_tpu) for on_tpu in (None, shape)
            )
            spared = exact + (exact / 3 if passes == 2 else 0)
            assert splash_flops - plain == pytest.approx(
                shape.num_layers * (passes * forward + backward - spared), rel=1e-9
            )


@pytest.mark.slow  # test_experts_are_counted_as_published
def test_experts_are_traced():
    """A token costs its router and its K experts, whatever the number of these."""
    shapes = {"gate": (8, 16, 24), "up": (8, 16, 24), "down": (8, 24, 16)}
    params = {
        "blocks": {
            name: jax.ShapeDtypeStruct((3, *shape), jnp.float32) for name, shape in shapes.items()
        }
    }
    params["blocks"]["router"] = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)

    def block(w, x):
        weights = {name: w[name] for name in shapes}
        return x + so.nn.mixture_of_experts(weights, x, w["router"], top_k=2)[0]

    model = so.BlockModel(
        lambda outer, batch: batch["x"], block, lambda outer, x, batch: (x**2).mean()
    )
    rules = [("^blocks/(gate|up|down)$", "experts")]
    work = so.planning.trace(model, params, {"x": jnp.zeros((4, 10, 16))}, rules=rules)
    assert work.block_flops == 2 * 10 * (16 * 8 + 2 * 3 * 16 * 24)
    assert work.experts[:3] == (8, 2, 10 * 16 * 4)
    placed = so.planning._layout.place(work, so.planning.ParallelLayout(data=2, expert=4), {})
    # the router is too small to be sharded
    assert placed.params == 3 * 4 * (8 * 3 * 16 * 24 // 8 + 16 * 8)


def test_loops_count_each_turn_and_branches_the_most_flops():
    def program(x):
        x = jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=7)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    assert sum(count_flops(jax.make_jaxpr(program)(jnp.ones((8, 8))))) == 9 * 2 * 8**3


def test_what_is_saved_is_not_computed_again():
    work = Transformer("t", 64, 3, 8, 160, 256, 32, num_kv_heads=2).workload()
    full = work.recompute(True)
    assert work.recompute(False) is None
    assert (full.kept.on(1), full.flops, full.tensor_sums) == (0, work.recompute_flops, 1)
    partial_saving = work.recompute("save:attention_out, qkv")
    # T D + T (H + 2 G) K numbers of two bytes; both products spared
    assert partial_saving.kept == (2 * 32 * 64, 2 * 32 * (8 + 4) * 8)
    assert partial_saving.flops == full.flops - 2 * 32 * 64 * (64 + (8 + 4) * 8)
    assert partial_saving.tensor_sums == 0
    everything = work.remat_choices()[1]
    assert everything == "save:qkv,attention_out,mlp_hidden,attention"
    assert work.recompute(everything).flops == 0
    assert work.remat_choices()[-2:] == ("save:qkv", True)
    # long rows: attention costs more than any product
    long = Transformer("t", 64, 3, 8, 160, 256, 128, num_kv_heads=2).workload()
    assert long.remat_choices()[-2:] == ("save:attention", True)


def test_names_that_a_plan_cannot_use_are_refused():
    work = Transformer("t", 64, 3, 8, 160, 256, 32).workload()
    message = (
        "plan: remat names 1 value that the blocks of t do not have.\n  atention\n"
        "Fix: use some of qkv, attention, attention_out, mlp_hidden."
    )
    with refused(ValueError, message):
        so.plan(work, hardware="v5e", chips=8, batch_size=8, remat=["save:qkv,atention"])
    message = (
        "plan: remat must be True, False or 'save:NAME,...', got 'offload:qkv'.\n"
        "Fix: write 'save:qkv,attention', or True for 'full'."
    )
    with refused(ValueError, message):
        work.recompute("offload:qkv")


def test_unknown_models_and_kinds_are_refused():
    known = (
        "gpt2, gpt2-xl, llama2-70b, llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, deepseek-v3"
    )
    message = (
        f"unknown model 'gpt5'.\nFix: use one of {known}, or describe it with"
        " so.planning.Transformer."
    )
    with refused(ValueError, f"shardopt: {message}"):
        find_model("gpt5")
    with refused(ValueError, f"plan: {message}"):  # the function that the user called
        so.plan("gpt5", hardware="v5p", chips=1, batch_size=1)
    message = (
        "shardopt: model must be a name, a Transformer or a Workload, got 3.\nFix: pass a name such"
        " as 'llama3-8b', a so.planning.Transformer, or so.planning.trace(model, ...)."
    )
    with refused(TypeError, message):
        find_model(3)
    message = (
        "plan: model must be a name, a Transformer or a Workload, got function.\nFix: make a"
        " so.BlockModel of the loss, and pass so.planning.trace(model, abstract_params,"
        " abstract_batch); of a loss without blocks so.planning.aot compiles one layout."
    )
    with refused(TypeError, message):
        so.plan(lambda params, batch: 0.0, hardware="v5p", chips=8, batch_size=64)
    model = so.BlockModel(
        embed=lambda outer, batch: batch, block=lambda w, x: x, loss=lambda outer, x, batch: 0.0
    )
    message = (
        "plan: model must be a name, a Transformer or a Workload, got BlockModel.\nFix: pass"
        " so.planning.trace(model, abstract_params, abstract_batch), which counts what a row costs."
    )
    with refused(TypeError, message):
        so.plan(model, hardware="v5p", chips=8, batch_size=64)
    with refused(ValueError, "Transformer: dim must be at least 1, got 0."):
        Transformer("t", 0, 2, 4, 8, 16, 8)
    with refused(ValueError, "Transformer: num_heads=4 is not divisible by num_kv_heads=3."):
        Transformer("t", 8, 2, 4, 8, 16, 8, num_kv_heads=3)


def test_what_cannot_be_traced_is_refused():
    message = (
        "trace: model must be a BlockModel, got function.\nFix: use so.BlockModel(embed, block,"
        " loss), or describe a shape with so.planning.Transformer."
    )
    with refused(TypeError, message):
        trace(lambda params, batch: 0.0, {}, {})
    model = so.BlockModel(
        lambda outer, batch: batch, lambda w, x: x, lambda outer, x, batch: x.mean()
    )
    message = (
        "trace: the parameters of a BlockModel must be a dict with 'blocks'.\n"
        'Fix: pass {"blocks": leaves stacked [L, ...], **outer}.'
    )
    with refused(ValueError, message):
        trace(model, {"w": jnp.ones(3)}, jnp.ones((2, 3)))
    message = (
        "trace: a leaf of the batch has no dim.\nFix: give every leaf of the batch its rows as"
        " first dim."
    )
    with refused(ValueError, message):
        trace(model, {"blocks": {"w": jnp.ones((2, 3))}}, jnp.ones(()))
    message = (
        "trace: embed looks up none of BlockModel.tables.\n  e\nFix: read them by so.nn.embedding,"
        " or leave tables out."
    )
    with refused(ValueError, message):
        params = {"blocks": {"w": jnp.ones((2, 3))}, "e": jnp.ones((4, 3))}
        trace(model._replace(tables=("e",)), params, jnp.ones((2, 3)))


@pytest.mark.slow
def test_the_model_of_a_shape_learns_from_its_batch():
    params = jax.jit(lambda rng: transformer.init(SHAPE, rng))(jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), SHAPE.abstract_params()
    )
    batch = {"tokens": jnp.arange(2 * 65).reshape(2, 65)}
    loss, grads = jax.jit(jax.value_and_grad(transformer.model(SHAPE).loss_fn))(params, batch)
    assert float(loss) == pytest.approx(math.log(SHAPE.vocab_size), rel=0.02)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))
