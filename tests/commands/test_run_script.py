"""``autofit run``: what it launches, and what it says where that is not the training that was tuned."""

import subprocess

import pytest

from autofit.commands.scripts import run as scripts
from autofit.output.document import DOCUMENT, DOCUMENT_FILE
from autofit.system.errors import InputError
from autofit.system.strict_json import dump_json
from tests.output.test_report import CPU
from tests.output.test_report import document as a_document


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """An answer's folder, a script, and the commands that would have been launched."""
    commands = []

    class Launch:
        pid = 2**22 + 1  # above every process

        def __init__(self, command, **_):
            commands.append(list(map(str, command)))

        def wait(self):
            return 7

    monkeypatch.setattr(subprocess, "Popen", Launch)
    monkeypatch.setattr(scripts, "end_group", lambda _: None)
    (tmp_path / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, a_document(hardware=CPU)))
    (tmp_path / "accelerate.yaml").write_text("")
    (tmp_path / "train.py").write_text("")
    return tmp_path, commands


def test_the_script_gets_its_own_arguments_and_the_plan(launched):
    folder, commands = launched
    said = []
    assert scripts.run(folder, folder / "train.py", ("--lr", "1e-4", "two words"), say=said.append) == 7
    (command,) = commands
    assert command[command.index("--config_file") + 1] == str(folder / "accelerate.yaml")
    assert command[-5:] == [str(folder), str(folder / "train.py"), "--lr", "1e-4", "two words"]
    assert "not for train.py" in " ".join(said)


def test_a_folder_without_the_launchers_file_is_refused(launched):
    folder, commands = launched
    (folder / "accelerate.yaml").unlink()
    with pytest.raises(InputError, match=r"holds no accelerate\.yaml"):
        scripts.run(folder, folder / "train.py", ())
    assert commands == []
