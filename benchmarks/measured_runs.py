"""Estimated seconds of steps beside seconds that others measured on TPUs, and the share e of the HBM
bandwidth that these runs give.

    python benchmarks/measured_runs.py --runs FILE [--draw] [--compile ID --maxtext PYTHON
        [--whole]] [--programs FOLDER]

FILE has public measured runs, one a line. Those on TPUs that state enough to be compiled again are
drawn into two halves within each generation, by `SEED`: e is fitted on one half, and the errors of
the other half are published. `--draw` writes both halves into results/measured_runs.json. They were
committed before the first of these runs was compiled.

`--compile` compiles a run by MaxText's own `train_compile`, with the words and flags of the run, in
the Python of an environment with MaxText, until it is scheduled. Its products have no cycles by XLA
then, and count by their flops at the peak. `--whole` generates code, which takes ten times as long.
Flags that libtpu refuses are left out, and the result lists them. The texts are kept in FOLDER. Without it, the texts there are read again.
"""

import argparse
import gzip
import json
import os
import random
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import write_json

RESULTS = Path(__file__).parent / "results" / "measured_runs.json"
SEED = 65
HALVES = ("fit", "test")
GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")
CHOSEN = (76, 77, 78, 79, 63, 67, 59, 73, 36, 31, 38, 39, 16, 15, 14, 17)
"""The runs that are compiled, four a generation and two of each half. They were chosen before any
estimate, 73 apart, by what a compile costs: dense models with scanned layers, few flags and chips."""
THEN = (45, 64, 40, 35, 12, 26)
"""The runs that come after these, in this order, as far as the time lasts."""
ASSUMED = 0.7
"""The share for a generation without a fit, as in `step_times/memory_shares.csv`."""
SHARES = [round(0.3 + 0.1 * step, 1) for step in range(8)]
"""Shares of the HBM bandwidth among which the fit chooses."""


def mark(run: dict[str, Any]) -> str:
    """Return what is weak about the seconds of a run: they are derived, a bound, or disputed."""
    kind = run["step_seconds"]["kind"]
    weak = [] if kind == "stated" else [kind]
    return ", ".join([*weak, *["disputed"] * bool(run["conflicts"])])


def halves(runs: list[dict[str, Any]], seed: int = SEED) -> dict[int, str]:
    """Return the half of each run that can be compiled again, by its id.

    Within a generation the numbers of both halves differ by at most one, and errors get the larger.
    """
    drawn = {}
    for chip in GENERATIONS:
        ids = sorted(run["id"] for run in runs if run["chip"] == chip and run["complete"])
        random.Random(f"{seed} {chip}").shuffle(ids)
        count = len(ids) // 2
        drawn |= dict.fromkeys(ids[:count], "fit") | dict.fromkeys(ids[count:], "test")
    return drawn


