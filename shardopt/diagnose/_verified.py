"""A step that is computed twice: on its own devices, and on the same devices in another order.

`VerifiedStep` compiles the step once more, with sums of the bits (`core._checksum`) of all arrays
that each device reads, computes and writes. The same program compiled for devices in another order
gives each device the work of another one, bit for bit. So the sums of both runs are equal, position
by position, unless a device computes wrong.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._layout import Layout, shardings
from shardopt.config._user_mesh import put_on_auto_axes
from shardopt.core import Arrays, PyTree, TrainState, value_error
from shardopt.core._checksum import checksum, joined
from shardopt.losses._metrics import values
from shardopt.mesh import spec_axes, without_mesh
from shardopt.step._cache import LayoutCache
from shardopt.step._compile import AotCompiled, make_program
from shardopt.step._optimizer import Metrics, ShardedOptimizer, StepFn
from shardopt.step._step import make_step

STATE = "the state before the step"
GRADIENT = "the gradient of its own rows"
REDUCTION = "the reduction of the gradients"
METRICS = "the loss and the metrics"
UPDATE = "the update"
WRITTEN = "the state after the step"
"""What a device reads, computes and writes in a step, in order."""


class Column(NamedTuple):
    """A sum that each device sends.

    Attributes:
      phase: `STATE`, `GRADIENT`, `REDUCTION`, `METRICS`, `UPDATE` or `WRITTEN`.
      copies: the mesh axes along which the summed arrays are copies, which must be equal.
      together: the mesh axes along which devices exchange values before the sum, so that a wrong
        device makes the results of the others wrong.
    """

    phase: str
    copies: tuple[str, ...] = ()
    together: tuple[str, ...] = ()


class Evidence(NamedTuple):
    """The sums of one run of a step.

    Attributes:
      shift: the run gave position p of the mesh to the device at position p - shift.
      columns: the meaning of the columns.
      sums: uint64[positions, columns].
    """

    shift: int
    columns: tuple[Column, ...]
    sums: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class VerifiedStep:
    """The step of one parameter structure and one view, with sums.

    Attributes:
      config: of the strategy.
      layout: of the parameters.
      programs: the compiled programs by shift; None: the program that only sums a state.
    """

    config: StrategyConfig
    layout: Layout
    programs: dict[int | None, AotCompiled] = dataclasses.field(default_factory=dict)

    def run(
        self, state: TrainState, batch: PyTree, shift: int = 0
    ) -> tuple[TrainState, Metrics, Evidence]:
        """Take a step on the devices rolled by `shift`; keep the state. The batch is placed.

        With a shift, state and batch are moved first, and the results live on the rolled devices.
        """
        if shift:
            state, batch = moved(self.config, (state, batch), shift)
        state, metrics, sums = self.program(shift)(state, batch)
        return state, values(metrics), Evidence(shift, self.columns, _as_uint64(sums))

    def program(self, shift: int) -> AotCompiled:
        """Return the program of a shift."""
        if shift not in self.programs:
            self.programs[shift] = compile_with_sums(rolled(self.config, shift), self.layout)
        return self.programs[shift]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the sums."""
        config = self.config
        layout = self.layout
        state = _copies(config, jax.tree.leaves(layout.specs))
        grads = _copies(config, layout.reduce.grad_specs(config, layout))
        axes = tuple(axis for axis, size in config.mesh.shape.items() if size > 1)
        exchanging = tuple(axis for axis in axes if axis not in ("replica", "data"))
        # A gradient that is not summed before its reduction first shows after it, at all devices
        # that reduced it.
        is_partial = config.loss.view == "global" or (
            config.schedule is not None and config.placement.grads
        )
        return (
            *(Column(STATE, copies) for copies in state),
            Column(GRADIENT, together=exchanging),
            *(Column(REDUCTION, copies, axes if is_partial else ()) for copies in grads),
            Column(METRICS, *_copies(config, [PartitionSpec()])),
            *(Column(UPDATE, copies) for copies in _copies(config, _updated_specs(config, layout))),
            *(Column(WRITTEN, copies) for copies in state),
        )


