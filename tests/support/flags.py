"""Flags of XLA that take two thirds off the time to compile: most programs of tests run once.

Collectives, shardings and donated buffers are decided before code generation, and stay as users
have them. This module imports no jax, so that the flags are set before it starts.
"""

import importlib.metadata

QUICK_TO_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # a worker has one core
]
OPTIMISED = {"xla_backend_optimization_level": 3}
"""Options of `jax.jit` for a program whose code is that of users."""

if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
    OPTIMISED["xla_cpu_use_fusion_emitters"] = True
