"""The wheel and the source distribution have the right files, and a bare virtual environment can
use them.
"""

import ast
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

PROVIDES = {"orbax": "orbax-checkpoint"}
"""What is imported under another name than it is installed under."""


def build(source, folder, *kinds):
    """Build distributions without an environment of their own.

    Hatchling is among what tests need.
    """
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        str(folder),
        *(f"-t{kind}" for kind in kinds),
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return (sdist, wheel), built from the folder of the project."""
    paths = build(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel")
    (sdist,) = [path for path in paths if path.name.endswith(".tar.gz")]
    (wheel,) = [path for path in paths if path.suffix == ".whl"]
    assert len(paths) == 2
    return sdist, wheel


def modules():
    """Return the files of the package as they lie in the project."""
    files = (
        path
        for path in (ROOT / "shardopt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def about(wheel):
    files = contents(wheel)
    (name,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(files[name].decode())


def test_the_wheel_has_the_package_and_nothing_else(built):
    _, wheel = built
    assert re.fullmatch(r"shardopt-[\d.]+-py3-none-any\.whl", wheel.name)
    files = contents(wheel)
    ours = {name for name in files if not name.split("/")[0].endswith(".dist-info")}
    assert ours == modules()
    assert "shardopt/py.typed" in ours
    data = {name for name in ours if Path(name).suffix not in (".py", ".typed")}
    assert data == {
        "shardopt/models/families.json",
        "shardopt/models/tensors.json",
        "shardopt/planning/hardware.json",
        "shardopt/planning/models.json",
    }
    assert {Path(name).name for name in set(files) - ours} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "LICENSE",
    }
    assert all(files[name] == (ROOT / name).read_bytes() for name in ours)


def test_the_command_and_the_python_are_said(built):
    files = contents(built[1])
    said = about(built[1])
    (entry,) = [text for name, text in files.items() if name.endswith("entry_points.txt")]
    assert entry.decode().split() == ["[console_scripts]", "shardopt", "=", "shardopt.cli:main"]
    assert said["Requires-Python"] == ">=3.11"
    assert said.get_payload().startswith("# shardopt")  # the README, which a package index shows
    assert said["Description-Content-Type"] == "text/markdown"


def imported():
    """Return {package: [modules that import it]} of all that is neither Python's nor ours.

    A module that is a program too must not wait for shardopt: it imports modules of its folder by
    their names.
    """
    importers = {}
    for path in (ROOT / "shardopt").rglob("*.py"):
        text = path.read_text()
        beside = (
            {sibling.stem for sibling in path.parent.glob("*.py")} if "__main__" in text else set()
        )
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in (
                {name.split(".")[0] for name in names}
                - {"shardopt"}
                - beside
                - sys.stdlib_module_names
            ):
                importers.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return importers


def test_what_is_imported_is_required(built):
    """Nothing works only because another package happens to bring it along."""
    required = about(built[1]).get_all("Requires-Dist")
    always = {re.match(r"[\w.-]+", line)[0].lower() for line in required if "extra ==" not in line}
    extras = {re.match(r"[\w.-]+", line)[0].lower() for line in required if "extra ==" in line}
    importers = {PROVIDES.get(name, name).lower(): places for name, places in imported().items()}
    assert {name: places for name, places in importers.items() if name not in always | extras} == {}
    optional = {
        "flax",
        "grain",
        "ray",
        "rich",
        "safetensors",
        "tokenizers",
        "tyro",
    }
    # each in an extra, which the message names where it is missing
    assert set(importers) - always == optional
    assert always - set(importers) == {"jaxlib"}  # jax's other half, held at its version


def test_the_source_distribution_has_what_tests_and_docs_need_and_no_litter(built):
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert modules() <= names
    assert {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "mkdocs.yml",
    } <= names
    assert {"LICENSE", "CITATION.cff"} <= names
    assert {"tests/conftest.py", "docs/index.md", "benchmarks/common.py"} <= names
    litter = re.compile(
        r"(^|/)(__pycache__|\.venv|\.git|runs|build|dist|\.\w+_cache|\.hypothesis)(/|$)|\.pyc$"
    )
    assert [name for name in names if litter.search(name)] == []
    assert sum(member.size for member in members) < 20e6


def test_the_wheel_made_of_the_source_distribution_is_the_same(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        # Python 3.11.2 has no argument `filter` of extractall, and 3.12 warns without a filter
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    (rebuilt_wheel,) = build(source, tmp_path / "dist", "wheel")
    assert contents(rebuilt_wheel) == contents(built[1])


@pytest.mark.slow
def test_a_bare_environment_can_use_it(built, tmp_path):
    """shardopt is installed with its requirements and nothing else. It imports, trains, and names
    the extra of its command, which then works.
    """
    folder = tmp_path / "venv"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA"))}
    venv.create(folder, with_pip=True)

    def run(*words):
        done = subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", built[1])
    assert run(folder / "bin" / "pip", "check") == "No broken requirements found.\n"
    location = run(folder / "bin" / "python", "-c", "import shardopt; print(shardopt.__file__)")
    assert Path(location.strip()).is_relative_to(folder)
    done = subprocess.run(
        [folder / "bin" / "shardopt", "train"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "Fix: pip install 'shardopt[cli]'",
    )
    example = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "P('data', None)" in run(folder / "bin" / "python", "-c", example)
    run(
        folder / "bin" / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"{built[1]}[cli]",
    )
    assert run(folder / "bin" / "pip", "check") == "No broken requirements found.\n"
    assert "launch" in run(folder / "bin" / "shardopt", "--help")
    text = tmp_path / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    sizes = [
        "--dim",
        "32",
        "--layers",
        "2",
        "--length",
        "16",
        "--batch-size",
        "8",
        "--steps",
        "2",
        "--devices",
        "4",
    ]
    run(folder / "bin" / "shardopt", "train", "--data", text, *sizes, "--run-dir", tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
