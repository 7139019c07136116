"""The examples in docstrings are true: every module with ``>>>`` in it is run by doctest."""

import doctest
import importlib
from pathlib import Path

import pytest

import autofit

FOLDER = Path(autofit.__file__).parent
MODULES = sorted(
    ".".join(["autofit", *path.relative_to(FOLDER).with_suffix("").parts])
    for path in FOLDER.rglob("*.py")
    if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted, "the examples are not in docstrings"
    assert not found.failed


def test_the_modules_are_found():
    assert "autofit.system.errors" in MODULES
