"""Input that nobody means, and machines that others use too: refused or told in words, with nothing run or let in."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit import space
from autofit.commands import model_source, tune
from autofit.commands.estimates import estimate
from autofit.commands.tunes import backend
from autofit.machine import meters, other_processes, select
from autofit.output import wording
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, read_document
from autofit.system import locks, strict_json, units
from autofit.system.errors import InputError, MachineError, ModelError, NothingFits
from autofit.system.redact import HIDDEN, harmless, redacted
from autofit.system.strict_json import dump_json
from autofit.training import launch_environment
from tests.commands.test_model_source import CODE, OWN_CODE, Hub, address, config_in
from tests.output.test_report import document as a_document
from tests.support.replay import Lent
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import GIB, LLAMA, MIB, TESTS, write_config

# --- sizes of another world -----------------------------------------------------------------------------------------

SIMPLE = ("precision=fp32", "kernels=none", "checkpointing=off", "optimizer=adamw", "micro_batch=1", "attention=eager")
BEYOND = {
    "a petabyte of layers": {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 48},
    "more words than addresses": {"vocab_size": 2**45},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, id=name, marks=[pytest.mark.by_hand] * ("layers" in name)) for name, sizes in BEYOND.items()],
)
def test_a_model_of_petabytes_is_told_by_its_trace(tmp_path, server, monkeypatch, sizes):
    for module in (estimate, backend):
        monkeypatch.setattr(module, "ForkServer", lambda *_, **__: Lent(server))
    config = write_config(tmp_path / "model", {**LLAMA, **sizes})
    found = estimate.estimate(str(config), memory="80GiB", fix=SIMPLE, seq_len=16, global_batch=4)
    assert {one.verdict for one in found.plans} == {"too large"}
    assert min(one.device_bytes for one in found.plans) > 2**50
    with pytest.raises(NothingFits, match="by what the plans' traces say: the smallest needs about"):
        tune.tune(str(config), output=tmp_path / "out", device="cpu", fix=SIMPLE, seq_len=16, global_batch=4)
    assert not (tmp_path / "out" / "trials").exists()


def test_sizes_that_no_tensor_can_have_are_a_model_error(tmp_path, server, monkeypatch):
    monkeypatch.setattr(estimate, "ForkServer", lambda *_, **__: Lent(server))
    for sizes in ({"hidden_size": 2**40}, {"hidden_size": -8}, {"num_attention_heads": 0}, {"vocab_size": "many"}):
        config = write_config(tmp_path / "model", {**LLAMA, **sizes})
        with pytest.raises(ModelError, match="no model can be built from the config"):
            estimate.estimate(str(config), memory="80GiB")


def test_a_package_that_the_models_code_needs_is_named(tmp_path, server, monkeypatch):
    monkeypatch.setattr(estimate, "ForkServer", lambda *_, **__: Lent(server))
    folder = config_in(tmp_path / "model", {**LLAMA, "auto_map": OWN_CODE["auto_map"]})
    (folder / "modeling.py").write_text("import package_of_nobody", "utf-8")
    with pytest.raises(ModelError, match=r"no model can be built from the config .*package_of_nobody") as caught:
        estimate.estimate(str(folder), memory="80GiB", trust_remote_code=True)
    assert caught.value.hint == "install what it names where autofit is installed"


def test_a_process_can_be_kept_from_filling_the_host():
    before = meters.resource.getrlimit(meters.resource.RLIMIT_DATA)
    with meters.guarded(64 * MIB), pytest.raises(MemoryError):
        bytearray(GIB)
    assert meters.resource.getrlimit(meters.resource.RLIMIT_DATA) == before
    assert len(bytearray(GIB)) == GIB


# --- code of the model's own ----------------------------------------------------------------------------------------


def test_code_that_runs_is_said_aloud(tmp_path):
    folder = config_in(tmp_path / "model", {**OWN_CODE, "auto_map": {"AutoConfig": "other/place--configs.Mine"}})
    (folder / "modeling.py").write_text(CODE)
    into = model_source.fetch(str(folder), tmp_path / "into", trust_remote_code=True)
    words = model_source.own_code(into, trusted=True)
    assert "--trust-remote-code" in words
    assert "modeling.py (sha256 " in words
    assert "fetched from other/place" in words
    assert "is not used" in model_source.own_code(
        config_in(tmp_path / "known", {**LLAMA, "auto_map": {"A": "b.C"}}), trusted=False
    )
    assert model_source.own_code(config_in(tmp_path / "plain", LLAMA), trusted=True) is None


# --- any words, any bytes -------------------------------------------------------------------------------------------


@settings(deadline=1000, max_examples=300)
@given(st.text(max_size=40) | st.from_regex(r"[0-9.]{1,20} ?[kKmMgGtT%]?[iI]?[bB]?", fullmatch=True))
def test_any_text_is_a_number_or_refused(text):
    for parse in (units.parse_size, units.parse_duration, lambda text: units.parse_limit(text, 2**40)):
        try:
            found = parse(text)
        except InputError as error:
            refused = error
        else:
            assert found >= 0
            continue
        assert refused.hint


@settings(deadline=1000, max_examples=300)
@given(st.text(max_size=60), st.sampled_from(["adapter=", "adapter=lora:r=", "micro_batch=", "precision="]))
def test_any_assignment_is_a_knob_or_refused(text, before):
    for given_words in (text, before + text):
        try:
            found = space.parse_knobs([given_words], [], cuda_facts())
        except InputError as error:
            refused = error
        else:
            assert all(values for values in found.values())
            continue
        assert refused.hint


@settings(deadline=1000, max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_strict_json_is_json_or_a_value_error(data):
    try:
        value = strict_json.loads(data)
    except ValueError:
        return
    json.dumps(value, allow_nan=False)


def program(name):
    """A program of tests/bench as a module."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", TESTS / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_fuzzer_finds_nothing():
    said = []
    found = program("fuzz").fuzz(1500, seed=20261121, say=said.append)
    assert found["inputs"] >= 1500
    assert not found["broken"], "\n".join(said)


