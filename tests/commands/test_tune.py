"""The whole story on a machine that is only played: each tune asks a real process for the facts of the demo model."""

import errno
import fcntl
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import autofit
from autofit import space
from autofit.commands.shell.explanations import no_winner
from autofit.commands.shell.terminal import data_console
from autofit.commands.tunes.backend import DeviceBackend
from autofit.commands.tunes.output_folder import remove_unstarted_output
from autofit.contract.outcome import Crashed, Diverged, TimedOut, Trial, Unsupported
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.costmodel.tracing.trace_store import TRACES
from autofit.output import text
from autofit.output.document import DOCUMENT_FILE, MODEL_FOLDER, REQUEST, Training
from autofit.output.emit import ARGUMENTS, REPORT, YAML
from autofit.output.reports.brief import brief
from autofit.output.reports.report import notebook, summary
from autofit.search import study
from autofit.search.journal import JOURNAL_FILE
from autofit.search.recordings.landscape import Landscape
from autofit.system.errors import InputError, Interrupted, MachineError, ModelError, NothingFits, Terminated
from autofit.system.files import machine_error
from tests.support.cases import slow_but, some_slow
from tests.support.replay import Played, Replay
from tests.support.synthetic import GIB, cpu_facts, measured, out_of_memory

FILES = [YAML, ARGUMENTS, REPORT, DOCUMENT_FILE]
PROMISED = {"fix": ["precision=fp32"], "memory_limit": "1GiB", "global_batch": 16, "seq_len": 32, "device": "cpu"}


@pytest.fixture
def tune(server, tmp_path):
    """``tune("demo")`` into one folder, with one server for all."""

    def run(runner, **options):
        return autofit.tune(
            **{"model": "demo", "output": tmp_path / "out", "backend": Played(server, runner), **PROMISED, **options}
        )

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def purposes(replay, wanted):
    return [plan for _, plan, purpose in replay.asked if purpose == wanted]


def test_the_winner_is_written(tune, out):
    replay = Replay(out)
    record = out.parent / "record.jsonl"
    result = tune(replay, trials=12, record=record)
    assert result.folder == out
    assert all((out / name).is_file() for name in FILES)
    assert autofit.load(out).document == result.document
    assert result.plan in purposes(replay, "final")
    assert result.plan["precision"] == "fp32"
    assert result.plan["micro_batch"] * result.plan["accumulation"] == 16
    assert result.promise.peak_bytes <= result.promise.limit_bytes == GIB
    assert len(result.document.trials) == len(replay.asked)
    assert [trial.number for trial in result.document.trials] == list(range(len(replay.asked)))
    best = min(replay.land.step_seconds(plan) for plan in purposes(replay, "search") if replay.land.fits(plan))
    assert replay.land.step_seconds(result.plan) <= 1.03 * best
    assert result.promise.step_seconds == pytest.approx(replay.land.step_seconds(result.plan), rel=0.05)
    recorded = Landscape.read(record)
    assert recorded.facts == replay.facts
    assert {plan: len(runs) for plan, runs in recorded.runs.items()} == Counter(plan for _, plan, _ in replay.asked)
    assert not [name for name in names(out) if name.endswith(".tmp") or name.startswith(".ask")]


def test_no_plan_is_searched_twice_and_finals_are_interleaved_and_whole(tune, out):
    replay = Replay(out, overhead_seconds=0.001, interaction=0.0)  # rows cost the same however they are split
    tune(replay, trials=10)
    searched, finals = purposes(replay, "search"), purposes(replay, "final")
    assert len(searched) <= 10
    assert len(set(searched)) == len(searched)
    assert set(finals) <= set(searched)
    count = next((place for place, plan in enumerate(finals) if plan in finals[:place]), 0)
    assert count > 1
    assert finals[count : 2 * count] == finals[:count], "A B C A B C"
    for (_, _, purpose), effort in zip(replay.asked, replay.efforts, strict=True):
        assert effort.fidelity == ("whole" if purpose == "final" else "parts")


def test_the_number_of_trials_is_an_upper_bound(tune, out):
    replay = Replay(out)
    tune(replay, trials=2)
    assert len(purposes(replay, "search")) == 2


def test_knobs_are_held(tune, out):
    replay = Replay(out)
    result = tune(
        replay,
        fix={"precision": "fp32", "optimizer": "sgd", "attention": "default"},
        among={"micro_batch": [2, 4], "checkpointing": ["full"]},
    )
    assert {plan["micro_batch"] for _, plan, _ in replay.asked} == {2, 4}
    assert {(plan["optimizer"], plan["checkpointing"]) for _, plan, _ in replay.asked} == {("sgd", "full")}
    assert any("SGD" in sentence for sentence in result.document.changes)
    assert "every plan" in " ".join(result.document.notes) or len(purposes(replay, "search")) == 2


@pytest.mark.slow
def test_the_same_seed_asks_the_same(tune, tmp_path):
    asked = []
    for name in ("one", "two"):
        replay = Replay(tmp_path / name)
        tune(replay, output=tmp_path / name, trials=6, seed=7, sampler="random")
        asked.append(purposes(replay, "search"))
    assert asked[0] == asked[1]


