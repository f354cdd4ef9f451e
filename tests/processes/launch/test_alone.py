"""Processes that do not know of each other: refused where a launcher states several, and jax has
one.
"""

import functools
import json
import os
import re
import subprocess
import sys
import types
import warnings

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.paths import ROOT
from support.processes import free_port

import shardopt as so
from shardopt.runtime import _connection, _processes

pytestmark = pytest.mark.fast

A_PLACE = re.compile(
    "JAX_(COORDINATOR|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE)|SHARDOPT_|WORLD_SIZE|RANK|LOCAL_|MASTER_"
    "|TORCHELASTIC_|CUDA_VISIBLE|OMPI_|MV2_|JSM_|PMI_|SLURM_|RAY_|JOB_COMPLETION|TPU_|MEGASCALE|CLOUD_"
)
"""The names of variables that state a place."""

TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
JOB = {"SLURM_JOB_ID": "71"}
SCRIPT = JOB | {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_SUBMIT_DIR": "/home/user",
}
SRUN = JOB | {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_SUBMIT_DIR": "/home/user",
}
SEVERAL = {
    "torchrun": TORCHRUN,
    "a world without ranks": {"WORLD_SIZE": "8"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "3", "PMI_RANK": "2"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "5"},
    "srun": SRUN,
    "srun with PMI": SRUN | {"PMI_SIZE": "4", "PMI_RANK": "0"},
    "an old SLURM": JOB | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
    "the first task of an old SLURM": JOB | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "a container of a task": {"SLURM_NTASKS": "2"},
    "shardopt launch": {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    },
    "a world of one, in srun": SRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    "PMI of one, in srun": SRUN | {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "mpirun with one, in srun": SRUN | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "a world of one, in mpirun": {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
    },
    "mpirun by srun": SRUN | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"},
}
ONE = {
    "nothing": {},
    "torchrun with one": TORCHRUN | {"WORLD_SIZE": "1"},
    "torchrun with one in each task": (
        SRUN | TORCHRUN | {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    ),
    "srun with one task": SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "the shell of salloc": JOB | {"SLURM_NTASKS": "4"},
    "a step for the shell of salloc": SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    "a batch script": SCRIPT,
    "a batch script that is started by srun": SCRIPT | {"SLURM_STEP_NUM_TASKS": "1"},
    "mpirun with one": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "values that are no numbers": {"WORLD_SIZE": "auto", "PMI_SIZE": "", "SLURM_NTASKS": "x"},
    "a batch script that has a step": SCRIPT | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
    "a process of Ray that srun's Ray started": SRUN | {"RAY_RAYLET_PID": str(os.getppid())},
}


@pytest.fixture
def environment(monkeypatch):
    """Set variables, after every variable that states a place was removed."""
    for name in filter(A_PLACE.match, [*os.environ]):
        monkeypatch.delenv(name)

    def update(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield update
    # `initialize` notes that the place is taken
    os.environ.pop("SHARDOPT_SETTLED", None)


def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()


def ddp(mesh):
    return so.ddp(optax.sgd(0.1), mesh, loss)


def own_mesh():
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))


@functools.cache
def strategy_of_earlier():
    """Return a strategy that was made before the environment stated several processes."""
    return ddp(own_mesh())


def fit():
    opt = strategy_of_earlier()
    state = opt.init({"w": np.ones(2, np.float32)})
    batch = np.ones((4, 2), np.float32)
    return so.fit(opt, state, [batch], num_steps=1, progress=False)


DOORS = {
    "make_mesh": lambda: so.make_mesh(),
    "make_mesh, given devices": lambda: so.make_mesh(devices=jax.devices()[:2]),
    "ddp": lambda: ddp(own_mesh()),
    "zero": lambda: so.zero(optax.sgd(0.1), own_mesh(), loss),
    "fsdp": lambda: so.fsdp(optax.sgd(0.1), own_mesh(), loss),
    "ddp, names of axes": lambda: ddp(
        so.Axes(
            jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)),
            data="dp",
        )
    ),
    "fit": fit,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("launcher", ["torchrun", "Open MPI", "srun"])
def test_a_process_that_did_not_join_is_refused(environment, door, launcher):
    strategy_of_earlier()
    environment(SEVERAL[launcher])
    caller = door.partition(",")[0]
    with pytest.raises(
        ValueError, match=rf"^{caller}: .* processes, and jax knows of this one alone"
    ) as refusal:
        DOORS[door]()
    assert "Fix: call so.initialize() in each process" in str(refusal.value)
    assert "so.initialize(alone=True)" in str(refusal.value)


@pytest.mark.parametrize("launcher", SEVERAL)
def test_every_launcher_of_several_processes_is_noticed(environment, launcher):
    environment(SEVERAL[launcher])
    with pytest.raises(ValueError, match="jax knows of this one alone"):
        so.make_mesh()


