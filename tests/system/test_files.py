"""A file is whole or absent, and what stands in the way is said in words."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.system import files
from autofit.system.errors import InputError, MachineError


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a ü\n.json"
    files.write_atomically(path, "höh\n")
    assert path.read_bytes() == "höh\n".encode()
    files.write_atomically(path, "new")
    assert path.read_text() == "new"
    assert left_in(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("number", "words", "hint"),
    [
        (errno.ENOSPC, "the disk is full", "free some space"),
        (errno.EDQUOT, "the disk is full", "free some space"),
        (errno.EIO, "Input/output error", "check the folder"),
    ],
)
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, number, words, hint):
    path = tmp_path / "answer.json"
    files.write_atomically(path, "old")

    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(MachineError, match=words) as caught:
        files.write_atomically(path, "new")
    assert hint in caught.value.hint
    assert "resume" not in caught.value.hint, "a tune adds that: no other command has it"
    assert str(path) in caught.value.message
    assert path.read_text() == "old"
    assert left_in(tmp_path) == ["answer.json"]


def test_a_full_disk_is_a_machine_error(tmp_path):
    """A limit on the file size is the nearest to a full disk that needs no disk."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from autofit.system import errors, files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "path = Path(sys.argv[1])\n"
        "try:\n    files.write_atomically(path, 'x' * 100)\n"
        "except errors.MachineError as error:\n"
        "    print(error.exit_code, path.read_text(), len(list(path.parent.iterdir())))\n"
    )
    path = tmp_path / "file"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "5 old 1\n"


def test_a_folder_that_a_full_disk_does_not_take_is_told_so(tmp_path, monkeypatch):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "config.json").write_text("{}")
    (tmp_path / "to").mkdir()
    files.copy_folder(tmp_path / "from", tmp_path / "to")
    assert left_in(tmp_path / "to") == ["config.json"]

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", source, None, target)

    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(MachineError) as caught:
        files.copy_folder(tmp_path / "from", tmp_path / "to")
    assert caught.value.message == f"the disk is full: {tmp_path / 'to' / 'config.json'} can't be written"


def test_a_folder_in_the_way_is_a_machine_error(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(MachineError, match="directory"):
        files.write_atomically(tmp_path / "file", "text")
    assert left_in(tmp_path) == ["file"]


def test_a_missing_folder_is_a_machine_error(tmp_path):
    with pytest.raises(MachineError, match="its folder is gone"):
        files.write_atomically(tmp_path / "none" / "file", "text")


def test_a_limit_of_a_file_s_size_is_named(tmp_path):
    with pytest.raises(MachineError, match="no file may grow that large here") as caught, files.writing(tmp_path):
        raise OSError(errno.EFBIG, "File too large")
    assert "ulimit -f" in caught.value.hint


def test_writing_turns_only_system_errors_into_words(tmp_path):
    with pytest.raises(MachineError, match=re.escape(str(tmp_path))), files.writing(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(ValueError, match="mine"), files.writing(tmp_path):
        raise ValueError("mine")
    with files.writing(tmp_path):
        pass


def test_a_usable_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b ü"
    assert files.usable_folder(folder) == folder
    assert files.usable_folder(folder) == folder
    assert left_in(folder) == []


@pytest.mark.parametrize("name", ["latin1", "link"])
def test_what_no_folder_can_be_made_of_is_said(tmp_path, name):
    (tmp_path / "link").symlink_to("nowhere")
    path, words = {
        "latin1": (tmp_path / os.fsdecode(b"donn\xe9es"), "its path is not UTF-8"),
        "link": (tmp_path / "link", "it is a link to nowhere, which is not there"),
    }[name]
    with pytest.raises(InputError, match=words):
        files.usable_folder(path)


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 4000, "nul\0byte", "/proc/none"])
def test_what_can_be_no_output_folder_is_bad_input(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--output") as caught:
        files.usable_folder(tmp_path / name)
    assert caught.value.hint


def test_a_folder_that_nobody_has_named_says_how_another_is_named():
    """A profile goes into a folder of the answer, where no ``--output`` is given."""
    with pytest.raises(InputError, match="can't be written") as caught:
        files.usable_folder(Path("/proc/none"))
    assert "--output" in caught.value.hint


def test_a_full_disk_is_not_blamed_on_the_output_option(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.Path, "write_bytes", full)
    with pytest.raises(MachineError, match="disk is full"):
        files.usable_folder(tmp_path)
