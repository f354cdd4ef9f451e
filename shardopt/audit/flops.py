"""Flops of the inner products of a compiled program, loops multiplied in."""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardopt.audit.hlo_text import Instruction, Module, arrays, attributes, operands, parse
from shardopt.audit.walk import HasTicks, callees, check_schedule, times_taken, trip_count


class _Flops(NamedTuple):
    """Flops of a computation, by whether they stand in a branch that is directly in it."""

    always: float = 0.0
    branches: float = 0.0

    @property
    def total(self) -> float:
        return self.always + self.branches


def inner_product_flops(program: Any, *, schedule: HasTicks | None = None) -> float | None:
    """Return the multiplications and additions of one device in one execution of a program.

    Counted are `dot`, `convolution` (which XLA:TPU makes of inner products; positions that only padding or dilation
    fills are left out), and the matrix products of cuBLAS. Loops count as often as they turn, of a branch the dearest.
    `compiled.cost_analysis()` counts each loop once.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.
      schedule: of the pipeline that the program is, such as `opt.config.schedule`: passes are branches in a loop over its
        ticks, and count once a micro-batch and chunk. Without it they count at every tick.

    Returns:
      The flops; None if a loop with inner products does not tell how often it turns.

    Raises:
      ValueError: if no loop of the program turns as often as the schedule has ticks, or the text is not that of an HLO
        module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def five(x):
      ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]
      >>> inner_product_flops(jax.jit(five).lower(jnp.ones((64, 64))).compile()) == 5 * 2 * 64**3
      True
    """
    module = parse(program if isinstance(program, str) else program.as_text())
    check_schedule("inner_product_flops", module, schedule)
    # the outermost loop over the ticks is the schedule's: what is in it is counted without
    calls = functools.cache(lambda name, inside: _computation(module, name, calls, None if inside else schedule))
    total = calls(module.entry, False).total
    return None if math.isinf(total) else total


def _computation(module: Module, name: str, calls: Any, schedule: HasTicks | None) -> _Flops:
    shapes = {line.name: line.shape for line in module.computations.get(name, ())}
    found = [_instruction(module, name, line, shapes, calls, schedule) for line in module.computations.get(name, ())]
    return _sum(found)


def _instruction(
    module: Module, name: str, line: Instruction, shapes: dict[str, str], calls: Any, schedule: HasTicks | None
) -> _Flops:
    if line.opcode == "dot":
        return _Flops(_dot(line, shapes))
    if line.opcode == "convolution":
        return _Flops(_convolution(line, shapes))
    if line.opcode == "custom-call" and "__cublas$" in line.rest:
        return _Flops(_cublas(line, shapes))
    turns = trip_count(module, name, line) if line.opcode == "while" else None
    inside = schedule is None or turns == schedule.num_ticks
    inner = [calls(callee, inside) for callee in callees(line)]
    if line.opcode == "conditional":
        return _Flops(branches=max((one.total for one in inner), default=0.0))
    body = _sum(inner)
    if line.opcode != "while" or body.total == 0.0:
        return body
    if turns is None:
        return _Flops(math.inf)
    return _Flops(body.always * turns + body.branches * times_taken(turns, schedule))


def _sum(found: Iterable[_Flops]) -> _Flops:
    return _Flops(*(math.fsum(column) for column in zip((0.0, 0.0), *found, strict=True)))


def _dot(line: Instruction, shapes: dict[str, str]) -> float:
    lhs = _dims(shapes[operands(line)[0]])
    contracted = _numbers(attributes(line).get("lhs_contracting_dims", ""))
    return 2.0 * math.prod(_dims(line.shape)) * math.prod(lhs[dim] for dim in contracted)


def _cublas(line: Instruction, shapes: dict[str, str]) -> float:
    lhs = _dims(shapes[operands(line)[0]])
    found = re.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]', line.rest)
    contracted = _numbers(found[1] if found else str(len(lhs) - 1))
    return 2.0 * math.prod(_dims(arrays(line.shape)[0])) * math.prod(lhs[dim] for dim in contracted)


def _convolution(line: Instruction, shapes: dict[str, str]) -> float:
    """2 x batch x output features x input features x the (output, kernel) positions that meet an input."""
    words = attributes(line)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", words["dim_labels"])
    assert labels is not None
    lhs, kernel = (_dims(shapes[name]) for name in operands(line)[:2])
    out, window = _dims(line.shape), words.get("window", "{}").strip("{}")
    fields = dict(part.split("=") for part in window.split()) if window else {}
    total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * kernel[labels[2].index("i")]
    for axis in range(len(labels[1]) - 2):
        here = str(axis)
        total *= _meetings(
            lhs[labels[1].index(here)],
            kernel[labels[2].index(here)],
            out[labels[3].index(here)],
            {key: value.split("x")[axis] for key, value in fields.items()},
        )
    return total


def _meetings(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Return how many pairs of output and kernel positions read an element of the input, along one axis."""
    stride, dilation, holes = (int(window.get(key, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    if kernel == 1 and stride == 1 and holes == 1 and low == 0:
        return out
    reach = range((size - 1) * holes + 1)
    at = (o * stride + k * dilation - low for o in range(out) for k in range(kernel))
    return sum(position in reach and position % holes == 0 for position in at)


def _dims(shape: str) -> list[int]:
    return _numbers(arrays(shape)[0].partition("[")[2].rstrip("]"))


def _numbers(text: str) -> list[int]:
    return [int(one.strip(' "').replace("<=", "")) for one in text.strip("{}").split(",") if one.strip(' "')]
