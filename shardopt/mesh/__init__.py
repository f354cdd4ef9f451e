"""Device meshes: axes, sizes, device order, multi-host start."""

from shardopt.mesh.axes import AXES, data_axes, device_kind, make_mesh, on_mesh
from shardopt.mesh.processes import end_at_once, initialize, num_processes

__all__ = ["AXES", "data_axes", "device_kind", "end_at_once", "initialize", "make_mesh", "num_processes", "on_mesh"]