# --- resume ---------------------------------------------------------------------------------------------------------


def test_a_finished_tune_measures_nothing_again(tune, out):
    first = tune(Replay(out), trials=4)
    again = Replay(out)
    second = tune(again, trials=4, resume=True)
    assert again.asked == []
    assert (second.plan, second.promise) == (first.plan, first.promise)
    assert second.document.trials == first.document.trials


def test_more_trials_go_on_where_it_ended(tune, out):
    before = Replay(out)
    first = tune(before, trials=3)
    more = Replay(out)
    second = tune(more, trials=6, resume=True)
    assert 0 < len(purposes(more, "search")) <= 3
    assert not set(purposes(more, "search")) & set(purposes(before, "search"))
    assert second.document.trials[: len(first.document.trials)] == first.document.trials
    numbers = [trial.number for trial in second.document.trials]
    assert numbers == list(range(len(numbers)))


def test_a_trial_that_was_cut_off_is_run_again(tune, out):
    first = tune(Replay(out), trials=3)
    last = first.document.trials[-1]
    (out / "trials" / f"{last.number:05d}" / "trial.json").write_text('{"number": ')
    folder = out / "trials" / f"{last.number:05d}"
    folder.rename(out / "trials" / "torn")
    again = Replay(out)
    second = tune(again, trials=3, resume=True)
    assert [(plan, purpose) for _, plan, purpose in again.asked] == [(last.plan, last.purpose)]
    assert len(second.document.trials) == len(first.document.trials)


@pytest.mark.parametrize(
    ("change", "word"),
    slow_but(
        {"memory", "no length", "task"},
        {
            "memory": ({"memory_limit": "2GiB"}, 'begun with memory_limit="1GiB", this is with memory_limit="2GiB"'),
            "length": ({"seq_len": 64}, "begun with seq_len=32, this is with seq_len=64"),
            "no length": ({"seq_len": None}, "begun with seq_len=32, this is without seq_len"),
            "batch": ({"global_batch": 32}, "begun with global_batch=16, this is with global_batch=32"),
            "path": ({"launch_path": "loop"}, "begun with launch_path trainer, this is with launch_path loop"),
            "trust": ({"trust_remote_code": True}, "begun without trust_remote_code, this is with trust_remote_code"),
            "seed": ({"seed": 7}, "begun with seed=0, this is with seed=7"),
            "task": ({"task": "causal-lm"}, "begun without task, this is with task causal-lm"),
        },
    ),
)
def test_another_question_is_not_a_resumed_one(tune, out, change, word):
    tune(Replay(out), trials=1)
    before = {name: (out / name).read_bytes() for name in FILES}
    replay = Replay(out)
    with pytest.raises(InputError, match=word) as caught:
        tune(replay, resume=True, **change)
    assert "resume=True" in caught.value.hint
    assert replay.asked == []
    assert {name: (out / name).read_bytes() for name in FILES} == before


@pytest.mark.slow
def test_one_model_has_many_paths(tune, out, tmp_path, monkeypatch):
    """A folder, its config, and a copy elsewhere; what they hold says whether it is the same."""
    folder, copy = tmp_path / "llama", tmp_path / "copy.json"
    folder.mkdir()
    text = (Path(autofit.__file__).parent / "commands" / "demo.json").read_text("utf-8")
    (folder / "config.json").write_text(text, "utf-8")
    copy.write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    tune(Replay(out), model="llama", trials=1)
    for name in ("llama", "llama/config.json", str(folder), Path("copy.json")):
        replay = Replay(out)
        assert tune(replay, model=name, trials=1, resume=True).plan
        assert replay.asked == [], "nothing is measured again"
    changed = json.loads(text)
    changed["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(InputError, match="the config of 'llama' has changed since"):
        tune(Replay(out), model="llama", resume=True)
    with pytest.raises(InputError, match=r"the model 'llama', this is for the model 'llama/config\.json'"):
        tune(Replay(out), model="llama/config.json", resume=True)


def test_another_model_or_device_is_not_a_resumed_one(tune, out, tmp_path):
    tune(Replay(out), trials=1)
    with pytest.raises(InputError, match="begun for the model 'demo', this is for the model"):
        tune(Replay(out), model=str(tmp_path / "other"), resume=True)
    with pytest.raises(InputError, match="begun on cpu"):
        tune(Replay(out), device="cuda", resume=True)
    assert tune(Replay(out), device="auto", trials=1, resume=True).plan


@pytest.mark.parametrize("other", [{"name": "A slower one"}, {"threads": 77}])
def test_trials_of_two_machines_are_not_compared(tune, out, other):
    tune(Replay(out), trials=1)
    kept = json.loads((out / "request.json").read_bytes())
    kept["facts"]["hardware"] |= other
    (out / "request.json").write_text(json.dumps(kept))
    with pytest.raises(InputError, match=r"was begun on .*(A slower one|77 threads).*, and this is ") as caught:
        tune(Replay(out), trials=2, resume=True)
    assert "choose another" in caught.value.hint


def test_other_versions_are_not_compared(tune, out):
    tune(Replay(out), trials=1)
    path = out / REQUEST
    raw = json.loads(path.read_text())
    raw["facts"]["packages"]["torch"] = "1.0"
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="other versions of torch"):
        tune(Replay(out), resume=True)


