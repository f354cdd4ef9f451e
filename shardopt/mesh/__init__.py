"""Device meshes: axes, sizes, device order, multi-host start."""

from shardopt.mesh.axes import AXES, data_axes, make_mesh, on_mesh
from shardopt.mesh.processes import initialize

__all__ = ["AXES", "data_axes", "initialize", "make_mesh", "on_mesh"]
