"""The cards of ``autofit estimate --gpu CARD,CARD...``: their names, their number and their prices."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.commands.estimates.other_card import counted_cards
from autofit.machine import gpu_catalogue
from autofit.machine.gpu_catalogue import Card
from autofit.system import units
from autofit.system.errors import InputError, of_option

_MOST_CARDS = 64


def counted_kinds(gpu: str, gpus: int | None) -> tuple[str, int | None]:
    """The names, and how many cards of each train together, where the names say it: ``2x 4090,2x H100``.

    Raises:
        InputError: They say different numbers.
    """
    found = [counted_cards(name, gpus) for name in gpu.split(",")]
    if len({count or 1 for _, count in found}) > 1:
        raise InputError(f"--gpu {gpu!r} says different numbers of cards", hint="give one number for all: --gpus 2")
    return ",".join(name or "" for name, _ in found), found[0][1]


def asked_cards(gpu: str) -> tuple[Card, ...]:
    """The cards of a list of names.

    Raises:
        InputError: One has no name, is unknown, or stands there twice.
    """
    names = [name.strip() for name in gpu.split(",")]
    if not all(names):
        raise InputError(f"--gpu {gpu!r} has a comma without a card", hint="write it like H100,A100-80GB,4090")
    if len(names) > _MOST_CARDS:
        raise InputError(f"--gpu names {len(names)} cards", hint=f"ask about no more than {_MOST_CARDS}")
    found: dict[Card, str] = {}
    for name in names:
        with of_option("--gpu"):
            card = gpu_catalogue.find(name)
        if card in found:
            raise InputError(f"--gpu names {card.name} twice: {found[card]!r} and {name!r}", hint="leave one out")
        found[card] = name
    return tuple(found)


def asked_prices(given: Sequence[str], cards: Sequence[Card]) -> dict[str, float]:
    """The price of an hour of each card, by its name in the catalogue.

    Raises:
        InputError: One is no price, is for a card that is not asked about, or is given twice.
    """
    general: float | None = None
    found: dict[str, float] = {}
    for text in given:
        name, equals, amount = text.rpartition("=")
        price = units.parse_price(amount)
        if not equals:
            if general is not None:
                raise InputError("--price is given twice for every card", hint="write CARD=PRICE/h for one of them")
            general = price
            continue
        known = ", ".join(one.name for one in cards)
        try:
            card = gpu_catalogue.find(name.strip())
        except InputError as error:
            raise InputError(f"--price {text!r}: {error.message}", hint=f"--gpu names {known}") from None
        if card not in cards:
            raise InputError(
                f"--price {text!r} is for {card.name}, which --gpu does not name", hint=f"it names {known}"
            )
        if card.name in found:
            raise InputError(f"--price is given twice for {card.name}", hint="leave one out")
        found[card.name] = price
    return found if general is None else {card.name: found.get(card.name, general) for card in cards}
