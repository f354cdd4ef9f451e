"""Compiled programs in the folder of a run: jax's compilation cache, from the start of a run to its
end.
"""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from shardopt.core import format_error
from shardopt.core._extras import version_numbers, version_of
from shardopt.runtime._processes import share_compiled_programs

ORDER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
FOLDER_NAME = "compiled"
_DIRECTORY = "jax_compilation_cache_dir"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"
_DEVICE_FILES = ("nvidia[0-9]*", "nvmap", "dxg", "accel[0-9]*", "vfio/[0-9]*", "kfd")
"""Names in /dev of NVIDIA's GPUs (as cards, on Jetson, in WSL), of TPUs by two drivers, and of
AMD's GPUs.
"""
_MAX_AGE_SECONDS = 30 * 86400.0
_CHECKED = ".checked"
"""A file in the folder: older entries were read, and are whole."""

_runs: list[object] = []
"""The runs of this process that store programs. The first one has set jax's cache for all."""
_settings_before: dict[str, Any] = {}


@contextlib.contextmanager
def stored_programs(caller: str, folder: Path) -> Iterator[None]:
    """Keep compiled programs in a folder while the context lasts, so that the next start of the run
    compiles nothing. Then put jax's settings back.

    If jax's cache has a folder already, of the user or of another run, it keeps this folder. If the
    user has switched the cache off, it stays off. If stored programs are known to compute wrong
    numbers, it is off too, and a warning says so.

    Args:
      caller: the function that the user called, for the message.
      folder: the folder of the programs.
    """
    run = object()
    if not _runs:
        settings = _settings(caller, folder)
        _settings_before.update({name: jax.config.values[name] for name in settings})
        _apply(settings)
    _runs.append(run)
    try:
        yield
    finally:
        _runs.remove(run)
        if not _runs:
            _apply(_settings_before)
            _settings_before.clear()


@contextlib.contextmanager
def without_stored_programs() -> Iterator[None]:
    """Compile in this context without jax's cache, and leave nothing in it."""
    directory = jax.config.values[_DIRECTORY]
    _apply({_DIRECTORY: None})
    try:
        yield
    finally:
        _apply({_DIRECTORY: directory})


def mixes_collectives() -> bool:
    """Return whether stored programs may mix up their collectives on the devices of this process.

    Docs/notes/compiler_errors.md has the measurements.
    """
    if not has_mixing_jaxlib():
        return False
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def has_mixing_jaxlib() -> bool:
    """Return whether stored programs of this jaxlib may mix up their collectives on CPUs.

    With `ORDER_FLAG` off they do not. Note that this is no remedy: other programs then mix up
    theirs, stored or not. So shardopt never sets it, and only takes it from a user who has.
    """
    is_ordered = f"{ORDER_FLAG}=false" in os.environ.get("XLA_FLAGS", "")
    return not is_ordered and version_numbers(version_of("jaxlib")) < (0, 12, 0, 1)


def runs_on_cpus(devices: Path = Path("/dev")) -> bool:
    """Return whether the user asked for CPUs alone, or this host has no accelerator."""
    has_accelerator = any(list(devices.glob(name)) for name in _DEVICE_FILES)
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not has_accelerator


def open_folder(folder: Path) -> Path:
    """Return a folder of programs, which is made if it does not exist.

    Delete programs that no run has read for 30 days, and programs that a killed process has left
    half written. Note that jax never replaces an entry, so half an entry would be compiled at every
    start. jax can limit the size of its cache. Each read then waits for a lock that all processes
    share, and there may be thousands of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checked = folder / _CHECKED
    checked_until = checked.stat().st_mtime if checked.exists() else 0.0
    oldest = time.time() - _MAX_AGE_SECONDS
    for entry in folder.glob("*-cache"):
        status = entry.stat()
        is_old = max(status.st_atime, status.st_mtime) < oldest
        if is_old or (status.st_mtime >= checked_until and not _is_whole(entry)):
            entry.unlink(missing_ok=True)
    checked.touch()
    return folder


def _settings(caller: str, folder: Path) -> dict[str, Any]:
    """Return the settings of jax for a run: name -> value."""
    if not jax.config.values["jax_enable_compilation_cache"]:
        return {}
    if mixes_collectives():
        _warn_of_mixing(caller)
        return {_DIRECTORY: None}
    if jax.process_count() > 1:
        share_compiled_programs()
    settings: dict[str, Any] = {}
    if _MIN_SECONDS.upper() not in os.environ and jax.config.values[_MIN_SECONDS] == 1.0:
        settings[_MIN_SECONDS] = 0.0  # a restart compiles many programs of less than a second
    if jax.config.values[_DIRECTORY] is None:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # nothing is stored, and the run itself will refuse
                open_folder(folder)
        settings[_DIRECTORY] = str(folder)
        if version_numbers(version_of("jaxlib")) < (0, 12):
            # the keys of programs would have the path of this folder, so a moved run would compile
            settings[_XLA_CACHES] = "none"
    return settings


def _apply(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    if _DIRECTORY in settings:
        compilation_cache.reset_cache()  # jax reads the setting once


def _is_whole(entry: Path) -> bool:
    from jax._src.compilation_cache import decompress_executable

    try:
        decompress_executable(entry.read_bytes())
    except FileNotFoundError:
        return True
    except Exception:  # each form of compression has errors of its own
        return False
    return True


@functools.cache
def _warn_of_mixing(caller: str) -> None:
    if jax.process_index() != 0:
        return
    problem = (
        f"jax's compilation cache is off in this run, so each restart compiles. jaxlib"
        f" {version_of('jaxlib')} on CPU may mix up the collectives of a stored program"
        " (docs/notes/compiler_errors.md)."
    )
    fix = "pip install 'jax>=0.12.0.1' (Python 3.12)."
    warnings.warn(format_error(caller, problem, fix=fix), stacklevel=2)
