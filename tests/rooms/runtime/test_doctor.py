"""`so.runtime.doctor`: it warns about the silent errors that the versions have and the program
meets, and
about no others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.cli import main
from shardopt.runtime import _doctor, _stored_programs
from shardopt.runtime._doctor import known_errors

pytestmark = pytest.mark.fast

OLD = {"jaxlib": "0.10.2", "libtpu": "0.0.48.1"}
RULES = [("table", jax.P(None, "tensor"))]
NEW = {"jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"}


def lookup(params, batch):
    return jnp.mean(params["table"][batch] ** 2)


def step_of(mesh_of, sizes, **options):
    opt = so.ddp(optax.sgd(0.1), mesh_of(**sizes), lookup, **options)
    return opt, opt.init({"table": jnp.ones((8, 4))}), np.zeros((8,), np.int32)


def issues(versions, kind, processes=1, jaxpr=None):
    return {
        error.issue.split()[1]: error.occurs
        for error in known_errors(versions, kind, processes, jaxpr)
    }


def test_each_error_belongs_to_its_versions_and_platform():
    assert issues(OLD, "tpu") == {"49143": None, "42481": None, "39025": None}
    assert issues(NEW, "tpu") == {"39025": None}
    assert issues(OLD | {"libtpu": "0.0.50"}, "tpu").keys() == {"49143", "42481", "39025"}
    assert issues(OLD, "gpu") == {"49143": None, "42481": None}
    assert issues(NEW, "gpu") == {}
    assert issues(OLD, "cpu") == {}
    assert issues(OLD, "cpu", processes=2) == {"40830": None}
    assert issues(NEW, "cpu", processes=2) == {}


@pytest.mark.parametrize(
    ("sizes", "options", "occurs"),
    [
        ({"data": 4}, {"micro_batches": 2, "view": "global"}, True),
        ({"data": 4}, {"micro_batches": 1, "view": "global"}, False),
        ({"data": 4}, {"micro_batches": 2, "view": "per_device"}, False),
        (
            {"data": 2, "tensor": 2},
            {"micro_batches": 2, "view": "per_device", "rules": RULES},
            True,
        ),
    ],
)
def test_the_scatter_in_a_loop_is_seen_where_the_partitioner_has_it(
    sizes, options, occurs, mesh_of
):
    opt, state, batch = step_of(mesh_of, sizes, **options)
    jaxpr = jax.make_jaxpr(opt.step)(state, batch)
    assert issues(OLD, "tpu", jaxpr=jaxpr) == {"49143": occurs, "42481": False, "39025": False}


def test_a_reduce_scatter_of_the_loss_is_seen(mesh_of):
    mesh = mesh_of(data=2)
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"),
    )  # fmt: skip
    jaxpr = jax.make_jaxpr(scatter)(jnp.ones(8))
    assert issues(OLD, "cpu", processes=2, jaxpr=jaxpr) == {"40830": True}
    assert issues(OLD, "cpu", processes=2, jaxpr=jax.make_jaxpr(jnp.sin)(1.0)) == {"40830": False}


def test_stored_programs_are_warned_of_unless_their_order_is_sequential(monkeypatch):
    assert [error.issue for error in known_errors(OLD, "cpu", 1, None, stores_programs=True)] == [
        "XLA:CPU stored-programs"
    ]
    assert list(known_errors(NEW, "cpu", 1, None, stores_programs=True)) == []
    for module in (_doctor, _stored_programs):
        monkeypatch.setattr(module, "version_of", lambda name: OLD.get(name))
    monkeypatch.setenv("XLA_FLAGS", "")
    stored = jax.config.values["jax_compilation_cache_dir"] is not None
    assert [error.issue for error in so.runtime.doctor().errors] == [
        "XLA:CPU stored-programs"
    ] * stored
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_concurrency_optimized_scheduler=false")
    assert so.runtime.doctor().errors == ()


def test_a_report_says_versions_devices_and_flags(mesh_of, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_example=true")
    report = so.runtime.doctor(*step_of(mesh_of, {"data": 4}))
    assert report.versions["jax"] == jax.__version__
    assert report.devices == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert report.topology is None
    assert report.flags["LIBTPU_INIT_ARGS"] == "--xla_example=true"
    assert report.errors == ()
    text = str(report)
    assert f"jax {jax.__version__}" in text
    assert "known silent errors: none for these versions" in text


def test_the_text_of_a_warning_has_number_pattern_and_remedy(mesh_of):
    opt, state, batch = step_of(mesh_of, {"data": 4}, micro_batches=2, view="global")
    error = next(known_errors(OLD, "tpu", 1, jax.make_jaxpr(opt.step)(state, batch)))
    assert (
        str(error) == "openxla/xla 49143: gradients of lookups that a loop sums in the hands of the"
        " partitioner may lose parts.\n  YOUR STEP HAS THE PATTERN. Fix: pip install"
        " 'libtpu>=0.0.50.1' (GPU: 'jaxlib>=0.12.0.1'), or pass"
        " compiler_options={'xla_disable_hlo_passes': 'while-loop-all-reduce-code-motion'}."
    )


def test_a_program_needs_its_state_and_batch(mesh_of):
    opt, state, _ = step_of(mesh_of, {"data": 4})
    with pytest.raises(TypeError) as raised:
        so.runtime.doctor(opt, state)
    assert (
        str(raised.value)
        == "doctor: batch missing.\nFix: call so.runtime.doctor(opt, state, batch), or so.runtime.doctor()."
    )


def test_the_command_prints_the_report(capsys):
    assert main(["doctor"]) == 0
    assert f"jaxlib {jax.lib.__version__}" in capsys.readouterr().out
