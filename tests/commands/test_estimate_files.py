"""The files of an estimate: those of a tune, marked as estimated wherever they are read."""

import io
import json

import pytest
from rich.console import Console

import autofit
from autofit.commands import launching, verify
from autofit.commands.estimates import estimate
from autofit.commands.estimates.files import estimate_folder
from autofit.contract.facts import Hardware
from autofit.contract.outcome import TimedOut
from autofit.machine import same_machine
from autofit.output.document import read_document
from autofit.output.emit import check_files
from autofit.output.exports.export import comments, export
from autofit.output.reports import report
from autofit.output.reports.compare import comparison
from autofit.output.wording import ESTIMATED, estimate_words
from autofit.system.errors import EmissionError, InputError, MachineError
from tests.support.replay import Lent

QUESTION = {
    "seq_len": 32,
    "global_batch": 8,
    "fix": [
        "precision=bf16", "optimizer=adamw", "offload=none", "kernels=none", "attention=default", "compile=off",
        "checkpointing=off",
    ],
}  # fmt: skip


def shown(body):
    console = Console(file=io.StringIO(), width=80)
    console.print(body)
    return " ".join(console.file.getvalue().split())


def estimated(folder, server, monkeypatch, **options):
    monkeypatch.setattr(estimate, "ForkServer", lambda *_, **__: Lent(server))
    return estimate.estimate("demo", gpu="RTX 4090", output=folder, **QUESTION, **options)


@pytest.mark.slow
def test_an_estimate_writes_what_a_tune_writes_and_says_everywhere_that_it_is_one(server, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    found = estimated(folder, server, monkeypatch)
    assert found.folder == str(folder)
    written = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert written == {"accelerate.yaml", "training_args.json", "autofit.json", "report.html", "model"}
    document = read_document(folder)
    best = next(one for one in found.plans if one.plan == found.recommended)
    assert document.plan == best.plan
    assert document.promise.samples_per_second == best.samples_per_second
    assert document.promise.peak_bytes == best.device_bytes
    assert document.promise.allocated_bytes <= document.promise.reserved_bytes
    assert 0 < document.estimated.low < 1 < document.estimated.high
    assert best.slow_host > 1, "so small a step waits for its host"
    assert document.estimated.low * document.estimated.high == pytest.approx(1 / best.slow_host)
    arguments = json.loads((folder / "training_args.json").read_text("utf-8"))
    assert arguments["bf16"]
    assert arguments["per_device_train_batch_size"] == best.plan["micro_batch"]
    assert arguments["per_device_eval_batch_size"] == best.training_args["per_device_eval_batch_size"]
    assert arguments["per_device_eval_batch_size"] >= document.workload.evaluated_rows == best.evaluated_rows

    page = (folder / "report.html").read_text("utf-8")
    assert ESTIMATED in page
    assert estimate_words(document) in page
    assert "The promise holds" not in page
    assert "The trials" not in page
    assert "Estimated, not measured" in shown(report.summary(document, folder=folder))
    assert ESTIMATED in report.notebook(document, folder="out")
    assert ESTIMATED in shown(comparison({"one": document, "two": document}))
    assert "the plan is estimated for RTX 4090" in comments(export(document, "python", folder=folder), "python")
    with pytest.warns(UserWarning, match="is estimated for RTX 4090, not measured") as warned:
        setup = autofit.load(folder)
    assert len(warned) == 1
    with pytest.raises(MachineError, match="is for cuda"):
        setup.check()
    (folder / "training_args.json").write_text(json.dumps({**arguments, "bf16": False, "tf32": True}))
    with pytest.warns(UserWarning, match="not measured"):
        check_files(folder)  # what only the card can do is no reason to refuse the files here
    (folder / "training_args.json").write_text(json.dumps({**arguments, "optimus": "prime"}))
    with pytest.raises(EmissionError, match="optimus"):
        check_files(folder)

    monkeypatch.setattr(launching, "launch_here", lambda *_: ((), TimedOut(limit_seconds=1, phase="launch")))
    launched = verify.verify(folder)
    assert launched.estimated
    assert launched.tolerance == pytest.approx(1 - document.estimated.low)

    estimated(folder, server, monkeypatch)  # a second one takes its place
    folder.joinpath("request.json").write_text("{}")
    with pytest.raises(InputError, match="holds a tune"):
        estimated(folder, server, monkeypatch)


def test_what_waits_on_the_host_is_told_in_the_files(server, tmp_path, monkeypatch):
    waiting = [text.replace("offload=none", "offload=optimizer") for text in QUESTION["fix"]]
    monkeypatch.setitem(QUESTION, "fix", waiting)
    estimated(tmp_path / "out", server, monkeypatch, among=["micro_batch=8"])
    said = read_document(tmp_path / "out").notes
    assert any("wait on the host for each process: so much of its memory is to be free" in words for words in said)


def test_no_file_is_written_where_the_speed_is_not_known_or_another_wrote(tmp_path):
    with pytest.raises(InputError, match="how fast this device is"):
        autofit.estimate("demo", memory="24GiB", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(InputError, match=r"report\.html, which no estimate wrote"):
        autofit.estimate("demo", gpu="H100", output=tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_an_estimate_that_fails_leaves_nothing_that_the_next_one_is_refused_for(tmp_path):

    def fail(name: str) -> None:
        with estimate_folder(tmp_path) as folder:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text("{}")
            (folder / "accelerate.yaml").write_text("")
            raise MachineError("the disk is full", hint="")

    for name in ("model", ".emitting"):
        with pytest.raises(MachineError):
            fail(name)
        assert {path.name for path in tmp_path.iterdir()} <= {".estimate.lock"}
    (tmp_path / "mine.txt").write_text("")
    with estimate_folder(tmp_path) as folder:
        (folder / "autofit.json").write_text("{}")
        (folder / "model").mkdir()
    assert {"mine.txt", "autofit.json", "model"} <= {path.name for path in tmp_path.iterdir()}


def test_a_card_is_known_by_its_name_in_the_catalogue(tmp_path, monkeypatch):
    class Card:
        name = "NVIDIA GeForce RTX 4090"
        total_memory = 25_757_220_864

    wanted = Hardware(
        device="cuda",
        name="RTX 4090",
        total_bytes=25_300_000_000,
        free_bytes=1,
        host_total_bytes=1,
        host_free_bytes=1,
        precisions=("fp32",),
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Card)
    monkeypatch.setattr("accelerate.PartialState._shared_state", {})
    same_machine._check_device(wanted, tmp_path, any_hardware=False)
    Card.name = "NVIDIA GeForce RTX 3090"
    with pytest.raises(MachineError, match="any_hardware=True"):
        same_machine._check_device(wanted, tmp_path, any_hardware=False)