@pytest.mark.parametrize("situation", ONE)
def test_a_process_without_others_is_not_refused(environment, situation):
    environment(ONE[situation])
    assert so.make_mesh().size == len(jax.devices())
    ddp(own_mesh())


@pytest.mark.parametrize("situation", [name for name in ONE if "SLURM" not in name])
def test_initialize_does_nothing_in_a_process_without_others(environment, situation, monkeypatch):
    environment(ONE[situation])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("joins"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        so.initialize()


@pytest.mark.parametrize("situation", ["the shell of salloc", "a batch script"])
def test_initialize_warns_where_srun_was_forgotten(environment, situation):
    environment(ONE[situation])
    with pytest.warns(UserWarning, match=r"SLURM has 4 tasks .*\nFix: start the program by srun"):
        so.initialize()


@pytest.mark.parametrize("launcher", SEVERAL)
def test_alone_says_that_one_process_is_meant(environment, launcher, monkeypatch):
    strategy_of_earlier()
    environment(SEVERAL[launcher])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("joins"))
    so.initialize(alone=True)
    for enter in DOORS.values():
        enter()
    # a process that a launcher starts from here has a place of its own
    environment(SEVERAL["shardopt launch"] | {"JAX_NUM_PROCESSES": "16"})
    with pytest.raises(ValueError, match="states 16 processes"):
        so.make_mesh()


def test_alone_excludes_a_place():
    with pytest.raises(ValueError, match=r"^initialize: alone=True means no other process"):
        so.initialize("localhost:1", 2, 0, alone=True)
    with pytest.raises(TypeError, match=r"^initialize: alone must be True or False, got 'yes'"):
        so.initialize(alone="yes")


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "MPICH"])
def test_a_helper_of_a_process_that_joined_is_no_process_of_the_job(environment, launcher):
    """Such as a worker of pytest or of a loader, which inherits the variables."""
    environment(SEVERAL[launcher])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        so.make_mesh()
    so.make_mesh()  # the environment that a helper inherits


