"""The options of `shardopt train` and `tune`: one dataclass per group of their help, one field per
option, with its type, check, default and meaning.

`--help` leaves out the options that are `More`, which `--help-all` shows.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_type_hints

import tyro

from shardopt.config._config import PlacementName
from shardopt.config._options import OPTIONS
from shardopt.core import check_count, check_number, plural, value_error

T = TypeVar("T")

_MORE = object()

More = Annotated[T, _MORE]
"""An option that only `--help-all` shows."""

Strategy = Literal[PlacementName, "hybrid"]
ScheduleName = Literal[
    "eager_one_f_one_b",
    "one_f_one_b",
    "gpipe",
    "interleaved",
    "looped_breadth_first",
    "zero_bubble",
    "zero_bubble_2",
    "zero_bubble_v",
    "zero_bubble_lockstep",
    "dual_pipe_v",
]
DtypeName = Literal["bfloat16", "float16", "float32"]
Base = Literal["float", "int8", "nf4"]


def choices(names: Any, help: str | None = None) -> Any:
    """Return what makes help show the choices of an optional `Literal`."""
    return tyro.conf.arg(metavar="{" + ",".join(get_args(names)) + "}", help=help)


def meaning(option: str) -> str:
    """Return the first sentence of the meaning of an option of strategies.

    Example:
      >>> meaning("micro_batches")
      'The number of pieces that each device cuts its rows into.'
    """
    sentence = OPTIONS[option].meaning.partition(". ")[0]
    return f"{sentence[0].upper()}{sentence[1:].rstrip('.')}."


_INT = tyro.conf.arg(metavar="INT")
_FLOAT = tyro.conf.arg(metavar="FLOAT")
_PATH = tyro.conf.arg(metavar="PATH")

Check = functools.partial
"""`check(flag, value)` refuses a value out of range."""

Count = Annotated[int, Check(check_count)]
OptionalCount = Annotated[int | None, _INT, Check(check_count)]
Positive = Annotated[float, Check(check_number, positive=True)]
OptionalPositive = Annotated[float | None, _FLOAT, Check(check_number, positive=True)]
NotNegative = Annotated[float, Check(check_number)]
Seed = Annotated[int, Check(check_number, below=2**32)]
OptionalPath = Annotated[Path | None, _PATH]
_LR = tyro.conf.arg(aliases=["--lr"])


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """Devices, mesh and strategy."""

    devices: int = 8
    """How many CPU devices to simulate if there is no accelerator. Otherwise all accelerators are
    used.
    """

    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")] = "auto"
    """Sizes of the mesh axes replica, data, tensor, context, expert and, for hybrid, pipeline; one
    may be -1. By default, with four devices or more, tensor is 2 and data takes all others:
    data=4,tensor=2 for eight devices. With hybrid, pipeline is 2 too: data=2,tensor=2,pipeline=2
    for eight.
    """

    strategy: Strategy = "fsdp"
    """Which arrays are sharded over data: none (ddp), optimizer state (zero1), gradients too
    (zero2), parameters too (fsdp, which gathers one block at a time). Hybrid also divides the model
    into stages, one for each position on the pipeline axis.
    """

    micro_batches: Annotated[
        OptionalCount,
        tyro.conf.arg(
            metavar="INT",
            help=(
                f"{meaning('micro_batches')} Micro-batches save memory, and keep all stages of"
                " hybrid busy. By default 1; with a pipeline twice as many as stages, or as many"
                " as stages if twice does not divide the batch."
            ),
        ),
    ] = None

    gather_dtype: Annotated[
        DtypeName | None,
        choices(
            DtypeName,
            help=(
                f"{meaning('gather_dtype')} Masters stay float32. For fsdp, and for hybrid with"
                " --placement fsdp."
            ),
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Pipeline stages, for --strategy hybrid.

    Each stage has a position on the mesh axis pipeline.
    """

    placement: More[Annotated[PlacementName | None, choices(PlacementName)]] = None
    """Which arrays are sharded over data, with the names of --strategy. By default fsdp."""

    schedule: Annotated[ScheduleName | None, choices(ScheduleName)] = None
    """The order in which stages process micro-batches. By default eager_one_f_one_b."""

    remat: More[bool] = False
    """Keep only the input of each chunk, and run its forward again in the backward pass: less
    memory, more work.
    """


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model, a decoder-only transformer over bytes."""

    FIXED: ClassVar = ("dim", "layers", "heads")
    """The options that determine the shapes of the parameters."""

    dim: Count = 192
    """Width of the residual stream."""

    layers: OptionalCount = None
    """Number of blocks. By default 2, or with a pipeline one per stage and chunk if that is more.
    """

    heads: Count = 4
    """Attention heads; the tensor axis shards them."""

    length: Count = 128
    """Bytes of context."""

    precision: More[
        Annotated[Literal["int8", "fp8"] | None, tyro.conf.arg(metavar="{int8,fp8}")]
    ] = None
    """Multiply by the weights of blocks in 8 bits. By default in the dtype of the computation."""


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Steps, batches and optimizer."""

    steps: Count = 600
    """Total steps, including the steps before a resume."""

    batch_size: Count = 16
    """Sequences in a step, over all devices."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, optionally with arguments: lion, contrib.muon,
    'adamw(b2=0.99)'.
    """

    learning_rate: Annotated[Positive, _LR] = 2e-3
    """Peak of the learning rate. It rises linearly over a tenth of the steps, then falls as a
    cosine.
    """

    clip: NotNegative = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""

    seed: Seed = 0
    """Seed of the initial parameters and of the order of the text."""

    data: OptionalPath = None
    """A text file, or a folder of them. By default the source code of Python's standard library."""


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """Folder, checkpoints and logs of the run."""

    run_dir: Path = Path("runs/default")
    """Folder for checkpoints, metrics.jsonl and config.json."""

    resume: bool = False
    """Continue the run in the folder. Options that are not set here keep their saved values; mesh,
    strategy, devices and steps may change.
    """

    checkpoint_every: Count = 100
    """Steps between checkpoints; the last two and the best are kept."""

    memory_every: More[OptionalCount] = None
    """Steps between snapshots in the memory of two hosts, for restarts under launch --max-restarts.
    By default none.
    """

    evaluate_every: Count = 50
    """Steps between validations."""

    norms_every: More[OptionalCount] = None
    """Steps between norms of gradients, updates and parameters, of each layer, in metrics.jsonl.
    By default none.
    """

    debug: bool = False
    """Show the traceback of an error."""


