"""How a script is left: what its training ends by stands, whatever the script makes of it."""

import os
import subprocess
import sys

import pytest
import torch

from autofit.system.errors import InputError
from autofit.system.files import helper_environment
from autofit.training.scripts import leave
from autofit.training.scripts.leave import Enough, Refused, ended, ending, run_until_left
from autofit.training.scripts.plain_loop.patches import _tell_of_memory

TRAINS = "from autofit.training.scripts.leave import ending\nfrom tests.training import test_leave\n"
TRAIN = "\n    with ending():\n        raise test_leave.ENDS\n"
ENDS: BaseException | None = Enough("first")


@pytest.mark.parametrize("ends", [Enough("first"), torch.OutOfMemoryError("CUDA out of memory"), ValueError("nan")])
@pytest.mark.parametrize(
    "script",
    [
        f"try:{TRAIN}except BaseException:\n    pass\n",
        f"try:{TRAIN}except:\n    raise SystemExit(1)\n",
        f"try:{TRAIN}finally:\n    raise RuntimeError('another')\n",
        f"while test_leave.ENDS:\n  try:{TRAIN.replace('    ', '      ')}  except: test_leave.ENDS = None\n",
    ],
)
def test_what_a_training_ends_by_stands_though_the_script_catches_it(tmp_path, monkeypatch, script, ends):
    monkeypatch.setattr("tests.training.test_leave.ENDS", ends)
    path = tmp_path / "train.py"
    path.write_text(TRAINS + script)
    with pytest.raises(type(ends)) as found:
        run_until_left(str(path), [], measured=True)
    assert found.value is ends
    assert leave._ended_by is None


def test_a_script_that_is_run_to_its_end_catches_what_it_likes():
    for _ in range(2):
        with pytest.raises(ValueError, match="own"), ending():
            raise ValueError("its own")


def test_memory_that_ran_out_in_a_loops_model_stands_and_no_other_error_does(monkeypatch):
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(_tell_of_memory, always_call=True)
    found: list[BaseException] = []
    monkeypatch.setattr("autofit.training.scripts.leave._ended_by", found)

    def fails(error):
        def forward(_):
            raise error

        return forward

    full = torch.OutOfMemoryError("CUDA out of memory")
    for error in (ValueError("a bad row"), full):
        monkeypatch.setattr(model, "forward", fails(error))
        with pytest.raises(type(error)):
            model(torch.ones(2))
    assert found == [full]
    ended(full)
    with pytest.raises(torch.OutOfMemoryError), ending():
        pass


def test_a_script_that_ends_without_training_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass")
    with pytest.raises(InputError, match="ended without training"):
        run_until_left(str(path), [])


def test_a_script_that_is_a_link_finds_what_lies_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [*sys.argv])
    for name in ("real", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "real" / "beside_the_file.py").write_text("FOUND = 7")
    (tmp_path / "real" / "train.py").write_text("import beside_the_file\nraise SystemExit(beside_the_file.FOUND)")
    (tmp_path / "bin" / "train.py").symlink_to("../real/train.py")
    with pytest.raises(SystemExit) as ends:
        leave.run(str(tmp_path / "bin" / "train.py"), [])
    assert ends.value.code == 7


STARTS = """
import subprocess, sys
from pathlib import Path
print(subprocess.run([sys.executable, str(Path(__file__).with_name("evaluate.py"))], text=True, capture_output=True))
"""


@pytest.mark.parametrize("own", [None, "elsewhere"])
def test_a_program_that_a_script_starts_finds_its_modules(tmp_path, own):
    (tmp_path / "train.py").write_text(STARTS)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "evaluate.py").write_text("import beside, os\nprint('found, and', os.environ.get('PYTHONPATH'))")
    before = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = f"from autofit.training.scripts import leave; leave.run({str(tmp_path / 'train.py')!r}, [])"
    environment = helper_environment(before if own is None else {**before, "PYTHONPATH": own})
    done = subprocess.run([sys.executable, "-c", run], env=environment, text=True, capture_output=True, check=True)
    assert f"found, and {own}" in done.stdout, done.stdout


_BACKWARD = "torch.zeros(1, requires_grad=True).sum().backward()"
_CHILD = f"""
import pathlib, sys, torch
def train():
    try:
        {_BACKWARD}
    finally:
        pathlib.Path(__file__).with_name("trained").touch()
"""


@pytest.mark.parametrize(
    "starts",
    [
        "import subprocess\nif sys.argv[1:]: train()\nelse: sys.exit(subprocess.call([sys.executable, __file__, '']))",
        pytest.param(
            "import multiprocessing\n"
            "if __name__ == '__main__':\n"
            "    child = multiprocessing.get_context('spawn').Process(target=train)\n"
            "    child.start()\n    child.join()\n    sys.exit(child.exitcode)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_a_described_script_starts_does_not_train(tmp_path, monkeypatch, starts):
    path = tmp_path / "train.py"
    path.write_text(_CHILD + starts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    with pytest.raises(Refused, match=r"train\.py trains in a process that it starts itself"):
        run_until_left(str(path), [], new_files_stay=True)
    assert not (tmp_path / "trained").exists()
    assert os.environ["PYTHONPATH"] == str(tmp_path / "own")


def test_a_described_script_that_trains_in_a_fork_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\nfrom autofit.training.scripts.leave import Enough, ending\n"
        "if not (child := os.fork()):\n    try:\n        with ending():\n            raise Enough('it')\n"
        "    finally:\n        os._exit(1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with pytest.raises(Refused, match="trains in a process that it starts itself"):
        run_until_left(str(path), [], new_files_stay=True)


def test_a_process_that_a_described_script_starts_runs_what_the_user_has_it_begin_with(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.begun = 'own'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "train.py"
    path.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(begun)'], check=True)\n")
    with pytest.raises(InputError, match="ended without training"):
        run_until_left(str(path), [], new_files_stay=True)