def test_a_second_tune_does_not_overwrite_the_first(tune, out):
    tune(Replay(out), trials=1)
    before = {name: (out / name).read_bytes() for name in FILES}
    replay = Replay(out)
    with pytest.raises(InputError, match="holds a tune of 'demo' already") as caught:
        tune(replay)
    assert "resume=True" in caught.value.hint
    assert replay.asked == []
    assert {name: (out / name).read_bytes() for name in FILES} == before


def test_what_looks_half_written_in_a_folder_of_others_stays(tune, out):
    out.mkdir()
    (out / ".mine.tmp").write_text("precious")
    (out / ".ask-me").mkdir()
    tune(Replay(out), trials=1)
    assert (out / ".mine.tmp").read_text() == "precious"
    assert (out / ".ask-me").is_dir()


@pytest.mark.parametrize("name", ["model/weights.bin", "trials/mine.txt", "accelerate.yaml", "autofit.json"])
def test_what_others_have_written_is_not_touched(tune, out, name):
    """A project's own model folder is not the one that a tune makes, and takes away where it never began."""
    precious = out / name
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    for model in ("demo", "/no/such/model"):
        with pytest.raises(InputError, match=f"holds {name.partition('/')[0]}, which no tune wrote"):
            tune(Replay(out), model=model)
        assert precious.read_text() == "precious"
        assert names(out) == [name.partition("/")[0]]


@pytest.mark.parametrize(
    ("name", "link", "words"),
    [
        ("journal.log", None, "is a folder, and a file of that name"),
        ("journal.log.lock", None, "is a folder, and a file of that name"),
        ("journal.log", "/dev/zero", "is no file, and a file of that name"),  # which would be read without end
        ("report.html", None, "is a folder, and a file of that name"),
        ("trials", "/no/such/folder", "is a link to /no/such/folder, which is not there, and a folder of that name"),
    ],
)
def test_a_folder_where_a_file_is_to_be_written_is_told_before_anything_is_tried(tune, out, name, link, words):
    out.mkdir()
    (out / ".lock").write_text("")
    if link is None:
        (out / name).mkdir()
    else:
        (out / name).symlink_to(link)
    with pytest.raises(InputError, match=f"{name} {words}"):
        tune(Replay(out), trials=1, resume=True)
    assert names(out) == [".lock", name]


def test_a_folder_with_other_things_is_left_as_it_was_where_nothing_begins(tune, out):
    (out / "src").mkdir(parents=True)
    (out / "src" / "mine.py").write_text("precious")
    (out / ".lock").write_text("")  # another program's, or a tune's that was killed
    (out / "model").mkdir()
    (out / "model" / "weights.bin").write_text("precious")
    with pytest.raises(InputError, match="no file or folder"):
        tune(Replay(out), model="/no/such/model")
    assert names(out) == [".lock", "model", "src"]
    assert (out / "model" / "weights.bin").read_text() == "precious"


def test_two_tunes_do_not_write_one_folder(tune, out):
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match="another tune is writing"):
            tune(Replay(out), trials=1)
    assert tune(Replay(out), trials=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"request": {}}', "\x00"])
