"""A new technique is one file and one word in ``ALL``: all else is learned from it.

autofit is copied as an installed package has it, a toy is added to it, and its own commands are run. The toy hangs 64
MiB on the model, writes a field of the training arguments, and counts its forward passes.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autofit
from autofit.registry import source_folders, techniques
from autofit.system.units import MIB

pytestmark = pytest.mark.slow

TOY = '''
"""Toy: 64 MiB that hang on the model."""

import functools

from autofit.contract.emission import Emission
from autofit.contract.technique import Choice, Kind, Technique


class Toy(Technique):
    name = "toy"
    baseline = "off"
    packages = {"toy-package": "1.0"}

    def choices(self, facts):
        return (
            Choice("off", Kind.EXACT, "offered", "nothing hangs on the model"),
            Choice("on", Kind.EXACT, "offered", "64 MiB hang on the model"),
            Choice("lie", Kind.EXACT, "on_request", "nothing hangs there, and it says so"),
            Choice("packed", Kind.EXACT, "withheld", self.lacks(facts, "toy-package")),
        )

    def apply(self, value, recipe):
        if value == "on":
            recipe.state[self.name] = counted = []
            recipe.model_wraps.append(functools.partial(hang, counted=counted))

    def emit(self, value, plan, facts):
        weight = 0.25 if value == "on" else 0.0
        script = ("hang 64 MiB on the model: model = setup.model(...)",) if value == "on" else ()
        return Emission(training_args={"weight_decay": weight}, script=script)

    def watch(self, model, recipe, hooks):
        passes = []
        hooks.after(model, lambda *_: passes.append(1))

        def read(ran):
            toys = [one for name, one in ran.model.named_buffers() if name == "toy"]
            counted = ran.recipe.state.get(self.name, [])
            return {"bytes": sum(one.nbytes for one in toys), "passes": len(passes), "hung": len(counted)}

        return read

    def in_effect(self, value, seen, facts):
        if bool(seen.get("bytes")) != (value != "off"):
            return f"{seen.get('bytes')} bytes of the toy are there"
        return None

    def finding(self, seen):
        if not seen.get("bytes"):
            return None
        return "What the toy weighs", f"The toy weighs {seen['bytes'] >> 20} MiB."

    def changes(self, value, plan, facts):
        return "A toy hangs on the model." if value == "on" else None


def hang(model, counted):
    import torch

    model.register_buffer("toy", torch.zeros(16 << 20), persistent=False)
    counted.append(1)
    return model
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where autofit is installed with one file more, and one word more in ``ALL``."""
    site = tmp_path_factory.mktemp("site")
    package, strategies = source_folders()
    leave = shutil.ignore_patterns("__pycache__", "strategies")
    shutil.copytree(package, site / "autofit", ignore=leave)
    shutil.copytree(strategies, site / "autofit" / "strategies", ignore=shutil.ignore_patterns("__pycache__"))
    folder = site / "autofit" / "strategies"
    (folder / "toy.py").write_text(TOY)
    listed = (folder / "__init__.py").read_text("utf-8")
    door = listed.replace("\nALL = (", "\nfrom .toy import Toy\n\nALL = (").replace("\n)\n", "\n    Toy(),\n)\n")
    (folder / "__init__.py").write_text(door)
    return site


@pytest.fixture(scope="module")
def command(site):
    return functools.partial(run, site)


def run(site, module, *words):
    environment = {**os.environ, "PYTHONPATH": str(site), "TMPDIR": str(site), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(site / "cache")
    found = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=site,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def tuned(site, command):
    held = [f"--fix={one.name}={one.baseline}" for one in techniques()[2:]]
    batch = ["--seq-len=16", "--global-batch=2", "--fix=micro_batch=2"]
    ended = ["--trials=2", "--no-guard", "--json"]
    command("autofit", "tune", "demo", "--device=cpu", "--output=out", *batch, *held, "--among=toy=on,lie", *ended)
    return site / "out"


def test_it_is_offered(command):
    found = json.loads(command("autofit", "doctor", "--device=cpu", "--json"))
    offers = {one["value"]: (one["status"], one["reason"]) for one in found["choices"] if one["technique"] == "toy"}
    assert offers["on"] == ("offered", "64 MiB hang on the model")
    assert offers["packed"] == ("withheld", "toy-package is not installed: pip install toy-package")
    assert "toy-package" in found["missing"]


def test_it_is_traced_tried_and_checked_by_its_evidence(tuned):
    trials = json.loads((tuned / "autofit.json").read_text())["trials"]
    on, lie = (next(one for one in trials if one["plan"]["toy"] == value) for value in ("on", "lie"))
    assert on["outcome"]["kind"] == "measured"
    seen = on["outcome"]["evidence"]["techniques"]["toy"]
    assert (seen["bytes"], seen["hung"]) == (64 * MIB, 1)
    assert seen["passes"] > 0
    assert lie["outcome"] == {
        "kind": "unsupported",
        "reason": "toy=lie did not take effect: 0 bytes of the toy are there",
    }
    hangs = on["predicted_bytes"] - lie["predicted_bytes"]
    assert abs(hangs - 64 * MIB) < 4 * MIB
    assert on["outcome"]["peak_bytes"] > 64 * MIB


def test_it_is_emitted_and_told(tuned):
    document = json.loads((tuned / "autofit.json").read_text())
    assert document["plan"]["toy"] == "on"
    assert "A toy hangs on the model." in document["changes"]
    assert document["script"] == ["hang 64 MiB on the model: model = setup.model(...)"]
    assert json.loads((tuned / "training_args.json").read_text())["weight_decay"] == 0.25
    assert yaml.safe_load((tuned / "accelerate.yaml").read_text())["num_processes"] == 1
    page = (tuned / "report.html").read_text("utf-8")
    for words in ("What the toy weighs", "The toy weighs 64 MiB.", "A toy hangs on the model.", "toy=on"):
        assert words in page


def test_it_is_launched(site, tuned, command):
    """By ``accelerate launch``, in whose process the toy is seen in effect."""
    script, result = site / "autofit" / "commands" / "verify_script.py", site / "result.json"
    command(
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        tuned / "accelerate.yaml",
        script,
        tuned,
        result,
        "2",
    )
    outcome = json.loads(result.read_text())
    assert outcome["kind"] == "measured"
    assert outcome["evidence"]["techniques"]["toy"]["bytes"] == 64 * MIB


def test_the_copy_is_what_ran(site):
    """The toy is in the copy alone."""
    assert Path(autofit.__file__).parent != site / "autofit"
    assert "toy" not in {one.name for one in techniques()}