def test_the_fuzzer_would_find_something():
    fuzz = program("fuzz")
    fuzz.HANGS_SECONDS, fuzz.SLEEPS_SECONDS = 0.05, 0.1
    bug = fuzz.Target(make=None, give=lambda given: 1 / given)
    slow = fuzz.Target(make=None, give=lambda _: threading.Event().wait(5))
    refused = fuzz.Target(make=None, give=units.parse_size)
    assert fuzz.outcome_of(bug, 0)[0] == "traceback: ZeroDivisionError"
    busy = fuzz.Target(make=None, give=lambda _: [one for one in itertools.count() if one < 0])
    assert fuzz.outcome_of(slow, 0)[0] == "hang"
    assert fuzz.outcome_of(busy, 0)[0] == "hang"
    assert fuzz.outcome_of(refused, "x") == ("InputError", "")


# --- edited by hand -------------------------------------------------------------------------------------------------

EDITS = {
    "nan": (lambda raw: raw["promise"].update(samples_per_second=float("nan")), "NaN is no JSON number"),
    "infinite": (lambda raw: raw.update(seconds=1e308 * 10), "no JSON number"),
    "a text for a number": (lambda raw: raw.update(seconds="nan"), "seconds"),
    "no speed": (lambda raw: raw["promise"].update(samples_per_second=0.0), "speed or a ceiling of nothing"),
    "no ceiling": (lambda raw: raw["promise"].update(limit_bytes=0), "speed or a ceiling of nothing"),
    "another batch": (lambda raw: raw["plan"].update(micro_batch=3), "does not make the global batch of 32"),
    "no micro-batch": (lambda raw: raw["plan"].pop("micro_batch"), "does not make the global batch"),
    "a text as a batch": (lambda raw: raw["trials"][0]["plan"].update(micro_batch="8"), "does not make"),
}


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_a_document_that_no_tune_has_written(tmp_path, edit, words):
    raw = json.loads(dump_json(DOCUMENT, a_document()))
    edit(raw)
    (tmp_path / DOCUMENT_FILE).write_text(json.dumps(raw))
    with pytest.raises(InputError, match=words) as caught:
        read_document(tmp_path)
    assert caught.value.hint


# --- what is written ------------------------------------------------------------------------------------------------

