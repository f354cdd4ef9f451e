"""Data parallel: the model is replicated, and gradients are averaged in each step."""

from typing import Unpack

import optax
from jax.sharding import Mesh

from shardopt.config._config import DDP, configure
from shardopt.config._options import DdpOptions
from shardopt.config._user_mesh import Axes
from shardopt.core._block_model import LossFn
from shardopt.step._build import build
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._keywords import with_options
from shardopt.strategies._slots import own_slots


# adds the options to the signature and to Args, from the records in config/_options.py
@with_options
def ddp(
    tx: optax.GradientTransformation,
    mesh: Mesh | Axes,
    loss_fn: LossFn,
    **options: Unpack[DdpOptions],
) -> ShardedOptimizer:
    """Train data parallel: every device holds a copy of the model, and each step averages their
    gradients.

    With L_d the mean loss of the rows on device d of N, a step applies `tx` to (1/N) sum_d grad
    L_d. That is the gradient of the mean loss over the global batch.

    Returns:
      A `ShardedOptimizer`.

    Raises:
      TypeError: if an argument has the wrong type, or `tx` is not an optax transformation.
      NotSeparableError: by a step with a new batch shape, if the loss is not proved to be a
        (weighted) mean over rows, and the global view is not available. A context axis needs a mean
        over positions as well. The global view is not available with `view="per_device"`, a
        reducer or a pipeline.
      ValueError: if a number is out of range, rules do not fit, a mesh axis above 1 has nothing to
        split, or `view="global"` is combined with a reducer.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> opt = so.ddp(optax.sgd(0.1, momentum=0.9), so.make_mesh(), loss_fn)
      >>> state = opt.init({"w": jnp.zeros((4,))})
      >>> state, metrics = opt.step(state, {"x": jnp.ones((8, 4)), "y": jnp.ones((8,))})
      >>> [round(float(w), 3) for w in state.params["w"]], float(metrics["loss"])
      ([0.2, 0.2, 0.2, 0.2], 1.0)

    **Equivalence**: training equals one device on the union batch, up to summation order. This
    holds for every optax transformation but lookahead and dpsgd, which need more than one copy of the parameters and the mean gradient. It
    holds for **every** loss, in one of two views.

    **Per-device view**: a loss that is proved to be a (weighted) mean over rows runs on each
    device's rows. Losses with `rng` then agree in expectation: each device draws its own random
    numbers, and all strategies draw the same ones. If the tensor axis has size 1, callbacks,
    `jax.debug`, `equinox.error_if` and `jax_debug_nans` work as on one device. If it is above 1,
    wrap a kernel that needs every axis manual (Pallas, callbacks) in `jax.shard_map(kernel,
    in_specs=..., out_specs=..., axis_names={"tensor"}, check_vma=False)`.

    **Global view**: every other loss runs once on the whole batch, and a warning says why. In-batch
    negatives, batch norm, sums and sorting mix rows in this way. You write the loss as for one
    device; it runs under `jit` on global arrays, and XLA's partitioner divides the work. Rows stay
    on their devices. Weights are gathered where the placement shards them (of a `BlockModel` one
    block at a time). Gradients go to the device that holds the optimizer state. A loss with `rng`
    gets the key that `ddp` gives on one device, and draws the same numbers. `micro_batches` cut the
    batch if the loss is shown to be a mean over rows; otherwise the loss runs on the whole batch at
    once, with a warning. Replicas that train separately (`local_sgd`, `diloco`) each see the rows
    of their own replica, and in warm-up steps the rows of all.

    **Context axis** (`so.make_mesh(context=4)`): it splits the positions of sequences, dim 1 of
    batch leaves with at least two dims. The loss sees [rows of this device, positions of this
    device, ...]. Gradients are summed over context. Whatever a placement shards is sharded over
    data and context together. A loss that is a (weighted) mean over positions needs no change.
    Positions see each other through `so.nn.attention`, and learn their number from
    `so.nn.positions`. A loss that mixes positions in another way runs in the global view, where it
    sees whole sequences.

    **Expert axis** (`so.make_mesh(expert=4)`): it splits rows, as data does, and it splits the
    leaves that `rules` call experts. The loss sees [experts of this device, ...] of such a
    leaf, and sends tokens to the devices of their experts, as `so.nn.mixture_of_experts` does. The
    gradient of such a leaf is complete over expert, and is summed only over replica, data and
    context. Whatever a placement shards of the other leaves is sharded over data, expert and
    context together. A loss that uses such a leaf elsewhere, such as in a penalty on weights, runs
    in the global view.

    **Placement**: parameters, gradients and optimizer state are replicated over data and replica.
    They are sharded over tensor by `rules`.

    **Communication** per step and device, for gradients of Psi bytes: one all-reduce over (replica,
    data, expert, context) after the last micro-batch. It sends 2(N-1)/N Psi. The loss and metrics
    take a few bytes more. `so.nn.attention` says what attention sends over context, and
    `so.nn.mixture_of_experts` what tokens send over expert.

    In the global view, compiled programs sent this (measured with `so.hlo.audit`): the bytes of the
    per-device view, and the bytes of other rows that the loss needs. The gradient of each block is
    sent in the loop over blocks, and again in each micro-batch. XLA:TPU reduce-scatters the
    gradients of `zero` and `fsdp`, as in the per-device view. XLA:CPU all-reduces them and cuts the
    result, 2(N-1)/N Psi instead of (N-1)/N Psi. With `gather_dtype` gradients are summed in that
    dtype.

    References:
      Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """
    return build(configure("ddp", tx, mesh, loss_fn, DDP, options), own_slots)
