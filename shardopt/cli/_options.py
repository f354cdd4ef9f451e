"""The options of `shardopt train`: one dataclass per group of its help, one field per option.

Optimizers by name.
"""

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import optax
import tyro

from shardopt.config._config import PlacementName
from shardopt.config._options import OPTIONS
from shardopt.core._arguments import check_count
from shardopt.core._errors import calling, format_error

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
Outer = Literal["nesterov", "sgd", "average"]
DtypeName = Literal["bfloat16", "float16", "float32"]


def choices(names: Any) -> str:
    """Return how help shows the choices of a `Literal`.

    Example:
      >>> choices(Outer)
      '{nesterov,sgd,average}'
    """
    return "{" + ",".join(get_args(names)) + "}"


def meaning(option: str) -> str:
    """Return the first sentence of the meaning of an option of strategies.

    Example:
      >>> meaning("micro_batches")
      'The number of pieces that each device cuts its rows into.'
    """
    sentence = OPTIONS[option].meaning.partition(". ")[0]
    return f"{sentence[0].upper()}{sentence[1:].rstrip('.')}."


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices, mesh and strategy."""

    devices: int = 8
    """How many CPU devices to simulate if there is no accelerator. Otherwise all accelerators are
    used.
    """

    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")] = "auto"
    """Sizes of the mesh axes replica, data, tensor, context, expert and, for hybrid, pipeline; one
    may be -1. By \
default, with four devices or more, tensor is 2 and data takes all others: data=4,tensor=2 for eight
devices. With \\ hybrid, pipeline is 2 too: data=2,tensor=2,pipeline=2 for eight. The axis replica is
--replicas and is set first."""

    strategy: Strategy = "fsdp"
    """Which arrays are sharded over data: none (ddp), optimizer state (zero1), gradients too
    (zero2), parameters too \
(zero3, fsdp; fsdp gathers one block at a time). Hybrid also divides the model into stages, one for
each position \\ on the pipeline axis."""

    micro_batches: Annotated[
        int | None,
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
        tyro.conf.arg(
            metavar=choices(DtypeName),
            help=(
                f"{meaning('gather_dtype')} Masters stay float32. For fsdp, and for hybrid with"
                " --placement fsdp or zero3."
            ),
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Pipeline stages, for --strategy hybrid.

    Each stage has a position on the mesh axis pipeline.
    """

    placement: Annotated[PlacementName | None, tyro.conf.arg(metavar=choices(PlacementName))] = None
    """Which arrays are sharded over data, with the names of --strategy. By default fsdp."""

    schedule: Annotated[ScheduleName | None, tyro.conf.arg(metavar=choices(ScheduleName))] = None
    """The order in which stages process micro-batches. By default eager_one_f_one_b."""

    chunks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model on each stage, for interleaved and looped_breadth_first (by default 2),
    zero_bubble and zero_bubble_lockstep (1)."""

    send_ahead: bool = False
    """Send messages while the next tick runs: stages with different work then wait less for each
    other.
    """

    remat: bool = False
    """Keep only the input of each chunk, and run its forward again in the backward pass: less
    memory, more work.
    """

    regather: bool = True
    """Gather the weights of a block in every pass. --no-regather: once a step, with less traffic,
    more memory.
    """


@dataclasses.dataclass(frozen=True)
class Communication:
    """Communication less often, or in fewer bits."""

    replicas: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Copies of the model, the mesh axis replica. Without --sync-every their gradients are averaged
    in every step.
    """

    sync_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Local updates: steps between synchronizations of the replicas (DiLoCo, or Local SGD with
    --outer average).
    """

    outer: Annotated[Outer | None, tyro.conf.arg(metavar=choices(Outer))] = None
    """How replicas synchronize: an outer step of sgd on their mean update, with Nesterov momentum
    or without; or \
