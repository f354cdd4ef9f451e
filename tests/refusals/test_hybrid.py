"""What hybrid cannot run is refused before anything compiles, with all sizes that matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from support.pipelines import SCHEDULES

import shardopt as so

pytestmark = pytest.mark.fast

TX = optax.sgd(0.1)
BATCH = {"x": np.ones((16, 4), np.float32)}
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"]),
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch["x"]) ** 2),
)


def params(blocks=8):
    return {
        "blocks": {"kernel": np.full((blocks, 8, 8), 0.1, np.float32)},
        "in": np.ones((4, 8), np.float32),
    }


def mesh(**sizes):
    return so.make_mesh(**sizes)


def hybrid(model=MODEL, on=None, **options):
    return so.hybrid(TX, on or mesh(data=2, pipeline=4), model, **({"micro_batches": 4} | options))


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr(
        jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled")
    )


TWO_BY_FOUR = so.schedules.eager_one_f_one_b(2, 4)
CONSTRUCTION = [
    (
        lambda: so.hybrid("adam", mesh(pipeline=4), MODEL, micro_batches=4),
        TypeError,
        (
            "hybrid: tx must be an optax.GradientTransformation, got str.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        ),
    ),
    (
        lambda: hybrid(lambda params, batch: 0.0),
        TypeError,
        (
            "hybrid: model must be a BlockModel, whose blocks are cut into stages, got function.\n"
            "Fix: use so.BlockModel(embed, block, loss), or so.fsdp for any loss."
        ),
    ),
    (
        lambda: hybrid(placement="zero4"),
        ValueError,
        (
            "hybrid: unknown placement 'zero4'.\nFix: use one of 'ddp', 'zero1', 'zero2', 'fsdp',"
            " 'fsdp_once'."
        ),
    ),
    (
        lambda: hybrid(placement=["ddp"]),
        TypeError,
        (
            "hybrid: placement must be a string, got ['ddp'].\nFix: use one of 'ddp', 'zero1',"
            " 'zero2', 'fsdp', 'fsdp_once'."
        ),
    ),
    (
        lambda: hybrid(placement="ddp", gather_dtype=jnp.bfloat16),
        ValueError,
        (
            "hybrid: gather_dtype is for placements that gather parameters, not for 'ddp'.\n"
            "Fix: use placement='fsdp', or leave gather_dtype out."
        ),
    ),
    (
        lambda: hybrid(remat=1),
        TypeError,
        (
            "hybrid: remat must be True, False or a string that BlockModel.remat can be, got 1.\n"
            "Fix: give a policy to the model: model._replace(remat=policy)."
        ),
    ),
    (
        lambda: hybrid(remat="offload:a, b"),
        ValueError,
        (
            "hybrid: BlockModel.remat='offload:a, b' keeps values in host memory, and a pipeline"
            " keeps them in buffers of the device.\nFix: use 'save:a,b' or 'full', or a mesh with"
            " pipeline=1."
        ),
    ),
    (
        lambda: hybrid(placement="ddp", min_shard_elements="8"),
        TypeError,
        "hybrid: min_shard_elements must be an integer, got '8' (str).",
    ),
    (
        lambda: so.hybrid(TX, 8, MODEL, micro_batches=4),
        TypeError,
        "hybrid: mesh must be a jax.sharding.Mesh, got int. Fix: use so.make_mesh().",
    ),
    (
        lambda: hybrid(on=Mesh(np.array(jax.devices()), ("data",))),
        ValueError,
        (
            "hybrid: the mesh has axes ('data',), none of them 'pipeline'.\nFix: make the mesh with"
            " so.make_mesh(pipeline=...), or say which axis it is: so.Axes(mesh, pipeline=...)."
        ),
    ),
    (
        lambda: hybrid(on=Mesh(np.array(jax.devices()), ("pipeline",))),
        ValueError,
        (
            "hybrid: the mesh has axes ('pipeline',), none of them 'data'.\nFix: make the mesh with"
            " so.make_mesh(data=...), or say which axis it is: so.Axes(mesh, data=...)."
        ),
    ),
    (
        lambda: hybrid(schedule="gpipe"),
        TypeError,
        (
            "hybrid: schedule must be a Schedule, or a function that makes one, got 'gpipe'.\n"
            "Fix: use one of so.schedules, such as so.schedules.eager_one_f_one_b."
        ),
    ),
    (
        lambda: hybrid(schedule=lambda num_stages, num_micro_batches: None),
        TypeError,
        (
            "hybrid: schedule(num_stages=4, num_micro_batches=4) returned None.\n"
            "Fix: return a Schedule; so.schedules.from_ticks and from_order make one."
        ),
    ),
    (
        lambda: hybrid(schedule=TWO_BY_FOUR),
        ValueError,
        (
            "hybrid: the schedule is for 2 stages and 4 micro-batches, but there are pipeline=4 and"
            " micro_batches=4.\nFix: make it of these sizes, or pass the function that makes it."
        ),
    ),
    (
        lambda: hybrid(schedule=SCHEDULES["interleaved"], micro_batches=6),
        ValueError,
        (
            "interleaved: with 2 chunks per stage, micro-batches must be a multiple of the 4"
            " stages, got 6.\nFix: use 4 or 8 micro-batches, or num_chunks=1."
        ),
    ),
    (
        lambda: so.fsdp(TX, mesh(data=4, pipeline=2), MODEL),
        ValueError,
        (
            "fsdp: mesh axis 'pipeline' (size 2) is above 1, but nothing is split over it.\n"
            "Fix: use so.hybrid, or make the mesh with pipeline=1."
        ),
    ),
    (
        lambda: hybrid(blocks_per_stage=(2, -1, 2, 2)),
        ValueError,
        "hybrid: blocks_per_stage must not be negative, got -1.",
    ),
    (
        lambda: hybrid(blocks_per_stage="2222"),
        TypeError,
        (
            "hybrid: blocks_per_stage must be integers, one for each virtual stage, or None, got"
            " '2222'.\nFix: use so.schedules.balance(num_blocks, stages * chunks)."
        ),
    ),
    (
        lambda: hybrid(on=mesh(data=8, pipeline=1), blocks_per_stage=(8,)),
        ValueError,
        (
            "hybrid: blocks_per_stage is for pipelines, and there is one stage.\n"
            "Fix: use a mesh with pipeline above 1, or leave blocks_per_stage out."
        ),
    ),
    (
        lambda: hybrid(MODEL._replace(remat="all")),
        ValueError,
        (
            "hybrid: BlockModel.remat must be None, 'full', 'save:NAME,...', 'offload',"
            " 'offload:NAME,...' or a jax.checkpoint policy, got 'all'.\nFix: write such as"
            " remat='save:qkv,attention'; policies are in jax.checkpoint_policies."
        ),
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTION)
def test_wrong_arguments_are_refused_at_construction(make, error, message, no_compile):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


FIRST_PARAMETERS = [
    (
        lambda: hybrid().specs(params(2)),
        (
            "hybrid: the model has 2 blocks, too few for 4 stages x 1 chunk = 4.\nFix: use 4 blocks or more,"
            " another pipeline size or number of chunks, or blocks_per_stage with zeros."
        ),
    ),
    (
        lambda: hybrid().specs(params(0)),
        (
            "hybrid: there are no blocks to cut into 4 stages.\nFix: stack at least one block a"
            " stage and chunk."
        ),
    ),
    (
        lambda: hybrid(schedule=functools.partial(so.schedules.interleaved, num_chunks=3)).specs(
            params(8)
        ),
        (
            "hybrid: the model has 8 blocks, too few for 4 stages x 3 chunks = 12.\nFix: use 12 blocks or"
            " more, another pipeline size or number of chunks, or blocks_per_stage with zeros."
        ),
    ),
    (
        lambda: hybrid(blocks_per_stage=(2, 2, 2)).specs(params(8)),
        (
            "hybrid: blocks_per_stage has 3 parts with 6 blocks in all; there are 4 stages x 1"
            " chunk = 4 parts, and 8 blocks.\nFix: so.schedules.balance(8, 4) is such a cut; or"
            " leave it out."
        ),
    ),
    (
        lambda: hybrid(opt_state="matrices").specs(params(7)),
        (
            "hybrid: opt_state='matrices' takes stages of equally many blocks, and these"
            " have 1, 2, 2, 2.\nFix: use a multiple of 4 blocks in equal parts, or"
            " opt_state='within'."
        ),
    ),
    (
        lambda: hybrid().specs({"in": np.ones((4, 8))}),
        (
            "hybrid: the parameters of a BlockModel must be a dict with 'blocks'.\n"
            'Fix: pass {"blocks": leaves stacked [L, ...], **outer}; '
            "jax.tree.map(lambda *x: jnp.stack(x), *blocks) stacks."
        ),
    ),
    (
        lambda: hybrid(on=mesh(data=1, tensor=2, pipeline=4)).specs(params()),
        (
            "hybrid: mesh axis 'tensor' (size 2) is above 1, but nothing is split over it.\nFix:"
            " give rules=[(regex, PartitionSpec), ...] that name 'tensor', or make the mesh with"
            " tensor=1."
        ),
    ),
]


@pytest.mark.parametrize(("make", "message"), FIRST_PARAMETERS)
def test_wrong_parameters_are_refused_at_first_sight(make, message, no_compile):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value) == message


CHANGES = [
    (
        lambda w, x: (x + x @ w["kernel"]).astype(jnp.bfloat16),
        "given, float32[16, 8]; it returned bfloat16[16, 8].",
    ),
    (lambda w, x: x[:, :4], "given, float32[16, 8]; it returned float32[16, 4]."),
    (lambda w, x: (), "given, float32[16, 8]; it returned nothing."),
    (lambda w, x: [x], "given, PyTreeDef(*); it returned PyTreeDef([*])."),
]


@pytest.mark.parametrize("method", ["step", "evaluate"])
@pytest.mark.parametrize(("block", "numbers"), CHANGES)
def test_a_block_that_changes_the_form_of_its_input_is_refused(block, numbers, method, request):
    opt = hybrid(MODEL._replace(block=block))
    state = opt.init(params())
    request.getfixturevalue("no_compile")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        getattr(opt, method)(state, BATCH)
    assert (
        str(caught.value)
        == f"hybrid: a block must return what it is {numbers}\nFix: let embed bring its result to"
        " the shape and dtype that blocks return, or cast at the end of the block."
    )


def test_micro_batches_that_do_not_divide_the_local_batch(request):
    opt = hybrid(micro_batches=6)
    state = opt.init(params())
    request.getfixturevalue("no_compile")
    for method in (opt.step, opt.evaluate):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            method(state, BATCH)
        assert (
            str(caught.value)
            == "hybrid: a global batch of 16 is not divisible by 2 devices along data x 6"
            " micro-batches = 12.\nFix: use a batch of 12 or 24, or another mesh or"
            " micro_batches."
        )


@pytest.mark.parametrize("size", [0, -2])
def test_sizes_of_a_mesh_are_checked_where_it_is_made(size, no_compile):
    with pytest.raises(
        ValueError,
        match=f"^make_mesh: sizes must be positive, or -1 for one of them; got pipeline={size}",
    ):
        mesh(pipeline=size)


def test_the_size_that_is_left_open_is_worked_out():
    assert dict(mesh(data=2, pipeline=-1).shape)["pipeline"] == 4
    assert hybrid(on=mesh(data=-1, pipeline=4)).config.mesh_shape["data"] == 2