def test_a_torn_question_is_said_in_words(tune, out, text):
    out.mkdir()
    (out / REQUEST).write_text(text)
    with pytest.raises(InputError, match="can't be read"):
        tune(Replay(out), resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_trials_of_which_nobody_knows_what_they_were_for_are_not_gone_on_with(tune, out, resume):
    tune(Replay(out), trials=1)
    (out / REQUEST).unlink()
    (out / "autofit.json").unlink()
    with pytest.raises(InputError, match=r"holds trials but no request\.json"):
        tune(Replay(out), trials=1, seq_len=64, resume=resume)


def test_nothing_to_resume_is_a_new_tune(tune, out):
    result = tune(Replay(out), trials=1, resume=True)
    assert any("nothing to resume" in note for note in result.document.notes)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_nothing_fits_is_an_answer(tune, out):
    replay = Replay(out, row_bytes=300 * GIB)
    with pytest.raises(NothingFits) as caught:
        tune(replay, trials=5)
    said = caught.value.message
    assert caught.value.exit_code == 3
    assert "The tightest plan that was seen" in said
    assert "1.00 GiB" in said
    assert "memory_limit" in said
    assert "seq_len" in said
    assert 'allow="exact,numeric,method"' in said
    assert "--" not in said
    assert not (out / DOCUMENT_FILE).exists()
    assert not purposes(replay, "final")


def test_the_tightest_peak_that_was_seen_is_the_one_that_is_told(tune, out):
    replay = Replay(out)
    tune(replay, trials=1, output=out)
    held = [int(1.5 * GIB), int(1.25 * GIB), int(1.75 * GIB)]
    other = out.parent / "other"
    events = dict(enumerate(out_of_memory(replay.facts, peak, requested_bytes=None) for peak in held))
    with pytest.raises(NothingFits, match=r"held 1\.25 GiB"):
        tune(Replay(other, events), trials=3, output=other)


def test_ctrl_c_keeps_the_best_so_far_and_resume_completes(tune, out):
    broken = Replay(out, {3: KeyboardInterrupt()})
    with pytest.raises(Interrupted) as caught:
        tune(broken, trials=6)
    assert caught.value.exit_code == 130
    assert "resume=True" in caught.value.hint
    assert str(out) in caught.value.hint
    partial = autofit.load(out).document
    assert [trial.plan for trial in partial.trials] == [plan for _, plan, _ in broken.asked[:3]]
    assert any("stopped before its end" in note for note in partial.notes)
    rest = Replay(out)
    result = tune(rest, trials=6, resume=True)
    assert not set(purposes(rest, "search")) & {plan for _, plan, _ in broken.asked[:3]}
    assert len(purposes(rest, "search")) <= 3
    assert result.plan in purposes(rest, "final")
    assert not any("stopped before its end" in note for note in result.document.notes)


def test_ctrl_c_in_the_playoff_keeps_what_was_measured(tune, out):
    whole = Replay(out.parent / "whole")
    tune(whole, output=whole.folder, trials=3, sampler="grid")
    stop = [purpose for _, _, purpose in whole.asked].index("final") + 1
    broken = Replay(out, {stop: KeyboardInterrupt()})
    with pytest.raises(Interrupted):
        tune(broken, trials=3, sampler="grid")
    partial = autofit.load(out).document
    assert [(trial.number, trial.plan, trial.purpose) for trial in partial.trials] == whole.asked[:stop]
    rest = Replay(out)
    tune(rest, trials=3, sampler="grid", resume=True)
    assert rest.asked == whole.asked[stop:]


def test_ctrl_c_before_anything_was_measured_writes_nothing(tune, out):
    with pytest.raises(Interrupted) as caught:
        tune(Replay(out, {0: KeyboardInterrupt()}), trials=3)
    assert "no plan was measured" in caught.value.hint
    assert not (out / DOCUMENT_FILE).exists()
    assert tune(Replay(out), trials=1, resume=True).plan


def test_termination_is_told_from_ctrl_c(tune, out):
    with pytest.raises(Terminated) as caught:
        tune(Replay(out, {2: Terminated("stopped by SIGTERM")}), trials=6)
    assert caught.value.exit_code == 143
    assert autofit.load(out).plan


@pytest.mark.parametrize("error", [MachineError("the disk is full"), ZeroDivisionError("a bug")])
def test_what_stands_in_the_way_is_shown_and_the_folder_goes_on(tune, out, error):
    with pytest.raises(type(error), match=str(error)):
        tune(Replay(out, {2: error}), trials=4)
    rest = Replay(out)
    tune(rest, trials=4, resume=True)
    assert rest.asked[0][0] == 2


@pytest.mark.parametrize(
    "bad",
    some_slow(
        [
            {"fix": ["precision=zzz"]},
            {"fix": ["micro_batch=3"]},
            {"fix": ["offload=parameters"]},
            {"among": {"micro_batch": [5]}},
            {"fix": {"micro_batch": 4, "accumulation": 8}},
            {"memory_limit": "900TiB"},
            {"model": "/none/such"},
            {"storage": "nonsense://"},
        ],
        lambda bad: bad.keys() & {"among", "model", "storage"},
    ),
)
def test_bad_input_leaves_the_folder_usable(tune, out, bad):
    replay = Replay(out)
    with pytest.raises(InputError):
        tune(replay, **bad)
    assert replay.asked == []
    assert tune(replay, trials=1).plan == replay.asked[0][1]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": -4}, "global_batch=-4"),
        ({"global_batch": 10**12}, "out of range"),
        ({"trials": 0}, "trials=0"),
        ({"seq_len": 1}, "seq_len=1"),
        ({"seq_len": 10**12}, "out of range"),
        ({"memory_limit": "much"}, "not a memory limit"),
        ({"memory_limit": -1}, "not a memory limit"),
        ({"memory_limit": "0%"}, "not a share"),
        ({"timeout": "soon"}, "not a duration"),
        ({"sampler": "best"}, "sampler='best'"),
        ({"launch_path": "notebook"}, "launch_path='notebook'"),
        ({"allow": "everything"}, "is not a class"),
        ({"allow": ["exact", "magic"]}, "is not a class"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": None}, "device=None"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"seed": 2**32}, "seed=4294967296 is out of range"),
        ({"timeout": -3}, "timeout=-3 is out of range"),
        ({"timeout": float("nan")}, "timeout=nan is out of range"),
        ({"trials": "many"}, "trials='many': input should be a valid integer"),
        ({"trials": 2.5}, "trials=2.5"),
        ({"guard": "maybe"}, "guard is a str"),
        ({"timeout": [1]}, r"timeout \[1\]"),
        ({"allow": 3}, "'3' is not a class"),
        ({"fix": 3}, "fix=3"),
        ({"record": 3}, "record=3"),
        ({"tokens": "0"}, "tokens='0' is no number"),
        ({"price": "cheap"}, "price='cheap' is no price"),
        ({"price": -2.5}, "price='-2.5' is no price"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path, bad, words):
    with pytest.raises(InputError, match=words) as caught:
        autofit.tune(**{"model": "demo", "output": tmp_path / "out", **bad})
    assert caught.value.hint
    assert not any(path.is_file() and path.name != ".lock" for path in tmp_path.rglob("*"))


def test_one_value_need_not_be_a_list_and_numbers_may_be_words(tune, out):
    replay = Replay(out)
    tune(
        replay, trials="1", global_batch="16", allow="exact", fix="precision=fp32",
        among={"checkpointing": "full", "micro_batch": 2}, guard=False,
    )  # fmt: skip
    assert {(plan["checkpointing"], plan["micro_batch"]) for _, plan, _ in replay.asked} == {("full", 2)}


def test_a_refused_tune_leaves_no_folder_of_its_own(tune, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    for bad in ({"allow": ""}, {"fix": "precision=zzz"}, {"memory_limit": "900TiB"}):
        with pytest.raises(InputError):
            tune(Replay(tmp_path), **{"output": None, **bad})
    assert not list((tmp_path / "own").iterdir())


def test_a_tune_that_fails_leaves_what_stood_in_a_folder_that_is_named_by_a_new_one(tune, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    for output in (folder / "new" / "..", tmp_path / "new" / ".." / "mine"):
        with pytest.raises(InputError, match="precision"):
            tune(Replay(tmp_path), output=output, fix="precision=zzz")
        assert (folder / "thesis.tex").read_text() == "years of work"
    (folder / "report.html").write_text("mine")
    with pytest.raises(InputError, match=r"report\.html, which no tune wrote"):
        tune(Replay(tmp_path), output=tmp_path / "newer" / ".." / "mine")
    with pytest.raises(InputError, match=r"report\.html, which no estimate wrote"):
        autofit.estimate("demo", gpu="H100", output=tmp_path / "newer" / ".." / "mine")


def test_traces_that_no_cache_took_go_with_the_answer(tune, out):
    kept = out / TRACES / "one.npz"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(Interrupted):
        tune(Replay(out, {1: KeyboardInterrupt()}), trials=3)
    assert kept.exists()  # --resume goes on with them
    tune(Replay(out), trials=3, resume=True)
    assert not kept.parent.exists()


def test_what_a_failure_said_is_kept_where_the_folder_is_not(tmp_path):
    for name in ("forkserver.log", "failed-job.log", ".lock"):
        (tmp_path / name).write_text("said")
    remove_unstarted_output(tmp_path, whole=True, but=())
    assert [path.name for path in tmp_path.iterdir()] == ["failed-job.log"]


def test_hours_and_cost_are_told_where_they_are_asked_about(tune, out):
    asked = {"trials": 1, "tokens": "2e9"}
    found = tune(Replay(out), **asked)
    hours = 2e9 / found.promise.tokens_per_second / 3600
    assert found.document.training == Training(tokens=2e9, hours=pytest.approx(hours))
    again = tune(Replay(out), **asked, price="$2.5/h", resume=True).document
    assert again.training == Training(tokens=2e9, hours=found.document.training.hours, price=2.5, cost=hours * 2.5)
    said = (
        f"2B tokens take {text.number(hours)} hours at this speed, and cost {text.number(hours * 2.5)} at 2.500 an hour"
    )
    console = data_console(width=200)
    with console.capture() as captured:
        console.print(brief(again, folder=out), summary(again, folder=str(out)))
    for shown in (captured.get(), (out / "report.html").read_text("utf-8"), notebook(again, folder=str(out))):
        assert said in shown
    assert {"tokens": 2e9, "price": 2.5}.items() <= yaml.safe_load((out / "tune.yaml").read_text("utf-8")).items()
    assert tune(Replay(out), trials=1, resume=True).document.training is None


def test_hours_of_tokens_are_refused_where_the_samples_are_no_text(tune, out, monkeypatch):
    def without_text(self, *given):
        facts = DeviceBackend.facts(self, *given)
        return replace(facts, model=replace(facts.model, sample_tokens=0))

    monkeypatch.setattr(Played, "facts", without_text, raising=False)
    replay = Replay(out)
    with pytest.raises(InputError, match=r"tokens and price: .* is not trained on text"):
        tune(replay, price=1)
    assert replay.asked == []


def test_the_answer_is_told_in_a_line(tune, out):
    result = tune(Replay(out), trials=2)
    said = repr(result)
    assert said.startswith(f"Result({result.plan.words()}: ")
    assert f"{result.promise.samples_per_second:.4g} samples/s" in said
    assert said.endswith(f"in {str(out)!r})")
    assert "\n" not in said


def test_a_plan_that_fails_does_not_end_the_search(tune, out):
    failures = {0: Crashed(reason="boom", log_tail="tail"), 1: TimedOut(limit_seconds=1.0, phase="load")}
    replay = Replay(out, failures)
    result = tune(replay, trials=5)
    lost = {replay.asked[0][1], replay.asked[1][1]}
    assert result.plan not in lost
    assert [trial.outcome.kind for trial in result.document.trials[:2]] == ["crashed", "timed_out"]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Crashed(reason="RuntimeError: no such kernel", log_tail=""), "RuntimeError: no such kernel"),
        (Unsupported(reason="a package is missing"), "a package is missing"),
        (TimedOut(limit_seconds=1.0, phase="load"), "timed out"),
    ],
)
def test_where_every_plan_fails_the_failure_is_shown(tune, out, outcome, words):
    """It says nothing of what fits."""
    replay = Replay(out, dict.fromkeys(range(99), outcome))
    with pytest.raises(MachineError, match=words) as caught:
        tune(replay, trials=3)
    number, plan, _ = replay.asked[-1]
    assert plan.words() in caught.value.message or "every plan that was tried crashed alike" in caught.value.message
    assert f"{number:05d}" in caught.value.hint


def test_a_loss_that_is_never_finite_is_no_fault_of_the_machine(tune, out):
    with pytest.raises(InputError, match="every plan that was tried diverged: the loss was nan at step 0") as caught:
        tune(Replay(out, dict.fromkeys(range(99), Diverged(loss="nan", step=0))), trials=3)
    assert "its logs are in" in caught.value.hint


def test_a_file_that_a_script_misses_in_every_trial_is_told_as_what_saving_leaves_out(out):
    gone = Crashed(reason="FileNotFoundError: [Errno 2] No such file or directory: 'out/rank.json'", log_tail="")
    facts = cpu_facts(global_batch=4)
    plans = space.build(facts)
    trials = [Trial(number=0, plan=plans.plans[0], outcome=gone, wall_seconds=1.0)]
    script = Script(path="train.py", sha256="", trainer="", micro_batch=4, accumulation=1)
    scripted = replace(facts, workload=replace(facts.workload, script=script))
    for one, told in ((scripted, True), (facts, False)):
        hint = no_winner(trials, {}, one, plans, forecast=None, trials_folder=out).hint
        assert ("nothing is saved while a script is tuned" in hint) is told


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("RuntimeError: The size of tensor a (3) must match", InputError),
        ("RuntimeError: CUDA error: device-side assert triggered", MachineError),
        ("killed by SIGKILL after load", MachineError),
    ],
)
def test_what_a_script_raises_in_every_trial_is_the_scripts(out, reason, kind):
    facts = cpu_facts(global_batch=4)
    plans = space.build(facts)
    outcome = Crashed(reason=reason, log_tail="")
    trials = [Trial(number=0, plan=plans.plans[0], outcome=outcome, wall_seconds=1.0)]
    script = Script(path="train.py", sha256="", trainer="", micro_batch=4, accumulation=1)
    scripted = replace(facts, workload=replace(facts.workload, script=script))
    found = no_winner(trials, {}, scripted, plans, forecast=None, trials_folder=out)
    assert type(found) is kind
    assert "does the script train by itself" in found.hint
    assert type(no_winner(trials, {}, facts, plans, forecast=None, trials_folder=out)) is MachineError


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("its training ends after 0 optimizer steps, and the first 2 are not timed", InputError),
        ("a package is missing or broken: No module named 'galore'", MachineError),
    ],
)
def test_what_a_script_does_in_every_trial_so_that_none_is_measured_is_the_scripts(out, reason, kind):
    facts = cpu_facts(global_batch=4)
    plans = space.build(facts)
    trials = [Trial(number=0, plan=plans.plans[0], outcome=Unsupported(reason=reason), wall_seconds=1.0)]
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=1)
    scripted = replace(facts, workload=replace(facts.workload, script=script))
    found = no_winner(trials, {}, scripted, plans, forecast=None, trials_folder=out)
    assert type(found) is kind
    assert found.message == f"no plan could be measured: {reason}"


