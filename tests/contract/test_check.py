"""`so.check` alone finds faults that are planted in our own strategies. The faults are a scale, an
order, a stale value, a missing sum, a wrong spec, and a wrong form on the wire. Strategies that are
right pass.
"""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import test_exact, test_hybrid_exact, test_hybrid_mutations, test_mutations
from rooms.reducers import test_mutations as reducer_mutations
from support.pipelines import SCHEDULES, block_problem
from support.problems import problem
from support.reference import OPTIMIZERS
from support.seams import break_function
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.collectives import _column_table as column_table
from shardopt.collectives import _per_device as per_device
from shardopt.collectives import _shards as shards
from shardopt.config import _axes as axes
from shardopt.config import _transformation as transformation
from shardopt.losses import _global_view as global_view
from shardopt.losses import _metrics as metrics
from shardopt.losses import _sums as sums
from shardopt.reducers import _error_feedback as error_feedback
from shardopt.step import _build as build
from shardopt.step import _compressed as compressed
from shardopt.step import _gradients as gradients
from shardopt.step import _inputs as inputs
from shardopt.step import _opt_state as opt_state
from shardopt.step import _programs as programs
from shardopt.step import _step as step
from shardopt.step import _update as update
from shardopt.step._repeats import Repeats

R = so.reducers
TX = optax.adamw(1e-2)


def wrapped(patch, function, change, **how):
    """Break a function by a change of its result: `change(result, *args)`."""

    def broken(*args, **keywords):
        return change(function(*args, **keywords), *args)

    break_function(patch, function, broken, **how)


