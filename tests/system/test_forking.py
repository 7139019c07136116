import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from autofit.output.jobs import CheckJob
from autofit.system.errors import InputError, MachineError, ServerLost
from autofit.system.forking import begun as servers
from autofit.system.forking.begun import begun_ahead
from autofit.system.forking.imports import own_threads
from autofit.system.forking.server import ForkServer
from autofit.system.forking.snapshot import Unforkable
from autofit.system.job import job_text
from tests.support.tiny import REPOSITORY, SUPPORT, alive, gone, offspring, wait_until

PATIENT = 120.0


@pytest.fixture
def quick_path(tmp_path):
    """A search path on which a server has nothing heavy to load."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("torch", "transformers", "accelerate"):
        (stubs / f"{name}.py").write_text("raise ImportError('left out by a test')")
    return os.pathsep.join((str(stubs), str(SUPPORT)))


def test_a_forked_process_makes_its_pool_of_threads_before_others_begin(monkeypatch):
    asked = []
    torch = SimpleNamespace(get_num_threads=lambda: 3, set_num_threads=asked.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    own_threads()
    assert asked == [3]
    monkeypatch.delitem(sys.modules, "torch")
    own_threads()  # nothing to do
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    own_threads()  # being imported
    assert asked == [3]


@pytest.fixture
def own_server(tmp_path, monkeypatch, quick_path):
    """A server that a test may kill."""
    monkeypatch.setenv("PYTHONPATH", quick_path)
    with contextlib.closing(ForkServer(tmp_path / "server.log", "cpu", ("faulty",))) as started:
        yield started


def job(folder, code):
    """A job that runs ``code`` in its process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault.py").write_text(textwrap.dedent(code), "utf-8")
    return folder


def pid_in(folder, name="pid"):
    wait_until((folder / name).exists, what=f"{folder / name}")
    return int(wait_until((folder / name).read_text))


WRITE_PID = "import os; (folder / 'pid').write_text(str(os.getpid()))\n"
SLEEP = WRITE_PID + "import time; time.sleep(1000)"


def test_a_job_runs_and_its_status_comes_back(server, tmp_path):
    done = job(tmp_path / "done", "(folder / 'result').write_text('there')")
    assert server.run(done, kill_after_seconds=PATIENT) == 0
    assert (done / "result").read_text() == "there"
    left = job(tmp_path / "left", "import os; os._exit(7)")
    assert os.waitstatus_to_exitcode(server.run(left, kill_after_seconds=PATIENT)) == 7
    assert server.import_seconds > 0


def test_a_folder_that_is_named_like_a_package_is_not_imported_for_it(tmp_path, monkeypatch, quick_path):
    for name in ("torch", "scipy", "psutil"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "__init__.py").write_text("raise SystemExit('a folder of the user')")
    monkeypatch.setenv("PYTHONPATH", quick_path)
    monkeypatch.chdir(tmp_path / "data")
    asks = job(
        tmp_path / "job", "import sys; (folder / 'found').write_text(repr(sys.path + sys.modules['psutil'].__path__))"
    )
    with contextlib.closing(ForkServer(tmp_path / "log", "cpu", ("faulty",))) as started:
        assert started.run(asks, kill_after_seconds=PATIENT) == 0
    assert str(tmp_path / "data") not in (asks / "found").read_text()


@pytest.mark.slow
def test_a_server_for_traces_loads_what_they_need_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    told = job(tmp_path / "job", "import json, sys; (folder / 'loaded').write_text(json.dumps(list(sys.modules)))")
    with contextlib.closing(ForkServer(tmp_path / "log", "cpu", ("faulty",), trains=False)) as traces:
        assert traces.run(told, kill_after_seconds=PATIENT) == 0
    loaded = set(json.loads((told / "loaded").read_text()))
    assert {"transformers.trainer", "autofit.worker"} <= loaded
    assert not {"datasets", "pandas", "scipy.optimize"} & loaded