def drawn_rows(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each run that was drawn: what it is, its half and its measured seconds."""
    half_of = halves(runs)
    return {
        str(run["id"]): {
            "name": run["name"],
            "chip": run["chip"],
            "chips": run["chips"],
            "slices": run["slices"],
            "half": half_of[run["id"]],
            "measured_seconds": run["step_seconds"]["value"],
            "mark": mark(run),
        }
        for run in sorted(runs, key=lambda run: run["id"])
        if run["id"] in half_of
    }


def slices_of(run: dict[str, Any]) -> int:
    """Return the slices of a run; of a table with several numbers, its first."""
    return int(str(run["slices"]).split(" ")[0])


def words_of(run: dict[str, Any]) -> list[str]:
    """Return the words for MaxText's `train_compile`: sizes, the words of the run, and its topology.

    Words that choose data, checkpoints or a profiler change no step, and are left out.
    """
    sizes = {
        "model_name": run["model"],
        "per_device_batch_size": run["per_device_batch"],
        "max_target_length": run["seq_len"],
    }
    if run["model"].startswith("maxtext-default-"):
        sizes = sizes | default_model(run)
        del sizes["model_name"]
    told = run.get("tuning_params") or {}
    # a recipe may say another batch than the one that was measured
    words = sizes | {key: value for key, value in told.items() if not _NO_STEP.search(key)}
    cores = 2 if run["chip"] in ("v5p", "tpu7x") else 1
    slices = slices_of(run)
    chips = run["chips"] // slices
    words |= sizes | {
        "compile_topology": f"{run['chip']}-{chips * cores}",
        "compile_topology_num_slices": slices,
    }
    return [f"{key}={value}" for key, value in words.items()]


def default_model(run: dict[str, Any]) -> dict[str, Any]:
    """Return the words of a model that has MaxText's defaults of 2023: its shape has no name.

    Its attention is that of the commit which measured it, where the run does not say.
    """
    shape = run["shape"]
    kernel = run["attention"]
    axes = {
        name: str(size).split(" ")[0]
        for name, size in run["mesh"]["axes"].items()  # such as "-1 (default)"
    }
    return {
        "decoder_block": "default",
        "base_num_decoder_layers": shape["layers"],
        "base_emb_dim": shape["emb_dim"],
        "base_num_query_heads": shape["heads"],
        "base_num_kv_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "base_mlp_dim": shape["ffn_dim"],
        "vocab_size": shape["vocab"],
        "mlp_activations": "['relu']",
        "logits_via_embedding": True,
        "remat_policy": run["remat"]["policy"],
        "attention": "dot_product" if kernel.startswith("ambiguous") else kernel,
    } | axes


_NO_STEP = re.compile("dataset|checkpoint|profiler|^steps$|tokenizer|output_dir|run_name|metrics")


def compile_run(run: dict[str, Any], python: str, folder: Path, limits: "Limits") -> dict[str, Any]:
    """Compile a run by MaxText without the flags that libtpu refuses, and keep its text."""
    flags = {flag.partition("=")[0]: flag for flag in run["flags"]}  # the last of a name counts
    refused = refused_flags(list(flags.values()), run["chip"], python)
    taken = [flag for flag in flags.values() if flag not in refused]
    words = words_of(run)
    other_words = []
    if run["model"].startswith("maxtext-default-"):
        other_words.append("words for its sizes")
        if run["attention"].startswith("ambiguous"):
            other_words.append("attention as in its commit")
    facts, text = compile_words(words, taken, python, limits)
    if _NO_MESH in facts.get("error", ""):
        other_words.append(_SPLIT)
        facts, text = compile_words([*words, _SPLIT], taken, python, limits)
    facts |= {"by": "MaxText's own words", "refused_flags": refused}
    if other_words:
        facts["other_words"] = ", ".join(other_words)
    stem = folder / str(run["id"])
    stem.with_suffix(".json").write_text(json.dumps(facts))
    if text:
        stem.with_suffix(".hlo.gz").write_bytes(gzip.compress(text.encode(), 1))
    return facts


_NO_MESH = "Failed to find assignment for logical_axis_index"
_SPLIT = "allow_split_physical_axes=true"
"""Without it jax 0.12 refuses a mesh whose axes are parts of dims of the slice."""


_TRY_FLAGS = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices
mesh = Mesh(devices, "x")
split = NamedSharding(mesh, PartitionSpec("x"))
everywhere = NamedSharding(mesh, PartitionSpec())
x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=split)
lowered = jax.jit(lambda x: jnp.sin(x @ x), out_shardings=everywhere).lower(x)


def takes(flags):
    pairs = (flag.lstrip("-").partition("=") for flag in flags)
    try:
        lowered.compile(compiler_options={name: value for name, _, value in pairs})
    except Exception:
        return False
    return True


flags = sys.argv[2:]
taken = flags if takes(flags) else []
for flag in flags:
    if flag not in taken:
        if takes([*taken, flag]):
            taken.append(flag)
        else:
            print("REFUSED", flag)
"""
"""Compile a small program with all flags, or else with one flag more at a time, and print those that
libtpu refuses."""


REFUSED = {
    "v6e": (
        "--xla_enable_async_all_gather=true",  # beside fused all-gathers
        "--xla_sc_disjoint_spmem=false",
        "--2a886c8_chip_config_name=megachip_tccontrol",
    )
}
"""Flags that libtpu 0.0.52 was seen to refuse: trying one after the other takes minutes."""


def refused_flags(flags: list[str], chip: str, python: str) -> list[str]:
    """Return the flags that libtpu refuses for a chip. Those of `REFUSED` are not tried."""
    known = [flag for flag in flags if flag in REFUSED.get(chip, ())]
    flags = [flag for flag in flags if flag not in known]
    topology = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}.get(chip, f"{chip}:2x2x1")
    told = {
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-128",
    }
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | told
    command = [python, "-c", _TRY_FLAGS, topology, *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return known + [
        line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("REFUSED ")
    ]


def compile_words(
    words: list[str], flags: list[str], python: str, limits: "Limits"
) -> tuple[dict[str, Any], str]:
    """Compile by MaxText in its own Python. Return what the compiler says, and the text."""
    script = Path(__file__).with_name("beside_maxtext.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    seconds = round(limits.minutes * 60)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump = [f"--xla_dump_to={name}/dump", "--xla_dump_hlo_as_text=True"]
        told = " ".join([*flags, *([] if limits.whole else dump)])
        log = folder / "log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [python, str(script), "--child", name, *words, f"compile_xla_flags={told}"],
                env=env,
                cwd=name,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)),
            )
        text = "" if limits.whole else scheduled_text(child, folder / "dump")
        child.wait()
        kept = [folder / "mesh.json", folder / "facts.json"]
        facts: dict[str, Any] = {"words": words, "flags": flags}
        for path in filter(Path.exists, kept):
            facts |= json.loads(path.read_text())
        program = folder / "program.hlo.gz"
        if program.exists():
            text = gzip.decompress(program.read_bytes()).decode()
        elif text:
            facts["until"] = "scheduled"
        elif "error" not in facts:
            lines = log.read_text().strip().splitlines()[-3:]
            if child.returncode < 0:
                lines = [f"it took more than {limits.minutes:g} minutes of CPU"]
            facts["error"] = "\n".join(lines)[:500]
        return facts, text


