"""Rows that train a small model with a strategy on a mesh, and compare every device with training
on one device.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from shardopt.config._program_check import ProgramCheck
from shardopt.core import PyTree, WrongProgramError
from shardopt.diagnose._same_bits import compare_bits
from shardopt.hlo import check_proved
from shardopt.mesh import make_mesh
from shardopt.pipeline import schedules
from shardopt.reducers import exact
from shardopt.step._global_rows import GlobalRows
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.strategies._ddp import ddp
from shardopt.strategies._fsdp import fsdp
from shardopt.strategies._hybrid import hybrid
from shardopt.strategies._zero import zero
from shardopt.verify._devices import check_order
from shardopt.verify._problems import (
    LENGTH,
    OPTIMIZERS,
    SET_BY_LOSS,
    STEPS,
    Problem,
    make_problem,
    train_on_one_device,
)
from shardopt.verify._rows import (
    Devices,
    Measurement,
    NotRun,
    Row,
    agree,
    device_names,
    mesh_sizes,
    tolerance,
)

_ROWS_PER_DEVICE = 8
_LEAST_ROUNDINGS = 4096
_MOE_TOLERANCE_ON_ACCELERATORS = 0.05
"""Kernels for grouped products of TPUs and GPUs may round their operands to half precision (4e-3
each).
"""

_STRATEGIES: dict[str, Callable[..., ShardedOptimizer]] = {
    "ddp": ddp,
    "zero1": functools.partial(zero, stage=1, min_shard_elements=8),
    "zero2": functools.partial(zero, stage=2, min_shard_elements=8),
    "fsdp": functools.partial(fsdp, min_shard_elements=8),
    "hybrid": functools.partial(hybrid, min_shard_elements=8),
}


class Training(NamedTuple):
    """A row of the table.

    Attributes:
      strategy: name of the strategy.
      axes: sizes of mesh axes; data takes all other devices.
      optimizer: name of the optimizer.
      model: name of the model.
      options: further arguments of the strategy.
    """

    strategy: str
    axes: Mapping[str, int]
    optimizer: str = "momentum"
    model: str = "gpt"
    options: Mapping[str, Any] = {}

    def __str__(self) -> str:
        """Return `fsdp tensor=2, gpt, adamw`."""
        layout = " ".join([self.strategy, *(f"{axis}={n}" for axis, n in self.axes.items())])
        words = [layout, self.model, self.optimizer]
        words += [
            f"{name}={_short(value)}"
            for name, value in self.options.items()
            if name != "micro_batches" or "pipeline" not in self.axes
        ]
        return ", ".join(words)


def _short(value: object) -> str:
    if isinstance(value, functools.partial):
        return f"{_short(value.func)} x {next(iter(value.keywords.values()))}"
    return getattr(value, "__name__", str(value))


_SYNCHRONOUS = ("ddp", "zero1", "zero2", "fsdp")
_PIPELINE = {"micro_batches": 4}
_GLOBAL = {"view": "global"}
_INTERLEAVED = functools.partial(schedules.interleaved, num_chunks=2)

FIRST = (
    *(Training(strategy, {}, model="odd sizes") for strategy in _SYNCHRONOUS),
    Training("fsdp", {}, "adamw", options={"micro_batches": 2}),
    Training("hybrid", {"pipeline": 2}, options=_PIPELINE),
    Training("fsdp", {"tensor": 2}, "adamw"),
    Training("fsdp", {"replica": 2}, "adamw"),
    Training("fsdp", {"context": 2}, "adamw"),
    Training("fsdp", {"expert": 2}, "adamw", "moe"),
    Training("fsdp", {}, "adamw", "loss that mixes rows", _GLOBAL),
    Training(
        "hybrid",
        {"pipeline": 2, "tensor": 2},
        "adamw",
        options={**_PIPELINE, "schedule": _INTERLEAVED},
    ),
    Training("fsdp", {}, "lamb", options={"micro_batches": 2}),
)
"""One row for each strategy and for each mesh axis, the most important first; small models first.
"""

_SCHEDULES = (
    schedules.gpipe,
    schedules.one_f_one_b,
    schedules.zero_bubble,
    schedules.zero_bubble_lockstep,
    schedules.zero_bubble_v,
    schedules.dual_pipe_v,
    functools.partial(schedules.looped_breadth_first, num_chunks=2),
)
_AXES = ({"tensor": 2}, {"replica": 2}, {"context": 2}, {"replica": 2, "tensor": 2})

SECOND = (
    *(
        Training("hybrid", {"pipeline": 2}, options={**_PIPELINE, "schedule": schedule})
        for schedule in _SCHEDULES
    ),
    *(
        Training(strategy, {}, optimizer)
        for optimizer in ("momentum", "adamw", "lamb")
        for strategy in _SYNCHRONOUS
    ),
    *(
        Training(strategy, {}, "muon", options={"opt_state": "matrices"})
        for strategy in ("zero1", "fsdp")
    ),
    *(Training(strategy, axes) for axes in _AXES for strategy in _SYNCHRONOUS),
    *(Training(strategy, {"expert": 2}, model="moe") for strategy in ("ddp", "zero1", "zero2")),
    Training("hybrid", {"pipeline": 2, "expert": 2}, model="moe", options=_PIPELINE),
    Training("hybrid", {"pipeline": 2, "context": 2}, options=_PIPELINE),
    *(
        Training("hybrid", {"pipeline": 2}, options={**_PIPELINE, "placement": placement})
        for placement in _SYNCHRONOUS[:3]
    ),
    *(
        Training(strategy, {}, optimizer, "odd sizes", {"micro_batches": 2})
        for strategy, optimizer in itertools.product(_SYNCHRONOUS, ("momentum", "lamb"))
    ),
    *(
        Training(strategy, {}, model="loss that mixes rows", options=_GLOBAL)
        for strategy in _SYNCHRONOUS
    ),
)


def training_rows(table: tuple[Training, ...]) -> list[Row]:
    """Return the rows of a table."""
    return [
        Row("training", str(training), functools.partial(measure_training, training))
        for training in table
    ]


def same_training_rows() -> list[Row]:
    """Return the row that compares the bits of training on all devices and on one."""
    training = Training("fsdp", {}, "adamw")
    return [Row("same bits", f"training: {training}", functools.partial(measure_bits, training))]


def measure_bits(training: Training, devices: Devices) -> Measurement:
    """Train with sums in one order, and compare the bits with one device."""
    check_order(devices)
    size = len(devices)
    if size.bit_count() != 1:  # it is no power of 2
        raise NotRun("did not fit", f"it needs 1, 2, 4, 8, ... devices, and there are {size}")
    problem = make_problem(training.model, _ROWS_PER_DEVICE * size)
    reducer = exact(tile_rows=_ROWS_PER_DEVICE)
    opt = _strategy_of(training, problem, make_mesh(devices=devices), reducer=reducer)
    difference = compare_bits(opt, problem.params, problem.batches)
    return Measurement(not difference.differs, difference.name, {})


def allowed_difference(training: Training, platform: str, num_rows: int) -> float:
    """Return the largest relative difference of an update that counts as rounding.

    A sum of n numbers in any order is off by at most n times the machine epsilon. The longest sums
    are over the positions of the global batch, and each step adds its own. Optimizers that divide
    by the size of the gradient amplify the rounding of a small batch, so there is a least
    tolerance. Muon's iteration multiplies small singular values, and their rounding, by up to 3.44
    in each of five turns. Measured differences were 3 times the tolerance, so Muon gets 10 times as
    much.
    """
    if training.model == "moe" and platform != "cpu":
        return _MOE_TOLERANCE_ON_ACCELERATORS
    factor = 10 if training.optimizer == "muon" else 1
    return factor * tolerance("float32", max(STEPS * num_rows * LENGTH, _LEAST_ROUNDINGS))


def measure_training(training: Training, devices: Devices) -> Measurement:
    """Train, and compare the losses and the updates of all parameters with one device."""
    platform = devices[0].platform
    sizes = mesh_sizes(training.axes, devices)
    num_rows = _ROWS_PER_DEVICE * len(devices)
    with jax.default_matmul_precision("highest"):
        problem = make_problem(training.model, num_rows)
        expected_params, expected_losses = train_on_one_device(
            training.model, training.optimizer, num_rows
        )
        params, losses, wrong = _train(training, problem, make_mesh(**sizes, devices=devices))
    differences = agree(device_differences(params, expected_params, problem.params, devices))
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
    allowed = allowed_difference(training, platform, num_rows)
    worst = float(np.max(differences))
    passed = bool(worst <= allowed and loss <= allowed) and not wrong
    detail = f"{max(worst, loss):.1e} of {allowed:.1e}"
    if not worst <= allowed:
        detail += f", on {device_names([devices[int(np.argmax(differences))]])}"
    numbers = {
        "update_difference": worst,
        "loss_difference": loss,
        "tolerance": allowed,
        "mesh": sizes,
    }
    if wrong:
        numbers["wrong_program"] = wrong
    return Measurement(passed, detail, numbers)


def _train(training: Training, problem: Problem, mesh: Mesh) -> tuple[PyTree, list[float], str]:
    """Return the trained parameters, the losses and why a program is wrong."""
    try:
        return (*_train_checked(training, problem, mesh, check_proved), "")
    except WrongProgramError as error:
        return (*_train_checked(training, problem, mesh, None), str(error))


def _train_checked(
    training: Training, problem: Problem, mesh: Mesh, check: ProgramCheck | None
) -> tuple[PyTree, list[float]]:
    opt = _strategy_of(training, problem, mesh, check=check)
    with warnings.catch_warnings():
        # the comparison with one device covers the cases that the proof of a program leaves open
        warnings.filterwarnings("ignore", message="(?s).*check_proved proves all but")
        state = opt.init(problem.params)
        losses = []
        for batch in problem.batches:
            state, metrics = opt.step(state, GlobalRows(batch))
            losses.append(float(metrics["loss"]))
    return state.params, losses


def _strategy_of(
    training: Training, problem: Problem, mesh: Mesh, **options: Any
) -> ShardedOptimizer:
    tx = OPTIMIZERS[training.optimizer]()
    options |= {**problem.options, **training.options}
    return _STRATEGIES[training.strategy](tx, mesh, problem.loss_fn, **options)


def device_differences(
    params: PyTree, expected: PyTree, initial: PyTree, devices: Devices
) -> np.ndarray:
    """Return for each device the largest difference of a shard that it holds, relative to the
    largest update of its leaf.

    An update of less than a hundredth of its parameters counts as a hundredth: below it their own
    rounding shows. Devices of other processes have 0. Leaves that the loss sets itself are left
    out.
    """
    differences = np.zeros(len(devices))
    trees = (
        {name: leaf for name, leaf in tree.items() if name not in SET_BY_LOSS}
        for tree in (params, expected, initial)
    )
    for leaf, target, start in zip(*map(jax.tree.leaves, trees), strict=True):
        update = np.max(np.abs(np.asarray(target, np.float64) - start))
        scale = max(update, np.max(np.abs(start)) / 100) or 1.0
        for shard in leaf.addressable_shards:
            errors = np.abs(np.asarray(shard.data, np.float64) - target[shard.index])
            position = devices.index(shard.device)
            differences[position] = np.maximum(
                differences[position], np.max(errors, initial=0.0) / scale
            )
    return differences
