"""`check`: compare the loss, gradient and metrics of a strategy with a single evaluation of the
whole batch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import make_layout
from shardopt.config._slots import no_stages
from shardopt.core._block_model import LossFn, as_block_model, takes_rng
from shardopt.core._errors import NotSeparableError, calling, format_error
from shardopt.core._tracebacks import api_boundary
from shardopt.core._types import PyTree, TrainState, abstract, leaves_with_paths
from shardopt.losses._global_view import GlobalView
from shardopt.losses._metrics import values
from shardopt.losses._view import Views
from shardopt.mesh import on_mesh
from shardopt.step._global_rows import rows_of
from shardopt.step._gradients import exact_sum
from shardopt.step._inputs import check_batch, check_state, place_batch
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy


class Difference(NamedTuple):
    """The difference between one value of the strategy and the same value of the whole batch.

    Attributes:
      name: "loss", "gradient of <key path>" or "metric <name>".
      relative: the largest difference of an entry, divided by the largest entry.
      tolerance: the largest relative difference that counts as rounding.
    """

    name: str
    relative: float
    tolerance: float

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding; NaN always is."""
        return not self.relative <= self.tolerance


class CheckReport(NamedTuple):
    """The result of `check`; printed, it has one line a value, and a mark where a value differs."""

    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        width = max(len(difference.name) for difference in self.differences)
        return "\n".join(
            f"{difference.name:{width}} "
            f" {difference.relative:.1e}{'  differs' * difference.differs}"
            for difference in self.differences
        )


@api_boundary
@calling("check")
def check(
    opt: ShardedOptimizer, state: TrainState, batch: PyTree, *, tolerance: float | None = None
) -> CheckReport:
    """Compare a step's loss, gradient and metrics with a single evaluation of the whole batch, and
    print the differences.

    Args:
      opt: a synchronous strategy; for `local_sgd` and `diloco`, check the strategy inside.
      state: its train state.
      batch: a global batch, leaves [global batch, ...], as for `opt.step`.
      tolerance: the largest relative difference that counts as rounding. By default it is the root
        of the machine epsilon of each value (3e-4 in float32, 1.5e-8 in float64), or of
        `gather_dtype` if that is larger.

    Returns:
      The report, which was printed already.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`.
      NotSeparableError: if a value differs by more than the tolerance.
      ValueError: if each replica of the strategy trains by itself.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(), loss_fn)
      >>> report = so.check(opt, opt.init({"w": jnp.zeros((4,))}), {"x": jnp.ones((8, 4)), "y": jnp.ones((8,))})
      loss           0.0e+00
      gradient of w  0.0e+00

    Let g be the gradient that the strategy adds up from its pieces, and g* the gradient of the loss
    of the union batch. `check` prints max|g - g*| / max|g*| of every leaf, and the same ratio for
    the loss and every metric. The whole batch runs in the global view on the same mesh with the
    same placement, so a model that needs the mesh fits. It takes about the memory of a step without
    micro-batches. Nothing is donated and nothing is updated. A loss that takes a key gets none, so
    dropout is off.

    **Equivalence**: for a loss that is a (weighted) mean over rows the two agree up to summation
    order.

    **Communication**: as much as one step, and one step with `view="global"`.
    """
    check_is_strategy(opt)
    config = opt.config
    check_state(config, state)
    batch = rows_of(config, "check").join(batch)
    check_batch(config, batch)
    if config.per_replica:
        problem = "replicas of this strategy train apart, so there is no one gradient to compare."
        raise ValueError(
            format_error("check", problem, fix="check the strategy that was combined.")
        )
    placed = place_batch(config, batch)
    view = Views(config, training=True).of(make_layout(config, abstract(state.params)), placed)
    in_pieces = config.replace(
        loss_fn=_without_key(config.loss.loss_fn), reducer=None, scatter_dtype=None, view=view
    )
    in_one_piece = in_pieces.replace(view="global", micro_batches=1, schedule=None)
    slots = config.slots._replace(reduce=exact_sum)
    slots_of_whole = slots._replace(differentiate={"global": GlobalView()}, counts=no_stages)
    in_pieces = in_pieces._replace(filled=slots)
    in_one_piece = in_one_piece._replace(filled=slots_of_whole)
    actual_values, expected_values = (
        _evaluate(variant, state, placed) for variant in (in_pieces, in_one_piece)
    )
    expected = dict(expected_values)
    report = CheckReport(
        tuple(
            _compare(config, name, actual, expected[name], tolerance)
            for name, actual in actual_values
        )
    )
    print(report)
    if wrong := [difference for difference in report.differences if difference.differs]:
        listed = [
            f"{diff.name}: {diff.relative:.1e}, of which {diff.tolerance:.1e} may be rounding"
            for diff in wrong
        ]
        problem = "the step is not that of one device on this batch; relative differences:"
        fix = (
            "see the remedies of NotSeparableError in the documentation of so.ddp: view='global' is"
            " exact for every loss."
        )
        raise NotSeparableError(format_error(config.strategy, problem, listed, fix))
    return report


def _evaluate(
    config: StrategyConfig, state: TrainState, batch: PyTree
) -> list[tuple[str, jax.Array]]:
    layout = make_layout(config, abstract(state.params))
    gradients = jax.jit(on_mesh(config.mesh, config.differentiate.gradients(config, layout)))
    results = gradients(state.params, batch, state.step, state.rng)
    leaves = [(f"gradient of {path}", leaf) for path, leaf in leaves_with_paths(results.grads)]
    return [
        ("loss", results.loss),
        *leaves,
        *((f"metric {name}", value) for name, value in values(results.metrics).items()),
    ]


def _without_key(loss_fn: LossFn) -> LossFn:
    model = as_block_model(loss_fn)

    def bind(f):
        return functools.partial(f, rng=None) if takes_rng(f) else f

    if model is None:
        return bind(loss_fn)
    return model._replace(embed=bind(model.embed), block=bind(model.block), loss=bind(model.loss))


def _compare(
    config: StrategyConfig,
    name: str,
    actual: jax.Array,
    expected: jax.Array,
    tolerance: float | None,
) -> Difference:
    if tolerance is None:
        dtypes = [
            dtype
            for dtype in (actual.dtype, config.wire.gather_dtype)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        ]
        allowed = max((float(jnp.finfo(dtype).eps) ** 0.5 for dtype in dtypes), default=0.0)
    else:
        allowed = tolerance
    return Difference(name, float(jax.device_get(_relative_difference(actual, expected))), allowed)


@jax.jit
def _relative_difference(actual: jax.Array, expected: jax.Array) -> jax.Array:
    scale = jnp.max(jnp.abs(expected))
    return jnp.max(jnp.abs(actual - expected)) / jnp.where(scale > 0, scale, 1)
