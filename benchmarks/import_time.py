"""How long `import shardopt` takes beyond jax's own import: fresh interpreters, turn by turn.

    python import_time.py --rounds 15

Claim: at most 0.5 seconds more than `import jax`. The files are in the page cache, as they are from
the second start on.
"""

import argparse
import statistics
import subprocess
import sys

from common import median_ratio, write_json

CLAIM = 0.5
IMPORTS = {
    "nothing": "",
    "jax": "import jax",
    "jax and optax": "import jax, optax",
    "shardopt": "import shardopt",
    "shardopt's command": "import shardopt.cli",
}
TIMED = "import time; start = time.perf_counter(); {}\nprint(time.perf_counter() - start)"


def main(rounds):
    times = {name: [] for name in IMPORTS}
    for turn in range(-2, rounds):  # two to warm the page cache up
        for name in list(IMPORTS)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, "-c", TIMED.format(IMPORTS[name])]
            seconds = float(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            if turn >= 0:
                times[name].append(seconds)
    beyond = [ours - jax for ours, jax in zip(times["shardopt"], times["jax"], strict=True)]
    results = {
        "seconds, medians": {
            name: round(statistics.median(found), 4) for name, found in times.items()
        },
        "shardopt beyond jax": {
            "seconds, median": round(statistics.median(beyond), 4),
            "seconds, largest": round(max(beyond), 4),
            "ratio, median": round(median_ratio(times["shardopt"], times["jax"]), 3),
            "claim": f"at most {CLAIM} s",
            "holds": statistics.median(beyond) <= CLAIM,
        },
        "rounds": rounds,
    }
    for name, value in results["seconds, medians"].items():
        print(f"{name:20} {value:.3f} s")
    print(
        f"beyond jax           {results['shardopt beyond jax']['seconds, median']:.3f} s, at most"
        f" {CLAIM} claimed"
    )
    print(write_json(__file__, results))
    return 0 if results["shardopt beyond jax"]["holds"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    sys.exit(main(parser.parse_args().rounds))