def scaled(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


# Scale


def half_of_the_factor(patch):
    wrapped(patch, metrics.factor, lambda factor, *_: factor / 2, callers=[gradients])


def micro_batches_count_twice(patch):
    wrapped(patch, sums.accumulate, lambda result, *_: (scaled(result[0], 2), result[1]))


def unscaled_micro_batches_of_the_global_view(patch):
    wrapped(patch, metrics.factor, lambda factor, *_: jnp.ones_like(factor), callers=[global_view])


def mean_for_sum_in_the_scatter(patch):
    wrapped(patch, shards.reduce_scatter, lambda grads, *_: scaled(grads, 0.25))


def update_of_the_other_sign(patch):
    wrapped(
        patch,
        transformation.call_update,
        lambda result, *_: (scaled(result[0], -1), result[1]),
        callers=[update],
    )


def reported_loss_is_doubled(patch):
    wrapped(patch, step.metrics_of, lambda result, *_: result | {"loss": 2 * result["loss"]})


def norm_of_one_shard(patch):
    break_function(patch, per_device.all_reduce, lambda xs, *_: list(xs), callers=[update])


def evaluation_is_doubled(patch):
    def doubled(program, *_):
        return lambda *args: scaled(program(*args), 2)

    wrapped(patch, programs.compile_evaluate, doubled)


# Order


def gather_in_another_order(patch):
    def turned(leaves, _, wires):
        pairs = zip(leaves, wires, strict=True)
        return [x if wire.dim is None else jnp.flip(x, wire.dim) for x, wire in pairs]

    once = update.all_gather
    break_function(
        patch,
        update.all_gather,
        lambda leaves, wires, **how: turned(once(leaves, wires, **how), leaves, wires),
        callers=[update],
    )


def one_leaf_of_the_batch_is_turned(patch):
    def turned(batch, *_):
        return batch | {"x": jnp.roll(batch["x"], 1, 0)}

    wrapped(patch, inputs.place_batch, turned, callers=[build])


def rows_of_the_gathered_parameters_are_swapped(patch):
    wrapped(
        patch,
        shards.all_gather,
        lambda leaves, *_: [jnp.roll(x, 1, 0) if x.ndim == 2 else x for x in leaves],
    )


def parameters_begin_in_another_order(patch):
    wrapped(
        patch,
        programs.copied,
        lambda tree, *_: jax.tree.map(lambda x: x[::-1] if x.ndim else x, tree),
        callers=[programs],
    )


def shards_of_another_axis_order(patch):
    def other_order(specs, *_):
        return [
            jax.sharding.PartitionSpec(*(e[::-1] if isinstance(e, tuple) else e for e in spec))
            for spec in specs
        ]

    once = gradients.ExactSum.grad_specs
    patch.setattr(
        gradients.ExactSum,
        "grad_specs",
        lambda self, *args: other_order(once(self, *args)),
    )


def swapped_columns_of_the_tables(patch):
    once = column_table.TableForm.encode

    def encode(self, shard, over):
        return once(self, jnp.roll(shard, 1, 0), over)

    patch.setattr(column_table.TableForm, "encode", encode)


# Stale values


def the_state_of_the_optimizer_stays(patch):
    wrapped(
        patch,
        update.apply_update,
        lambda result, config, layout, params, opt_state, *_: result._replace(opt_state=opt_state),
    )


def the_parameters_before_the_update_are_gathered(patch):
    wrapped(
        patch,
        update.apply_update,
        lambda result, config, layout, params, *_: result._replace(params=params),
    )


def the_first_batch_is_kept(patch):
    batches = []
    take = Repeats.take

    def take_with_first(self, state, batch):
        batches.append(batch)
        return take(self, state, batches[0])

    patch.setattr(Repeats, "take", take_with_first)


def the_last_micro_batch_alone(patch):
    def last(run, batch, count, *how):
        grads, parts = run(jax.tree.map(lambda x: x[-(x.shape[0] // count) :], batch), count - 1)
        return scaled(grads, count), jax.tree.map(lambda x: jnp.stack([x] * count), parts)

    break_function(patch, sums.accumulate, last)


def the_step_is_not_counted(patch):
    wrapped(
        patch,
        step.make_step,
        lambda run, *_: (
            lambda state, batch: (
                lambda taken: taken._replace(state=taken.state._replace(step=state.step))
            )(run(state, batch))
        ),
    )


def the_memory_is_never_written(patch):
    wrapped(
        patch,
        compressed.compress_mean,
        lambda result, plan, leaves, state: (result[0], state),
    )


def the_memory_is_never_read(patch):
    def forgetful(reducer):
        once = reducer.transmit

        def transmit(grads, memory, state, axis):
            return once(grads, None, state, axis)

        return reducer._replace(transmit=transmit)

    once = error_feedback.error_feedback
    break_function(patch, error_feedback.error_feedback, lambda reducer: once(forgetful(reducer)))


def updated_leaves_are_lost(patch):
    break_function(patch, update._replace_updated, lambda config, layout, params, updates: params)


def zeros_as_parameters_of_the_update(patch):
    once = transformation.call_update
    break_function(
        patch,
        once,
        lambda tx, grads, state, params, extra: once(tx, grads, state, scaled(params, 0), extra),
        callers=[update],
    )


def the_loss_of_the_update_is_zero(patch):
    once = transformation.ExtraArgs
    break_function(
        patch, once, lambda value, *arguments: once(value * 0, *arguments), callers=[update]
    )


def the_state_begins_at_ones(patch):
    wrapped(
        patch,
        opt_state.init_opt_state,
        lambda state, *_: jax.tree.map(lambda x: x + 1, state),
    )


# A missing sum


def _summed_without(axis):
    def broken(patch):
        once = axes.AxisTable.gradient
        patch.setattr(
            axes.AxisTable,
            "gradient",
            lambda self, plan, **how: tuple(x for x in once(self, plan, **how) if x != axis),
        )

    broken.__name__ = f"no_sum_over_{axis}"
    return broken


no_sum_over_replica, no_sum_over_data, no_sum_over_context = map(
    _summed_without, ("replica", "data", "context")
)


def experts_are_summed_too(patch):
    patch.setitem(axes.TABLE, "expert", axes.Axis(splits="rows", sums="all"))


def the_largest_of_one_device(patch):
    break_function(patch, metrics.extreme_over, lambda reduce, value, over: value)


def the_gradient_of_one_device_once_more(patch):
    once = sums.all_reduce_grads

    def more(grads, *args):
        return [total + grad for total, grad in zip(once(grads, *args), grads, strict=True)]

    break_function(patch, once, more)


def each_device_sums_its_own_metrics(patch):
    once = sums.sum_parts

    def own(parts, table):
        summed = once(parts, table)
        return summed._replace(metrics={name: scaled(x, 0.5) for name, x in summed.metrics.items()})

    break_function(patch, once, own)


# A wrong form on the wire


def _sent_as(kind, dtype):
    def broken(patch):
        once = sums.leaf_wire
        break_function(
            patch,
            once,
            lambda wire, plan, rounding=None: once(
                wire._replace(**{kind: jnp.dtype(dtype)}), plan, rounding
            ),
        )

    broken.__name__ = f"{kind}_is_{dtype}"
    return broken


gathered_in_half, scattered_in_half = (
    _sent_as(kind, "bfloat16") for kind in ("gather_dtype", "scatter_dtype")
)


def sums_in_half(patch):
    once = sums.all_reduce

    def half(xs, *args):
        return [
            x.astype(like.dtype)
            for x, like in zip(once([x.astype(jnp.bfloat16) for x in xs], *args), xs, strict=True)
        ]

    break_function(patch, once, half, callers=[sums])


# Strategies with planted faults


def plain(name, mesh, *, model="odd", tx=TX, reducer=None, **how):
    def make(mesh_of):
        case = problem(model, weighted=True, steps=1, dtype=jnp.float32)
        options = how if reducer is None else how | {"reducer": reducer}
        opt = STRATEGIES[name](tx, mesh_of(**mesh), case.loss_fn, **options)
        return opt, case.params, case.batches[0]

    return make


def pipeline(schedule):
    def make(mesh_of):
        name, _, blocks = schedule.partition(", ")
        case = block_problem("pytree", weighted=True, num_blocks=10 if blocks else 8, rows=16)
        opt = so.hybrid(
            optax.sgd(0.05, momentum=0.9),
            mesh_of(data=2, pipeline=4),
            case.loss_fn,
            schedule=SCHEDULES[name],
            micro_batches=4,
            placement="zero1",
            min_shard_elements=8,
        )
        return opt, case.params, case.batches[0]

    return make


def with_metrics(params, batch):
    x = batch["x"] @ params["w"]
    statistics = {"mean": 0.5 * params["mean"] + 0.5 * x.mean(0)}
    return (x**2).mean(), {
        "largest": so.losses.Max(x.max()),
        "share": so.losses.Weighted((x > 0).sum(), jnp.float32(x.size)),
        "statistics": so.losses.Updated(statistics),
    }


def reporting(name, **how):
    def make(mesh_of):
        draw = np.random.default_rng(0)
        params = {"w": draw.normal(size=(8, 8)).astype(np.float32), "mean": np.zeros(8, np.float32)}
        opt = STRATEGIES[name](TX, mesh_of(data=4), with_metrics, rules=[("mean", "frozen")], **how)
        # the last device has the largest numbers
        rows = draw.normal(size=(16, 8)) * np.linspace(0.1, 2, 16)[:, None]
        return opt, params, {"x": rows.astype(np.float32)}

    return make


def sequences(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) ** 2 * batch["scale"][:, None, None]).mean()


def in_context(name):
    def make(mesh_of):
        draw = np.random.default_rng(1)
        params = {"w": draw.normal(size=(8, 16)).astype(np.float32)}
        batch = {
            "x": draw.normal(size=(8, 12, 8)).astype(np.float32)
            * np.linspace(0.2, 2, 12)[None, :, None],
            "scale": draw.uniform(0.5, 2, size=8).astype(np.float32),
        }
        batch = jax.tree.map(np.float32, batch)
        return STRATEGIES[name](TX, mesh_of(data=2, context=2), sequences), params, batch

    return make


def tables(mesh_of):
    model = so.BlockModel(
        embed=lambda outer, batch: so.nn.embedding(outer["table"], batch["ids"]),
        block=lambda w, x: x + jnp.tanh(x @ w["w"]),
        loss=lambda outer, x, batch: (x**2).mean(),
        tables=("table",),
    )
    draw = np.random.default_rng(2)
    params = {
        "blocks": {"w": draw.normal(size=(2, 8, 8)).astype(np.float32)},
        "table": draw.normal(size=(12, 8)).astype(np.float32),
    }
    opt = so.fsdp(TX, mesh_of(data=4), model, min_shard_elements=8)
    return opt, params, {"ids": draw.integers(0, 12, size=(8, 5)).astype(np.int32)}


def searching(mesh_of):
    """An optimizer that reads the loss."""
    case = problem("odd", weighted=True, steps=1, dtype=jnp.float32)
    tx = optax.chain(TX, optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1))
    opt = so.zero(tx, mesh_of(data=4), case.loss_fn, stage=1, min_shard_elements=8)
    return opt, case.params, case.batches[0]


TWO_AXES = {"replica": 2, "data": 4}
NOT_FOUND = (
    # it breaks models of two leaves alone
    reducer_mutations.uncompressed_leaves_twice,
    # another estimate of the mean; tests of reducers compare its message
    reducer_mutations.bases_not_orthogonal,
)
FAULTS = [
    (mutate, plain(strategy, TWO_AXES, micro_batches=2))
    for mutate, strategy in test_mutations.CASES
]
FAULTS += [(mutate, pipeline(schedule)) for mutate, schedule in test_hybrid_mutations.CASES]
FAULTS += [
    (mutate, plain("ddp", {"data": 4}, reducer=reducer))
    for mutate, reducer in reducer_mutations.MUTATIONS
    if mutate not in NOT_FOUND
]
FAULTS += [
    (half_of_the_factor, plain("ddp", {"data": 4})),
    (half_of_the_factor, plain("fsdp", {"data": 4})),
    (micro_batches_count_twice, plain("zero2", {"data": 4}, micro_batches=2)),
    (
        unscaled_micro_batches_of_the_global_view,
        plain("ddp", {"data": 4}, view="global", micro_batches=2),
    ),
    (mean_for_sum_in_the_scatter, plain("zero1", {"data": 4})),
    (update_of_the_other_sign, plain("zero2", {"data": 4})),
    (reported_loss_is_doubled, plain("ddp", {"data": 4})),
    (norm_of_one_shard, plain("fsdp", {"data": 4})),
    (evaluation_is_doubled, plain("zero1", {"data": 4})),
    (gather_in_another_order, plain("zero1", {"data": 4})),
    (gather_in_another_order, plain("zero2", {"data": 4})),
    (one_leaf_of_the_batch_is_turned, plain("ddp", {"data": 4})),
    (rows_of_the_gathered_parameters_are_swapped, plain("fsdp", {"data": 4})),
    (parameters_begin_in_another_order, plain("fsdp", {"data": 4})),
    (shards_of_another_axis_order, in_context("fsdp")),
    (swapped_columns_of_the_tables, tables),
    (the_state_of_the_optimizer_stays, plain("zero1", {"data": 4})),
    (the_parameters_before_the_update_are_gathered, plain("zero1", {"data": 4})),
    (the_first_batch_is_kept, plain("ddp", {"data": 4})),
    (the_last_micro_batch_alone, plain("zero1", {"data": 4}, micro_batches=2)),
    (the_step_is_not_counted, plain("fsdp", {"data": 4})),
    (
        the_memory_is_never_written,
        plain("ddp", {"data": 4}, reducer=R.error_feedback(R.top_k(0.1))),
    ),
    (the_memory_is_never_read, plain("ddp", {"data": 4}, reducer=R.sign(8))),
    (updated_leaves_are_lost, reporting("fsdp")),
    (
        zeros_as_parameters_of_the_update,
        plain("zero1", {"data": 4}, tx=optax.adamw(1e-2, weight_decay=0.1)),
    ),
    (the_loss_of_the_update_is_zero, searching),
    (the_state_begins_at_ones, plain("ddp", {"data": 4})),
    (no_sum_over_replica, plain("fsdp", TWO_AXES)),
    (no_sum_over_data, plain("ddp", TWO_AXES)),
    (no_sum_over_context, in_context("ddp")),
    (the_largest_of_one_device, reporting("ddp", view="unproved")),
    (the_gradient_of_one_device_once_more, plain("ddp", {"data": 4})),
    (each_device_sums_its_own_metrics, reporting("zero2")),
    (gathered_in_half, plain("fsdp", {"data": 4})),
    (scattered_in_half, plain("zero1", {"data": 4})),
    (sums_in_half, plain("ddp", {"data": 4})),
]
QUICK = [gather_in_another_order, the_memory_is_never_written]
"""The faults of the default tier."""


def check(make, mesh_of):
    opt, params, batch = make(mesh_of)
    with contextlib.redirect_stdout(io.StringIO()):
        return so.check(opt, opt.init(params), batch)


def fault_id(row):
    number, mutate, _ = row
    return f"{number}-{mutate.__name__}"


ROWS = [(number, *fault) for number, fault in enumerate(FAULTS)]


@pytest.mark.parametrize(
    ("number", "mutate", "make"), tiered(ROWS, lambda row: row[1] in QUICK, ids=fault_id)
)
def test_a_planted_fault_is_found(number, mutate, make, mesh_of):
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(so.errors.NotSeparableError):
            check(make, mesh_of)


UNBROKEN = {
    "tables": tables,
    "reads_the_loss": searching,
    "metrics": reporting("fsdp"),
    "context": in_context("fsdp"),
    "uneven_stages": pipeline("eager_one_f_one_b, 10 blocks"),
    "global_view": plain("ddp", {"data": 4}, view="global", micro_batches=2),
    **{
        reducer.name: plain("ddp", {"data": 4}, reducer=reducer)
        for reducer in {one.name: one for _, one in reducer_mutations.MUTATIONS}.values()
    },
    "memory": plain("ddp", {"data": 4}, reducer=R.error_feedback(R.top_k(0.1))),
    "warm_up": plain("ddp", {"data": 4}, reducer=R.warm_up(R.sign(8), 1)),
}


@pytest.mark.parametrize("name", tiered(UNBROKEN, lambda name: name == "int8(block_size=4)"))
def test_a_strategy_without_a_fault_passes(name, mesh_of):
    check(UNBROKEN[name], mesh_of)


def drawn(row, mesh_of):
    """Return a row of the table of `test_exact`."""
    case = problem(row["model"], weighted=row["weighted"], steps=1, dtype=jnp.dtype(row["dtype"]))
    opt = STRATEGIES[row["strategy"]](
        OPTIMIZERS[row["optimizer"]](),
        mesh_of(**row["mesh"]),
        case.loss_fn,
        micro_batches=row["micro_batches"],
        rules=case.rules if row["mesh"].get("tensor", 1) > 1 else (),
    )
    return opt, case.params, case.batches[0]


@pytest.mark.parametrize(
    "row",
    tiered(test_exact.ROWS, lambda row: row == test_exact.FAST[0], ids=test_exact.row_id),
)
def test_a_right_strategy_passes(row, mesh_of):
    with jax.enable_x64(row["dtype"] == "float64"):
        check(lambda mesh_of: drawn(row, mesh_of), mesh_of)


@pytest.mark.slow
@pytest.mark.parametrize("row", test_hybrid_exact.ROWS[::5], ids=test_hybrid_exact.row_id)
def test_a_right_pipeline_passes(row, mesh_of):
    case, count = test_hybrid_exact.problem_of(row)
    tx = OPTIMIZERS[row["optimizer"]]()
    mesh = mesh_of(**{"data": 1} | row["mesh"])
    opt = test_hybrid_exact.strategy_of(row, case, count, tx, mesh)
    check(lambda _: (opt, case.params, case.batches[0]), mesh_of)
