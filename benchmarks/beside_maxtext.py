"""shardopt's step beside MaxText's: both compiled by the real TPU compiler for the same chips, model and batch, without a TPU.

    python benchmarks/beside_maxtext.py [WORDS ...] --maxtext PYTHON [--only shardopt] [--again]

PYTHON is that of an environment of its own with `pip install 'maxtext[tpu]==0.2.5'`; this one needs
`pip install 'shardopt[tpu]'` of the same jax. fsdp, bfloat16 products, logits and gathers, fp32 masters, AdamW with clipping
at 1, every block recomputed; MaxText by its own `train_compile`, with splash attention, and the flags that its scripts give
to such chips. Both programs are read by `so.planning.step_seconds`: cycles as XLA estimates them, collectives over published
links; memory is what the compiler planned. WORDS choose rows by parts of their names; without, those of the table are done.
A program takes minutes to compile. It is kept in results/beside_maxtext.json as soon as it is there, with the commit that
compiled it, and not compiled again without `--again`. The picture is drawn at the end.
"""

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import write_json

RESULTS = Path(__file__).parent / "results" / "beside_maxtext.json"
SPARSE_CORE = ("all_gather", "reduce_scatter", "all_reduce", "3d_all_gather", "2d_all_gather", "nd_reduce_scatter")
VMEM_KIB = 49152
"""What one operation may take of a core's own memory; shardopt's default."""
CONTENDERS = ("shardopt", "maxtext")