@pytest.mark.parametrize("trials", [1, 3])
def test_a_time_that_is_too_short_is_named(tune, out, trials):
    """What came, what was wanted, what to do; the logs alone would not tell."""
    late = TimedOut(limit_seconds=10.0, phase="load")
    with pytest.raises(MachineError) as caught:
        tune(Replay(out, dict.fromkeys(range(trials), late)), trials=trials, timeout=0.001)
    assert caught.value.message.startswith("timeout: 1 ms are spent, and no plan was measured: the only trial, ")
    assert caught.value.message.endswith(" was ended in load after 10.0 s")
    assert "longer timeout" in caught.value.hint
    assert "00000" in caught.value.hint


class Slow(Played):
    """Its time is over when it is asked for the facts, or for traces."""

    def __init__(self, server, given, *, knows):
        super().__init__(server, given)
        self.knows, self.left, self.used = knows, 0.0, None

    def _late(self, server):
        self.used, self.left, server.late = server, server.ends - time.monotonic(), True

    def facts(self, folder, request, device, server, note):
        if self.knows:
            return super().facts(folder, request, device, server, note)
        self._late(server)
        raise ModelError("it could not be built in a minute")

    def forecast(self, *given, server, **known):
        self._late(server)
        return super().forecast(*given, server=server, **known)


