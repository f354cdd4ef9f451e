"""`shardopt train`: train a language model with one command."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
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
from shardopt.cli._strategy import check_options, fitted, make_strategy, mesh_of
from shardopt.core import PyTree, calling, plural
from shardopt.core._block_model import BlockModel
from shardopt.core._extras import require
from shardopt.models import gpt, sample
from shardopt.runtime._stored_programs import FOLDER_NAME, stored_programs

_VALIDATION_BATCHES = 4
_SAMPLE_BYTES = 400


class TrainedModel(NamedTuple):
    """A model of a certain shape.

    Attributes:
      block_model: the model with its loss.
      init: `init(rng)` returns its parameters.
      sample: `sample(params, prompt, rng, num_tokens=, temperature=)`.
      size: a description of its size, for people.
    """

    block_model: BlockModel
    init: Callable[[jax.Array], PyTree]
    sample: Callable[..., jax.Array]
    size: str


def model_of(options: ModelOptions) -> TrainedModel:
    """Return the model for these options. Their number of layers must be set."""
    assert options.layers is not None
    config = gpt.config(
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_length=max(1024, options.length),
        precision=options.precision,
    )
    return TrainedModel(
        gpt.model(config),
        functools.partial(gpt.init, config),
        lambda params, *args, **kwargs: sample(params, config, *args, **kwargs),
        f"{gpt.num_parameters(config) / 1e6:.2f} million parameters:"
        f" {plural(options.layers, 'block')} of width {options.dim},"
        f" {plural(options.heads, 'head')}",
    )


class _Setup(NamedTuple):
    """A run before its first step.

    Attributes:
      options: the options, with a number of layers.
      mesh: the mesh.
      model: the model.
      tx: the optimizer.
      screen: the output for people.
      num_bytes: the size of the text.
      windows: the rows to train on.
      held_out: the rows to validate on.
    """

    options: TrainOptions
    mesh: Mesh
    model: TrainedModel
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
    model = setup.model
    screen = setup.screen
    training = options.training
    opt = make_strategy(options, setup.tx, setup.mesh, model.block_model)
    initial_state = so.training.DeferredInit(model.init, jax.random.key(training.seed))
    opt.specs(initial_state.shapes())  # the display below needs the parameters' shapes
    display.show_run(screen, options, opt, model.size, setup.windows, setup.held_out)
    display.show_placement(screen, options, opt)
    batches, held_out_batches = setup.batches()
    job = RunInFolder(options, opt, screen, setup.num_bytes, training.steps)
    checkpoints = so.Checkpoints(**checkpoint_settings(options.run))
    result = job.run(lambda: initial_state, batches, held_out_batches, checkpoints)
    if result.exit_code:
        return result.exit_code
    prompt = setup.held_out[0]["tokens"][: max(1, options.model.length // 2)]
    text = continue_text(
        result.state.params, model, prompt, num_bytes=_SAMPLE_BYTES, seed=training.seed
    )
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
        options, mesh, model_of(options.model), tx, screen, corpus.num_bytes, windows, held_out
    )


def continue_text(
    params: PyTree, model: TrainedModel, prompt: np.ndarray, *, num_bytes: int, seed: int
) -> str:
    """Return a continuation of a prompt by the model, computed on one device of each process.

    The model writes as many bytes as the prompt has, then continues from these, and so on. All
    steps use one compiled program, over windows of twice the prompt's length.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    replicated = jax.jit(lambda params: params, out_shardings=NamedSharding(mesh, PartitionSpec()))(
        params
    )
    local_params = jax.tree.map(lambda leaf: leaf.addressable_data(0), replicated)
    pieces = []
    window = prompt[None]
    for index in range(-(-num_bytes // len(prompt))):
        rng = jax.random.fold_in(jax.random.key(seed), index)
        tokens = model.sample(local_params, window, rng, num_tokens=len(prompt), temperature=0.8)
        window = np.asarray(tokens)[:, len(prompt) :]
        pieces.append(window[0])
    return data.decode(np.concatenate(pieces)[:num_bytes])
