"""`fit(cross_check_every=k)`: a device that computes wrong is named before its step counts, and without
one nothing changes.
"""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import faults
from support.seams import break_function
from support.tiers import tiered

import shardopt as so
from shardopt.core._errors import CORRUPTED, SilentCorruptionError
from shardopt.diagnose._verified import REDUCTION, verified_step
from shardopt.models import gpt
from shardopt.training._fit import fit

DEVICES = 3  # so that the others outvote one that is always wrong


def loss_fn(params, batch):
    """The loss of one matrix, whose local gradient has the fault of the batch."""
    weights = faults.of_gradient(params["w"], batch["fault"][0], 0, 1)
    return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def opt():
    mesh = so.make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES])
    return so.ddp(optax.sgd(0.01), mesh, loss_fn, view="unproved")


@pytest.fixture
def now(monkeypatch):
    """The fault of the runs of verified steps."""
    return faults.hit_runs(monkeypatch)


def batches():
    return itertools.islice(faults.batches(DEVICES), 8)


def with_fault(now, fault, at, *, stuck):
    """Yield the batches; the verified step of batch `at` has a fault."""
    for number, batch in enumerate(batches()):
        now.update(fault=fault if number == at else None, stuck=stuck, runs=0)
        yield batch
    now.update(fault=None)


def first_state(opt):
    return opt.init({"w": np.eye(faults.WIDTH, dtype=np.float32)})


@pytest.mark.parametrize("stuck", [False, True], ids=["transient", "stuck"])
def test_a_wrong_device_is_named_and_its_step_neither_counts_nor_is_saved(
    opt, now, tmp_path, stuck
):
    fault = faults.Fault(1, "gradient", "flip", index=9, bit=20, leaf=0)
    logged = []
    state = first_state(opt)
    data = with_fault(now, fault, 3, stuck=stuck)
    options = {"log": lambda step, metrics: logged.append(step), "log_every": 1, "progress": False}
    with (
        so.Checkpoints(tmp_path, every=2, keep=None) as checkpoints,
        pytest.raises(SilentCorruptionError) as error,
    ):
        fit(opt, state, data, num_steps=8, cross_check_every=3, checkpoints=checkpoints, **options)
    assert (
        str(error.value)
        == "fit: 1 device has wrong bits in the gradient of its own rows, at step 3 (batch 3, both"
        " counted from 0). The step is not used, and nothing was saved.\n  device 1 (cpu,"
        " process 0)\nFix: take the host out of the job, and start again; shardopt launch"
        " --processes MIN:MAX does both."
    )
    failure = error.value
    assert (failure.step, failure.devices, failure.processes, failure.exit_code) == (
        3,
        (1,),
        (0,),
        CORRUPTED,
    )
    assert now["runs"] == 5  # the step, a device apart, and three replays
    assert max(logged) <= 3
    with so.Checkpoints(tmp_path, every=2, keep=None) as checkpoints:
        assert checkpoints.steps() == [2]
        saved, _ = checkpoints.restore(opt)
    now.update(fault=None)
    clean = fit(opt, first_state(opt), batches(), num_steps=2, cross_check_every=3, progress=False)
    assert faults.same_bits(saved, clean.state)


def test_a_clean_run_is_the_run_without_verification(opt, now, tmp_path):
    """Each third step, the step before each save and the last step are verified.

    Each of them runs twice.
    """
    plain = fit(opt, first_state(opt), batches(), num_steps=8, log_every=1, progress=False)
    assert now["runs"] == 0
    with so.Checkpoints(tmp_path, every=5, keep=None) as checkpoints:
        options = {
            "cross_check_every": 3,
            "checkpoints": checkpoints,
            "log_every": 1,
            "progress": False,
        }
        verified = fit(opt, first_state(opt), batches(), num_steps=8, **options)
    assert faults.same_bits(plain.state, verified.state)
    losses = [[record["loss"] for record in result.history] for result in (plain, verified)]
    assert losses[0] == losses[1]
    assert now["runs"] == 2 * len({3, 6, 5, 8})