class Limits(NamedTuple):
    """How far a compile goes: minutes of CPU, and whether code is generated."""

    minutes: float = 15.0
    whole: bool = False


def scheduled_text(child: subprocess.Popen[bytes], dump: Path) -> str:
    """Return the scheduled program that a compile dumps before it generates code, and end the compile.

    Code takes most of a compile, and changes nothing in the schedule. "" if the compile ends before.
    """
    size = 0
    while child.poll() is None:
        time.sleep(2)
        for path in dump.glob("*train_step*after_optimizations_after_buffer_assignment.txt"):
            if size == path.stat().st_size > 0:
                child.kill()
                return path.read_text()
            size = path.stat().st_size
    return ""


def with_elements(text: str) -> str:
    """Return a text of XLA's dumps with an instruction for each element that it takes of a tuple.

    They write %name#1 where `as_text` has a get-tuple-element.
    """
    from shardopt.hlo._hlo_text import elements

    shapes: dict[str, str] = {}
    lines = []
    for line in text.split("\n"):
        for name, path in dict.fromkeys(_ELEMENT.findall(line)):
            whole = name
            for index in path.split("#")[1:]:
                part = f"{whole}.element.{index}"
                if part not in shapes:
                    shapes[part] = elements(shapes[whole])[int(index)]
                    lines.append(
                        f"  %{part} = {shapes[part]} get-tuple-element(%{whole}), index={index}"
                    )
                whole = part
        line = _ELEMENT.sub(lambda match: "%" + match[1] + match[2].replace("#", ".element."), line)
        if line == "}":  # metadata of kernels has lines that begin with it
            shapes = {}
        match = _RESULT.match(line)
        if match:
            shapes[match[1]] = re.sub(r"/\*.*?\*/", "", match[2])
        lines.append(line)
    return "\n".join(lines)


