"""GPUs that are not here: memory, bandwidth and peak rates of each card, found by the names people use.

The data is ``cards.json``, one card a line, each with its source. Nothing in it was measured by autofit.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from pydantic import TypeAdapter

from autofit.system.errors import InputError
from autofit.system.units import GIB

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]

_NOISE = frozenset({
    "nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "gpu", "card", "graphics", "tensor", "core",
    "generation", "workstation", "edition",
})  # fmt: skip
"""Words that tell no card from another."""
_LAPTOP = frozenset({"laptop", "mobile", "notebook", "max"})

PCIE_BYTES_PER_SECOND = {7: 15.75e9, 8: 31.5e9, 9: 63e9}
"""Of 16 lanes, one way, raw, by the major compute capability from which on cards have it: 3.0, 4.0, 5.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU, as its datasheet and its driver describe it.

    Peak rates are FLOP/s, dense, never the ones with sparsity, and ``None`` where the card has no such unit or no
    source was found: ``fp32`` in full precision outside of the tensor cores, ``tf32`` on them, ``fp16``, ``bf16``
    and ``fp8`` on them with 32-bit accumulation, which on a GeForce is half of the rate that is advertised. They
    hold at the boost clock of the datasheet: a GeForce that runs faster than that was seen at 106 % of it.

    Attributes:
        name: What tells it from its variants.
        aliases: Other names; one that several cards have is ambiguous.
        driver_names: What ``nvidia-smi`` and torch call it. Cards of different sizes may share one.
        nominal_bytes: The memory that is sold.
        usable_bytes: The total that torch was seen to report, or ``nvidia-smi`` where ``source`` says so. ECC on GDDR
            and what the driver keeps make it smaller, and it moves by some 0.5 % with the driver.
        bandwidth_bytes_per_second: Of the device's memory.
        capability: CUDA's compute capability, ``None`` on AMD.
        sms: Streaming multiprocessors; this and what follows is ``None`` on AMD.
        l2_bytes: The cache that all of them share.
        base_hz, boost_hz: Clocks of the datasheet; ``base_hz`` is ``None`` where no source was found.
        watts: Thermal design power.
        nvlink_bytes_per_second: To the other cards of its machine, one way; ``None`` where they talk over PCIe.
        source: Where the figures are from.
    """

    name: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    nominal_bytes: int
    usable_bytes: int | None = None
    bandwidth_bytes_per_second: float
    capability: tuple[int, int] | None = None
    fp32: float
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    sms: int | None = None
    l2_bytes: int | None = None
    base_hz: int | None = None
    boost_hz: int | None = None
    watts: int | None = None
    nvlink_bytes_per_second: float | None = None
    source: str

    @property
    def bus_bytes_per_second(self) -> float:
        """Of the 16 lanes of PCIe that cards of its generation have, one way, raw; the machine may have fewer."""
        major = 8 if self.capability is None else self.capability[0]
        return since(PCIE_BYTES_PER_SECOND, major)

    @property
    def memory_bytes(self) -> int:
        """What a process can hope for: ``usable_bytes``, else ``nominal_bytes``, which is 1 to 8 % too much."""
        return self.nominal_bytes if self.usable_bytes is None else self.usable_bytes

    def peak(self, precision: Precision) -> float | None:
        """FLOP/s of the unit for ``precision``, ``None`` where there is none."""
        rates = {"fp32": self.fp32, "tf32": self.tf32, "fp16": self.fp16, "bf16": self.bf16, "fp8": self.fp8}
        return rates[precision]

    def rate(self, precision: Precision) -> float:
        """FLOP/s that a matrix product can reach: the peak, or that of fp32 where it is emulated there."""
        return self.peak(precision) or self.fp32

    def precisions(self) -> tuple[str, ...]:
        """What the card computes by itself, in the words of :class:`autofit.contract.facts.Hardware`."""
        if self.capability is None:
            own = {"fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16, "fp16": self.fp16}
            return tuple(precision for precision, peak in own.items() if peak)
        ampere = ("tf32", "bf16") if self.capability >= (8, 0) else ()
        half = ("fp16",) if self.capability >= (7, 0) or self.capability == (6, 0) else ()
        return ("fp32", *ampere, *half)


def since(rates: Mapping[int, float], major: int) -> float:
    """The rate of the newest generation that is not newer; of an older card, of the oldest."""
    return rates[max((one for one in rates if one <= major), default=min(rates))]


@functools.cache
def cards() -> tuple[Card, ...]:
    """Every card, in the order of the file: by maker and generation."""
    text = resources.files("autofit.machine").joinpath("cards.json").read_text("utf-8")
    return TypeAdapter(tuple[Card, ...]).validate_python(json.loads(text)["cards"])


def find(name: str) -> Card:
    """The card that a person means.

    >>> find("4090").name
    'RTX 4090'

    Raises:
        InputError: No card has that name, or several have it.
    """
    tokens = _tokens(name)
    found = _named(tokens)
    if len(found) == 1:
        return found[0]
    if found:
        variants = ", ".join(card.name for card in found)
        raise InputError(f"{name!r} may be several cards", hint=f"say which: {variants}")
    raise InputError(f"{name[:80]!r} is no card that is known here", hint=_hint(tokens))


def count_and_name(text: str) -> tuple[int, str]:
    """How many cards, and of which name: ``2x 4090``, ``8xH100``, ``H100 x8``.

    >>> count_and_name("2x 4090"), count_and_name("4090 x2"), count_and_name("RTX 4090")
    ((2, '4090'), (2, '4090'), (1, 'RTX 4090'))
    """
    before = re.fullmatch(r"\s*([0-9]{1,5})\s*[x×*]\s*(\S.*)", text, re.IGNORECASE)
    after = re.fullmatch(r"(.*[0-9a-z])\s+[x×*]\s?([0-9]{1,3})\s*", text, re.IGNORECASE)
    if before and after:  # "4090 x2": the one that is a card
        before = None if _named(_tokens(after[1])) else before
    if before:
        return int(before[1]), before[2]
    return (int(after[2]), after[1]) if after else (1, text)


def matching(driver_name: str, total_bytes: int) -> Card | None:
    """The card that a real device is, from the name and the total that its driver reports.

    ``None`` for one that is not in the catalogue, such as a CPU or a laptop's, and for a slice of a card.
    """
    fitting = [
        card
        for card in _by_driver_name().get(_key(_tokens(driver_name)), ())
        if 0.88 * card.nominal_bytes < total_bytes < 1.02 * card.nominal_bytes
    ]
    return min(fitting, key=lambda card: abs(card.nominal_bytes - total_bytes), default=None)


def _tokens(name: str) -> list[str]:
    """The words and numbers of a name that tell one card from another.

    >>> _tokens("NVIDIA A100-SXM4-80GiB")
    ['a', '100', 'sxm', '4', '80', 'gb']
    """
    words = re.findall(r"[a-z]+|[0-9]+", name.lower())
    return ["gb" if word in {"g", "gib"} else word for word in words if word not in _NOISE]


def _key(tokens: list[str]) -> str:
    return "".join(tokens)


def _named(tokens: list[str]) -> tuple[Card, ...]:
    """By name or alias, else by the driver's name, else by a name and a size of memory behind it."""
    key = _key(tokens)
    found = _by_name().get(key) or _by_driver_name().get(key) or ()
    if found or tokens[-1:] != ["gb"]:
        return found
    shorter = _by_name().get(_key(tokens[:-2]), ())
    return tuple(card for card in shorter if str(round(card.nominal_bytes / GIB)) == tokens[-2])


