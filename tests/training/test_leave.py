"""How a script is left: what its training ends by stands, whatever the script makes of it."""

import pytest
import torch

from autofit.system.errors import InputError
from autofit.training.scripts import leave
from autofit.training.scripts.leave import Enough, ended, ending, run_until_left
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
