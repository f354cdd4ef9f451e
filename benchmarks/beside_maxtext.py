"""shardopt's step beside MaxText's: both compiled by the real TPU compiler for the same chips,
model and batch, without a TPU.

    python benchmarks/beside_maxtext.py [WORDS ...] --maxtext PYTHON [--only shardopt] [--programs
    FOLDER]

PYTHON is that of an environment of its own with `pip install 'maxtext[tpu]==0.2.5'`; this one needs
jax and libtpu of the same versions. fsdp, bfloat16 products, logits and gathers, fp32 masters,
AdamW with clipping at 1; MaxText by its own `train_compile`, with splash attention, collectives on
the SparseCore where there is one, and its plain `llama3-*` models, whose rotary positions are those
of shardopt.

Each side chooses from the same list, `CHOICES`: beginning with its defaults, one field after the
other takes the fastest value whose program fits into the chip's memory. Every program that was
tried is in results/beside_maxtext.json, as soon as it is there, with the commit that compiled it.
Programs are read by `step_times.step_seconds`: products by the cycles that XLA estimates, all else
by one rule for XLA's operations and kernels, collectives over published links, and Pallas kernels
with products by their flops at the chip's peak ("stated") or by their final schedules
("scheduled"); memory is what the compiler planned. The texts are kept in FOLDER. `--read`
reads those there again and compiles none. WORDS choose rows by parts of their names; without, those
of the table are done.
"""

import argparse
import functools
import gzip
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import commit, write_json

RESULTS = Path(__file__).parent / "results" / "beside_maxtext.json"
SPARSE_CORE = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "3d_all_gather",
    "2d_all_gather",
    "nd_reduce_scatter",
)
CONTENDERS = ("shardopt", "maxtext")
# libtpu's default stays where it is chosen
COLLECTIVE_MATMUL = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


class Row(NamedTuple):
    """What is compiled: rows of `length` tokens, `rows` a chip and micro-batch."""

    topology: str
    length: int
    rows: int
    tensor: int = 1
    model: str = "llama3-8b"
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """Return it in words."""
        sizes = f"{self.model} {self.topology} {self.length} x {self.rows}"
        tensor = f" tensor={self.tensor}" if self.tensor > 1 else ""
        return (
            sizes
            + tensor
            + (f" micro_batches={self.micro_batches}" if self.micro_batches > 1 else "")
        )

    @property
    def splits_a_dim(self) -> bool:
        """Return whether tensor takes a part of a dim of the slice."""
        return self.tensor > 1 and self.tensor not in self.dims

    @property
    def chip(self) -> str:
        """Return the kind of chip."""
        return self.topology.partition(":")[0]

    @property
    def chips(self) -> int:
        """Return how many there are."""
        return math.prod(self.dims)

    @property
    def dims(self) -> list[int]:
        """Return the chips along each dim of the slice."""
        return [int(size) for size in self.topology.partition(":")[2].split("x")]


class Remat(NamedTuple):
    """What the backward pass does not recompute: for shardopt, for MaxText, and in words."""

    shardopt: str
    maxtext: list[str]
    words: str


REMAT = {
    "full": Remat("full", ["remat_policy=full"], ""),
    "attention": Remat(
        "save:attention", ["remat_policy=custom", "context=device"], "keeps attention"
    ),
    "projections": Remat(
        "save:qkv,attention,attention_out",
        ["remat_policy=save_dot_with_context_except_mlp"],
        "keeps attention and its products",
    ),
    "products": Remat(
        "save:qkv,attention,attention_out,mlp_hidden",
        ["remat_policy=minimal_with_context"],
        "keeps all products",
    ),
}


