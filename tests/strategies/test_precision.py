"""What shows that a precision took effect, and what shows that it did not."""

import pytest

from autofit.registry import technique
from tests.support.synthetic import cpu_facts

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
