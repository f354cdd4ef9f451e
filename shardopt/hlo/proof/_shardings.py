"""What a sharding says that each device holds."""

import math
import re

import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardopt.core._errors import format_error
from shardopt.hlo.proof._lines import numbers
from shardopt.hlo.proof._value import Dim, Factor, Hidden, Positions, Value, merged_hidden


def sharded(sharding: Sharding | str, shape: tuple[int, ...], devices: int) -> Value:
    """Return the value of an argument or result with a local shape and a sharding."""
    tiles, assignment = _tiles(sharding, len(shape), devices)
    coordinates = np.zeros((len(tiles), devices), np.int64)
    grid = assignment.reshape(*tiles, -1)
    for index in np.ndindex(*tiles):
        for device in grid[index].ravel():
            coordinates[:, device] = index
    dims: list[Dim] = []
    hidden = []
    for dim, (size, count, at) in enumerate(zip(shape, tiles, coordinates, strict=True)):
        if size == 1:
            dims.append(())
            if count > 1:
                hidden.append(Hidden("dim", Positions.of(at), count, -1, math.prod(shape[dim + 1 :])))
        else:
            dims.append((Factor(size, size * count, Positions.of(at * size)),))
    return Value(shape, tuple(dims), merged_hidden([tuple(hidden)]))


def _tiles(sharding: Sharding | str, ndim: int, devices: int) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the number of pieces by dim, and the devices in the order of the pieces."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.size == devices:
        sizes = tuple(sharding.mesh.shape.values())
        ids = np.arange(devices).reshape(sizes)
        names = list(sharding.mesh.axis_names)
        entries = [*sharding.spec, *[None] * ndim][:ndim]
        axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
        used = [names.index(axis) for entry in axes for axis in entry]
        other = [i for i in range(len(names)) if i not in used]
        tiles = tuple(math.prod(sharding.mesh.shape[axis] for axis in entry) for entry in axes)
        return tiles, ids.transpose(used + other).reshape(-1)
    if isinstance(sharding, Sharding):
        if devices == 1 or sharding.is_fully_replicated:
            return (1,) * ndim, np.arange(devices)
        sharding = str(sharding._to_xla_hlo_sharding(ndim))  # pyright: ignore
    text = sharding.strip()
    if ("replicated}" in text and "devices" not in text) or ("maximal" in text and devices == 1):
        return (1,) * ndim, np.arange(devices)
    match = _TILED.search(text)
    if not match:
        problem = f"cannot read the sharding {text!r}."
        raise ValueError(format_error("prove", problem, fix="pass text such as {devices=[8,1]<=[8]} or {replicated}."))
    tiles = numbers(match["tiles"])
    if match["dims"]:
        ids = np.arange(math.prod(numbers(match["dims"]))).reshape(numbers(match["dims"]))
        if match["order"]:
            ids = ids.transpose(numbers(match["order"]))
    else:
        ids = np.array(numbers(match["list"]))
    return tiles[:ndim], ids.reshape(-1)


_TILED = re.compile(
    r"devices=\[(?P<tiles>[\d,]*)\](?:<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<list>[\d,]+))"
)
