"""Fixtures that bind an axis."""

from support.ways import on_devices, ways

__all__ = ["on_devices", "ways"]
