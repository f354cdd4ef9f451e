"""Final schedules of attention's kernels: VLIW bundles of a grid step, of a tile and of a block of
rows, without a TPU.

    python benchmarks/kernel_schedules.py [--dumps FOLDER]

Needs `pip install 'shardopt[tpu]'` or another libtpu. A process for each program compiles it with
`LIBTPU_INIT_ARGS` that dump the schedules that libtpu generates machine code from
(`--xla_jf_dump_llo_text`, label `final_bundles`). One program has shardopt's backward kernel, the
others jax's splash kernels with blocks of 512, and of 1024 with the fused backward kernel. A row of
4096 tokens has 32 heads of 128, and 8 of keys and values. A core starts one bundle a cycle. Stalls
are not counted, but a kernel takes at least its flops at the core's peak.

A kernel is a loop over grid steps. Its branches are in the file: what starts and ends a block of
rows, and with jax what a visible tile computes. The kernel's entry in `KERNELS` says how often each
branch is taken. A schedule with another number of branches is refused. `shardopt.planning` has the
counts, and takes them for `step_seconds`.

`results/kernel_generation.json` has the seconds of CPU in which each program was traced, lowered
and compiled to machine code.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from common import write_json

HEADS = 32
GROUP_SIZE = 4
LENGTH = 4096
WIDTH = 128
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=final_bundles"
)
SEGMENTED = "_segmented"
FORWARD = "splash_forward"
BACKWARD = "splash_backward"
PROGRAMS = {
    f"shardopt{heads}{segments}": (FORWARD, BACKWARD)
    for segments in ("", SEGMENTED)
    for heads in (4, 2, 1)
} | {
    f"jax{block}{segments}": phases
    for segments in ("", SEGMENTED)
    for block, phases in ((512, ("fwd", "dq", "dkv")), (1024, ("fwd", "dkv")))
}
"""Program -> words in the names of its kernels. The number is the heads of queries of a step of
shardopt's kernels, and the block of jax's. MaxText passes segments, also where a row has one."""
ROW = "row"
GROUP = "group"
TILE = "tile"
KERNELS = {
    FORWARD: (TILE,),
    BACKWARD: (ROW, GROUP, ROW, GROUP),
    "fwd": (ROW, TILE, ROW),
    "dq": (ROW, TILE, ROW),
    "dkv": (GROUP, TILE, GROUP),
}
"""Word -> how often each branch of a step is taken: for a head's rows, for a group of heads, or in
a visible tile.
"""


class Counts(NamedTuple):
    """Bundles of a kernel.

    Attributes:
      step: in each step of the grid.
      tile: more in a tile in which a query sees a key.
      row: more for a block of rows of a head. What a group of heads shares is divided among its
        heads.
    """

    step: float
    tile: float
    row: float


class Region(NamedTuple):
    """Bundles from a forward branch to its target; `parts` are the regions directly in it."""

    start: int
    end: int
    parts: "tuple[Region, ...]"

    @property
    def size(self) -> int:
        """Return all bundles."""
        return self.end - self.start

    @property
    def own(self) -> int:
        """Return the bundles outside of `parts`."""
        return self.size - sum(part.size for part in self.parts)


_LINE = re.compile(r"^ *(0x[0-9a-f]+|0) *([A-Z]{2})?([ :>]*)\{(\})?")
_BRANCH = "sbr.rel ("
_DELAY = 5
"""A branch is taken so many bundles later."""


def loop_of(text: str) -> Region:
    """Return the loop over grid steps of a schedule, from the text of its final bundles.

    Forward branches end at the next open fallthrough (`PF`). The branch at the end of a loop goes
    back. An inner loop stands in a branch that skips it if it has no steps. Branches that are still
    open at the end of the loop end at its last fallthrough, as one of their own branches does.
    """
    lines = [(match, line) for line in text.splitlines() if (match := _LINE.match(line))]
    depths = {
        int(match[1], 16): match[3].count(">") for match, _ in lines if not match[4]
    }  # an empty bundle shows none
    starts = []
    opened = []
    closed = [[]]
    last = -1

    def close(at: int) -> None:
        parts = closed.pop()
        closed[-1].append(Region(opened.pop(), at, tuple(parts)))

    for match, line in lines:
        at = int(match[1], 16)
        label = match[2]
        if label == "LB":
            starts.append(at)
        if label == "PF" and opened:
            close(at)
            last = at
        if not starts or _BRANCH not in line:
            continue
        depth = next(
            (depths[later] for later in range(at + _DELAY, max(depths) + 1) if later in depths), 0
        )
        if depth >= len(starts):  # the loop goes on
            opened.append(at + 1)
            closed.append([])
        elif len(starts) > 1:
            starts.pop()
        elif opened and max(opened) > last:
            raise ValueError(f"the loop ends at bundle {at} inside a branch")
        else:
            while opened:
                close(last)
            return Region(starts[0], at + 1, tuple(closed[0]))
    raise ValueError("this schedule has no loop over grid steps")


def counts_of(text: str, kernel: str, block: int, heads: int = 1) -> Counts:
    """Return the counts of a kernel from the text of its final bundles."""
    uses = KERNELS[kernel]
    region = loop_of(text)
    outside = 0
    # a branch skips the body in the last steps, which only write. Small branches start or end
    # copies.
    while region.parts and (kernel == FORWARD or len(region.parts) != len(uses)):
        largest = max(region.parts, key=lambda part: part.size)
        if kernel != FORWARD and not largest.parts:
            raise ValueError(f"{kernel}: {len(region.parts)} branches, expected {uses}")
        outside += region.size - largest.size
        region = largest
    # a step has a row of blocks. The branch has a loop over its tiles but the first.
    if kernel == FORWARD:
        return Counts(region.size / heads, 0, (outside - region.size) / heads)
    sums = dict.fromkeys((ROW, GROUP, TILE), 0.0)
    for use, part in zip(uses, region.parts, strict=True):
        sums[use] += part.size
    step = outside + region.own
    # it holds the gradients of all rows of a head
    whole_head = LENGTH // block if kernel == BACKWARD else 1
    row = (sums[ROW] / heads + sums[GROUP] / GROUP_SIZE) / whole_head
    return Counts(step / heads, sums[TILE] / heads, row)


def compile_program(program: str, topology: str) -> float:
    """Compile a program of one row for every chip of a topology, and return the seconds of CPU of
    all threads.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.sharding import NamedSharding, PartitionSpec

    import shardopt as so
    from shardopt.kernels._flash import Keys, Marks, MaskRule, Queries
    from shardopt.kernels._splash_backward import gradients
    from shardopt.kernels._splash_forward import attend
    from shardopt.planning import topology_devices

    devices = topology_devices(topology)
    mesh = so.make_mesh(data=len(devices), devices=devices)

    def ours(query, key, value, d_out, logsumexp):
        # not known to the compiler
        ids = logsumexp[:, 0].astype(jnp.int32) if program.endswith(SEGMENTED) else None
        marks = Marks(None, ids)
        rule = MaskRule(True, None)
        queries = Queries(query, d_out, logsumexp, logsumexp, marks)
        mixed = attend(query, key, value, ids, ids, rule)
        return *mixed, *gradients(queries, Keys(key, value, marks), rule, dtype=query.dtype)

    def theirs(query, key, value, d_out, logsumexp):
        block = _number(program)
        fused = block == 1024
        sides = (
            "q",
            "kv",
            "kv_compute",
            "q_dkv",
            "kv_dkv",
            "kv_dkv_compute",
            *(() if fused else ("q_dq", "kv_dq")),
        )
        sizes = splash.BlockSizes(
            **{f"block_{side}": block for side in sides}, use_fused_bwd_kernel=fused
        )
        mask = splash.MultiHeadMask([splash.CausalMask((LENGTH, LENGTH))] * HEADS)
        kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        if program.endswith(SEGMENTED):
            rows = logsumexp[:, 0].astype(jnp.int32)
            ids = splash.SegmentIds(rows, rows)
            return jax.vjp(lambda *operands: jax.vmap(kernel)(*operands, ids), query, key, value)[
                1
            ](d_out)
        return jax.vjp(jax.vmap(kernel), query, key, value)[1](d_out)

    group_size = _number(program) if _is_ours(program) else GROUP_SIZE
    split = PartitionSpec("data")
    shapes = [
        jax.ShapeDtypeStruct((len(devices), *shape), dtype, sharding=NamedSharding(mesh, split))
        for shape, dtype in (
            ((HEADS, LENGTH, WIDTH), jnp.bfloat16),
            *[((HEADS // group_size, LENGTH, WIDTH), jnp.bfloat16)] * 2,
            ((HEADS, LENGTH, WIDTH), jnp.bfloat16),
            ((HEADS, LENGTH), jnp.float32),
        )
    ]
    function = ours if _is_ours(program) else theirs
    mapped = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    start = _cpu_seconds()
    jax.jit(mapped).lower(*shapes).compile()
    return _cpu_seconds() - start


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def schedules(chip: str, program: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return the counts of a program's kernels by name, compiled by a process of its own if the
    folder is not there.
    """
    if not folder.exists():
        folder.mkdir(parents=True)
        env = os.environ | {"LIBTPU_INIT_ARGS": FLAGS.format(folder=folder), "JAX_PLATFORMS": "cpu"}
        subprocess.run(
            [sys.executable, __file__, "--child", program, TOPOLOGIES[chip], folder],
            env=env,
            check=True,
        )
    counts = {}
    for word in PROGRAMS[program]:
        (path,) = [
            path
            for path in folder.glob("*-final_bundles.txt")
            if re.search(rf"-(splash_mha_{word}_|(transpose_jvp_)?{word}[_.])", path.name)
            and "schedule-analysis" not in path.name
        ]
        segments = SEGMENTED if program.endswith(SEGMENTED) else ""
        number = _number(program)
        name = f"{word}_{number}{segments}" if _is_ours(program) else f"{word}{segments} {number}"
        sizes = (512, number) if _is_ours(program) else (number,)
        counts[name] = counts_of(path.read_text(), word, *sizes)._asdict()
    return counts


def _is_ours(program: str) -> bool:
    return program.startswith("shardopt")


def _number(program: str) -> int:
    """Return the heads of queries of a step of shardopt's kernels, or the block of jax's."""
    return int(program.removesuffix(SEGMENTED).lstrip("abcdefghijklmnopqrstuvwxyz"))


def generation_table(seconds: dict[str, dict[str, float]]) -> str:
    """Return a line for each program: its kernels, and the seconds of CPU on each chip."""
    lines = [f"| program | kernels | {' | '.join(f'{chip}, s of CPU' for chip in seconds)} |"]
    lines.append("|---|---|" + "---:|" * len(seconds))
    for program, kernels in PROGRAMS.items():
        number = _number(program)
        owner = f"shardopt, heads: {number}" if _is_ours(program) else f"jax, blocks of {number}"
        owner += ", segmented" if program.endswith(SEGMENTED) else ""
        values = " | ".join(f"{by_program[program]:.1f}" for by_program in seconds.values())
        lines.append(f"| {owner} | {', '.join(kernels)} | {values} |")
    return "\n".join(lines)


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a line for each kernel: its counts, and milliseconds of a row by its schedule and by
    its flops at peak.
    """
    from step_times import _attention_kernels as kernels

    from shardopt.planning import HARDWARE

    lines = [
        "| chip | kernel | blocks | bundles: step, more in a tile, in a row of blocks | cores | ms,"
        " scheduled | ms, stated |"
    ]
    lines.append("|---|---|---:|---|---:|---:|---:|")
    for chip, counts in results.items():
        for name, bundles in counts.items():
            word, _, size = name.partition(" ")
            block = int(size or 512)
            kernel = word.replace("dkv", "fused") if block == 1024 else word
            phase = kernel.removesuffix(SEGMENTED)
            segments = ", segmented" * kernel.endswith(SEGMENTED)
            ours = re.fullmatch(r"splash_(forward|backward)_(\d)", phase)
            if ours:
                direction = ours[1]
                heads = int(ours[2])
                parallel = HEADS // (heads if direction == "forward" else GROUP_SIZE)
                products = kernels.FORWARD if direction == "forward" else kernels.BACKWARD
                owner = f"shardopt, {direction}, heads: {heads}{segments}"
            else:
                parallel = HEADS if phase == "fwd" else 1
                products = kernels.KERNELS[phase]
                owner = f"jax, {phase}{segments}"
            call = kernels.KernelCall(kernel, block, HEADS, LENGTH, WIDTH, parallel)
            share = kernels.shared_by_cores(HARDWARE[chip].cores, parallel)
            hardware = HARDWARE[chip]
            flops = kernels.splash_flops(
                *products, heads=HEADS, length=LENGTH, keys=WIDTH, values=WIDTH, block=block
            )
            stated = flops / hardware.flops
            bundles_seconds = share * (kernels.scheduled_cycles(chip, call) or 0) / hardware.clock
            scheduled = max(bundles_seconds, share * hardware.cores * stated)
            numbers = f"{bundles['step']:,.0f}, {bundles['tile']:,.0f}, {bundles['row']:,.0f}"
            used = f"{round(1 / share)} of {hardware.cores}"
            times = f"{scheduled * 1e3:.2f} | {stated * 1e3:.2f}"
            lines.append(f"| {chip} | {owner} | {block} | {numbers} | {used} | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Compile, count, store and print."""
    if sys.argv[1:2] == ["--child"]:
        program, topology, folder = sys.argv[2:]
        (Path(folder) / "seconds.json").write_text(json.dumps(compile_program(program, topology)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dumps", type=Path, default=Path(tempfile.gettempdir()) / "kernel_schedules"
    )
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for chip in TOPOLOGIES:
        for program in PROGRAMS:
            folder = options.dumps / f"{chip}_{program}"
            results.setdefault(chip, {}).update(schedules(chip, program, folder))
            seconds.setdefault(chip, {})[program] = json.loads(
                (folder / "seconds.json").read_text()
            )
    generation = write_json(__file__, results).with_name("kernel_generation.json")
    write_json(__file__, seconds, generation)
    print(table(results), generation_table(seconds), sep="\n\n")


if __name__ == "__main__":
    main()
