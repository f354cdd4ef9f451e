"""CONTRIBUTING lists the files that a reader of a step opens: they are the files on the way to its
collectives.
"""

import dis
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from support.paths import ROOT

import shardopt as so
from shardopt.step._step import make_step

PACKAGE = Path(so.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTION = TEXT.partition("## The step, in call order\n")[2].partition("\n## ")[0]
FILES = re.findall(r"^- `([\w/]+\.py)`: ", SECTION, re.MULTILINE)
DECORATORS = {"strategies/_keywords.py", "core/_tracebacks.py"}
"""Decorators of public functions: each calls the function with the same arguments."""

pytestmark = pytest.mark.fast


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)


def file_of(frame) -> str:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def files_on_the_stack() -> set[str]:
    files = set()
    frame = sys._getframe()
    while frame is not None:
        files.add(file_of(frame))
        frame = frame.f_back
    return files


def files_called_by(strategy, *args):
    """Return the files of a strategy and of the functions that it calls, and its result."""
    files = set()

    def note(frame, event, _):
        if (
            event == "call"
            and frame.f_back is not None
            and frame.f_back.f_code.co_name == strategy.__name__
        ):
            files.update((file_of(frame), file_of(frame.f_back)))

    sys.setprofile(note)
    try:
        opt = strategy(*args)
    finally:
        sys.setprofile(None)
    return files, opt


def files_to_collectives(monkeypatch, opt) -> dict[str, set[str]]:
    """Return kind of collective -> the files on the call stacks of its calls, while a step is
    traced.
    """
    files: dict[str, set[str]] = {}

    def recorded(kind, collective):
        def run(*args, **kwargs):
            files[kind] = files.get(kind, set()) | files_on_the_stack()
            return collective(*args, **kwargs)

        return run

    for kind in ("all_gather", "psum_scatter", "psum"):
        monkeypatch.setattr(jax.lax, kind, recorded(kind, getattr(jax.lax, kind)))
    state = opt.abstract_state({"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))})
    opt.step.lower(state, {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)})
    return files


def test_the_list_names_the_files_from_fsdp_to_its_collectives(monkeypatch):
    built, opt = files_called_by(so.fsdp, optax.adamw(1e-3), so.make_mesh(), loss_fn)
    files = files_to_collectives(monkeypatch, opt)
    assert set(files) == {"all_gather", "psum_scatter", "psum"}
    assert set(FILES) == (built | set().union(*files.values())) - DECORATORS - {""}


def test_the_list_is_short():
    lines = sum(
        not line.lstrip().startswith("#")
        for name in FILES
        for line in (PACKAGE / name).read_text().splitlines()
    )
    assert len(FILES) == len(set(FILES)) <= 12
    assert lines <= 2650


def test_the_step_reads_as_its_phases():
    constants = [code for code in make_step.__code__.co_consts if hasattr(code, "co_code")]
    (step,) = (code for code in constants if code.co_name == "step")
    phases = ("differentiate", "apply_update", "all_gather_params")
    first_line = {
        name: min(line for line, names in names_by_line(step) if name in names) for name in phases
    }
    assert [first_line[name] for name in phases] == sorted(first_line.values())
    statements = {line for _, _, line in step.co_lines() if line is not None} - {
        step.co_firstlineno
    }
    assert len(statements) <= 8


def names_by_line(code):
    """Yield (line, names) of each instruction of a function that reads a name."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno or line
        yield line, {instruction.argval} if isinstance(instruction.argval, str) else set()