class Choice(NamedTuple):
    """What each side may choose.

    Attributes:
      remat: recompute every block; keep what attention mixes and its logarithms; also the products
        of attention; or all products.
      tiles: parts of a row, or of the batch with MaxText, whose logits are held at a time.
      block: queries and keys of a tile of attention. With 1024 MaxText takes jax's fused backward
        kernel. shardopt has 512, with up to four heads at a time.
      fused: gate and up as one product, and queries, keys and values as one. shardopt always has
        the first.
      vmem: MiB of a core's memory that one operation may use.
      collective_matmul: whether XLA sends what tensor shards in pieces, between pieces of a
        product.
    """

    remat: Literal["full", "attention", "projections", "products"] = "full"
    tiles: int = 1
    block: int = 512
    fused: bool = False
    vmem: int = 48
    collective_matmul: bool = True

    @classmethod
    def of(cls, text: str) -> "Choice":
        """Read a choice such as "attention,1,1024,True,48,True"."""
        remat, tiles, block, fused, vmem, collective_matmul = text.split(",")
        return cls(
            remat, int(tiles), int(block), fused == "True", int(vmem), collective_matmul == "True"
        )

    @property
    def xla_options(self) -> dict[str, int]:
        """Return it as options of the compiler."""
        options = {"xla_tpu_scoped_vmem_limit_kib": self.vmem * 1024}
        return options if self.collective_matmul else options | {COLLECTIVE_MATMUL: 1_000_000}

    def __str__(self) -> str:
        """Return what differs from the defaults, and the memory."""
        words = [
            REMAT[self.remat].words,
            f"loss in {self.tiles}" if self.tiles > 1 else "",
            f"blocks {self.block}" if self.block != 512 else "",
            "fused products" if self.fused else "",
            "" if self.collective_matmul else "no collective matmul",
        ]
        return f"{', '.join(filter(None, words)) or 'defaults'}, {self.vmem} MiB"


def choices(who: str, row: Row) -> dict[str, tuple[Any, ...]]:
    """Return the other values of each field of `Choice` in the order in which they are tried.

    Shardopt has no other blocks.
    """
    # a core of v5p has 64 MiB, others have 128
    vmem = {"v5p": (60,), "v5e": (96, 120), "v6e": (48, 120)}[row.chip]
    common: dict[str, tuple[Any, ...]] = {"remat": tuple(REMAT)[1:], "tiles": (4,), "vmem": vmem}
    if row.tensor > 1:
        common["collective_matmul"] = (who == "shardopt",)
    return common if who == "shardopt" else {"fused": (True,), "block": (1024,), **common}


def search(who: str, row: Row, run: Callable[[Choice], dict[str, Any]]) -> None:
    """Run the defaults, then the other values of one field after the other, each with the best so
    far.
    """
    # the limit of VMEM is that of so.runtime.compiler_options for both, and shardopt begins with
    # its other options too
    best = Choice(
        fused=who == "shardopt",
        vmem=96 if row.chip == "v6e" else 48,
        collective_matmul=who == "maxtext" or row.tensor == 1,
    )
    seconds = run(best).get("seconds", math.inf)
    for field, values in choices(who, row).items():
        for choice in [best._replace(**{field: value}) for value in values]:
            new = run(choice).get("seconds", math.inf)
            if new < seconds:
                best = choice
                seconds = new


TABLE = (
    Row("v5p:4x4x4", 2048, 1),
    Row("v5p:4x4x4", 4096, 1),
    Row("v5p:4x4x4", 8192, 1),
    Row("v5p:4x4x4", 4096, 4),
    Row("v6e:8x8", 2048, 1),
    Row("v6e:8x8", 4096, 4),
    Row("v5p:4x4x4", 4096, 1, tensor=4),
)
MORE = (
    Row("v5p:8x8x8", 4096, 1),
    Row("v5e:16x16", 2048, 1),
    Row("v5p:8x8x8", 4096, 1, tensor=4, model="llama3-70b"),
    Row("v5p:8x8x8", 4096, 1, model="llama3-70b"),
    Row("v5p:4x4x4", 4096, 1, micro_batches=4),
    Row("v6e:8x8", 8192, 1),
    Row("v5p:4x4x4", 4096, 1, model="qwen3-8b"),
    Row("v6e:8x8", 2048, 2, model="gemma2-2b"),
)


