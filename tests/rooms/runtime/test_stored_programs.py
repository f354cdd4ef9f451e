"""jax's compilation cache during a run: its folder, when it is off, and the files deleted from it."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import cache_key
from jax.experimental.compilation_cache import compilation_cache

import shardopt as so
from shardopt.runtime import _stored_programs
from shardopt.runtime._launch import _cache_environment
from shardopt.runtime._processes import share_compiled_programs
from shardopt.runtime._stored_programs import (
    open_folder,
    stored_programs,
)

pytestmark = pytest.mark.fast

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture
def without_cache(monkeypatch):
    """Run the test as in a process whose user has set nothing of the cache."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    defaults = (None, 1.0, "xla_gpu_per_fusion_autotune_cache_dir")

    def set_all(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    set_all(dict(zip(SETTINGS, defaults, strict=True)))
    _stored_programs._warn_of_mixing.cache_clear()
    yield
    set_all(before)


def current_settings():
    return {name: jax.config.values[name] for name in SETTINGS}


def compile_something(number):
    """Compile a new function, which jax has no program of in memory."""
    jax.jit(lambda x: jnp.sin(x) * number)(np.ones(3, np.float32)).block_until_ready()


def checkpoints(folder):
    return so.Checkpoints(folder, every=1, keep=1)


def test_checkpoints_keep_programs_in_their_folder_until_they_are_closed(tmp_path, without_cache):
    before = current_settings()
    with checkpoints(tmp_path):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
        compile_something(1.5)
        num_entries = len(list((tmp_path / "compiled").glob("*-cache")))
        assert num_entries
    assert current_settings() == before
    compile_something(2.5)
    assert len(list((tmp_path / "compiled").glob("*-cache"))) == num_entries


def test_settings_come_back_after_an_error_and_without_close(tmp_path, without_cache):
    before = current_settings()
    with pytest.raises(RuntimeError), checkpoints(tmp_path / "a"):
        raise RuntimeError
    assert current_settings() == before
    left_open = checkpoints(tmp_path / "b")
    assert current_settings() != before
    del left_open
    assert current_settings() == before


def test_a_second_run_shares_the_folder_of_the_first(tmp_path, without_cache):
    before = current_settings()
    with stored_programs("train", tmp_path / "run"):
        with checkpoints(tmp_path / "run" / "checkpoints"):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "run")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "run")
    assert current_settings() == before
    first = checkpoints(tmp_path / "a")
    second = checkpoints(tmp_path / "b")
    first.close()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a" / "compiled")
    second.close()
    assert current_settings() == before


def test_the_folder_of_the_user_stays(tmp_path, without_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.25)
    before = current_settings()
    with checkpoints(tmp_path / "run"):
        assert current_settings() == before
        compile_something(3.5)
    assert not (tmp_path / "run" / "compiled").exists()


def test_a_cache_that_is_switched_off_stays_off(tmp_path, without_cache):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with checkpoints(tmp_path):
            assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("folder_of_the_user", [None, "mine"])
def test_where_programs_mix_up_collectives_the_cache_is_off_by_name(
    tmp_path, without_cache, monkeypatch, folder_of_the_user
):
    folder = folder_of_the_user and str(tmp_path / folder_of_the_user)
    jax.config.update("jax_compilation_cache_dir", folder)
    monkeypatch.setattr(_stored_programs, "version_of", lambda package: "0.10.2")
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.warns(UserWarning, match="compilation cache is off") as warned:
        run = checkpoints(tmp_path / "a")
    assert [str(warning.message) for warning in warned] == [
        "Checkpoints: jax's compilation cache is off in this run, so each restart compiles. jaxlib"
        " 0.10.2 on CPU may mix up the collectives of a stored program"
        " (docs/notes/compiler_errors.md).\nFix: pip install 'jax>=0.12.0.1' (Python 3.12)."
    ]
    assert jax.config.jax_compilation_cache_dir is None
    run.close()
    assert jax.config.jax_compilation_cache_dir == folder
    checkpoints(tmp_path / "b").close()  # a second warning would be an error


