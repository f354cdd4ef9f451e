"""An error begins with the name by which the user calls the function."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT

import shardopt as so

pytestmark = pytest.mark.fast

WINGS = ("data", "verify")
"""Modules that a user imports from `shardopt`, and that are in no `__all__`."""


def public_paths(module, prefix=""):
    """Return (module, name) of each public function -> its path below `shardopt`."""
    paths = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            paths |= public_paths(value, f"{prefix}{name}.")
        elif callable(value):
            paths[value.__module__, value.__name__] = prefix + name
    return paths


def stated_names(path):
    """Return function -> the name that `@calling` gives it, of a file."""
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    return {
        node.name: getattr(decorator.args[0], "value", None) or constants[decorator.args[0].id]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "calling"
    }


def test_errors_of_a_public_function_begin_with_the_end_of_its_path():
    paths = {}
    for wing in WINGS:
        paths |= public_paths(importlib.import_module(f"shardopt.{wing}"), f"{wing}.")
    paths |= public_paths(so)
    wrong = {}
    count = 0
    for (module, name), path in paths.items():
        file = Path(ROOT, *module.split(".")).with_suffix(".py")
        stated_name = stated_names(file).get(name) if file.exists() else None
        if stated_name is None:
            continue
        count += 1
        is_server = stated_name == "parameter_server"  # it names its module, also in `async_sgd`
        if not is_server and not f".{path}".endswith(f".{stated_name}"):
            wrong[path] = stated_name
    assert wrong == {}
    assert count > 40
