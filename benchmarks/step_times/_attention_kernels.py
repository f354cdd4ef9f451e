"""Final schedules of splash attention's kernels, which compute whole tiles of a causal mask."""

import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

from shardopt.hlo._hlo_text import Instruction, arrays, elements
from shardopt.kernels import _splash_backward, _splash_forward
from shardopt.kernels._devices import vmem
from shardopt.kernels._flash import TILE
from step_times._flops import BACKWARD, FORWARD, splash_flops

KERNELS = {"fwd": FORWARD, "dq": (2, 1), "fused": BACKWARD, "dkv": (2, 2)}
"""Kernel to the number of products per tile: (with the width of keys, with the width of values)."""


class KernelCall(NamedTuple):
    """A call of an attention kernel on one row or more.

    Attributes:
      kernel: "fwd", "dq", "dkv" or "fused" of jax, or "splash_forward_N" or "splash_backward_N" of
        shardopt with N heads of queries a step; all also with "_segmented".
      block: positions of a block of queries, and of keys.
      rows: rows and heads, B x H.
      length: T, positions.
      width: width of a head.
      parallel: parts of the work that the cores of a device can share. jax's backward kernels share
        rows alone, its forward kernel shares heads too. shardopt's forward kernel shares its steps
        of heads, and its backward kernel groups.
    """

    kernel: str
    block: int
    rows: int
    length: int
    width: int
    parallel: int


class Bundles(NamedTuple):
    """VLIW bundles of a kernel's final schedule: in a step of its grid, more in a visible tile, and
    in a row of blocks.
    """

    step: float
    tile: float
    row: float


def _read(name: str) -> dict[tuple[str, str, int, int], Bundles]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return {
        (row["chip"], row["kernel"], int(row["block"]), 128): Bundles(
            *(float(row[name]) for name in Bundles._fields)
        )
        for row in csv.DictReader(text.splitlines())
    }


SCHEDULED = _read("kernel_schedules.csv")
"""(chip, kernel, block, width of a head) -> bundles, by libtpu 0.0.52
(`benchmarks/results/kernel_schedules.json`).
"""
TOKAMAX = _read("tokamax_schedules.csv")
"""The same of tokamax's kernels (`benchmarks/tokamax_schedules.py`)."""


