"""What a worker computes: the gradient of its batch, as an update to push."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.core.block_model import as_block_model, call, run_blocks, takes_rng
from shardopt.core.errors import complaint
from shardopt.core.types import LossFn, PyTree
from shardopt.mesh import on_mesh
from shardopt.parameter_server.trainable import merge, trained
from shardopt.parameter_server.updates import Update, soundness
from shardopt.strategies.batch import batch_sharding, check_batch, place_batch
from shardopt.strategies.loss import LossParts, loss_parts
from shardopt.strategies.placement import DDP
from shardopt.strategies.recipe import Recipe, check_recipe

Gradients = Callable[[Mesh, PyTree, PyTree, int, int], Update]
"""`(mesh, params, batch, worker, clock) -> Update`, computed on that mesh."""


def make_gradients(who: str, tx: optax.GradientTransformation, loss_fn: LossFn, mesh: Mesh, rng: Any) -> Gradients:
    """Return what computes an update, on any mesh whose devices share out the rows of the batch.

    The gradient is taken in the global view, of the loss total over all rows. A loss with `rng` gets a key of its own
    for each clock and worker: the very one that `ddp` gives device `worker` at step `clock`.

    Args:
      who: the function that the user called, for messages.
      tx: the optimizer, checked only.
      loss_fn: as for `ddp`.
      mesh: one of the meshes, checked at once.
      rng: uint32 key data.

    Raises:
      TypeError: if the optimizer, the mesh or the loss is of the wrong kind.
      ValueError: if the mesh has no data axis.
    """
    prepared: dict[Mesh, tuple[Recipe, Any]] = {}
    programs: dict[Any, Any] = {}

    def prepare(mesh: Mesh) -> tuple[Recipe, Any]:
        recipe = check_recipe(Recipe(who, tx, mesh, loss_fn, DDP))
        program = jax.jit(on_mesh(recipe.mesh, _program(who, loss_fn, recipe.mesh)))
        # Threads may come here at once: whoever is first leaves what all of them use.
        return prepared.setdefault(mesh, (recipe, programs.setdefault(recipe.mesh.abstract_mesh, program)))

    def run(mesh: Mesh, params: PyTree, batch: PyTree, worker: int, clock: int) -> Update:
        recipe, program = prepared.get(mesh) or prepare(mesh)
        check_batch(recipe, batch)
        params = jax.device_put(params, NamedSharding(recipe.mesh, PartitionSpec()))
        batch = place_batch(batch, batch_sharding(recipe))
        found = program(params, batch, rng, np.int32(worker), np.int32(clock))
        return found._replace(rows=jax.tree.leaves(batch)[0].shape[0])

    prepare(mesh)
    return run


def _program(who: str, loss_fn: LossFn, mesh: Mesh) -> Callable[..., Update]:
    def program(params: PyTree, batch: PyTree, rng: Any, worker: Any, clock: Any) -> Update:
        key = _key(loss_fn, rng, worker, clock)

        def total(part):
            parts = _loss(who, loss_fn, merge(params, part), batch, key)
            return parts.loss.total, parts

        grads, parts = jax.grad(total, has_aux=True)(trained(params))
        if parts.updates:
            what = "loss_fn returns so.Updated, for which asynchronous workers have no common value."
            raise ValueError(complaint(who, what, [*parts.updates], "train such leaves with ddp, zero or fsdp."))
        if mesh.size > 1:
            whole = PartitionSpec()
            grads, parts = jax.lax.with_sharding_constraint(
                (grads, parts), jax.tree.map(lambda _: whole, (grads, parts))
            )
        update = Update(grads, parts.loss, parts.metrics, None)
        return update._replace(sound=soundness(update))

    return program


def _loss(who: str, loss_fn: LossFn, params: PyTree, batch: PyTree, key: Any) -> LossParts:
    model, rows = as_block_model(loss_fn), jax.tree.leaves(batch)[0].shape[0]
    if model is not None:
        return loss_parts(who, run_blocks(model, params, batch, key), rows)
    return loss_parts(who, call(loss_fn, key, 0, params, batch), rows)


def _key(loss_fn: LossFn, rng: Any, worker: Any, clock: Any) -> Any:
    if not takes_rng(loss_fn):
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(rng)), clock)
    return jax.random.fold_in(jax.random.fold_in(key, worker), 0)