def test_a_state_that_changes_between_steps_is_not_saved(opt, now, tmp_path):
    """A copy of one device changes after its last verified step. The others outvote it."""
    fault = faults.Fault(2, "shard", "flip", index=3, bit=11, leaf=0)
    with so.Checkpoints(tmp_path, every=2, keep=None) as checkpoints:
        verified_steps = {"opt": opt, "every": 2, "checkpoints": checkpoints, "num_steps": 8}
        verification = so.training._verify.Verification(**verified_steps)
        state, _ = verification.take_step(first_state(opt), next(batches()), 1, 0)
        assert verification.sums_to_save(state, 2) == so.training._verify.leaf_sums(state)
        with pytest.raises(SilentCorruptionError) as error:
            verification.sums_to_save(faults.with_faulty_shard(state, fault, opt.mesh), 2)
    assert (
        str(error.value).partition("\n")[0]
        == "fit: 1 device has wrong bits in the state to save, after 2 steps. The step is not used,"
        " and nothing was saved."
    )
    assert error.value.devices == (2,)


REFUSED = {
    "one device": (
        lambda: so.ddp(optax.sgd(0.1), so.make_mesh(data=1, devices=jax.devices()[:1]), loss_fn),
        "the mesh has one device, and no other one can compute the same",
    ),
    "local_sgd": (
        lambda: so.local_sgd(
            so.ddp(optax.sgd(0.1), so.make_mesh(replica=8), loss_fn), sync_every=1
        ),
        "the replicas of local_sgd train apart",
    ),
    "offload": (
        lambda: so.fsdp(optax.adam(0.1), so.make_mesh(data=8), loss_fn, opt_state="host"),
        "the state is offloaded to the host",
    ),
    "another step": (
        lambda: so.ddp(optax.sgd(0.1), so.make_mesh(data=8), loss_fn)._replace(
            step=lambda state, batch: (state, {})
        ),
        "opt.step was replaced",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_twice_is_refused(name):
    """Before the state is initialized."""
    make, reason = REFUSED[name]
    state = so.training.DeferredInit({"w": np.eye(faults.WIDTH, dtype=np.float32)})
    with pytest.raises(ValueError, match="cross_check_every") as error:
        fit(make(), state, batches(), num_steps=8, cross_check_every=2)
    assert (
        str(error.value)
        == "fit: cross_check_every computes a step on two devices, which cannot be done.\n "
        f" {reason}\nFix: leave cross_check_every out, or use a synchronous strategy on several"
        " devices, without offload."
    )


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "fit: cross_check_every must be at least 1, got 0."),
        (2.5, TypeError, "fit: cross_check_every must be an integer, got 2.5 (float)."),
        (True, TypeError, "fit: cross_check_every must be an integer, got True (bool)."),
    ],
)
def test_steps_are_counted_in_integers(opt, value, error, message):
    with pytest.raises(error) as caught:
        fit(
            opt,
            so.training.DeferredInit({"w": np.eye(faults.WIDTH)}),
            batches(),
            num_steps=8,
            cross_check_every=value,
        )
    assert str(caught.value).partition("\n")[0] == message


def embed(outer, batch):
    return batch["x"] @ faults.of_gradient(outer["embed"], batch["fault"][0], 0, 1)


def block(weights, x):
    return x + jnp.tanh(x @ weights["w"])


def loss_of_last(outer, x, batch):
    return jnp.mean((x - batch["y"]) ** 2)


LAYERED = so.BlockModel(embed, block, loss_of_last)
SPLIT = {
    "pipeline": lambda mesh: so.hybrid(
        optax.sgd(0.1),
        mesh,
        LAYERED,
        schedule=so.schedules.one_f_one_b,
        micro_batches=2,
        view="unproved",
    ),
    "tensor": lambda mesh: so.fsdp(
        optax.sgd(0.1),
        mesh,
        LAYERED,
        rules=[("w$", P(None, "tensor"))],
        min_shard_elements=1,
        view="unproved",
    ),
}


@pytest.fixture(scope="module")
def split_run(request):
    """The mesh of two by two devices, and a function that runs two steps on it."""
    mesh = so.make_mesh(data=2, **{request.param: 2}, devices=jax.devices()[:4])
    opt = SPLIT[request.param](mesh)
    eye = np.eye(faults.WIDTH, dtype=np.float32)

    def run(**options):
        state = opt.init({"blocks": {"w": np.stack([eye, eye])}, "embed": eye})
        return fit(
            opt,
            state,
            itertools.islice(faults.batches(4), 2),
            num_steps=2,
            progress=False,
            **options,
        ).state

    return mesh, run


@pytest.mark.slow  # test_a_clean_run_is_the_run_without_verification
@pytest.mark.parametrize("split_run", tiered(SPLIT, lambda axis: axis == "tensor"), indirect=True)
def test_pipelines_and_tensor_axes_have_no_false_alarm(split_run, now):
    _, run = split_run
    assert faults.same_bits(run(cross_check_every=1), run())
    assert now["runs"] == 4