def test_where_the_question_is_not_known_in_time_the_time_is_named(tune, out, server):
    slow = Slow(server, Replay(out), knows=False)
    with pytest.raises(MachineError) as caught:
        tune(None, backend=slow, timeout=100)
    assert caught.value.message == "timeout: 1 min 40 s are spent, and what 'demo' trains is not known yet"
    assert 50 < slow.left <= 100
    assert not out.exists()


def test_traces_have_half_of_the_time_and_trials_tell_the_rest(tune, out, server):
    slow = Slow(server, Replay(out), knows=True)
    assert tune(None, backend=slow, trials=2, timeout=100).plan
    assert 0 < slow.left <= 50
    assert (slow.used.ends, slow.used.late) == (math.inf, False)


def test_where_nothing_fits_in_a_short_time_the_time_is_named(tune, out):
    with pytest.raises(NothingFits) as caught:
        tune(Replay(out, {0: out_of_memory(cpu_facts())}), timeout=0.001)
    assert caught.value.hint.startswith("the search ended after 1 of ")
    assert "by timeout (1 ms)" in caught.value.hint


def test_one_plan_is_tried_however_short_the_time(tune, out):
    replay = Replay(out)
    result = tune(replay, timeout=0.001)
    assert len(replay.asked) == 1
    assert result.plan == replay.asked[0][1]
    assert any("the time is spent" in note for note in result.document.notes)