NAMES = [
    "with space",
    "it's",
    'a "quote"',
    "new\nline",
    "$(reboot)",
    "`id`",
    "; rm -rf ~",
    "-rf",
    "ünï 模型",
    "a/../b",
    "*",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_is_shown_takes_the_name_as_one_word(name):
    for words in wording.launch_commands(a_document(), name):
        lines = "\n".join(wording.shell_lines(words))
        said = subprocess.run(
            ["bash", "-c", f"echo_all() {{ printf '%s\\0' \"$@\"; }}; echo_all {lines}"],
            capture_output=True,
            check=True,
        )
        assert said.stdout.decode().split("\0")[:-1] == words
        assert any(name in word for word in words)
        assert not any(word.startswith("-") for word in words if name in word)


@pytest.mark.parametrize(
    "text", [*NAMES, "!!python/object/apply:os.system [id]", "&a *a", "yes", "null", "1e3", "\u0085", "x: y"]
)
def test_a_yaml_holds_text_as_text(tmp_path, text):
    settings_ = {"machine": text, "deep": {text: text}}
    launch_environment.write_yaml(tmp_path / "a.yaml", settings_)
    assert yaml.safe_load((tmp_path / "a.yaml").read_text("utf-8")) == settings_
    assert "!!" not in (tmp_path / "a.yaml").read_text("utf-8").replace(text, "")


# --- nobody let in: a whole tune, watched ---------------------------------------------------------------------------

WATCH = """
import json, os, sys, traceback
def watch(event, given):
    if event not in {"socket.connect", "socket.getaddrinfo", "pickle.find_class"}:
        return
    if event == "socket.connect" and isinstance(given[1], (str, bytes)):
        return  # a socket of this machine alone
    said = str(given[1]) if event == "socket.connect" else str(given[:2])
    files = [frame.filename for frame in traceback.extract_stack()]
    with open(os.environ["WATCHED"], "a") as file:
        file.write(json.dumps([event, said, files]) + "\\n")
sys.addaudithook(watch)
"""
TOKEN = "hf_" + "nOtArEaLtOkEn" * 2
PASSWORD = "correct-horse-battery"


def watched(folder, *command, **environment):
    """A command in a process of its own, and what it and all that it has started did: connections, unpicklings."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(WATCH)
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("proxy")}
    done = subprocess.run(
        [sys.executable, "-m", "autofit.cli", *command],
        env={
            **{name: value for name, value in kept.items() if not name.startswith(("HF_", "HUGGING"))},
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(TESTS.parent)]),
            "WATCHED": str(folder / "watched"),
            "HF_HOME": str(folder / "home"),
            "HF_TOKEN": TOKEN,
            "DB_PASSWORD": PASSWORD,
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    try:
        seen = [json.loads(line) for line in (folder / "watched").read_text().splitlines()]
    except FileNotFoundError:
        seen = []
    return done, seen


def leaks(folder, done):
    """The places where a secret stands."""
    found = [str(path) for path in folder.rglob("*") if path.is_file() and holds(path.read_bytes())]
    return found + [name for name in ("stdout", "stderr") if holds(getattr(done, name).encode())]


def holds(data):
    return TOKEN.encode() in data or PASSWORD.encode() in data


@pytest.mark.slow
def test_a_tune_connects_to_nobody_unpickles_nothing_and_tells_no_token(tmp_path):
    config = write_config(tmp_path / 'a "model" <i id=x>')
    knobs = [
        word
        for knob in ("precision=fp32", "kernels=none", "optimizer=adamw", "checkpointing=off")
        for word in ("--fix", knob)
    ]
    done, seen = watched(
        tmp_path, "tune", str(config), "--output", "out", "--device", "cpu", "--trials", "1", "--seq-len", "16",
        "--global-batch", "4", "--memory-limit", "2GiB", "--storage", f"sqlite:///{tmp_path}/study.db", *knobs,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [one for one in seen if one[0].startswith("socket")] == []
    # a pool's answers come through a pipe between processes of our own; nothing may come from a file
    ours = ("multiprocessing", "concurrent")
    loaded = [
        one
        for one in seen
        if one[0] == "pickle.find_class" and not any(part in path for path in one[2] for part in ours)
    ]
    assert loaded == []
    assert leaks(tmp_path, done) == []
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "&lt;i id=x&gt;" in page
    assert "<i id=x>" not in page


def test_nobody_but_the_hub_is_asked(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.asked = []
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        done, seen = watched(tmp_path, "tune", "org/own-code", "--device", "cpu", HF_ENDPOINT=address(hub))
        hub.shutdown()
    assert done.returncode == 2
    assert "code of its own" in done.stderr
    assert hub.asked
    asked = [one for one in seen if one[0].startswith("socket")]
    assert asked
    assert all("'127.0.0.1'" in one[1] for one in asked), asked
    assert leaks(tmp_path, done) == []


# --- secrets --------------------------------------------------------------------------------------------------------


def test_secrets_are_kept_out_of_words_and_of_jobs(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame-open-now")
    for secret in (TOKEN, "sesame-open-now", "postgresql://me:pass-word@host/db"):
        error = InputError(f"what came is {secret}!")
        assert HIDDEN in error.message
        assert not any(word in str(error) for word in (TOKEN, "sesame", "pass-word"))
    assert redacted("nothing: of note@all http://host/a") == "nothing: of note@all http://host/a"
    kept = harmless(
        {"HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "db_password": "x", "PATH": "y", "TOKENIZERS_PARALLELISM": "z"}
    )
    assert kept == {"PATH": "y", "TOKENIZERS_PARALLELISM": "z"}


# --- shared machines ------------------------------------------------------------------------------------------------


def test_who_holds_a_lock_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (select.hardware_lock(cpu_facts().hardware) for _ in range(2))
    with first, pytest.raises(MachineError, match=f"process {os.getpid()}") as caught, second:
        pass
    assert caught.value.exit_code == 5
    with select.hardware_lock(cuda_facts().hardware), select.hardware_lock(cpu_facts().hardware):
        pass


def test_a_lock_of_another_user_is_enough_to_know_of_them(tmp_path):
    path = tmp_path / "lock"
    with locks.held(path, "message", "hint"):
        path.chmod(0o444)
        with pytest.raises(MachineError, match="taken"), locks.held(path, "taken", "hint"):
            pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError, match="no lock at"), locks.held(tmp_path / "link", "taken", "hint"):
        pass
    assert not (tmp_path / "elsewhere").exists()


class Driver:
    """As much of NVML as is asked."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, processes):
        self.processes = processes

    def __getattr__(self, name):
        return lambda *_, **__: None

    def nvmlDeviceGetComputeRunningProcesses(self, _handle):  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle):  # noqa: N802
        raise self.NVMLError