class PlacedOptions:
    """The options of a command about placement."""

    where: DeviceOptions
    pipeline: PipelineOptions

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy is hybrid."""
        return self.where.strategy == "hybrid"

    @property
    def placement(self) -> str:
        """The placement: the strategy itself, or the placement of hybrid."""
        return self.pipeline.placement or "fsdp" if self.is_hybrid else self.where.strategy

    @property
    def strategy_text(self) -> str:
        """The strategy as it is chosen on the command line."""
        if self.is_hybrid:
            return f"hybrid with --placement {self.placement}"
        return self.where.strategy

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.pipeline.schedule or "eager_one_f_one_b"


@dataclasses.dataclass(frozen=True)
class TrainOptions(PlacedOptions):
    """Train a language model on bytes, sharded over devices.

    On a machine without an accelerator the devices are simulated: the same program with the same
    collectives, on the CPU. By default it trains for two minutes on Python's own source code.
    """

    where: DeviceOptions = DeviceOptions()
    pipeline: PipelineOptions = PipelineOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    run: FolderOptions = FolderOptions()


@dataclasses.dataclass(frozen=True)
class TunedModelOptions:
    """The model and its adapters."""

    FIXED: ClassVar = ("model", "lora_rank", "lora_alpha", "lora_targets", "base")
    """The options that determine what is trained."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder of Hugging Face with config.json and safetensors. No code of it runs.
    """

    length: Count = 2048
    """Tokens of a row. Conversations are packed into rows; a longer conversation is left out, and
    counted.
    """

    lora_rank: OptionalCount = None
    """Train adapters of this rank on frozen weights (LoRA). By default all weights are trained."""

    lora_alpha: More[OptionalPositive] = None
    """The factor of an adapter is alpha / rank. By default alpha is twice the rank."""

    lora_dropout: More[Annotated[float, Check(check_number, below=1)]] = 0.0
    """The share of an adapter's inputs that is dropped in training."""

    lora_targets: More[Annotated[str | None, tyro.conf.arg(metavar="REGEX")]] = None
    """Weights that get adapters, such as 'attention/(q|v)$'. By default all weights of blocks that
    peft has a form for.
    """

    base: Base = "float"
    """How weights with adapters are stored: as they are, or in 8 or 4 bits."""

    dtype: More[Annotated[DtypeName | None, choices(DtypeName)]] = None
    """The dtype of products. By default the dtype of the folder, with bfloat16 for float16. Trained
    weights are float32.
    """

    recompute_blocks: More[bool] = True
    """Keep only the inputs of blocks for the backward pass: less memory, a third more work."""


