"""``autofit.profile``: steps of an answer's plan under the profiler, on this machine's CPU."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import autofit
from autofit.commands.model_source import fetch
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, MODEL_FOLDER
from autofit.system.errors import InputError
from autofit.system.strict_json import dump_json
from tests.output.test_report import CPU
from tests.output.test_report import document as a_document


@pytest.fixture
def answer(tmp_path):
    """Writes an answer of a tune of the demo model whose plan has some values; gives its folder."""
    base = a_document(hardware=CPU)

    def write(name, **values):
        folder = tmp_path / name
        folder.mkdir()
        fetch("demo", folder / MODEL_FOLDER, trust_remote_code=False)
        work = replace(base.workload, global_batch=4, seq_len=32, limit_bytes=8 << 30, host_limit_bytes=8 << 30)
        config = json.loads((folder / MODEL_FOLDER / "config.json").read_text("utf-8"))
        model = replace(base.model, vocab_size=config["vocab_size"])
        plan = base.plan.replaced(micro_batch=4, accumulation=1, **values)
        found = replace(base, model=model, plan=plan, workload=work, trials=(), front=(), contributions=())
        (folder / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, found))
        return folder

    return write


def calls(found, kind):
    return next(row.calls for row in found.breakdown.rows if row.kind == kind)


@pytest.mark.slow
def test_checkpointing_is_seen_as_more_products(answer):
    plain = autofit.profile(answer("plain", checkpointing="off"), steps=1)
    again = autofit.profile(answer("again", checkpointing="full"), steps=1)
    assert calls(again, "products") > calls(plain, "products")
    assert calls(again, "optimizer") == calls(plain, "optimizer")
    assert sum(row.seconds for row in plain.breakdown.rows) == pytest.approx(plain.breakdown.step_seconds)
    with gzip.open(plain.trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(one["name"] == "aten::mm" for one in events)
    assert any(one["ph"] == "C" for one in events)
    line = json.loads(Path(plain.memory).read_text("utf-8"))["points"]
    assert max(held for _, held in line) > 0


@pytest.mark.slow
def test_files_that_say_otherwise_than_the_plan_are_told(answer):
    folder = answer("edited")
    (folder / "training_args.json").write_text('{"per_device_train_batch_size": 77}')
    said = []
    found = autofit.profile(folder, steps=1, say=said.append)
    (words,) = (one for one in found.notes if "training_args.json" in one)
    assert "per_device_train_batch_size is 77, not 4; without " in words
    assert words.endswith("more; the plan is profiled")
    assert words in said


def test_what_is_no_answer_is_refused_in_a_line(answer, tmp_path):
    with pytest.raises(InputError, match=r"holds no autofit\.json"):
        autofit.profile(tmp_path)
    with pytest.raises(InputError, match=r"^steps=0 is out of range"):
        autofit.profile(tmp_path, steps=0)
    folder = answer("without_model")
    (folder / MODEL_FOLDER / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds no model/config\.json"):
        autofit.profile(folder)