_Views = dict[str, LayoutCache[VerifiedStep]]
_STEPS: weakref.WeakKeyDictionary[StepFn, _Views] = weakref.WeakKeyDictionary()
"""`opt.step` -> its steps with sums by view, so that a second run compiles nothing again."""


def verified_step(
    opt: ShardedOptimizer, state: TrainState, batch: PyTree
) -> tuple[VerifiedStep, PyTree]:
    """Check a state and a batch; return their step with sums, and the placed batch."""
    if opt.step not in _STEPS:
        _STEPS[opt.step] = {
            view: LayoutCache(opt.config.replace(view=view), VerifiedStep)
            for view in ("per_device", "global")
        }
    view, placed = opt.step.place(state, batch)
    return _STEPS[opt.step][view].of(state.params), placed


def state_sums(verified: VerifiedStep, state: TrainState) -> np.ndarray:
    """Return the sums of a state, uint64[positions, columns], as the columns of `STATE`."""
    config = verified.config
    specs = jax.tree.leaves(verified.layout.specs)
    if None not in verified.programs:

        def run(state: TrainState, _: None) -> jax.Array:
            return sums_of(config, jax.tree.leaves(state), specs)

        replicated = config.home.shardings(PartitionSpec())
        verified.programs[None] = make_program(
            config, run, (shardings(config.mesh, verified.layout.specs), None), replicated
        )
    return _as_uint64(verified.programs[None](state, None))


def _as_uint64(sums: jax.Array) -> np.ndarray:
    words = np.asarray(jax.device_get(sums)).astype(np.uint64)
    return words[..., 0] << np.uint64(32) | words[..., 1]


def rolled(config: StrategyConfig, shift: int) -> StrategyConfig:
    """Return the config with the devices of its mesh rolled."""
    if not shift:
        return config
    home = config.home._replace(mesh=_rolled_mesh(config.home.mesh, shift))
    return config._replace(mesh=_rolled_mesh(config.mesh, shift), user_mesh=home)


def _rolled_mesh(mesh: Mesh, shift: int) -> Mesh:
    devices = np.roll(mesh.devices.reshape(-1), shift).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def compile_with_sums(config: StrategyConfig, layout: Layout) -> AotCompiled:
    """Return the program `(state, batch) -> (state, metrics, sums)`.

    Sums are uint32[positions, columns, 2].
    """
    config = config._replace(sums=True)
    take_step = make_step(config, layout)
    state_specs = jax.tree.leaves(layout.specs)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree, jax.Array]:
        before = sums_of(config, jax.tree.leaves(state), state_specs)
        new_state, metrics, gradients, update = take_step(state, batch)
        scalars = jax.tree.leaves((gradients.loss, metrics))
        reduced = sums_of(
            config, jax.tree.leaves(gradients.grads), layout.reduce.grad_specs(config, layout)
        )
        reported = sums_of(config, scalars, [PartitionSpec()] * len(scalars))
        # ZeRO 1 and 2 gather the updated shards: a wrong one would then be wrong on all devices.
        shards = sums_of(
            config, layout.treedef.flatten_up_to(update.params), _updated_specs(config, layout)
        )
        after = sums_of(config, jax.tree.leaves(new_state), state_specs)
        own = jnp.zeros((config.mesh.size, 1, 2), jnp.uint32)
        # one for each group of devices along tensor, the last axis but for replicas
        if gradients.sums is not None:
            own = _for_each_position(config.mesh, gradients.sums)
        return (
            new_state,
            metrics,
            jnp.concatenate([before, own, reduced, reported, shards, after], axis=1),
        )

    in_shardings = shardings(config.mesh, layout.specs)
    out_shardings = config.home.shardings(layout.specs)
    replicated = config.home.shardings(PartitionSpec())
    return make_program(config, step, (in_shardings, None), (out_shardings, replicated, replicated))


