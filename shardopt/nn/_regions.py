"""The mesh axes over which a layer splits its arrays in a region that it makes manual."""

from collections.abc import Collection

from shardopt.mesh import axes_of_role, mesh_under_trace, size_along

Axes = tuple[str, ...]
"""Names of mesh axes."""


def axes_of_roles(auto_axes: Collection[str], *roles: str) -> Axes:
    """Return the axes of these roles that are still automatic."""
    return tuple(axis for role in roles for axis in axes_of_role(role) if axis in auto_axes)


def dividing_axes(length: int, auto_axes: Collection[str], *roles: str) -> Axes:
    """Return the axes of these roles if their devices divide a length.

    Otherwise return none: each of these devices then has the whole length, and repeats its work.
    """
    axes = axes_of_roles(auto_axes, *roles)
    return () if length % size_along(mesh_under_trace().shape, axes) else axes
