"""The versions that this one is made for."""

from dataclasses import replace

import pytest

from autofit.commands.facts import remarks
from autofit.commands.scripts.request import script_notes
from autofit.contract.script import Script
from autofit.machine.packages import SUPPORTED, installed, unsupported
from tests.support.synthetic import cpu_facts
from tests.support.tiny import REPOSITORY


def test_what_is_installed_is_among_them():
    assert unsupported(installed()) == []


@pytest.mark.parametrize(
    ("version", "among"),
    [("5.17.0", True), ("5.24.3", True), ("5.16.2", False), ("5.25.0.dev0", False), ("6.0", False)],
)
def test_another_version_is_told(version, among):
    said = unsupported({"torch": "2.13.0+cpu", "transformers": version})
    assert [words.partition(":")[0] for words in said] == [
        f"transformers {version} is none of the versions that this one is made for, 5.17 to 5.24"
    ] * (not among)


def test_the_readme_says_the_same():
    text = " ".join((REPOSITORY / "README.md").read_text("utf-8").split())
    for name, (first, last) in SUPPORTED.items():
        assert f"{name} {first} to {last}" in text


def test_those_who_tune_models_and_scripts_are_told(monkeypatch):
    other = {"torch": "3.0"}
    monkeypatch.setattr("autofit.commands.facts.installed", lambda: other)
    facts = cpu_facts()
    (told,) = unsupported(other)
    assert remarks(facts.workload.seq_len, facts.model, "cpu")[0] == told
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2)
    assert script_notes(replace(cpu_facts(script=script), packages=other))[0] == told
