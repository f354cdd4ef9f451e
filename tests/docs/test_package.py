"""The package as a whole: importing is cheap and touches nothing, every example in a docstring runs."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
from support.tiers import tiered

import shardopt

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(shardopt.__path__, "shardopt.")
    if not module.name.endswith("__main__")
)


LONG = ("shardopt.nn._mixture_of_experts", "shardopt.parameter_server._async_local_sgd", "shardopt.planning._search")


@pytest.mark.parametrize("name", tiered(MODULES, lambda name: name not in LONG))
def test_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_importing_starts_no_backend_and_sets_no_flag():
    code = (
        "import os, sys; before = dict(os.environ); import jax; import jax.numpy; flags = dict(jax.config.values);"
        "import shardopt, shardopt.cli, shardopt.models.gpt, shardopt.data;"
        "assert not jax._src.xla_bridge._backends, 'a backend was started';"
        "assert dict(os.environ) == before, 'the environment was changed';"
        "assert dict(jax.config.values) == flags, 'a flag was set';"
        "heavy = [m for m in ('orbax', 'grain', 'matplotlib', 'flax', 'tensorboardX', 'scipy.sparse') if m in sys.modules];"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_has_a_docstring():
    undocumented = [name for name in shardopt.__all__ if not (getattr(shardopt, name).__doc__ or "").strip()]
    assert not undocumented
    assert sorted(shardopt.__all__, key=lambda name: (name[0].islower(), name)) == shardopt.__all__
