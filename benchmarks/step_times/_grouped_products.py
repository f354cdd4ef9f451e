"""Grouped products of megablox: the tiles that their kernels visit.

A kernel states the flops of its rows. It multiplies whole tiles, also beyond the end of a matrix, and
a tile of rows in which other groups begin once for each group. Each visit loads its tiles again. The
sizes of tiles are the windows in the body of the kernel. The kernel of jax, which shardopt takes, and
that of MaxText have the same grid.
"""

import base64
import functools
import math
import re
from typing import NamedTuple

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from shardopt.hlo._hlo_text import Instruction, array_shape


class GroupedWork(NamedTuple):
    """What a kernel does: flops, bytes between HBM and VMEM, and the parts that cores can share."""

    flops: float
    nbytes: float
    parallel: int


def grouped_work(line: Instruction, inputs: list[str]) -> GroupedWork | None:
    """Return the work of a grouped product, gmm or tgmm, at most; None for other kernels.

    Of n tiles of rows that are sorted into G groups, at most n + G - 1 pairs of a tile and a group
    are visited. The second table of the kernel has an entry for each.

    Args:
      line: the instruction.
      inputs: shapes of its inputs: tables of int32, then both matrices.
    """
    body = _BODY.search(line.arguments)
    if not _NAME.search(f"{line.name} {line.arguments}") or body is None:
        return None
    tables = [dims for shape in inputs if shape.startswith("s32") and (dims := array_shape(shape))]
    if len(tables) < 2:
        return None
    windows = _windows(body[1])
    if len(windows) < 3:
        return None
    visits = tables[1][0]
    rows, other = (array_shape(shape) for shape in inputs[-2:])
    out = array_shape(line.shape)
    tile_m, tile_k = windows[0]
    tile_n = windows[2][-1]
    tiles_n, tiles_k = math.ceil(out[-1] / tile_n), math.ceil(rows[1] / tile_k)
    steps = visits * tiles_n * tiles_k
    is_product = len(out) == 2  # else the gradient of the weights, [E, K, N]
    loads = steps
    if is_product and tiles_k == 1:
        loads = other[0] * tiles_n  # the weights of a group stay in their window
    numbers = steps * tile_m * tile_k + loads * math.prod(windows[1]) + math.prod(out)
    return GroupedWork(2.0 * steps * tile_m * tile_k * tile_n, 2.0 * numbers, tiles_n)


@functools.cache
def _windows(body: str) -> list[tuple[int, ...]]:
    """Return the sizes of the windows in VMEM of a kernel's body: of both inputs, then of the result."""
    context = ir.Context()
    context.allow_unregistered_dialects = True  # only types are read
    tpu.register_dialect(context)
    with context, ir.Location.unknown():
        module = ir.Module.parse(base64.b64decode(body))
        arguments = module.body.operations[0].regions[0].blocks[0].arguments
        types = [str(argument.type) for argument in arguments]
    return [
        tuple(int(size) for size in match[1].split("x"))
        for text in types
        if (match := _WINDOW.match(text))
    ]


_BODY = re.compile(r'"body":"([^"]*)"')
_NAME = re.compile(r"\bt?gmm\b")
_WINDOW = re.compile(r"memref<((?:\d+x)*\d+)x\w+, #tpu.memory_space<vmem>>")
