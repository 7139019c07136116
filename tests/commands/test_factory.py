"""``package.module:factory``: a plain torch module tuned, run and verified; and what is told of a wrong one."""

from pathlib import Path

import pytest

from autofit.commands.request import Request
from autofit.commands.scripts.named import is_factory, named
from autofit.commands.scripts.request import check_same_training, script_facts
from autofit.costmodel.tracing.trace_store import script_of
from autofit.output.document import read_document
from autofit.registry import techniques
from autofit.system.errors import InputError
from tests.support.scripted import autofit

HERE = "tests.support.factories"
ROOT = Path(__file__).resolve().parents[2]


def test_a_factory_is_found_without_running_its_module(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nets.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "mine" / "__init__.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    found = named("mine.nets:make", ["--learning_rate", "0.1"])
    assert found.text == tmp_path / "mine" / "nets.py"
    assert found.arguments == ("mine.nets:make", str(tmp_path), "--learning_rate", "0.1")
    assert named("mine:make").text == tmp_path / "mine" / "__init__.py"
    with pytest.raises(InputError, match=r"no module 'mine\.others'"):
        named("mine.others:make")


@pytest.mark.parametrize("model", ["demo", "org/model", "C:\\model", "https://x.y:80/z", ":make", "nets:", "a b:c"])
def test_what_is_no_factory(model):
    assert not is_factory(model)


WRONG = {
    "fails": "failed (factories.py, line",
    "two": "returns a tuple of 2",
    "no_model": "returns a str for the model",
    "no_number": "is a tensor of the shape (2, 10)",
    "no_gradient": "has no gradient",
    "loss_fails": "KeyError: 'pictures'",
    "other_rows": "for 2 rows has 'images' of the shape (3, 3, 16, 16)",
    "no_batch": "is None",
    "no_rows": "has no rows",
    "no_weights": "has no parameters",
    "unused": "does not depend on a weight of the model",
    "nothing": "is None, and no function",
    "missing": "has no missing",
}


@pytest.fixture
def facts(server, tmp_path):
    def of(factory, *arguments):
        request = Request(model=f"{HERE}:{factory}", device="cpu", global_batch=None, arguments=arguments)
        return script_facts(tmp_path, request, "cpu", server, lambda _: None)

    return of


NETS = """
import torch
from layers import body
def make():
    model = torch.nn.Linear(4, 4)
    return model, lambda rows: {"x": torch.ones(rows, 4)}, lambda model, batch: body.step(model, **batch)
"""
STEP = """
def step(model, x):
    for _ in range(%d):
        x = model(x)
    return x.mean()
"""


@pytest.mark.slow
def test_a_module_that_the_factory_imports_is_part_of_what_was_tuned(server, tmp_path, monkeypatch):
    """Its traces are others, and trials of before and after are not compared."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "layers").mkdir()
    request, facts = Request(model="nets:make", device="cpu", global_batch=None), {}
    monkeypatch.chdir(tmp_path)
    for times in (1, 1, 30):
        (tmp_path / "layers" / "body.py").write_text(STEP % times)
        (out := tmp_path / f"out-{len(facts)}").mkdir()
        facts[out] = script_facts(out, request, "cpu", server, lambda _: None)
    first, again, changed = (script_of(one.workload.script) for one in facts.values())
    assert first == again != changed
    out, begun = next(iter(facts.items()))
    with pytest.raises(InputError, match=r"has changed since .* was begun: modules"):
        check_same_training(out, request, begun, server, lambda _: None)


@pytest.mark.parametrize("factory", WRONG)
def test_a_factory_that_is_wrong_is_told_in_one_line(facts, factory):
    with pytest.raises(InputError) as told:
        facts(factory)
    assert WRONG[factory] in told.value.message
    assert "\n" not in told.value.message
    assert told.value.hint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--max_steps", "x"),
            f"{HERE}:make ended before it trained (exit 2): {HERE}:make: error: argument --max_steps",
        ),
        (("--nonsense", "x"), f"{HERE}:make failed before it trained: ValueError: Some specified arguments"),
    ],
)
def test_wrong_flags_of_a_factory_are_told_by_its_name(facts, flags, words):
    with pytest.raises(InputError) as told:
        facts("make", *flags)
    assert told.value.message.startswith(words)


def test_what_is_known_of_a_plain_module(facts):
    found = facts("make", "--per_device_train_batch_size", "8")
    model, script = found.model, found.workload.script
    assert (model.architecture, model.plain_module, model.parameters) == ("Net", True, 20042)
    assert (script.micro_batch, script.accumulation, script.rows) == (8, 1, None)
    assert script.typed == (f"{HERE}:make", "--per_device_train_batch_size", "8")
    offered = {one.name: [c.value for c in one.choices(found) if c.status == "offered"] for one in techniques()}
    assert offered["attention"] == ["default"]
    assert offered["checkpointing"] == ["off"]
    assert "bf16_weights" not in offered["precision"]
    assert len(offered["optimizer"]) > 1


@pytest.mark.slow
def test_rows_of_a_data_set_and_norms_over_a_micro_batch(facts):
    assert facts("of_rows").workload.script.rows == 40
    assert "BatchNorm" in facts("with_norms").workload.script.depends_on_rows
    assert facts("looks_at_values").workload.script.batch["images"] == (32, 3, 16, 16)


@pytest.mark.slow
def test_a_plain_module_is_tuned_run_and_verified(tmp_path):
    answer = tmp_path / "answer"
    flags = ["--learning_rate", "0.01", "--report_to", "none", "--output_dir", tmp_path / "trained"]
    asked = [f"{HERE}:make", "--device", "cpu", "--global-batch", 16, "--trials", 3, "--output", answer]
    done = autofit(ROOT, "tune", *asked, "--", *flags)
    assert done.returncode == 0, done.stderr
    assert f"autofit run {answer} {HERE}:make -- --learning_rate 0.01" in " ".join(
        done.stdout.replace("\\\n", " ").split()
    )
    assert read_document(answer).promise.samples_per_second > 0
    ran = autofit(ROOT, "run", answer, f"{HERE}:make", "--", *flags, "--max_steps", 3)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    verified = autofit(ROOT, "verify", answer, "--tolerance", 0.95)
    assert verified.returncode == 0, verified.stderr  # the speed of a shared machine is no matter of this test
    assert "every knob took effect" in verified.stdout
