"""`skip_anomalies`: leave out a step whose loss or gradient norm is not finite, or far above the
last ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core import (
    PyTree,
    calling,
    check_count,
    check_number,
    check_transformation,
    states_of,
    type_error,
    wide_dtype,
)
from shardopt.core._axis import bound_axes
from shardopt.reducers._axis import as_varying, tracks_varying, varying
from shardopt.reducers._reducer import check_leaves
from shardopt.transforms._state_form import check_structure

WINDOW = 128
DEVIATIONS = 6.0
"""The steps that mean and deviation are taken over, and how many deviations above the mean an
anomaly is.
"""

SMALLEST_DEVIATION = 0.01
"""The least standard deviation, as a part of the mean: a loss that hardly moves has no spike of
rounding errors.
"""


class SkipAnomaliesState(NamedTuple):
    """The state of `skip_anomalies`.

    Attributes:
      losses: [window] float32, the losses of the last steps that were taken.
      norms: [window] float32, the gradient norms of the same steps.
      num_taken: int32, the number of steps that were taken since the window last started. Step i
        stands at i % window.
      skipped: bool, whether the last step was skipped.
      skipped_in_a_row: int32, the number of steps skipped since the last one that was taken.
      num_skipped: int32, the number of all steps skipped.
      hopeless: bool, whether more than `max_in_a_row` steps in a row were skipped. They were not
        finite, or one would have been taken.
      inner: the state of the wrapped transformation.
    """

    losses: jax.Array
    norms: jax.Array
    num_taken: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    num_skipped: jax.Array
    hopeless: jax.Array
    inner: PyTree


@calling("skip_anomalies")
def skip_anomalies(
    inner: optax.GradientTransformation,
    loss_z: float | None = DEVIATIONS,
    norm_z: float | None = DEVIATIONS,
    window: int = WINDOW,
    max_in_a_row: int = 10,
) -> optax.GradientTransformationExtraArgs:
    """Skip a step whose loss or gradient norm is not finite, or lies far above the last ones.

    Args:
      inner: the transformation of the steps that are taken, such as `optax.adamw(1e-3)`.
      loss_z: how many standard deviations a loss may be above the mean; None if finite losses are
        no anomalies.
      norm_z: the same for the norm of all gradients together.
      window: the number of steps that the mean and the deviation are taken over.
      max_in_a_row: after this many skipped steps in a row, a finite step is taken in any case, and
        the window starts again. Otherwise a loss that has reached another level would be skipped
        forever. `so.fit` ends the run, with an error, if more steps in a row are not finite.

    Returns:
      An optax transformation. Its `update` takes the loss as `value`, which every strategy passes.

    Raises:
      TypeError: if an argument is of the wrong kind. In `update`, if `loss_z` is set and there is
        no `value`.
      ValueError: if an argument is out of range. In `update`, if `inner` returns a state of another
        structure.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> tx = so.transforms.skip_anomalies(optax.sgd(1.0), window=4)
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (1.0, 1.1, 50.0, 0.9):
      ...     update, state = tx.update(jnp.array(gradient), state, value=jnp.array(2.0))
      ...     print(update, state.skipped)
      -1.0 False
      -1.1 False
      -0.0 True
      -0.9 False

    Let m and s be the mean and the standard deviation of the losses of the last `window` steps that
    were taken. A step is an anomaly if its loss is above m + loss_z max(s, |m| / 100). It is one
    too if its gradient norm is above the same bound of the norms with norm_z. The bounds hold once
    half of the window is full. A loss or norm that is NaN or infinite is an anomaly at every step.

    A skipped step leaves the parameters and the state of `inner` as they are, bit for bit: momenta,
    counters and keys. Its loss and norm do not enter the window.

    Put it outside of the whole chain, so that it sees the gradients that the loss gave.

    **Equivalence**: in every strategy the loss and the norm belong to the whole batch and to all
    parameters, so all devices and processes decide alike, as on one device. With local updates each
    replica decides by itself. In your own `shard_map` or `pmap` devices agree too: on the mean of
    their losses, and the root of the mean of their squared norms.

    **Placement**: 2 `window` + 5 numbers on every device, and the state of `inner`.

    **Communication**: an all-reduce of one number for the norm, and the communication of `inner`.
    In your own loop two numbers are all-reduced where devices differ. Skipped steps send the same.

    References:
      Chowdhery et al., "PaLM", 2022, section 5.1, on steps skipped at spikes.
    """
    tx = check_transformation("inner", inner)
    for name, z in (("loss_z", loss_z), ("norm_z", norm_z)):
        if z is not None:
            check_number(name, z, positive=True)
    check_count("window", window, minimum=2)
    check_count("max_in_a_row", max_in_a_row)

    def init(params):
        # An array for each field: a step that donates the state must not get one buffer twice.
        return SkipAnomaliesState(
            losses=jnp.zeros(window, jnp.float32),
            norms=jnp.zeros(window, jnp.float32),
            num_taken=jnp.zeros((), jnp.int32),
            skipped=jnp.array(False),
            skipped_in_a_row=jnp.zeros((), jnp.int32),
            num_skipped=jnp.zeros((), jnp.int32),
            hopeless=jnp.array(False),
            inner=tx.init(params),
        )

    @calling("skip_anomalies")
    def update(
        updates, state, params=None, *, value: jax.Array | None = None, **extra_args: PyTree
    ):
        check_leaves(updates)
        if value is None and loss_z is not None:
            fix = (
                "use loss_z=None, which judges the norm alone; or call update(grads, state, params,"
                " value=loss)."
            )
            raise type_error("update needs the loss.", fix=fix)
        loss = jnp.zeros((), jnp.float32) if value is None else jnp.asarray(value, jnp.float32)
        loss, norm = _agreed(loss, _norm(updates))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        filled = jnp.arange(window) < state.num_taken
        spike = _is_above(loss, state.losses, filled, loss_z) | _is_above(
            norm, state.norms, filled, norm_z
        )
        resigned = finite & spike & (state.skipped_in_a_row >= max_in_a_row)
        skipped = ~finite | (spike & ~resigned)

        if value is not None:
            extra_args["value"] = value
        # The update always runs and a select drops its results: devices send the same in every
        # step.
        inner_updates, inner_state = tx.update(updates, state.inner, params, **extra_args)
        # x + -0.0 has the bits of x, and -0.0 + 0.0 has not the bits of -0.0
        inner_updates = jax.tree.map(
            lambda u: jnp.where(skipped, jnp.full_like(u, -0.0), u), inner_updates
        )
        check_structure(state.inner, inner_state)
        inner_state = jax.tree.map(
            lambda old, new: jnp.where(skipped, old, new), state.inner, inner_state
        )

        # After many spikes in a row the level has changed: the window begins again at the new
        # level.
        num_before = jnp.where(resigned, 0, state.num_taken)
        # A ring: the newest loss overwrites the oldest. A skipped step overwrites none.
        place = (jnp.arange(window) == num_before % window) & ~skipped
        counted = skipped.astype(jnp.int32)
        skipped_in_a_row = counted * (state.skipped_in_a_row + 1)
        return inner_updates, SkipAnomaliesState(
            losses=jnp.where(place, loss, state.losses),
            norms=jnp.where(place, norm, state.norms),
            num_taken=jnp.where(skipped, num_before, optax.safe_increment(num_before)),
            skipped=skipped,
            skipped_in_a_row=skipped_in_a_row,
            num_skipped=jnp.where(
                skipped, optax.safe_increment(state.num_skipped), state.num_skipped
            ),
            hopeless=skipped_in_a_row > max_in_a_row,
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def unless_skipped(old_opt_state: PyTree, opt_state: PyTree, old: PyTree, new: PyTree) -> PyTree:
    """Return `new`, or `old` if a `skip_anomalies` skipped the step from the old state of the
    optimizer to the new one.

    Counts are compared: inside of `optax.MultiSteps` a flag still speaks of the last update, which
    may be steps ago.
    """
    if old is new or not (states := states_of(SkipAnomaliesState, opt_state)):
        return new
    old_states = states_of(SkipAnomaliesState, old_opt_state)
    pairs = zip(old_states, states, strict=True)
    skipped = jnp.stack([before.num_skipped != after.num_skipped for before, after in pairs]).any()
    return jax.tree.map(lambda x, y: jnp.where(skipped, x, y), old, new)


def _agreed(loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss, and the root of the mean of squared norms, of devices that differ.

    Devices that judged by their own numbers would take different steps, and their parameters would
    part. Types say along which axes devices differ. If they do not, all axes that are bound count:
    equal numbers stay equal.
    """
    axes = bound_axes()
    if not axes:
        return loss, norm
    if tracks_varying(axes):
        axes = tuple(varying(loss) | varying(norm))
        if not axes:
            return loss, norm
        loss, norm = (as_varying(x, axes) for x in (loss, norm))
    return jax.lax.pmean(loss, axes), jnp.sqrt(jax.lax.pmean(norm**2, axes))


def _norm(updates: PyTree) -> jax.Array:
    """Return the Euclidean norm of all leaves together, as float32.

    Squares are summed in float32 at least.
    """
    leaves = [x.astype(wide_dtype(x.dtype)) for x in jax.tree.leaves(updates)]
    squares = [jnp.sum(jnp.square(jnp.abs(x))).astype(jnp.float32) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _is_above(x: jax.Array, values: jax.Array, filled: jax.Array, z: float | None) -> jax.Array:
    """Return whether a number lies more than z deviations above the mean of the values that are
    filled in.
    """
    if z is None:
        return jnp.array(False)
    count = jnp.sum(filled)
    mean = jnp.sum(jnp.where(filled, values, 0)) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(filled, (values - mean) ** 2, 0)) / jnp.maximum(count, 1)
    deviation = jnp.maximum(jnp.sqrt(variance), SMALLEST_DEVIATION * jnp.abs(mean))
    return (2 * count >= values.size) & (x > mean + z * deviation)
