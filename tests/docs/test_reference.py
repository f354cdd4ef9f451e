"""The reference has every public name once, each with a docstring that tells its arguments.

The pages build without a warning.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

import shardopt
from shardopt import (
    adapters,
    data,
    errors,
    hlo,
    interop,
    losses,
    models,
    nn,
    optimizers,
    parameter_server,
    planning,
    reducers,
    runtime,
    training,
    transforms,
)
from shardopt.models import decoder, gpt, moe

ROOMS = {
    "": (shardopt, shardopt.__all__),
    "adapters.": (adapters, adapters.__all__),
    "data.": (data, data.__all__),
    "errors.": (errors, errors.__all__),
    "hlo.": (hlo, hlo.__all__),
    "interop.": (interop, interop.__all__),
    "losses.": (losses, losses.__all__),
    "models.": (models, models.__all__),
    "models.decoder.": (decoder, decoder.__all__),
    "models.gpt.": (
        gpt,
        ["config", "matrices", "rules"],
    ),
    "models.moe.": (
        moe,
        ["config", "rules"],
    ),
    "nn.": (nn, nn.__all__),
    "optimizers.": (optimizers, optimizers.__all__),
    "parameter_server.": (parameter_server, parameter_server.__all__),
    "parameter_server.rules.": (parameter_server.rules, parameter_server.rules.__all__),
    "planning.": (planning, planning.__all__),
    "reducers.": (reducers, reducers.__all__),
    "runtime.": (runtime, runtime.__all__),
    "schedules.": (shardopt.schedules, shardopt.schedules.__all__),
    "training.": (training, training.__all__),
    "transforms.": (transforms, transforms.__all__),
}


def public():
    """Return {qualified name: object}.

    What several rooms hand on counts under its shortest name.
    """
    objects = {}
    for prefix, (room, names) in ROOMS.items():
        for name in names:
            public_object = getattr(room, name)
            if not inspect.ismodule(public_object) and all(
                public_object is not other for other in objects.values()
            ):
                objects[prefix + name] = public_object
    return objects


PUBLIC = public()


def listed_names():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    return re.findall(r"^::: (?:so|shardopt)\.(\S+)$", pages, re.MULTILINE)


def test_the_reference_has_every_public_name_once_and_no_other():
    listed = listed_names()
    assert len(listed) == len(set(listed))
    typed = {name for name in listed if "._" not in name}
    assert set(PUBLIC) - typed == set(), "add `::: so.<name>` to a page in docs/reference"
    assert typed - set(PUBLIC) == set(), "these are not public"


def told_by(kind):
    """Whether a class has a docstring of its own, whose first paragraph is a sentence."""
    return re.match(r"[A-Z].*?\.(\n|$)", kind.__doc__ or "", re.DOTALL)


RECEIVED = sorted(name for name in listed_names() if "._" in name)


@pytest.mark.parametrize("name", RECEIVED)
def test_what_a_user_only_receives_is_a_documented_class_without_a_public_name(name):
    module, _, last = name.rpartition(".")
    kind = getattr(importlib.import_module(f"shardopt.{module}"), last)
    assert inspect.isclass(kind)
    assert told_by(kind)
    assert all(kind is not public_object for public_object in PUBLIC.values())


@pytest.mark.parametrize(
    "name", [name for name, public_object in PUBLIC.items() if inspect.isroutine(public_object)]
)
def test_a_function_tells_what_it_does_and_every_argument(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert re.match(r"[A-Z].*\.(\n\n|$)", text, re.DOTALL)
    assert ("Example:" in text) == (">>> " in text)
    assert not re.search(r":\n\nArgs:\n", text), (
        "a list stands after the sentence that announces it"
    )
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    elsewhere = "Arguments, result and errors are the same as for " in text
    if (len(inspect.signature(PUBLIC[name]).parameters) > 2 and not elsewhere) or arguments:
        argument_names = re.findall(r"^  \*{0,2}(\w+): ", arguments, re.MULTILINE)
        assert sorted(argument_names) == sorted(inspect.signature(PUBLIC[name]).parameters)
    notes = re.search(r"^\*\*", text, re.MULTILINE)
    last_section = max(
        text.find(f"\n{section}:\n") for section in ("Args", "Returns", "Raises", "Example")
    )
    assert notes is None or notes.start() > last_section, "notes follow the call"


def test_a_class_has_a_docstring_of_its_own():
    classes = [public_object for public_object in PUBLIC.values() if inspect.isclass(public_object)]
    bare = [kind.__name__ for kind in classes if not told_by(kind)]
    assert bare == []


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "site" / "reference" / "strategies.html").read_text()
    for text in ("so.fsdp", "Equivalence", "min_shard_elements", "Rajbhandari"):
        assert text in page
    assert '<details class="example"' not in page  # examples are shown as code
    assert page.count("&gt;&gt;&gt; </span>") > 20
