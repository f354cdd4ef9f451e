"""`shardopt export`: write a checkpoint of a run as a folder of Hugging Face.

`shardopt generate` reads weights by the same functions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import optax

import shardopt as so
from shardopt.cli._optimizer import make_optimizer
from shardopt.cli._options import ExportOptions, RunOptions, TuneOptions, check_numbers
from shardopt.cli._run_folder import CHECKPOINTS, CONFIG, read_run
from shardopt.cli._train import decoder_config
from shardopt.cli._tune import open_model
from shardopt.core import PyTree, calling, value_error
from shardopt.core._extras import require
from shardopt.models import export_safetensors, from_pretrained, gpt
from shardopt.models._decoder_config import DecoderConfig


class Weights(NamedTuple):
    """Weights on all devices of this process.

    Attributes:
      config: the decoder.
      params: its parameters, with adapters merged.
      length: the most tokens that it has seen at a time.
      tokenizer: the tokenizer.json of its folder; None if there is none.
    """

    config: DecoderConfig
    params: PyTree
    length: int
    tokenizer: Path | None


Save = Callable[[Path], object]
"""`save(folder)` writes weights as they were trained: all of them, or adapters alone."""


@calling("export")
def export(options: ExportOptions) -> None:
    """Write the folder."""
    require("safetensors", extra="huggingface")
    check_numbers(options)
    _, save = _read_run(options.run_dir, options.step)
    save(options.output)
    print(f"{options.output} has the weights of {options.run_dir}.")


def read_weights(folder: Path, step: int | None) -> Weights:
    """Return the weights of a run, at a step, or of a folder of Hugging Face."""
    if (folder / CHECKPOINTS).is_dir():
        weights, _ = _read_run(folder, step)
        return weights
    require("safetensors", extra="huggingface")
    pretrained = from_pretrained(folder)
    opt = so.fsdp(optax.identity(), so.make_mesh(), pretrained.model, rules=pretrained.rules)
    params = pretrained.load(opt).params
    config = pretrained.config
    return Weights(config, params, config.max_length, _tokenizer(folder))


def _read_run(folder: Path, step: int | None) -> tuple[Weights, Save]:
    """Return the weights of a run, at a step or the newest, and the function that saves them."""
    if not ((folder / CHECKPOINTS).is_dir() and (folder / CONFIG).is_file()):
        fix = "name the --run-dir of a run of train or tune."
        raise value_error(f"there is no run in {str(folder)!r}.", fix=fix)
    options, _ = read_run(folder)
    if isinstance(options, TuneOptions):
        return _read_tuned(options, folder, step)
    config = decoder_config(options.model)
    opt = so.fsdp(_optimizer(options), so.make_mesh(), gpt.model(config), rules=gpt.rules)
    params = so.restore(folder / CHECKPOINTS, opt, step=step).params
    weights = Weights(config, params, options.model.length, tokenizer=None)
    return weights, lambda output: export_safetensors(output, params, config)


def _read_tuned(options: TuneOptions, folder: Path, step: int | None) -> tuple[Weights, Save]:
    tuned = open_model(options)
    opt = so.fsdp(_optimizer(options), so.make_mesh(), tuned.model, rules=tuned.rules)
    state = so.restore(
        folder / CHECKPOINTS,
        opt,
        step=step,
        abstract_params=tuned.abstract_params,
        # a checkpoint of adapters has a hash of their base
        params=tuned.start(opt, jax.random.key(0)).params if tuned.adapters else None,
    )
    params = jax.jit(tuned.adapters.merge)(state.params) if tuned.adapters else state.params
    config = tuned.pretrained.config
    tokenizer = _tokenizer(tuned.pretrained.folder)
    weights = Weights(config, params, config.max_length, tokenizer)
    return weights, lambda output: tuned.save(output, state.params)


def _optimizer(options: RunOptions) -> optax.GradientTransformation:
    """Return an optimizer whose state has the form of the run's."""
    training = options.training
    return make_optimizer(training.optimizer, learning_rate=1.0, steps=1, clip=training.clip)


def _tokenizer(folder: Path) -> Path | None:
    path = folder / "tokenizer.json"
    return path if path.is_file() else None