def test_who_else_is_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", Driver({os.getpid(): GIB, os.getppid(): 3 * GIB, 2**22: None}))
    found = other_processes.neighbours(cuda_facts().hardware)
    assert [(one.pid, one.held_bytes) for one in found] == [(os.getppid(), 3 * GIB), (2**22, None)]
    assert found[0].name != "?"
    assert found[1].words() == f"? (process {2**22}) with an unknown share"
    (words,) = other_processes.warnings(cuda_facts().hardware, tmp_path)
    assert words.startswith("also on this device: ")
    assert words.endswith("24.00 GiB are free")


def test_who_else_is_on_a_cpu():
    code = "data = bytearray(200 << 20); data[::4096] = b'x' * len(data[::4096]); print('held', flush=True); input()"
    hog = subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-c", f"import os; print(os.getpid(), flush=True); {code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pid = int(hog.stdout.readline())
    try:
        assert hog.stdout.readline() == "held\n"
        hardware = dataclasses.replace(cpu_facts().hardware, host_total_bytes=2 * GIB)
        assert pid in [one.pid for one in other_processes.neighbours(hardware)]
        assert os.getpid() not in [one.pid for one in other_processes.neighbours(hardware)]
    finally:
        hog.communicate("\n")


def test_a_full_disk_and_a_full_host_are_told_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(other_processes, "neighbours", lambda _: ())
    hardware = cpu_facts().hardware
    assert other_processes.warnings(hardware, tmp_path) == ()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30 * MIB))
    poor = dataclasses.replace(hardware, host_free_bytes=GIB)
    disk, host = other_processes.warnings(poor, tmp_path)
    assert str(tmp_path) in disk
    assert "30.0 MiB are left" in disk
    assert "1.00 GiB of memory left" in host
    crowd = dataclasses.replace(cuda_facts().hardware, others_bytes=5 * GIB)
    assert "the driver does not say who" in other_processes.warnings(crowd, tmp_path)[0]
