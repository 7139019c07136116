"""TRL's SFTTrainer, launched with what a tiny tune wrote: what it takes as written, and what it does by itself."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support.tiny import REPOSITORY, SUPPORT, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install trl"),
]
OWN_LOSS = "TRL's trainer takes the loss itself, a chunk of the logits at a time"


def command(folder, *words):
    """Runs a program as a shell in ``folder`` does; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Output folders of tiny tunes of one plan, by its values."""
    known = {}

    def find(*values):
        if values not in known:
            folder = tmp_path_factory.mktemp("sft")
            write_config(folder / "tiny", vocab_size=512)
            fixed = [word for value in ("micro_batch=2", *values) for word in ("--fix", value)]
            command(folder, "autofit", "tune", "tiny", "--trials", 1, "--global-batch", 4, "--no-guard", *fixed)
            known[values] = folder
        return known[values]

    return find


def sft(folder, *ways):
    """What a launch of the script told."""
    script = SUPPORT / "train_sft.py"
    words = ("accelerate.commands.launch", "--config_file", "autofit-out/accelerate.yaml", script, "autofit-out", *ways)
    return json.loads(command(folder, *words).splitlines()[-1])


@pytest.mark.by_hand
def test_what_is_written_rules_over_its_defaults(tuned):
    """By itself it switches bf16 and checkpointing on; and its loss is its own, whatever was measured."""
    told = sft(tuned("precision=fp32", "checkpointing=off", "kernels=none"))
    assert (told["bf16"], told["checkpointing"], told["rows"], told["steps"]) == (False, False, 2, 2)
    (ignored,) = told["ignored"]
    assert ignored.startswith("kernels=none: ")
    assert OWN_LOSS in ignored
    told = sft(tuned("precision=fp32", "checkpointing=full", "kernels=chunked_ce"))
    assert (told["bf16"], told["checkpointing"]) == (False, True)
    (ignored,) = told["ignored"]
    assert ignored.startswith("kernels=chunked_ce: ")


def test_packed_rows_are_a_shape_that_was_not_measured(tuned):
    told = sft(tuned("precision=fp32", "checkpointing=off", "kernels=none"), "packing")
    assert any(one.startswith("micro_batch=2: 1 rows went through the model") for one in told["ignored"])


def test_an_adapter_of_the_script_s_own_is_told(tuned):
    told = sft(tuned("precision=fp32", "checkpointing=off", "kernels=none"), "lora")
    assert any(one.startswith("adapter=none: the model has an adapter") for one in told["ignored"])


@pytest.mark.by_hand
def test_an_adapter_of_the_plan_is_trained(tuned):
    told = sft(tuned("precision=fp32", "checkpointing=off", "kernels=none", "adapter=lora:r=4"))
    assert [one.partition("=")[0] for one in told["ignored"]] == ["kernels"]
