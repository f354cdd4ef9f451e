"""Trackers get every metric under its step, and a resumed run continues the tracker's run.

Fakes have the trackers' API.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

import shardopt as so
from shardopt.training._fit import fit

pytestmark = pytest.mark.fast


class FakeRun:
    """A run of wandb or trackio: `log` appends, `finish` ends it, and nothing is logged after that."""

    def __init__(self, name):
        self.name, self.lines, self.is_open, self.starts, self.step_metric = name, [], True, 1, None

    def log(self, metrics, step=None):
        assert self.is_open
        self.lines.append((metrics["step"] if step is None else step, metrics))

    def define_metric(self, name, step_metric=None):
        assert name == "*"
        self.step_metric = step_metric

    def finish(self):
        self.is_open = False


class FakeRuns:
    """`init` of wandb and trackio: with `resume="allow"` a run of the same name is continued."""

    def __init__(self, key):
        self.key, self.runs = key, {}

    def init(self, *, project, name=None, id=None, resume=None, **options):
        assert (project, resume, options) == ("p", "allow", {"group": "g"})
        name = id if self.key == "id" else name
        if name in self.runs:
            self.runs[name].is_open, self.runs[name].starts = True, self.runs[name].starts + 1
        return self.runs.setdefault(name, FakeRun(name))


class FakeMlflow:
    """The tracking store, with the functions of `mlflow` and `MlflowClient` that are used."""

    def __init__(self):
        self.experiments, self.runs = {}, {}

    def MlflowClient(self):  # noqa: N802
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = SimpleNamespace(experiment_id="7")
        return "7"

    def search_runs(self, experiment_ids, filter_string="", max_results=1000):
        assert (experiment_ids, max_results) == (["7"], 1)
        return [
            run
            for run in self.runs.values()
            if filter_string == f"attributes.run_name = '{run.name}'"
        ]

    def create_run(self, experiment_id, run_name=None):
        assert experiment_id == "7"
        run = FakeRun(run_name)
        run.info = SimpleNamespace(run_id="r1")
        return self.runs.setdefault("r1", run)

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None):
        self.runs[run_id].lines.append((step, metrics))

    def set_terminated(self, run_id):
        self.runs[run_id].is_open = False


def install(monkeypatch, name, fake):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for attribute in dir(fake):
        if not attribute.startswith("_"):
            setattr(module, attribute, getattr(fake, attribute))
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_resumed_run_continues_its_tracker_run(
    name, monkeypatch, opt, new_state, batches, memory
):
    fake = FakeMlflow() if name == "mlflow" else FakeRuns("id" if name == "wandb" else "name")
    install(monkeypatch, name, fake)
    options = {} if name == "mlflow" else {"group": "g"}
    disk = {}
    for num_steps in (4, 6):
        log = getattr(so.training, name)("p", "r", **options)
        assert len(fake.runs) == (num_steps == 6)  # nothing starts before the first metric
        checkpoints = memory(2, disk=disk, resume=True)
        state = new_state()
        fit(
            opt,
            state,
            batches,
            num_steps=num_steps,
            checkpoints=checkpoints,
            log=log,
            log_every=1,
            progress=False,
        )
    (run,) = fake.runs.values()
    assert run.name == "r"
    assert not run.is_open
    assert [step for step, _ in run.lines] == [1, 2, 3, 4, 5, 6]
    assert all(metrics["loss"] > 0 for _, metrics in run.lines)
    if name == "wandb":
        assert run.step_metric == "step"
    if name != "mlflow":
        assert run.starts == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("shardopt.core._extras.is_installed", lambda module: False)
    with pytest.raises(ModuleNotFoundError) as error:
        getattr(so.training, name)("p", "r")
    assert (
        str(error.value)
        == f"{name}: {name} is needed, which is not installed.\nFix: pip install 'shardopt[{name}]'"
    )