def scheduled_cycles(chip: str, call: KernelCall) -> float | None:
    """Return the cycles of a call on one core by the final schedule of its kernel.

    None if the schedule is not known.

    A core starts one bundle a cycle. Stalls are not counted.

    Example:
      >>> call = KernelCall("splash_backward_4", 512, rows=32, length=4096, width=128, parallel=8)
      >>> 2e6 < scheduled_cycles("v5p", call) < 3e6
      True
    """
    bundles = _bundles(chip, call)
    if bundles is None:
        return None
    blocks = max(call.length // call.block, 1)
    tiles = blocks * (blocks + 1) // 2
    # jax visits hidden tiles, and computes nothing
    steps = tiles if call.kernel.startswith(("splash_", "tokamax_")) else blocks**2
    return call.rows * (steps * bundles.step + tiles * bundles.tile + blocks * bundles.row)


def _bundles(chip: str, call: KernelCall) -> Bundles | None:
    """Return the bundles of a kernel; a larger block than the largest known has those of a tile in
    proportion to its numbers. None for other kernels.
    """
    schedules = SCHEDULED | TOKAMAX
    known = [
        block
        for name, kernel, block, width in schedules
        if (name, kernel, width) == (chip, call.kernel, call.width) and block <= call.block
    ]
    if not known:
        return None
    times = call.block / max(known)
    step, tile, row = schedules[chip, call.kernel, max(known), call.width]
    return Bundles(step, tile * times**2, row * times)


def shared_by_cores(cores: int, parallel: int) -> float:
    """Return the part of a kernel's work that the busiest core of a device does.

    Example:
      >>> shared_by_cores(2, 1), shared_by_cores(2, 8), shared_by_cores(2, 3)
      (1.0, 0.5, 0.6666666666666666)
    """
    return -(-parallel // cores) / parallel


def kernel_call(line: Instruction, inputs: list[str], chip: str) -> KernelCall | None:
    """Return the call of a causal attention kernel on whole rows; None for other kernels.

    Args:
      line: the instruction. jax writes the sizes of blocks into its attributes.
      chip: its VMEM decides how many heads share a step of shardopt's kernels.
      inputs: shapes of its inputs. In jax's kernels queries are the first floats, and a table has
        the visible tiles of every block of queries.
    """
    floats = [
        _dims(shape) for shape in inputs if shape.startswith(_FLOATS) and len(_dims(shape)) >= 3
    ]
    if re.search("splash_(forward|backward)", line.name) and len(floats) > 2:
        return _our_call(line, inputs, floats, chip)
    match = re.search(r"splash_mha_(fwd|dq|dkv)(_segmented)?_(no_)?residuals", line.name)
    if match is None or not floats:
        return None
    *leading, heads, _, _ = floats[0]
    T, K = _length_and_width(floats[0])
    B = math.prod(leading)
    kernel, block = _jax_kernel(match[1], line)
    visible_tiles = _tiles_of_tokamax(line, inputs)
    if visible_tiles is not None:
        blocks = T // block
        if visible_tiles != blocks * (blocks + 1) // 2:
            return None
        name = f"tokamax_{kernel}{match[2] or ''}"
        return KernelCall(name, block, B * heads, T, K, B * heads)
    if not any(
        _dims(shape)[-2:] == (T // block,) * 2
        for shape in inputs
        if shape.startswith(("s8", "s32"))
    ):
        return None
    return KernelCall(
        kernel + (match[2] or ""), block, B * heads, T, K, B * heads if kernel == "fwd" else B
    )


def _jax_kernel(phase: str, line: Instruction) -> tuple[str, int]:
    """Return which kernel of jax runs in a phase, and its block of queries, from what jax writes on
    the instruction.
    """
    size = re.search(rf'block_q{"" if phase == "fwd" else "_" + phase}\\*": (\d+)', line.arguments)
    # it returns gradients of queries, too
    fused = phase == "dkv" and len(elements(line.shape)) == 3
    return "fused" if fused else phase, int(size[1]) if size else TILE


def _our_call(
    line: Instruction, inputs: list[str], floats: list[tuple[int, ...]], chip: str
) -> KernelCall | None:
    """Return the call of a kernel of shardopt.

    Its list of tiles, or its stated flops, tell whether the mask is causal.
    """
    query = floats[0]
    key = floats[-1]
    value_width = floats[-1][3]
    (B, H, T, K), G = query, key[1]
    blocks = T // TILE
    memory = vmem({"v4": "TPU v4", "v6e": "TPU v6 lite"}.get(chip, chip))
    segments = "_segmented" * any(
        shape.startswith("s32") and len(_dims(shape)) == 3 for shape in inputs
    )
    if T % TILE or not line.shape.startswith("(bf16"):
        return None
    if "splash_backward" in line.name:
        causal = _dims(inputs[0]) == (blocks * (blocks + 1) // 2,)
        heads = _splash_backward.heads_of_step(query, key, value_width, T, "bfloat16", memory)
        name = f"splash_backward_{heads}"
        parallel = B * G
    else:
        causal = kernel_flops(line, inputs) == splash_flops(
            *FORWARD, heads=B * H, length=T, keys=K, values=value_width
        )
        heads = max(_splash_forward.heads_of_step(query, key, value_width, "bfloat16", memory), 1)
        name = f"splash_forward_{heads}"
        parallel = B * H // heads
    return KernelCall(name + segments, TILE, B * H, T, K, parallel) if causal else None


def kernel_flops(line: Instruction, inputs: list[str]) -> float:
    """Return the flops of a Pallas kernel: its stated flops, or `splash_flops` for splash
    attention; else 0.

    tokamax states almost all tiles of the square, and its kernels visit the tiles in their tables.
    """
    stated = _STATED_FLOPS.search(line.arguments)
    visible_tiles = _tiles_of_tokamax(line, inputs)
    if stated and visible_tiles is None:
        return float(stated[1])
    if "splash" not in line.name:
        return 0.0
    sizes = [
        dims for shape in inputs if len(dims := _dims(shape)) >= 3 and shape.startswith(_FLOATS)
    ]
    if not sizes:
        return 0.0
    largest = max(sizes, key=math.prod)
    *heads, _, _ = largest
    length, width = _length_and_width(largest)
    # queries, keys and values come first
    value_width = min(sizes[2][-2:]) if len(sizes) > 2 else width
    phase = next((phase for phase in ("fwd", "dq", "dkv") if f"_{phase}" in line.name), "dkv")
    kernel, block = _jax_kernel(phase, line)
    widths = {"keys": width, "values": min(value_width, width)}
    if visible_tiles is not None:
        key_products, value_products = KERNELS[kernel]
        products = key_products * widths["keys"] + value_products * widths["values"]
        key_block = _block_of_keys(phase, line) or block
        return 2.0 * products * math.prod(heads) * visible_tiles * block * key_block
    return splash_flops(
        *KERNELS[kernel], heads=math.prod(heads), length=length, block=block, **widths
    )


def _tiles_of_tokamax(line: Instruction, inputs: list[str]) -> int | None:
    """Return the tiles that a kernel of tokamax visits; None for other kernels.

    Its first tables have an entry for each: its row, its column, and the mask to load. A number may
    precede them.
    """
    integers = [_dims(shape) for shape in inputs[:3] if shape.startswith(_INTEGERS)]
    tables = [dims for dims in integers if dims][:2]
    if not re.search(r"splash_m[hq]a_(fwd|dq|dkv)", line.name) or len(tables) < 2:
        return None
    is_list = tables[0] == tables[1] and len(tables[0]) == 1
    return tables[0][0] if is_list else None


def _block_of_keys(phase: str, line: Instruction) -> int | None:
    """Return the positions of a block of keys in what the kernel writes on the instruction."""
    size = re.search(rf'block_kv{"" if phase == "fwd" else "_" + phase}\\*": (\d+)', line.arguments)
    return int(size[1]) if size else None


def _length_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the positions and the width of a head, in either order of the last two dims."""
    return max(shape[-2:]), min(shape[-2:])


_INTEGERS = ("s8", "s16", "s32")
_FLOATS = ("bf16", "f16", "f32")
_STATED_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')


def _dims(shape: str) -> tuple[int, ...]:
    return tuple(
        int(dim)
        for dim in arrays(shape)[0].partition("[")[2].rstrip("]").split(",")
        if dim.isdigit()
    )