@pytest.mark.parametrize(
    ("jaxlib", "flags", "mixes"),
    [
        ("0.10.2", "", True),
        ("0.10.2", "--xla_dump_to=/tmp/x", True),
        ("0.10.2", "--xla_cpu_enable_concurrency_optimized_scheduler=false", False),
        ("0.12.0.1", "", False),
    ],
)
def test_launched_processes_store_programs_only_where_their_collectives_keep_their_order(
    monkeypatch, tmp_path, jaxlib, flags, mixes
):
    monkeypatch.setattr(_stored_programs, "version_of", lambda package: jaxlib)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    folder = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    assert _cache_environment(tmp_path) == ({} if mixes else folder)


def test_programs_that_no_run_has_read_for_a_month_go_and_others_stay(tmp_path, without_cache):
    with stored_programs("run", tmp_path):
        compile_something(4.5)
    (entry,) = (path for path in tmp_path.glob("*-cache") if "lambda" in path.name)
    days = 86400.0
    contents = entry.read_bytes()
    ages = {"old": (40, 40), "read_lately": (2, 40), "written_lately": (40, 2), "both": (1, 1)}
    for name, (read, written) in ages.items():
        path = tmp_path / f"{name}-cache"
        path.write_bytes(contents)
        os.utime(path, (time.time() - read * days, time.time() - written * days))
    open_folder(tmp_path)
    names = {path.name.removesuffix("-cache") for path in tmp_path.glob("*-cache")}
    assert names >= {"read_lately", "written_lately", "both"}
    assert "old" not in names


@pytest.mark.parametrize(
    "num_bytes",
    [pytest.param(0, marks=pytest.mark.slow), 10, pytest.param(200, marks=pytest.mark.slow)],
)
def test_a_program_that_a_killed_process_left_half_written_is_stored_again(
    tmp_path, without_cache, num_bytes
):
    with stored_programs("run", tmp_path):
        compile_something(5.5)
    entries = list(tmp_path.glob("*-cache"))
    for path in entries:
        path.write_bytes(path.read_bytes()[:num_bytes])
    with stored_programs("run", tmp_path):
        assert not list(tmp_path.glob("*-cache"))
        compile_something(5.5)
    assert entries
    assert all(path.stat().st_size > 1000 for path in entries)


def test_the_text_of_a_stored_program_is_written_by_the_compiler(
    tmp_path, without_cache, mesh_of, monkeypatch
):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), lambda params, batch: jnp.mean(batch * params))
    lowered = opt.step.lower(opt.init(jnp.ones(())), jnp.ones(4))

    def refuse(self):
        raise jax.errors.JaxRuntimeError("an instruction that this jaxlib cannot read")

    from shardopt.hlo.proof._text import text_of

    monkeypatch.setattr(jax.stages.Compiled, "as_text", refuse)
    with stored_programs("run", tmp_path):
        texts = [text_of(lowered.compile(), lowered) for _ in range(2)]
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert "ENTRY" in texts[0]
    assert "ENTRY" in texts[1]


def test_a_program_of_one_device_is_loaded_on_the_device_of_its_arguments(
    tmp_path, without_cache, monkeypatch
):
    for name in ("_hash_accelerator_config", "_hash_serialized_compile_options"):
        monkeypatch.setattr(cache_key, name, getattr(cache_key, name))  # put back afterwards
    share_compiled_programs()

    def doubled(device):
        def double(x):  # a new function, which jax has no program of in memory
            return x * 2.25

        return jax.jit(double)(jax.device_put(np.arange(3.0, dtype=np.float32), device))

    with stored_programs("run", tmp_path):
        for number in (0, 3, 7):
            device = jax.devices()[number]
            result = doubled(device)
            assert result.devices() == {device}
            np.testing.assert_array_equal(result, [0, 2.25, 4.5])
    assert len(list(tmp_path.glob("jit_double-*-cache"))) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with stored_programs("run", tmp_path):
        for number in (3, 7):
            doubled(jax.devices()[number])
    assert len(list(tmp_path.glob("jit_double-*-cache"))) == 1 + 2


def test_a_folder_that_cannot_be_made_is_refused_as_without_the_cache(tmp_path, without_cache):
    before = current_settings()
    (tmp_path / "file").write_text("")
    with pytest.raises(so.errors.CheckpointError, match="cannot be written to"):
        checkpoints(tmp_path / "file" / "run")
    assert current_settings() == before


def test_a_second_writer_is_refused_and_changes_no_setting(tmp_path, without_cache):
    with checkpoints(tmp_path):
        inside = current_settings()
        with pytest.raises(so.errors.CheckpointInUseError):
            checkpoints(tmp_path)
        assert current_settings() == inside