def test_a_server_collects_no_garbage_while_it_imports_and_has_the_worker_before_an_early_job(
    tmp_path, monkeypatch, quick_path
):
    (tmp_path / "stubs" / "asking.py").write_text(
        "import gc, pathlib, sys\n"
        "seen = gc.isenabled(), 'autofit.worker' in sys.modules\n"
        "pathlib.Path(__file__).with_suffix('.seen').write_text(str(seen))"
    )
    monkeypatch.setenv("PYTHONPATH", quick_path)
    asks = job(tmp_path / "job", "import gc; (folder / 'seen').write_text(str(gc.isenabled()))")
    with contextlib.closing(ForkServer(tmp_path / "log", "cpu", ("asking", "faulty"))) as started:
        assert started.run(asks, kill_after_seconds=PATIENT) == 0
    assert (tmp_path / "stubs" / "asking.seen").read_text() == "(False, True)"
    assert (asks / "seen").read_text() == "True"


READS = """
import builtins
import functools

from autofit.system.forking.imports import import_transformers

bounded = functools.lru_cache
import_transformers()
assert functools.lru_cache is bounded
read, real = [], builtins.open
builtins.open = lambda file, *args, **kwargs: (read.append(str(file)), real(file, *args, **kwargs))[1]
import transformers.models

print(sum("modeling_" in one for one in read), transformers.models.llama.__name__)
"""


def test_the_models_of_transformers_are_read_once():
    ended = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split() == ["0", "transformers.models.llama"]


GIVES = """
from autofit.system.forking.imports import import_transformers

{first}
import transformers
from transformers.utils.import_utils import define_import_structure

found = define_import_structure(transformers.models.__path__[0])
for wants, files in sorted((sorted(wants), files) for wants, files in found.items()):
    print(wants, sorted((file, sorted(names)) for file, names in files.items()))
"""


def test_the_models_of_transformers_give_what_they_give_elsewhere():
    codes = [GIVES.format(first=first) for first in ("import_transformers()", "")]
    ours, theirs = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        for code in codes
    )
    assert ours.stdout == theirs.stdout
    assert "LlamaForCausalLM" in ours.stdout


def test_a_job_that_raises_ends_with_status_one_and_leaves_its_traceback(server, tmp_path):
    raises = job(tmp_path / "job", "raise LookupError('of its own making')")
    assert os.waitstatus_to_exitcode(server.run(raises, kill_after_seconds=PATIENT)) == 1
    assert "LookupError: of its own making" in (raises / "stderr.log").read_text()


def test_a_job_is_a_process_in_a_session_of_its_own_with_its_logs_in_its_folder(server, tmp_path):
    code = """
        import json, os, subprocess, sys
        print("words"); print("talk", file=sys.stderr)
        subprocess.run(["echo", "of a child"], check=True)
        ids = {"pid": os.getpid(), "session": os.getsid(0), "group": os.getpgrp(), "server": os.getppid()}
        (folder / "ids").write_text(json.dumps(ids))
    """
    seen = []
    for name in ("one", "two"):
        folder = job(tmp_path / name, code)
        assert server.run(folder, kill_after_seconds=PATIENT) == 0
        assert sorted((folder / "stdout.log").read_text().splitlines()) == ["of a child", "words"]
        assert (folder / "stderr.log").read_text() == "talk\n"
        seen.append(json.loads((folder / "ids").read_text()))
    for ids in seen:
        assert ids["pid"] == ids["session"] == ids["group"]
        assert ids["server"] == server._process.pid
    assert len({ids["pid"] for ids in seen} | {os.getpid(), server._process.pid}) == 4


def test_where_an_import_has_touched_the_device_a_job_is_a_fresh_process(tmp_path, monkeypatch, quick_path):
    stubs = tmp_path / "stubs"
    (stubs / "torch.py").write_text(
        "import os, types\npid = os.getpid()\ncuda = types.SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != pid)"
    )
    (stubs / "accelerate.py").write_text(
        "import os, sys\nif os.path.isdir(sys.argv[1]):\n"
        "    open(os.path.join(sys.argv[1], 'seen'), 'w').write(f'{os.getpid()} {os.getsid(0)} {os.getppid()}')\n"
        "raise ImportError('left out by a test')"
    )
    monkeypatch.setenv("PYTHONPATH", quick_path)
    with contextlib.closing(ForkServer(tmp_path / "server.log", "cuda")) as started:
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "job.json").write_bytes(job_text(CheckJob(folder=str(folder))).encode())
        status = started.run(folder, kill_after_seconds=PATIENT)
        assert os.waitstatus_to_exitcode(status) == 1
        assert "left out by a test" in (folder / "stderr.log").read_text()
        pid, session, parent = map(int, (folder / "seen").read_text().split())
        assert pid == session != parent == started._process.pid