def _for_each_position(mesh: Mesh, sums: jax.Array) -> jax.Array:
    """Return sums [axes without tensor..., 2] as [positions, 1, 2]."""
    dims = [dim for dim, axis in enumerate(mesh.axis_names) if axis == "tensor"]
    for dim in dims:
        sums = jnp.expand_dims(sums, dim)
    return jnp.broadcast_to(sums, (*mesh.devices.shape, 2)).reshape(mesh.size, 1, 2)


def sums_of(
    config: StrategyConfig, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> jax.Array:
    """Return a sum for each device and each set of axes along which leaves are copies:
    uint32[positions, sets, 2].

    The sums of the shards of all leaves add up to `joined` of the sums of the leaves.
    """
    mesh = config.mesh
    sets = _copies(config, specs)

    def local_sums(*shards: jax.Array) -> jax.Array:
        totals = {copies: jnp.zeros(2, jnp.uint32) for copies in sets}
        for number, (shard, leaf, spec) in enumerate(zip(shards, leaves, specs, strict=True)):
            (copies,) = _copies(config, [spec])
            total = checksum(
                shard,
                [_start(entry, size) for entry, size in zip(spec, shard.shape, strict=False)],
                leaf.shape,
            )
            totals[copies] = totals[copies] + joined([total], [number])
        return jnp.stack(list(totals.values()))[None]

    # The sums stand behind a barrier, so that they sum the arrays that the step reads or writes,
    # and not a copy that was computed apart.
    run = jax.shard_map(
        local_sums,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return run(*jax.lax.optimization_barrier(list(leaves)))


def _start(entry: str | tuple[str, ...] | None, size: int) -> jax.Array | int:
    """Return where the shard of this device starts in a dim."""
    axes = tuple(spec_axes((entry,)))
    return jax.lax.axis_index(axes) * size if axes else 0


def _copies(config: StrategyConfig, specs: Sequence[PartitionSpec]) -> list[tuple[str, ...]]:
    """Return the sets of mesh axes along which arrays with these specs are copies, each once."""
    sizes = config.mesh.shape
    return list(
        dict.fromkeys(
            tuple(axis for axis, size in sizes.items() if size > 1 and axis not in spec_axes(spec))
            for spec in specs
        )
    )


def _updated_specs(config: StrategyConfig, layout: Layout) -> list[PartitionSpec]:
    """Return the specs of the parameters as the update leaves them."""
    placement = config.placement
    return [
        plan.spec(sharded=placement.opt_state if plan.trainable else placement.params)
        for plan in layout.plans
    ]


def moved(config: StrategyConfig, tree: PyTree, shift: int) -> PyTree:
    """Return a tree of arrays on the user's mesh as the same arrays on the rolled mesh: each shard
    moves to one device.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    target = _rolled_mesh(config.home.mesh, shift)
    specs = tuple(_spec(leaves[i]) for i in arrays)
    with without_mesh():
        sent = move_program(config.home.auto, specs, shift)(
            *[put_on_auto_axes(leaves[i]) for i in arrays]
        )
    for i, leaf in zip(arrays, sent, strict=True):
        sharding = NamedSharding(target, _spec(leaves[i]))
        shards = [shard.data for shard in leaf.addressable_shards]
        leaves[i] = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=32)
def move_program(mesh: Mesh, specs: tuple[PartitionSpec, ...], shift: int) -> jax.stages.Wrapped:
    """Return the jitted function that sends each shard to the device `shift` positions before, by a
    permute.
    """
    size = mesh.size
    pairs = [(position, (position - shift) % size) for position in range(size)]

    def send(*shards: jax.Array) -> Arrays:
        return [jax.lax.ppermute(shard, mesh.axis_names, pairs) for shard in shards]

    return jax.jit(
        jax.shard_map(send, mesh=mesh, in_specs=specs, out_specs=list(specs), check_vma=False)
    )


def _spec(leaf: jax.Array) -> PartitionSpec:
    if isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding.spec
    problem = f"a leaf of the batch lives as {leaf.sharding}, which names no axes of the mesh."
    raise value_error(problem, fix="pass numpy arrays, or arrays with a NamedSharding.")
