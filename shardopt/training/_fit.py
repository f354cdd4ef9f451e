"""`fit`: the training loop."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import jax

from shardopt.checkpoint._checkpoints import Checkpoints, check_checkpoints
from shardopt.core import PyTree, TrainState, calling, check_count, check_flag
from shardopt.core._early_stopping import EarlyStopping, best, check_early_stopping
from shardopt.core._place import check_joined
from shardopt.core._tracebacks import api_boundary
from shardopt.runtime._turn import StopRun
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._arguments import (
    Arguments,
    check_batches,
    check_hash_only,
    check_optimizer_and_state,
    check_rounds,
    split_evaluate,
)
from shardopt.training._evaluation import Evaluate
from shardopt.training._goodput import Goodput
from shardopt.training._loggers import Log, as_loggers, metrics_text
from shardopt.training._norms import check_norms_every
from shardopt.training._profile import check_profile
from shardopt.training._resume import DeferredInit
from shardopt.training._run import begin
from shardopt.training._stop import EXIT_CODES
from shardopt.training._stream import END
from shardopt.training._verify import verification_of


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      state: the last train state; with local updates it is synchronized, so that its parameters are
        the mean of all replicas.
      step: total steps taken, including earlier runs.
      stopped: "completed" (num_steps reached), "early" (early stopping), "sigterm", "interrupted"
        (Ctrl-C) or "exhausted" (no more batches).
      history: the metrics that this call logged, `{"step": n, "loss": ..., ...}` each, without the
        norms of leaves.
      best: `{"step": n, metric: value}`, the best value that early stopping saw, including earlier
        runs; None without it.
      goodput: the share of time spent on steps that count; on the first process it includes earlier
        attempts.
    """

    state: TrainState
    step: int
    stopped: str
    history: list[dict[str, float]]
    best: dict[str, float] | None
    goodput: Goodput

    def __repr__(self) -> str:
        """Return a few lines without the arrays of the state."""
        lines = [f"FitResult: {self.stopped} at step {self.step}", str(self.goodput)]
        if self.history:
            lines.insert(1, f"last metrics: {metrics_text(self.history[-1])}")
        if self.best:
            lines.append(f"best: {metrics_text(self.best)}")
        num_elements = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        return "\n  ".join([*lines, f"state: {num_elements:,} parameters"])

    @property
    def exit_code(self) -> int:
        """The code for `sys.exit`: 143 after SIGTERM and 130 after Ctrl-C, as of a process that was
        killed by it; otherwise 0. So no scheduler takes the run for completed.
        """
        return EXIT_CODES.get(self.stopped, 0)