@dataclasses.dataclass(frozen=True)
class TuningOptions:
    """Conversations, epochs, batches and optimizer."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="JSONL")] = None
    """One conversation a line: {"tokens": [...], "weights": [...]}, as apply_chat_template of
    transformers makes them. The loss is on tokens with a weight.
    """

    epochs: Positive = 3.0
    """How often each conversation is trained on."""

    steps: OptionalCount = None
    """Total steps, including the steps before a resume. By default --epochs decides."""

    batch_size: Count = 16
    """Rows in a step, over all devices."""

    validation: More[Annotated[float, Check(check_number, positive=True, below=1)]] = 0.05
    """Share of conversations that are held out and evaluated."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, optionally with arguments: lion, 'adamw(b2=0.99)'.
    """

    learning_rate: Annotated[OptionalPositive, _LR] = None
    """Peak of the learning rate. It rises linearly over a tenth of the steps, then falls as a
    cosine. By default 1e-5, or 2e-4 with adapters.
    """

    clip: NotNegative = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""

    seed: Seed = 0
    """Seed of the adapters, of dropout, of what is held out and of the order of conversations."""


@dataclasses.dataclass(frozen=True)
class TuneOptions(PlacedOptions):
    """Fine-tune an open model on conversations, sharded over devices.

    Write a folder for transformers or peft.

    The loss is on the tokens of the assistant. Options of devices, mesh, strategy and run are the
    same as in train.
    """

    where: DeviceOptions = DeviceOptions()
    pipeline: PipelineOptions = PipelineOptions()
    model: TunedModelOptions = TunedModelOptions()
    training: TuningOptions = TuningOptions()
    run: FolderOptions = FolderOptions(run_dir=Path("runs/tune"))


@dataclasses.dataclass(frozen=True)
class MergeOptions:
    """Add LoRA adapters to the weights of their model: shardopt merge ADAPTERS OUTPUT.

    The adapters are a folder that tune --lora-rank or peft wrote.
    """

    adapters: tyro.conf.Positional[Path] = tyro.MISSING
    """The folder of adapters, such as runs/tune/adapters."""

    output: tyro.conf.Positional[Path] = tyro.MISSING
    """A new folder, for transformers."""

    model: OptionalPath = None
    """The folder of the model. By default the folder that the adapters name."""

    base: Base = "float"
    """How weights with adapters were stored when the adapters were trained: --base of tune."""


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint of a run as a folder for transformers: shardopt export RUN OUTPUT.

    A run of train is written as a Llama on bytes. A run of tune with adapters is written as
    adapters, for peft and for merge.
    """

    run_dir: tyro.conf.Positional[Path] = tyro.MISSING
    """The folder of the run."""

    output: tyro.conf.Positional[Path] = tyro.MISSING
    """A new folder."""

    step: OptionalCount = None
    """The step of the checkpoint. By default the newest."""


