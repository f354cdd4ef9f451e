"""Where an axis is bound."""

from support.ways import on_devices, ways

__all__ = ["on_devices", "ways"]
