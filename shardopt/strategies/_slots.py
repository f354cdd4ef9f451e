"""Who fills the slots of a step: the core itself, unless an option asks for another filling."""

from collections.abc import Callable, Sequence

from shardopt.collectives import LeafWire
from shardopt.config._config import StrategyConfig, WireOptions
from shardopt.config._slots import OptimizerUpdate, Reduce, StepSlots, Wire
from shardopt.core._block_model import as_block_model
from shardopt.core._rounding import Rounding
from shardopt.losses._global_view import GlobalView
from shardopt.losses._sums import leaf_wire, sum_parts
from shardopt.partition import LeafPlan
from shardopt.remat._gathered_block import BlockRemat, kept_by_jax
from shardopt.step._gradients import MicroBatches, PerDeviceView, exact_sum
from shardopt.step._update import PlainUpdate

# Packages that few strategies need are imported where an option asks for them.


def own_slots(config: StrategyConfig) -> StepSlots:
    """Return the slots of a strategy without a pipeline."""
    # The core's own filling of each slot; each helper looks at one option and may replace it.
    slots = StepSlots(
        differentiate={
            "per_device": PerDeviceView(MicroBatches(), sum_parts),
            "global": GlobalView(),
        },
        reduce=_reduce(config),
        update=_update(config),
        wire=_wire(config),
        remat=_remat(config),
    )
    if config.loss.tile_rows is None:
        return slots
    from shardopt.step._same_bits import same_bits

    return same_bits(config, slots)


def _reduce(config: StrategyConfig) -> Callable[[StrategyConfig, Sequence[LeafPlan]], Reduce]:
    if config.wire.reducer is None:
        return exact_sum
    from shardopt.step._compressed import compressed_mean

    return compressed_mean


def _wire(config: StrategyConfig) -> Wire:
    losses = (config.loss.loss_fn, config.loss.evaluate_fn)
    models = [as_block_model(loss_fn) for loss_fn in losses if loss_fn is not None]
    if not any(model is not None and model.rounded for model in models):
        return leaf_wire
    from shardopt.low_precision._weight import wire_form

    def rounded_wire(
        wire: WireOptions, plan: LeafPlan, rounding: Rounding | None = None
    ) -> LeafWire:
        # None for a weight that the model does not name, or that stays whole: it travels as it is.
        return leaf_wire(wire, plan)._replace(form=wire_form(plan.dim, plan.tensor, rounding))

    return rounded_wire


def _remat(config: StrategyConfig) -> BlockRemat:
    if as_block_model(config.loss.loss_fn) is None:
        return kept_by_jax  # never called: a loss without blocks has none
    from shardopt.remat._min_cut import min_cut_remat

    return min_cut_remat


def _update(config: StrategyConfig) -> OptimizerUpdate:
    # With both options the whole state comes from the host first: `plan_stream` refuses owned
    # state.
    update: OptimizerUpdate = PlainUpdate()
    if config.placement.opt_state and config.layout.opt_state_layout == "matrices":
        from shardopt.matrices._owned_update import OwnedUpdate

        update = OwnedUpdate()
    if "opt_state" in config.update.offload:
        from shardopt.matrices._streamed_update import StreamedUpdate

        update = StreamedUpdate(update)
    return update
