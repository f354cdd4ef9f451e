"""Copy the results into docs/benchmarks.md, as short tables beside torch, and into a note, in full.

Each page has markers around its tables.

Run: python -m benchmarks.peers.tables; tests/docs/test_peers.py checks that it has been run.
"""

import json
from pathlib import Path
from typing import Any

from .gpu import NOT_MEASURED

BEGIN, END = "<!-- peers: written by benchmarks/peers/tables.py -->", "<!-- /peers -->"
ROOT = Path(__file__).parents[2]
_NAMES = {
    "shardopt": "**shardopt**",
    "jax": "jax by hand",
    "torch": "torch",
    "maxtext": "MaxText",
    "levanter": "Levanter",
}
_STRATEGIES = ("ddp", "zero1", "fsdp")
_SAME = {"jit": "fsdp", "unrolled": "ddp"}
"""The strategy that a form of jax by hand computes."""
_CALLS = {
    "torch ddp": "DistributedDataParallel",
    "torch zero1": "ZeroRedundancyOptimizer",
    "torch fsdp": "FSDP2, `fully_shard`",
    "jax ddp": "`shard_map`",
    "jax zero1": "`shard_map`",
    "jax fsdp": "`shard_map`, gathers by hand",
    "jax jit": "`jit` and shardings alone",
    "jax unrolled": "`shard_map`, two-dimensional products, no loop over blocks",
    "maxtext ddp": "`ici_data_parallelism=-1`",
    "maxtext zero1": "`shard_optimizer_over_data=true`",
    "maxtext fsdp": "`ici_fsdp_parallelism=-1`",
    "levanter ddp": "`Trainer`, `fsdp_axis=None`",
    "levanter fsdp": '`Trainer`, `fsdp_axis="embed"`',
    "shardopt ddp": "`so.ddp`",
    "shardopt zero1": "`so.zero`",
    "shardopt fsdp": "`so.fsdp`",
}
_GPU_CALLS = {
    "shardopt ddp": "`so.ddp`, bf16",
    "torch compiled": "`torch.compile`, bf16 autocast, fused AdamW",
    "torch autotuned": (
        '`torch.compile(mode="max-autotune-no-cudagraphs")`, bf16 autocast, fused AdamW'
    ),
    "maxtext stacked": "its exported step, bf16, cuDNN's attention",
    "maxtext unstacked": "its exported step, `scan_layers=false`, bf16, cuDNN's attention",
}