the average of their parameters. By default nesterov."""

    outer_lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Learning rate of the outer step. By default 0.7 for nesterov, 1 for sgd."""

    outer_momentum: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Momentum of the outer step. By default 0.9 for nesterov, 0 for sgd."""

    fragments: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model that synchronize one after another, each every --sync-every steps
    (Streaming DiLoCo). By \
default 1."""

    delay: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps that replicas train while a synchronization is in progress. By default 0."""

    mix: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Weight of a replica's own parameters in the mixture at a synchronization. By default 0."""

    warmup_sync_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of first steps in which gradients are averaged over replicas, with --outer average. By
    default 0.
    """

    reducer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How a mean is sent in fewer bits: bf16, int8, sign, top_k or power_sgd, optionally with
    arguments, \
'top_k(density=0.05)'. It reduces the gradients of ddp or hybrid; with --sync-every the outer
gradients."""

    error_feedback: bool = True
    """Send the error of a reducer in later steps. Not for bf16."""

    reducer_warmup_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of first steps, or synchronizations of replicas, with exact means instead of the
    reducer. By default 0.
    """


@dataclasses.dataclass(frozen=True)
class Model:
    """The model, a decoder-only transformer over bytes."""

    FIXED: ClassVar = ("model", "dim", "layers", "heads", "experts", "top_k", "balance")
    """The options that determine the shapes of the parameters."""

    model: Literal["gpt", "moe"] = "gpt"
    """One mlp in each block (gpt), or a mixture of experts (moe). The mesh axis expert shards the
    experts.
    """

    dim: int = 192
    """Width of the residual stream."""

    layers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of blocks. By default 2, or with a pipeline one per stage and chunk if that is more.
    """

    heads: int = 4
    """Attention heads; the tensor axis shards them."""

    length: int = 128
    """Bytes of context."""

    experts: int = 8
    """Experts of each block of a moe."""

    top_k: int = 2
    """Experts that each byte goes through; together they have as many hidden units as the mlp of a
    gpt.
    """

    balance: Literal["bias", "loss", "sequence_loss", "none"] = "bias"
    """How the loads of experts are kept equal: biases of the routing, or a loss over the batch or
    each sequence.
    """

    precision: Annotated[Literal["int8", "fp8"] | None, tyro.conf.arg(metavar="{int8,fp8}")] = None
    """Multiply by the weights of a gpt's blocks in 8 bits. By default in the dtype of the
    computation.
    """


@dataclasses.dataclass(frozen=True)
class Training:
    """Steps, batches and optimizer."""

    steps: int = 600
    """Total steps, including the steps before a resume."""

    batch_size: int = 16
    """Sequences in a step, over all devices."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, optionally with arguments: lion, contrib.muon,
    'adamw(b2=0.99)'.
    """

    learning_rate: float = 2e-3
    """Peak of the learning rate. It rises linearly over a tenth of the steps, then falls as a
    cosine.
    """

    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""

    seed: int = 0
    """Seed of the initial parameters and of the order of the text."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A text file, or a folder of them. By default the source code of Python's standard library."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Folder, checkpoints and logs of the run."""

    run_dir: Path = Path("runs/default")
    """Folder for checkpoints, metrics.jsonl, config.json, loss.png, with a pipeline schedule.png,
    and norms.png.
    """

    resume: bool = False
    """Continue the run in the folder. Options that are not set here keep their saved values; mesh,
    strategy, \
devices and steps may change."""

    checkpoint_every: int = 100
    """Steps between checkpoints; the last two and the best are kept."""

    memory_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps between snapshots in the memory of two hosts, for restarts under launch --max-restarts.
    By default none.
    """

    evaluate_every: int = 50
    """Steps between validations."""

    metrics_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps between norms of gradients, updates and parameters, of each layer; norms.png shows them
    as heat maps. \
By default none."""

    tensorboard: bool = False
    """Write TensorBoard events too."""

    debug: bool = False
    """Show the traceback of an error."""


