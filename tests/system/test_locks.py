"""A lock is held by one process, and dies with it however it ends."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autofit.system.errors import MachineError
from autofit.system.locks import device_lock, held, scratch_folder, waited_for

HOLD = """
import sys
from pathlib import Path
from autofit.system.locks import held
with held(Path(sys.argv[1]), "message", "hint"):
    print("held", flush=True)
    sys.stdin.read()
"""


def take(path):
    with held(path, "somebody is at it", "wait for them"):
        return True


@pytest.fixture
def holder(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield path, process
        process.kill()


def test_a_second_holder_is_refused_in_the_words_given(tmp_path):
    path = tmp_path / "lock"
    with held(path, "message", "hint"):
        with pytest.raises(MachineError, match="somebody is at it") as caught:
            take(path)
        assert caught.value.hint == "wait for them"
    assert take(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_it_is_released_when_the_body_fails(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="body"), held(path, "message", "hint"):
        raise ValueError("body")
    assert take(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_another_process_holds_it_until_it_ends(holder, number):
    path, process = holder
    with pytest.raises(MachineError, match="somebody is at it"):
        take(path)
    process.send_signal(number)
    process.wait(10)
    assert take(path)


def test_a_child_process_does_not_inherit_it(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", "print('started', flush=True); input()"]
    with held(path, "message", "hint"):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
        assert child.stdout.readline() == b"started\n"
    try:
        assert take(path)
    finally:
        child.communicate(b"\n")


def test_a_lock_that_cant_be_made_is_a_machine_error(tmp_path):
    (tmp_path / "none").write_text("a file, and no folder")
    with pytest.raises(MachineError, match="no lock at") as caught:
        take(tmp_path / "none" / "lock")
    assert "AUTOFIT_LOCKS" in caught.value.hint


def test_each_device_has_a_lock_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFIT_LOCKS", str(tmp_path))
    with device_lock("cpu"):
        with pytest.raises(MachineError, match=r"another tune is measuring on this device \(cpu\)"), device_lock("cpu"):
            pass
        with device_lock("GPU-0/../../x:y z"):
            pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["autofit-GPU-0-------x-y-z.lock", "autofit-cpu.lock"]


TAKE = """
import sys
from autofit.system import locks
locks._SHARED = tuple(map(locks.Path, sys.argv[1:]))
with locks.device_lock("cpu"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_device_does_not_depend_on_tmpdir(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    without = {name: value for name, value in os.environ.items() if name != "AUTOFIT_LOCKS"}
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            process = subprocess.Popen(
                [sys.executable, "-c", TAKE, str(tmp_path / "none"), str(shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**without, "TMPDIR": str(tmp_path / name)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
            process.first = process.stdout.readline()
        assert [process.first for process in started] == ["held\n", ""]
        assert f"another tune is measuring on this device (cpu): process {started[0].pid}" in started[1].stderr.read()
    assert [path.name for path in shared.iterdir()] == ["autofit-cpu.lock"]


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1755])
def test_a_folder_that_not_everyone_shares_safely_holds_no_lock_of_a_device(tmp_path, monkeypatch, mode):
    own, shared = tmp_path / "own", tmp_path / "shared"
    for folder, bits in ((own, mode), (shared, 0o1777)):
        folder.mkdir()
        folder.chmod(bits)
    monkeypatch.delenv("AUTOFIT_LOCKS")
    monkeypatch.setattr("autofit.system.locks._SHARED", (own, shared))
    with device_lock("cpu"):
        assert list(shared.iterdir())
        assert not list(own.iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_somebody_else_has_put_there_is_no_trap(tmp_path, make):
    path = tmp_path / "lock"
    make(path)
    with contextlib.suppress(MachineError):
        take(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_is_waited_for_and_its_holder_is_named_once(holder):
    path, process = holder
    said = []

    def told(words):
        said.append(words)
        process.kill()

    with waited_for(lambda: held(path, "somebody is at it", "wait"), told, every_seconds=0.01) as waited:
        assert waited
    assert said == [f"somebody is at it: process {process.pid}: waiting for it to end"]
    with waited_for(lambda: held(path, "somebody is at it", "wait"), told) as waited:
        assert not waited


LEAVE = """
import os, signal
from autofit.system.locks import scratch_folder
with scratch_folder("verify") as folder:
    (folder / "log").write_text("half")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path, monkeypatch):
    """A scratch folder whose process was killed, and how long ago it was made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = subprocess.run([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True, check=False).stdout
    folder = Path(told.strip())
    assert folder.is_dir()

    def ago(seconds):
        (mark,) = folder.glob(".*")
        os.utime(mark, (time.time() - seconds,) * 2)
        return folder

    return ago


def test_a_folder_of_a_killed_process_is_removed_by_the_next(left):
    folder = left(3600)
    with scratch_folder("estimate") as made:
        assert (folder.exists(), made.is_dir()) == (False, True)
    assert not made.exists()


def test_a_folder_that_was_just_made_or_is_in_use_stays(left):
    folder = left(0)
    with scratch_folder("verify") as used:
        (mark,) = used.glob(".*")
        os.utime(mark, (0, 0))
        with scratch_folder("estimate"):
            assert (folder.is_dir(), used.is_dir()) == (True, True)


def test_an_error_does_not_refer_to_what_is_removed_with_the_folder(tmp_path):
    def fail(hint):
        with scratch_folder("estimate") as made:
            raise MachineError("the server ended", hint=hint.format(made))

    with pytest.raises(MachineError) as caught:
        fail("its log is {}/server.log; go on with --resume")
    assert not caught.value.hint
    with pytest.raises(MachineError) as caught:
        fail(f"its log is {tmp_path}/server.log")
    assert caught.value.hint


def test_a_users_folder_of_such_a_name_stays(left):
    folder = left(3600)
    next(folder.glob(".*")).unlink()
    os.utime(folder, (0, 0))
    with scratch_folder("verify"):
        assert folder.is_dir()
