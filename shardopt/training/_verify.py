"""`fit(cross_check_every=k)`: every k-th step is computed on two devices.

A difference ends the run before it is saved.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from shardopt.checkpoint._checkpoints import Checkpoints, is_save_due
from shardopt.checkpoint._sums import LeafSums, leaf_sums, total_of
from shardopt.core import (
    CORRUPTED,
    PyTree,
    SilentCorruptionError,
    TrainState,
    check_count,
    format_error,
    plural,
    value_error,
)
from shardopt.diagnose._verdict import (
    NAMED,
    NOT_DETERMINISTIC,
    ONE_OF,
    UNKNOWN,
    Verdict,
    judge,
    total,
    written,
)
from shardopt.diagnose._verified import STATE, Evidence, VerifiedStep, state_sums, verified_step
from shardopt.runtime._processes import use_exit_codes
from shardopt.step._optimizer import Metrics, ShardedOptimizer
from shardopt.training._hooks import Hook, TakeStep

SAVED = "the state to save"
"""What a checkpoint or snapshot is copied from, next to the phases of `diagnose._verified`."""

REPLAYS = (0, 1, 2)
"""The shifts of the three replays after a difference: the two runs again, and a third device for
each position.
"""


HEAD_START = 2.0
"""Seconds by which the process of a wrong device ends before the others, so that a launcher sees
its exit code.
"""


def verification_of(
    opt: ShardedOptimizer,
    every: int | None,
    checkpoints: Checkpoints | None,
    num_steps: int,
    log_every: int,
) -> "Verification | None":
    """Check the argument `cross_check_every` of `fit`; return the verification, or None if it is None.

    Raises:
      TypeError: if it is no integer.
      ValueError: if it is below 1, or the strategy cannot be verified.
    """
    if every is None:
        return None
    check_count("cross_check_every", every)
    config = opt.config
    problems = {
        "the mesh has one device, and no other one can compute the same": config.mesh.size == 1,
        f"the replicas of {config.strategy} train apart": config.local_updates is not None,
        "the state is offloaded to the host": bool(config.update.offload),
        "opt.step was replaced": not hasattr(opt.step, "place"),
    }
    if any(problems.values()):
        reasons = [reason for reason, holds in problems.items() if holds]
        fix = (
            "leave cross_check_every out, or use a synchronous strategy on several devices, without"
            " offload."
        )
        raise value_error(
            "cross_check_every computes a step on two devices, which cannot be done.", reasons, fix
        )
    use_exit_codes()
    return Verification(opt, every, checkpoints, num_steps, log_every)


@dataclasses.dataclass
class Verification(Hook):
    """Takes verified steps, and remembers the sums of the last state.

    Attributes:
      opt: the optimizer.
      every: steps between verified steps.
      checkpoints: the step before each save is verified too.
      num_steps: the last step is verified too.
      log_every: steps between agreements of the processes.
      recorded: the step and the sums of the state that the last verified step wrote, or None.
    """

    opt: ShardedOptimizer
    every: int
    checkpoints: Checkpoints | None
    num_steps: int
    log_every: int = 1
    recorded: tuple[int, np.ndarray] | None = None
    verified: VerifiedStep | None = None

    def due(self, step: int) -> bool:
        """Return whether the step from `step` to `step + 1` is verified."""
        number = step + 1
        checkpoints = self.checkpoints
        is_saved = is_save_due(checkpoints, number, agree_every=self.log_every)
        is_copied = checkpoints is not None and checkpoints.due_in_memory(number)
        return is_saved or is_copied or number % self.every == 0 or number == self.num_steps

    def before_step(self, step: int, position: int) -> TakeStep | None:
        """Take the step if it is verified."""
        if not self.due(step):
            return None
        return functools.partial(self.take_step, step=step, position=position)

    def take_step(
        self, state: TrainState, batch: PyTree, step: int, position: int
    ) -> tuple[TrainState, Metrics]:
        """Take a step on two devices each; raise `SilentCorruptionError` if they differ."""
        verified, placed = verified_step(self.opt, state, batch)
        self.verified = verified
        sizes = dict(verified.config.mesh.shape)
        new_state, metrics, first = verified.run(state, placed)
        runs = [first, verified.run(state, placed, 1)[2]]
        recorded = self._recorded(step)
        # Two runs, the second on the neighbours' devices. If they agree, the step costs no more
        # than that.
        verdict = judge(runs, sizes, recorded)
        if verdict is not None:
            is_stored = verdict.phase == STATE and judge(runs[:1], sizes, recorded) is not None
            # A replay reads the same stored bits again.
            for shift in () if is_stored else REPLAYS:
                runs.append(verified.run(state, placed, shift % verified.config.mesh.size)[2])
            self._fail(
                judge(runs, sizes, recorded) or verdict,
                step,
                f"at step {step} (batch {position}, both counted from 0)",
            )
        self.recorded = step + 1, written(first)
        return new_state, metrics

    def sums_to_save(self, state: TrainState, step: int) -> LeafSums:
        """Return the sums of the leaves of a state, for a checkpoint, after comparing it with the
        last verified step.

        If the last step was not verified, copies are compared with each other.
        """
        if self.verified is None:
            return leaf_sums(state)
        config = self.verified.config
        columns = [column for column in self.verified.columns if column.phase == STATE]
        sizes = dict(config.mesh.shape)
        recorded = self._recorded(step)
        stored = Evidence(0, tuple(columns), state_sums(self.verified, state))
        moment = f"after {plural(step, 'step')}"
        verdict = judge([stored], sizes, recorded)
        if verdict is not None:
            self._fail(verdict._replace(phase=SAVED), step, moment)
        sums = leaf_sums(state)
        # Two ways to the same number: a device that adds wrongly is noticed before its sums are
        # stored.
        if total_of(sums) != total(stored.sums, columns, sizes):
            self._fail(Verdict(SAVED, UNKNOWN, ()), step, moment)
        return sums

    def _recorded(self, step: int) -> np.ndarray | None:
        return self.recorded[1] if self.recorded is not None and self.recorded[0] == step else None

    def _fail(self, verdict: Verdict, step: int, moment: str) -> NoReturn:
        assert self.verified is not None
        devices = [
            self.verified.config.mesh.devices.flat[position] for position in verdict.positions
        ]
        processes = sorted({device.process_index for device in devices})
        message = corruption_text(verdict, devices, moment)
        exit_code = CORRUPTED if jax.process_index() in processes else 1
        if processes and exit_code != CORRUPTED:
            # The process with the faulty device ends first, so that its exit code is the one that
            # is seen.
            time.sleep(HEAD_START)
        ids = [device.id for device in devices]
        error = SilentCorruptionError(
            message,
            step=step,
            phase=verdict.phase,
            devices=ids,
            processes=processes,
            exit_code=exit_code,
        )
        raise error


def corruption_text(verdict: Verdict, devices: Sequence[Any], moment: str) -> str:
    """Return the message about a difference."""
    lines = [
        f"device {device.id} ({device.device_kind}, process {device.process_index})"
        for device in devices
    ]
    fix = (
        "take the host out of the job, and start again; shardopt launch --processes MIN:MAX does"
        " both."
    )
    if verdict.kind == NAMED:
        verb = "has" if len(devices) == 1 else "have"
        problem = (
            f"{plural(len(devices), 'device')} {verb} wrong bits in {verdict.phase}, {moment}."
        )
    elif verdict.kind == ONE_OF:
        problem = (
            f"one of {plural(len(devices), 'device')} has wrong bits in {verdict.phase}, {moment};"
            " the others cannot tell which."
        )
    elif verdict.kind == NOT_DETERMINISTIC:
        problem = (
            f"{verdict.phase} is not deterministic here: most devices get other bits when they"
            f" compute it again, {moment}."
        )
        fix = (
            "use deterministic operations (on GPUs XLA_FLAGS=--xla_gpu_deterministic_ops=true), or"
            " leave cross_check_every out."
        )
    else:
        problem = (
            f"a device has wrong bits in {verdict.phase}, {moment}; an exchange between devices"
            " hides which one."
        )
        fix = (
            "start again from the last checkpoint; if it happens again, test the devices one by"
            " one."
        )
    return format_error(
        "fit", f"{problem} The step is not used, and nothing was saved.", lines, fix
    )
