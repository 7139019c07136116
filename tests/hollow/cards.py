"""The emulated card, from the project's catalogue of cards and from what its compute capability implies."""

from __future__ import annotations

import math

from autofit.machine.gpu_catalogue import find
from autofit.system.errors import InputError

SHARED_OPTIN_BYTES = {  # the most shared memory of a block, CUDA programming guide, "Compute Capabilities"
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376, (9, 0): 232448,
    (10, 0): 232448, (10, 3): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip


def describe(name: str, memory_bytes: int | None = None) -> str:
    """The card of that name in the words of ``HOLLOW_CARD``, see ``native/device.cpp``.

    Args:
        name: As the catalogue knows it.
        memory_bytes: In place of the card's own.

    Raises:
        InputError: The catalogue has no such card, or CUDA 13 does not run on it.
    """
    card = find(name)
    if card.capability not in SHARED_OPTIN_BYTES:
        known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_OPTIN_BYTES)
        raise InputError(f"{card.name} has compute capability {card.capability}; cards of {known} can be emulated")
    major, minor = card.capability
    half = card.fp16 or card.fp32
    rates = (card.fp32, card.tf32 or card.fp32, half, card.fp8 or half, card.bandwidth_bytes_per_second)
    assert all(math.isfinite(rate) for rate in rates)
    assert card.l2_bytes
    driver_name = card.driver_names[0] if card.driver_names else f"NVIDIA {card.name}"
    caches = (SHARED_OPTIN_BYTES[card.capability], card.l2_bytes)
    fields = (memory_bytes or card.memory_bytes, f"{major}.{minor}", card.sms, *map(repr, rates), *caches)
    return ":".join(map(str, (*fields, driver_name)))
