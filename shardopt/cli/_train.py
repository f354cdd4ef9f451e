"""`shardopt train`: train a language model with one command."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardopt as so
from shardopt import data
from shardopt.cli import _display as display
from shardopt.cli._communication import as_sent, measure
from shardopt.cli._models import TrainedModel, model_of
from shardopt.cli._options import TrainOptions, make_optimizer
from shardopt.cli._run_folder import (
    CHECKPOINTS,
    CURVE,
    METRICS,
    SCHEDULE,
    ConvertingCheckpoints,
    check_run_folder,
    keep_options,
    order_changes,
    read_metrics,
    write_options,
)
from shardopt.cli._strategy import check_strategy, fitted, make_base, make_strategy, mesh_of
from shardopt.core._errors import calling
from shardopt.core._extras import require
from shardopt.models import gpt
from shardopt.pipeline import Schedule
from shardopt.runtime._devices import start_devices

_VALIDATION_BATCHES = 4
_SAMPLE_BYTES = 400


@calling("train")
def train(options: TrainOptions) -> None:
    """Train, validate and sample, and leave a run folder that can be resumed."""
    for module in ("grain", "matplotlib"):
        require(module, extra="cli")
    check_run_folder(options)
    check_strategy(options)
    devices = start_devices(options.where.devices)
    replicas = options.communication.replicas
    mesh = mesh_of(options.where.mesh, devices, pipelined=options.is_hybrid, replicas=replicas)
    options = fitted(options, mesh)
    model, training, run = options.model, options.training, options.run
    assert model.layers is not None  # fitted
    screen = display.open_screen()

    corpus = data.open_corpus(training.data)
    windows, held_out = data.split(corpus, model.length)
    trained_model = model_of(model)
    tx = make_optimizer(
        training.optimizer, learning_rate=training.learning_rate, steps=training.steps, clip=training.clip
    )
    opt = make_strategy(options, tx, mesh, trained_model.block_model)
    initial_state = so.DeferredInit(trained_model.init, jax.random.key(training.seed))
    opt.specs(initial_state.shapes())  # the display below needs the parameters' shapes
    display.show_run(screen, options, opt, trained_model.size, windows, held_out)
    display.show_placement(screen, options, opt)
    if run.resume:
        display.show_order_changes(screen, order_changes(options, corpus.num_bytes))

    held_out_batches = data.spread_batches(held_out, training.batch_size, _VALIDATION_BATCHES)
    batches = data.batches(windows, training.batch_size, seed=training.seed)
    if mesh.shape.get("context", 1) > 1:  # context splits positions, so inputs and targets need equal lengths
        held_out_batches, batches = [data.next_token(batch) for batch in held_out_batches], batches.map(data.next_token)
    log = [so.training.jsonl(run.run_dir / METRICS)]
    if run.tensorboard:
        log.append(so.training.tensorboard(run.run_dir / "tensorboard"))
    log.append(lambda *_: keep_options(options, corpus.num_bytes))
    with ConvertingCheckpoints(
        run.run_dir / CHECKPOINTS,
        run.checkpoint_every,
        2,
        best="val_loss",
        resume=run.resume,
        memory_every=run.memory_every,
        base=make_base(options, tx, mesh, trained_model.block_model),
        abstract_params=jax.eval_shape(trained_model.init, jax.random.key(0)),
        say=lambda line: display.say(screen, line),
    ) as checkpoints:
        if jax.process_index() == 0:  # the folder is locked now
            write_options(options, corpus.num_bytes)
            write_schedule(opt.config.schedule, run.run_dir / SCHEDULE)
        result = so.fit(
            opt,
            initial_state,
            batches,
            num_steps=training.steps,
            evaluate=so.training.evaluation(opt, held_out_batches),
            evaluate_every=run.evaluate_every,
            checkpoints=checkpoints,
            log=log,
        )
    if result.stopped in ("sigterm", "interrupted"):
        display.show_stopped(screen, options, result)
        return

    prompt = held_out[0]["tokens"][: max(1, model.length // 2)]
    text = continue_text(result.state.params, trained_model, prompt, num_bytes=_SAMPLE_BYTES, seed=training.seed)
    if jax.process_index() == 0:
        display.draw_curve(read_metrics(run.run_dir), run.run_dir / CURVE)
    traffic = None
    if result.history:
        final_opt, state = opt, result.state
        if options.communication.reducer_warmup_steps:
            # a program with a warm-up holds both the exact and the reduced means
            final_opt = make_strategy(as_sent(options, result.step), tx, mesh, trained_model.block_model)
            state = final_opt.abstract_state(jax.eval_shape(lambda: result.state.params))
        traffic = measure(final_opt, state, held_out_batches[0])
    display.show_result(screen, options, result, data.decode(prompt), text, traffic)


def write_schedule(schedule: Schedule | None, path: Path) -> None:
    """Draw the schedule of the current strategy; without one, remove the drawing of an earlier run."""
    if schedule is None:
        path.unlink(missing_ok=True)
    else:
        schedule.plot(path)


def continue_text(params: gpt.Params, model: TrainedModel, prompt: np.ndarray, *, num_bytes: int, seed: int) -> str:
    """Return a continuation of a prompt by the model, computed on one device of each process.

    The model writes as many bytes as the prompt has, then continues from these, and so on. All steps use one compiled
    program, over windows of twice the prompt's length.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    replicated = jax.jit(lambda params: params, out_shardings=NamedSharding(mesh, PartitionSpec()))(params)
    local_params = jax.tree.map(lambda leaf: leaf.addressable_data(0), replicated)
    pieces, window = [], prompt[None]
    for index in range(-(-num_bytes // len(prompt))):
        rng = jax.random.fold_in(jax.random.key(seed), index)
        tokens = model.sample(local_params, window, rng, num_tokens=len(prompt), temperature=0.8)
        window = np.asarray(tokens)[:, len(prompt) :]
        pieces.append(window[0])
    return data.decode(np.concatenate(pieces)[:num_bytes])
