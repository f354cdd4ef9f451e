"""`check`: a strategy's own loss, gradient and metrics beside those of the whole batch at once."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardopt.core.block_model import LossFn, as_block_model, takes_rng
from shardopt.core.errors import NotSeparableError, format_error
from shardopt.core.types import PyTree, TrainState, abstract, leaves_with_paths
from shardopt.engine.config import StrategyConfig
from shardopt.engine.gradients import make_gradients
from shardopt.engine.inputs import check_batch, check_state, place_batch
from shardopt.engine.layout import make_layout
from shardopt.engine.metrics import values
from shardopt.engine.optimizer import ShardedOptimizer, check_is_strategy
from shardopt.engine.view import Views
from shardopt.mesh import on_mesh


class Difference(NamedTuple):
    """How far one value of the strategy is from that of the whole batch.

    Attributes:
      name: "loss", "gradient of <key path>" or "metric <name>".
      relative: the largest difference of an entry, relative to the largest entry.
      tolerance: the most that is put down to rounding.
    """

    name: str
    relative: float
    tolerance: float

    @property
    def differs(self) -> bool:
        """Whether it is more than rounding; so is NaN."""
        return not self.relative <= self.tolerance


class CheckReport(NamedTuple):
    """What `check` compared; printed, a line a value, what differs marked."""

    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        width = max(len(one.name) for one in self.differences)
        lines = [f"{one.name:{width}}  {one.relative:.1e}{'  differs' * one.differs}" for one in self.differences]
        return "\n".join(lines)


def check(opt: ShardedOptimizer, state: TrainState, batch: PyTree, *, tolerance: float | None = None) -> CheckReport:
    """Compare a step's loss, gradient and metrics with those of one loss of the whole batch, and print what differs.

    With g the gradient that the strategy takes of its pieces, and g* that of the loss of the union batch: prints
    max|g - g*| / max|g*| of every leaf, and the same of the loss and of every metric. The whole batch runs in the global
    view on the same mesh with the same placement, so a model that needs the mesh fits, at about the memory of a step
    without micro-batches. Nothing is donated and nothing is updated; a loss that takes a key gets none, so dropout is off.

    **Equivalence**: for a loss that is a (weighted) mean over rows the two agree up to summation order.

    **Communication**: that of a step, and of one with `view="global"`.

    Args:
      opt: a synchronous strategy; of `local_sgd` and `diloco`, check the strategy inside.
      state: its train state.
      batch: a global batch, leaves [global batch, ...], as for `opt.step`.
      tolerance: the largest relative difference that is put down to rounding; by default the root of the machine epsilon
        of each value (3e-4 in float32, 1.5e-8 in float64), or of `gather_dtype` if that is larger.

    Returns:
      The report, which was printed already.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`.
      NotSeparableError: if something differs by more.
      ValueError: if replicas of the strategy train apart.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(), loss_fn)
      >>> report = so.check(opt, opt.init({"w": jnp.zeros((4,))}), {"x": jnp.ones((8, 4)), "y": jnp.ones((8,))})
      loss           0.0e+00
      gradient of w  0.0e+00
    """
    check_is_strategy("check", opt)
    config = opt.config
    check_state(config, state)
    check_batch(config, batch)
    if config.per_replica:
        what = "replicas of this strategy train apart, so there is no one gradient to compare."
        raise ValueError(format_error("check", what, fix="check the strategy that was combined."))
    placed = place_batch(config, batch)
    view = Views(config, training=True).of(make_layout(config, abstract(state.params)), placed)
    own = config._replace(loss_fn=_without_key(config.loss_fn), reducer=None, scatter_dtype=None, view=view)
    whole = own._replace(view="global", micro_batches=1, schedule=None)
    ours, theirs = (_run(one, state, placed) for one in (own, whole))
    wanted = dict(theirs)
    found = CheckReport(tuple(_compared(config, name, leaf, wanted[name], tolerance) for name, leaf in ours))
    print(found)
    if wrong := [one for one in found.differences if one.differs]:
        listed = [f"{one.name}: {one.relative:.1e}, of which {one.tolerance:.1e} may be rounding" for one in wrong]
        what = "the step is not that of one device on this batch; relative differences:"
        fix = "see the remedies of NotSeparableError in the documentation of so.ddp: view='global' is exact for every loss."
        raise NotSeparableError(format_error(config.strategy, what, listed, fix))
    return found


def _run(config: StrategyConfig, state: TrainState, batch: PyTree) -> list[tuple[str, jax.Array]]:
    layout = make_layout(config, abstract(state.params))
    gradients = jax.jit(on_mesh(config.mesh, make_gradients(config, layout)))
    found = gradients(state.params, batch, state.step, state.rng)
    leaves = [(f"gradient of {path}", leaf) for path, leaf in leaves_with_paths(found.grads)]
    return [
        ("loss", found.loss),
        *leaves,
        *((f"metric {name}", value) for name, value in values(found.metrics).items()),
    ]


def _without_key(loss_fn: LossFn) -> LossFn:
    model = as_block_model(loss_fn)
    bound: Any = lambda f: functools.partial(f, rng=None) if takes_rng(f) else f  # noqa: E731
    if model is None:
        return bound(loss_fn)
    return model._replace(embed=bound(model.embed), block=bound(model.block), loss=bound(model.loss))


def _compared(
    config: StrategyConfig, name: str, ours: jax.Array, theirs: jax.Array, tolerance: float | None
) -> Difference:
    if tolerance is None:
        dtypes = [
            one for one in (ours.dtype, config.gather_dtype) if one is not None and jnp.issubdtype(one, jnp.inexact)
        ]
        allowed = max((float(jnp.finfo(one).eps) ** 0.5 for one in dtypes), default=0.0)
    else:
        allowed = tolerance
    return Difference(name, float(jax.device_get(_relative(ours, theirs))), allowed)


@jax.jit
def _relative(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    scale = jnp.max(jnp.abs(theirs))
    return jnp.max(jnp.abs(ours - theirs)) / jnp.where(scale > 0, scale, 1)
