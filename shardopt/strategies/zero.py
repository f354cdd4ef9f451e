"""ZeRO: data parallel, with optimizer state, then gradients, then parameters sharded."""

from collections.abc import Sequence

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn
from shardopt.core.errors import format_error
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import STAGES, BatchDims, OptStateLayout, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes


def zero(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    *,
    stage: int = 1,
    micro_batches: int = 1,
    rules: Rules = (),
    min_shard_elements: int = 1024,
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
) -> ShardedOptimizer:
    """Train data parallel without redundant copies: stages 1 to 3 shard more and more over the data axis.

    Stage 1 shards the optimizer state, stage 2 the gradients as well, stage 3 the parameters too (it is `fsdp`). Each
    device reduces and updates its own shard of every leaf: p_k <- p_k + u(g_k) for shard k.

    Args:
      tx: the optax transformation, such as `optax.adamw(1e-3)`; any but lookahead. See `ddp` for the extra arguments
        that it may take.
      mesh: the devices: a mesh from `so.make_mesh`, or your own mesh together with `axes`.
      loss_fn: the loss, `loss_fn(params, batch) -> scalar`, or a `BlockModel`; see `ddp` for all its forms.
      stage: 1, 2 or 3.
      micro_batches: the number of pieces that each device cuts its rows into. A device computes the gradient of one
        piece at a time.
      rules: which dims the tensor axis splits: `[(regex, PartitionSpec), ...]`, or a function
        `(path, shape) -> PartitionSpec | None`. The first regex found in a leaf's key path wins.
      min_shard_elements: leaves with fewer elements than this stay replicated over data. For stacked blocks the
        elements of one block count. `opt.config.report()` lists these leaves.
      scatter_dtype: the dtype that gradients of sharded leaves are cast to before they are summed over data; by default
        the dtype of the parameters.
      frozen: regexes of the key paths of parameters that are not trained: they have no gradient and no optimizer state.
      evaluate_fn: the loss that `opt.evaluate` runs, in the form of `loss_fn`; by default `loss_fn`.
      compiler_options: the options that XLA compiles a step with, name -> value; by default
        `so.compiler_options(mesh)`.
      view: where the loss runs. By default, "auto", it runs on each device's own rows, if that is proved to be exact.
        Otherwise it runs once on the whole batch, and a warning says why. "per_device" raises an error instead if it is
        not proved. "global" always runs it on the whole batch.
      separable: True states that the loss is a (weighted) mean over rows, and skips the proof.
      axes: the names of the axes of your own mesh, such as `so.Axes(data="dp", tensor="tp")`; by default the names of
        `so.make_mesh`.
      batch_dims: which dim of a batch leaf counts rows, if it is not dim 0: `[(regex, dim or None), ...]`. None is for
        a leaf that all rows share.
      sequence_dims: which dim of a batch leaf counts positions, for a mesh with a context axis:
        `[(regex, dim or None), ...]`. By default it is the first dim that does not count rows.
      expert_leaves: regexes of the key paths of expert weights [experts, ...], which an expert axis splits by experts.
      opt_state_layout: how optimizer state is sharded. "within" shards each leaf on one of its dims. "matrices" assigns
        each matrix to one device, its owner; see `fsdp`. In stages 1 and 2 the gradients of blocks that data divides
        are reduce-scattered to their owners directly, so nothing more is sent.
      offload: `("opt_state",)` keeps optimizer state in host memory between steps; see `fsdp`.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if `stage` is not 1, 2 or 3; otherwise as `fsdp`.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.zero(optax.adam(1e-3), so.make_mesh(), loss_fn, stage=1)
      >>> state = opt.init({"w": jnp.ones((64, 32))})
      >>> tuple(opt.specs(state.params).opt_state[0].mu["w"])
      ('data', None)

    **Equivalence**: training equals one device on the union batch, up to summation order. This holds for every optax
    transformation, elementwise or not, because the update runs in the global view. `fsdp` says how `scatter_dtype`
    rounds; stage 1 rounds the sum of its micro-batches.

    **Placement** of parameters, gradients (while they accumulate) and optimizer state, with the bytes of fp32 Adam per
    parameter:

    - Stage 1: parameters and gradients replicated, optimizer state sharded: 8 + 8/N bytes.
    - Stage 2: parameters replicated, gradients and optimizer state sharded: 4 + 12/N bytes.
    - Stage 3: all three sharded: 16/N bytes.

    A leaf is sharded on its largest dim that the data axis divides and tensor does not take; a leaf of experts on the
    first such dim. Replicas hold copies.

    **Communication** per step and device, for parameters of Psi bytes over N data devices: stages 1 and 2
    reduce-scatter gradients and all-gather parameters, 2(N-1)/N Psi. Stage 1 does so after the last micro-batch, stage
    2 reduce-scatters in each micro-batch. `scatter_dtype=bfloat16` halves the reduce-scatter. `fsdp` describes stage 3.
    Replicas add an all-reduce of the 1/N shards over replica.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(f"zero: stage must be 1, 2 or 3, got {stage!r} ({type(stage).__name__}).")
    if stage not in STAGES:
        fix = "use so.ddp to shard nothing, stage=1, 2 or 3 for more."
        raise ValueError(format_error("zero", f"stage must be 1, 2 or 3, got {stage!r}.", fix=fix))
    return build(
        StrategyConfig(
            "zero",
            tx,
            mesh,
            loss_fn,
            STAGES[stage],
            micro_batches=micro_batches,
            rules=rules,
            min_shard_elements=min_shard_elements,
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
        )
    )
