"""`shardopt train`: train a language model with one command."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import shardopt as so
from shardopt import data
from shardopt.cli import _display as display
from shardopt.cli._job import RunInFolder
from shardopt.cli._optimizer import make_optimizer
from shardopt.cli._options import ModelOptions, TrainOptions
from shardopt.cli._run_folder import check_run_folder, checkpoint_settings
from shardopt.cli._sample import continue_tokens
from shardopt.cli._strategy import check_options, fitted, make_strategy, mesh_of
from shardopt.core import PyTree, calling
from shardopt.core._extras import require
from shardopt.models import gpt
from shardopt.models._decoder_config import DecoderConfig
from shardopt.runtime._stored_programs import FOLDER_NAME, stored_programs

_VALIDATION_BATCHES = 4
_SAMPLE_BYTES = 400


def decoder_config(options: ModelOptions) -> DecoderConfig:
    """Return the model for these options. Their number of layers must be set."""
    assert options.layers is not None
    return gpt.config(
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_length=max(1024, options.length),
        precision=options.precision,
    )


class _Setup(NamedTuple):
    """A run before its first step.

    Attributes:
      options: the options, with a number of layers.
      mesh: the mesh.
      config: the model.
      tx: the optimizer.
      screen: the output for people.
      num_bytes: the size of the text.
      windows: the rows to train on.
      held_out: the rows to validate on.
    """

    options: TrainOptions
    mesh: Mesh
    config: DecoderConfig
    tx: optax.GradientTransformation
    screen: Console
    num_bytes: int
    windows: data.Windows
    held_out: data.Windows

    def batches(self) -> tuple[Iterable[PyTree], list[PyTree]]:
        """Return the batches to train on, and the batches to validate on."""
        training = self.options.training
        held_out = data.spread_batches(self.held_out, training.batch_size, _VALIDATION_BATCHES)
        batches = data.batches(self.windows, training.batch_size, seed=training.seed)
        if self.mesh.shape.get("context", 1) == 1:
            return batches, held_out
        # context splits positions, so inputs and targets need equal lengths
        return batches.map(data.next_token), [data.next_token(batch) for batch in held_out]


@calling("train")
def train(options: TrainOptions) -> int:
    """Train, validate and sample, and leave a run folder that can be resumed.

    Return the exit code of the command.
    """
    setup = _set_up(options)
    with stored_programs("train", options.run.run_dir / FOLDER_NAME):
        return _train(setup)


def _train(setup: _Setup) -> int:
    options = setup.options
    config = setup.config
    screen = setup.screen
    training = options.training
    opt = make_strategy(options, setup.tx, setup.mesh, gpt.model(config))
    init = functools.partial(gpt.init, config)
    initial_state = so.training.DeferredInit(init, jax.random.key(training.seed))
    opt.specs(initial_state.shapes())  # the display below needs the parameters' shapes
    display.show_run(screen, options, opt, setup.windows, setup.held_out)
    display.show_placement(screen, options, opt)
    batches, held_out_batches = setup.batches()
    job = RunInFolder(options, opt, screen, setup.num_bytes, training.steps)
    checkpoints = so.Checkpoints(**checkpoint_settings(options.run))
    result = job.run(lambda: initial_state, batches, held_out_batches, checkpoints)
    if result.exit_code:
        return result.exit_code
    prompt = setup.held_out[0]["tokens"][: max(1, options.model.length // 2)]
    tokens = continue_tokens(
        _on_one_device(result.state.params),
        config,
        prompt,
        num_tokens=_SAMPLE_BYTES,
        length=options.model.length,
        temperature=0.8,
        seed=training.seed,
    )
    text = data.decode(tokens[len(prompt) :])
    display.show_result(screen, options, result, data.decode(prompt), text)
    return 0


def _set_up(options: TrainOptions) -> _Setup:
    """Check the options, and open the text."""
    require("grain", extra="cli")
    check_run_folder(options)
    check_options(options)
    devices = jax.devices()
    mesh = mesh_of(options.where.mesh, devices, pipelined=options.is_hybrid)
    options = fitted(options, mesh)
    screen = display.open_screen()
    training = options.training
    corpus = data.open_corpus(training.data)
    windows, held_out = data.split(corpus, options.model.length)
    schedule = {"learning_rate": training.learning_rate, "steps": training.steps}
    tx = make_optimizer(training.optimizer, **schedule, clip=training.clip)
    return _Setup(
        options,
        mesh,
        decoder_config(options.model),
        tx,
        screen,
        corpus.num_bytes,
        windows,
        held_out,
    )


def _on_one_device(params: PyTree) -> PyTree:
    """Return parameters on one device of each process."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    replicated = jax.jit(lambda params: params, out_shardings=NamedSharding(mesh, PartitionSpec()))(
        params
    )
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), replicated)
