"""Whether our training steps hold the patterns that XLA:TPU compiles wrongly.

A compile for a slice answers it.

Usage: python benchmarks/known_errors.py [--json results/known_errors.json]

openxla/xla 49143: the pass `while-loop-all-reduce-code-motion` moves the all-reduce of a scatter
out of a loop, although one device alone adds to the sums of the steps before. Each step is compiled
with and without the pass. A program is affected if they differ and the loop holds
`select(partition-id ...)` of a whole sum. The first row is the pattern itself, which shows whether
this libtpu has the error at all.
"""

import argparse
import importlib.metadata
import json
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled_corpus import pattern_row, scatters_in_a_scan
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt
from shardopt.planning import topology_devices

TOPOLOGY = "v5p:2x2x1"
PASS = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
COLLECTIVE = re.compile(
    r" (all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all)(?:-start)?\("
)


def control(options):
    """Return the compiled program of the issue, with the dims of its report."""
    mesh = jax.sharding.Mesh(np.array(topology_devices(TOPOLOGY)), "d")
    problem = pattern_row((35, 256)).problem
    lowered = scatters_in_a_scan(mesh).lower(problem.params, problem.batch)
    return lowered.compile(compiler_options=options).as_text()


def lookup_loss(params, batch):
    """Return the loss of a model without blocks: rows of a table are read, and they score the next
    tokens.
    """
    hidden = params["embedding"][batch["tokens"][:, :-1]]
    logits = jnp.einsum("btd,vd->btv", hidden, params.get("head", params["embedding"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def strategy_rows():
    """Yield name, make(mesh, options), abstract parameters and the sizes of the mesh, for each step
    of ours.
    """
    tx = optax.adamw(1e-3)
    batch_options = {"micro_batches": 4}
    for tied in (False, True):
        config = gpt.config(vocab_size=512, dim=256, num_layers=1, num_heads=2, tied=tied)
        params = jax.eval_shape(lambda rng, config=config: gpt.init(config, rng), jax.random.key(0))
        model = gpt.model(config)
        head = "tied" if tied else "untied"
        for name, make in [("ddp", so.ddp), ("zero1", so.zero), ("fsdp", so.fsdp)]:
            for view in ("per_device", "global"):
                for sizes in ({"data": 4}, {"data": 2, "tensor": 2}):

                    def build(mesh, options, make=make, model=model, view=view):
                        given = batch_options | {
                            "view": view,
                            "rules": gpt.rules,
                            "compiler_options": options,
                        }
                        return make(tx, mesh, model, **given)

                    yield f"{name} {view} {head}", build, params, sizes

        def pipelined(mesh, options, model=model):
            return so.hybrid(
                tx, mesh, model, compiler_options=options, micro_batches=4, rules=gpt.rules
            )

        yield f"hybrid {head}", pipelined, params, {"data": 2, "pipeline": 2}
    table = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    for head, params in [
        ("tied", {"embedding": table}),
        ("untied", {"embedding": table, "head": table}),
    ]:
        for name, make in [("ddp", so.ddp), ("zero1", so.zero), ("fsdp", so.fsdp)]:
            for view in ("per_device", "global"):
                for sizes in ({"data": 4}, {"data": 2, "tensor": 2}):

                    def build(mesh, options, make=make, view=view):
                        given = {
                            "view": view,
                            "rules": [("", P("tensor", None))],
                            "compiler_options": options,
                        }
                        return make(tx, mesh, lookup_loss, micro_batches=4, **given)

                    yield f"lookup {name} {view} {head}", build, params, sizes


def collectives_of(text):
    """Return each collective of a program with its result and whether it is outside loops, sorted."""
    computation = ""
    rows = []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        computation = ("main" if header[1] else "other") if header else computation
        match = COLLECTIVE.search(line)
        if match:
            rows.append(
                (
                    match[1],
                    computation,
                    line.split(" = ")[1].split(match[0])[0].strip("(").split("{")[0],
                )
            )
    return sorted(rows)


def affected(text, without_pass):
    """Return whether the pass moved a collective, and whether it moved the sum of a scatter that
    one device begins.
    """
    moved = Counter(collectives_of(text)) - Counter(collectives_of(without_pass))
    shapes = {shape for kind, _, shape in moved if kind == "all-reduce"}
    # the device whose partition-id is 0 adds to the sums of earlier steps, the others to zero
    selected = (
        re.findall(r" = (\S+?)\{\S* select\(.*scatter-add", text) if "partition-id(" in text else []
    )
    return bool(moved), bool(shapes & set(selected))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--only", default="", help="a part of the names of the steps to compile")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    print(versions, flush=True)
    rows = [{"step": "the pattern itself", "mesh": "d=4"}]
    moved, wrong = affected(control({}), control(PASS))
    rows[0] |= {"moved": moved, "affected": wrong}
    print(rows[0], flush=True)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 49), jnp.int32)}
    for name, build, params, sizes in strategy_rows():
        if options.only not in name:
            continue
        texts = []
        for extra in ({}, PASS):
            make = lambda mesh, extra=extra, build=build: build(
                mesh, {**so.runtime.compiler_options(mesh), **extra}
            )
            texts.append(so.planning.aot(make, params, batch, topology=TOPOLOGY, **sizes).text)
        moved, wrong = affected(*texts)
        shape = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        rows.append({"step": name, "mesh": shape, "moved": moved, "affected": wrong})
        print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"versions": versions, "topology": TOPOLOGY, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