@pytest.mark.parametrize(("device", "shown"), [("cpu", ""), ("cuda", "3")])
def test_a_device_is_shown_to_those_who_use_it(tmp_path, monkeypatch, quick_path, device, shown):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    folder = job(tmp_path / "job", "import os; (folder / 'shown').write_text(os.environ['CUDA_VISIBLE_DEVICES'])")
    with contextlib.closing(ForkServer(tmp_path / "server.log", device, ("faulty",))) as started:
        assert started.run(folder, kill_after_seconds=PATIENT) == 0
    assert (folder / "shown").read_text() == shown


def test_nothing_that_a_job_does_to_its_process_reaches_the_next(server, tmp_path):
    first = job(tmp_path / "first", "import os, torch; os.environ['LEFT'] = '1'; os.chdir('/'); torch.stain = 1")
    second = job(
        tmp_path / "second",
        "import json, os, torch; found = ['LEFT' in os.environ, os.getcwd() == '/', hasattr(torch, 'stain')]\n"
        "(folder / 'found').write_text(json.dumps(found))",
    )
    for folder in (first, second):
        assert server.run(folder, kill_after_seconds=PATIENT) == 0
    assert json.loads((second / "found").read_text()) == [False, False, False]


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("import ctypes; ctypes.string_at(0)", signal.SIGSEGV),
        ("import os; os.abort()", signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", signal.SIGTERM),
    ],
)
def test_a_job_that_dies_of_a_signal_is_told_so(server, tmp_path, code, number):
    status = server.run(job(tmp_path / "job", code), kill_after_seconds=PATIENT)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == number
    assert server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0