def table_of(record: dict[str, Any]) -> str:
    """Return the Markdown table of a results file: a row a contestant with two processes, and a
    pair of columns a size.
    """
    sizes = {name: size for name, size in record["results"]["cpu"].items() if "processes" in size}
    rows = [["two processes", "with", "lines"], ["---"] * 3]
    for config in (size["config"] for size in sizes.values()):
        rows[0] += [f"tokens/s, {_shape(config)}", "MB, peak / steps", "first step"]
        rows[1] += ["---:"] * 3
    for name in dict.fromkeys(
        name for size in sizes.values() for name in size["processes"]["contestants"]
    ):
        library, strategy = name.split()
        found = [size["processes"]["contestants"].get(name) for size in sizes.values()]
        lines = next(each["lines"] for each in found if each)
        row = [
            f"{_SAME.get(strategy, strategy)}, {_NAMES[library]}",
            _CALLS[name],
            str(lines),
        ]
        for each in found:
            if each:
                row += [
                    f"{each['tokens_per_second']:,.0f}",
                    f"{each['peak_bytes'] / 1e6:,.0f} / {each['peak_bytes_of_steps'] / 1e6:,.0f}",
                ]
                row += [f"{each['seconds_to_first_step']:.0f} s"]
            else:
                row += ["-"] * 3
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def beside_torch(record: dict[str, Any], *, memory: bool) -> str:
    """Return a table a CPU of group "torch": tokens per second of shardopt, and peak memory if
    asked, with ratios to torch's.
    """
    sizes = [size for size in record["results"]["cpu"].values() if "torch" in size]
    tables = []
    for cpu in sizes[0]["torch"]:
        lines = [
            _heading([size["torch"][cpu] for size in sizes]),
            "",
            "| width x layers, batch x length | " + " | ".join(_STRATEGIES) + " |",
            "|---|" + "---:|" * len(_STRATEGIES),
        ]
        for size in sizes:
            cells = [_cell(size["torch"][cpu], strategy, memory=memory) for strategy in _STRATEGIES]
            lines.append(f"| {_shape(size['config'])} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _cell(group: dict[str, Any], strategy: str, *, memory: bool) -> str:
    ours, theirs = (
        group["contestants"][f"{library} {strategy}"] for library in ("shardopt", "torch")
    )
    speed = group["speed_ratios"][f"shardopt {strategy} / torch {strategy}"]
    peak, of_theirs = ours["peak_bytes"] / 1e6, ours["peak_bytes"] / theirs["peak_bytes"]
    held = f", {peak:,.0f} MB ({of_theirs:.2f})" if memory else ""
    return f"{ours['tokens_per_second']:,.0f} ({speed:.2f}){held}"


def _heading(groups: list[dict[str, Any]]) -> str:
    """Return the CPU and the date of the run that measured these groups, the same for all."""
    ((cpu, date),) = {(group["cpu"], group["date"]) for group in groups}
    return f"{cpu}, run of {date}:"


def _shape(config: dict[str, Any]) -> str:
    return f"{config['dim']} x {config['num_layers']}, {config['batch']} x {config['length']}"


def gpu_of(record: dict[str, Any] | None) -> str:
    """Return what is said about the GPU: a table of the results of gpu.py, or that there are none."""
    if record is None:
        return f"GPU: {NOT_MEASURED}"
    lines = [
        f"| {record['results']['device']} | with | tokens/s | MFU | GB | first step |",
        "|---|---|---:|---:|---:|---:|",
    ]
    updates = []
    for name, size in record["results"]["sizes"].items():
        config = size["config"]
        for contestant, row in size["contestants"].items():
            library = contestant.split()[0]
            mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
            cells = [
                f"GPT-2 {name}, {config['batch']} x {config['length']}, {_NAMES[library]}",
                _GPU_CALLS[contestant],
            ]
            cells += [
                f"{row['tokens_per_second']:,.0f}",
                mfu,
                f"{row['device_peak_bytes'] / 1e9:.0f}",
            ]
            cells += [f"{row['seconds_to_first_step']:.0f} s"]
            lines.append(f"| {' | '.join(cells)} |")
        shares = [
            f"{library} {each['share_of_best_copy']:.0%}"
            for library, each in size["update"].items()
        ]
        updates.append(f"{name}: {', '.join(shares)}")
    versions = f"jax {record['versions']['jax']}, torch {record['results']['torch']}"
    return "\n".join(
        [
            *lines,
            "",
            f"{versions}. AdamW's update, of the bandwidth of a copy: {'; '.join(updates)}.",
        ]
    )


def core_of(record: dict[str, Any] | None) -> str:
    """Return the table of core.py: CPU time of a step of one device, and its ratios."""
    if record is None:
        return ""
    sizes = record["results"]["cpu"].values()
    rivals = ("jax ddp", "jax unrolled", "torch alone")
    lines = [
        f"One process on one core, so.ddp, ms of CPU a step. {_heading([s['core'] for s in sizes])}",
        "",
        "| width x layers, batch x length | shardopt | of jax's scan | of jax unrolled | of torch |",
        "|---|---:|---:|---:|---:|",
    ]
    for size in sizes:
        milliseconds = size["core"]["contestants"]["shardopt ddp"]["cpu_ms_of_a_step"]
        cells = [_shape(size["config"]), f"{milliseconds:.0f}"]
        cells += [
            f"{size['core']['cpu_ratios'][f'shardopt ddp / {rival}']:.2f}" for rival in rivals
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short_section(record: dict[str, Any]) -> str:
    """Return the section of docs/benchmarks.md: the runs of shardopt and torch, tokens per second at each
    size.
    """
    caption = (
        "Two processes over gloo, a core each. A cell has shardopt's tokens per second and, in"
        " brackets, the ratio to torch's. The runs are older than the products and the attention of"
        " today: the note has what these gained."
    )
    return f"{BEGIN}\n{beside_torch(record, memory=False)}\n\n{caption}\n{END}"


def full_section(
    record: dict[str, Any], gpu: dict[str, Any] | None = None, core: dict[str, Any] | None = None
) -> str:
    """Return the section of docs/notes/peers.md: every contestant at every size, each run with its
    date, one core, and the GPU.
    """
    versions, results = record["versions"], record["results"]
    groups = [size["processes"] for size in results["cpu"].values() if "processes" in size]
    cores = {group["cores"] for group in groups}
    where = (
        "A core for each process"
        if min(cores) > 1
        else "Both processes on one core, beside other work"
    )
    others = [(name, results[name]) for name in ("maxtext", "levanter") if name in results]
    also = "".join(
        f", {_NAMES[name]} {other[name]} (with jax {other['jax']})" for name, other in others
    )
    machine = (
        f"{where}; jax {versions['jax']}, torch {results['torch']}{also}. Sizes are width x layers,"
        " batch x length. MB: the most that one process ever held, its libraries and compiler"
        " included, and the most that it held in the steps after the first."
    )
    tables = [
        f"{BEGIN}\n{_heading(groups)}",
        table_of(record),
        machine,
        beside_torch(record, memory=True),
        *filter(None, [core_of(core)]),
    ]
    return "\n\n".join([*tables, f"{gpu_of(gpu)}\n{END}"])


def with_section(page: str, section: str) -> str:
    """Return a page with this section from marker to marker.

    Raises:
      ValueError: if the markers are not there, once each and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"peers: the page needs one {BEGIN} and, after it, one {END}.")
    return before + section + after


def stored(name: str) -> dict[str, Any] | None:
    """Return a results file, None if it was never written."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def sections() -> dict[str, str]:
    """Return {page: section} of the stored results."""
    record = stored("peers")
    short, full = (
        short_section(record),
        full_section(record, stored("peers_gpu"), stored("peers_core")),
    )
    return {"docs/benchmarks.md": short, "docs/notes/peers.md": full}


if __name__ == "__main__":
    for _name, _section in sections().items():
        _page = ROOT / _name
        _page.write_text(with_section(_page.read_text(), _section))
