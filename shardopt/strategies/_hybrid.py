"""Data, tensor and pipeline parallel together: a model is split into stages, and its micro-batches
follow a schedule.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import optax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from shardopt.config._config import PLACEMENTS, StrategyConfig, configure
from shardopt.config._options import HybridOptions
from shardopt.config._program_check import ProgramCheck
from shardopt.config._slots import StepSlots
from shardopt.config._user_mesh import Axes, read_mesh
from shardopt.core import check_choice, plural, quoted, type_error, value_error
from shardopt.core._block_model import BlockModel, as_block_model
from shardopt.losses._sums import sum_parts
from shardopt.pipeline import Schedule, schedules
from shardopt.pipeline._cut import check_counts
from shardopt.pipeline._permutes import check_permutes
from shardopt.step._build import build
from shardopt.step._gradients import PerDeviceView
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.step._pipelined import Pipelined
from shardopt.strategies._keywords import with_options
from shardopt.strategies._slots import own_slots

_PLACEMENTS = PLACEMENTS | {"fsdp_once": PLACEMENTS["fsdp"]}
"""Placement names of `hybrid` -> placement."""


# adds the options to the signature and to Args, from the records in config/_options.py
@with_options
def hybrid(
    tx: optax.GradientTransformation,
    mesh: Mesh | Axes,
    model: BlockModel,
    *,
    schedule: Schedule | Callable[[int, int], Schedule] = schedules.eager_one_f_one_b,
    micro_batches: int,
    blocks_per_stage: Sequence[int] | None = None,
    placement: str = "fsdp",
    remat: bool | str = False,
    **options: Unpack[HybridOptions],
) -> ShardedOptimizer:
    """Train a model that is split over data, tensor and pipeline axes at once.

    With S stages on the pipeline axis and M micro-batches, stage s runs its blocks forwards and
    backwards on one micro-batch after another, in the order of the schedule. Between ticks, stages
    send activations and their gradients to each other. M must divide the rows of a data device. As
    in `ddp`, a step applies the gradient of the mean loss over the global batch.

    Args:
      model: a `BlockModel`. Its `remat` says which values of a block are kept for the backward
        pass; all others are computed again. None keeps the values that the backward pass needs.
        "full" keeps the input of the block. "save:NAME,..." keeps the input and the named values. A
        `jax.checkpoint` policy keeps the values that it chooses. With names or a policy nothing is
        left for the weight passes of zero-bubble schedules. Any pytree may travel between blocks;
        it is replicated over tensor there.
      schedule: the order of forward and backward passes, from `so.schedules`. Either a function
        `(num_stages, num_micro_batches) -> Schedule`, such as
        `functools.partial(so.schedules.interleaved, num_chunks=2)`; or a `Schedule` of these sizes,
        which may be your own.
      blocks_per_stage: [V] integers: how many blocks each virtual stage runs, in the order of the
        model; 0 is allowed. By default equally many, or as nearly equal as possible if V does not
        divide them. `so.schedules.balance` computes them, and counts the work of embedding and head
        in blocks.
      placement: which parts of the train state are sharded over data, as in the strategies of these
        names: "ddp", "zero1", "zero2" or "fsdp". "fsdp_once", for pipelines, is "fsdp" between
        steps. In a step it gathers the blocks of a stage over data once, and scatters their
        gradients once, instead of in every pass: M times fewer bytes on data. A stage then holds
        all its weights in `gather_dtype`, and the sums of all its gradients in fp32, as "zero1"
        does.
      remat: True keeps only the input of each chunk, and runs its forward pass again in its
        backward pass. That is a third more work, for a memory of one activation per slot. "fsdp"
        then gathers a block three times per micro-batch, not twice. A schedule that delays weight
        passes keeps the values that they need from the backward pass on. A string replaces the
        `remat` of the model, as plans of `so.plan` do.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type, or `model` is not a `BlockModel`.
      ValueError: as `fsdp`; if the mesh has no pipeline axis, the placement is unknown, or the
        schedule has other sizes or refuses them. If there are fewer blocks than stages times
        chunks, or `blocks_per_stage` does not add up to the blocks. If `remat` offloads in a
        pipeline, or a block changes the shape of its input. On CPU, if a block shifts or cuts a dim
        that is sharded over tensor, which makes stages wait for each other.

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

    **Equivalence**: training equals one device on the union batch, up to summation order, for every
    optax transformation but lookahead and dpsgd, every schedule and every placement. `Weighted` losses of one
    term are included. Micro-batches may have any weight. A loss, embedding or block that takes
    `rng` draws the same numbers as under `ddp` with as many data devices and micro-batches. On a
    mesh with pipeline=1 it is `ddp`, `zero` or `fsdp` itself.

    **Placement**: blocks, with their gradients and optimizer state, are sharded over pipeline, in
    the order of the model. Every stage holds the outer parameters (embedding, head). `placement`
    decides about data, and `rules` about tensor.

    - Between the forward and the backward pass of a micro-batch, a stage keeps the results that the
      backward pass needs, such as inner products and reductions. Elementwise results are computed
      again. With `remat` it keeps only the input of the chunk. It keeps `schedule.num_slots` times
      that. This number does not grow with M for any schedule but gpipe.
    - Gradients of outer parameters are accumulated unsharded during the step, for every placement.
    - If virtual stages have unequal numbers of blocks, no mesh axis can cut the stack into them.
      The stack is then sharded over pipeline on a free dim of a block. It is not sharded over
      pipeline below `min_shard_elements`, or if data and tensor take all dims that pipeline
      divides. During the step a stage holds its own blocks whole. Each of its chunks has room for
      as many blocks as the largest chunk, in weights, gradients and slots; a chunk runs only the
      blocks that it has.

    **Communication** per step and device, for gradients of Psi bytes in a stage and an activation
    of A bytes per micro-batch:

    - Pipeline: one permute of A forwards and one backwards per tick (V-shaped placements have more,
      see `schedule.forward_shifts`). One all-reduce of the outer gradients, joined with data if
      they are replicated over it.
    - Data: the bytes of `ddp`, `zero` or `fsdp` for Psi. ddp and zero1 send them once, after the
      last micro-batch.
    - Tensor: the collectives that the partitioner puts inside the blocks.

    With several chunks per stage, a device stores other blocks than it runs. Their parameters, as
    they are sharded over data, move once before the ticks, and their gradients once after. Unequal
    stages do this with one all-to-all each (with an all-gather for gradients that are not sharded
    over pipeline).

    References:
      Huang et al., "GPipe", 2019; Narayanan et al., "Efficient Large-Scale Language Model Training
      on GPU Clusters Using Megatron-LM", 2021; Qi et al., "Zero Bubble Pipeline Parallelism", 2023;
      Rajbhandari et al., "ZeRO", 2020.
    """
    # From here on: check the arguments, make the schedule, hand both to `build`. A mesh with one
    # stage gets the slots of `ddp`, `zero` or `fsdp`, so it pays nothing for the pipeline.
    blocks = as_block_model(model)
    if blocks is None:
        problem = (
            "model must be a BlockModel, whose blocks are cut into stages, got"
            f" {type(model).__name__}."
        )
        raise type_error(
            problem, fix="use so.BlockModel(embed, block, loss), or so.fsdp for any loss."
        )
    check_choice("placement", placement, _PLACEMENTS, f"use one of {quoted(_PLACEMENTS)}.")
    if options.get("gather_dtype") is not None and not _PLACEMENTS[placement].params:
        problem = f"gather_dtype is for placements that gather parameters, not for {placement!r}."
        raise value_error(problem, fix="use placement='fsdp', or leave gather_dtype out.")
    if not isinstance(remat, bool | str):
        problem = (
            f"remat must be True, False or a string that BlockModel.remat can be, got {remat!r}."
        )
        raise type_error(problem, fix="give a policy to the model: model._replace(remat=policy).")
    all_options = {"micro_batches": micro_batches, **options}
    config = configure("hybrid", tx, mesh, blocks, _PLACEMENTS[placement], all_options)
    sizes = read_mesh(config.mesh, config.axis_names, pipelined=True)[0].shape
    num_stages = sizes["pipeline"]
    built_schedule = _build_schedule(schedule, num_stages, micro_batches)
    if num_stages == 1:
        _check_one_stage(placement, blocks_per_stage)
    if isinstance(remat, str):
        blocks = blocks._replace(remat=remat)
    elif num_stages == 1 and remat and blocks.remat is None:
        # one stage runs no schedule, which would recompute its chunks
        blocks = blocks._replace(remat="full")
    check = config.check
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    # Stages take different branches of a `cond`, and XLA:CPU lets a permute wait for all devices,
    # also for those in other branches: a deadlock. See `check_permutes`.
    if on_cpu and num_stages > 1 and sizes["tensor"] > 1:
        check = _with_permutes_checked(check, sizes)
    config = config.replace(
        loss_fn=blocks,
        # Under ddp no leaf is sharded over data, so the limit would only keep uneven stacks whole.
        min_shard_elements=config.layout.min_shard_elements if config.placement.opt_state else 1,
        check=check,
    )
    counts = check_counts(blocks_per_stage)
    if num_stages == 1:
        return build(config, own_slots)
    regather = placement != "fsdp_once"
    stages = Pipelined(built_schedule, counts, remat is True, regather)
    slots = functools.partial(pipelined_slots, device_loss=stages)
    return build(config.replace(schedule=built_schedule), slots)


def _check_one_stage(placement: str, blocks_per_stage: Sequence[int] | None) -> None:
    """Refuse, by a ValueError, arguments that need several stages."""
    if placement == "fsdp_once":
        problem = "placement='fsdp_once' is for pipelines, and there is one stage."
        raise value_error(problem, fix="use a mesh with pipeline above 1, or placement='fsdp'.")
    if blocks_per_stage is not None:
        problem = "blocks_per_stage is for pipelines, and there is one stage."
        raise value_error(
            problem, fix="use a mesh with pipeline above 1, or leave blocks_per_stage out."
        )


def pipelined_slots(config: StrategyConfig, device_loss: Pipelined) -> StepSlots:
    """Return the slots of a pipeline, which has no global view."""
    views = {"per_device": PerDeviceView(device_loss, sum_parts)}
    return own_slots(config)._replace(differentiate=views, counts=device_loss.counts)


def _with_permutes_checked(check: ProgramCheck | None, sizes: Mapping[str, int]) -> ProgramCheck:
    """Return a check that also refuses a program whose stages would wait for each other."""

    def check_program(compiled: Compiled, lowered: Lowered) -> None:
        check_permutes(compiled.as_text() or "", sizes)
        if check is not None:
            check(compiled, lowered)

    return check_program


def _build_schedule(
    schedule: Schedule | Callable[[int, int], Schedule], num_stages: int, micro_batches: int
) -> Schedule:
    if not isinstance(schedule, Schedule) and not callable(schedule):
        problem = f"schedule must be a Schedule, or a function that makes one, got {schedule!r}."
        raise type_error(
            problem, fix="use one of so.schedules, such as so.schedules.eager_one_f_one_b."
        )
    built_schedule = (
        schedule if isinstance(schedule, Schedule) else schedule(num_stages, micro_batches)
    )
    if not isinstance(built_schedule, Schedule):
        problem = (
            f"schedule(num_stages={num_stages}, num_micro_batches={micro_batches}) returned"
            f" {built_schedule!r}."
        )
        raise type_error(
            problem, fix="return a Schedule; so.schedules.from_ticks and from_order make one."
        )
    if (built_schedule.num_stages, built_schedule.num_micro_batches) != (num_stages, micro_batches):
        problem = (
            f"the schedule is for {plural(built_schedule.num_stages, 'stage')} and"
            f" {plural(built_schedule.num_micro_batches, 'micro-batch')}, but there are"
            f" pipeline={num_stages} and micro_batches={micro_batches}."
        )
        raise value_error(
            problem, fix="make it of these sizes, or pass the function that makes it."
        )
    return built_schedule
