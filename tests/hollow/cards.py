"""The emulated card, from the project's catalogue of cards and from what its compute capability implies."""

from __future__ import annotations

import math

from autofit.machine.gpu_catalogue import Card, find
from autofit.system.errors import InputError

SHARED_OPTIN_BYTES = {  # the most shared memory of a block, CUDA programming guide, "Compute Capabilities"
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376, (9, 0): 232448,
    (10, 0): 232448, (10, 3): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
CORES_AND_CLOCK = {  # fp32 cores of a multiprocessor, and the boost clock of the largest card of that capability
    (7, 0): (64, 1.53e9), (7, 5): (64, 1.59e9), (8, 0): (64, 1.41e9), (8, 6): (128, 1.70e9), (8, 7): (128, 1.3e9),
    (8, 9): (128, 2.52e9), (9, 0): (128, 1.98e9), (10, 0): (128, 1.92e9), (10, 3): (128, 1.92e9),
    (12, 0): (128, 2.41e9), (12, 1): (128, 2.42e9),
}  # fmt: skip


def multiprocessors(card: Card) -> int:
    """An estimate, from the rate of the fp32 cores: the catalogue does not have the number."""
    cores, clock = CORES_AND_CLOCK[card.capability or (0, 0)]
    return max(2 * round(card.fp32 / (2 * cores * clock) / 2), 2)


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
    driver_name = card.driver_names[0] if card.driver_names else f"NVIDIA {card.name}"
    fields = (memory_bytes or card.memory_bytes, f"{major}.{minor}", multiprocessors(card), *map(repr, rates))
    return ":".join(map(str, (*fields, SHARED_OPTIN_BYTES[card.capability], driver_name)))
