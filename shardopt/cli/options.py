"""What `shardopt train` can be told: one dataclass a group of its help, every field an option; optimizers by name."""

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import optax
import tyro

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.engine.config import PlacementName
from shardopt.engine.options import OPTIONS

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
    """Where it runs."""

    devices: int = 8
    """How many CPU devices to simulate where there is no accelerator. With one, those that are there are used."""

    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")] = "auto"
    """Sizes of the mesh axes replica, data, tensor, context, expert and, for hybrid, pipeline; one may be -1. By default tensor gets \
2 where there are four devices or more, and data the rest: data=4,tensor=2 of eight. With hybrid pipeline gets 2 \
first: data=2,tensor=2,pipeline=2 of eight. And before all of them replica gets --replicas."""

    strategy: Strategy = "fsdp"
    """What is sharded over data: nothing (ddp), optimizer state (zero1), gradients too (zero2), parameters too \
(zero3, fsdp; fsdp gathers one block at a time). Hybrid cuts the model into stages too, one for each place \
on the pipeline axis."""

    micro_batches: Annotated[
        int | None,
        tyro.conf.arg(
            metavar="INT",
            help=f"{meaning('micro_batches')} Micro-batches save memory, and keep all stages of hybrid busy. By default 1; "
            "with a pipeline twice as many as stages, or as many as stages if twice does not divide the batch.",
        ),
    ] = None

    gather_dtype: Annotated[
        DtypeName | None,
        tyro.conf.arg(
            metavar=choices(DtypeName),
            help=f"{meaning('gather_dtype')} Masters stay float32. For fsdp, and for hybrid with --placement fsdp or zero3.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How stages work together, for --strategy hybrid. Each stage has a place on the mesh axis pipeline."""

    placement: Annotated[PlacementName | None, tyro.conf.arg(metavar=choices(PlacementName))] = None
    """What is sharded over data, in the words of --strategy. By default fsdp."""

    schedule: Annotated[ScheduleName | None, tyro.conf.arg(metavar=choices(ScheduleName))] = None
    """When each stage works on which micro-batch. By default eager_one_f_one_b."""

    chunks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model on each stage, for interleaved and looped_breadth_first (by default 2), zero_bubble and
    zero_bubble_lockstep (1)."""

    send_ahead: bool = False
    """Send messages while the next tick runs: stages that do different things at a time then keep their own pace."""

    remat: bool = False
    """Keep only the input of each chunk, and run its forward again in the backward pass: less memory, more work."""

    regather: bool = True
    """Gather the weights of a block in every pass. --no-regather: once a step, which sends less and holds more."""


@dataclasses.dataclass(frozen=True)
class Communication:
    """What is sent less often, or in fewer bits."""

    replicas: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Copies of the model, the mesh axis replica. Their gradients are averaged in every step, unless --sync-every says otherwise."""

    sync_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Local updates: steps between synchronizations of the replicas (DiLoCo, or Local SGD with --outer average)."""

    outer: Annotated[Outer | None, tyro.conf.arg(metavar=choices(Outer))] = None
    """How replicas synchronize: an outer step of sgd, with Nesterov momentum or without, on their mean update; or \
their average. By default nesterov."""

    outer_lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Learning rate of nesterov and sgd. By default 0.7 with momentum, 1 without."""

    outer_momentum: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Momentum of nesterov (by default 0.9) and sgd (0)."""

    fragments: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model that synchronize one after another, each every --sync-every steps (Streaming DiLoCo). By \
default 1."""

    delay: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps for which replicas train on while a synchronization is on its way. By default 0."""

    mix: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Share of its own parameters that a replica keeps at a synchronization. By default 0."""

    warmup_sync_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps at first in which gradients are averaged over replicas, with --outer average. By default 0."""

    reducer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How a mean is sent in fewer bits: bf16, int8, sign, top_k or power_sgd, with arguments if wanted, \
'top_k(density=0.05)'. That of the gradients of ddp or hybrid; with --sync-every that of the outer gradients."""

    error_feedback: bool = True
    """Send later what a reducer left out. Not for bf16."""

    reducer_warmup_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Exact means at first, before the reducer takes over: so many steps, or synchronizations of replicas. By default 0."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The model, a decoder-only transformer over bytes."""

    model: Literal["gpt", "moe"] = "gpt"
    """With one mlp in each block, or with a mixture of experts; an axis expert of the mesh shards these."""

    dim: int = 192
    """Width of the residual stream."""

    layers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of blocks. By default 2; with a pipeline, one a stage and chunk."""

    heads: int = 4
    """Attention heads; the tensor axis takes some each."""

    length: int = 128
    """Bytes of context."""

    experts: int = 8
    """Experts of each block of a moe."""

    top_k: int = 2
    """Experts that each byte goes through; together they have as many hidden units as the mlp of a gpt."""

    balance: Literal["bias", "loss", "sequence_loss", "none"] = "bias"
    """What keeps the loads of experts equal: biases of the choice, or a loss over the batch or of each sequence."""

    precision: Annotated[Literal["int8", "fp8"] | None, tyro.conf.arg(metavar="{int8,fp8}")] = None
    """Multiply by the weights of blocks of a gpt in 8 bits. By default in the dtype that weights have when they are used."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How it learns."""

    steps: int = 600
    """Steps to train to, those of a resumed run included."""

    batch_size: int = 16
    """Sequences in a step, over all devices."""

    optimizer: str = "adamw"
    """Any optax optimizer with a learning rate, with arguments if wanted: lion, contrib.muon, 'adamw(b2=0.99)'."""

    learning_rate: float = 2e-3
    """Peak of the learning rate, after a linear warm-up over a tenth of the steps; then it falls as a cosine."""

    clip: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""

    seed: int = 0
    """Decides the initial parameters and the order of the data."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A text file, or a folder of them. By default the source code of Python's standard library."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What is kept."""

    run_dir: Path = Path("runs/default")
    """Folder for checkpoints, metrics.jsonl, config.json, loss.png and, of a pipeline, schedule.png."""

    resume: bool = False
    """Go on with the run in the folder, with its options where none are given here: mesh, strategy, devices and \
steps may be others."""

    checkpoint_every: int = 100
    """Steps between checkpoints; the last two and the best are kept."""

    memory_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps between snapshots in the memory of two hosts, for restarts under launch --max-restarts. By default none."""

    evaluate_every: int = 50
    """Steps between validations."""

    tensorboard: bool = False
    """Write TensorBoard events too."""

    debug: bool = False
    """Show where in the code an error was raised."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a language model on bytes, sharded over devices.

    On a machine without an accelerator the devices are simulated: the same program with the same collectives, on
    the CPU. By default it trains for two minutes on Python's own source code.
    """

    where: tyro.conf.OmitArgPrefixes[Devices] = dataclasses.field(default_factory=Devices)
    pipeline: tyro.conf.OmitArgPrefixes[Pipeline] = dataclasses.field(default_factory=Pipeline)
    communication: tyro.conf.OmitArgPrefixes[Communication] = dataclasses.field(default_factory=Communication)
    model: tyro.conf.OmitArgPrefixes[Model] = dataclasses.field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)
    run: tyro.conf.OmitArgPrefixes[Run] = dataclasses.field(default_factory=Run)

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy is hybrid."""
        return self.where.strategy == "hybrid"

    @property
    def placement(self) -> str:
        """What is sharded over data: the strategy, or the placement of hybrid."""
        return self.pipeline.placement or "fsdp" if self.is_hybrid else self.where.strategy


def to_json(options: TrainOptions) -> dict[str, dict[str, object]]:
    """Return the options as nested dicts that survive JSON."""
    return {
        group: {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        for group, values in dataclasses.asdict(options).items()
    }


def from_json(saved: dict[str, Any]) -> TrainOptions:
    """Return the options that `to_json` saved; what it did not know takes its default."""
    groups = {}
    for group in dataclasses.fields(TrainOptions):
        made = group.default_factory()  # type: ignore[misc]
        known = {
            field.name: Path(value) if field.name in ("data", "run_dir") and value is not None else value
            for field in dataclasses.fields(made)
            if (value := saved.get(group.name, {}).get(field.name, dataclasses.MISSING)) is not dataclasses.MISSING
        }
        groups[group.name] = dataclasses.replace(made, **known)
    return TrainOptions(**groups)


_NOT_ENOUGH = frozenset({"contrib.sophia"})
"""Optimizers that need the loss function of each batch when they are made."""


def make_optimizer(text: str, *, learning_rate: float, steps: int, clip: float) -> optax.GradientTransformation:
    """Return an optimizer whose learning rate warms up for a tenth of the steps and falls as a cosine to a tenth.

    Args:
      text: a name in optax, such as "adamw" or "contrib.muon", or a call of it with keyword arguments, such as
        "adamw(b2=0.99)".
      learning_rate: the peak.
      steps: of the whole run.
      clip: the largest global norm of the gradient; 0 for none.
    """
    _check("--learning-rate", learning_rate > 0, "above 0", learning_rate)
    check_count("train", "--steps", steps)
    _check("--clip", clip >= 0, "at least 0", clip)
    factory, arguments = find_optimizer(text)
    # Injected, so that optimizers that know nothing of schedules follow it too, and the rate is in the state.
    fixed = [parameter for parameter in inspect.signature(factory).parameters if parameter != "learning_rate"]
    tx = optax.inject_hyperparams(factory, static_args=fixed)(make_schedule(learning_rate, steps), **arguments)
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


def make_schedule(peak: float, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: up in a line, down as a cosine."""
    warmup = max(1, steps // 10)
    # From peak / warmup rather than 0, so that the first step counts.
    return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, max(steps, warmup + 1), peak / 10)


def find_optimizer(text: str) -> tuple[Callable[..., optax.GradientTransformation], dict[str, Any]]:
    """Return the function of optax that a text such as "adamw" or "contrib.muon(beta=0.9)" names, and its arguments."""
    name, arguments = read_call("--optimizer", text, example="adamw(b2=0.99)")
    known, name = optimizers(), name.removeprefix("optax.")
    if name not in known:
        same = [other for other in known if other.split(".")[-1] == name.split(".")[-1]]
        close = same or difflib.get_close_matches(name, known, n=4)
        fix = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}."
        what = f"optax has no optimizer {name!r} that a learning rate is enough for."
        raise ValueError(format_error("train", what, fix=fix))
    taken = [parameter for parameter in inspect.signature(known[name]).parameters if parameter != "learning_rate"]
    check_keywords(f"--optimizer {name}", arguments, taken)
    return known[name], arguments


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return the optimizers of optax, by name, for which a learning rate is enough.

    Example:
      >>> {"adamw", "lion", "contrib.muon"} <= set(optimizers())
      True
    """
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if prefix + name in _NOT_ENOUGH or name.startswith(("_", "scale_by_")):
                continue
            if _needs_only_a_learning_rate(function):
                found[prefix + name] = function
    return found


def _needs_only_a_learning_rate(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters
    others = [parameter for name, parameter in parameters.items() if name != "learning_rate"]
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return "learning_rate" in parameters and all(
        parameter.default is not parameter.empty or parameter.kind in kinds for parameter in others
    )


def _check(option: str, good: bool, wanted: str, value: float) -> None:
    if not good:
        raise ValueError(f"train: {option} must be {wanted}, got {value}.")


def read_call(option: str, text: str, *, example: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments in "adamw" or "adamw(b2=0.99, nesterov=True)".

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
        fix = f"write a name such as {example.partition('(')[0]}, or a call with keywords, such as {example!r}."
        raise ValueError(format_error("train", f"{option} {text} cannot be read.", fix=fix)) from None
    return ast.unparse(call.func), arguments


def check_keywords(what: str, arguments: dict[str, object], taken: Sequence[str], note: str = "") -> None:
    """Refuse arguments that are not among those taken."""
    if wrong := sorted(set(arguments) - set(taken)):
        unknown = f"{what} has no argument {' or '.join(map(repr, wrong))}."
        raise ValueError(format_error("train", unknown, fix=f"it takes {', '.join(taken) or 'none'}{note}."))


@contextmanager
def named(command: str) -> Iterator[None]:
    """Put another command's name into errors that were written for `train`.

    Example:
      >>> with named("plan"):
      ...     raise ValueError("train: --optimizer 3 cannot be read.")
      Traceback (most recent call last):
      ...
      ValueError: plan: --optimizer 3 cannot be read.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("train: ", f"{command}: ", 1)) from None
