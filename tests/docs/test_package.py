"""The package as a whole: every example in a docstring runs, every public name has one."""

import doctest
import importlib

import pytest
from support.paths import ROOT
from support.tiers import tiered

import shardopt

WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "shardopt").rglob("*.py")
    if ">>> " in path.read_text()
)


LONG = [
    "shardopt.adapters._lora",
    "shardopt.checkpoint._checkpoints",
    "shardopt.data._corpus",
    "shardopt.diagnose._check",
    "shardopt.diagnose._find_nan",
    "shardopt.interop._flax_nnx",
    "shardopt.local_updates._build",
    "shardopt.losses._rows",
    "shardopt.models._export",
    "shardopt.models._pretrained",
    "shardopt.models._sampling",
    "shardopt.models.decoder",
    "shardopt.models.gpt",
    "shardopt.models.moe",
    "shardopt.nn._attention",
    "shardopt.nn._balance",
    "shardopt.nn._cross_entropy",
    "shardopt.nn._quantized_einsum",
    "shardopt.nn._mixture_of_experts",
    "shardopt.optimizers._soap",
    "shardopt.parameter_server._async_local_sgd",
    "shardopt.parameter_server._async_sgd",
    "shardopt.parameter_server._optimizer",
    "shardopt.parameter_server._ray",
    "shardopt.parameter_server._views",
    "shardopt.parameter_server.rules",
    "shardopt.planning._failure_simulation",
    "shardopt.planning._search",
    "shardopt.planning._workload",
    "shardopt.reducers._blockwise",
    "shardopt.reducers._compressor",
    "shardopt.reducers._error_feedback",
    "shardopt.reducers._power_sgd",
    "shardopt.core._reducer",
    "shardopt.runtime._probe",
    "shardopt.step._average",
    "shardopt.strategies._hybrid",
    "shardopt.training._evaluation",
    "shardopt.training._fit",
    "shardopt.training._params",
    "shardopt.training._resume",
    "shardopt.transforms._average_gradients",
    "shardopt.transforms._average_params",
    "shardopt.transforms._dynamic_map",
    "shardopt.transforms._eight_bit",
    "shardopt.transforms._skip_anomalies",
    "shardopt.transforms._stochastic_round",
]
"""Their examples take 0.3 to 3 s, and tests of their own have what these show."""


@pytest.mark.parametrize("name", tiered(WITH_EXAMPLES, lambda name: name not in LONG))
def test_examples_in_docstrings_run(name):
    failed, attempted = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0
    assert attempted > 0


def test_every_public_name_has_a_docstring():
    undocumented = [
        name for name in shardopt.__all__ if not (getattr(shardopt, name).__doc__ or "").strip()
    ]
    assert not undocumented
    assert sorted(shardopt.__all__, key=lambda name: (name[0].islower(), name)) == shardopt.__all__
