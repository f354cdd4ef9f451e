"""Fully sharded data parallel: parameters, gradients and optimizer state all sharded."""

from collections.abc import Sequence

import jax
import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import ZERO_3, BatchDims, OptStateLayout, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes


def fsdp(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    *,
    micro_batches: int = 1,
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
) -> ShardedOptimizer:
    """Train fully sharded data parallel: parameters, gradients and optimizer state are all sharded.

    Each device gathers weights just before they are used. A step computes g = reduce_scatter_d grad L_d(all_gather(p)),
    and each device updates its own shard of the parameters with its own shard of g.

    Args:
      tx: the optax transformation, such as `optax.adamw(1e-3)`; any but lookahead. See `ddp` for the extra arguments
        that it may take.
      mesh: the devices: a mesh from `so.make_mesh`, or your own mesh together with `axes`.
      loss_fn: the loss, `loss_fn(params, batch) -> scalar`, or a `BlockModel`; see `ddp` for all its forms. The weights
        of a `BlockModel` are gathered one block at a time.
      micro_batches: the number of pieces that each device cuts its rows into. A device computes the gradient of one
        piece at a time.
      rules: which dims the tensor axis splits: `[(regex, PartitionSpec), ...]`, or a function
        `(path, shape) -> PartitionSpec | None`. The first regex found in a leaf's key path wins.
      min_shard_elements: leaves with fewer elements than this stay replicated over data. For stacked blocks the
        elements of one block count. `opt.config.report()` lists these leaves.
      gather_dtype: the dtype that trained floating parameters are cast to before they are gathered and used; by default
        their own. Frozen parameters keep their dtype.
      scatter_dtype: the dtype that gradients of sharded leaves are cast to before they are summed over data; by default
        the dtype of the parameters, whatever `gather_dtype` is. So fp32 sums of bf16 products are sent unrounded.
      frozen: regexes of the key paths of parameters that are not trained: they have no gradient and no optimizer state.
        They are sharded as well.
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
      opt_state_layout: how optimizer state is sharded. By default, "within", it is sharded as the parameters are.
        "matrices" assigns each matrix to one device, its owner, for optimizers of matrices (Muon, Shampoo): work on a
        matrix then needs no collectives. See the notes on matrices below.
      offload: `("opt_state",)` keeps optimizer state in host memory between steps, 8/N bytes per parameter with fp32
        Adam. The numbers are the same. A step copies the state to the device and back. It copies the state of a
        `BlockModel` block by block if the optimizer treats blocks separately and does not ask for the loss. Otherwise,
        in pipelines and with `opt_state_layout="matrices"`, it copies all of the state at once.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: as `ddp`; if `gather_dtype` or `scatter_dtype` is not floating; if `scatter_dtype` is combined with
        `view="global"`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
      >>> opt = so.fsdp(optax.adamw(1e-3), so.make_mesh(), loss_fn)
      >>> state = opt.init(lambda rng: {"w": jnp.ones((64, 32))}, jax.random.key(0))
      >>> state.params["w"].addressable_shards[0].data.shape
      (8, 32)

    **Equivalence**: training equals one device on the union batch, up to summation order, for every optax
    transformation.

    - With `gather_dtype` it equals one device that computes in that dtype with fp32 master weights.
    - With `scatter_dtype` g = sum_d round(grad L_d) for each micro-batch: each device rounds once, before it sends. The
      sum is taken in fp32 on CPU. Elsewhere it is taken in that dtype, where XLA rounds it up to N - 1 times more. The
      sums over micro-batches and over replicas are taken in the dtype of the parameters.

    **Placement**: parameters, gradients and optimizer state are sharded over data (16/N bytes per parameter with fp32
    Adam), and over tensor by `rules`. One block of a `BlockModel` is gathered at a time, in the layer scan and again in
    the backward pass. Its outer parameters stay gathered from the forward to the backward pass, and so may all
    parameters of any other loss. A replica axis holds copies of the shards (hybrid sharding, HSDP).

    **Communication** per step and device, for parameters of Psi bytes over N data devices: 3(N-1)/N Psi in each
    micro-batch. The weights are all-gathered in the forward and again in the backward pass. The gradients are
    reduce-scattered.

    - Some weights are gathered only once: weights that the backward pass does not need, and outer weights of a
      BlockModel. `tables` of a BlockModel are not gathered at all if `so.nn.embedding` finds it cheaper to exchange
      rows. Weights outside of blocks are gathered once if the compiler merges their two gathers (XLA:CPU of jax 0.10
      does).
    - `gather_dtype=bfloat16` halves the gathers. `scatter_dtype=bfloat16` halves the reduce-scatter (on CPU it is an
      all-to-all of as many bytes). By default gradients are reduced in the dtype of the parameters.
    - Replicas add an all-reduce of the 1/N shards over replica, after the last micro-batch, in the dtype of the
      parameters.

    **Matrices** (`opt_state_layout="matrices"`): stacked blocks [L, ...] have their state and update sharded over L, if
    data (times pipeline, and times tensor if a rule splits the leaf) divides L. An all-to-all sends their gradients to
    the owners, and another sends the updates back: 2 (N-1)/N^2 Psi. Terms of the parameter (weight decay) are added
    where the parameter lives; the parameter is sent along only if the state itself needs it. For other leaves only
    products and decompositions go to owners, one matrix or block each, shared out by flops. Their state stays sharded
    "within", and each array that is sent to an owner or back costs (N-1)/N^2 Psi. Leaves without such work send nothing
    more.

    References:
      Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
      2023.
    """
    return build(
        StrategyConfig(
            "fsdp",
            tx,
            mesh,
            loss_fn,
            ZERO_3,
            micro_batches=micro_batches,
            rules=rules,
            min_shard_elements=min_shard_elements,
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
        )
    )
