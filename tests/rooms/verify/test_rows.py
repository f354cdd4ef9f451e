"""`shardopt verify` turns red: each comparison notices a fault that is put in, and names the device
that has it.
"""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardopt.step import _gradients as gradients
from shardopt.step import _same_bits as same_bits
from shardopt.verify import Measurement, NotRun, Row, _devices, all_rows, run_rows
from shardopt.verify._devices import (
    COLLECTIVES,
    SCATTERED,
    measure_collective,
    measure_same_bits,
    same_bits_rows,
)
from shardopt.verify._kernels import Kernel, measure_kernel
from shardopt.verify._rows import mesh_sizes
from shardopt.verify._training import (
    FIRST,
    SECOND,
    Training,
    device_differences,
    measure_bits,
    measure_training,
    training_rows,
)

PAIR = jax.devices()[:2]


def result_of(measure, devices=PAIR):
    """Run one row, and return its result and the exit code."""
    report = run_rows([Row("group", "name", measure)], devices, seconds=600)
    return report.results[0], report.exit_code


@pytest.mark.fast
def test_a_lost_sum_fails_the_row_of_its_strategy(monkeypatch):
    rows = training_rows((Training("ddp", {}, model="odd sizes"),))
    assert run_rows(rows, PAIR, seconds=600).exit_code == 0
    monkeypatch.setattr(gradients, "all_reduce_grads", lambda grads, *args, **kwargs: grads)
    report = run_rows(rows, PAIR, seconds=600)
    (result,) = report.results
    assert (report.exit_code, result.status) == (1, "failed")
    assert result.numbers["update_difference"] > 100 * result.numbers["tolerance"]
    assert result.detail.endswith(", on device 0 (cpu, process 0)")
    assert result.numbers["wrong_program"].startswith("ddp: XLA compiled a wrong program.\n")