@dataclasses.dataclass(frozen=True)
class DiffOptions:
    """Find the first step and the leaves that differ between two runs: shardopt diff RUN RUN.

    It compares losses and norms of the logs, and the bits of the checkpoints that both runs have. It
    ends with 1 if they differ.
    """

    first: tyro.conf.Positional[Path] = tyro.MISSING
    """The folder of a run, or of so.Checkpoints."""

    second: tyro.conf.Positional[Path] = tyro.MISSING
    """The folder of the other."""


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Continue a text: shardopt generate FOLDER 'Once upon a time'.

    A run of train or tune, or a folder of Hugging Face, has the weights.
    """

    weights: tyro.conf.Positional[Path] = tyro.MISSING
    """The folder of a run, or a folder with config.json and safetensors."""

    prompt: tyro.conf.Positional[str] = tyro.MISSING
    """The text. Runs of train read it as bytes, other models with tokenizer.json."""

    ids: bool = False
    """The prompt and the result are token ids, such as 1,2,3."""

    num_tokens: Count = 200
    """How many tokens to add."""

    temperature: NotNegative = 0.8
    """The divisor of the logits; 0 takes the likeliest token."""

    top_k: OptionalCount = None
    """Draw only from this many likeliest tokens. By default from all."""

    seed: Seed = 0
    """Seed of the draws."""

    step: OptionalCount = None
    """The step of the run's checkpoint. By default the newest."""


RunOptions = TrainOptions | TuneOptions
Options = TypeVar("Options", bound="TrainOptions | TuneOptions")