_ELEMENT = re.compile(r"%([\w.\-]+)((?:#\d+)+)")
_RESULT = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) [\w\-]+\(")


def estimated_seconds(text: str, mesh: dict[str, int], chip: str) -> dict[str, float]:
    """Return the seconds of a compiled program at each share of the HBM bandwidth.

    Products count by their flops at the peak in all runs, since most have no cycles by XLA.
    """
    from step_times._compiled_time import walk_schedule

    from shardopt.hlo._program import read_program
    from shardopt.planning._hardware import find_hardware

    sizes = {axis: size for axis, size in mesh.items() if size > 1}
    text = re.sub(r'"estimated_cycles":"\d+",?', "", with_elements(text))
    program = read_program(text, (), mesh=sizes)  # once, for it takes longer than a walk
    device = find_hardware(chip).per_device()
    totals = {str(share): walk_schedule(program, device, share=share).total for share in SHARES}
    return {share: total for share, total in totals.items() if total is not None}


def read_programs(rows: dict[str, Any], folder: Path) -> None:
    """Add to each row what its stored program gives: seconds at every share, or why there is none."""
    for key, row in rows.items():
        path = folder / f"{key}.json"
        if not path.exists():
            continue
        facts = json.loads(path.read_text())
        row["compiled"] = {name: facts[name] for name in _KEPT if name in facts}
        program = path.with_suffix(".hlo.gz")
        if program.exists():
            text = gzip.decompress(program.read_bytes()).decode()
            row["estimated_seconds"] = estimated_seconds(text, facts["mesh"], row["chip"])
            if moves_stacks(text):
                row["compiled"]["other_program"] = "it moves whole stacks from the host and back"


def moves_stacks(text: str) -> bool:
    """Return whether a program copies a whole array between chip and host, not slice by slice.

    Today's compiler changes the layout of what a run offloads so. The run that was measured cannot
    have done that: with these copies run 38 does not fit into its chips.
    """
    starts = (line.partition(" copy-start(") for line in text.splitlines())
    return any(found and "S(5)" in shape for shape, found, _ in starts)


_KEPT = (
    "by",
    "until",
    "other_words",
    "words",
    "refused_flags",
    "versions",
    "compile_seconds",
    "error",
    "memory",
)


def relative_error(row: dict[str, Any], share: float, factor: float = 1.0) -> float:
    """Return by how much the estimate is too long: 0.1 is 10%."""
    return factor * row["estimated_seconds"][str(share)] / row["measured_seconds"] - 1


def fitted_factors(rows: dict[str, Any]) -> dict[str, float]:
    """Return how many times as long as estimated at `ASSUMED` steps of each generation took: the
    median of its fit half.
    """
    factors = {}
    for chip in GENERATIONS:
        ratios = [1 / (1 + relative_error(row, ASSUMED)) for row in fit_rows(rows, chip)]
        if ratios:
            factors[chip] = round(statistics.median(ratios), 3)
    return factors


def fit_rows(rows: dict[str, Any], chip: str) -> list[dict[str, Any]]:
    """Return the runs of the fit half of a generation that have an estimate."""
    return [
        row
        for row in rows.values()
        if row["chip"] == chip and row["half"] == "fit" and is_counted(row)
    ]


def is_counted(row: dict[str, Any]) -> bool:
    """Return whether a run has an estimate of the program that was measured."""
    return "estimated_seconds" in row and "other_program" not in row.get("compiled", {})


def fitted_shares(rows: dict[str, Any]) -> dict[str, float]:
    """Return the share of each generation that has the smallest median error on its fit half."""
    shares = {}
    for chip in GENERATIONS:
        fit = fit_rows(rows, chip)
        if fit:
            shares[chip] = min(
                SHARES,
                key=lambda share: statistics.median(abs(relative_error(row, share)) for row in fit),
            )
    return shares


def planned_seconds(run: dict[str, Any]) -> float | None:
    """Return the seconds that `so.plan` predicts for a run; None unless it is dense and in bfloat16.

    What is offloaded to the host counts as recomputed.
    """
    import jax.numpy as jnp

    from shardopt.planning import ParallelLayout, Transformer, predict
    from shardopt.planning._hardware import find_hardware

    shape = run["shape"]
    if not run["quantisation"].startswith("none") or {"experts", "sliding_window"} & set(shape):
        return None
    chip = find_hardware(run["chip"])
    axes = {
        name.removesuffix("_parallelism"): int(str(size).split(" ")[0])  # such as "-1 (default)"
        for name, size in run["mesh"]["axes"].items()
    }
    tensor, context = axes.get("ici_tensor", 1), axes.get("ici_context", 1)
    is_tpu = run["chip"] in GENERATIONS
    # slices of TPUs have a copy each, nodes of GPUs where the run says so
    slices = slices_of(run) if is_tpu else 1
    replica = slices if is_tpu else axes.get("dcn_data", 1)
    model = Transformer(
        run["model"],
        shape["emb_dim"],
        shape["layers"],
        shape["heads"],
        shape["ffn_dim"],
        shape["vocab"],
        run["seq_len"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        gated="2 matrices" not in shape.get("mlp", ""),
        tied=shape.get("tied_embedding", False),
    )
    keeps_products = run["remat"]["policy"].startswith(("minimal", "dots_saveable"))
    layout = ParallelLayout(
        replica=replica,
        data=run["chips"] * chip.devices // (replica * tensor * context),
        tensor=tensor,
        context=context,
        remat="save:qkv,attention_out,mlp_hidden" if keeps_products else True,
        gather_dtype=jnp.bfloat16,
        micro_batches=run["tuning_params"].get("gradient_accumulation", 1),
    )
    prediction = predict(
        model.workload(), layout, hardware=chip, batch_size=run["global_batch"], slices=slices
    )
    return prediction.time.total


def plan_ratios(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return chip -> run -> its measured seconds over those of `so.plan`."""
    ratios: dict[str, dict[str, float]] = {}
    for run in runs:
        planned = planned_seconds(run) if run["complete"] else None
        if planned:
            of_chip = ratios.setdefault(run["chip"].lower(), {})
            of_chip[str(run["id"])] = run["step_seconds"]["value"] / planned
    return ratios


def plan_table(ratios: dict[str, dict[str, float]]) -> str:
    """Return a line a chip: how many times as long as planned its steps took."""
    lines = [
        "| chips | runs | least | median | most | each run: id, measured / planned |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for chip, of_chip in ratios.items():
        values = [f"{value:.2f}" for value in spread(list(of_chip.values()))]
        each = ", ".join(f"{key}: {ratio:.2f}" for key, ratio in of_chip.items())
        lines.append("| " + " | ".join([chip, str(len(of_chip)), *values, each]) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the smallest, the median and the largest."""
    return min(values), statistics.median(values), max(values)


def errors(
    rows: dict[str, Any], error_of: Callable[[dict[str, Any]], float]
) -> dict[str, dict[str, Any]]:
    """Return the errors of each generation's halves, and of all: how many, median and worst.

    The median is of those without sign; `error_of` gives the error of a run that is counted.
    """
    found: dict[str, list[float]] = {}
    for row in rows.values():
        if is_counted(row):
            for name in (row["chip"], "all"):
                found.setdefault(f"{name} {row['half']}", []).append(error_of(row))
    return {
        name: {
            "runs": len(values),
            "median": statistics.median(map(abs, values)),
            "worst": max(values, key=abs),
        }
        for name, values in found.items()
    }


def error_bars(rows: dict[str, Any], shares: dict[str, float]) -> dict[str, list[float]]:
    """Return of each generation the counted runs of both halves, and how many times as long as
    estimated they took: the shortest and the longest.
    """
    ratios: dict[str, list[float]] = {}
    for row in rows.values():
        if is_counted(row):
            error = relative_error(row, shares.get(row["chip"], ASSUMED))
            ratios.setdefault(row["chip"], []).append(1 / (1 + error))
    return {
        chip: [len(of_chip), round(min(of_chip), 2), round(max(of_chip), 2)]
        for chip, of_chip in ratios.items()
    }


def errors_table(results: dict[str, Any]) -> str:
    """Return a line a generation: e and the errors of both halves, then the factor and its errors."""
    columns = "runs | median | worst | test: runs | median | worst"
    lines = [
        f"| chips | e | fit: {columns} | factor | fit: median | worst | test: median | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for chip in (*GENERATIONS, "all"):
        cells = [chip, str(results["shares"].get(chip, ""))]
        for half in HALVES:
            cells += _cells(results["errors"].get(f"{chip} {half}"))
        cells.append(str(results["factors"].get(chip, "")))
        for half in HALVES:
            cells += _cells(results["factor_errors"].get(f"{chip} {half}"))[1:]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["0", "", ""]
    return [str(found["runs"]), f"{found['median']:.1%}", f"{found['worst']:+.1%}"]


def table(results: dict[str, Any]) -> str:
    """Return a line a run: its half, the measured and the estimated seconds, and the error, at the
    share of its generation, or at `ASSUMED` where nothing is fitted.
    """
    shares = results["shares"]
    lines = [
        "| id | run | chips x slices | half | measured, s | marked | e | estimated, s | error | by factor | compiled |",
        "|---:|---|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for key, row in results["runs"].items():
        share = shares.get(row["chip"], ASSUMED)
        compiled = row.get("compiled", {})
        cells = ["", "", "", ""]
        if "estimated_seconds" in row:
            estimate = row["estimated_seconds"][str(share)]
            word = "" if row["chip"] in shares else " (assumed)"
            factor = results["factors"].get(row["chip"], 1.0)
            found = (relative_error(row, share), relative_error(row, ASSUMED, factor))
            cells = [f"{share}{word}", f"{estimate:.3g}", *(f"{error:+.1%}" for error in found)]
        how = compiled.get("by", "not compiled")
        if "error" in compiled:
            how = f"failed: {max(compiled['error'].splitlines(), key=len)[:160]}"
        if compiled.get("until"):
            how += f", {compiled['until']}"
        if compiled.get("other_words"):
            how += f"; {compiled['other_words']}"
        if compiled.get("other_program"):
            how += f"; not counted: {compiled['other_program']}"
        if compiled.get("refused_flags"):
            how += f", without {len(compiled['refused_flags'])} flags"
        run = [key, row["name"], f"{row['chips']} x {slices_of(row)}", row["half"]]
        lines.append(
            "| "
            + " | ".join([*run, f"{row['measured_seconds']:.4g}", row["mark"], *cells, how])
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Draw, compile, or read what was compiled."""
    parser = argparse.ArgumentParser(description="Estimated seconds beside measured ones.")
    parser.add_argument("--runs", type=Path, required=True, help="the measured runs")
    parser.add_argument("--draw", action="store_true", help="write both halves")
    parser.add_argument("--compile", type=int, action="append", default=[], help="ids to compile")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="of CPU that a compile may take"
    )
    parser.add_argument("--whole", action="store_true", help="generate code, too")
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument(
        "--programs", type=Path, default=Path(tempfile.gettempdir()) / "measured_runs"
    )
    options = parser.parse_args()
    runs = json.loads(options.runs.read_text(encoding="utf-8"))
    options.programs.mkdir(exist_ok=True)
    for run in runs:
        if run["id"] in options.compile:
            limits = Limits(options.minutes, options.whole)
            facts = compile_run(run, options.maxtext, options.programs, limits)
            print(run["id"], run["name"], facts.get("error", "compiled"), flush=True)
    stored = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    rows = drawn_rows(runs)
    if not options.draw:
        rows = {key: stored["runs"].get(key, {}) | row for key, row in rows.items()}
        read_programs(rows, options.programs)
    shares = fitted_shares(rows)
    factors = fitted_factors(rows)
    results = {
        "seed": SEED,
        "shares": shares,
        "errors": errors(rows, lambda row: relative_error(row, shares.get(row["chip"], ASSUMED))),
        "error_bars": error_bars(rows, shares),
        "factors": factors,
        "factor_errors": errors(
            rows, lambda row: relative_error(row, ASSUMED, factors.get(row["chip"], 1.0))
        ),
        "planned": plan_ratios(runs),
        "runs": rows,
    }
    write_json(__file__, results, RESULTS)
    print(errors_table(results), plan_table(results["planned"]), table(results), sep="\n\n")


if __name__ == "__main__":
    main()
