"""Measure one row of beside_maxtext.py on the chips of this machine: shardopt's step, and MaxText's.

    python benchmarks/measure_beside_maxtext.py --maxtext PYTHON [--row "v6e:2x4 2048 1"]

PYTHON is that of an environment of its own with `pip install 'maxtext[tpu]==0.2.5'`; this one has
`pip install -e '.[tpu]'`. Each side has the choice that was estimated to be the fastest, the same
batch in each step, and a process of its own, because one process holds the chips. The sides take
turns, `--rounds` times. Both are timed by one rule: each prints a line when the loss of a step is on
the host, and this program notes when it reads the line. The first steps of a round, which compile
and fill the queue, do not count.

On eight chips of v6e it takes less than ten minutes. `--row "cpu:8 128 1"` shows on any machine that
both sides run, with a tiny model; its seconds mean nothing. docs/howto/send_results.md says how to
send the JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beside_maxtext import (
    CONTENDERS,
    GIVEN,
    SIZES,
    TINY,
    Choice,
    Row,
    maxtext_flags,
    maxtext_words,
    model_of,
    shardopt_strategy,
)
from common import fake_devices, write_json

DONE = "completed step:"
"""A line of MaxText's log with these words says that the loss of a step is on the host."""
CHOICES = {
    "shardopt": Choice(fused=True, vmem=96),
    "maxtext": Choice(vmem=96),
}
"""The fastest by estimate for Llama 3 8B on eight chips of v6e, 2048 x 1."""
TINY_WORDS = [
    "model_name=default",
    "attention=dot_product",
    "hardware=cpu",
    f"base_emb_dim={TINY.dim}",
    f"base_num_query_heads={TINY.heads}",
    f"base_num_kv_heads={TINY.kv_heads}",
    f"head_dim={TINY.head_dim}",
    f"base_mlp_dim={TINY.hidden}",
    f"base_num_decoder_layers={TINY.layers}",
    f"vocab_size={TINY.vocab}",
]
"""MaxText's words for the model "tiny" of beside_maxtext.py."""


def row_of(text: str) -> Row:
    """Read a row such as "v6e:2x4 2048 1": topology, tokens of a row, rows of a chip."""
    topology, length, rows = text.split()
    model = "tiny" if topology.startswith("cpu") else "llama3-8b"
    return Row(topology, int(length), int(rows), model=model)


def train_shardopt(row: Row, steps: int) -> None:
    """Train for so many steps on the devices of this process, and say when each is done."""
    if row.chip == "cpu":
        fake_devices(row.chips)
    import jax
    import numpy as np

    import shardopt as so

    choice = CHOICES["shardopt"]
    model, init = model_of(row, choice)
    mesh = so.make_mesh(data=row.chips)
    opt = shardopt_strategy(row, choice, model)(mesh)

    state = opt.init(init, jax.random.key(0))
    sizes = TINY if row.model == "tiny" else SIZES[row.model]
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, sizes.vocab, (row.rows * row.chips, row.length + 1), dtype=np.int32)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = {"tokens": jax.device_put(tokens, rows)}
    previous = None
    for step in range(steps + 1):  # as MaxText does, read a loss when the next step is on its way
        metrics = None
        if step < steps:
            state, metrics = opt.step(state, batch)
        if previous is not None:
            print(DONE, step - 1, "loss:", float(previous["loss"]), flush=True)
        previous = metrics


def train_maxtext(words: list[str]) -> None:
    """Train by MaxText's own loop, in MaxText's own Python."""
    import maxtext
    from absl import app
    from maxtext.trainers.pre_train import train

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    app.run(train.main, argv=["train", str(base), *GIVEN, *words])


def run(who: str, row: Row, python: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run one side in a process of its own; return when each step was done, and its last lines."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    child = [sys.executable, __file__, "--child", "shardopt", str(steps), *row_words(row)]
    if who == "maxtext":
        env.pop("PYTHONPATH", None)
        words = [*maxtext_words(row, CHOICES[who]), f"steps={steps}"]
        words.append("enable_goodput_recording=false")
        if row.chip == "cpu":
            flag = f"--xla_force_host_platform_device_count={row.chips}"
            env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
            words += TINY_WORDS
        else:
            env["LIBTPU_INIT_ARGS"] = " ".join(maxtext_flags(row, CHOICES[who]))
        child = [python, __file__, "--child", "maxtext", *words]
    elif row.chip == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    times = []
    lines = []
    with subprocess.Popen(
        child, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if DONE in line:
                times.append(time.perf_counter())
    if process.returncode or len(times) != steps:
        last = "\n".join(lines[-25:])
        raise SystemExit(
            f"{who} ended with code {process.returncode} after {len(times)} steps:\n{last}"
        )
    return {"times": times, "last": [line for line in lines if DONE in line][-1]}


def row_words(row: Row) -> list[str]:
    """Return the words that `row_of` reads."""
    return [row.topology, str(row.length), str(row.rows)]


def seconds_of(times: list[float], warm: int) -> list[float]:
    """Return the seconds of each step that counts."""
    return [after - before for before, after in zip(times[warm - 1 :], times[warm:], strict=False)]


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of the packages of an environment that matter for speed."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in"
        " m.distributions() if d.name in ('maxtext', 'jax', 'jaxlib', 'libtpu', 'flax')}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


def main() -> None:
    """Measure both sides in turns, print a line a round, and write the JSON."""
    if sys.argv[1:3] == ["--child", "shardopt"]:
        train_shardopt(row_of(" ".join(sys.argv[4:])), int(sys.argv[3]))
        return
    if sys.argv[1:3] == ["--child", "maxtext"]:
        train_maxtext(sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--maxtext", required=True, help="the Python of an environment with MaxText"
    )
    parser.add_argument("--row", default="v6e:2x4 2048 1", help='"TOPOLOGY LENGTH ROWS_OF_A_CHIP"')
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--warm", type=int, default=5, help="first steps, which do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("beside_maxtext_measured.json"))
    options = parser.parse_args()
    if not 1 <= options.warm < options.steps:
        parser.error(
            f"--warm {options.warm} must be at least 1 and less than --steps {options.steps}"
        )
    row = row_of(options.row)
    versions = {"shardopt": versions_of(sys.executable), "maxtext": versions_of(options.maxtext)}
    libtpus = {who: packages.get("libtpu") for who, packages in versions.items()}
    if row.chip != "cpu" and len(set(libtpus.values())) > 1:
        parser.error(f"both sides need the same libtpu, and have {libtpus}")
    results: dict[str, Any] = {
        "row": row.name,
        "choices": {who: choice._asdict() for who, choice in CHOICES.items()},
        "versions": versions,
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for who in CONTENDERS:
                done = run(who, row, options.maxtext, options.steps, Path(name))
                seconds = seconds_of(done["times"], options.warm)
                results["rounds"].append({"who": who, "seconds": seconds, "last": done["last"]})
                print(
                    f"round {number + 1}, {who}: {statistics.median(seconds) * 1e3:.1f} ms a step;"
                    f" {done['last']}",
                    flush=True,
                )
    medians = {
        who: statistics.median(
            second for one in results["rounds"] if one["who"] == who for second in one["seconds"]
        )
        for who in CONTENDERS
    }
    results["median_seconds"] = medians
    results["ratio"] = medians["shardopt"] / medians["maxtext"]
    write_json(__file__, results, options.output)
    print(f"shardopt over MaxText: {results['ratio']:.3f}. Written to {options.output}.")


if __name__ == "__main__":
    main()
