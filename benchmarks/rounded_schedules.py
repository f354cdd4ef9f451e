"""Final schedules of the 8-bit kernels at the shapes of Llama 3 8B and Mixtral: bundles, flops and
bytes, without a TPU.

    python benchmarks/rounded_schedules.py [--dumps FOLDER]

Needs `pip install 'shardopt[tpu]'` or another libtpu. A process for each chip compiles every kernel
for 8192 tokens in bfloat16, with the flags of `kernel_schedules.py`. Products are in int8, and in
fp8 on tpu7x. A kernel takes the longest of three times:

- its VLIW bundles, one a cycle. The loop over grid steps has a branch with the body of a step, in
  which loops over strips and branches of `pl.when` stand. A loop counts with its turns, and a
  branch as often as it runs. Stalls are not counted. Experts have equal numbers of rows.
- its flops at the chip's peak in 8 bits; gradients of experts' weights are in bfloat16.
- the bytes of the blocks that it copies, over the bandwidth of the memory. A block is copied when
  its index changes.

A schedule whose loops and branches are not those of the kernel is refused. Branches that store no
vector start or end copies, and count as if they always ran.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import write_json
from kernel_schedules import FLAGS
from kernel_schedules import TOPOLOGIES as INT8_TOPOLOGIES

TOKENS = 8192
TOPOLOGIES = INT8_TOPOLOGIES | {"tpu7x": "tpu7x:2x2x1"}
PRECISIONS = {"v6e": "int8", "v5p": "int8", "tpu7x": "fp8"}
"""Chip -> what its matrix units multiply twice as fast as bfloat16."""


class Weight(NamedTuple):
    """A weight of Llama 3 8B: its matrix, and the heads of activations and of the result."""

    summed: int
    channels: int
    parts: int = 1
    heads_of_x: int = 1
    heads: int = 1
    by_channel: bool = False


WEIGHTS = {
    "gate and up": Weight(4096, 14336, parts=2, by_channel=True),
    "down": Weight(14336, 4096),
    "q": Weight(4096, 4096, heads=32),
    "out": Weight(4096, 4096, heads_of_x=32, by_channel=True),
}
FORWARD, TOKENS_GRADIENT, WEIGHT_GRADIENT = (
    "product",
    "gradient of the tokens",
    "gradient of the weight",
)
ROUND_X, ROUND_BY_TOKEN, ROUND_BY_CHANNEL = (
    "tokens, rounded",
    "gradient, by token",
    "gradient, by channel",
)
KERNELS = (FORWARD, TOKENS_GRADIENT, WEIGHT_GRADIENT, ROUND_X, ROUND_BY_TOKEN, ROUND_BY_CHANNEL)
"""Names of what kernels compute. Gate and up share the gradient of the tokens, and their gradient
that is rounded by token. The other kernels have one of the two."""
ROUND_WEIGHT, NORM_AND_ROUND = "weight, rounded", "tokens, normed and rounded"
NORM, NORM_GRADIENT, ROTATION = "statistics of a norm", "gradient of a norm", "rotation of queries"
"""Kernels beside the products. These three run in bfloat16 too."""
EXPERTS, EXPERT_WEIGHTS = (
    8,
    {"experts' gate": Weight(4096, 14336), "experts' down": Weight(14336, 4096)},
)
"""Mixtral 8x7B. The rows are `TOKENS` choices of tokens."""


class Call(NamedTuple):
    """A call of a kernel.

    Attributes:
      name: the kernel.
      grid: its grid.
      strips: the turns of its loops over strips, in order.
      flops: of all steps.
      bytes: of the blocks that are copied in all steps.
      begins: for a kernel of experts, the share of visits that begin a tile or an expert.
      has_rows: the share of visits with rows.
    """

    name: str
    grid: tuple[int, ...]
    strips: tuple[int, ...]
    flops: int
    bytes: int
    begins: float = 1.0
    has_rows: float = 1.0


class Part(NamedTuple):
    """A loop or a branch in a step of a kernel, as its source says.

    Attributes:
      times: the turns of a loop, or how often a branch runs each time that the program reaches it.
      is_loop: whether it is a loop.
      is_counted: whether the schedule has the turns; otherwise they are data.
      parts: the loops and branches in it.
    """

    times: float
    is_loop: bool = False
    is_counted: bool = True
    parts: "tuple[Part, ...]" = ()


class Bundle(NamedTuple):
    """A bundle of a schedule: its address, its label, how many loops it is in, and its text."""

    at: int
    label: str | None
    depth: int
    text: str


class Span(NamedTuple):
    """A loop or a branch of a schedule: its bundles, the turns of a loop, 0 if they are data, and
    the spans directly in it.
    """

    start: int
    end: int
    turns: int | None
    parts: "tuple[Span, ...]" = ()

    @property
    def own(self) -> int:
        """Return the bundles outside of `parts`."""
        return self.end - self.start - sum(part.end - part.start for part in self.parts)


def form_of(call: Call) -> tuple[Part, ...]:
    """Return the loops and branches in a step of a kernel.

    What runs always is no branch, and a loop of one turn no loop.
    """

    def strips(number: int, *parts: Part) -> tuple[Part, ...]:
        turns = call.strips[number]
        return (Part(turns, is_loop=True, parts=parts),) if turns > 1 else parts

    def kept(count: int, *at_the_end: Part) -> tuple[Part, ...]:
        return (Part(1 - 1 / count), Part(1 / count, parts=at_the_end)) if count > 1 else at_the_end

    if call.name.endswith("_gradient_of_tokens"):
        return strips(0, *kept(call.grid[3]))
    if call.name.endswith("_gradient_of_weight"):
        rows, pieces = call.grid[2:]
        return strips(0, *kept(pieces, *kept(rows)))
    begins, has_rows = Part(call.begins), Part(call.has_rows)
    if call.name.endswith("_expert_product"):
        return begins, has_rows._replace(parts=strips(0))
    if call.name == "gradient_of_experts":
        return begins, has_rows._replace(parts=strips(0)), begins
    if call.name == "round_by_expert":  # no tile begins with rows of another expert
        turns = Part(call.strips[0], is_loop=True, is_counted=False)
        return Part(0), has_rows._replace(parts=(turns,))
    return strips(0)


_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) *([A-Z]{2})? *: *(>*) *\{", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel \(!?(%p\w+)\) target = \$region(\d+)")
_TARGET = re.compile(r"Start/End empty region (\d+)")
_TURNS = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder %\S+, (\d+) /\* loop exit test")
_STORE = re.compile(r"\bvst\b")
DELAYS = {"v5p": 5, "v6e": 5, "tpu7x": 2}
"""A branch is taken so many bundles later. On tpu7x a loop may end later than this: its bundles
have marks.
"""


def loop_of(text: str, delay: int = 5) -> Span:
    """Return the loop over grid steps of a schedule, from the text of its final bundles.

    A branch is taken `delay` bundles later. The target of a forward branch is the fallthrough
    (`PF`) with its region. Other branches go back to the last open loop. Its turns are data if it
    has no test with a number.

    Raises:
      ValueError: if a branch has another form, spans overlap, or the loop over grid steps is not
        the only one or has no number.
    """
    heads = list(_BUNDLE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bundles = [
        Bundle(int(head[1], 16), head[2], len(head[3]), text[head.start() : end])
        for head, end in zip(heads, ends, strict=True)
    ]
    targets = {
        region: bundle.at
        for bundle in bundles
        if bundle.label == "PF"
        for region in _TARGET.findall(bundle.text)
    }
    turns = {test: int(count) for bundle in bundles for test, count in _TURNS.findall(bundle.text)}
    stores = [bundle.at for bundle in bundles if _STORE.search(bundle.text)]
    spans, starts = [], []
    for i, bundle in enumerate(bundles):
        at = bundle.at
        if bundle.label == "LB":
            starts.append(bundle)
        branches = _BRANCH.findall(bundle.text)
        if len(branches) != bundle.text.count("sbr."):
            raise ValueError(f"bundle {at} has a branch of an unknown form")
        for test, region in branches:
            if region in targets:
                spans.append(Span(at + delay, targets[region], None))
            elif starts:
                start = starts.pop()
                end = max(at + delay, _end_of_marks(bundles[i + 1 :], start.depth))
                spans.append(Span(start.at, end, turns.get(test, 0)))
            elif spans:  # before the first loop, a core without steps goes to the end
                raise ValueError(
                    f"the branch of bundle {at} has no target, and is not the end of a loop"
                )
    spans = [
        span
        for span in spans
        if span.turns is not None or any(span.start <= at < span.end for at in stores)
    ]
    loops = _nested(sorted(spans, key=lambda span: (span.start, -span.end, span.turns is not None)))
    if len(loops) != 1 or not loops[0].turns:
        raise ValueError(f"this schedule has {len(loops)} loops over grid steps")
    return loops[0]


def _end_of_marks(bundles: list[Bundle], depth: int) -> int:
    """Return the bundle after the last one that has the marks of a loop so deep, or 0 if the first
    has fewer.
    """
    end = 0
    for bundle in bundles:
        if bundle.label == "LB" or 0 < bundle.depth < depth:
            break
        end = bundle.at + 1 if bundle.depth else end  # empty bundles have no marks
    return end


def _nested(spans: list[Span]) -> tuple[Span, ...]:
    """Return spans, sorted by their starts, with those that they contain as their parts."""
    nested = []
    while spans:
        first, *others = spans
        inside = [span for span in others if span.start < first.end]
        if any(span.end > first.end for span in inside):
            raise ValueError(f"spans of bundles {first.start} to {first.end} overlap")
        nested.append(first._replace(parts=_nested(inside)))
        spans = others[len(inside) :]
    return tuple(nested)


def bundles_of(text: str, call: Call, delay: int = 5) -> tuple[float, int]:
    """Return the bundles of a core in all its steps, and these steps, from the text of final
    bundles.

    Raises:
      ValueError: if the loops and branches are not those of the kernel.
    """
    loop = loop_of(text, delay)
    assert loop.turns
    # two more turns end the copies, and skip the branch with the body
    steps, form = loop.turns - 2, form_of(call)
    all_steps = math.prod(call.grid)
    # two cores share a dim, and one may have more
    halves = [all_steps // size * -(-size // 2) for size in call.grid]
    if len(loop.parts) != 1 or loop.parts[0].turns is not None or steps not in (all_steps, *halves):
        raise ValueError(
            f"{call.name}: {loop.turns} turns of {len(loop.parts)} bodies, for the grid {call.grid}"
        )
    body = loop.parts[0]
    return loop.turns * loop.own + steps * (body.own + _bundles(body.parts, form, call.name)), steps


def _bundles(spans: Sequence[Span], form: Sequence[Part], name: str) -> float:
    kinds = [span.turns for span in spans]
    if kinds != [part.times * part.is_counted if part.is_loop else None for part in form]:
        raise ValueError(f"{name}: loops and branches {kinds} are not those of {form}")
    pairs = zip(spans, form, strict=True)
    return sum(
        part.times * (span.own + _bundles(span.parts, part.parts, name)) for span, part in pairs
    )


def moved_bytes(
    grid: tuple[int, ...], specs: list[Any], dtypes: list[Any], scalars: Sequence[Any] = ()
) -> int:
    """Return the bytes of the blocks that are copied: one is when its index changes.

    Memory pads the last dim to 128.

    `scalars` are the arrays of integers that index maps get.
    """
    moved, last = 0, [None] * len(specs)
    for step in itertools.product(*map(range, grid)):
        for i, (spec, dtype) in enumerate(zip(specs, dtypes, strict=True)):
            index = tuple(int(i) for i in spec.index_map(*step, *scalars))
            if index != last[i]:
                *sizes, width = (size or 1 for size in spec.block_shape)
                moved += math.prod(sizes) * -(-width // 128) * 128 * dtype.itemsize
                last[i] = index
    return moved


def programs(
    precision: Any,
) -> dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]]:
    """Return a function for each kernel and weight, and the shapes and dtypes of its arguments."""
    import numpy as np

    from shardopt.kernels._norm import gradient_of_norm, inverse_rms
    from shardopt.kernels._rotary import rotate_halves
    from shardopt.low_precision import _expert_kernels as experts
    from shardopt.low_precision import _product_kernels as kernels
    from shardopt.low_precision._numbers import eight_bits

    T, wide, (narrow, narrow_grad) = TOKENS, "bfloat16", eight_bits(precision)
    found = {}
    for name, (K, N, C, heads_of_x, heads, by_channel) in WEIGHTS.items():
        sizes = kernels.Sizes(C, heads, by_channel, precision)
        matrix, scale = ((N, C * K) if by_channel else (K, C * N), narrow), ((1, C * N), "float32")
        x, grad = ((1, heads_of_x, T, K // heads_of_x), wide), ((1, heads, T, N // heads), wide)
        rounded = lambda width, dtype=narrow: ((1, T, width), dtype)
        by_token, by_channel_scale = ((1, T, 1), "float32"), ((1, 1, N), "float32")
        calls = {
            FORWARD: (
                lambda *arrays, sizes=sizes: kernels.forward(*arrays, sizes, 0, dtype=wide),
                [rounded(K), by_token, matrix, scale],
            ),
            TOKENS_GRADIENT: (
                lambda *arrays, sizes=sizes, heads=heads_of_x: kernels.gradient_of_tokens(
                    *arrays, sizes, heads, dtype=wide
                ),
                [rounded(C * N, narrow_grad), by_token, matrix],
            ),
            WEIGHT_GRADIENT: (
                lambda *arrays, sizes=sizes: kernels.gradient_of_weight(*arrays, sizes, dtype=wide),
                [rounded(K), rounded(N, narrow_grad), by_channel_scale],
            ),
            ROUND_X: (lambda x: kernels.round_rows([x], narrow), [x]),
            ROUND_BY_TOKEN: (
                lambda scale, *grads: kernels.round_rows(grads, narrow_grad, scale),
                [scale, *[grad] * C],
            ),
            ROUND_BY_CHANNEL: (
                lambda grad, scale: kernels.round_columns(grad, narrow_grad, scale),
                [grad, by_token],
            ),
        }
        found |= {f"{kernel}, {name}": call for kernel, call in calls.items()}
    counts = np.full(EXPERTS, T // EXPERTS, np.int32)
    for name, (K, N, *_) in EXPERT_WEIGHTS.items():

        def multiply(numbers, token_scale, matrix, channel_scale=None):
            arrays = (
                kernels.RoundedTokens(numbers, token_scale),
                matrix,
                channel_scale,
                counts,
                precision,
            )
            return experts.multiply(*arrays, summed_rows=channel_scale is not None, dtype=wide)

        matrix, by_row = ((K, EXPERTS * N), narrow), ((T, 1), "float32")
        calls = {
            FORWARD: (multiply, [((T, K), narrow), by_row, matrix, ((1, EXPERTS * N), "float32")]),
            TOKENS_GRADIENT: (multiply, [((T, N), narrow_grad), by_row, matrix]),
            WEIGHT_GRADIENT: (
                lambda x, grad: experts.gradient_of_experts(x, grad, counts, dtype=wide),
                [((T, K), wide), ((T, N), wide)],
            ),
            ROUND_X: (lambda x: experts.round_by_expert(x, counts, narrow), [((T, K), wide)]),
            ROUND_BY_TOKEN: (
                lambda grad, scale: experts.round_by_expert(grad, counts, narrow_grad, scale),
                [((T, N), wide), ((1, EXPERTS * N), "float32")],
            ),
        }
        found |= {f"{kernel}, {name}": call for kernel, call in calls.items()}
    K, N, *_ = WEIGHTS["gate and up"]
    norm = lambda x, scale: kernels.norm_and_round(x, scale, 1e-5, narrow)
    return found | {
        f"{ROUND_WEIGHT}, gate and up": (
            lambda weight: kernels.rounded_matrix(weight, narrow),
            [((K, N), wide)],
        ),
        f"{NORM_AND_ROUND}, gate and up": (norm, [((1, T, K), wide), ((K,), wide)]),
        NORM: (lambda x: inverse_rms(x, 1e-5), [((1, T, K), wide)]),
        NORM_GRADIENT: (
            lambda x, scale, grad, norm_grad: gradient_of_norm(x, scale, 1e-5, grad, [norm_grad]),
            [((1, T, K), wide), ((K,), wide), *[((1, T, K), wide)] * 2],
        ),
        ROTATION: (rotate_halves, [((1, T, 32, 128), wide), *[((1, T, 1, 64), "float32")] * 2]),
    }


def compile_programs(chip: str, folder: Path) -> None:
    """Compile each program for one chip, and write its call and the final bundles of its kernel to
    a folder of its own.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import shardopt as so
    from shardopt.kernels import _norm, _rotary
    from shardopt.kernels._pallas import ROWS, by_strips, call_kernel
    from shardopt.low_precision import _expert_kernels, _product_kernels
    from shardopt.planning import topology_devices

    calls, strips, visits_of = [], [], _expert_kernels.Visits.of

    def recorded_call(
        kernel,
        grid,
        inputs,
        in_specs,
        out_specs,
        out_shape,
        *,
        name,
        flops=0,
        scalars: Any = (),
        **options,
    ):
        dtypes, numbers = (
            [array.dtype for array in (*inputs, *out_shape)],
            [np.asarray(array) for array in scalars],
        )
        call = Call(
            name, grid, (), flops, moved_bytes(grid, [*in_specs, *out_specs], dtypes, numbers)
        )
        if scalars:
            tile, expert, first, end = numbers
            places = tile if name.endswith("_expert_product") else expert
            call = call._replace(
                begins=len({*places.tolist()}) / len(places), has_rows=float((first < end).mean())
            )
        if name == "round_by_expert":
            strips.append(in_specs[0].block_shape[0] // ROWS)
        calls.append(call)
        options |= {"name": name, "flops": flops, "scalars": scalars}
        return call_kernel(kernel, grid, inputs, in_specs, out_specs, out_shape, **options)

    def recorded_strips(size, strip, function):
        strips.append(size // strip)
        by_strips(size, strip, function)

    def known_visits(*args, **options):
        with ThreadPoolExecutor() as pool:  # a thread of its own has no trace and no mesh of TPUs
            return pool.submit(visits_of, *args, **options).result()

    for module in (_product_kernels, _expert_kernels, _norm, _rotary):
        module.call_kernel, module.by_strips = recorded_call, recorded_strips
    _expert_kernels.Visits.of = staticmethod(known_visits)  # pyright: ignore[reportAttributeAccessIssue]
    mesh = so.make_mesh(data=1, devices=topology_devices(TOPOLOGIES[chip])[:1])
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for program, (function, arguments) in programs(PRECISIONS[chip]).items():
        calls.clear()
        strips.clear()
        jax.clear_caches()  # a kernel that was traced before would not tell its strips
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=replicated)
            for shape, dtype in arguments
        ]
        with jax.set_mesh(mesh):
            jax.jit(lambda *arrays, function=function: function(*arrays)).lower(*shapes).compile()
        (call,) = calls
        own = folder / program
        own.mkdir()
        (own / "call.json").write_text(json.dumps(call._replace(strips=tuple(strips))._asdict()))
        (path,) = (
            path
            for path in folder.glob(f"*-{call.name}.*-final_bundles.txt")
            if "analysis" not in path.name
        )
        path.rename(own / "bundles.txt")
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()