def brief(options_type: type) -> type:
    """Return a type of options without the options that are `More`; its help says how many it left
    out.
    """
    hints = get_type_hints(options_type, include_extras=True)
    annotations = {}
    defaults = {}
    count = 0
    for field in dataclasses.fields(options_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            group = annotations[field.name] = brief(cast(type, hint))
            defaults[field.name] = group(**vars(field.default))
        elif _MORE in getattr(hint, "__metadata__", ()):
            annotations[field.name] = tyro.conf.Suppress[hint]
            count += 1
    doc = options_type.__doc__
    if count:
        doc = f"{doc}\n\n{plural(count, 'more option')}: --help-all"
    names = defaults | {"__annotations__": annotations, "__doc__": doc}
    return dataclasses.dataclass(frozen=True)(type(options_type.__name__, (options_type,), names))


def check_numbers(group: Any) -> None:
    """Refuse numbers of a group of options that are out of the range of their option."""
    for name, hint in get_type_hints(type(group), include_extras=True).items():
        value = getattr(group, name)
        for check in getattr(hint, "__metadata__", ()):
            if value is not None and isinstance(check, Check):
                check(flag(name), value)


def to_json(options: RunOptions) -> dict[str, dict[str, object]]:
    """Return the options as nested dicts of JSON values."""
    return {
        group: {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }
        for group, values in dataclasses.asdict(options).items()
    }


def from_json(saved: dict[str, Any], options_type: type[Options] = TrainOptions) -> Options:
    """Return the options that `to_json` saved; an option that is missing gets its default."""
    groups = {}
    for group, defaults in vars(options_type()).items():
        hints = get_type_hints(type(defaults))
        values = {name: value for name, value in saved.get(group, {}).items() if name in hints}
        for name, value in values.items():
            if value is not None and Path in (hints[name], *get_args(hints[name])):
                values[name] = Path(value)
        groups[group] = dataclasses.replace(defaults, **values)
    return options_type(**groups)


def flag(option: str) -> str:
    """Return how an option is written on the command line.

    Example:
      >>> flag("sync_every")
      '--sync-every'
    """
    return f"--{option.replace('_', '-')}"


def changed_flags(options: RunOptions, names: Iterable[str]) -> list[str]:
    """Return the options among `names` that are not the default, as they are written.

    Example:
      >>> options = TunedModelOptions(lora_rank=2, recompute_blocks=False)
      >>> changed_flags(TuneOptions(model=options), ["lora_rank", "base", "recompute_blocks"])
      ['--lora-rank 2', '--no-recompute-blocks']
    """
    flags = []
    for group in vars(options).values():
        for name, default in vars(type(group)()).items():
            value = getattr(group, name)
            if name in names and value != default:
                text = flag(f"no_{name}" if value is False else name)
                flags.append(text if isinstance(value, bool) else f"{text} {value}")
    return flags


_OTHER_NAMES = {
    "learning_rate": "eta step-size",
    "batch_size": "bs global-batch-size train-batch-size per-device-train-batch-size",
    "steps": "max-steps num-steps iterations iters max-iters num-iterations train-steps",
    "epochs": "num-train-epochs num-epochs",
    "dim": "width hidden-size d-model n-embd embedding-dim model-dim",
    "layers": "depth n-layer num-layers num-hidden-layers num-blocks",
    "heads": "n-head num-heads num-attention-heads",
    "length": "sequence-length seq-len context-length context block-size max-length max-seq-length",
    "run_dir": "output output-dir out-dir save-dir logdir folder",
    "micro_batches": "gradient-accumulation-steps grad-accum accumulate-grad-batches",
    "clip": "max-grad-norm gradient-clipping grad-clip clip-norm",
    "devices": "gpus num-gpus num-devices n-devices nproc-per-node",
    "gather_dtype": "dtype bf16 fp16 mixed-precision",
    "mesh": "dp tp pp fsdp tensor-parallel data-parallel pipeline-parallel",
    "strategy": "zero zero-stage sharding ddp parallelism",
    "resume": "continue restart resume-from-checkpoint load",
    "data": "dataset text file corpus train-file input",
    "remat": "gradient-checkpointing activation-checkpointing recompute",
    "checkpoint_every": "save-every save-steps save-interval ckpt-every",
    "evaluate_every": "eval-every eval-steps eval-interval validate-every",
    "optimizer": "optim weight-decay wd momentum beta1 beta2",
    "lora_rank": "rank r lora-r",
    "lora_targets": "target-modules",
    "base": "quantize load-in-4bit load-in-8bit qlora bits",
    "model": "model-name-or-path pretrained base-model",
    "num_tokens": "max-new-tokens max-tokens",
    "debug": "traceback verbose",
    "processes": "nproc np num-processes workers",
    "hardware": "chip gpu accelerator",
    "chips": "num-chips num-gpus",
    "minutes": "time timeout",
}
"""Names that other programs have for an option."""


def check_words(options: Any, unknown_words: Sequence[str], fix: str) -> None:
    """Refuse words that are no options, with the options that have a similar name or meaning."""
    if not unknown_words:
        return
    names = set()
    for name, value in vars(options).items():
        if dataclasses.is_dataclass(value):
            names |= vars(value).keys()
        else:
            names.add(name)
    option_of = {name.replace("_", "-"): name for name in names}
    for name in names & _OTHER_NAMES.keys():
        option_of |= dict.fromkeys(_OTHER_NAMES[name].split(), name)
    wrong_flags = [word for word in unknown_words if word.startswith("-")]
    problems = []
    for word in wrong_flags or unknown_words:
        similar = difflib.get_close_matches(
            word.partition("=")[0].strip("-"), option_of, n=3, cutoff=0.7
        )
        flags = dict.fromkeys(flag(option_of[name]) for name in similar)
        problems.append(f"{word}: did you mean {' or '.join(flags)}?" if flags else word)
    raise value_error(f"{plural(len(problems), 'word')} cannot be read.", problems, fix)