@pytest.mark.slow  # test_a_wrong_device_is_named_and_its_step_neither_counts_nor_is_saved
@pytest.mark.parametrize("split_run", tiered(SPLIT, lambda axis: axis == "tensor"), indirect=True)
def test_devices_of_a_pipeline_or_a_tensor_axis_are_suspected_together(split_run, now):
    mesh, run = split_run
    now.update(fault=faults.Fault(2, "gradient", "flip", index=9, bit=20, leaf=0))
    with pytest.raises(SilentCorruptionError) as error:
        run(cross_check_every=1)
    # they have the rows of the fault
    suspects = [device.id for device in mesh.devices.reshape(2, 2)[1]]
    assert str(error.value) == (
        "fit: one of 2 devices has wrong bits in the gradient of its own rows, at step 0 (batch 0,"
        " both counted from 0); the others cannot tell which. The step is not used, and nothing was"
        " saved.\n"
        + "".join(f"  device {number} (cpu, process 0)\n" for number in suspects)
        + "Fix: take the host out of the job, and start again; shardopt launch --processes MIN:MAX"
        " does both."
    )


@pytest.mark.parametrize(
    ("options", "together"),
    [({"view": "global"}, ("data",)), ({"view": "unproved"}, ())],
    ids=["global", "per_device"],
)
def test_in_the_global_view_all_devices_contribute_to_a_gradient(mesh_of, options, together):
    """There a device has no gradient of its own rows, so a wrong sum says nothing of the devices
    that hold it.
    """
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), loss_fn, min_shard_elements=1, **options)
    verified, _ = verified_step(opt, first_state(opt), next(faults.batches(4)))
    assert {column.together for column in verified.columns if column.phase == REDUCTION} == {
        together
    }


@pytest.mark.slow
def test_a_thousand_random_faults_are_found_and_named(monkeypatch):
    """The faults are flipped bits, stuck bits and wrong tiles, at each site of a step of each
    strategy.

    The benchmark draws 10,000.
    """
    now = faults.install(monkeypatch, break_function)
    rng = np.random.default_rng(2026)
    counts = collections.Counter()
    for name in faults.strategies(jax.devices()):
        rig = faults.Rig(name, now, jax.devices())
        for number in range(200):
            fault = faults.draw(rng, 4)
            window = rig.window(1, number, fault, stuck=fault.kind == "stuck")
            counts["changed"] += window.changed
            counts["found"] += window.changed and window.error is not None
            counts["named"] += window.changed and window.names(rig.mesh.devices.flat[fault.device])
    assert counts["changed"] > 700
    assert counts["found"] >= 0.999 * counts["changed"], counts
    assert counts["named"] >= 0.99 * counts["changed"], counts


@pytest.mark.slow
def test_faults_in_whole_matrices_and_experts_are_found(monkeypatch):
    """Their devices exchange matrices and tokens within a step.

    The device is named, or one of two suspects.
    """
    now = faults.install(monkeypatch, break_function)
    rng = np.random.default_rng(2027)
    for name in faults.further_strategies(jax.devices()):
        rig = faults.Rig(name, now, jax.devices())
        changed = 0
        for number in range(25):
            fault = faults.draw(rng, 4)
            window = rig.window(1, number, fault, stuck=fault.kind == "stuck")
            device = rig.mesh.devices.flat[fault.device]
            if window.changed:
                changed += 1
                assert window.suspects(device), (name, fault, window.error)
                assert window.names(device) or (
                    name.startswith("experts") and len(window.error.devices) == 2
                )
        assert changed > 12


@pytest.mark.slow  # test_a_clean_run_is_the_run_without_verification
def test_weights_that_travel_in_8_bits_have_no_false_alarm():
    mesh = so.make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES])
    config = gpt.config(
        dim=12, num_layers=2, num_heads=2, max_length=8, vocab_size=32, precision="int8"
    )
    opt = so.fsdp(optax.sgd(0.1, momentum=0.9), mesh, gpt.model(config), min_shard_elements=1)
    tokens = np.random.default_rng(0).integers(0, 32, (3, 2 * DEVICES, 9)).astype(np.int32)

    def run(**options):
        state = opt.init(gpt.init(config, jax.random.key(0)))
        return fit(
            opt,
            state,
            [{"tokens": rows} for rows in tokens],
            num_steps=3,
            progress=False,
            **options,
        ).state

    assert faults.same_bits(run(cross_check_every=1), run())
