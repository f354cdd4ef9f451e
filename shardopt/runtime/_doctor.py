"""`doctor`: the versions, devices and flags of this machine, and the known silent errors that
concern a program.
"""

import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from shardopt.core import format_error
from shardopt.core._extras import version_numbers, version_of
from shardopt.runtime._stored_programs import mixes_collectives
from shardopt.trace._jaxprs import called_jaxprs

_PACKAGES = ("shardopt", "jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "numpy")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "NCCL_ALGO")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_use_shardy_partitioner",
    "jax_cpu_collectives_implementation",
    "jax_compilation_cache_dir",
    "jax_debug_nans",
    "jax_disable_jit",
)


class KnownError(NamedTuple):
    """A silent error of jax or XLA that these versions have.

    Attributes:
      issue: the upstream number, such as "openxla/xla 49143".
      effect: the wrong result, and the programs that may have it.
      remedy: what to do.
      occurs: whether the program that was given has the pattern; None if no program was given.
    """

    issue: str
    effect: str
    remedy: str
    occurs: bool | None

    def __str__(self) -> str:
        state = {
            None: "no program was given",
            True: "YOUR STEP HAS THE PATTERN",
            False: "not in your step",
        }[self.occurs]
        return f"{self.issue}: {self.effect}\n  {state}. Fix: {self.remedy}"


class DoctorReport(NamedTuple):
    """The report of `doctor`; `print` shows it.

    Attributes:
      versions: package to version, None if it is not installed; also "python".
      devices: platform, kind and number of devices and processes.
      topology: the extent of the torus of a TPU, and the number of slices; None elsewhere.
      flags: environment variables and settings of jax that change programs.
      errors: the known silent errors of these versions on this platform.
    """

    versions: dict[str, str | None]
    devices: dict[str, str | int]
    topology: str | None
    flags: dict[str, str]
    errors: tuple[KnownError, ...]

    def __str__(self) -> str:
        versions = ", ".join(
            f"{name} {version or 'not installed'}" for name, version in self.versions.items()
        )
        devices = ", ".join(f"{name} {value}" for name, value in self.devices.items())
        flags = "".join(f"\n  {name}={value}" for name, value in self.flags.items())
        errors = "".join(f"\n{error}" for error in self.errors) or " none for these versions"
        topology = f"\ntopology: {self.topology}" if self.topology else ""
        return (
            f"versions: {versions}\ndevices: {devices}{topology}\nflags:{flags}\nknown silent"
            f" errors:{errors}"
        )


def doctor(opt: Any = None, state: Any = None, batch: Any = None) -> DoctorReport:
    """Report versions, devices, topology and flags, and the known silent errors of jax and XLA that
    concern a program.

    Args:
      opt: a strategy, such as `so.fsdp(...)`; by default no program is read.
      state: its train state, or its abstract state.
      batch: a global batch of it, or shapes.

    Returns:
      A `DoctorReport`: `.versions`, `.devices`, `.topology`, `.flags`, `.errors`.

    Raises:
      TypeError: if only some of `opt`, `state` and `batch` are given.

    Example:
      >>> import shardopt as so
      >>> so.runtime.doctor().versions["shardopt"] is not None
      True

    Note:
      The step is traced, not compiled, and nothing runs. A pattern that occurs may still compile
      rightly. So a warning says "may", and the remedy is safe.
    """
    arguments = {"opt": opt, "state": state, "batch": batch}
    missing = [name for name, value in arguments.items() if value is None]
    if len(missing) in (1, 2):
        fix = "call so.runtime.doctor(opt, state, batch), or so.runtime.doctor()."
        raise TypeError(format_error("doctor", f"{' and '.join(missing)} missing.", fix=fix))
    jaxpr = None if opt is None else jax.make_jaxpr(opt.step)(state, batch)
    versions = {"python": platform.python_version()} | {
        name: version_of(name) for name in _PACKAGES
    }
    devices = jax.devices()
    kind = devices[0].platform
    processes = jax.process_count()
    flags = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    flags |= {
        name: str(jax.config.values[name]) for name in _SETTINGS if jax.config.values.get(name)
    }
    stores_programs = (
        bool(jax.config.values.get("jax_compilation_cache_dir")) and mixes_collectives()
    )
    return DoctorReport(
        versions=versions,
        devices={
            "platform": kind,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": processes,
        },
        topology=_topology(devices),
        flags=flags,
        errors=tuple(
            known_errors(versions, kind, processes, jaxpr, stores_programs=stores_programs)
        ),
    )


