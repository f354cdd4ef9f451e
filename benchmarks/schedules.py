"""Which pipeline schedule pays: the passes of real v5p programs, and how long a step of each
schedule is made of them.

Run: python benchmarks/schedules.py [--only NAME] [--pictures DIR]   (needs libtpu; one compile a schedule, about a minute each)

The step of a transformer of Llama 3 8B's width (2 blocks a chunk, 4 stages, 2048 tokens a
micro-batch, products in bfloat16) is compiled for four chips of v5p with every schedule. Of each
program are read the seconds of its passes by XLA's own cycle estimates (forward, input gradient,
weight gradient, both at once; the loss and the embedding apart), what a tick takes beside them,
what comes outside of the ticks, the flops of each pass, and the planned memory; once more where a
chunk is one block. Times of a step are the schedule's clock with these numbers, for 4 blocks a
stage: that of the program, in lockstep, where every tick takes as long as its busiest stage, or
sent ahead, where a stage waits for what its neighbours began; and every stage at its own pace, as a
program a stage could at best. Nothing runs: these are estimates, good for comparing schedules and
nothing else.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path

from common import write_json

TOPOLOGY = "v5p:2x2x1"
STAGES = 4
MICRO_BATCHES = 8
TOKENS = 2048
COUNTS = (8, 16, 32)


def builders():
    import shardopt as so

    S = so.schedules
    return {
        "gpipe": S.gpipe,
        "one_f_one_b": S.one_f_one_b,
        "eager_one_f_one_b": S.eager_one_f_one_b,
        "interleaved, 2 chunks": functools.partial(S.interleaved, num_chunks=2),
        "looped_breadth_first, 2 chunks": functools.partial(S.looped_breadth_first, num_chunks=2),
        "zero_bubble": S.zero_bubble,
        "zero_bubble, 2 chunks": functools.partial(S.zero_bubble, num_chunks=2),
        "zero_bubble_2": S.zero_bubble_2,
        "zero_bubble_v": S.zero_bubble_v,
        "dual_pipe_v": S.dual_pipe_v,
        "zero_bubble_lockstep": S.zero_bubble_lockstep,
        "zero_bubble_lockstep, 2 chunks": functools.partial(S.zero_bubble_lockstep, num_chunks=2),
        "zero_bubble_2, sent ahead": S.send_ahead(S.zero_bubble_2),
        "zero_bubble_v, sent ahead": S.send_ahead(S.zero_bubble_v),
        "dual_pipe_v, sent ahead": S.send_ahead(S.dual_pipe_v),
    }


def compiled(make, blocks=2):
    """Compile the step with a schedule, of so many blocks a chunk."""
    import optax
    import transformer

    import shardopt as so
    from shardopt.planning._models import find_model

    found = find_model("llama3-8b")
    shape = dataclasses.replace(
        found,
        num_layers=blocks * STAGES * make(STAGES, MICRO_BATCHES).num_chunks,
        length=TOKENS,
        vocab_size=32768,
        fused_attention=False,
    )

    def strategy(mesh):
        how = {"schedule": make, "micro_batches": MICRO_BATCHES, "placement": "ddp"}
        return so.hybrid(optax.sgd(1e-3), mesh, transformer.model(shape), **how)

    batch = transformer.abstract_batch(shape, MICRO_BATCHES)
    return so.planning.aot(
        strategy, shape.abstract_params(), batch, topology=TOPOLOGY, pipeline=STAGES
    )


def passes(text, schedule):
    """Return seconds and flops of each pass of a compiled step, and what comes beside them."""
    from step_times._schedule_actions import Done, Loop, Reader, Start

    from shardopt.hlo._program import read_program
    from shardopt.hlo._walk import callees
    from shardopt.planning._hardware import HARDWARE

    chip = HARDWARE["v5p"]
    program = read_program(text, (), mesh={"pipeline": STAGES})
    reader = Reader(program, chip, chip.clock)
    computations = program.module.computations

    def branches(name):
        """What each branch of each conditional directly in a computation takes, in the program's
        order.
        """
        lines = [line for line in computations[name] if line.opcode == "conditional"]
        return [(line, {callee: reader.cost(callee) for callee in callees(line)}) for line in lines]

    loops = [one for one in reader.read(program.module.entry) if isinstance(one, Loop)]
    loop = max(
        (one for one in loops if one.turns == schedule.num_ticks),
        key=lambda one: reader.cost(one.computation),
    )
    all_branches = branches(loop.computation)
    kinds = ["forward", "backward", "weight"][: len(schedule.ticks.passes)]
    dearest = sorted(all_branches, key=lambda one: -max(one[1].values()))[: len(kinds)]
    found = {}
    # a backward reads what the forward of its tick wrote, a weight pass what the backward did: they
    # stand in this order
    for kind, (_, costs) in zip(
        kinds, [one for one in all_branches if one in dearest], strict=True
    ):
        work = max(costs, key=costs.get)
        nested = [each for _, each in branches(work)]
        # loss and embedding, or nothing
        ends = [each for each in nested if min(each.values()) < max(each.values()) / 10]
        seconds = costs[work] - sum(max(each.values()) for each in nested)
        if kind == "backward":
            found["loss"], found["embedding"] = (max(ends[i].values()) for i in (0, -1))
            found["loss_flops"] = flops(text, max(ends[0], key=ends[0].get))
            for apart, together in (each.values() for each in nested if each not in ends):
                found["both"] = seconds + together
                seconds += apart
        found[kind] = {"seconds": seconds, "flops": flops(text, work)}
    actions = reader.read(loop.computation)
    found["permutes"] = sum(one.seconds for one in actions if isinstance(one, Start))
    found["permutes_beside_passes"] = _beside_passes(actions, Start, Done)
    found["tick"] = reader.cost(loop.computation) - sum(
        max(costs.values()) for _, costs in all_branches
    )
    found["outside"] = reader.cost(program.module.entry) - loop.turns * reader.cost(
        loop.computation
    )
    return found


def _beside_passes(actions, start, done):
    """How many permutes of a tick begin before its first branch and are waited for after its last
    one.
    """
    kinds = [type(one).__name__ for one in actions]
    if "Branch" not in kinds:
        return 0
    first = kinds.index("Branch")
    last = len(kinds) - 1 - kinds[::-1].index("Branch")
    begun = {one.key for one in actions[:first] if isinstance(one, start)}
    return len(begun & {one.key for one in actions[last:] if isinstance(one, done)})


def flops(text, computation):
    """The flops of inner products of a computation.

    Conditionals in it, which are the ends of the model, left out.
    """
    from shardopt.hlo import _program as audit
    from shardopt.hlo._hlo_text import parse

    module = parse(text)
    count = functools.cache(lambda name, inside: audit._computation(module, name, count, None))
    return count(computation, False).always


def times(make, found, micro_batches):
    """Return the seconds of the ticks of a step by the schedule's clock, with 4 blocks a stage, and
    what a stage keeps.
    """
    schedule = make(STAGES, micro_batches)
    size = schedule.num_stages * schedule.num_chunks
    scale = 2 / schedule.num_chunks
    F, B, W = (
        scale * found[kind]["seconds"] if kind in found else 0.0
        for kind in ("forward", "backward", "weight")
    )
    backward = [B + found["embedding"], *[B] * (size - 2), B + found["loss"]]
    numbers = {"forward": F, "backward": backward, "weight": W}
    saved = B + W - scale * found.get("both", 0.0)
    if schedule.ticks.message_ticks > 1:  # permutes travel beside the passes, copies do not
        rest = schedule.num_ticks * (found["tick"] - found["permutes"])
        program = schedule.program_time(**numbers, communication=found["permutes"]) + rest
    else:
        program = lockstep(schedule, numbers, saved) + schedule.num_ticks * found["tick"]
    return {
        "program": program,
        "own_pace": schedule.table_time(**numbers),
        "activations": max(schedule.peak_activations) / schedule.num_chunks,
    }


def stage_flops(make, found):
    """Return [S], the flops of inner products of a stage in a step of 8 micro-batches, with 4
    blocks a stage.
    """
    schedule = make(STAGES, MICRO_BATCHES)
    each = (
        2
        * MICRO_BATCHES
        * sum(found[kind]["flops"] for kind in ("forward", "backward", "weight") if kind in found)
    )
    last = schedule.ticks.stage_of[-1]
    return [each + MICRO_BATCHES * found["loss_flops"] * (stage == last) for stage in range(STAGES)]


def lockstep(schedule, numbers, saved):
    """Return the seconds of all ticks.

    A backward with its weight pass in one tick runs as one, which saves so many.
    """
    import numpy as np

    ticks = schedule.ticks
    load = np.zeros((ticks.num_ticks, ticks.num_stages))
    for kind, when in ticks.passes.items():
        each = (
            numbers[kind]
            if ticks.weight is not None or kind == "forward"
            else np.add(numbers[kind], numbers["weight"])
        )
        cost = np.broadcast_to(np.reshape(each, (-1, 1)), when.shape)
        np.add.at(load, (when, np.asarray(ticks.stage_of)[:, None]), cost)
    if ticks.weight is not None:
        together = np.argwhere(ticks.passes["weight"] == ticks.passes["backward"])
        for v, m in together:
            load[ticks.backward[v][m], ticks.stage_of[v]] -= saved
    return float(load.max(axis=1).sum())


def pictures(folder):
    """Draw every schedule as the program runs it, in few colours, which makes small files."""
    import shardopt as so

    folder.mkdir(parents=True, exist_ok=True)
    known = {name: (make, {}) for name, make in builders().items() if "sent ahead" not in name}
    longer = {"backward": 1.5}
    known["zero_bubble_v lockstep"] = so.schedules.zero_bubble_v, longer
    known["zero_bubble_v, sent ahead"] = so.schedules.send_ahead(so.schedules.zero_bubble_v), longer
    for name, (make, times) in known.items():
        _draw(folder / f"{name.replace(', ', '_').replace(' ', '_')}.png", make(4, 8), **times)
    cut = so.schedules.balance(10, 4, head=2)
    backward = [n + 3 * 2 * (v == 3) for v, n in enumerate(cut)]  # the loss is differentiated there
    _draw(
        folder / "unequal_stages.png",
        so.schedules.eager_one_f_one_b(4, 8),
        forward=list(cut),
        backward=backward,
        weight=list(cut),
    )


def _draw(path, schedule, **times):
    from PIL import Image
    from schedule_pictures import draw

    draw(schedule, path, **times)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def store(rows, one_block):
    """Write what is known so far, with the step that each schedule's passes give.

    A run that ends early loses one program.
    """
    for name, row in rows.items():
        row["step"] = {
            str(count): times(builders()[name], row["passes"], count) for count in COUNTS
        }
        row["stage_flops"] = stage_flops(builders()[name], row["passes"])
    results = {
        "topology": TOPOLOGY,
        "stages": STAGES,
        "tokens": TOKENS,
        "schedules": rows,
        "one_block": one_block,
    }
    return write_json(__file__, results)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", help="compile this schedule, or one_block, and keep what is known of the others"
    )
    parser.add_argument("--keep", type=Path, help="write the text of the compiled program here")
    parser.add_argument(
        "--pictures", type=Path, help="draw the schedules into this folder, and compile nothing"
    )
    options = parser.parse_args()
    if options.pictures:
        return pictures(options.pictures)
    path = Path(__file__).parent / "results" / "schedules.json"
    known = json.loads(path.read_text())["results"] if path.exists() else {}
    rows = known.get("schedules", {})
    one_block = known.get("one_block")
    if options.only in (None, "one_block"):
        make = builders()["zero_bubble_v"]
        one_block = {
            "schedule": "zero_bubble_v",
            "passes": passes(compiled(make, 1).text, make(STAGES, MICRO_BATCHES)),
        }
    if options.only in (None, "one_block"):
        store(rows, one_block)
    for name, make in builders().items():
        if options.only in (None, name):
            report = compiled(make)
            if options.keep:
                options.keep.write_text(report.text)
            rows[name] = {
                "passes": passes(report.text, make(STAGES, MICRO_BATCHES)),
                "temporary_bytes": report.memory.temporary,
                "wire_bytes": report.audit.by_axis()[("pipeline",)].wire_bytes,
                "compile_seconds": round(report.compile_seconds, 1),
            }
            print("wrote", store(rows, one_block), "after", name, flush=True)
    for name, row in rows.items():
        print(name, json.dumps(row))
    return None


if __name__ == "__main__":
    main()
