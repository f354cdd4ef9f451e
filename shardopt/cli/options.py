"""What `shardopt train` can be told: one dataclass a group of its help, every field an option."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"]
Placement = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
Schedule = Literal["one_f_one_b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_lockstep"]
Outer = Literal["nesterov", "sgd", "average"]


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where it runs."""

    devices: int = 8
    """How many CPU devices to simulate where there is no accelerator. With one, those that are there are used."""

    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")] = "auto"
    """Sizes of the mesh axes replica, data, tensor and, for hybrid, pipeline; one may be -1. By itself, tensor gets \
2 where there are four devices or more, and data the rest: data=4,tensor=2 of eight. With hybrid pipeline gets 2 \
first: data=2,tensor=2,pipeline=2 of eight. And before all of them replica gets --replicas."""

    strategy: Strategy = "fsdp"
    """What is split over data: nothing (ddp), optimizer state (zero1), gradients too (zero2), parameters too \
(zero3, fsdp; fsdp gathers one block at a time). Hybrid cuts the model into stages too, one a place on the \
pipeline axis."""

    micro_batches: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of a batch that are worked on one after another: to save memory, and with hybrid to keep all stages \
busy. By itself 1; with a pipeline twice as many as stages, or as many where twice does not divide the batch."""

    gather_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None, tyro.conf.arg(metavar="{bfloat16,float16,float32}")
    ] = None
    """Dtype in which fsdp gathers weights and computes; masters stay float32. For hybrid too, if its placement \
gathers."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How stages work together, for --strategy hybrid. Each stage has a place on the mesh axis pipeline."""

    placement: Annotated[Placement | None, tyro.conf.arg(metavar="{ddp,zero1,zero2,zero3,fsdp}")] = None
    """What is split over data, in the words of --strategy. By itself, fsdp."""

    schedule: Annotated[
        Schedule | None, tyro.conf.arg(metavar="{one_f_one_b,gpipe,interleaved,zero_bubble,zero_bubble_lockstep}")
    ] = None
    """When each stage works on which micro-batch. By itself, one_f_one_b."""

    chunks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model on each stage, for interleaved (by itself 2) and zero_bubble_lockstep (1)."""

    remat: bool = False
    """Keep only the input of each chunk, and run its forward again in the backward pass: less memory, more work."""


@dataclasses.dataclass(frozen=True)
class Communication:
    """What is sent less often, or in fewer bits."""

    replicas: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Copies of the model, the mesh axis replica. By themselves they agree on every gradient; see --sync-every."""

    sync_every: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps that replicas train apart before they agree (DiLoCo, or Local SGD with --outer average)."""

    outer: Annotated[Outer | None, tyro.conf.arg(metavar="{nesterov,sgd,average}")] = None
    """How replicas agree: a step of sgd, with Nesterov momentum or without, on how far they came on average; or \
their average. By itself, nesterov."""

    outer_lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Learning rate of nesterov and sgd. By itself 0.7 with momentum, 1 without."""

    outer_momentum: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Momentum of nesterov (by itself 0.9) and sgd (0)."""

    fragments: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the model that agree one after another, each every --sync-every steps (Streaming DiLoCo). By \
itself 1."""

    delay: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps for which replicas train on while what they agree on is on its way. By itself 0."""

    mix: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Share of its own parameters that a replica keeps when it agrees. By itself 0."""

    warmup_sync_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps at first in which replicas agree on every gradient, with --outer average. By itself 0."""

    reducer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How a mean is sent in fewer bits: bf16, int8, sign, top_k or power_sgd, with arguments if wanted, \
'top_k(density=0.05)'. That of the gradients of ddp or hybrid; with --sync-every what replicas agree on."""

    error_feedback: bool = True
    """Send later what a reducer left out. Not for bf16."""

    reducer_warmup_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Exact means at first, before the reducer takes over: so many steps, or agreements of replicas. By itself 0."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The model, a decoder-only transformer over bytes."""

    dim: int = 192
    """Width of the residual stream."""

    layers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of blocks. By itself 2; with a pipeline, one a stage and chunk."""

    heads: int = 4
    """Attention heads; the tensor axis takes some each."""

    length: int = 128
    """Bytes of context."""


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
    """A text file, or a folder of them. By itself, the source code of Python's standard library."""


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

    evaluate_every: int = 50
    """Steps between validations."""

    tensorboard: bool = False
    """Write TensorBoard events too."""

    debug: bool = False
    """Show where in the code an error was raised."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a language model on bytes, split over devices.

    On a machine without an accelerator the devices are simulated: the same program with the same collectives, on
    the CPU. By itself it trains for two minutes on Python's own source code.
    """

    where: tyro.conf.OmitArgPrefixes[Devices] = dataclasses.field(default_factory=Devices)
    pipeline: tyro.conf.OmitArgPrefixes[Pipeline] = dataclasses.field(default_factory=Pipeline)
    communication: tyro.conf.OmitArgPrefixes[Communication] = dataclasses.field(default_factory=Communication)
    model: tyro.conf.OmitArgPrefixes[Model] = dataclasses.field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = dataclasses.field(default_factory=Training)
    run: tyro.conf.OmitArgPrefixes[Run] = dataclasses.field(default_factory=Run)


def to_json(options: TrainOptions) -> dict[str, Any]:
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
