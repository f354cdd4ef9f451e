"""Steps that do not agree send nothing over replica.

Steps that agree send the stated bytes. Each kind of step has one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.groups import stated_bytes
from support.tiers import tiered

import shardopt as so

R = so.reducers


def at_step(opt, abstract, step):
    """Lower the step from `step` to `step + 1` without running any."""
    return opt.step.lower(
        abstract._replace(step=np.int32(step)), {"x": rows(3), "y": rows(2), "weights": rows()}
    )


def rows(*shape):
    return jax.ShapeDtypeStruct((16, *shape), jnp.float32)


def sent_over_replica(opt, params, step, min_bytes=0):
    abstract = opt.abstract_state(jax.eval_shape(lambda: params))
    return so.hlo.audit(at_step(opt, abstract, step)).of(axis="replica", min_bytes=min_bytes)


def shard_bytes(params, *, data=1, unsplit_names=("scale",)):
    sizes = {
        path[-1].key: leaf.size * 4 for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return sum(size if name in unsplit_names else size // data for name, size in sizes.items())


@pytest.mark.parametrize(
    ("name", "sizes"),
    tiered(
        [("ddp", {}), ("fsdp", {"data": 4}), ("fsdp", {"tensor": 2}), ("hybrid", {"pipeline": 2})],
        lambda row: row[0] == "ddp",
    ),
    ids=str,
)
def test_only_a_step_that_agrees_sends_over_replica_once_and_exactly_its_parameters(
    name, sizes, strategy_of, new_params
):
    opt = so.diloco(strategy_of(name, **sizes), sync_every=3)
    assert not sent_over_replica(opt, new_params(), 1).collectives
    report = sent_over_replica(opt, new_params(), 2)
    assert set(report.by_axis()) == {("replica",)}
    assert set(report.by_kind()) == {"all-reduce"}
    assert not report.of(in_loop=True).collectives
    params = new_params()
    abstract = opt.abstract_state()
    device_bytes = 0
    for leaf, spec in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(opt.specs(abstract.params).params, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    ):
        device_bytes += (
            leaf.size * 4 // int(np.prod([opt.mesh.shape[axis] for axis in spec if axis]))
        )
    assert report.total.bytes == device_bytes
    assert report.total_wire_bytes == device_bytes  # 2 (R - 1) / R of it, with R = 2
    if name == "ddp":
        assert device_bytes == shard_bytes(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reducer",
    [pytest.param(None, id="exact"), pytest.param(R.error_feedback(R.int8(8)), id="int8")],
)
def test_in_fifty_steps_diloco_sends_what_ddp_sends_in_one(
    reducer, strategy_of, new_params, mesh_of, model_of
):
    """With a reducer it sends the reducer's bytes. The 49 steps before are one program, which sends
    nothing.
    """
    opt = so.diloco(strategy_of("ddp", data=1), sync_every=50, reducer=reducer)
    quiet = [sent_over_replica(opt, new_params(), step).total_wire_bytes for step in (0, 48)]
    assert quiet == [0, 0]
    agreed = sent_over_replica(opt, new_params(), 49).total_wire_bytes
    ddp = so.ddp(optax.sgd(0.1), mesh_of(data=2), model_of())
    gradients = so.hlo.audit(at_step(ddp, ddp.abstract_state(jax.eval_shape(new_params)), 0)).of(
        axis="data", min_bytes=8
    )
    # loss and weight go with them
    assert gradients.total_wire_bytes == shard_bytes(new_params()) + 8
    assert agreed == (
        shard_bytes(new_params()) if reducer is None else reducer.wire_bytes(new_params(), 2)
    )


def test_a_streamed_fragment_is_sent_in_the_program_of_the_next_step(strategy_of, new_params):
    opt = so.diloco(strategy_of("ddp"), sync_every=6, fragments=2, delay=1)
    params = new_params()
    halves = [sent_over_replica(opt, params, step).total.bytes or 0 for step in (2, 3, 4, 6)]
    blocks = sum(leaf.size * 4 for leaf in jax.tree.leaves(params["blocks"])) // 2
    first, second = blocks + (3 * 4 + 1) * 4, blocks + 4 * 2 * 4  # in and scale; out
    assert halves == [0, first, 0, second]


@pytest.mark.slow  # test_identities.py compares warm-up with the strategy alone
def test_warm_up_averages_gradients_and_the_state_is_not_looked_at(strategy_of, new_params):
    opt = so.local_sgd(strategy_of("ddp"), sync_every=2, warmup_steps=2)
    warm = sent_over_replica(opt, new_params(), 1, min_bytes=64)
    assert set(warm.by_axis()) == {("replica", "data")}
    assert not sent_over_replica(opt, new_params(), 2).collectives
    assert sent_over_replica(opt, new_params(), 3).collectives


@pytest.mark.slow  # contract/test_placement.py
def test_an_abstract_state_lowers_the_first_step_that_replicas_take_by_themselves(
    strategy_of, new_params
):
    batch = {"x": rows(3), "y": rows(2), "weights": rows()}
    for how, sends in (
        ({"sync_every": 1}, True),
        ({"sync_every": 2, "warmup_steps": 3}, False),
    ):
        opt = so.local_sgd(strategy_of("ddp"), **how)
        state = opt.abstract_state(jax.eval_shape(new_params))
        assert (
            bool(so.hlo.audit(opt.step.lower(state, batch)).of(axis="replica").collectives) == sends
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "reducer",
    [R.int8(8), R.error_feedback(R.top_k(0.25)), R.error_feedback(R.power_sgd(1)), R.sign()],
    ids=lambda outer_reducer: outer_reducer.name,
)
def test_bytes_of_a_reducer_of_outer_gradients_are_those_it_states(
    reducer, strategy_of, new_params
):
    """The reducer states bytes of each device's own leaves: shards over data and tensor, and the
    blocks of its stage that are in the fragment.
    """
    for name, sizes in (("fsdp", {"tensor": 2}), ("hybrid", {"pipeline": 2, "data": 1})):
        opt = so.diloco(strategy_of(name, **sizes), sync_every=4, fragments=2, reducer=reducer)
        abstract = opt.abstract_state(jax.eval_shape(new_params))
        # The outer state of a fragment lives where its parameters do.
        held = abstract.opt_state.outer[0][0].trace
        if name == "fsdp":
            assert [leaf.sharding.shard_shape(leaf.shape) for leaf in held] == [
                (2, 4, 2),
                (2, 2, 4),
                (3, 2),
                (),
            ]
        stated = stated_bytes(
            reducer, held, ["replica"], ["blocks/down", "blocks/up", "in", "scale"]
        )
        assert sent_over_replica(opt, new_params(), 1).total_wire_bytes == stated
        assert not sent_over_replica(opt, new_params(), 0).collectives


@pytest.mark.parametrize(
    ("how", "outer", "programs"),
    [
        ({"sync_every": 4, "fragments": 2, "delay": 1}, None, 3),
        pytest.param(
            {"sync_every": 2},
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.7, momentum=0.9),
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["streaming", "injected"],
)
def test_specs_are_true_buffers_are_reused_and_each_kind_of_step_compiles_once(
    how, outer, programs, strategy_of, new_params, new_batches
):
    opt = so.diloco(strategy_of("fsdp"), outer=outer, reducer=R.error_feedback(R.int8(8)), **how)
    state = opt.init(new_params())
    specs = jax.tree.leaves(
        opt.specs(jax.eval_shape(new_params)), is_leaf=lambda x: isinstance(x, P)
    )
    promised = jax.tree.leaves(opt.abstract_state())

    def check(state):
        for leaf, spec, promised_leaf in zip(jax.tree.leaves(state), specs, promised, strict=True):
            assert leaf.sharding == NamedSharding(opt.mesh, spec) == promised_leaf.sharding
            assert (leaf.shape, leaf.dtype, leaf.weak_type) == (
                promised_leaf.shape,
                promised_leaf.dtype,
                False,
            )

    check(state)
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        real = jax._src.compiler.compile_or_get_cached

        def spy(backend, module, *args, **kwargs):
            name = str(module.operation.attributes["sym_name"])
            compiled.append(name)
            return real(backend, module, *args, **kwargs)

        patch.setattr(jax._src.compiler, "compile_or_get_cached", spy)
        for batch in new_batches(13, rows=16):
            old = jax.tree.leaves(state)
            state, _ = opt.step(state, batch)
            assert all(leaf.is_deleted() for leaf in old if leaf.size > 4)
            check(state)
    assert sum("step" in name for name in compiled) == programs


@pytest.mark.slow  # the other programs of this file
def test_the_step_count_is_read_back_once(strategy_of, new_params, new_batches, monkeypatch):
    """Reading it would make the host wait for the step before, each time.

    jax keeps a number that it has read, so only the first read of an array counts.
    """
    opt = so.local_sgd(strategy_of("ddp"), sync_every=2)
    state = opt.init(new_params())
    arrays = {}
    kind = type(state.step)
    real = kind.__int__
    monkeypatch.setattr(kind, "__int__", lambda self: real(arrays.setdefault(id(self), self)))
    for batch in new_batches(5):
        state, _ = opt.step(state, batch)
    assert len(arrays) == 1
    other = jax.device_put(jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state))
    opt.step(other, batch)  # a state from elsewhere is asked
    assert len(arrays) == 2


def test_the_report_is_that_of_a_replica_whoever_saw_the_parameters(strategy_of, new_params):
    opt = so.diloco(strategy_of("fsdp"), sync_every=2)
    opt.specs(jax.eval_shape(new_params))
    assert [row.path for row in opt.config.report().rows] == [
        "blocks/down",
        "blocks/up",
        "in",
        "out",
        "scale",
    ]
    assert opt.config.strategy == "diloco"
    assert opt.config.placement.params
    assert opt.config.local_updates.sync_every == 2
    assert opt.config.schedule is None
    piped = strategy_of("hybrid", pipeline=2)
    assert so.local_sgd(piped, sync_every=2).config.schedule is piped.config.schedule is not None