def shardopt_strategy(row: Row, choice: Choice, model: Any) -> Callable[[Any], Any]:
    """Return a function from the mesh to the strategy that trains a model in a row."""
    import jax.numpy as jnp
    import optax

    import shardopt as so
    from shardopt.planning._models import RULES

    adamw = optax.adamw(3e-5, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def make(mesh):
        options = {}  # those below are libtpu's
        if row.chip != "cpu":
            options = dict(so.runtime.compiler_options(mesh))
            options.pop(COLLECTIVE_MATMUL, None)
            options |= choice.xla_options
        return so.fsdp(
            tx,
            mesh,
            model,
            gather_dtype=jnp.bfloat16,
            reducer=so.reducers.exact(jnp.bfloat16),
            rules=RULES if row.tensor > 1 else (),
            micro_batches=row.micro_batches,
            compiler_options=options,
        )

    return make


def compile_shardopt(row: Row, choice: Choice) -> tuple[dict[str, Any], str]:
    """Return what the compiler says of shardopt's step, and its text."""
    import jax
    import jax.numpy as jnp

    import shardopt as so

    model, init = model_of(row, choice)
    params = jax.eval_shape(init, jax.random.key(0))
    tokens = row.rows * row.chips * row.micro_batches, row.length + 1
    try:
        report = so.planning.aot(
            shardopt_strategy(row, choice, model),
            params,
            {"tokens": jax.ShapeDtypeStruct(tokens, jnp.int32)},
            topology=row.topology,
            tensor=row.tensor,
        )
    except ValueError as error:  # it does not fit
        return {"error": str(error).splitlines()[0]}, ""
    facts = {
        "compile_seconds": report.compile_seconds,
        "memory": report.memory._asdict(),
        "mesh": report.mesh_shape,
    }
    return facts | {"libtpu": importlib.metadata.version("libtpu")}, report.text


def model_of(row: Row, choice: Choice) -> tuple[Any, Callable[[Any], Any]]:
    """Return the model of a row, and the function from a random key to its parameters."""
    import dataclasses

    import jax.numpy as jnp
    import transformer

    from shardopt.models import decoder
    from shardopt.models.decoder import BlockKind, Rope
    from shardopt.planning._models import find_model

    remat = REMAT[choice.remat].shardopt
    chunk = row.length // choice.tiles if choice.tiles > 1 else None
    logits_dtype = jnp.bfloat16  # as MaxText's: logits_dot_in_fp32=false
    if row.model.startswith("llama3"):
        shape = dataclasses.replace(find_model(row.model), length=row.length)
        options = {
            "chunk": chunk,
            "logits_dtype": logits_dtype,
            "sequence_parallel": row.tensor > 1,
        }
        init = functools.partial(transformer.init, shape)
        return transformer.model(shape, remat=remat, **options), init
    config_of = functools.partial(
        decoder.DecoderConfig,
        dtype=jnp.bfloat16,
        logits_dtype=logits_dtype,
        loss_chunk=chunk,
        fused="kv",
    )
    if row.model == "tiny":
        config = config_of(
            vocab_size=TINY.vocab,
            dim=TINY.dim,
            num_layers=TINY.layers,
            num_heads=TINY.heads,
            num_kv_heads=TINY.kv_heads,
            hidden=TINY.hidden,
        )
    elif row.model == "qwen3-8b":  # huggingface.co/Qwen/Qwen3-8B, config.json
        config = config_of(
            vocab_size=151_936,
            dim=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            hidden=12_288,
            kinds=(BlockKind(rope=Rope(base=1e6)),),
            qk_norm="head",
        )
    else:
        # huggingface.co/google/gemma-2-2b, config.json; the vocabulary is MaxText's
        assert row.model == "gemma2-2b"
        config = config_of(
            vocab_size=256_128,
            dim=2304,
            num_layers=26,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            hidden=9216,
            kinds=(BlockKind(window=4096), BlockKind()),
            pattern=(0, 1) * 13,
            norm="rms_plus_one",
            post_norms=True,
            activation="gelu_tanh",
            tied=True,
            attention_softcap=50.0,
            logits_softcap=30.0,
            embedding_scale=2304**0.5,
        )
    return decoder.model(config, remat=remat), functools.partial(decoder.init, config)


def maxtext_flags(row: Row, choice: Choice) -> list[str]:
    """Return the flags of libtpu with which MaxText's step is compiled."""
    offloaded = () if row.chip == "v5e" else SPARSE_CORE  # v5e has no SparseCore
    return [f"--{name}={value}" for name, value in choice.xla_options.items()] + [
        f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true" for kind in offloaded
    ]


def maxtext_words(row: Row, choice: Choice) -> list[str]:
    """Return the words of a row and a choice for MaxText."""
    return [
        f"per_device_batch_size={row.rows}",
        f"max_target_length={row.length}",
        f"model_name={row.model}",
        "attention=flash",
        f"gradient_accumulation_steps={row.micro_batches}",
        f"ici_tensor_parallelism={row.tensor}",
        "ici_fsdp_parallelism=-1",
        *["allow_split_physical_axes=true"] * row.splits_a_dim,
        *REMAT[choice.remat].maxtext,
        f"num_vocab_tiling={choice.tiles}",
        f"fused_mlp={choice.fused}",
        f"fused_qkv={choice.fused}",
        *[f"{name}={choice.block}" for name in BLOCKS if choice.block != 512],
        f"sa_use_fused_bwd_kernel={choice.block != 512}",
    ]


def compile_maxtext(
    row: Row, python: str, choice: Choice | None = None, *, more: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Return what the compiler says of MaxText's step, and its text; `more` are words for MaxText.

    A process with its own Python compiles.
    """
    choice = choice or Choice()
    words = [
        f"compile_topology={row.chip}-{row.chips * (2 if row.chip in ('v4', 'v5p') else 1)}",
        f"compile_xla_flags={' '.join(maxtext_flags(row, choice))}",
        *maxtext_words(row, choice),
        *more,
    ]
    with tempfile.TemporaryDirectory() as folder:
        child = [python, __file__, "--child", folder, *words]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            child, env=env, cwd=folder, capture_output=True, text=True, check=False
        )
        facts_path = Path(folder) / "facts.json"
        program = Path(folder) / "program.hlo.gz"
        if not facts_path.exists():
            lines = (done.stdout + done.stderr).splitlines()
            raise SystemExit(f"{row.name}: MaxText did not compile:\n" + "\n".join(lines[-25:]))
        facts = json.loads(facts_path.read_text()) | {"words": words}
        return facts, gzip.decompress(program.read_bytes()).decode() if program.exists() else ""


BLOCKS = tuple(
    f"sa_block_{side}" for side in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
)


GIVEN = (
    "run_name=beside",
    "base_output_directory=out",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "skip_jax_distributed_system=true",
    "log_config=false",
)


def maxtext_child(folder: Path, words: list[str]) -> None:
    """Compile in MaxText's own Python, and leave the program and its memory in the folder."""
    told = {
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-128",
    }
    for name, value in told.items():
        os.environ.setdefault(name, value)
    import jax
    import maxtext
    from absl import app
    from maxtext.trainers.pre_train import train_compile

    def jit_and_compile(
        func, args, kwargs, mesh, in_shardings, out_shardings, static, donate, config, rules
    ):
        with jax.set_mesh(mesh), rules:
            jitted = jax.jit(
                func,
                in_shardings=in_shardings,
                out_shardings=out_shardings,
                static_argnums=static,
                donate_argnums=donate,
            )
            lowered = jitted.lower(*args, **kwargs)
        start = time.perf_counter()
        options = train_compile.max_utils.parse_libtpu_flags_to_dict(config.compile_xla_flags)
        versions = {name: importlib.metadata.version(name) for name in ("maxtext", "jax", "libtpu")}
        facts: dict[str, Any] = {"versions": versions, "mesh": dict(mesh.shape)}
        (folder / "mesh.json").write_text(json.dumps(facts))
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            facts["error"] = str(error)[:2000]
            (folder / "facts.json").write_text(json.dumps(facts))
            os._exit(1)  # MaxText would go on and look at the program
        analysis = compiled.memory_analysis()
        facts["compile_seconds"] = time.perf_counter() - start
        facts["memory"] = {
            "arguments": analysis.argument_size_in_bytes,
            "outputs": analysis.output_size_in_bytes,
            "temporary": analysis.temp_size_in_bytes,
            "aliased": analysis.alias_size_in_bytes,
        }
        with gzip.open(folder / "program.hlo.gz", "wt", compresslevel=1) as file:
            file.write(compiled.as_text())
        (folder / "facts.json").write_text(json.dumps(facts))
        os._exit(0)

    train_compile.jit_and_compile = jit_and_compile
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    app.run(
        train_compile.main,
        argv=["train_compile", str(base), "compile_topology_num_slices=1", *GIVEN, *words],
    )


def read(text: str, mesh: dict[str, int], row: Row) -> dict[str, Any]:
    """Return what the text of a compiled program tells, the same of both."""
    from step_times import step_seconds

    import shardopt as so
    from shardopt.hlo import inner_product_flops

    sizes = {axis: size for axis, size in mesh.items() if size > 1}
    step = step_seconds(text, mesh=sizes, hardware=row.chip, kernels="stated")
    scheduled = step_seconds(text, mesh=sizes, hardware=row.chip)
    audit = so.hlo.audit(text, mesh=sizes)
    return {
        "seconds": step.total,
        "scheduled": scheduled.total,
        "kernels": {
            operation.name: [operation.calls, operation.basis, operation.seconds]
            for operation in scheduled.operations
            if operation.basis
        },
        "compute": step.compute,
        "exposed": step.exposed,
        "hidden": step.hidden,
        "flops": inner_product_flops(text),
        "sent": {kind: traffic.wire_bytes for kind, traffic in audit.by_kind().items()},
        "dearest": [operation._asdict() for operation in step.operations],
        "notes": list(step.notes),
    }


def peak(facts: dict[str, Any]) -> float:
    """Return the bytes of a chip, as `so.planning.aot` counts them."""
    memory = facts["memory"]
    return memory["arguments"] + memory["temporary"] + memory["outputs"] - memory["aliased"]


def fits(program: dict[str, Any], row: Row) -> bool:
    """Return whether a program has an estimate and fits into the memory of a chip."""
    from shardopt.planning import HARDWARE

    return "seconds" in program and peak(program) <= HARDWARE[row.chip].memory_bytes


def compared(programs: dict[str, Any]) -> dict[str, Any]:
    """Return the claim: shardopt's step over that of MaxText, and memory over its memory."""
    ours, theirs = (programs.get(who, {}) for who in CONTENDERS)
    if "seconds" not in ours or "seconds" not in theirs:
        return {}
    ratios = {
        "ratio": ours["seconds"] / theirs["seconds"],
        "memory_ratio": peak(ours) / peak(theirs),
    }
    if "scheduled" in ours and "scheduled" in theirs:
        ratios["scheduled_ratio"] = ours["scheduled"] / theirs["scheduled"]
    return ratios


class Sizes(NamedTuple):
    """The sizes of a decoder that its flops depend on."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int


TINY = Sizes(2, 64, 4, 2, 16, 128, 512)
"""The model "tiny", which has no row in the table."""
SIZES = {
    "llama3-8b": Sizes(32, 4096, 32, 8, 128, 14_336, 128_256),
    "llama3-70b": Sizes(80, 8192, 64, 8, 128, 28_672, 128_256),
    "qwen3-8b": Sizes(36, 4096, 32, 8, 128, 12_288, 151_936),
    "gemma2-2b": Sizes(26, 2304, 8, 4, 256, 9216, 256_128),
}


def model_flops(row: Row) -> tuple[float, float]:
    """Return the flops of a chip in a step that the model needs: (with causal attention, with all
    of the square).

    Three times the forward pass, without what is recomputed. The lookup of the embedding counts
    nothing.
    """
    sizes = SIZES[row.model]
    attention_width = sizes.heads * sizes.head_dim
    projections = sizes.dim * (2 * attention_width + 2 * sizes.kv_heads * sizes.head_dim)
    block = projections + 3 * sizes.dim * sizes.hidden
    weights = sizes.layers * block + sizes.dim * sizes.vocab
    rows = row.rows * row.micro_batches
    products = 6.0 * weights * rows * row.length
    scores = 12.0 * sizes.layers * attention_width * rows * row.length**2
    return products + scores / 2, products + scores


def mfu(name: str, seconds: float) -> str:
    """Return the MFU of a row by both counts, in percent; "" if no row has this name."""
    from shardopt.planning import HARDWARE

    for row in (*TABLE, *MORE):
        if row.name == name:
            peak_flops = HARDWARE[row.chip].flops * seconds
            causal, full = (flops / peak_flops for flops in model_flops(row))
            return f"{causal:.1%}, {full:.1%}"
    return ""


def table(results: dict[str, Any]) -> str:
    """Return a line a row: milliseconds by stated and by scheduled kernels, GB, MFU and choice of
    each contender, and the ratio of memory. Ratios of time are withdrawn: see
    docs/notes/maxtext.md.
    """
    lines = [
        "| row | "
        + " | ".join(
            f"{name}: ms (exposed), ms scheduled, GB | MFU causal, full | choice"
            for name in CONTENDERS
        )
        + " | memory | libtpu | commit |"
    ]
    lines.append("|" + "---|" * (3 * len(CONTENDERS) + 4))
    for name, programs in results.items():
        cells = [name]
        for who in CONTENDERS:
            program = programs.get(who, {})
            if "seconds" in program:
                scheduled = f"{program['scheduled'] * 1e3:.0f}" if "scheduled" in program else "-"
                stated = f"{program['seconds'] * 1e3:.0f} ({program['exposed'] * 1e3:.0f})"
                cells.append(f"{stated}, {scheduled}, {peak(program) / 1e9:.1f}")
                cells.append(mfu(name, program.get("scheduled", program["seconds"])))
                count = len(programs.get("tried", {}).get(who, {}))
                cells.append(f"{Choice(**program['choice'])}; best of {count}")
            else:
                cells += [program.get("error", "")[:60], "", ""]
        ours = programs.get("shardopt", {})
        memory = f"{programs['memory_ratio']:.3f}" if "memory_ratio" in programs else ""
        lines.append(
            "| "
            + " | ".join([*cells, memory, ours.get("libtpu", "0.0.52"), ours.get("commit", "")])
            + " |"
        )
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw each row's steps as bars, computing and waiting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {name: found for name, found in results.items() if "ratio" in found}
    grey = "#6b7280"
    light = "#c3c9d2"
    colours = dict(zip(CONTENDERS, ("#3b6ea8", "#d1495b"), strict=True))
    figure = Figure(figsize=(9.5, 0.9 + 0.78 * max(len(rows), 1)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ticks = []
    labels = []
    seen = set()
    for place, (name, found) in enumerate(rows.items()):
        present = [who for who in CONTENDERS if "seconds" in found.get(who, {})]
        longest = max(found[who]["seconds"] for who in present)
        for i, who in enumerate(present):
            one = found[who]
            y = place + 0.26 * (i - (len(present) - 1) / 2)
            label = who if who not in seen else None
            seen.add(who)
            axes.barh(y, one["compute"] / longest, 0.22, color=colours[who], label=label)
            axes.barh(y, one["exposed"] / longest, 0.22, left=one["compute"] / longest, color=light)
            words = f" {one['seconds'] * 1e3:.0f} ms, {peak(one) / 1e9:.1f} GB"
            axes.text(one["seconds"] / longest, y, words, va="center", fontsize=7, color=grey)
        ticks.append(place)
        labels.append(name.replace(" ", "\n", 1))
    axes.barh([0], [0], color=light, label="waits for other chips")
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2)
    axes.set_xticks([])
    axes.tick_params(length=0, colors=grey)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#d1d5db")
    figure.legend(frameon=False, loc="outside upper center", ncols=4, fontsize=8)
    axes.set_xlabel(
        "step over the longest of its row, by XLA's own estimates", fontsize=8, color=grey
    )
    figure.savefig(path)


def main() -> None:
    """Compile what is not there yet, and print the table."""
    if sys.argv[1:2] == ["--child"]:
        maxtext_child(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words",
        nargs="*",
        help="parts of the names of rows, among " + "; ".join(r.name for r in MORE),
    )
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument(
        "--only", action="append", choices=CONTENDERS, help="compile only this; may be given again"
    )
    parser.add_argument(
        "--choice",
        action="append",
        help="compile this alone, as remat,tiles,block,fused,vmem; may be repeated",
    )
    parser.add_argument(
        "--read", action="store_true", help="read the stored programs again, and compile none"
    )
    parser.add_argument(
        "--programs", type=Path, default=Path(tempfile.gettempdir()) / "beside_maxtext"
    )
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options.programs.mkdir(exist_ok=True)
    every = (*TABLE, *MORE)
    words = options.words
    named = [row for row in every if row.name == " ".join(words)]
    for row in (
        named or [row for row in every if all(word in row.name for word in words)]
        if words
        else TABLE
    ):
        for who in options.only or CONTENDERS:
            if options.read:
                for path in sorted(options.programs.glob(f"{stem(row, who)} *.json")):
                    facts = json.loads(path.read_text())
                    store(row, who, Choice(**facts["choice"]), again(path, row))
            elif options.choice and (who == "shardopt" or options.maxtext):
                for text in options.choice:
                    tried(row, who, Choice.of(text), options)
            elif who == "shardopt" or options.maxtext:
                search(who, row, lambda choice, who=who, row=row: tried(row, who, choice, options))
    results = stored()
    print(table(results))
    draw(results, RESULTS.with_suffix(".png"))


def stored() -> dict[str, Any]:
    """Return the results so far."""
    return json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}


def stem(row: Row, who: str) -> str:
    """Return the beginning of the names of a row's files."""
    return f"{row.name} {who}".replace(":", "-")


def tried(row: Row, who: str, choice: Choice, options: argparse.Namespace) -> dict[str, Any]:
    """Compile a program unless its text is there, store and return what it tells."""
    path = options.programs / f"{stem(row, who)} {'-'.join(map(str, choice))}.json"
    if not path.exists():
        facts, text = (
            compile_shardopt(row, choice)
            if who == "shardopt"
            else compile_maxtext(row, options.maxtext, choice)
        )
        path.with_suffix(".hlo.gz").write_bytes(gzip.compress(text.encode(), 1))
        path.write_text(json.dumps(facts | {"choice": choice._asdict(), "commit": commit()}))
    return store(row, who, choice, again(path, row))


def again(path: Path, row: Row) -> dict[str, Any]:
    """Return what a stored program tells."""
    facts = json.loads(path.read_text())
    text = gzip.decompress(path.with_suffix(".hlo.gz").read_bytes()).decode()
    return facts | (read(text, facts["mesh"], row) if text else {})


def store(row: Row, who: str, choice: Choice, program: dict[str, Any]) -> dict[str, Any]:
    """Add a program to the results: the best that was tried, and a line for each."""
    results = stored()  # others may have written
    programs = results.get(row.name, {})
    line = {
        "seconds": program.get("seconds"),
        "bytes": peak(program) if "memory" in program else None,
    }
    lines = programs.get("tried", {}).get(who, {}) | {str(choice): line}
    old = programs.get(who, {})
    better = (
        "choice" not in old
        or Choice(**old["choice"]) == choice
        or program.get("seconds", math.inf) < old["seconds"]
    )
    if fits(program, row) and better:
        programs[who] = program
    programs["tried"] = programs.get("tried", {}) | {who: lines}
    results[row.name] = programs | compared(programs)
    results = {one.name: results[one.name] for one in (*TABLE, *MORE) if one.name in results}
    write_json(__file__, results, RESULTS)
    said = (
        f"{program['seconds'] * 1e3:.1f} ms, {program['exposed'] * 1e3:.1f} of it exposed,"
        f" {peak(program) / 1e9:.2f} GB, compiled in {program['compile_seconds']:.0f} s"
        if "seconds" in program
        else str(program.get("error"))
    )
    print(f"{row.name}, {who}, {choice}: {said}", flush=True)
    return program


if __name__ == "__main__":
    main()
