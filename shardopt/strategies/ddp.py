"""Data parallel: everything replicated, gradients averaged each step."""

from collections.abc import Sequence

import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn
from shardopt.core.types import Rules
from shardopt.engine.build import build
from shardopt.engine.compiler_options import CompilerOptions
from shardopt.engine.config import DDP, BatchDims, SequenceDims, StrategyConfig, View
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.engine.user_mesh import Axes
from shardopt.reducers import Reducer


def ddp(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    *,
    reducer: Reducer | None = None,
    micro_batches: int = 1,
    rules: Rules = (),
    frozen: Sequence[str] = (),
    evaluate_fn: LossFn | None = None,
    axes: Axes | None = None,
    batch_dims: BatchDims = (),
    sequence_dims: SequenceDims = (),
    expert_leaves: Sequence[str] = (),
    compiler_options: CompilerOptions | None = None,
    view: View = "auto",
    separable: bool | None = None,
) -> ShardedOptimizer:
    """Train on the mean gradient of all devices, each holding a copy of the model.

    With L_d the mean loss of the rows on device d of N, a step applies `tx` to (1/N) sum_d grad L_d, which is
    the gradient of the mean over the global batch.

    **Equivalence**: equal to one device on the union batch, up to summation order, for every optax transformation but
    lookahead (which has two copies of the parameters), and **every** loss. A loss that is proved to be a (weighted) mean over
    rows runs on each device's rows: the per-device view. There, losses with `rng` agree in expectation: each device draws its
    own, the same for every strategy. Every other loss runs in the global view, and a warning says why.

    In the global view the step is L(p, B) and its gradient on the whole batch B: in-batch negatives, batch norm, sums, sorting,
    whatever mixes rows. The loss is written as for one device, runs under `jit` on global arrays, and XLA's partitioner divides
    the work: rows stay on their devices, weights are gathered where the placement shards
    them (of a `BlockModel` one block at a time), gradients go to where the optimizer state is. A loss with `rng` gets the
    key that `ddp` gives on one device, and draws the same. `micro_batches` cut the batch where the loss is shown to be a mean over
    rows; elsewhere it runs at once, which a warning says. Replicas that train apart (`local_sgd`, `diloco`) each see their
    whole rows, and in warm-up steps those of all.

    On a mesh with a context axis (`so.make_mesh(context=4)`) the positions of sequences are split over it, dim 1 of batch
    leaves with two dims or more, and the loss sees rows [rows here, positions here, ...]. Gradients are summed over
    it, and what a placement shards is sharded over data and context together. A loss that is a (weighted) mean over
    positions needs no change; positions see each other through `so.nn.attention`, and know their number from
    `so.nn.positions`. A loss that mixes them otherwise runs in the global view, where it sees whole sequences.

    On a mesh with an expert axis (`so.make_mesh(expert=4)`) rows are split over it as over data, and each leaf that
    `expert_leaves` names, [experts, ...], by experts: the loss sees its own [experts here, ...] and sends tokens to the devices
    of their experts, as `so.nn.mixture_of_experts` does. So the gradient of such a leaf is complete over expert, and summed
    over replica, data and context alone. All other leaves are sharded over data and expert (and context) together.
    A loss that uses a leaf of experts elsewhere, such as in a penalty on weights, runs in the global view.

    **Placement**: parameters, gradients and optimizer state replicated over data and replica; sharded over tensor
    where a rule says so.

    **Communication** a step, per device, for Psi gradient bytes: one all-reduce over (replica, data, expert, context), after the
    last micro-batch: 2(N-1)/N Psi on the wire; and a few bytes for the loss and metrics. What attention sends over context
    is said by `so.nn.attention`, what tokens send over expert by `so.nn.mixture_of_experts`.

    In the global view, what compiled programs were seen to send (`so.audit`): besides what the loss needs of other rows, the
    bytes of the per-device view, but each block's gradient in the loop over blocks, and again each micro-batch. XLA:TPU
    scatters the gradients of `zero` and `fsdp` as the per-device view does; XLA:CPU all-reduces them and cuts, 2(N-1)/N Psi
    instead of (N-1)/N Psi. With `gather_dtype` gradients are summed in that dtype.

    Args:
      tx: any optax transformation but lookahead. Those that take extra arguments get `value` (the loss), `grad`, and the
        loss of this batch at other parameters: `value_fn` (line searches), `obj_fn` (sophia), and its gradient, `grad_fn`
        (sam with `opaque_mode=True`).
      mesh: from `make_mesh`, or your own with `axes`. A replica axis is a second data axis.
      loss_fn: `loss_fn(params, batch) -> scalar`, the mean over the examples it was given, or `Weighted`; or
        `(that, aux dict)`, with metrics as `Sum` says; with a keyword `rng`, a fresh key per step, device and micro-batch.
        Or a `BlockModel`.
        Batch leaves are [global batch, ...] outside and [rows here, ...] inside, but for `batch_dims`. It runs in the per-device view, but
        for a tensor axis above 1; there a kernel that wants every axis manual (Pallas, callbacks) is wrapped in
        `jax.shard_map(kernel, in_specs=..., out_specs=..., axis_names={"tensor"}, check_vma=False)`. Where tensor is 1,
        callbacks, `jax.debug`, `equinox.error_if` and `jax_debug_nans` work as on one device.
      reducer: how the mean of gradients crosses the wire, from `so.reducers`; by default as an exact all-reduce. Its
        state lives in the train state, what differs between devices stacked, one per device. See the reducer for what it does
        to the equivalence and to the bytes.
      micro_batches: into how many pieces each device cuts its rows, one differentiated at a time.
      rules: `[(regex, PartitionSpec), ...]` or `(path, shape) -> PartitionSpec | None`, placing dims on the
        tensor axis; searched in key paths such as "blocks/attention/qkv", the first match wins. For leaves of
        a BlockModel's "blocks" the spec speaks of one block.
      frozen: regexes of key paths that are not trained: no gradient, no optimizer state. Leaves that are not
        floating are frozen anyway. `loss_fn` may give them new values through `Updated`.
      evaluate_fn: the loss that `opt.evaluate` and `so.training.evaluation` run, on the parameters as they are placed; by
        default `loss_fn`. Its form is that of `loss_fn`; it gets no key.
      compiler_options: what XLA is told when it compiles a step, name -> value; by default `so.compiler_options(mesh)`.
      view: "auto": each device runs `loss_fn` on its rows if that is proved to be exact; else it runs once on the whole batch,
        with a warning. "per_device": as the former, or an error. "global": as the latter, without a proof or a warning.
        `opt.config.report()` shows what was taken, and why.
      separable: True says that the loss is a (weighted) mean over rows, so that nothing is proved. `so.check` compares such a loss
        with one device.
      axes: what your own mesh calls its axes, such as `so.Axes(data=("dp", "fsdp"), tensor="tp")`; by default our names.
        State and metrics live on that very mesh, Auto or Explicit, whatever `jax.set_mesh` says. Rules name its axes, and so
        does a loss in the global view; in the per-device view a loss calls them data, tensor, replica, pipeline, context and expert.
      batch_dims: which dim of a batch leaf counts rows, where it is not dim 0: `[(regex, dim or None), ...]`, searched in key
        paths of the batch, the first match wins. `("^frames$", 1)` is for frames [T, B, ...]. None is for a leaf that all
        rows share, such as a table: every device and micro-batch gets all of it. With `view="global"` leaves
        need not agree on a number of rows, as nodes and edges of a graph do not. The devices then split each leaf
        along the first dim that they divide, its rows before others; a leaf without such a dim is on all devices.
      sequence_dims: which dim of a batch leaf counts positions: `[(regex, dim or None), ...]`, as `batch_dims`. By default it is
        the first dim beside the rows, so dim 1 of [rows, positions, ...]; a leaf that all rows share has none. Only read
        where the mesh has a context axis.
      expert_leaves: regexes of key paths of leaves whose first dim (of a block, for leaves of a BlockModel's "blocks") counts
        experts, which an expert axis splits. Without such an axis they are leaves as others.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument is of the wrong kind; `tx` is not an optax transformation.
      NotSeparableError: by a step of a new batch shape, if the loss is not proved to be a (weighted) mean over rows (on a context
        axis over positions), and there is no global view: with `view="per_device"`, a reducer, `scatter_dtype` or a pipeline.
      ValueError: if a number is out of range, rules do not fit, a mesh axis above 1 has nothing to split, or
        `view="global"` is asked for with a reducer.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> opt = so.ddp(optax.sgd(0.1, momentum=0.9), so.make_mesh(), loss_fn)
      >>> state = opt.init({"w": jnp.zeros((4,))})
      >>> state, metrics = opt.step(state, {"x": jnp.ones((8, 4)), "y": jnp.ones((8,))})
      >>> [round(float(w), 3) for w in state.params["w"]], float(metrics["loss"])
      ([0.2, 0.2, 0.2, 0.2], 1.0)

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """
    return build(
        StrategyConfig(
            "ddp",
            tx,
            mesh,
            loss_fn,
            DDP,
            micro_batches=micro_batches,
            rules=rules,
            frozen=frozen,
            evaluate_fn=evaluate_fn,
            axis_names=axes,
            batch_dims=batch_dims,
            sequence_dims=sequence_dims,
            expert_leaves=expert_leaves,
            compiler_options=compiler_options,
            separable=separable,
            reducer=reducer,
            view=view,
        )
    )
