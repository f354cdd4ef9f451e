"""`shardopt tune`: fine-tune an open model on conversations with one command."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import shardopt as so
from shardopt import data
from shardopt.adapters import Lora, lora
from shardopt.adapters._peft import linear_weights, modules_of
from shardopt.cli import _display as display
from shardopt.cli._job import RunInFolder
from shardopt.cli._optimizer import make_optimizer
from shardopt.cli._options import TuneOptions
from shardopt.cli._run_folder import check_run_folder, checkpoint_settings
from shardopt.cli._strategy import check_options, make_strategy, mesh_of
from shardopt.core import (
    PyTree,
    Rules,
    TrainState,
    calling,
    error_text,
    leaves_with_paths,
    plural,
    value_error,
)
from shardopt.core._extras import require
from shardopt.data._corpus import Batch
from shardopt.models import Pretrained, decoder, from_pretrained
from shardopt.runtime._stored_programs import FOLDER_NAME, stored_programs
from shardopt.training._fit import FitResult

if TYPE_CHECKING:
    import grain

_LOSS_CHUNK = 512
"""Positions whose logits are held at a time: with vocabularies of 100,000 tokens logits are larger
than all else.
"""


class _Rows(NamedTuple):
    """The conversations of a run.

    Attributes:
      training: documents to train on.
      held_out: rows to evaluate.
      num_rows: rows of an epoch.
      text: a description, for people.
    """

    training: list[Batch]
    held_out: list[Batch]
    num_rows: int
    text: str

    def batches(self, length: int, batch_size: int, seed: int) -> "grain.IterDataset":
        """Return endless batches, with another order in each epoch."""
        import grain

        documents = grain.MapDataset.source(self.training).shuffle(seed=seed).repeat()
        return data.pack(documents, length).batch(batch_size, drop_remainder=True)

    def held_out_batches(self, batch_size: int) -> list[Batch]:
        """Return the batches to evaluate; rows without weight fill the last one."""
        missing = -len(self.held_out) % batch_size
        rows = [*self.held_out, *[jax.tree.map(np.zeros_like, self.held_out[0])] * missing]

        def stack(*rows):
            return np.stack(rows)

        starts = range(0, len(rows), batch_size)
        return [jax.tree.map(stack, *rows[i : i + batch_size]) for i in starts]


class _Tuned(NamedTuple):
    """An open model as it is trained.

    Attributes:
      pretrained: the model of the folder.
      adapters: its adapters, or None.
      dtype: the dtype of its files.
    """

    pretrained: Pretrained
    adapters: Lora | None
    dtype: np.dtype

    @property
    def model(self) -> Any:
        """The model, for a strategy."""
        return self.adapters.model if self.adapters else self.pretrained.model

    @property
    def rules(self) -> Rules:
        """The rules of the leaves."""
        return self.adapters.rules if self.adapters else self.pretrained.rules

    @property
    def abstract_params(self) -> PyTree:
        """The parameters as `jax.ShapeDtypeStruct`."""
        params = self.pretrained.abstract_params
        if self.adapters:
            return jax.eval_shape(self.adapters.init, params, jax.random.key(0))
        return params

    def start(self, opt: so.ShardedOptimizer, rng: jax.Array) -> TrainState:
        """Return the first train state, with the weights of the folder."""
        return (
            self.adapters.start(self.pretrained, opt, rng)
            if self.adapters
            else self.pretrained.load(opt, rng)
        )

    def save(self, folder: Path, params: PyTree) -> None:
        """Write the folder that transformers or peft loads."""
        if self.adapters:
            self.adapters.save(folder, params, model=self.pretrained)
        else:
            self.pretrained.save(folder, params, dtype=self.dtype)


@calling("tune")
def tune(options: TuneOptions) -> int:
    """Fine-tune, evaluate, and write a folder for transformers or peft.

    Return the exit code of the command.
    """
    training = options.training
    run = options.run
    _check(options)
    assert options.model.model is not None
    assert training.data is not None
    tuned = open_model(options)
    rows = _read_rows(options, tuned.pretrained.config.vocab_size)
    steps = training.steps or max(
        1, math.ceil(training.epochs * rows.num_rows / training.batch_size)
    )
    learning_rate = training.learning_rate or (2e-4 if tuned.adapters else 1e-5)
    tx = make_optimizer(
        training.optimizer, learning_rate=learning_rate, steps=steps, clip=training.clip
    )
    devices = jax.devices()
    mesh = mesh_of(options.where.mesh, devices, pipelined=options.is_hybrid)
    opt = make_strategy(options, tx, mesh, tuned.model, rules=tuned.rules)
    opt.specs(tuned.abstract_params)  # the display needs the shapes of the parameters

    screen = display.open_screen()
    num_bytes = training.data.stat().st_size
    _show(screen, options, opt, tuned, rows, learning_rate, steps)
    with stored_programs("tune", run.run_dir / FOLDER_NAME):
        hash_only = tuned.adapters.frozen if tuned.adapters else ()
        checkpoints = so.Checkpoints(**checkpoint_settings(run), hash_only=hash_only)
        job = RunInFolder(options, opt, screen, num_bytes, steps)
        batches = rows.batches(options.model.length, training.batch_size, training.seed)

        result = job.run(
            lambda: tuned.start(opt, jax.random.key(training.seed)),
            batches,
            rows.held_out_batches(training.batch_size),
            checkpoints,
        )
        if result.exit_code:
            return result.exit_code
        out = run.run_dir / ("adapters" if tuned.adapters else "model")
        if jax.process_index() == 0:
            shutil.rmtree(out, ignore_errors=True)  # from before a resume
        multihost_utils.sync_global_devices("the folder of the model is free")
        tuned.save(out, result.state.params)
        _show_result(screen, options, result, out)
    return 0


def _check(options: TuneOptions) -> None:
    """Refuse options that cannot work, as far as this is known without reading the model."""
    require("grain", extra="cli")
    require("safetensors", extra="huggingface")
    paths = {"--model": options.model.model, "--data": options.training.data}
    missing = [flag for flag, path in paths.items() if path is None]
    if missing:
        fix = "shardopt tune --model FOLDER --data tokens.jsonl"
        raise value_error(f"{' and '.join(missing)} must be given.", fix=fix)
    if not Path(str(options.model.model)).is_dir():
        problem = f"--model {options.model.model} is no folder."
        raise FileNotFoundError(error_text(problem, fix="download the model first."))
    check_run_folder(options)
    check_options(options)


def open_model(options: TuneOptions) -> _Tuned:
    """Read config.json and the headers of the weights, and describe the adapters."""
    model = options.model
    assert model.model is not None
    stored = np.dtype(from_pretrained(model.model).config.param_dtype)
    dtype = np.dtype(model.dtype or ("bfloat16" if stored == np.float16 else stored))
    pretrained = from_pretrained(
        model.model,
        param_dtype=None if model.lora_rank else jnp.float32,
        dtype=dtype,
        remat="full" if model.recompute_blocks else None,
        loss_chunk=min(_LOSS_CHUNK, model.length),
    )
    if model.lora_rank is None:
        return _Tuned(pretrained, None, stored)
    targets = (
        [f"^{leaf}$" for leaf in linear_weights(pretrained)]
        if model.lora_targets is None
        else [model.lora_targets]
    )
    adapters = lora(
        pretrained.model,
        rank=model.lora_rank,
        alpha=2 * model.lora_rank if model.lora_alpha is None else model.lora_alpha,
        dropout=model.lora_dropout,
        targets=targets,
        base=model.base,
        matrices=pretrained.matrices,
        rules=pretrained.rules,
        low_rank_products=True,
    )
    tuned = _Tuned(pretrained, adapters, stored)
    paths = [path for path, _ in leaves_with_paths(tuned.abstract_params)]
    modules_of(pretrained, {path.removesuffix("/lora_a") for path in paths if "/lora_a" in path})
    return tuned


def _read_rows(options: TuneOptions, vocab_size: int) -> _Rows:
    """Read the conversations, hold some of them out, and count the rows of an epoch."""
    training = options.training
    length = options.model.length
    assert training.data is not None
    conversations = data.read_tokens(training.data, vocab_size=vocab_size)
    documents = [document for document in conversations if len(document["tokens"]) <= length]
    count = len(documents)
    longest = max(len(document["tokens"]) for document in conversations)
    if count < 2:
        problem = (
            f"{plural(count, 'conversation')} of at most {length} tokens cannot be both trained on"
            f" and held out; the longest has {longest}."
        )
        raise value_error(problem, fix="add another one, or choose a larger --length.")
    order = np.random.default_rng(training.seed).permutation(count)
    num_held_out = min(max(1, round(training.validation * count)), count - 1)
    held_out = [documents[i] for i in order[:num_held_out]]
    trained = [documents[i] for i in order[num_held_out:]]
    num_rows = sum(1 for _ in data.pack(trained, length))
    text = (
        f"{plural(len(trained), 'conversation')} of {training.data} in {plural(num_rows, 'row')},"
        f" {num_held_out} held out"
    )
    if count < len(conversations):
        text += (
            f"; {len(conversations) - count} left out with more than {length} tokens (the longest"
            f" has {longest})"
        )
    return _Rows(trained, list(data.pack(held_out, length)), num_rows, text)


def _show(
    screen: Any,
    options: TuneOptions,
    opt: so.ShardedOptimizer,
    tuned: _Tuned,
    rows: _Rows,
    learning_rate: float,
    steps: int,
) -> None:
    total = decoder.num_parameters(tuned.pretrained.config)
    size_text = f"{tuned.pretrained.family}, {total / 1e6:.4g} million parameters"
    if tuned.adapters:
        trained = sum(
            math.prod(leaf.shape)
            for path, leaf in leaves_with_paths(tuned.abstract_params)
            if path.endswith(("/lora_a", "/lora_b"))
        )
        size_text += (
            f"; adapters of rank {tuned.adapters.rank} with {trained / 1e6:.4g} million on a base"
            f" in {tuned.adapters.base}"
        )
    first_rows = [
        ("model", size_text),
        ("data", rows.text),
        ("steps", f"{steps}, {steps * options.training.batch_size / rows.num_rows:.3g} epochs"),
    ]
    display.show_options(screen, options, opt, first_rows, "tokens", learning_rate)
    display.show_placement(screen, options, opt)


def _show_result(screen: Any, options: TuneOptions, result: FitResult, out: Path) -> None:
    display.show_loss(screen, result, "token")
    display.show_files(screen, options, result, out.name)
    saved_object = "model"
    call = "transformers.AutoModelForCausalLM"
    if out.name == "adapters":
        saved_object = "adapters"
        call = "peft.AutoPeftModelForCausalLM"
    display.say(screen, f"{call}.from_pretrained({str(out)!r}) loads the {saved_object}.")