@pytest.mark.parametrize(
    "training",
    [
        Training("zero1", {}, "lamb", "odd sizes"),
        pytest.param(Training("fsdp", {"expert": 2}, "adamw", "moe"), marks=pytest.mark.slow),
        pytest.param(Training("fsdp", {"context": 2}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_row_passes_and_has_room_for_other_compilers(training):
    measurement = measure_training(training, PAIR)
    assert measurement.passed
    assert measurement.numbers["update_difference"] < measurement.numbers["tolerance"] / 2


def test_training_with_other_bits_on_two_devices_fails(monkeypatch):
    training = Training("ddp", {}, "momentum", "odd sizes")
    assert measure_bits(training, PAIR) == (True, "bits of one device", {})
    sum_pairs = same_bits._sum_pairs
    monkeypatch.setattr(same_bits, "_sum_pairs", lambda rows: sum_pairs(rows) * len(rows))
    passed, detail, _ = measure_bits(training, PAIR)
    assert not passed
    assert detail == "bits of metrics/grad_norm after step 1"
    with pytest.raises(NotRun, match="devices, and there are 3"):
        measure_bits(training, jax.devices()[:3])


@pytest.mark.fast
def test_a_device_with_another_number_or_nan_is_found():
    initial = {"w": np.zeros(4)}
    expected = {"w": np.array([1.0, 2.0, 3.0, 4.0])}
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(PAIR), "d"), jax.sharding.PartitionSpec("d")
    )
    for number, difference in ((4.5, 0.125), (np.nan, np.nan)):
        params = {"w": jax.device_put(np.array([1.0, 2.0, 3.0, number], np.float32), sharding)}
        np.testing.assert_array_equal(
            device_differences(params, expected, initial, PAIR), [0.0, difference]
        )


@pytest.mark.fast
def test_a_device_with_other_bits_is_named():
    def odd_one(x):
        return x + 1e-6 * (jax.lax.axis_index("devices") == 2)

    result, code = result_of(lambda devices: measure_same_bits(odd_one, devices), jax.devices()[:4])
    assert (code, result.status) == (1, "failed")
    assert result.detail == "3 of 4 devices agree; different: device 2 (cpu, process 0)"
    assert measure_same_bits(jnp.sin, jax.devices()[:4]).passed


@pytest.mark.fast
def test_gpus_that_add_in_any_order_do_not_compare_scattered_sums(monkeypatch):
    (row,) = [row for row in same_bits_rows() if row.name == SCATTERED]
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert row.measure(PAIR).passed
    gpus = [types.SimpleNamespace(platform="gpu")]
    with pytest.raises(
        NotRun, match="any order without XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    ):
        row.measure(gpus)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    monkeypatch.setattr(_devices, "measure_same_bits", lambda computation, devices: "measured")
    assert row.measure(gpus) == "measured"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_that_sends_a_wrong_number_names_the_device(name):
    collective = COLLECTIVES[name]
    wrong = collective._replace(
        run=lambda x: collective.run(x) + (jax.lax.axis_index("devices") == 1)
    )
    result, code = result_of(
        lambda devices: measure_collective(wrong, 4096, devices), jax.devices()[:3]
    )
    assert (code, result.status) == (1, "failed")
    assert result.detail.endswith("; wrong on device 1 (cpu, process 0)")
    assert measure_collective(collective, 4096, jax.devices()[:3]).passed


@pytest.mark.fast
def test_a_kernel_with_a_wrong_gradient_fails():
    @jax.custom_vjp
    def wrong(x):
        return jnp.sin(x)

    wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * 1.01,))
    kernel = Kernel("sine", wrong, jnp.sin, [(8, 8)])
    result, code = result_of(lambda devices: measure_kernel(kernel, devices))
    assert (code, result.status) == (1, "failed")
    assert result.detail.startswith("1.0e-02 of ")
    assert result.detail.endswith(", in gradient 0")
    assert measure_kernel(kernel._replace(run=jnp.sin), PAIR).passed
    elsewhere, code = result_of(
        lambda devices: measure_kernel(kernel._replace(platforms=("tpu",)), devices)
    )
    assert (code, elsewhere.status) == (0, "not on this platform")


def raise_error(error):
    raise error


OUTCOMES = {
    "passed": (lambda devices: Measurement(True, "fine", {}), 0),
    "failed": (lambda devices: raise_error(ValueError("no such thing\nFix: none")), 1),
    "did not fit": (
        lambda devices: raise_error(RuntimeError("RESOURCE_EXHAUSTED: out of memory")),
        0,
    ),
    "not on this platform": (
        lambda devices: raise_error(NotRun("not on this platform", "it needs tpu")),
        0,
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("status", OUTCOMES)
def test_a_row_that_raises_ends_no_other_row(status):
    measure, code = OUTCOMES[status]
    rows = [Row("group", "first", measure), Row("group", "second", OUTCOMES["passed"][0])]
    report = run_rows(rows, PAIR, seconds=600)
    assert [result.status for result in report.results] == [status, "passed"]
    assert report.exit_code == code
    if status == "failed":
        assert report.results[0].detail == "ValueError: no such thing"


@pytest.mark.fast
def test_rows_without_time_are_listed_and_have_their_own_exit_code(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(
        "shardopt.verify._run.time", types.SimpleNamespace(monotonic=lambda: next(clock))
    )
    rows = [Row("group", name, OUTCOMES["passed"][0]) for name in ("first", "second", "third")]
    report = run_rows(rows, PAIR, seconds=3)
    assert [result.status for result in report.results] == ["passed", "out of time", "out of time"]
    assert report.exit_code == 3
    written = json.loads(json.dumps(report.to_json(PAIR)))
    assert written["not_run"] == ["group: second", "group: third"]
    assert written["devices"] == {"platform": "cpu", "kinds": ["cpu"], "count": 2, "processes": 1}
    assert written["counts"] == {"passed": 1, "out of time": 2}
    failing = [Row("group", "bad", OUTCOMES["failed"][0]), *rows]
    clock = iter(range(100))
    assert run_rows(failing, PAIR, seconds=3).exit_code == 1  # a failure is more than the time


@pytest.mark.fast
def test_axes_that_do_not_divide_the_devices_do_not_fit():
    assert mesh_sizes({"tensor": 2}, range(8)) == {"data": 4, "tensor": 2}
    with pytest.raises(
        NotRun, match=r"^replica=2 x tensor=2 needs a multiple of 4 devices, and there are 6$"
    ):
        mesh_sizes({"replica": 2, "tensor": 2}, range(6))


@pytest.mark.fast
def test_the_first_rows_have_every_strategy_and_axis_and_no_row_comes_twice():
    strategies = {"ddp", "zero1", "zero2", "fsdp", "hybrid"}
    assert {training.strategy for training in FIRST} == strategies
    axes = {axis for training in FIRST for axis in training.axes}
    assert axes == {"tensor", "replica", "context", "expert", "pipeline"}
    rows = [f"{row.group}: {row.name}" for row in all_rows(PAIR)]
    assert len(rows) == len(set(rows))
    assert rows.index("collectives: all-reduce, 64 KiB") < rows.index(f"training: {FIRST[0]}")
    assert rows[-1] == f"training: {SECOND[-1]}"