def known_errors(
    versions: dict[str, str | None],
    kind: str,
    processes: int,
    jaxpr: ClosedJaxpr | None,
    *,
    stores_programs: bool = False,
) -> Iterator[KnownError]:
    """Yield the silent errors that these versions have on a platform.

    Docs/notes/compiler_errors.md has the measurements.

    `stores_programs` says whether jax's cache stores programs whose operations XLA:CPU has put in
    the concurrent order.
    """
    jaxlib = version_numbers(versions["jaxlib"])
    libtpu = version_numbers(versions["libtpu"])
    is_old = jaxlib < (0, 12, 0, 1)
    is_old_cpu = kind == "cpu" and is_old
    moves_sums = {"tpu": libtpu < (0, 0, 50, 1), "gpu": is_old}
    # whether this machine has the error, the pattern of an equation, and the error
    rows: list[tuple[bool, Callable[[JaxprEqn, bool, bool], bool], tuple[str, str, str]]] = [
        (
            moves_sums.get(kind, False),
            lambda eqn, loop, manual: eqn.primitive.name == "scatter-add" and loop and not manual,
            (
                "openxla/xla 49143",
                "gradients of lookups that a loop sums in the hands of the partitioner may lose"
                " parts.",
                "pip install 'libtpu>=0.0.50.1' (GPU: 'jaxlib>=0.12.0.1'), or pass "
                "compiler_options={'xla_disable_hlo_passes': 'while-loop-all-reduce-code-motion'}.",
            ),
        ),
        (
            kind != "cpu" and jaxlib < (0, 11),
            lambda eqn, *_: eqn.primitive.name == "gather" and _is_reduced(eqn),
            (
                "openxla/xla 42481",
                "the gradient of a lookup in a table with a `reduced` axis may be sliced before it"
                " is summed.",
                "pip install 'jax>=0.11' (Python 3.12), or use Auto axes.",
            ),
        ),
        (
            kind == "tpu" and libtpu >= (0, 0, 42),
            lambda *_: False,
            (
                "jax-ml/jax 39025",
                "the gradient of x[:, ids, :] may be zero in rows of the batch, outside of jax.jit.",
                "compute such gradients under jax.jit. Steps of shardopt are compiled.",
            ),
        ),
        (
            is_old_cpu and processes > 1,
            lambda eqn, *_: eqn.primitive.name in ("reduce_scatter", "psum_scatter"),
            (
                "jax-ml/jax 40830",
                "jax.lax.psum_scatter between processes may give wrong sums in chunks of several"
                " MiB.",
                "use jax.lax.psum or all_to_all in the loss, or pip install 'jax>=0.12.0.1' (Python"
                " 3.12).",
            ),
        ),
        (
            is_old_cpu and stores_programs,
            lambda eqn, *_: eqn.primitive.name in _REORDERED,
            (
                "XLA:CPU stored-programs",
                "a program from jax's compilation cache may mix up collectives that can run at the"
                " same time, or hang.",
                "unset jax_compilation_cache_dir, or pip install 'jax>=0.12.0.1' (Python 3.12).",
            ),
        ),
    ]
    for has_error, has_pattern, texts in rows:
        if has_error:
            occurs = None
            if jaxpr is not None:
                occurs = any(has_pattern(*row) for row in _equations(jaxpr.jaxpr))
            yield KnownError(*texts, occurs)


_REORDERED = ("ppermute", "all_gather", "all_to_all", "psum")


def _equations(
    jaxpr: Jaxpr, loop: bool = False, manual: bool = False
) -> Iterator[tuple[JaxprEqn, bool, bool]]:
    """Yield each equation, whether it is in a loop, and whether a shard_map over all its axes is
    around it.
    """
    for eqn in jaxpr.eqns:
        yield eqn, loop, manual
        name = eqn.primitive.name
        inner_loop = loop or name in ("scan", "while")
        inner_manual = manual or (name == "shard_map" and _is_full(eqn))
        for inner in called_jaxprs(eqn):
            yield from _equations(inner, inner_loop, inner_manual)


def _is_full(eqn: JaxprEqn) -> bool:
    mesh = eqn.params["mesh"]
    manual = {*mesh.manual_axes, *eqn.params["newly_manual_axes"]}
    return all(size == 1 or axis in manual for axis, size in mesh.shape.items())


def _is_reduced(eqn: JaxprEqn) -> bool:
    spec = getattr(getattr(eqn.invars[0].aval, "sharding", None), "spec", None)
    return bool(getattr(spec, "reduced", None))


def _topology(devices: list[Any]) -> str | None:
    coordinates = [tuple(device.coords) for device in devices if getattr(device, "coords", None)]
    if not coordinates:
        return None
    extent = "x".join(
        str(max(values) - min(values) + 1) for values in zip(*coordinates, strict=True)
    )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return f"{extent}, {slices} slice{'s' * (slices > 1)}"