class Row(NamedTuple):
    """What is compiled: rows of `length` tokens, `rows` a chip and micro-batch; shardopt's `chunk` of the loss and `remat`."""

    topology: str
    length: int
    rows: int
    tensor: int = 1
    model: str = "llama3-8b"
    micro_batches: int = 1
    chunk: int | None = None
    remat: str = "full"

    @property
    def name(self) -> str:
        """Return it in words."""
        sizes = f"{self.model} {self.topology} {self.length} x {self.rows}"
        tensor = f" tensor={self.tensor}" if self.tensor > 1 else ""
        return sizes + tensor + (f" micro_batches={self.micro_batches}" if self.micro_batches > 1 else "")

    @property
    def chip(self) -> str:
        """Return the kind of chip."""
        return self.topology.partition(":")[0]

    @property
    def chips(self) -> int:
        """Return how many there are."""
        return math.prod(map(int, self.topology.partition(":")[2].split("x")))

    @property
    def flags(self) -> str:
        """Return the flags of MaxText; v5e has no SparseCore."""
        some = () if self.chip == "v5e" else SPARSE_CORE
        words = [f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true" for kind in some]
        return " ".join([f"--xla_tpu_scoped_vmem_limit_kib={VMEM_KIB}", *words])


TABLE = (
    Row("v5p:4x4x4", 2048, 1),
    Row("v5p:4x4x4", 4096, 1),
    Row("v5p:4x4x4", 8192, 1, chunk=2048),
    Row("v5p:4x4x4", 4096, 4, chunk=1024, remat="save:attention"),
    Row("v6e:8x8", 2048, 1),
    Row("v6e:8x8", 4096, 4, chunk=512),
    Row("v5p:4x4x4", 4096, 1, tensor=4, chunk=512),
)
MORE = (
    Row("v5p:8x8x8", 4096, 1),
    Row("v5e:16x16", 2048, 1),
    Row("v5p:8x8x8", 4096, 1, tensor=4, model="llama3-70b", chunk=512),
    Row("v5p:8x8x8", 4096, 1, model="llama3-70b"),
    Row("v5p:4x4x4", 4096, 1, micro_batches=4),
)


def compile_shardopt(row: Row) -> dict[str, Any]:
    """Return what the compiler says of shardopt's step."""
    import dataclasses

    import jax.numpy as jnp
    import optax

    import shardopt as so
    from shardopt.models import _transformer as transformer
    from shardopt.planning import find_model
    from shardopt.planning._models import RULES

    shape = dataclasses.replace(find_model(row.model), length=row.length)
    adamw = optax.adamw(3e-5, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    report = so.aot(
        lambda mesh: so.fsdp(
            tx,
            mesh,
            transformer.model(
                shape,
                remat=row.remat,
                chunk=row.chunk,
                logits_dtype=jnp.bfloat16,  # as MaxText's: logits_dot_in_fp32=false
                sequence_parallel=row.tensor > 1,
            ),
            gather_dtype=jnp.bfloat16,
            scatter_dtype=jnp.bfloat16,
            rules=RULES if row.tensor > 1 else (),
            micro_batches=row.micro_batches,
            min_shard_elements=2**14,  # norms stay replicated, as MaxText's do
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, row.rows * row.chips * row.micro_batches),
        topology=row.topology,
        tensor=row.tensor,
    )
    memory = report.memory._asdict()
    told = {"compile_seconds": report.compile_seconds, "memory": memory, "chunk": row.chunk, "remat": row.remat}
    return told | read(report.text, report.mesh_shape, row)


def compile_maxtext(row: Row, python: str, *, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the compiler says of MaxText's step, which a process with its own Python compiles; `more` are words for it."""
    words = [
        f"compile_topology={row.chip}-{row.chips * (2 if row.chip in ('v4', 'v5p') else 1)}",
        f"per_device_batch_size={row.rows}",
        f"max_target_length={row.length}",
        f"model_name={row.model.replace('llama3', 'llama3.1')}",
        "attention=flash",
        f"gradient_accumulation_steps={row.micro_batches}",
        f"ici_tensor_parallelism={row.tensor}",
        "ici_fsdp_parallelism=-1",
        "remat_policy=full",
        f"compile_xla_flags={row.flags}",
        *more,
    ]
    with tempfile.TemporaryDirectory() as folder:
        child = [python, __file__, "--child", folder, *words]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(child, env=env, cwd=folder, capture_output=True, text=True, check=False)
        facts = Path(folder) / "facts.json"
        if not facts.exists():
            lines = (done.stdout + done.stderr).splitlines()
            raise SystemExit(f"{row.name}: MaxText did not compile:\n" + "\n".join(lines[-25:]))
        found = json.loads(facts.read_text())
        program = Path(folder) / "program.hlo.gz"
        text = gzip.decompress(program.read_bytes()).decode() if program.exists() else ""
    return found | {"words": words} | (read(text, found["mesh"], row) if text else {})


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
    import importlib.metadata

    import jax
    import maxtext
    from absl import app
    from maxtext.trainers.pre_train import train_compile

    given = [
        "compile_topology_num_slices=1",
        "run_name=beside",
        "base_output_directory=out",
        "dataset_type=synthetic",
        "enable_checkpointing=false",
        "skip_jax_distributed_system=true",
        "log_config=false",
    ]

    def jit_and_compile(func, args, kwargs, mesh, in_shardings, out_shardings, static, donate, config, rules):
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
    app.run(train_compile.main, argv=["train_compile", str(base), *given, *words])


def read(text: str, mesh: dict[str, int], row: Row) -> dict[str, Any]:
    """Return what the text of a compiled program tells, the same of both."""
    import shardopt as so
    from shardopt.hlo import inner_product_flops

    sizes = {axis: size for axis, size in mesh.items() if size > 1}
    step = so.planning.step_seconds(text, mesh=sizes, hardware=row.chip)
    found = so.audit(text, mesh=sizes)
    return {
        "seconds": step.total,
        "compute": step.compute,
        "exposed": step.exposed,
        "hidden": step.hidden,
        "flops": inner_product_flops(text),
        "sent": {kind: one.wire_bytes for kind, one in found.by_kind().items()},
        "mesh": sizes,
        "dearest": [one._asdict() for one in step.operations],
        "notes": list(step.notes),
    }


def commit() -> str:
    """Return the commit of this tree, and whether the code was changed since."""

    def git(*words: str) -> str:
        run = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "shardopt", "benchmarks/*.py")
    return git("rev-parse", "--short=7", "HEAD") + (", changed" if changed else "")


def peak(facts: dict[str, Any]) -> float:
    """Return the bytes of a chip, as `so.aot` counts them."""
    memory = facts["memory"]
    return memory["arguments"] + memory["temporary"] + memory["outputs"] - memory["aliased"]


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the claim: shardopt's step over that of MaxText, and memory over its memory."""
    ours, theirs = (found.get(who, {}) for who in CONTENDERS)
    if "seconds" not in ours or "seconds" not in theirs:
        return {}
    return {"ratio": ours["seconds"] / theirs["seconds"], "memory_ratio": peak(ours) / peak(theirs)}


def table(results: dict[str, Any]) -> str:
    """Return a line a row: milliseconds and GB of each contender, and the claim."""
    lines = [
        "| row | " + " | ".join(f"{name}: ms (exposed), GB" for name in CONTENDERS) + " | step | memory | commit |"
    ]
    lines.append("|" + "---|" * (len(CONTENDERS) + 4))
    for name, found in results.items():
        cells = [name]
        for who in CONTENDERS:
            one = found.get(who, {})
            cells.append(
                f"{one['seconds'] * 1e3:.0f} ({one['exposed'] * 1e3:.0f}), {peak(one) / 1e9:.1f}"
                if "seconds" in one
                else one.get("error", "").splitlines()[0][:60]
                if one.get("error")
                else ""
            )
        ratios = [f"{found[key]:.3f}" if key in found else "" for key in ("ratio", "memory_ratio")]
        lines.append("| " + " | ".join([*cells, *ratios, found.get("shardopt", {}).get("commit", "")]) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw each row's steps as bars, computing and waiting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {name: found for name, found in results.items() if "ratio" in found}
    grey, light = "#6b7280", "#c3c9d2"
    colours = dict(zip(CONTENDERS, ("#3b6ea8", "#d1495b"), strict=True))
    figure = Figure(figsize=(9.5, 0.9 + 0.78 * max(len(rows), 1)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ticks, labels, seen = [], [], set()
    for place, (name, found) in enumerate(rows.items()):
        present = [who for who in CONTENDERS if "seconds" in found.get(who, {})]
        longest = max(found[who]["seconds"] for who in present)
        for i, who in enumerate(present):
            one, y = found[who], place + 0.26 * (i - (len(present) - 1) / 2)
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
    axes.set_xlabel("step over the longest of its row, by XLA's own estimates", fontsize=8, color=grey)
    figure.savefig(path)


def main() -> None:
    """Compile what is not there yet, and print the table."""
    if sys.argv[1:2] == ["--child"]:
        maxtext_child(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of rows, among " + "; ".join(r.name for r in MORE))
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="compile only this; may be given again")
    parser.add_argument("--again", action="store_true", help="compile what is there already, too")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    every, words = (*TABLE, *MORE), options.words
    named = [row for row in every if row.name == " ".join(words)]
    for row in named or [row for row in every if all(word in row.name for word in words)] if words else TABLE:
        for who in CONTENDERS:
            found = results.setdefault(row.name, {})
            if (options.only and who not in options.only) or (who in found and not options.again):
                continue
            if who == "shardopt":
                found[who] = compile_shardopt(row)
            elif options.maxtext:
                found[who] = compile_maxtext(row, options.maxtext)
            else:
                continue
            found[who]["commit"] = commit()
            now = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}  # others may have written
            found = now.get(row.name, {}) | {who: found[who]}
            results = now | {row.name: found | compared(found)}
            results = {one.name: results[one.name] for one in every if one.name in results}
            write_json(__file__, results, RESULTS)
            print(f"{row.name}, {who}: {_told(found[who])}", flush=True)
    print(table(results))
    draw(results, RESULTS.with_suffix(".png"))


def _told(one: dict[str, Any]) -> str:
    if "seconds" not in one:
        return str(one.get("error"))
    return (
        f"{one['seconds'] * 1e3:.1f} ms, {one['exposed'] * 1e3:.1f} of it exposed, {peak(one) / 1e9:.2f} GB, "
        f"compiled in {one['compile_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