def test_events_are_told_in_order(tune, out):
    told = []

    class Teller:
        def __getattr__(self, name):
            return lambda *arguments: told.append((name, arguments))

    replay = Replay(out)
    tune(replay, trials=2, events=Teller())
    kinds = [name for name, _ in told if name != "note"]
    assert kinds == ["ready", *(["trial_begins", "trial_ends"] * len(replay.asked)), "close"]
    begun = [arguments for name, arguments in told if name == "trial_begins"]
    assert [(number, plan, purpose) for number, plan, purpose, _ in begun] == replay.asked


def test_the_answer_of_python_is_that_of_the_files(tune, out, tmp_path):
    result = tune(Replay(out), trials=2)
    target = result.save(tmp_path / "kept")
    assert names(target) == sorted([*FILES, MODEL_FOLDER])
    args = result.training_arguments(output_dir=str(tmp_path / "run"), report_to="none")
    assert args.per_device_train_batch_size == result.plan["micro_batch"]
    assert args.gradient_accumulation_steps == result.plan["accumulation"]


def test_a_plan_that_broke_the_ceiling_once_does_not_win(tune, out):
    """The fastest of the search runs out of memory in the playoff."""
    probe = Replay(out)
    tune(probe, trials=6, sampler="grid")
    fastest = next(plan for _, plan, purpose in probe.asked if purpose == "final")
    first = [purpose for _, _, purpose in probe.asked].index("final")
    other = out.parent / "other"
    result = tune(Replay(other, {first: out_of_memory(probe.facts)}), trials=6, sampler="grid", output=other)
    assert result.plan != fastest
    assert fastest.words() in result.document.reason


def test_a_lucky_trial_does_not_keep_the_others_out_of_the_playoff(tune, out):
    probe = Replay(out)
    honest = tune(probe, trials=6, sampler="grid")
    slowest = max(range(6), key=lambda n: honest.document.trials[n].outcome.step_seconds)
    lucky = measured((0.001, 0.001, 0.001), GIB // 8, probe.facts)
    other = Replay(out.parent / "other", {slowest: lucky})
    result = tune(other, trials=6, sampler="grid", output=out.parent / "other")
    finals = [plan for _, plan, purpose in other.asked if purpose == "final"]
    assert finals[0] == honest.document.trials[slowest].plan
    assert honest.plan in finals
    assert result.plan == honest.plan


def test_no_number_is_used_twice(tune, out):
    replay = Replay(out, {1: KeyboardInterrupt()})
    with pytest.raises(Interrupted):
        tune(replay, trials=3)
    more = Replay(out)
    tune(more, trials=3, resume=True)
    numbers = [number for number, _, _ in itertools.chain(replay.asked[:1], more.asked)]
    assert numbers == sorted(set(numbers))


def test_the_facts_are_read_once(tune, out):
    first = Replay(out)
    tune(first, trials=1)
    facts = first.facts
    assert facts.model.name == "demo"
    assert facts.model.parameters > 1_000_000
    assert facts.workload.limit_bytes == GIB
    raw = json.loads((out / REQUEST).read_text())
    raw["facts"]["hardware"]["host_free_bytes"] = 7 * GIB
    (out / REQUEST).write_text(json.dumps(raw))
    result = tune(Replay(out), trials=1, resume=True)
    assert result.document.hardware == replace(facts.hardware, host_free_bytes=7 * GIB)
    assert isinstance(result.plan, Plan)


class Crowded(Replay):
    """A machine where somebody else computes during some of the calls, and the steps crawl."""

    def __init__(self, folder, crowded):
        super().__init__(folder)
        self.crowded = crowded

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        call = len(self.asked)
        trial = super().run(number, plan, effort, purpose=purpose, limit_seconds=limit_seconds)
        if call in self.crowded and trial.outcome.kind == "measured":
            slow = {
                "step_seconds": 20 * trial.outcome.step_seconds,
                "samples_per_second": trial.outcome.samples_per_second / 20,
                "steps": tuple(20 * step for step in trial.outcome.steps),
                "disturbance": 0.5,
            }
            object.__setattr__(trial, "outcome", replace(trial.outcome, **slow))
        return trial


def test_what_was_measured_beside_a_busy_neighbour_is_measured_once_more(tune, out):
    quiet = tune(Replay(out.parent / "quiet"), output=out.parent / "quiet", trials=6)
    replay = Crowded(out, crowded={0, 3, 9})
    crowded = tune(replay, trials=6)
    searched = purposes(replay, "search")
    repeated = [plan for plan, next_plan in itertools.pairwise(searched) if plan == next_plan]
    assert repeated, "a disturbed trial is repeated at once"
    assert all(searched.count(plan) <= 2 for plan in searched)
    assert len(set(searched)) <= 6
    assert crowded.plan == quiet.plan
    assert crowded.promise.step_seconds < 2 * quiet.promise.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Terminated("stopped by SIGTERM")])
