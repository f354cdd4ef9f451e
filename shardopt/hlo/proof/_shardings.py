"""The pieces that each device holds by a sharding."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardopt.core import value_error
from shardopt.hlo.proof._interpret_shards import tile_of_device
from shardopt.hlo.proof._value import DerivedValue, Dim, Factor, Hidden, Positions, merged_hidden

AnyMesh = Mesh | AbstractMesh | Mapping[str, int] | None
"""A mesh, or mesh axis -> size; None if it is unknown."""


def known_mesh(mesh: AnyMesh, shardings: Iterable[object]) -> AnyMesh:
    """Return a mesh, by default that of the first `NamedSharding`."""
    if mesh is not None:
        return mesh
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def mesh_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Return mesh axis -> size; none if the mesh is unknown."""
    return dict(mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh or {})


def sharding_text(sharding: Sharding | str, rank: int, devices: int) -> str:
    """Return a sharding as HLO text."""
    if devices == 1:
        return "{replicated}"
    return sharding if isinstance(sharding, str) else str(sharding._to_xla_hlo_sharding(rank))  # pyright: ignore


def sharded(sharding: Sharding | str, shape: tuple[int, ...], devices: int) -> DerivedValue:
    """Return the value of an argument or result with a local shape and a sharding."""
    text = sharding_text(sharding, len(shape), devices)
    try:
        *places, tiles = tile_of_device(text, len(shape), devices)
    except ValueError:
        problem = f"cannot read the sharding {text!r} of a program for {devices} devices."
        fix = "pass text such as {devices=[8,1]<=[8]} or {replicated}."
        raise value_error(problem, fix=fix) from None
    dims: list[Dim] = []
    hidden = []
    for dim, (size, count) in enumerate(zip(shape, map(int, tiles), strict=True)):
        at = np.array([place[dim] for place in places])
        if size == 1:
            dims.append(())
            if count > 1:
                hidden.append(
                    Hidden("dim", Positions.of(at), count, -1, math.prod(shape[dim + 1 :]))
                )
        else:
            dims.append((Factor(size, size * count, Positions.of(at * size)),))
    return DerivedValue(shape, tuple(dims), merged_hidden([tuple(hidden)]))