def _hint(tokens: list[str]) -> str:
    if _LAPTOP.intersection(tokens):
        return "a laptop's chip is not the desktop card of that name; give its memory instead: --memory 16GiB"
    close = difflib.get_close_matches(_key(tokens), _by_name(), n=10, cutoff=0.7)
    numbers = [token for token in tokens if token.isdigit() and len(token) > 2]
    close.sort(key=lambda key: not any(number in key for number in numbers))
    names = dict.fromkeys(card.name for key in close for card in _by_name()[key])
    if names:
        return f"did you mean {' or '.join(list(names)[:3])}?"
    return "write it as nvidia-smi does, like RTX 4090 or A100-SXM4-80GB, or give its memory instead: --memory 24GiB"


@functools.cache
def _by_name() -> Mapping[str, tuple[Card, ...]]:
    return _index({card: (card.name, *card.aliases) for card in cards()})


@functools.cache
def _by_driver_name() -> Mapping[str, tuple[Card, ...]]:
    return _index({card: card.driver_names for card in cards()})


def _index(names: Mapping[Card, tuple[str, ...]]) -> Mapping[str, tuple[Card, ...]]:
    index: defaultdict[str, dict[Card, None]] = defaultdict(dict)
    for card, its in names.items():
        for name in its:
            index[_key(_tokens(name))][card] = None
    return {key: tuple(found) for key, found in index.items()}
