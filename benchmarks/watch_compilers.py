"""Compile and prove our small programs with compilers of several versions.

Run: python benchmarks/watch_compilers.py --platform v5p --compilers libtpu==0.0.49 libtpu==0.0.50.1
     python benchmarks/watch_compilers.py --platform cpu --compilers "jax==0.12.0.1 jaxlib==0.12.0.1"
     --python python3.12
     python benchmarks/watch_compilers.py --platform h100 --compilers
     "jax-cuda12-plugin[with-cuda]==0.10.2"

Each compiler is what pip is asked for; jax and the others have the versions of this environment,
unless it names them. It gets an environment and the texts of its programs in a folder of its own,
where the next run finds them: it compiles only what is missing, and proves all of them again.
`--compilers` without one draws what the folder holds. `--every 8` takes each eighth row. The
picture and the record, `results/watch_compilers.png` and `.json`, have every version of the folder.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import write_json

ROOT = Path(__file__).parents[1]
PACKAGES = ["jax", "jaxlib", "optax", "orbax-checkpoint", "jaxtyping", "grain", "rich", "tyro"]
CRASHES = 20
"""So many programs may end the compiler's process."""
COLORS = {
    "": "white",
    "proved": "#1b7837",
    "agrees": "#a6dba0",
    "derived": "#d9f0d3",
    "unknown": "#fdb863",
    "wrong": "#d7191c",
    "errors": "#7b3294",
    "refused": "#bdbdbd",
}
"""Verdicts; "refused" is a program that the compiler did not compile, "" one that was not tried."""


def main() -> None:
    """Prove the programs of a platform with some compilers, and draw all that the folder holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="v5p", choices=("cpu", "v5p", "v6e", "h100"))
    parser.add_argument("--compilers", nargs="*", default=[], help="what pip is asked for")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/watch_compilers"))
    parser.add_argument("--every", type=int, default=1, help="take each of so many rows")
    parser.add_argument("--only", default="", help="a part of the names of the rows")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks/results/watch_compilers.json"
    )
    options = parser.parse_args()
    for compiler in options.compilers:
        folder = options.folder / compiler.replace(" ", "_")
        python = environment(folder, compiler, options.python)
        prove_programs(python, folder, options.platform, options.only, options.every)
    results = records(options.folder)
    draw(results, write_json(__file__, results, options.json).with_suffix(".png"))


def environment(folder: Path, compiler: str, python: str) -> Path:
    """Return the Python of a compiler's environment, which is made if there is none."""
    done = folder / "env" / "complete"
    interpreter = folder.absolute() / "env" / "bin" / "python"
    if not done.exists():
        named = re.findall(r"([\w-]+)(?:\[[\w,-]*\])?==", compiler)
        packages = [
            f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES if name not in named
        ]
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        install = [str(interpreter), "-m", "pip", "install", "-qq", *compiler.split()]
        subprocess.run([*install, *packages], check=True)
        done.touch()
    return interpreter


def prove_programs(python: Path, folder: Path, platform: str, only: str, every: int) -> None:
    """Compile what the folder has no text of, and prove all, in a process of the environment.

    A program that ends the process is noted, and the others are compiled by another process.
    """
    command = [str(python), "compiled_proof.py", "--platform", platform]
    command += ["--only", only, "--every", str(every)]
    command += ["--store", str(folder.absolute())]
    command += ["--json", str(folder.absolute() / f"{platform}.json")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for _ in range(CRASHES):
        code = subprocess.run(command, cwd=ROOT / "benchmarks", env=variables).returncode
        if code not in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGILL, -signal.SIGBUS):
            return
        for path in (folder / platform).glob("*.compiling"):
            path.rename(path.with_suffix(".error"))


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the versions and verdicts of each platform and compiler, oldest first."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json"), key=lambda path: (path.stem, version(path))):
        record = json.loads(path.read_text())
        result = record["results"][path.stem]
        refused = [json.loads(file.read_text()) for file in path.with_suffix("").glob("*.error")]
        results.setdefault(path.stem, {})[path.parent.name] = {
            "date": record["date"],
            "commit": record["commit"],
            "versions": record["versions"],
            "verdicts": result["verdicts"],
            "not_proved": result["not_proved"],
            "refused": {error["row"]: error["message"][:300] for error in refused},
        }
    return results


def version(path: Path) -> list[int]:
    """Return the numbers of a compiler's first version."""
    return [int(number) for number in path.parent.name.split("==")[1].split("_")[0].split(".")]


def table_of(results: dict[str, dict[str, Any]]) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the programs, the compilers, and the verdict of each program with each compiler."""
    columns = [
        (f"{platform} {label_of(name)}", record)
        for platform, compilers in results.items()
        for name, record in compilers.items()
    ]
    programs = dict.fromkeys(name for _, record in columns for name in record["verdicts"])
    for row in dict.fromkeys(row for _, record in columns for row in record["refused"]):
        if not any(name.startswith(f"{row}: ") for name in programs):
            programs[f"{row}: "] = None

    def verdict(record: dict[str, Any], program: str) -> str:
        is_refused = any(program.startswith(f"{row}: ") for row in record["refused"])
        return record["verdicts"].get(program, "refused" if is_refused else "")

    table = [[verdict(record, program) for _, record in columns] for program in programs]
    return list(programs), [label for label, _ in columns], table


def label_of(compiler: str) -> str:
    """Return the first package of a compiler and its version, without what pip adds to it."""
    return re.sub(r"\[.*?\]", "", compiler.split("_")[0]).replace("==", " ")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw programs against compilers, a color for each verdict."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    programs, compilers, table = table_of(results)
    verdicts = list(COLORS)
    codes = [[verdicts.index(verdict) for verdict in row] for row in table]
    size = (7 + 0.35 * len(compilers), 2.5 + 0.22 * len(programs))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.pcolormesh(
        codes,
        cmap=ListedColormap(list(COLORS.values())),
        vmin=-0.5,
        vmax=len(verdicts) - 0.5,
        edgecolors="white",
        linewidth=1,
    )
    axes.invert_yaxis()
    platforms = [compiler.split()[0] for compiler in compilers]
    for column in range(1, len(platforms)):
        if platforms[column] != platforms[column - 1]:
            axes.axvline(column, color="black", linewidth=2)
    centers = [index + 0.5 for index in range(max(len(compilers), len(programs)))]
    axes.set_xticks(centers[: len(compilers)], compilers, rotation=90, fontsize=8)
    axes.set_yticks(centers[: len(programs)], programs, fontsize=8)
    axes.tick_params(length=0)
    shown = [verdict for verdict in verdicts if any(verdict in row for row in table)]
    figure.legend(
        handles=[
            Patch(facecolor=COLORS[verdict], edgecolor="lightgray", label=verdict or "not tried")
            for verdict in shown
        ],
        loc="outside upper center",
        ncols=len(shown),
        frameon=False,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
