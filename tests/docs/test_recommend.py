"""The recommender of examples/ learns what is to be learnt, and pushes few bytes."""

import importlib.util

import numpy as np
import pytest
from support.paths import ROOT

PATH = ROOT / "examples" / "recommend.py"


@pytest.fixture(scope="module")
def recommend():
    spec = importlib.util.spec_from_file_location("recommend", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_learns_from_few_bytes(recommend):
    world = recommend.World(users=100, items=5000, dim=16)
    result, share = recommend.train(world, workers=2, num_updates=300, max_staleness=2)
    assert max(result.metrics["staleness"]) <= 2
    first, last = result.metrics["evaluations"][0], result.metrics["evaluations"][-1]
    assert last["step"] == 300
    assert last["val_loss"] < min(0.6, first["val_loss"])  # log 2 = 0.693 knows nothing
    assert last["accuracy"] > 0.65
    assert share < 0.1


def test_its_data_are_the_same_again_and_differ_between_workers(recommend):
    world = recommend.World(users=20, items=100, dim=4)
    one, same, other = (next(recommend.clicks(world, seed)) for seed in ([1, 0], [1, 0], [1, 1]))
    np.testing.assert_array_equal(one["item"], same["item"])
    assert (one["item"] != other["item"]).any()
    assert np.bincount(one["item"]).argmax() == 0  # the first is met most often