@pytest.mark.parametrize(
    ("hang", "stubborn"),
    [
        pytest.param("import time; time.sleep(1000)", False, id="sleep"),
        pytest.param("while True: pass", False, id="loop"),
        pytest.param("import ctypes; ctypes.PyDLL(None).sleep(1000)", False, id="native-with-gil"),
        pytest.param(
            "import ctypes, signal; signal.signal(signal.SIGTERM, lambda *_: None)\n"
            "while True: ctypes.PyDLL(None).sleep(1000)",
            True,
            id="native-with-gil-and-handler",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
            True,
            id="ignores-term",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_job_that_hangs_is_killed(server, tmp_path, hang, stubborn):
    folder = job(tmp_path / "job", WRITE_PID + hang)
    began = time.monotonic()
    assert server.run(folder, kill_after_seconds=1.0) is None
    took = time.monotonic() - began
    assert took >= (4.0 if stubborn else 1.0)  # SIGKILL comes three seconds after SIGTERM
    assert took < 90
    assert not alive(pid_in(folder))
    assert server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0


CHILDREN = """
    import os, signal, subprocess, sys, time
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)"
    sleeps = [sys.executable, "-c", ignores + "; time.sleep(1000)"]
    child = subprocess.Popen(sleeps, stdout=subprocess.PIPE)
    child.stdout.readline()
    (folder / "child").write_text(str(child.pid))
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    (folder / "forked").write_text(str(forked))
"""


@pytest.mark.slow
def test_the_children_of_a_killed_job_go_with_it(server, tmp_path):
    folder = job(tmp_path / "job", CHILDREN + "    time.sleep(1000)\n")
    assert server.run(folder, kill_after_seconds=3.0) is None
    assert gone(pid_in(folder, "child"), pid_in(folder, "forked"))


def test_the_children_that_a_job_leaves_behind_are_ended(server, tmp_path):
    folder = job(tmp_path / "job", CHILDREN)
    assert server.run(folder, kill_after_seconds=PATIENT) == 0
    assert gone(pid_in(folder, "child"), pid_in(folder, "forked"))


DAEMON = """
    import os, signal, time
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork():
            os._exit(0)
        os.write(writer, str(os.getpid()).encode())
        time.sleep(1000)
    (folder / "daemon").write_bytes(os.read(reader, 20))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "    os.abort()\n", "    time.sleep(1000)\n"], ids=["ends", "aborts", "hangs"])
def test_what_has_left_the_job_s_session_is_ended_too(server, tmp_path, end):
    folder = job(tmp_path / "job", DAEMON + end)
    server.run(folder, kill_after_seconds=3.0)
    assert gone(pid_in(folder, "daemon"))


def test_a_killed_parent_takes_what_has_left_the_session(tmp_path, quick_path):
    with parent(tmp_path, "alone", quick_path, DAEMON + "    time.sleep(1000)\n") as process:
        running = pid_in(tmp_path / "job", "daemon")
        process.kill()
        process.wait()
        assert gone(running)


@pytest.mark.slow
def test_the_time_in_which_all_were_stopped_does_not_count(tmp_path, quick_path):
    code = WRITE_PID + "import time; began = time.time()\nwhile time.time() < began + 4: time.sleep(0.01)"
    with parent(tmp_path, "brief", quick_path, code) as process:
        everybody = [*offspring(process.pid), process.pid] if pid_in(tmp_path / "job") else []
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8.0)
        for pid in reversed(everybody):
            os.kill(pid, signal.SIGCONT)
        assert process.wait(60) == 0, "the job was killed for taking too long"


def test_a_killed_server_is_told_and_the_next_job_gets_a_new_one(own_server, tmp_path):
    folder = job(
        tmp_path / "job",
        WRITE_PID + "import signal; os.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(99)",
    )
    with pytest.raises(MachineError, match=r"the process that starts trials ended \(status -9\)") as caught:
        own_server.run(folder, kill_after_seconds=PATIENT)
    assert str(own_server.log) in caught.value.hint
    assert gone(pid_in(folder))  # the job dies with the server
    assert own_server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0


def test_a_server_killed_between_two_jobs_is_started_again(own_server, tmp_path):
    assert own_server.run(job(tmp_path / "one", ""), kill_after_seconds=PATIENT) == 0
    first = own_server._process.pid
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert own_server.run(job(tmp_path / "two", ""), kill_after_seconds=PATIENT) == 0
    assert own_server._process.pid != first


def test_a_server_that_can_not_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemError('torn library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        contextlib.closing(ForkServer(tmp_path / "server.log", "cpu")) as broken,
        pytest.raises(MachineError, match=r"ended \(status 1\): SystemError: torn library") as caught,
    ):
        broken.run(job(tmp_path / "job", ""), kill_after_seconds=PATIENT)
    assert str(tmp_path / "server.log") in caught.value.hint


def test_a_server_that_was_begun_ahead_is_taken_by_the_first_that_is_alike(tmp_path, monkeypatch, quick_path):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    begun = []
    start = servers.begin
    monkeypatch.setattr(servers, "begin", lambda *log, **how: begun.append(start(*log, **how)) or begun[-1])
    asks = job(tmp_path / "job", "import sys; (folder / 'found').write_text(str('faulty' in sys.modules))")
    with begun_ahead("cpu", trains=True):
        (ahead,) = begun
        other = ForkServer(tmp_path / "other.log", "cpu", trains=False)
        alike = ForkServer(tmp_path / "server.log", "cpu", ("faulty",))
        with contextlib.closing(other), contextlib.closing(alike):
            other.start()
            assert other._process is not ahead.process
            assert alike.run(asks, kill_after_seconds=PATIENT) == 0
            assert (asks / "found").read_text() == "True"
            assert (alike._process, alike.log) == (ahead.process, tmp_path / "server.log")
            assert len(begun) == 2
        assert ahead.process.poll() is not None
    assert not servers.AHEAD


def test_a_server_that_was_begun_ahead_and_is_not_wanted_ends(tmp_path, monkeypatch, quick_path):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "scratch").mkdir()

    def refuse():
        with begun_ahead("cpu", trains=False):
            begun.extend(servers.AHEAD.values())
            raise InputError("a wrong card")

    begun = []
    with pytest.raises(InputError):
        refuse()
    assert begun[0].process.poll() is not None
    assert not list((tmp_path / "scratch").iterdir())


def test_a_server_that_rests_has_no_process_until_it_is_asked_again(tmp_path, monkeypatch, quick_path):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    with begun_ahead("cpu", trains=True):
        (ahead,) = servers.AHEAD.values()
        with contextlib.closing(ForkServer(tmp_path / "server.log", "cpu", ("faulty",))) as server:
            server.rest()
            assert ahead.process.poll() is not None
            assert not servers.AHEAD
            assert server.run(job(tmp_path / "one", ""), kill_after_seconds=PATIENT) == 0
            begun = server._process
            server.rest()
            assert begun.poll() is not None
            assert server.run(job(tmp_path / "two", ""), kill_after_seconds=PATIENT) == 0


def test_a_server_that_ended_before_it_was_taken_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemError('torn library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with begun_ahead("cpu", trains=True):
        (ahead,) = servers.AHEAD.values()
        ahead.process.wait()
        with (
            contextlib.closing(ForkServer(tmp_path / "server.log", "cpu", ("faulty",))) as taken,
            pytest.raises(MachineError, match=r"ended \(status 1\): SystemError: torn library") as caught,
        ):
            taken.run(job(tmp_path / "job", ""), kill_after_seconds=PATIENT)
    assert f"its log is {tmp_path / 'server.log'}" in caught.value.hint
    assert "torn library" in (tmp_path / "server.log").read_text()


def test_close_ends_the_server_and_its_job(own_server, tmp_path):
    assert own_server.run(job(tmp_path / "one", ""), kill_after_seconds=PATIENT) == 0
    pid = own_server._process.pid
    own_server._send({"run": str(job(tmp_path / "two", SLEEP))})
    running = pid_in(tmp_path / "two")
    own_server.close()
    assert gone(pid, running)
    own_server.close()


def test_close_does_not_wait_for_a_server_that_is_loading(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "from pathlib import Path; import time\nPath(__file__ + '.on').touch(); time.sleep(99)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(ForkServer(tmp_path / "server.log", "cpu")) as loading:
        loading.start()
        wait_until((tmp_path / "torch.py.on").exists)
        process = loading._process
        loading.close()
        assert process.returncode == 0  # it ended by itself


def test_stop_job_kills_at_once(own_server, tmp_path):
    assert own_server.run(job(tmp_path / "one", ""), kill_after_seconds=PATIENT) == 0
    own_server._send({"run": str(job(tmp_path / "two", SLEEP))})
    running = pid_in(tmp_path / "two")
    own_server.stop_job()
    assert gone(running)
    assert alive(own_server._process.pid)


PARENT = """
import os, sys, time
from pathlib import Path
from autofit.system.forking.server import ForkServer
server = ForkServer(Path(sys.argv[1]) / "server.log", "cpu", ("faulty",))
server.start()
if sys.argv[2] == "shared" and os.fork() == 0:  # somebody else holds our end of the socket
    Path(sys.argv[1], "holder").write_text(str(os.getpid()))
    time.sleep(1000)
if sys.argv[2] == "snapshot":
    server.snapshot(Path(sys.argv[1]) / "job", kill_after_seconds=600).run(
        Path(sys.argv[1]) / "forked", kill_after_seconds=600
    )
status = server.run(Path(sys.argv[1]) / "job", kill_after_seconds=6 if sys.argv[2] == "brief" else 600)
sys.exit(status != 0)
"""


@contextlib.contextmanager
def parent(folder, kind, path, code=SLEEP):
    """A process of its own that runs a job, a sleeping one by default."""
    job(folder / "job", code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), path))}
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), kind], env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in offspring(process.pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["alone", "shared"])
def test_server_and_job_die_with_a_killed_parent(tmp_path, quick_path, kind):
    with parent(tmp_path, kind, quick_path) as process:
        running = pid_in(tmp_path / "job")
        started = offspring(process.pid)
        holder = {pid_in(tmp_path, "holder")} if kind == "shared" else set()
        assert running in started
        assert len(started) == 2 + len(holder)
        process.kill()
        process.wait()
        try:
            assert gone(*(set(started) - holder), seconds=5)
        finally:
            for pid in holder:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_server_that_is_still_loading_dies_with_a_killed_parent(tmp_path):
    with parent(tmp_path, "alone", str(SUPPORT)) as process:
        started = wait_until(lambda: offspring(process.pid), what="the server")
        process.kill()
        process.wait()
        assert gone(*started, seconds=30)
        assert not (tmp_path / "job" / "pid").exists()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_server_loads_torch_and_leaves_the_device_alone(tmp_path, monkeypatch, device):
    code = """
        import json, os, sys
        from pathlib import Path
        loaded = [name for name in ("torch", "transformers", "transformers.trainer") if name in sys.modules]
        import torch
        handles = [os.readlink(entry) for entry in Path(f"/proc/{os.getppid()}/fd").iterdir() if entry.is_symlink()]
        seen = {
            "loaded": loaded,
            "initialized": torch.cuda.is_initialized(),
            "bad_fork": torch.cuda._is_in_bad_fork(),
            "device_files": [handle for handle in handles if handle.startswith("/dev/nvidia")],
        }
        (folder / "seen").write_text(json.dumps(seen))
    """
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    folder = job(tmp_path / "job", code)
    with contextlib.closing(ForkServer(tmp_path / "log", device, ("faulty",))) as started:
        assert started.run(folder, kill_after_seconds=PATIENT) == 0, (folder / "stderr.log").read_text()
    seen = json.loads((folder / "seen").read_text())
    # what Trainer imports asks for the device, so that a job for one imports it by itself
    assert seen["loaded"] == ["torch", "transformers", *(["transformers.trainer"] if device == "cpu" else [])]
    assert not seen["initialized"]
    assert not seen["bad_fork"]
    assert seen["device_files"] == []


def test_a_job_does_not_look_for_garbage_in_what_the_server_has_imported(server, tmp_path):
    folder = job(
        tmp_path / "job", "import gc; (folder / 'n').write_text(f'{len(gc.get_objects())} {gc.get_freeze_count()}')"
    )
    assert server.run(folder, kill_after_seconds=PATIENT) == 0, (folder / "stderr.log").read_text()
    looked_at, imported = map(int, (folder / "n").read_text().split())
    assert looked_at < imported / 100


# snapshots: jobs that are forked from what another has run up to


SNAPSHOT = """
    import os
    (folder / "pid").write_text(str(os.getpid()))
    made = [1]
    own = next_job()
    made.append(2)
    (own / "seen").write_text(f"{made} {os.getppid()}")
    exec((own / "code").read_text())
"""


def forked(folder, code=""):
    folder.mkdir(exist_ok=True)
    (folder / "code").write_text(textwrap.dedent(code))
    return folder


def test_jobs_are_forked_from_what_a_snapshot_has_run_up_to(server, tmp_path):
    made = server.snapshot(job(tmp_path / "snapshot", SNAPSHOT), kill_after_seconds=PATIENT)
    with contextlib.closing(made):
        pid = pid_in(tmp_path / "snapshot")
        for name in ("one", "two"):
            folder = forked(tmp_path / name, "print('words')")
            assert made.run(folder, kill_after_seconds=PATIENT) == 0
            assert (folder / "seen").read_text() == f"[1, 2] {pid}"
            assert (folder / "stdout.log").read_text() == "words\n"
            assert server.run(job(tmp_path / f"other-{name}", CHILDREN), kill_after_seconds=PATIENT) == 0
            assert alive(pid), "the server ends what its own jobs leave behind, and no snapshot"
        fails = forked(tmp_path / "fails", "raise LookupError('of its own making')")
        assert os.waitstatus_to_exitcode(made.run(fails, kill_after_seconds=PATIENT)) == 1
        assert "LookupError: of its own making" in (fails / "stderr.log").read_text()
    assert gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [CHILDREN, CHILDREN + "    time.sleep(1000)\n", DAEMON], ids=["left", "hung", "daemon"]
)
def test_what_a_job_of_a_snapshot_has_started_is_ended_with_it(server, tmp_path, code):
    made = server.snapshot(job(tmp_path / "snapshot", SNAPSHOT), kill_after_seconds=PATIENT)
    with contextlib.closing(made):
        folder = forked(tmp_path / "job", "folder = own\n" + textwrap.dedent(code))
        assert made.run(folder, kill_after_seconds=3.0) == (None if "sleep(1000)\n" in code[-20:] else 0)
        started = [pid_in(folder, name) for name in ("child", "forked", "daemon") if (folder / name).exists()]
        assert started
        assert gone(*started)
        assert made.run(forked(tmp_path / "next"), kill_after_seconds=PATIENT) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("why = 'it reads the stars'", "it reads the stars"),
        ("import os; os._exit(3)", "its process ended before it trained"),
        ("raise LookupError('of its own making')", "LookupError: of its own making"),
        (SLEEP, "it did not begin to train in 2.0 s"),
    ],
)
def test_a_snapshot_that_can_not_be_had_is_refused_in_words(server, tmp_path, code, words):
    with pytest.raises(Unforkable, match=re.escape(words)):
        server.snapshot(job(tmp_path / "snapshot", code), kill_after_seconds=2.0)
    if (tmp_path / "snapshot" / "pid").exists():
        assert gone(pid_in(tmp_path / "snapshot"))
    assert server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0


def test_a_snapshot_that_is_killed_is_told_and_its_job_goes_with_it(server, tmp_path):
    made = server.snapshot(job(tmp_path / "snapshot", SNAPSHOT), kill_after_seconds=PATIENT)
    kills = forked(tmp_path / "job", CHILDREN + "    os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)\n")
    (kills / "code").write_text("folder = own\n" + (kills / "code").read_text())
    with pytest.raises(ServerLost, match="the snapshot that the trial was forked from ended"):
        made.run(kills, kill_after_seconds=PATIENT)
    assert made.closed
    assert gone(pid_in(tmp_path / "snapshot"), pid_in(kills, "child"), pid_in(kills, "forked"))
    assert server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0


def test_a_server_that_is_closed_takes_its_snapshots_along(own_server, tmp_path):
    made = own_server.snapshot(job(tmp_path / "snapshot", SNAPSHOT), kill_after_seconds=PATIENT)
    made._send(
        {
            "run": str(
                forked(tmp_path / "job", "(own / 'pid').write_text(str(os.getpid()))\nimport time; time.sleep(99)")
            )
        }
    )
    running = pid_in(tmp_path / "job")
    own_server.close()
    assert gone(pid_in(tmp_path / "snapshot"), running)


def test_a_killed_parent_takes_a_snapshot_and_its_job(tmp_path, quick_path):
    forked(tmp_path / "forked", "(own / 'pid').write_text(str(os.getpid()))\nimport time; time.sleep(99)")
    with parent(tmp_path, "snapshot", quick_path, SNAPSHOT) as process:
        running = pid_in(tmp_path / "forked"), pid_in(tmp_path / "job")
        process.kill()
        process.wait()
        assert gone(*running)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    RESULT: ClassVar[str] = "answer"
    config: str


def test_ask_gives_the_answer_and_leaves_nothing(server, tmp_path):
    script = "import json; (folder / 'answer').write_text((folder / 'job.json').read_text())"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "fault.py").write_text(script)
    with server.ask(tmp_path, Question(config=str(tmp_path / "config"))) as answer:
        assert answer == {"config": str(tmp_path / "config")}
    assert [entry.name for entry in tmp_path.iterdir()] == ["config"]


def test_ask_without_an_answer_on_a_full_disk_says_that_it_is_full(server, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        fill = "handle = open(folder.parent / 'filler', 'wb', buffering=0)\nwhile True: handle.write(bytes(4096))"
        (tmp_path / "fault.py").write_text(fill)
        with (
            pytest.raises(MachineError, match=f"^the disk is full: {disk} can't be written") as caught,
            server.ask(disk, Question(config=str(tmp_path))),
        ):
            pass
        assert "free some space" in caught.value.hint
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_ask_says_that_its_folder_was_deleted_meanwhile(server, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    (tmp_path / "fault.py").write_text(f"import shutil; shutil.rmtree({str(folder)!r})")
    with (
        pytest.raises(MachineError, match=f"^{folder} is gone: it was deleted or moved meanwhile"),
        server.ask(folder, Question(config=str(tmp_path))),
    ):
        pass


def test_ask_without_an_answer_is_an_error_that_names_the_log(server, tmp_path):
    (tmp_path / "fault.py").write_text("import sys; print('its last words', file=sys.stderr); sys.exit(3)")
    with (
        pytest.raises(MachineError, match="ended with status 1 and no answer: SystemExit: 3") as caught,
        server.ask(tmp_path, Question(config=str(tmp_path))),
    ):
        pass
    assert caught.value.hint == f"its log is {tmp_path / 'failed-job.log'}"
    assert "its last words" in (tmp_path / "failed-job.log").read_text()


def test_what_is_asked_has_the_server_s_time_and_no_more(own_server, tmp_path):
    job(tmp_path / "asked", SLEEP)
    own_server.ends = time.monotonic() + 1.0
    with own_server.ask(tmp_path, Question(config=str(tmp_path / "asked")), kill_after_seconds=PATIENT) as answer:
        assert answer is None
    assert own_server.late
    assert time.monotonic() < own_server.ends + 30.0
    own_server.ends, own_server.late = math.inf, False
    with own_server.ask(tmp_path, Question(config=str(tmp_path / "asked")), kill_after_seconds=0.1) as answer:
        assert answer is None
    assert not own_server.late  # it is the asker's time that is over


IMPORTED = """
import sys

import torch

from autofit.system.forking.imports import load_bitsandbytes

load_bitsandbytes()
import transformers.trainer
from bitsandbytes.backends.default import ops

assert torch.compile.__module__ == "torch", torch.compile
print("torch._inductor.compile_fx" in sys.modules)
torch.compiler.set_stance("force_eager")  # the compiler is loaded, and makes nothing
code = torch.linspace(0, 1, 256)
bytes_ = torch.full((64,), 255, dtype=torch.uint8)
made = ops._dequantize_blockwise_compute(bytes_, torch.ones(1), code, 64, torch.float32)
print("torch._inductor.compile_fx" in sys.modules, float(made.min()))
"""


@pytest.mark.slow
def test_bitsandbytes_loads_the_compiler_when_it_first_needs_it():
    ended = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split() == ["False", "True", "1.0"]


NOTES = """
    import json, os
    path = {path!r}
    aside = os.path.join(os.path.dirname(path), ".before-autofit", os.path.basename(path))
    os.makedirs(os.path.dirname(aside), exist_ok=True)
    with open(os.environ["AUTOFIT_LEDGER"], "a") as ledger:
        ledger.write(json.dumps([path, aside]) + chr(10))
    os.rename(path, aside)
    open(path, "w").write("new")
"""


@pytest.mark.parametrize("ends", ["", "os.kill(os.getpid(), 9)"])
def test_what_a_job_notes_is_undone_when_it_has_ended_or_is_killed(own_server, tmp_path, ends):
    there = tmp_path / "log.csv"
    there.write_text("old")
    folder = job(tmp_path / "job", textwrap.dedent(NOTES).format(path=str(there)) + ends)
    own_server.run(folder, kill_after_seconds=PATIENT)
    assert there.read_text() == "old"
    assert not list(folder.glob(".*"))


def test_what_a_snapshot_and_its_job_note_is_undone_when_both_are_killed(server, tmp_path):
    early, late = tmp_path / "early", tmp_path / "late"
    for one in (early, late):
        one.write_text("old")
    made = server.snapshot(
        job(tmp_path / "snapshot", NOTES.format(path=str(early)) + SNAPSHOT), kill_after_seconds=PATIENT
    )
    kills = forked(tmp_path / "job", NOTES.format(path=str(late)) + "    os.kill(os.getppid(), 9); os.abort()\n")
    with pytest.raises(ServerLost):
        made.run(kills, kill_after_seconds=PATIENT)
    assert server.run(job(tmp_path / "next", ""), kill_after_seconds=PATIENT) == 0
    assert [one.read_text() for one in (early, late)] == ["old", "old"]


def test_what_a_job_notes_is_undone_before_who_is_interrupted_goes_on(own_server, tmp_path, monkeypatch):
    there = tmp_path / "log.csv"
    there.write_text("old")
    receive = own_server._receive

    def interrupted(_):
        if there.exists() and there.read_text() == "new":
            raise KeyboardInterrupt
        return receive(0.05)

    monkeypatch.setattr(own_server, "_receive", interrupted)
    folder = job(tmp_path / "job", textwrap.dedent(NOTES).format(path=str(there)) + "import time; time.sleep(99)")
    with pytest.raises(KeyboardInterrupt):
        own_server.run(folder, kill_after_seconds=PATIENT)
    assert there.read_text() == "old"
