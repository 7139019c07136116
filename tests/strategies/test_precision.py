"""What shows that a precision took effect, and what shows that it did not."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest

from autofit.registry import technique
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

PRECISION = technique("precision")
FACTS = cpu_facts()
SEEN = {
    "fp32": {"compute_dtype": "float32", "weights_dtype": "float32"},
    "bf16": {"compute_dtype": "bfloat16", "weights_dtype": "float32"},
    "bf16_weights": {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"},
    "fp16": {"compute_dtype": "float16", "weights_dtype": "float32", "loss_scaled": True},
    "fp8": {"compute_dtype": "bfloat16", "weights_dtype": "float32", "float8_linears": 4},
}


@pytest.mark.parametrize("value", SEEN)
def test_each_value_is_known_by_its_evidence_and_no_other_by_it(value):
    assert [one for one, seen in SEEN.items() if PRECISION.in_effect(value, seen, FACTS) is None] == [value]


def test_float16_without_a_scaled_loss_is_refused():
    seen = {**SEEN["fp16"], "loss_scaled": False}
    assert PRECISION.in_effect("fp16", seen, FACTS) == "the loss is not scaled"


@pytest.mark.slow
def test_a_ctc_loss_is_not_broken_by_a_flag_of_tf32():
    """Which ``tf32: false`` does: PyTorch's two flags of cuDNN differ from then on, and its loss asks for both."""
    speech = dataclasses.replace(FACTS, model=dataclasses.replace(FACTS.model, task="ctc"))
    written = [
        PRECISION.emit(value, PLAIN.replaced(precision=value), facts).training_args["tf32"]
        for facts in (FACTS, speech)
        for value in ("bf16", "tf32")
    ]
    assert written == [False, True, None, True]
    program = """
        import torch
        from autofit.contract.recipe import keep_flags_alike

        torch.backends.fp32_precision = "{value}"
        keep_flags_alike()
        with torch.backends.cudnn.flags(enabled=False):
            assert torch.backends.cuda.matmul.fp32_precision == "{value}"
    """
    for value in ("ieee", "tf32"):
        subprocess.run([sys.executable, "-c", textwrap.dedent(program.format(value=value))], check=True)