class Layout:
    """What the options of a command say about placement."""

    where: Devices
    pipeline: Pipeline

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy is hybrid."""
        return self.where.strategy == "hybrid"

    @property
    def placement(self) -> str:
        """The placement: the strategy itself, or the placement of hybrid."""
        return self.pipeline.placement or "fsdp" if self.is_hybrid else self.where.strategy


@dataclasses.dataclass(frozen=True)
class TrainOptions(Layout):
    """Train a language model on bytes, sharded over devices.

    On a machine without an accelerator the devices are simulated: the same program with the same
    collectives, on the CPU. By default it trains for two minutes on Python's own source code.
    """

    where: tyro.conf.OmitArgPrefixes[Devices] = dataclasses.field(default_factory=Devices)
    pipeline: tyro.conf.OmitArgPrefixes[Pipeline] = dataclasses.field(default_factory=Pipeline)
    communication: tyro.conf.OmitArgPrefixes[Communication] = dataclasses.field(
        default_factory=Communication
    )
    model: tyro.conf.OmitArgPrefixes[Model] = dataclasses.field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)
    run: tyro.conf.OmitArgPrefixes[Run] = dataclasses.field(default_factory=Run)


@dataclasses.dataclass(frozen=True)
class TunedModel:
    """The model, its chat template and its adapters."""

    FIXED: ClassVar = ("model", "lora_rank", "lora_alpha", "lora_targets", "base")
    """The options that determine what is trained."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder of Hugging Face with config.json, safetensors and tokenizer.json. No code of it
    runs.
    """

    chat_template: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A jinja file with a chat template in place of the folder's own."""

    length: int = 2048
    """Tokens of a row. Conversations are packed into rows; a longer conversation is left out, and
    counted.
    """

    lora_rank: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Train adapters of this rank on frozen weights (LoRA). By default all weights are trained."""

    lora_alpha: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """The factor of an adapter is alpha / rank. By default alpha is twice the rank."""

    lora_dropout: float = 0.0
    """The share of an adapter's inputs that is dropped in training."""

    lora_targets: Annotated[str | None, tyro.conf.arg(metavar="REGEX")] = None
    """Weights that get adapters, such as 'attention/(q|v)$'. By default all weights of blocks that
    peft has a form for.
    """

    base: Literal["float", "int8", "nf4"] = "float"
    """How weights with adapters are stored: as they are, or in 8 or 4 bits."""

    dtype: Annotated[DtypeName | None, tyro.conf.arg(metavar=choices(DtypeName))] = None
    """The dtype of products. By default the dtype of the folder, with bfloat16 for float16. Trained
    weights are float32.
    """

    recompute_blocks: bool = True
    """Keep only the inputs of blocks for the backward pass: less memory, a third more work."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Conversations, epochs, batches and optimizer."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="JSONL")] = None
    """One conversation a line: {"messages": [{"role": ..., "content": ...}]} or {"prompt": ...,
    "completion": ...}.
    """

    epochs: float = 3.0
    """How often each conversation is trained on."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Total steps, including the steps before a resume. By default --epochs decides."""

    batch_size: int = 16
    """Rows in a step, over all devices."""

    validation: float = 0.05
    """Share of conversations that are held out and evaluated."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, optionally with arguments: lion, 'adamw(b2=0.99)'.
    """

    learning_rate: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Peak of the learning rate. It rises linearly over a tenth of the steps, then falls as a
    cosine. By default 1e-5, or 2e-4 with adapters.
    """

    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""

    seed: int = 0
    """Seed of the adapters, of dropout, of what is held out and of the order of conversations."""


@dataclasses.dataclass(frozen=True)
class TuneOptions(Layout):
    """Fine-tune an open model on conversations, sharded over devices.

    Write a folder for transformers or peft.

    The loss is on the tokens of the assistant. Options of devices, mesh, strategy and run are those
    of train.
    """

    where: tyro.conf.OmitArgPrefixes[Devices] = dataclasses.field(default_factory=Devices)
    pipeline: tyro.conf.OmitArgPrefixes[Pipeline] = dataclasses.field(default_factory=Pipeline)
    model: tyro.conf.OmitArgPrefixes[TunedModel] = dataclasses.field(default_factory=TunedModel)
    training: tyro.conf.OmitArgPrefixes[Tuning] = dataclasses.field(default_factory=Tuning)
    run: tyro.conf.OmitArgPrefixes[Run] = dataclasses.field(
        default_factory=lambda: Run(run_dir=Path("runs/tune"))
    )

    @property
    def communication(self) -> Communication:
        """Gradients are averaged in every step, in full."""
        return Communication()


RunOptions = TrainOptions | TuneOptions
Options = TypeVar("Options", bound="TrainOptions | TuneOptions")


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
    for group in dataclasses.fields(options_type):
        defaults = group.default_factory()  # type: ignore[misc]
        saved_values = {
            field.name: Path(value) if value is not None and "pathlib" in str(field.type) else value
            for field in dataclasses.fields(defaults)
            if (value := saved.get(group.name, {}).get(field.name, dataclasses.MISSING))
            is not dataclasses.MISSING
        }
        groups[group.name] = dataclasses.replace(defaults, **saved_values)
    return options_type(**groups)


def flag(option: str) -> str:
    """Return how an option is written on the command line.

    Example:
      >>> flag("sync_every")
      '--sync-every'
    """
    return f"--{option.replace('_', '-')}"


def changed_flags(options: Any, names: Iterable[str] | None = None) -> list[str]:
    """Return the options of a group that are not the default, as they are written.

    Only those among `names` if given.

    Example:
      >>> changed_flags(Pipeline(chunks=2, regather=False))
      ['--chunks 2', '--no-regather']
    """
    defaults, flags = vars(type(options)()), []
    for name in defaults if names is None else names:
        if (value := getattr(options, name)) != defaults[name]:
            text = flag(name) if value is not False else flag(f"no_{name}")
            flags.append(text if isinstance(value, bool) else f"{text} {value}")
    return flags


_NEEDS_MORE = frozenset({"contrib.sophia"})
"""Optimizers whose constructor also needs the loss function of each batch."""


@calling("train")
def make_optimizer(
    text: str, *, learning_rate: float, steps: int, clip: float
) -> optax.GradientTransformation:
    """Return an optimizer whose learning rate rises for a tenth of the steps and then falls as a
    cosine to a tenth.

    Args:
      text: a name in optax, such as "adamw" or "contrib.muon", or a call of it with keyword
        arguments, such as "adamw(b2=0.99)".
      learning_rate: the peak.
      steps: total steps of the run.
      clip: the largest global norm of the gradient; 0 for none.
    """
    _check("--learning-rate", learning_rate > 0, "above 0", learning_rate)
    check_count("--steps", steps)
    _check("--clip", clip >= 0, "at least 0", clip)
    factory, arguments = find_optimizer(text)
    # inject_hyperparams makes optimizers without schedules follow one too, and puts the rate into
    # the state.
    static_args = [
        parameter
        for parameter in inspect.signature(factory).parameters
        if parameter != "learning_rate"
    ]
    tx = optax.inject_hyperparams(factory, static_args=static_args)(
        make_schedule(learning_rate, steps), **arguments
    )
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


def make_schedule(peak: float, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: a linear rise, then a cosine."""
    warmup = max(1, steps // 10)
    # It starts at peak / warmup rather than 0, so that the first step has an effect.
    return optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, max(steps, warmup + 1), peak / 10
    )


