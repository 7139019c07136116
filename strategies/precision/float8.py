"""Products in float8: where the device has them, and how a model's linear layers get them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import Choice, Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts

_CAPABILITIES = (8, 9)


def float8_choice(facts: Facts, lacking: str | None) -> Choice:
    """Whether linear layers can multiply in float8 here; ``lacking`` is what its package lacks, in words."""
    hardware = facts.hardware
    reasons = {
        "a CPU has no float8 products for training": hardware.device == "cpu",
        f"{hardware.name} is older than Ada and has no float8": (hardware.capability or (0, 0)) < _CAPABILITIES,
    }
    why_not = next((words for words, holds in reasons.items() if holds), lacking)
    good = "linear layers multiply in float8; faster than bf16 only where the step is compiled"
    return Choice("fp8", Kind.NUMERIC, "withheld" if why_not else "on_request", why_not or good)


def multiply_in_float8(model: PreTrainedModel) -> PreTrainedModel:
    """Put float8 products into the linear layers, but not into the head; weights stay the same tensors."""
    torchao = import_module("torchao.float8")
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def fits(module: Any, _: str) -> bool:
        return module is not head and module.in_features % 16 == 0 and module.out_features % 16 == 0

    # the rows of a micro-step need not be a multiple of 16
    config = torchao.Float8LinearConfig(pad_inner_dim=True)
    converted: PreTrainedModel = torchao.convert_to_float8_training(model, config=config, module_filter_fn=fits)
    return converted
