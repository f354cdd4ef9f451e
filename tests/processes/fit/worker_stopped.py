"""A run that gets a signal: `python worker_stopped.py FOLDER PHASE`.

When the run is in the phase, FOLDER/arrived has the step that it has finished. See test_stops.py.
"""

import contextlib
import ctypes
import json
import queue
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401
from support.stops import NUM_STEPS, batch_of, loss_fn

import shardopt as so
from shardopt.checkpoint import _write
from shardopt.step import _compile

STOP_AT = 10
"""The step after which most phases come."""

_forever = []


def block_in_c():
    """Wait forever in C, without the interpreter lock; a signal does not end it."""
    mutex = ctypes.create_string_buffer(64)
    _forever.append(mutex)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class Run:
    """A run in one phase. A method with the name of the phase waits there."""

    def __init__(self, folder, phase):
        self.folder = Path(folder)
        self.phase = phase
        self.step = 0
        self.compile_at = -1

    def arrive(self, step):
        """Say that the run is in its phase, and that this step is finished."""
        file = self.folder / "arrived.partial"
        file.write_text(str(step))
        file.rename(self.folder / "arrived")

    def batches(self):
        for step in range(10**6):
            self.step = step
            if self.phase == "training" and step == STOP_AT:
                self.arrive(step)
            if self.phase == "training" and step > STOP_AT:
                time.sleep(0.01)
            if step == STOP_AT:
                getattr(self, f"draw_{self.phase}", lambda: None)()
            yield batch_of(step, 16 if self.phase == "compile" and step == STOP_AT else 8)

    def draw_data_sleep(self):
        self.arrive(self.step)
        time.sleep(600)

    def draw_data_queue(self):
        self.arrive(self.step)
        queue.Queue().get()

    def draw_data_c(self):
        self.arrive(self.step)
        block_in_c()

    def draw_data_swallows(self):
        self.arrive(self.step)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(600)

    def evaluate_sleep(self, state):
        if state.step == STOP_AT:
            self.arrive(STOP_AT)
            time.sleep(600)
        return {"val": 1.0}

    def evaluate_c(self, state):
        if state.step == STOP_AT:
            self.arrive(STOP_AT)
            block_in_c()
        return {"val": 1.0}

    def evaluate_generates(self, state):
        """Generate token after token, one call of a program each."""
        token = jnp.zeros(4)
        sample = jax.jit(lambda params, token: jnp.tanh(params["w"] * token + 1))
        while state.step == STOP_AT:
            token = sample(state.params, token).block_until_ready()
            if not (self.folder / "arrived").exists():
                self.arrive(STOP_AT)
        return {"val": float(token[0])}

    def evaluate_generates_at_once(self, state):
        """Generate all tokens in one program that takes minutes."""

        @jax.jit
        def generate(params):
            return jax.lax.fori_loop(
                0, 2**30, lambda _, x: jnp.tanh(params["w"] * x + 1), params["w"]
            )

        if state.step == STOP_AT:
            tokens = generate(state.params)
            self.arrive(STOP_AT)
            tokens.block_until_ready()
        return {"val": 1.0}

    def evaluate_batches(self, state):
        """Evaluate batch after batch, in a function of the user."""
        losses = []
        for number in range(1000 if state.step == STOP_AT else 2):
            if number == 3:
                self.arrive(STOP_AT)
            metrics = self.opt.evaluate(state, self.rows(batch_of(number)))
            losses.append(float(metrics["loss"]))
            time.sleep(0.5 if number > 2 else 0)
        return {"val": sum(losses) / len(losses)}

    def evaluate_wrapped(self, state):
        """Call an evaluation of shardopt, in a function of the user."""
        evaluate = so.training.evaluation(self.opt, self.rows(self.evaluation_batches()))
        return dict(evaluate(state))

    def evaluation_batches(self):
        run = self

        class Batches:
            def __iter__(self):
                for number in range(1000):
                    if run.step + 1 == STOP_AT:
                        if number == 3:
                            run.arrive(STOP_AT)
                        time.sleep(0.5 if number > 2 else 0)
                    elif number == 2:
                        return
                    yield batch_of(number)

        return Batches()

    def log_sleep(self, step, metrics):
        if step == STOP_AT:
            self.arrive(STOP_AT)
            time.sleep(600)


def blocking_compile(run):
    """Let the compiler wait when it compiles a step after `run.compile_at` steps."""
    lower = _compile.AotCompiled.lower

    def lower_or_block(self, *args):
        if self.donated is not None and run.step == run.compile_at:
            run.arrive(run.step)
            block_in_c()
        return lower(self, *args)

    _compile.AotCompiled.lower = lower_or_block


def arrive_in_restore(run):
    """Arrive when the checkpoint is read: `fit` handles signals by then."""
    restore = so.Checkpoints.restore

    def arrive_and_restore(*arguments, **options):
        run.arrive(STOP_AT)
        return restore(*arguments, **options)

    so.Checkpoints.restore = arrive_and_restore


def slow_write(run):
    """Let each write take a while, and say when a later one is under way."""
    write_meta = _write.write_meta

    def write_slowly(folder, meta):
        if meta.step >= 2 * STOP_AT:
            run.arrive(meta.step - 4)  # the write may be killed
        time.sleep(0.4)
        write_meta(folder, meta)

    _write.write_meta = write_slowly


def train(folder, phase, *, run_type=Run, is_blocked=True, rows=lambda batches: batches):
    """Train in one phase. This process waits in that phase if it is blocked."""
    run = run_type(folder, phase if is_blocked else "none")
    opt = so.fsdp(optax.adam(0.05), so.make_mesh(), loss_fn, min_shard_elements=1)
    options = {"num_steps": NUM_STEPS, "progress": False}
    run.opt = opt
    run.rows = rows

    def fit(every, keep=3, **fit_options):
        state = so.training.DeferredInit({"w": np.zeros(4, np.float32)})
        with so.Checkpoints(run.folder / "run", every=every, keep=keep) as checkpoints:
            return so.fit(
                opt, state, rows(run.batches()), checkpoints=checkpoints, **options | fit_options
            )

    if phase in ("restore", "first_compile"):
        run.phase = "before"
        fit(4, num_steps=STOP_AT)
        run.phase = phase
    if phase == "first_compile":
        opt = so.fsdp(optax.adam(0.05), so.make_mesh(), loss_fn, min_shard_elements=1)
    if phase in ("first_compile", "compile"):
        run.compile_at = STOP_AT
        blocking_compile(run)
    if phase == "restore":
        arrive_in_restore(run)
    fit_options = {}
    if phase.startswith("evaluate"):
        fit_options["evaluate"] = getattr(run, phase), 5
    if not is_blocked and "evaluate" in fit_options:
        fit_options["evaluate"] = (lambda state: {"val": 1.0}), 5
    if phase == "evaluation":
        fit_options["evaluate"] = so.training.evaluation(opt, rows(run.evaluation_batches())), 5
    if phase.startswith("log"):
        fit_options = {"log": getattr(run, phase), "log_every": 5}
    if phase == "save":
        slow_write(run)
    result = fit(4, **fit_options)
    print(json.dumps([result.step, result.stopped]), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    train(*sys.argv[1:])
