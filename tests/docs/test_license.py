"""The licence: Apache-2.0 in every place that states it, and no hard dependency is copyleft."""

import importlib.metadata
import re
import tomllib
from email.message import Message

import pytest
from packaging.requirements import Requirement
from support.paths import ROOT

pytestmark = pytest.mark.fast

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PERMISSIVE = {
    "0BSD",
    "AFL-2.1",
    "Apache-2.0",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "MIT",
    "PSF-2.0",
    "Zlib",
}
CLASSIFIERS = {"Apache Software License": "Apache-2.0", "BSD License": "BSD", "MIT License": "MIT"}
OLD_NAMES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "MIT License": "MIT",
}
"""What the free text of `License`, which SPDX names replaced, says for a licence."""


def licenses_of(metadata):
    """Return the alternatives under which a distribution may be used, each a set of SPDX names that
    all apply.
    """
    expression = metadata.get("License-Expression")
    text = (metadata.get("License") or "").strip()
    names = [
        line.split(" :: ")[-1]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    names = [name for name in names if name != "OSI Approved"]
    if not expression and text and "\n" not in text:
        expression = OLD_NAMES.get(text, text)
    if expression:
        return [
            set(re.split(r"\s+AND\s+", option.strip("() ")))
            for option in re.split(r"\s+OR\s+", expression)
        ]
    return [{CLASSIFIERS.get(name, name)} for name in names]


def required(name, extras=()):
    """Yield the distributions that a distribution with these extras requires here."""
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if not requirement.marker or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield requirement.name, tuple(sorted(requirement.extras))


def hard_dependencies():
    """Return the names of all distributions that `pip install shardopt` brings."""
    seen = set()
    waiting = [(Requirement(line).name, ()) for line in PROJECT["dependencies"]]
    while waiting:
        dependency = waiting.pop()
        if dependency not in seen:
            seen.add(dependency)
            waiting += required(*dependency)
    return sorted({name for name, _ in seen})


def not_permissive(metadatas):
    """Return name -> its licences, for each distribution that no set of permissive licences allows
    to use.
    """
    licenses = {metadata["Name"]: licenses_of(metadata) for metadata in metadatas}
    return {
        name: options
        for name, options in licenses.items()
        if not any(option <= PERMISSIVE for option in options)
    }


def test_no_hard_dependency_is_copyleft():
    names = hard_dependencies()
    assert {"jax", "jaxlib", "numpy", "opt_einsum", "protobuf", "tensorstore"} <= {
        name.replace("-", "_") for name in names
    }
    assert not_permissive(importlib.metadata.metadata(name) for name in names) == {}


@pytest.mark.parametrize(
    "lines",
    [
        "License-Expression: GPL-3.0-or-later",
        "License-Expression: MIT AND LGPL-2.1-only",
        "License: LGPL",
        "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
        "Summary: it states no licence",
    ],
)
def test_other_licenses_are_noticed(lines):
    metadata = Message()
    metadata["Name"] = "other"
    metadata[lines.split(": ")[0]] = lines.split(": ")[1]
    assert list(not_permissive([metadata])) == ["other"]


def test_every_place_states_the_same_license_and_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["authors"] == [{"name": "The shardopt authors"}]
    assert re.search(r"^license: (.*)$", citation, re.MULTILINE)[1] == PROJECT["license"]
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == PROJECT["version"]
    text = (ROOT / "LICENSE").read_text()
    assert "Copyright 2026 The shardopt authors" in text
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
