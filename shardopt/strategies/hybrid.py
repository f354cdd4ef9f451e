"""Data, tensor and pipeline parallel in one: a model cut into stages, whose micro-batches follow a schedule."""

from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.arguments import check_count
from shardopt.core.block_model import BlockModel, LossFn, as_block_model
from shardopt.core.errors import format_error, plural
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import PLACEMENTS, BatchDims, OptStateLayout, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes, read_mesh
from shardopt.pipeline import Schedule, schedules
from shardopt.pipeline.cut import check_counts
from shardopt.reducers import Reducer


def hybrid(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    model: BlockModel,
    *,
    schedule: Schedule | Callable[[int, int], Schedule] = schedules.eager_one_f_one_b,
    micro_batches: int,
    blocks_per_stage: Sequence[int] | None = None,
    placement: str = "fsdp",
    rules: Rules = (),
    min_shard_elements: int = 1024,
    gather_dtype: jax.typing.DTypeLike | None = None,
    scatter_dtype: jax.typing.DTypeLike | None = None,
    frozen: Sequence[str] = (),
    evaluate_fn: LossFn | None = None,
    compiler_options: CompilerOptions | None = None,
    view: View = "auto",
    separable: bool | None = None,
    axes: Axes | None = None,
    batch_dims: BatchDims = (),
    sequence_dims: SequenceDims = (),
    expert_leaves: Sequence[str] = (),
    opt_state_layout: OptStateLayout = "within",
    offload: Sequence[str] = (),
    remat: bool | str = False,
    regather: bool = True,
    reducer: Reducer | None = None,
) -> ShardedOptimizer:
    """Train a model that is cut over data, tensor and pipeline axes at once.

    With S stages on the pipeline axis and M micro-batches, stage s runs its blocks forwards and backwards on one
    micro-batch after another, at the ticks that the schedule says; activations and their gradients move from stage
    to stage between ticks. Gradients are those of the mean over the global batch, as `ddp` gives them.

    **Equivalence**: equal to one device on the union batch, up to summation order, for every optax transformation,
    schedule and placement; `Weighted` losses too, whatever weight each micro-batch has. A loss, embedding or block
    that takes `rng` draws what it draws under `ddp` with as many data devices and micro-batches. On a mesh with
    pipeline=1 it is `ddp`, `zero` or `fsdp` itself.

    **Placement**: blocks, with their gradients and optimizer state, are sharded over pipeline, in the order of the
    model; outer parameters (embedding, head) are held by every stage. On data all is placed as `placement` says, and
    on tensor by rule. During a step a stage keeps, of the micro-batches between forward and backward, what the
    backward pass needs (the results of inner products, reductions and the like; elementwise ones are computed
    again), or with `remat` the input of the chunk alone: `schedule.num_slots` times that, which does not grow with M
    for any schedule but gpipe. Outer gradients are accumulated unsharded during the step, whatever the placement.

    Where virtual stages have unequally many blocks, no mesh axis can cut the stack into them: it is sharded over pipeline on a
    free dim of a block (below `min_shard_elements`, or where data and tensor take all dims that it divides, on none). During
    the step a stage holds its own blocks whole, and has room for as many a chunk as the largest has, in weights, gradients
    and slots; what it does not have it does not run.

    **Communication** a step, per device, for a stage's Psi gradient bytes and an activation of A bytes per micro-batch:
    on pipeline, one permute of A forwards and one backwards per tick (V-shaped placements have more, as
    `schedule.forward_shifts` says), and one all-reduce of the outer gradients (with data, where they are replicated over
    it); on data, what `ddp`, `zero` or `fsdp` say, of Psi: once, after the last micro-batch, for ddp and zero1; on
    tensor, what the partitioner puts inside the blocks. With several chunks per stage stores other blocks than it runs:
    their parameters, as they are sharded over data, move once before and gradients once after the ticks. Unequal stages do
    so with one all-to-all each (an all-gather of gradients that are not sharded over pipeline).

    Args:
      tx: any optax transformation; see `ddp`.
      mesh: from `make_mesh(data=..., tensor=..., pipeline=...)`.
      model: a `BlockModel`. Its `remat` says what is kept of
        a block: None, what its backward pass needs; "full", its input; "save:NAME,...", its input and the values of
        these names; or what a `jax.checkpoint` policy says. Under names and policies nothing is left for the weight passes of
        zero-bubble schedules. What travels between blocks may be any pytree; it is replicated over tensor there.
      schedule: from `so.schedules`: a builder `(num_stages, num_micro_batches) -> Schedule`, such as
        `functools.partial(so.schedules.interleaved, num_chunks=2)`, or a `Schedule` of these sizes, also one's own.
      micro_batches: M; divides the rows of each data device.
      blocks_per_stage: [V] integers, how many blocks each virtual stage runs, in the model's order, 0 among them; by default
        equally many, or where V does not divide them as nearly so as can be. `so.schedules.balance` counts embedding and
        head as blocks' worth.
      placement: "ddp", "zero1", "zero2", "zero3" or "fsdp" (which is zero3): what is sharded over data.
      rules: see `ddp`.
      min_shard_elements: see `zero`.
      gather_dtype: see `fsdp`; for placements that gather ("fsdp", "zero3").
      scatter_dtype: see `fsdp`; for placements that scatter (all but "ddp"), without a `reducer`.
      frozen: see `ddp`.
      evaluate_fn: see `ddp`; a `BlockModel` where there are stages.
      compiler_options: see `ddp`.
      view: see `ddp`; a pipeline has no global view, and refuses a loss that is not proved to be a mean over rows.
      separable: see `ddp`.
      axes: see `ddp`.
      batch_dims: see `ddp`.
      sequence_dims: see `ddp`.
      expert_leaves: see `ddp`.
      opt_state_layout: see `fsdp`; for placements that shard optimizer state.
      offload: see `fsdp`.
      remat: True keeps only the input of each chunk, and runs its forward again in its backward pass: a third more work
        for memory of one activation per slot. "fsdp" then gathers a block three times per micro-batch, not twice, and a
        schedule that splits weight passes off keeps from backward to weight what the latter needs. A string is taken in
        place of the model's own `remat`, as `so.plan` says it.
      regather: False gathers the blocks of a stage over data once a step, and scatters their gradients once, rather than
        in every pass: M times fewer bytes on data. During the step a stage then holds all its weights in `gather_dtype`
        and the sums of all its gradients in fp32, as "zero1" does; what is stored stays sharded. For "fsdp" and "zero3" in
        a pipeline.
      reducer: see `ddp`; how gradients cross the data axis. For placements "ddp" and "zero1".

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind; `model` is not a `BlockModel`.
      ValueError: as `fsdp`; if the mesh has no pipeline axis, the placement is unknown, the schedule is of other sizes
        or refuses them, there are fewer blocks than stages times chunks or `blocks_per_stage` does not add up to them, `remat` offloads in a pipeline, or a block
        changes the shape of what it is given; on CPU, if a block shifts or cuts a dim that is sharded over tensor, which
        makes stages wait for each other.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> model = so.BlockModel(
      ...     embed=lambda outer, batch: batch["x"] @ outer["in"],
      ...     block=lambda w, x: x + jnp.tanh(x @ w["kernel"]),
      ...     loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch["x"]) ** 2),
      ... )
      >>> params = {"blocks": {"kernel": jnp.ones((4, 8, 8)) / 8}, "in": jnp.eye(4, 8)}
      >>> opt = so.hybrid(optax.sgd(0.1), so.make_mesh(pipeline=4), model, micro_batches=4)
      >>> state, metrics = opt.step(opt.init(params), {"x": jnp.ones((16, 4))})
      >>> state.params["blocks"]["kernel"].sharding.spec[0], opt.config.schedule
      ('pipeline', Schedule(eager_one_f_one_b: 4 stages, 4 micro-batches, 1 chunk))

    References:
      Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
      Using Megatron-LM", 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023; Rajbhandari et al., "ZeRO", 2020.
    """
    who = "hybrid"
    blocks = as_block_model(model)
    if blocks is None:
        what = f"model must be a BlockModel, whose blocks are cut into stages, got {type(model).__name__}."
        raise TypeError(format_error(who, what, fix="use so.BlockModel(embed, block, loss), or so.fsdp for any loss."))
    fix = f"use one of {', '.join(map(repr, PLACEMENTS))}."
    if not isinstance(placement, str):
        raise TypeError(format_error(who, f"placement must be a string, got {placement!r}.", fix=fix))
    if placement not in PLACEMENTS:
        raise ValueError(format_error(who, f"unknown placement {placement!r}.", fix=fix))
    if gather_dtype is not None and not PLACEMENTS[placement].params:
        what = f"gather_dtype is for placements that gather parameters, not for {placement!r}."
        raise ValueError(format_error(who, what, fix="use placement='fsdp', or leave gather_dtype out."))
    if not isinstance(regather, bool):
        raise TypeError(format_error(who, f"regather must be True or False, got {regather!r}."))
    if not regather and not PLACEMENTS[placement].params:
        what = f"regather=False is for placements that gather parameters, not for {placement!r}."
        raise ValueError(format_error(who, what, fix="use placement='fsdp', or leave regather out."))
    if not isinstance(remat, bool | str):
        what = f"remat must be True, False or a string that BlockModel.remat can be, got {remat!r}."
        raise TypeError(format_error(who, what, fix="give a policy to the model: model._replace(remat=policy)."))
    check_count(who, "micro_batches", micro_batches, least=1)
    check_count(who, "min_shard_elements", min_shard_elements, least=1)
    num_stages = read_mesh(who, mesh, axes, pipelined=True)[0].shape["pipeline"]
    table = _schedule(who, schedule, num_stages, micro_batches)
    if not regather and num_stages == 1:
        what = "regather=False is for pipelines, and there is one stage."
        raise ValueError(format_error(who, what, fix="use a mesh with pipeline above 1, or leave regather out."))
    if blocks_per_stage is not None and num_stages == 1:
        what = "blocks_per_stage is for pipelines, and there is one stage."
        raise ValueError(
            format_error(who, what, fix="use a mesh with pipeline above 1, or leave blocks_per_stage out.")
        )
    if isinstance(remat, str):
        blocks = blocks._replace(remat=remat)
    elif num_stages == 1 and remat and blocks.remat is None:
        blocks = blocks._replace(remat="full")
    return build(
        StrategyConfig(
            who,
            tx,
            mesh,
            blocks,
            PLACEMENTS[placement],
            micro_batches=micro_batches,
            rules=rules,
            min_shard_elements=min_shard_elements if PLACEMENTS[placement].opt_state else 1,
            gather_dtype=gather_dtype,
            scatter_dtype=scatter_dtype,
            frozen=frozen,
            evaluate_fn=evaluate_fn,
            compiler_options=compiler_options,
            view=view,
            separable=separable,
            axis_names=axes,
            batch_dims=batch_dims,
            sequence_dims=sequence_dims,
            expert_leaves=expert_leaves,
            opt_state_layout=opt_state_layout,
            offload=offload,
            schedule=table if num_stages > 1 else None,
            blocks_per_stage=check_counts(who, blocks_per_stage),
            remat=remat is True,
            regather=regather,
            reducer=reducer,
        )
    )


def _schedule(
    who: str, schedule: Schedule | Callable[[int, int], Schedule], num_stages: int, micro_batches: int
) -> Schedule:
    if not isinstance(schedule, Schedule) and not callable(schedule):
        what = f"schedule must be a Schedule, or a function that makes one, got {schedule!r}."
        raise TypeError(format_error(who, what, fix="use one of so.schedules, such as so.schedules.eager_one_f_one_b."))
    table = schedule if isinstance(schedule, Schedule) else schedule(num_stages, micro_batches)
    if not isinstance(table, Schedule):
        what = f"schedule(num_stages={num_stages}, num_micro_batches={micro_batches}) returned {table!r}."
        raise TypeError(
            format_error(who, what, fix="return a Schedule; so.schedules.from_ticks and from_order make one.")
        )
    if (table.num_stages, table.num_micro_batches) != (num_stages, micro_batches):
        what = (
            f"the schedule is for {plural(table.num_stages, 'stage')} and "
            f"{plural(table.num_micro_batches, 'micro-batch')}, but there are pipeline={num_stages} and "
            f"micro_batches={micro_batches}."
        )
        raise ValueError(format_error(who, what, fix="make it of these sizes, or pass the function that makes it."))
    table.validate()
    return table
