"""One real tune, and what it wrote launched for real; tests/commands/test_launch.py does so in every way."""

import pytest

from autofit.contract.outcome import Measured
from autofit.output.document import read_document
from tests.commands.test_launch import check_trained, command, launched
from tests.support.tiny import write_config


@pytest.mark.serial
def test_a_tune_writes_what_accelerate_launch_runs(tmp_path):
    write_config(tmp_path / "tiny", vocab_size=1024)
    held = (f"--fix={knob}" for knob in ("precision=fp32", "kernels=none", "optimizer=adamw", "attention=default"))
    words = ("--output", "out", "--trials", 2, "--global-batch", 4, "--device", "cpu", *held)
    done = command(tmp_path, "autofit", "tune", "tiny", *words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    found = read_document(folder)
    assert all(isinstance(trial.outcome, Measured) for trial in found.trials)
    assert found.plan in {trial.plan for trial in found.trials if trial.purpose == "final"}
    assert found.promise.peak_bytes <= found.promise.limit_bytes
    assert found.guard is not None
    check_trained(launched(folder, "train_trainer.py", "out/training_args.json"), folder)