@pytest.fixture
def joined(monkeypatch):
    """Record what `initialize` asks of jax."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *place, **options: calls.append((place, options))
    )
    monkeypatch.setattr(_processes, "_wait_for_address", lambda _: None)
    return calls


DEACTIVATED = {"cluster_detection_method": "deactivate"}
PLACES = {
    "a GPU for each": (
        TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"},
        ("127.0.0.1:29500", 2, 1),
        DEACTIVATED | {"local_device_ids": [1]},
    ),
    "a machine for each": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "1"},
        ("127.0.0.1:29500", 2, 0),
        DEACTIVATED,
    ),
    "a GPU that the launcher chose": (
        TORCHRUN | {"CUDA_VISIBLE_DEVICES": "3"},
        ("127.0.0.1:29500", 2, 0),
        DEACTIVATED,
    ),
    "no local rank": (
        {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "master-0", "MASTER_PORT": "23456"},
        ("master-0:23456", 4, 3),
        DEACTIVATED,
    ),
    "the agent listens": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"},
        ("127.0.0.1:29501", 2, 0),
        DEACTIVATED,
    ),
    "IPv6": (
        TORCHRUN | {"MASTER_ADDR": "fd00::7", "LOCAL_WORLD_SIZE": "1"},
        ("[fd00::7]:29500", 2, 0),
        DEACTIVATED,
    ),
    "torchrun in a task": (
        SRUN | TORCHRUN | {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_WORLD_SIZE": "1"},
        ("127.0.0.1:29500", 8, 5),
        DEACTIVATED,
    ),
    "srun": (SRUN, ("node1:61511", 4, 0), {}),
    "srun with a world of torch": (SRUN | {"WORLD_SIZE": "4"}, ("node1:61511", 4, 0), {}),
    "srun with PMI": (SEVERAL["srun with PMI"], ("node1:61511", 4, 0), {}),
    "Open MPI 4": (
        SEVERAL["Open MPI"] | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"},
        (None, None, None),
        {},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_initialize_takes_the_place_that_the_launcher_states(environment, joined, case):
    variables, place, options = PLACES[case]
    environment(variables)
    so.initialize()
    assert joined == [(place, options)]


INCOMPLETE = {
    "no rank": ({"WORLD_SIZE": "8"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
    "no port": (
        {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"},
        "MASTER_PORT is not set",
    ),
    "no list of nodes": (SEVERAL["an old SLURM"], "SLURM_STEP_NODELIST, SLURM_LOCALID is not set"),
    "MPI that jax cannot read": (SEVERAL["MPICH"], "pip install mpi4py"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_initialize_never_returns_in_silence_from_one_of_several(environment, joined, case):
    variables, text = INCOMPLETE[case]
    environment(variables)
    with pytest.raises(ValueError, match=r"^initialize: ") as refusal:
        so.initialize()
    assert text in str(refusal.value)
    assert "Fix: " in str(refusal.value)
    assert not joined


@pytest.mark.parametrize("launcher", ["MPICH", "MVAPICH", "jsrun"])
def test_mpi_joins_by_mpi4py(environment, joined, launcher, monkeypatch):
    environment(SEVERAL[launcher])
    monkeypatch.setattr(_connection.importlib.util, "find_spec", lambda _: object())
    so.initialize()
    assert joined == [((None, None, None), {"cluster_detection_method": "mpi4py"})]


class _Context:
    def __init__(self, count, rank):
        self._count = count
        self._rank = rank

    def get_world_size(self):
        return self._count

    def get_world_rank(self):
        return self._rank


@pytest.fixture
def ray_worker(environment, monkeypatch):
    """Make this process look like a process of Ray, whose `ray.train.get_context` is given."""

    def enter(get_context):
        environment(SRUN | {"RAY_RAYLET_PID": str(os.getppid())})
        train = types.ModuleType("ray.train")
        train.get_context = get_context
        monkeypatch.setitem(sys.modules, "ray.train", train)
        return train

    return enter


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "get_context",
    [
        lambda: _raise(RuntimeError("outside of a Ray Train training function")),
        lambda: _raise(DeprecationWarning("in a function passed to Ray Tune")),
        lambda: _Context(1, 0),
        lambda: _Context(None, None),
    ],
    ids=["task", "trial of Tune", "one worker", "no session"],
)
def test_a_process_of_ray_without_others_is_alone(ray_worker, joined, get_context):
    ray_worker(get_context)
    so.initialize()
    assert so.make_mesh().size == len(jax.devices())
    assert not joined


def test_a_worker_of_ray_train_is_one_of_several(ray_worker, joined, monkeypatch):
    train = ray_worker(lambda: _Context(3, 2))
    with pytest.raises(ValueError, match="Ray Train's world size of 3 states 3 processes"):
        so.make_mesh()
    collective = types.ModuleType("ray.train.collective")
    collective.broadcast_from_rank_zero = lambda address: address or "10.0.0.1:77"
    train.collective = collective
    monkeypatch.setitem(sys.modules, "ray.train.collective", collective)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    so.initialize()
    assert joined == [(("10.0.0.1:77", 3, 2), DEACTIVATED)]


def test_initialize_accepts_a_worker_that_ray_has_joined(ray_worker, joined, monkeypatch):
    """JaxTrainer joins workers itself on GPU and TPU."""
    ray_worker(lambda: _Context(3, 2))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    so.initialize()
    so.make_mesh()
    assert not joined


@pytest.mark.parametrize("launcher", ["torchrun", "shardopt launch", "MPICH"])
def test_processes_that_the_backend_knows_are_not_refused(environment, launcher, monkeypatch):
    """The backend of a slice of TPUs knows all processes."""
    environment(SEVERAL[launcher])
    jax.devices()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    ddp(own_mesh())


PROGRAM = """
import json, sys
import jax, numpy as np, optax
import shardopt as so
jax.config.update("jax_num_cpu_devices", 2)
{call}
opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), lambda p, x: ((x @ p["w"]) ** 2).mean())
own_rows = np.full((4, 4), 1.0 + jax.process_index(), np.float32)
state, metrics = opt.step(opt.init({{"w": np.ones((4, 4), np.float32)}}), own_rows)
print(json.dumps([jax.process_index(), jax.process_count(), float(metrics["loss"])]))
"""


def start(call, variables):
    environment = {name: text for name, text in os.environ.items() if not A_PLACE.match(name)}
    environment |= {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(call=call)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.default
def test_two_processes_of_torchrun_train_together():
    variables = TORCHRUN | {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "localhost"}
    processes = [
        start("so.initialize()", variables | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    reports = [json.loads(out.strip().split("\n")[-1]) for out, _ in outputs]
    assert reports == [[0, 2, 40.0], [1, 2, 40.0]]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun", "Open MPI", "shardopt launch"])
def test_real_processes_that_did_not_join_end_with_the_remedy(launcher):
    processes = [start(call, SEVERAL[launcher]) for call in ("pass", "so.initialize(alone=True)")]
    (_, error), (output, _) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [1, 0]
    assert re.search(r"ValueError: make_mesh: .*\nFix: call so.initialize\(\)", error)
    assert json.loads(output) == [0, 1, 16.0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_refusal_comes_before_a_backend_starts(launcher):
    call = """
from jax._src import xla_bridge
try:
    so.make_mesh()
except ValueError:
    print(json.dumps(xla_bridge.backends_are_initialized()))
    sys.exit()
"""
    process = start(call, SEVERAL[launcher])
    output, error = process.communicate(timeout=300)
    assert output == "false\n", error
