"""What is said in a moment imports little: the weight of an import is the number of its modules, on any machine."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "transformers", "accelerate", "optuna", "numpy", "pydantic", "rich", "jinja2", "yaml", "psutil"}
FRESH = """
import json, sys
before = set(sys.modules)
{code}
print("IMPORTED", json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(code):
    """What some code prints in a fresh Python, and the modules that it imports there."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(code=code)], capture_output=True, text=True, check=True, timeout=60
    )
    said, _, names = done.stdout.rpartition("IMPORTED ")
    return said, json.loads(names)


def test_importing_the_package_is_light():
    _, names = imported("import autofit; autofit.__version__")
    assert [name for name in names if name.startswith("autofit")] == ["autofit", "autofit._version"]
    assert len(names) < 20, names


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["tune", "--help"], ["verify", "-h"], ["report", "-h"]])
def test_help_is_light(words):
    run = f"main({words!r}, prog_name='autofit')"
    said, names = imported(f"from autofit.cli import main\ntry: {run}\nexcept SystemExit as end: assert not end.code")
    assert "autofit" in said
    assert not HEAVY & set(names)
    assert len(names) < 120, names


def test_every_package_is_installed():
    """The tests run in the source tree, which has a package that an installed copy may lack."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = [path.parent for top in ("autofit", "strategies") for path in (ROOT / top).rglob("__init__.py")]
    names = [folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders]
    assert set(settings["packages"]) == {f"autofit.{name}" if name.startswith("strategies") else name for name in names}
    for package, files in settings["package-data"].items():
        folder = ROOT / settings["package-dir"].get(package, package.replace(".", "/"))
        beside = {path.name for path in folder.iterdir() if path.is_file() and path.suffix not in {".py", ".md"}}
        assert set(files) == beside


def test_threads_that_begin_at_once_find_every_technique():
    code = """
import autofit.registry, sys, threading
sys.setswitchinterval(1e-5)
found = []
def look(): found.append(len(autofit.registry.techniques()))
threads = [threading.Thread(target=look) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
print(found)
"""
    said, _ = imported(code)
    counts = json.loads(said)
    assert len(counts) == 8
    assert set(counts) == {max(counts)}
