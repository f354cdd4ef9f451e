"""Whether compiled TPU programs have the same bits on every mesh, and what that costs by schedule.

Run: python benchmarks/same_bits_on_chips.py [--chips 1 2 4 8] [--platforms v5p v6e]

Nothing runs: XLA:TPU compiles for chips that are not there (`pip install -e '.[tpu]'`). A GPT, AdamW
with clipping, `so.reducers.exact(tile_rows=4)`, 8 tiles. Control: the program for one chip. Test:
those for 2, 4 and 8 chips of one topology, with ddp and fsdp. Claims:

- The program of a tile has the same float instructions on all meshes: opcode, sizes above 1 and
  attributes, those inside of fusions and loops included. Copies between memories do not count, nor do
  integers, which choose the rows of a tile.
- Collectives add no gradients: devices exchange them, and add in the order of the tree. XLA gathers
  small arrays by adding zeros, which changes no number but -0. They are listed.
- By the schedule, a step of 8 tiles of 16 rows of a larger GPT on all chips takes at most 1.05 times
  the step without tiles.

A program does not show how a chip rounds. Only a run can.
"""

import argparse
import collections
import re
from pathlib import Path

import jax
import numpy as np
import optax
from common import write_json
from step_times import step_seconds

import shardopt as so
from shardopt.hlo._hlo_text import Instruction, Module, attributes, parse
from shardopt.models import gpt
from shardopt.models._decoder_config import DecoderConfig
from shardopt.planning import topology_devices

TOPOLOGIES = {"v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
CONFIG = gpt.config(dim=256, num_layers=4, num_heads=4, max_length=128)
PRICED = gpt.config(dim=1024, num_layers=4, num_heads=8, max_length=512)
"""The GPT whose programs are compared, and the one whose step has a price."""
TILES, TILE_ROWS, PRICED_ROWS = 8, 4, 16
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
STRATEGIES = {"ddp": so.ddp, "fsdp": so.fsdp}
CALLED = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")  # fmt: skip
"""The attributes that name computations."""
OF_THE_COMPILER = {*CALLED, "metadata", "backend_config", "sharding", "frontend_attributes", "control-predecessors", "channel_id"}  # fmt: skip
"""The attributes that change no number."""
MOVES = {"copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "tuple", "parameter", "constant"}  # fmt: skip
"""Instructions that compute no number."""
ADDING = {"all-reduce", "reduce-scatter", "all-reduce-start", "reduce-scatter-start"}

Operations = collections.Counter[tuple[str, ...]]


def compiled_text(
    strategy: str,
    devices: list,
    config: DecoderConfig = CONFIG,
    rows: int = TILES * TILE_ROWS,
    **options,
) -> str:
    """Return the compiled program of a step."""
    mesh = so.make_mesh(data=len(devices), devices=devices)
    opt = STRATEGIES[strategy](TX, mesh, gpt.model(config), **options)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = {"tokens": jax.ShapeDtypeStruct((rows, config.max_length + 1), np.int32)}
    return opt.step.lower(opt.abstract_state(params), batch).compile().as_text()


def called_by(line: Instruction) -> list[str]:
    """Return the computations that an instruction calls."""
    values = attributes(line)
    texts = [values[name].strip("{}") for name in CALLED if name in values]
    return [name.strip().lstrip("%") for text in texts for name in text.split(",")]


def float_operations(module: Module, computation: str) -> Operations:
    """Return the float instructions of a computation, and of those that it calls."""
    operations: Operations = collections.Counter()
    for line in module.computations[computation]:
        for name in called_by(line):
            operations += float_operations(module, name)
        if line.opcode not in MOVES and re.match(r"\(?b?f\d", line.shape):
            shape = re.sub(r"\{[^}]*\}", "", line.shape)  # layout, and the memory that it lies in
            shape = re.sub(r"(?<=[\[,])1,|,1(?=\])", "", shape)
            kept = [f"{k}={v}" for k, v in attributes(line).items() if k not in OF_THE_COMPILER]
            operations[line.opcode, shape, *sorted(kept)] += 1
    return operations


def tile_operations(module: Module) -> Operations:
    """Return the float instructions of a tile: it is the branch with the most products."""
    branches = {
        name
        for line in module.instructions
        if line.opcode == "conditional"
        for name in called_by(line)
    }

    def products(operations: Operations) -> int:
        return sum(n for key, n in operations.items() if key[0] in ("convolution", "dot"))

    return max((float_operations(module, name) for name in branches), key=products)


def differing(operations: Operations, control: Operations) -> list[str]:
    """Return the instructions that only one of two programs has, with a sign."""
    more = [f"+ {' '.join(key)[:200]}" for key in operations - control]
    return more + [f"- {' '.join(key)[:200]}" for key in control - operations]


def compare(platform: str, strategy: str, chips: list[int]) -> dict:
    """Return how the programs of a strategy compare with the one for one chip."""
    devices = list(topology_devices(TOPOLOGIES[platform]))
    reducer = so.reducers.exact(tile_rows=TILE_ROWS)
    result: dict = {}
    control = None
    for count in chips:
        text = compiled_text(strategy, devices[:count], reducer=reducer)
        module = parse(text)
        operations = tile_operations(module)
        control = control or operations
        adding = [
            line.shape[:80]
            for line in module.instructions
            if line.opcode in ADDING and re.match(r"\(?b?f\d", line.shape)
        ]
        result[f"{count} chips"] = {
            "float instructions of a tile": sum(operations.values()),
            "other than for one chip": differing(operations, control),
            "collectives that add floats": adding,
        }
        print(platform, strategy, count, result[f"{count} chips"], flush=True)
    return result


def price(platform: str, strategy: str, chips: int) -> dict[str, float]:
    """Return the milliseconds of a step by schedule, and their ratio."""
    devices = list(topology_devices(TOPOLOGIES[platform]))[:chips]
    options = {
        "same bits": {"reducer": so.reducers.exact(tile_rows=PRICED_ROWS)},
        "plain": {"micro_batches": TILES // chips},
    }
    seconds = {
        name: step_seconds(
            compiled_text(strategy, devices, PRICED, TILES * PRICED_ROWS, **kind),
            mesh={"data": chips},
            hardware=platform,
        ).total
        for name, kind in options.items()
    }
    return {name: total * 1e3 for name, total in seconds.items()} | {
        "ratio": seconds["same bits"] / seconds["plain"]
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--platforms", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--out", type=Path, help="the JSON file of the results")
    options = parser.parse_args()
    results = {}
    for platform in options.platforms:
        for strategy in STRATEGIES:
            result = compare(platform, strategy, options.chips)
            result["milliseconds by schedule"] = price(platform, strategy, options.chips[-1])
            print(platform, strategy, result["milliseconds by schedule"], flush=True)
            results[f"{strategy} on {platform}"] = result
            write_json(__file__, results, options.out)
    print(write_json(__file__, results, options.out))


if __name__ == "__main__":
    main()