def test_a_repeat_that_was_stopped_is_made_by_resume(tune, out, stop):
    quiet_folder = out.parent / "quiet"
    quiet = Replay(quiet_folder)
    tune(quiet, output=quiet_folder, trials=6)
    slow = replace(measured((50.0, 50.0, 50.0), GIB // 2, quiet.facts), disturbance=0.5)
    first = Replay(out, {2: slow, 3: stop})
    with pytest.raises((Interrupted, Terminated)):
        tune(first, trials=6)
    stopped_again = Replay(out, {0: stop})
    with pytest.raises((Interrupted, Terminated)):
        tune(stopped_again, trials=6, resume=True)
    second = Replay(out)
    result = tune(second, trials=6, resume=True)
    assert [plan for _, plan, _ in stopped_again.asked] == [first.asked[2][1]]
    assert second.asked[0][1:] == first.asked[2][1:], "the repeat comes first"
    searched = purposes(first, "search")[:3] + purposes(second, "search")[1:]
    assert searched[:3] == purposes(quiet, "search")[:3]
    assert len(set(searched)) == len(searched) == len(purposes(quiet, "search")), "each plan is searched once"
    assert "other processes used up to 50% of the CPU during trial 2: measured again" in result.document.notes
    told = [trial.user_attrs["number"] for trial in study_of(out).trials if "number" in trial.user_attrs]
    assert sorted(told) == sorted({0, 1} | {number for number, _, purpose in second.asked if purpose == "search"})
    after = Replay(out)
    tune(after, trials=6, resume=True)
    assert not purposes(after, "search"), "what was measured once more is not repeated for ever"
    assert not list(out.glob("journal.log.broken-*"))


@pytest.mark.slow
def test_what_a_tune_cost_is_told_over_all_of_its_sessions(tune, out):
    with pytest.raises(Interrupted):
        tune(Replay(out, {3: KeyboardInterrupt()}), trials=6)
    for number in range(3):
        path = out / "trials" / f"{number:05d}" / "trial.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "wall_seconds": 1000.0}))
    result = tune(Replay(out), trials=6, resume=True)
    assert 3000 < result.document.seconds < 3000 + 600
    told = out / "autofit.json"  # which knows of the time between trials, too
    told.write_text(json.dumps({**json.loads(told.read_text()), "seconds": 5000.0}))
    again = tune(Replay(out), trials=7, resume=True)
    assert 5000 < again.document.seconds < 5000 + 600


def study_of(folder):
    return optuna.load_study(
        study_name=study.STUDY, storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE)))
    )


def test_what_a_killed_tune_has_left_half_written_is_swept(tune, out):
    tune(Replay(out), trials=1)
    (out / ".ask-abc").mkdir()
    (out / ".emitting").mkdir()
    (out / ".autofit.json.77.tmp").write_text("half")
    (out / "trials" / "00000" / ".trial.json.77.tmp").write_text("half")
    tune(Replay(out), trials=1, resume=True)
    left = [
        path.name for path in out.rglob("*") if path.name.startswith((".ask", ".emitting")) or path.suffix == ".tmp"
    ]
    assert left == []


def test_what_can_not_be_written_says_that_resume_goes_on(tune, out):
    replay = Replay(out, {2: machine_error(OSError(errno.ENOSPC, ""), out / "trials")})
    with pytest.raises(MachineError, match="the disk is full") as caught:
        tune(replay, trials=6)
    assert caught.value.hint.startswith("free some space and try again; the best so far: ")
    assert caught.value.hint.endswith("; resume=True goes on with what was measured")


def test_the_best_so_far_is_said_where_the_machine_stands_in_the_way(tune, out):
    replay = Replay(out, {3: MachineError("the disk is full", hint="free some space")})
    with pytest.raises(MachineError, match="the disk is full") as caught:
        tune(replay, trials=6)
    hint, _, best = caught.value.hint.partition("; the best so far: ")
    assert hint == "free some space"
    assert best in {plan.words() for _, plan, _ in replay.asked[:3]}
