"""`find_nan`: name the operation, line, leaf, row and device of the first value of a step that is
not finite.
"""

import jax

from shardopt.config._layout import make_layout
from shardopt.core._errors import calling, value_error
from shardopt.core._tracebacks import api_boundary
from shardopt.core._types import PyTree, TrainState, abstract
from shardopt.diagnose._finding import NonFinite
from shardopt.diagnose._piece_loss import PieceLoss
from shardopt.diagnose._pieces import cuts_of, pieces_of, values_on_host
from shardopt.diagnose._search import search
from shardopt.step._global_rows import rows_of
from shardopt.step._inputs import check_batch, check_state
from shardopt.step._optimizer import ShardedOptimizer, check_is_strategy


@api_boundary
@calling("find_nan")
def find_nan(opt: ShardedOptimizer, state: TrainState, batch: PyTree) -> NonFinite | None:
    """Find the first operation of a step with a NaN or infinite result, and the leaf, row and
    device that it belongs to.

    Args:
      opt: a synchronous strategy; for `local_sgd` and `diloco`, the strategy inside.
      state: the train state before the bad step. It is not donated.
      batch: the global batch of this step.

    Returns:
      The finding; None if the loss, the values of `so.losses.Updated` and all gradients are finite. Then
      the optimizer made the value.

    Raises:
      TypeError: if `opt` is no `ShardedOptimizer`.
      ValueError: if each replica of the strategy trains by itself, the batch does not fit, or a
        loss with a random key reads the rows of other devices.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> def loss_fn(params, batch):
      ...     return jnp.mean(jnp.log(batch @ params["w"]))
      >>> opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), loss_fn)
      >>> batch = np.ones((16, 8), np.float32)
      >>> batch[5] = -1
      >>> found = so.find_nan(opt, opt.init({"w": jnp.ones(8)}), batch)
      >>> found.kind, found.direction, found.operation, found.leaf, found.rows, len(found.devices)
      ('NaN', 'forward', 'log', 'w', (5,), 1)

    The loss runs on one device: for the rows of each device and micro-batch, with the key of the
    step. In the global view it runs for the whole batch. Then its gradient does. The first bad
    piece runs operation by operation. Loops and calls are opened where they give such a value, so
    the search names a single operation, with the turns of the loops around it. An infinity that
    does not reach the loss or a gradient is no finding, such as the -inf of a mask. Then bad pieces
    are filled with copies of some of their rows, to find the rows that suffice.

    Aux metrics are not searched: to find the cause of one, search with a loss that returns it.

    On a context axis all positions get the key of the first device. A loss that reads the rows of
    other devices, by `so.losses.batch_mean` or `jax.lax.pmean`, runs for the whole batch. With a random
    key it is refused: search in the global view.

    **Memory**: parameters, gradients and the activations of a piece, on the first device of each
    process. If no piece is bad, the whole batch runs at once too.

    **jax_debug_nans**: with `jax.config.update("jax_debug_nans", True)`, `opt.step` and
    `opt.evaluate` raise a FloatingPointError in the per-device view too, if a result of the program
    is NaN. The traceback ends at the line of the loss. It names no operation, row or device, and
    infinities pass. `find_nan` turns it off while it searches.
    """
    check_is_strategy(opt)
    config = opt.config
    check_state(config, state)
    batch = rows_of(config, "find_nan").join(batch)
    check_batch(config, batch)
    if config.per_replica:
        problem = "replicas of this strategy train apart, each with its own parameters."
        raise value_error(problem, fix="search in the strategy that was combined.")
    layout = make_layout(config, abstract(state.params))
    cuts = cuts_of(config, layout, batch)
    pieces = list(pieces_of(config, state, batch, cuts))
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.set_mesh(None),
        jax.default_device(jax.local_devices()[0]),
    ):
        params, whole_batch = jax.tree.map(values_on_host, (state.params, batch))
        return search(PieceLoss(config, layout, cuts.hide_rows, params, whole_batch), pieces)
