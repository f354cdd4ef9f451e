"""What the loops of `examples/own_loops` send and store with each link, next to the plain loops.

    python benchmarks/own_loops.py

Each loop trains its two layers, 768 numbers in fp32, with AdamW on eight simulated devices. Nothing is
timed.

- Bytes sent are those of the collectives in the compiled step, for each device. Branches count as
  taken: a step of local updates is one that averages.
- Bytes of state are those of the optimizer state that comes out of the last step, on one device.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

from common import fake_devices, write_json

fake_devices(8)

import jax
import optax
from jax._src import compiler

import shardopt as so

FOLDER = Path(__file__).parents[1] / "examples" / "own_loops"
LINKS = ("plain", "zero", "int8", "local_updates")
DEVICES = 8


def source_of(loop: str, link: str) -> str:
    """Return the text of a loop with the lines of a link changed."""
    if link == "plain":
        return (FOLDER / f"{loop}.py").read_text()
    path = FOLDER.parents[1] / "tests" / "docs" / "test_own_loops.py"
    sys.path.insert(0, str(path.parents[1]))
    spec = importlib.util.spec_from_file_location("test_own_loops", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    return tests.changed_text(loop, link)


def measure(loop: str, link: str) -> dict[str, int]:
    """Return the bytes that a device sends in a step, and the bytes of its optimizer state."""
    texts: list[str] = []
    compile_program = compiler.backend_compile_and_load

    def compile_and_read(*args, **kwargs):
        executable = compile_program(*args, **kwargs)
        texts.extend(module.to_string() for module in executable.hlo_modules())
        return executable

    compiler.backend_compile_and_load = compile_and_read
    data = importlib.import_module("data")
    module = types.ModuleType(f"{loop}_{link}")
    sys.modules[module.__name__] = module
    exec(compile(source_of(loop, link), module.__name__, "exec"), module.__dict__)
    _, opt_state, _ = module.train(optax.adamw(1e-3), data.weights(), data.batches(count=2))
    compiler.backend_compile_and_load = compile_program
    step = max(texts, key=len)  # the largest program of a loop
    collectives = so.hlo.audit(step, mesh={"data": DEVICES}).collectives
    leaves = [leaf for leaf in jax.tree.leaves(opt_state) if isinstance(leaf, jax.Array)]
    return {
        "bytes sent": sum(collective.wire_bytes * collective.calls for collective in collectives),
        "bytes of state": sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
    }


def main() -> None:
    """Measure all loops with all links."""
    sys.path.insert(0, str(FOLDER))
    loops = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "data")
    results = {loop: {link: measure(loop, link) for link in LINKS} for loop in loops}
    for link in LINKS:
        for quantity in ("bytes sent", "bytes of state"):
            print(f"{link}, {quantity}:", [results[loop][link][quantity] for loop in loops])
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