def schedules(chip: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the counts of every program's kernel, compiled by a process of its own if the folder
    is not there.
    """
    if not folder.exists():
        folder.mkdir(parents=True)
        env = os.environ | {"LIBTPU_INIT_ARGS": FLAGS.format(folder=folder), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, __file__, "--child", chip, folder], env=env, check=True)
    counts = {}
    for program in programs(PRECISIONS[chip]):
        record = json.loads((folder / program / "call.json").read_text())
        call = Call(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in record.items()
            }
        )
        bundles, steps = bundles_of(
            (folder / program / "bundles.txt").read_text(), call, DELAYS[chip]
        )
        counts[program] = {
            "kernel": call.name,
            "grid": call.grid,
            "steps of a core": steps,
            "bundles of a core": bundles,
            "flops": call.flops,
            "bytes": call.bytes,
        }
    return counts


def milliseconds(chip: str, counts: dict[str, Any]) -> tuple[float, float, float]:
    """Return the times of a kernel by its bundles, by its flops and by its bytes."""
    from shardopt.planning import HARDWARE
    from shardopt.planning._schedule_actions import _TWICE_AS_FAST

    hardware = HARDWARE[chip].per_device()
    assert chip in _TWICE_AS_FAST[PRECISIONS[chip]]
    assert hardware.clock
    peak = hardware.flops * (2 if counts["kernel"].startswith(PRECISIONS[chip]) else 1)
    times = counts["bundles of a core"] / hardware.clock, counts["flops"] / peak
    bundles, flops, moved = (
        1e3 * seconds for seconds in (*times, counts["bytes"] / hardware.memory_bandwidth)
    )
    return bundles, flops, moved


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return a line for each kernel, weight and chip: milliseconds by bundles, flops and bytes, and
    the longest of them.
    """
    lines = [
        "| chip | kernel | ms by bundles | by flops | by bytes | longest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for chip, programs in results.items():
        for program, counts in programs.items():
            times = milliseconds(chip, counts)
            cells = " | ".join(f"{time:.3f}" if time else "" for time in (*times, max(times)))
            lines.append(f"| {chip} | {program} | {cells} |")
    return "\n".join(lines)


def short_table(
    results: dict[str, dict[str, dict[str, Any]]],
    chip: str,
    weights: Sequence[str] = tuple(WEIGHTS),
) -> str:
    """Return a line for each kernel, and a column for each weight: the longest time, and the flops
    at peak in brackets.
    """
    lines = [f"| {chip}, ms | {' | '.join(weights)} |", "|---|" + "---:|" * len(weights)]
    for kernel in KERNELS:
        if f"{kernel}, {weights[0]}" not in results[chip]:
            continue
        cells = []
        for weight in weights:
            times = milliseconds(chip, results[chip][f"{kernel}, {weight}"])
            cells.append(f"{max(times):.2f} ({times[1]:.2f})" if times[1] else f"{max(times):.2f}")
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gate_column(results: dict[str, dict[str, dict[str, Any]]], chip: str) -> list[str]:
    """Return the cells of the product of gate alone: the product, both gradients, the roundings,
    and all together.

    Gate and up share the kernels for the gradients of tokens, and each has half of their time.
    """

    def longest(kernel: str) -> float:
        return max(milliseconds(chip, results[chip][f"{kernel}, gate and up"]))

    products = longest(FORWARD), longest(TOKENS_GRADIENT) / 2, longest(WEIGHT_GRADIENT)
    grads = longest(ROUND_BY_TOKEN) / 2 + longest(ROUND_BY_CHANNEL)
    roundings = longest(ROUND_WEIGHT), longest(ROUND_X), grads
    cells = [f"{time:.2f}" for time in products]
    return [
        *cells,
        ", ".join(f"{time:.2f}" for time in roundings),
        f"{sum(products) + sum(roundings):.2f}",
    ]


def main() -> None:
    """Compile, count, store and print."""
    if sys.argv[1:2] == ["--child"]:
        chip, folder = sys.argv[2:]
        compile_programs(chip, Path(folder))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dumps", type=Path, default=Path(tempfile.gettempdir()) / "rounded_schedules"
    )
    options = parser.parse_args()
    results = {chip: schedules(chip, options.dumps / chip) for chip in PRECISIONS}
    write_json(__file__, results)
    weights = tuple(WEIGHTS), tuple(EXPERT_WEIGHTS)
    print(
        table(results),
        *(short_table(results, chip, some) for chip in results for some in weights),
        sep="\n\n",
    )
    print("\nGate alone on v6e:", *gate_column(results, "v6e"), sep="\n")


if __name__ == "__main__":
    main()