def find_optimizer(text: str) -> tuple[Callable[..., optax.GradientTransformation], dict[str, Any]]:
    """Return the optax function and the arguments in a text such as "adamw" or
    "contrib.muon(beta=0.9)".
    """
    name, arguments = read_call("--optimizer", text, example="adamw(b2=0.99)")
    functions, name = optimizers(), name.removeprefix("optax.")
    if name not in functions:
        same_name = [
            candidate for candidate in functions if candidate.split(".")[-1] == name.split(".")[-1]
        ]
        suggestions = same_name or difflib.get_close_matches(name, functions, n=4)
        fix = (
            f"did you mean {' or '.join(suggestions)}?"
            if suggestions
            else f"choose one of {', '.join(functions)}."
        )
        problem = f"optax has no optimizer {name!r} that a learning rate is enough for."
        raise ValueError(format_error("train", problem, fix=fix))
    keywords = [
        parameter
        for parameter in inspect.signature(functions[name]).parameters
        if parameter != "learning_rate"
    ]
    check_keywords(f"--optimizer {name}", arguments, keywords)
    return functions[name], arguments


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return, by name, the optimizers of optax that need no argument except a learning rate.

    Example:
      >>> {"adamw", "lion", "contrib.muon"} <= set(optimizers())
      True
    """
    functions = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if prefix + name in _NEEDS_MORE or name.startswith(("_", "scale_by_")):
                continue
            if _needs_only_a_learning_rate(function):
                functions[prefix + name] = function
    return functions


def _needs_only_a_learning_rate(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters
    other_parameters = [
        parameter for name, parameter in parameters.items() if name != "learning_rate"
    ]
    variadic_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return "learning_rate" in parameters and all(
        parameter.default is not parameter.empty or parameter.kind in variadic_kinds
        for parameter in other_parameters
    )


def _check(option: str, is_valid: bool, requirement: str, value: float) -> None:
    if not is_valid:
        raise ValueError(f"train: {option} must be {requirement}, got {value}.")


def read_call(option: str, text: str, *, example: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a text such as "adamw" or "adamw(b2=0.99,
    nesterov=True)".

    Example:
      >>> read_call("--reducer", "top_k(density=0.05)", example="")
      ('top_k', {'density': 0.05})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        fix = (
            f"write a name such as {example.partition('(')[0]}, or a call with keywords, such as"
            f" {example!r}."
        )
        raise ValueError(
            format_error("train", f"{option} {text} cannot be read.", fix=fix)
        ) from None
    return ast.unparse(call.func), arguments


def check_keywords(
    function_text: str, arguments: dict[str, object], keywords: Sequence[str], note: str = ""
) -> None:
    """Refuse arguments that are not among the allowed keywords."""
    if unknown_names := sorted(set(arguments) - set(keywords)):
        problem = f"{function_text} has no argument {' or '.join(map(repr, unknown_names))}."
        raise ValueError(
            format_error("train", problem, fix=f"it takes {', '.join(keywords) or 'none'}{note}.")
        )


@contextmanager
def errors_named(command: str) -> Iterator[None]:
    """Put the name of another command into errors that name `train`.

    Example:
      >>> with errors_named("plan"):
      ...     raise ValueError("train: --optimizer 3 cannot be read.")
      Traceback (most recent call last):
      ...
      ValueError: plan: --optimizer 3 cannot be read.
    """
    try:
        yield
    except ValueError as error:
        error.args = (str(error).replace("train: ", f"{command}: ", 1),)
        raise
