"""Adapters: small trained matrices on top of frozen weights."""

from shardopt.adapters._lora import Lora, lora

__all__ = ["Lora", "lora"]
