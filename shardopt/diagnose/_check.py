"""`check`: compare whole steps of a strategy with one device."""

from typing import NamedTuple

import jax

from shardopt.config._layout import make_layout
from shardopt.core import NotSeparableError, PyTree, TrainState, abstract, calling, format_error
from shardopt.core._tracebacks import api_boundary
from shardopt.diagnose._difference import Difference, largest
from shardopt.diagnose._pieces import checked_batch
from shardopt.diagnose._same_bits import compare_bits
from shardopt.diagnose._whole_steps import Comparison, batches_of, values_of, with_gradients
from shardopt.step._inputs import place_batch
from shardopt.step._optimizer import ShardedOptimizer

NUM_STEPS = 3
"""The steps that are compared: what a step leaves for the next one is read twice."""


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
    """Compare whole steps of a strategy with one device, and print the differences.

    Args:
      opt: a synchronous strategy; for `local_sgd` and `diloco`, check the strategy inside.
      state: its train state. It may be a small one, `opt.init` of parameters with fewer layers.
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
      >>> opt = so.ddp(optax.sgd(0.5), so.make_mesh(), loss_fn)
      >>> report = so.check(opt, opt.init({"w": jnp.zeros((4,))}), {"x": jnp.ones((8, 4)), "y": jnp.ones((8,))})
      first parameters  0.0e+00
      evaluated loss    0.0e+00
      loss              0.0e+00
      metric grad_norm  0.0e+00
      gradient of w     0.0e+00
      update of w       0.0e+00
      step              0.0e+00

    The reference is plain jax and optax on one device: the gradient of the loss of the whole batch,
    and one update. It knows no mesh, wire, micro-batch or schedule. The check compares:

    - the parameters and the optimizer state that `init` makes;
    - an evaluation;
    - of three steps in turn the loss, metrics, gradients, updates and optimizer state.

    Each step begins at the state that the strategy has reached, so rounding does not add up. Its
    update is compared for the strategy's own gradients, relative to the largest update of a leaf.
    Copies of a leaf must be the same bits. The second and third batch are rows drawn from the
    first, so that a stale value shows. Nothing is donated. A loss that takes a key gets none, so
    dropout is off.

    **Reducers**: a reducer that compresses loses nothing. With error feedback, N times the mean and
    the unsent values add up to N times the gradient. `check` adds error feedback to a reducer
    without it.

    **The same bits**: if the reducer is `exact(tile_rows=...)`, the steps are taken from `init` once
    more, on the mesh and on one device. Metrics, optimizer state and parameters must be equal bit
    for bit. The first leaf that differs is named with its step.

    **Large models**: the whole model and batch must fit one device. Check a reduced one with the
    same strategy: fewer layers, narrower ones, and short sequences.

    **Equivalence**: for a loss that is a (weighted) mean over rows the two agree up to summation
    order.

    **Communication**: as much as three steps and one evaluation; six steps with `tile_rows`.
    """
    batch = checked_batch("check", opt, state, batch)
    report = CheckReport(_differences(opt, state, batch, tolerance))
    print(report)
    wrong = [difference for difference in report.differences if difference.differs]
    if wrong:
        listed = [
            f"{diff.name}: {diff.relative:.1e}, of which {diff.tolerance:.1e} may be rounding"
            for diff in wrong
        ]
        problem = "the step is not that of one device on this batch; relative differences:"
        fix = (
            "see the remedies of NotSeparableError in the documentation of so.ddp: view='global' is"
            " exact for every loss. If that differs too, it is a fault of the strategy: report it."
        )
        if all(difference.is_of_bits for difference in wrong):
            fix = (
                "leave tile_rows out if rounding may depend on the mesh. On GPUs set"
                " XLA_FLAGS=--xla_gpu_deterministic_ops=true. Otherwise it is a fault of"
                " exact(tile_rows=...): report it."
            )
        raise NotSeparableError(format_error(opt.config.strategy, problem, listed, fix))
    return report


def _differences(
    opt: ShardedOptimizer, state: TrainState, batch: PyTree, tolerance: float | None
) -> tuple[Difference, ...]:
    instrumented = with_gradients(opt)
    config = instrumented.config
    layout = make_layout(config, abstract(state.params))
    comparison = Comparison(instrumented, layout, tolerance)
    if jax.process_count() > 1:
        batch = values_of(place_batch(config, batch))
    params = values_of(state.params)
    differences = list(comparison.first_state(params))
    state = comparison.start(state, params)
    differences += comparison.evaluation(state, params, batch)
    for rows in batches_of(config, batch, NUM_STEPS):
        state = comparison.step(state, rows, differences)
    if config.loss.tile_rows is not None:
        differences.append(compare_bits(opt, params, batches_of(config, batch, NUM_STEPS)))
    return largest(differences)
