"""Whether two versions of shardopt compile the same programs: what each sends, holds and computes.

Run: python benchmarks/same_programs.py --write BEFORE.json, the same with the other version as
AFTER.json, then
     python benchmarks/same_programs.py --compare BEFORE.json AFTER.json

Every strategy, schedule, reducer and kind of step of replicas that train apart is compiled on eight
fake CPU devices; nothing is run. Recorded are the collectives, the bytes of arguments, outputs,
reused and temporary buffers, and the flops of each program. Nothing but the public interface is
used, so that it outlives what is inside. Names of instructions and their order are not looked at.
Two programs that differ in none of this may still compute something else: that is for the tests to
see.
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import fake_devices, write_json

fake_devices(8)
# As tests/conftest.py: LLVM need not optimise what is never run.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardopt as so

R = so.reducers
LAYERS = 4
WIDTH = 16
HIDDEN = 32
INPUTS = 12
OUTPUTS = 8
ROWS = 32
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]
SAME = ("jax", "jaxlib", "optax")
"""Packages that programs come from: records of other versions of them are not compared."""


class Problem(NamedTuple):
    """A loss with what it is taken of, as shapes; `rules` freeze leaves."""

    loss_fn: Any
    params: Any
    batch: Any
    rules: tuple[tuple[str, str], ...] = ()


class Row(NamedTuple):
    """A strategy to compile: its step, or those from the given numbers where they differ, and its
    evaluation.
    """

    name: str
    make: Callable[[], Any]
    problem: Problem
    steps: tuple[int, ...] = ()
    evaluate: bool = True


def shapes(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def weighted_loss(outer, x, batch):
    error = jnp.mean((x @ outer["out"] * outer["scale"] - batch["y"]) ** 2, axis=-1)
    loss = so.losses.Weighted((error * batch["weights"]).sum(), batch["weights"].sum())
    return loss, {"size": jnp.sqrt(error).mean()}


def plain_loss(params, batch):
    """With leaves of odd sizes, a scalar and an integer."""
    x = jnp.tanh(batch["x"] @ params["up"])
    x = jnp.tanh(x @ params["down"] + params["bias"][None, :]) @ params["odd"]
    return jnp.mean((x.sum(-1) * params["scale"] + params["count"] - batch["y"][:, 0]) ** 2)


def noisy_loss(params, batch, rng=None):
    """With random numbers, and a running mean that the loss keeps itself."""
    x = batch["x"] - params["stats"]["mean"][None, :]
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.9, x.shape)
    stats = so.losses.Updated(
        {"stats": {"mean": 0.9 * params["stats"]["mean"] + 0.1 * batch["x"].mean(0)}}
    )
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["out"] - batch["y"]) ** 2), {
        "stats": stats
    }


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"][None, :],
    loss=weighted_loss,
)
BATCH = shapes({"x": (ROWS, INPUTS), "y": (ROWS, OUTPUTS), "weights": (ROWS,)})
BLOCKS = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH), "bias": (LAYERS, WIDTH)}
PROBLEMS = {
    "blocks": Problem(
        MODEL,
        shapes({"blocks": BLOCKS, "in": (INPUTS, WIDTH), "out": (WIDTH, OUTPUTS), "scale": ()}),
        BATCH,
    ),
    "plain": Problem(
        plain_loss,
        shapes(
            {
                "up": (INPUTS, HIDDEN),
                "down": (HIDDEN, WIDTH),
                "bias": (WIDTH,),
                "odd": (WIDTH, 5),
                "scale": (),
            }
        )
        | {"count": jax.ShapeDtypeStruct((), jnp.int32)},
        BATCH,
    ),
    "noisy": Problem(
        noisy_loss,
        shapes({"up": (INPUTS, HIDDEN), "out": (HIDDEN, OUTPUTS), "stats": {"mean": (INPUTS,)}}),
        BATCH,
        rules=(("stats", "frozen"),),
    ),
}
PROBLEMS["recomputed blocks"] = PROBLEMS["blocks"]._replace(loss_fn=MODEL._replace(remat="full"))
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "momentum": optax.sgd(0.1, momentum=0.9),
}
STRATEGIES = {
    "ddp": so.ddp,
    "zero1": lambda *args, **options: so.zero(*args, stage=1, min_shard_elements=8, **options),
    "zero2": lambda *args, **options: so.zero(*args, stage=2, min_shard_elements=8, **options),
    "fsdp": lambda *args, **options: so.fsdp(*args, min_shard_elements=8, **options),
    "hybrid": lambda *args, **options: so.hybrid(*args, min_shard_elements=8, **options),
}
MESHES = [
    {"data": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"replica": 2, "data": 4},
    {"data": 1},
]
PIPELINE = {"data": 2, "pipeline": 2, "tensor": 2}
APART = {"replica": 2, "data": 4}
SCHEDULES = {
    "gpipe": so.schedules.gpipe,
    # what it was called before
    "one_f_one_b": getattr(so.schedules, "eager_one_f_one_b", so.schedules.one_f_one_b),
    "interleaved": lambda stages, count: so.schedules.interleaved(stages, count, num_chunks=2),
    "zero_bubble": so.schedules.zero_bubble,
    "zero_bubble_lockstep": so.schedules.zero_bubble_lockstep,
}
REDUCERS = {
    "bf16": R.exact(jnp.bfloat16),
    "int8": R.int8(16),
    "sign": R.sign(8),
    "top_k": R.top_k(0.1),
    "power_sgd": R.power_sgd(1, min_ratio=0),
    "error_feedback int8": R.error_feedback(R.int8(16)),
    "error_feedback top_k": R.error_feedback(R.top_k(0.25)),
    "error_feedback power_sgd": R.error_feedback(R.power_sgd(2, min_ratio=0)),
    "error_feedback warm_up sign": R.error_feedback(R.warm_up(R.sign(8), 2)),
}


DEVICES: list[Any] = []
"""The devices that programs are compiled for; those of this process if it is empty."""


def mesh_of(sizes):
    """Return a mesh over the first devices that it needs."""
    return so.make_mesh(**sizes, devices=(DEVICES or jax.devices())[: math.prod(sizes.values())])


def strategy(name, sizes, problem, optimizer="adamw", **options):
    """Return a strategy on the first devices that the mesh needs.

    Rules where there is a tensor axis.
    """
    mesh = mesh_of(sizes)
    rules = RULES if "tensor" in sizes else ()
    options = {"rules": (*rules, *problem.rules)} | options
    return STRATEGIES[name](OPTIMIZERS[optimizer], mesh, problem.loss_fn, **options)


def row(label, name, sizes, problem="blocks", over=None, steps=(), **options):
    """Return a row; `over` makes replicas that train apart of the strategy."""
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    case = PROBLEMS[problem]

    def make():
        made = strategy(name, sizes, case, **options)
        return made if over is None else over(made)

    # The evaluation of replicas is that of the strategy they are made of, whatever the steps do.
    return Row(
        f"{label}, {mesh}, {problem}",
        make,
        case,
        steps,
        evaluate=over is None or label.startswith("local_sgd"),
    )


def all_rows() -> Iterator[Row]:
    """Yield every row."""
    yield from plain_rows()
    yield from feature_rows()
    yield from hybrid_rows()
    yield from apart_rows()


def plain_rows():
    """Every strategy on every mesh with both losses: 40 of the 80 rows that there are with 1 and
    with 2 micro-batches.

    Which has 2 alternates along all three, so that every pair and both numbers of micro-batches are
    seen together: strategy and mesh, strategy and loss, mesh and loss. Momentum is seen with every
    strategy, mesh and loss.
    """
    # fsdp keeps its number, so that its rows are the same as in earlier records
    for s, name in ((0, "ddp"), (1, "zero1"), (2, "zero2"), (4, "fsdp")):
        for m, sizes in enumerate(MESHES):
            for p, problem in enumerate(("blocks", "plain")):
                count = 1 + (s + m + p) % 2
                optimizer = "momentum" if (s + 2 * m + p) % 5 == 0 else "adamw"
                label = f"{name}, {optimizer}, micro_batches={count}"
                yield row(label, name, sizes, problem, micro_batches=count, optimizer=optimizer)


def feature_rows():
    """Gathers in half precision, recomputed blocks, frozen and updated leaves, random numbers,
    reducers.
    """
    for sizes, problem, count in (
        ({"data": 8}, "blocks", 1),
        (APART, "plain", 2),
        (MESHES[1], "blocks", 2),
    ):
        label = f"fsdp, gathers in bfloat16, micro_batches={count}"
        yield row(label, "fsdp", sizes, problem, micro_batches=count, gather_dtype=jnp.bfloat16)
    yield row("fsdp", "fsdp", {"data": 8}, "recomputed blocks")
    for name, count in (("ddp", 1), ("zero2", 2), ("fsdp", 1)):
        yield row(f"{name}, micro_batches={count}", name, MESHES[3], "noisy", micro_batches=count)
    for name, reducer in REDUCERS.items():
        yield row(f"ddp, {name}", "ddp", {"data": 8}, reducer=reducer)
    for name, sizes, count in (
        ("error_feedback int8", MESHES[1], 2),
        ("error_feedback power_sgd", APART, 1),
    ):
        label = f"ddp, {name}, micro_batches={count}"
        yield row(
            label, "ddp", sizes, reducer=REDUCERS[name], micro_batches=count, optimizer="momentum"
        )


def hybrid_rows():
    """Every schedule with three placements; then what is seen with some of them only."""
    for name, schedule in SCHEDULES.items():
        for placement in ("ddp", "zero1", "fsdp"):
            optimizer = (
                "momentum"
                if (name, placement) in (("gpipe", "fsdp"), ("zero_bubble", "zero1"))
                else "adamw"
            )
            options = {
                "schedule": schedule,
                "placement": placement,
                "micro_batches": 4,
                "optimizer": optimizer,
            }
            yield row(f"hybrid {name}, {placement}, {optimizer}", "hybrid", PIPELINE, **options)
    others = [
        ("one_f_one_b", "zero2", {"replica": 2, "data": 2, "pipeline": 2}, {}),
        (
            "interleaved",
            "fsdp",
            {"data": 4, "pipeline": 2},
            {"remat": True, "gather_dtype": jnp.bfloat16},
        ),
        ("zero_bubble", "fsdp", {"data": 2, "pipeline": 4}, {"remat": True}),
        (
            "one_f_one_b",
            "zero1",
            {"data": 4, "pipeline": 2},
            {"reducer": REDUCERS["error_feedback int8"]},
        ),
        ("gpipe", "fsdp", {"data": 4, "tensor": 2, "pipeline": 1}, {}),
    ]
    for name, placement, sizes, extra in others:
        said = "".join(f", {word}" for word in extra)
        options = {"schedule": SCHEDULES[name], "placement": placement, "micro_batches": 4} | extra
        yield row(f"hybrid {name}, {placement}{said}", "hybrid", sizes, **options)


def apart_rows():
    """Replicas that train apart: one program a kind of step, which the number of the step chooses."""
    for name in ("ddp", "zero1", "fsdp"):
        # warm-up, alone, averaged
        local_sgd = lambda made: so.local_sgd(made, sync_every=2, warmup_steps=1)
        yield row(f"local_sgd of {name}", name, APART, over=local_sgd, steps=(0, 1, 2))
        # alone, agreed
        yield row(
            f"diloco of {name}",
            name,
            APART,
            over=lambda made: so.diloco(made, sync_every=2),
            steps=(0, 1),
        )
    stream = lambda made: so.diloco(
        made, sync_every=4, fragments=2, delay=1, mix=0.5, reducer=R.error_feedback(R.int8(8))
    )
    late = lambda made: so.diloco(
        made, sync_every=6, fragments=2, delay=2, reducer=R.error_feedback(R.top_k(0.25))
    )
    parts = lambda made: so.diloco(
        made, sync_every=4, fragments=2, reducer=R.error_feedback(R.power_sgd(1))
    )
    yield row("diloco of fsdp, streamed int8", "fsdp", APART, over=stream, steps=(0, 2, 4))
    yield row(
        "diloco of ddp, sent and applied later, top_k",
        "ddp",
        APART,
        over=late,
        steps=(0, 3, 4, 6, 7),
    )
    yield row("diloco of zero1, fragments, power_sgd", "zero1", APART, over=parts, steps=(1, 3))
    own = {"reducer": REDUCERS["error_feedback int8"], "optimizer": "momentum"}
    once = lambda made: so.diloco(made, sync_every=2)
    yield row(
        "diloco of ddp with a reducer of its own", "ddp", APART, over=once, steps=(0, 1), **own
    )
    mixed = {"replica": 2, "data": 2, "tensor": 2}
    yield row(
        "diloco of fsdp, streamed int8, micro_batches=2",
        "fsdp",
        mixed,
        over=stream,
        steps=(2,),
        micro_batches=2,
    )
    stages = {"replica": 2, "data": 2, "pipeline": 2}
    yield row(
        "diloco of hybrid, streamed int8",
        "hybrid",
        stages,
        over=stream,
        steps=(2,),
        micro_batches=2,
    )
    noisy = lambda made: so.local_sgd(made, sync_every=2)
    yield row("local_sgd of ddp", "ddp", APART, "noisy", over=noisy, steps=(0, 1))


def programs_of(one: Row) -> Iterator[tuple[str, Any]]:
    """Yield (name, facts) of each program of a row."""
    opt = one.make()
    state = opt.abstract_state(one.problem.params)
    for step in one.steps or (None,):
        now = state if step is None else state._replace(step=np.int32(step))
        label = "step" if step is None else f"step {step}"
        yield (
            f"{one.name}: {label}",
            facts(opt.step.lower(now, one.problem.batch).compile(), opt.mesh),
        )
    if one.evaluate:
        yield (
            f"{one.name}: evaluate",
            facts(opt.evaluate.lower(state, one.problem.batch).compile(), opt.mesh),
        )


def facts(compiled, mesh) -> dict[str, Any]:
    """Return what is compared of a program."""
    memory = compiled.memory_analysis()
    found = Counter(
        (one.kind, one.axes, one.bytes, one.calls, one.in_loop, one.conditional)
        for one in so.hlo.audit(compiled, mesh=mesh).collectives
    )
    collectives = [
        {
            "kind": kind,
            "axes": list(axes) if axes is not None else None,
            "bytes": nbytes,
            "calls": calls,
            "in_loop": in_loop,
            "in_branch": in_branch,
            "count": count,
        }
        for (kind, axes, nbytes, calls, in_loop, in_branch), count in found.items()
    ]
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
        "collectives": sorted(collectives, key=json.dumps),
    }


def write(path: Path, only: str = "") -> None:
    """Compile every row whose name has `only` in it, and write what was found."""
    found = {}
    start = time.monotonic()
    for one in all_rows():
        if only not in one.name:
            continue
        before = time.monotonic()
        try:
            new = dict(programs_of(one))
        except Exception as error:
            error.add_note(f"same_programs: while compiling {one.name}")
            raise
        both = set(new) & set(found)
        if both:
            raise SystemExit(f"same_programs: two rows are called {min(both)}.")
        found |= new
        print(
            f"{time.monotonic() - start:4.0f} s  {len(new)} in {time.monotonic() - before:4.1f} s "
            f" {one.name}",
            flush=True,
        )
    write_json(__file__, {"programs": found}, path)
    print(f"{len(found)} programs written to {path}")


def counts(program: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a program as numbers by what they say.

    Of collectives, how many there are of each sort.
    """
    numbers = {name: value for name, value in program.items() if name != "collectives"}
    for one in program["collectives"]:
        axes = "mixed" if one["axes"] is None else " x ".join(one["axes"])
        said = f"{one['kind']} over {axes} of {one['bytes']} bytes"
        said += (
            ""
            if not one["in_loop"]
            else f", {'?' if one['calls'] is None else one['calls']} calls in loops"
        )
        said += ", in a branch" if one["in_branch"] else ""
        numbers[said] = one["count"]
    return numbers


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Return (program, what, before, after) of all that differs.

    None where one of them has none of it.
    """
    found = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found.append(
                (
                    name,
                    "the program",
                    *("there" if name in side else None for side in (before, after)),
                )
            )
            continue
        one = counts(before[name])
        other = counts(after[name])
        found += [
            (name, what, one.get(what), other.get(what))
            for what in sorted(one.keys() | other.keys())
            if one.get(what) != other.get(what)
        ]
    return found


def table(found: list[tuple[str, str, Any, Any]]) -> str:
    """Return the differences, those of a program under its name."""
    width = max(len(what) for _, what, _, _ in found)
    lines = []
    last = None
    for name, what, before, after in found:
        lines += [name] if name != last else []
        lines.append(
            f"    {what:<{width}}  {'-' if before is None else before} ->"
            f" {'-' if after is None else after}"
        )
        last = name
    return "\n".join(lines)


def compare(before: dict[str, Any], after: dict[str, Any], only: str = "") -> int:
    """Print what differs between two records, and return the exit code.

    Raises:
      SystemExit: if they are of other versions of what makes programs, or hold nothing to compare.
    """
    for package in SAME:
        versions = [record["versions"].get(package) for record in (before, after)]
        if versions[0] != versions[1]:
            told = (
                f"same_programs: the records are of {package} {versions[0]} and of {package}"
                f" {versions[1]}"
            )
            raise SystemExit(f"{told}: programs of one version can be compared only.")
    sides = [
        {name: program for name, program in record["results"]["programs"].items() if only in name}
        for record in (before, after)
    ]
    if not sides[0] and not sides[1]:
        raise SystemExit("same_programs: there are no programs to compare.")
    found = differences(*sides)
    if found:
        print(table(found))
        print(
            f"\n{len({name for name, *_ in found})} of {len(sides[0].keys() | sides[1].keys())}"
            " programs differ"
        )
        return 1
    print(f"{len(sides[0])} programs, all the same")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--write", type=Path, metavar="FILE", help="compile, and write what was found"
    )
    what.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two files so written"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="programs whose name has this in it"
    )
    args = parser.parse_args()
    if args.compare:
        return compare(*(json.loads(path.read_text()) for path in args.compare), args.only)
    write(args.write, args.only)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