@api_boundary
@calling("fit")
def fit(
    opt: ShardedOptimizer,
    state: TrainState | DeferredInit,
    batches: Iterable[PyTree],
    *,
    num_steps: int,
    evaluate: Evaluate | tuple[Evaluate, int] | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoints: Checkpoints | None = None,
    log: Log | Sequence[Log] | None = None,
    log_every: int = 10,
    norms_every: int | None = None,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    cross_check_every: int | None = None,
) -> FitResult:
    """Train until `num_steps` total steps are taken, or something ends the run earlier.

    Each step is state, metrics = opt.step(state, batch). The host reads the loss of a step while
    the device computes the next one. It waits only for an evaluation, a checkpoint, early stopping
    on a training metric, and the end. So at most two steps are in progress.

    Args:
      opt: a strategy such as `so.ddp` or `so.fsdp`, or `so.local_sgd` or `so.diloco` of a strategy.
      state: the state to start from; its memory is reused for the next state. Or
        `so.training.DeferredInit(params)`, or `so.training.DeferredInit(init_fn, key)`: it is
        initialized only if no checkpoint is restored, so a restart saves that time.
      batches: an iterable of batches, pytrees with leaves [rows, ...]; drawn one at a time, never
        ahead. With several processes these are the rows of this process; or the rows of all, if
        each process has them: `so.GlobalRows(batches)`.
      num_steps: the total step count, as in `state.step`, to train to: from step 40 to 100 there
        are 60 steps to take.
      evaluate: `evaluate(state) -> {name: number}`, such as `so.training.evaluation(opt, batches)`;
        it runs with each checkpoint. Or a pair of it and the steps between evaluations: `(evaluate,
        100)`. A last evaluation runs at the end. It runs on every process and must not donate the
        state.
      early_stopping: when to stop; reads training metrics every `log_every` steps, other metrics at
        scheduled evaluations.
      checkpoints: where to save; a state that is not finite is never saved. If they are due by
        time, several processes save at the first multiple of `log_every` after it.
      log: `log(step, metrics)`, or several: `so.training.jsonl` or any function. With several
        processes only the first calls it, or all if `log.every_process` is True.
      log_every: steps between reports of `opt.step`'s metrics, steps_per_second,
        examples_per_second and goodput (`FitResult.goodput`). At these steps several processes
        agree whether early stopping ends the run.
      norms_every: steps between norms of the gradient, the update and the parameters, of each leaf
        and each layer of stacked blocks; by default none. The log gets
        "gradient_norm/PATH/layer_0", "update_norm/..." and "param_norm/...". Other steps stay as
        they are; these steps are a second compiled program. If norms are due in a verified step,
        the next step has them.
      progress: show a bar on a terminal, a second bar while `so.training.evaluation` runs, and
        lines elsewhere, on standard error. Messages about resuming are printed even if False.
      profile: (first, count): record a profile of `count` steps from step `first`, counted from 0,
        in the folder "profile" of the checkpoints, or of the working directory. Each process
        records its devices. Step n has the annotation "train" with the number n. SIGUSR1 to a
        process records a profile of its next five steps.
      cross_check_every: steps between verified steps. Such a step is computed on two devices each, and
        sums of the bits are compared. The step before each save and the last step are verified too.
        A difference ends the run before the state is used or saved. It costs another step, and
        memory for two more states. By default no step is verified.

    Returns:
      A `FitResult`.

    Raises:
      NonFiniteLossError: if the loss is NaN or infinite, at most one step later; or if an update
        made the state NaN or infinite. It is not raised for a step that `optax.apply_if_finite` or
        `so.transforms.skip_anomalies` skipped, until more of them than these allow come in a row. A
        skipped step is shown and logged with its batch.
      SilentCorruptionError: if a verified step, or the copies of a state, differ between devices.
        The process ends with code 117 if one of its devices is at fault, and `shardopt launch` goes
        on without it.
      TypeError: if an argument is of the wrong kind, or `evaluate` does not return a dict of
        numbers.
      RuntimeError: if the loader of another process fails.
      ValueError: if one of these is true:

        - the batches of several processes do not fit together;
        - a count is out of range, or the state was donated;
        - the folder has checkpoints and `checkpoints.resume` is not set;
        - the batches cannot be moved to the saved position;
        - a metric is not a scalar, or `evaluate` returns the name of a training metric;
        - early stopping watches an unknown metric;
        - `cross_check_every` is given, and a step cannot be computed on two devices;
        - `norms_every` is set, and the replicas of the strategy train apart;
        - a run with local updates would end before the first synchronization.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, shardopt as so
      >>> loss_fn = lambda params, batch: ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()
      >>> opt = so.ddp(optax.sgd(0.1), so.make_mesh(data=2, devices=jax.devices()[:2]), loss_fn)
      >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 3, np.float32)}
      >>> result = fit(opt, opt.init({"w": jnp.zeros(())}), [batch] * 50, num_steps=40, progress=False)
      >>> result.stopped, result.step, round(float(result.state.params["w"]), 3)
      ('completed', 40, 3.0)

    **Resuming.** If `checkpoints.resume` is set and a checkpoint is newer than `state`, train
    state, position in the batches and early stopping are restored. The run then equals an unbroken
    one (bit for bit on the same mesh).

    - Batches with a state continue from it: `get_state` and `set_state` (grain), or `state_dict` and
      `load_state_dict` (torchdata's StatefulDataLoader, `datasets`).
    - For other batches pass a fresh iterator; the batches already used are drawn and dropped. It
      must give the same order as before; if it does not, a UserWarning says so.
    - If batches have another number of rows than before, as many rows as before are drawn and
      dropped. A number of rows at which no batch ends is refused.
    - With several processes, each restores its own position.

    **End of the run.** It ends at `num_steps`, at early stopping, at SIGTERM, at a first Ctrl-C (a
    second one raises KeyboardInterrupt) and after the last batch. Then the step is finished, a last
    evaluation runs (not after a signal), and a checkpoint is written. Signals are noticed only in
    the main thread.

    A signal that comes while the loader, an evaluation, a logger or the compiler is at work does
    not wait for it. After 0.25 s a thread saves the state of the last step. Then the loader or the
    evaluation is left by an exception; a run that goes on from the checkpoint begins with this
    evaluation. A handler of your own is called after that, once the checkpoint is written.

    **Spikes.** An optimizer in `so.transforms.skip_anomalies` skips a step whose loss or gradient norm
    is far above the ones before.

    **Local updates** (`local_sgd`, `diloco`). Evaluations during the run use `state.params` as last
    synchronized. The returned state is `opt.synchronize` of the last state, and the last evaluation
    uses it. Checkpoints hold states before synchronization, so a resumed run equals an unbroken
    one.

    **Silent corruption.** With `cross_check_every` a run restores only a snapshot or checkpoint whose
    sums are right. A damaged checkpoint is renamed to `<step>.damaged`, and the next copy is used.

    **Several processes.** All call `fit` with the same arguments. Before each step they agree on
    the host that all have a batch, and that the rows fit together. If the batches of one process
    end, all stop, and a message names it. A signal or early stopping on one process stops all at
    the same step. If one of them does not get to its next step, threads on all save the last step. An `evaluate` of several processes is left before a
    batch of `opt.evaluate` or `so.training.evaluation`. The first process shows progress and writes logs.
    """
    check_joined()
    check_optimizer_and_state(opt, state)
    check_batches(batches)
    check_count("num_steps", num_steps, minimum=0)
    check_count("log_every", log_every)
    evaluate, evaluate_every = split_evaluate(evaluate)
    check_early_stopping(early_stopping)
    check_checkpoints(checkpoints)
    check_hash_only(opt, state, checkpoints)
    as_loggers(log)
    check_flag("progress", progress)
    check_rounds(opt, num_steps)
    check_profile(profile)
    check_norms_every(opt, norms_every, cross_check_every)
    arguments = Arguments(
        opt,
        num_steps,
        evaluate,
        evaluate_every,
        early_stopping,
        checkpoints,
        log_every,
        norms_every,
        profile,
        verification_of(opt, cross_check_every, checkpoints, num_steps, log_every),
    )
    with ExitStack() as cleanup:
        run = begin(cleanup, arguments, state, batches, log, progress=progress)
        del state  # a step donates it; parameters in a `DeferredInit` would stay in memory
        with suppress(StopRun):
            run.finish_restored_step()
            while (batch := run.next_batch()) is not END:
                run.take_step(batch)
                run.evaluate_and_save()
                run.agree()
        final_state = run.finish()
    run.ledger.write(ended_well=True)
    return FitResult(
        final_state,
        run.step,
        run.stopped or "completed",
        run.history,
        best(early_stopping, run.stopping_state),
        run.ledger.total(),
    )
