"""Synchronous strategies that equal single-device training, each with its own placement.

Each has a module of its own: `ddp`, `zero` and `fsdp` load no pipeline, which `hybrid` needs.
"""
