"""Copy the table of `peers.py` into the README, between its markers, from benchmarks/results/peers.json.

Run: python benchmarks/peers_readme.py; tests/benchmarks checks that it has been run.
"""

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- peers: written by benchmarks/peers_readme.py -->", "<!-- /peers -->"
ROOT = Path(__file__).parent.parent
_NAMES = {"shardopt": "**shardopt**", "jax": "jax by hand", "torch": "torch", "maxtext": "MaxText"}
_CALLS = {
    "torch ddp": "DistributedDataParallel",
    "torch zero1": "ZeroRedundancyOptimizer",
    "torch fsdp": "FSDP2, `fully_shard`",
    "jax ddp": "`shard_map`",
    "jax zero1": "`shard_map`",
    "jax fsdp": "`shard_map`, gathers by hand",
    "jax jit": "`jit` and shardings alone",
    "maxtext ddp": "`ici_data_parallelism=-1`",
    "maxtext zero1": "`shard_optimizer_over_data=true`",
    "maxtext fsdp": "`ici_fsdp_parallelism=-1`",
    "shardopt ddp": "`so.ddp`",
    "shardopt zero1": "`so.zero`",
    "shardopt fsdp": "`so.fsdp`",
}


def table_of(record: dict[str, Any]) -> str:
    """Return the Markdown table of a results file: a row a contestant with two processes, and a pair of columns a size."""
    sizes = {name: size for name, size in record["results"]["cpu"].items() if "processes" in size}
    rows = [["two processes", "with", "lines"], ["---"] * 3]
    for config in (size["config"] for size in sizes.values()):
        shape = f"{config['dim']} x {config['num_layers']}, {config['batch']} x {config['length']}"
        rows[0] += [f"tokens/s, {shape}", "MB", "first step"]
        rows[1] += ["---:"] * 3
    for name in next(iter(sizes.values()))["processes"]["contestants"]:
        library, strategy = name.split()
        found = [size["processes"]["contestants"][name] for size in sizes.values()]
        row = [f"{strategy if strategy != 'jit' else 'fsdp'}, {_NAMES[library]}", _CALLS[name], str(found[0]["lines"])]
        for each in found:
            row += [f"{each['tokens_per_second']:,.0f}", f"{each['peak_bytes'] / 1e6:,.0f}"]
            row += [f"{each['seconds_to_first_step']:.0f} s"]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def section_of(record: dict[str, Any]) -> str:
    """Return all that stands between the markers."""
    hardware, versions, results = record["hardware"], record["versions"], record["results"]
    gpu = results["gpu"]
    said = f"GPU: {gpu}" if isinstance(gpu, str) else f"GPU: {gpu['device']}, in benchmarks/results/peers.json."
    cores = {size["processes"]["cores"] for size in results["cpu"].values() if "processes" in size}
    where = "a core for each process" if min(cores) > 1 else "both processes on one core, beside other work"
    other = results.get("maxtext")
    also = f", MaxText {other['maxtext']} (with jax {other['jax']})" if other else ""
    machine = (
        f"{hardware['cpu']}, {where}; jax {versions['jax']}, torch {results['torch']}{also}. Sizes are width x"
        f" layers, batch x length. MB: peak of one process, its libraries and compiler included. {said}"
    )
    return f"{BEGIN}\n{table_of(record)}\n\n{machine}\n{END}"


def with_section(readme: str, record: dict[str, Any]) -> str:
    """Return a README whose part between the markers is that of a results file.

    Raises:
      ValueError: if the markers are not there, once each and in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"peers_readme: the README needs one {BEGIN} and, after it, one {END}.")
    return before + section_of(record) + after


if __name__ == "__main__":
    _RECORD = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())
    _README = ROOT / "README.md"
    _README.write_text(with_section(_README.read_text(), _RECORD))
