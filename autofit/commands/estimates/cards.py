"""The best plan on each of several cards, what a training of so many tokens takes there, and what it costs.

One trace, many clocks: what a step computes and holds does not depend on the card, so that it is traced once; how long
it takes and whether it fits is worked out card by card.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from autofit import space
from autofit.commands.estimates.other_card import check_one_size, counted_cards, described_model, elsewhere
from autofit.commands.estimates.plans import MOST_KINDS, Estimated, Verdict, estimated_plans
from autofit.commands.estimates.question import asked_question, fetched_config
from autofit.commands.estimates.ways import smaller_way
from autofit.commands.estimates.world import World, asked_world, range_words
from autofit.commands.facts import remarks
from autofit.commands.model_source import modeling_module
from autofit.commands.request import Search
from autofit.contract.facts import Facts, LaunchPath, Model, Task
from autofit.contract.plan import Plan
from autofit.costmodel.families import speed_range, without_checkpointing
from autofit.costmodel.forecast import Forecast, forecast
from autofit.costmodel.seconds.utilisation import model_flops, peak_flops
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine import gpu_catalogue
from autofit.machine.gpu_catalogue import Card
from autofit.output.document import TOKENS
from autofit.system import units
from autofit.system.errors import InputError, ModelError, NothingFits, of_option
from autofit.system.fork_server import ForkServer

_MOST_CARDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """The best plan on one card.

    Attributes:
        card: The catalogue's name.
        memory_bytes: What a process can have of it.
        verdict: Of the plan: ``fits``, ``tight`` (without the margin) or ``too large``; ``None`` where nothing could be
            traced.
        plan: The recommended one: of those that fit and are as fast as the fastest the simplest, else the one that
            needs the least.
        device_bytes: What it needs.
        samples_per_second, tokens_per_second: Predicted, where it fits.
        low, high: The factors on both that four trainings of five lie within; ``low`` is 0 where the plan steps on the
            host or several cards train together: that host's speed, or their link's, is not known.
        mfu: Model FLOPs over the card's peak in the plan's precision.
        hours: For the tokens asked about.
        price: Of an hour of one card, where it was given.
        cost: Of those hours of all cards that train together.
    """

    card: str
    memory_bytes: int
    verdict: Verdict | None = None
    plan: Plan | None = None
    device_bytes: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    mfu: float | None = None
    hours: float | None = None
    price: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsEstimate:
    """The answer of ``autofit estimate --gpu CARD,CARD...``.

    Attributes:
        task: What the model is trained for.
        rows: The rows, in words.
        cards_together: How many cards of a kind train together.
        tokens: That hours and cost are of; samples, where these are no text.
        unit: What is counted, in words: ``tokens``, or ``images``.
        cards: In the order in which they were asked for.
        fastest, cheapest: Names of cards; ``None`` where nothing fits, or no price was given.
        notes: What was assumed.
    """

    model: str
    parameters: int
    seq_len: int
    task: str
    rows: str
    global_batch: int
    cards_together: int = 1
    tokens: float
    unit: str = "tokens"
    cards: tuple[OnCard, ...]
    fastest: str | None
    cheapest: str | None
    notes: tuple[str, ...]
    seconds: float


CARDS_ESTIMATE: TypeAdapter[CardsEstimate] = TypeAdapter(CardsEstimate)


def estimate_cards(
    model: str,
    *,
    gpu: str | None,
    price: Sequence[str] = (),
    tokens: str | float | None = None,
    memory: str | int | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    allow: str | Sequence[str] = "exact,numeric",
    fix: space.Knobs = (),
    among: space.Knobs = (),
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    arguments: Sequence[str] = (),
    call: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> CardsEstimate:
    """Predict the best plan on each of several cards, and what a training takes and costs there.

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``.
        gpu: Names of cards with commas between them.
        price: Of an hour of a card: ``2.5/h`` for every kind, ``H100=2.5/h`` for one of them.
        tokens: Of the training; 1e9 by default.
        memory: Not taken: how fast a card is can't be told from its memory.
        gpus: Cards of each kind that train together in a machine; hours and costs are those of all of them.
        nodes: Machines that have as many cards each.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step; by default 32.
        allow: Classes of techniques that may be used.
        fix: A value for each knob that is held.
        among: The values that a knob is restricted to.
        launch_path: ``trainer`` or ``loop``.
        task: What the model is to be trained for; by default what its config names.
        trust_remote_code: Whether the model's own code may run.
        cache: Whether traces are read from the user's cache folder, and written there.
        arguments: Of a script, which is not taken.
        call: The same.
        say: Called with a line of text for each stage.

    Raises:
        InputError: A card is unknown or named twice, a price is for a card that is not asked about, or is no price, the
            tokens are no number above zero, or another argument can't be used.
        ModelError: The model can't be read, or is none for the task.
        MachineError: A helper process can't be started.
    """
    began = time.monotonic()
    if not gpu:
        raise InputError("hours and costs are those of a card with a name", hint="name it: --gpu H100,A100-80GB")
    check_one_size(gpu, memory)
    gpu, gpus = _counted(gpu, gpus)
    asked, world = asked_cards(gpu), asked_world(gpus, nodes, elsewhere=True)
    prices = asked_prices(price, asked)
    wanted = TOKENS if tokens is None else units.parse_tokens(tokens)
    request, settings = asked_question(
        model,
        seq_len=seq_len,
        global_batch=global_batch,
        allow=allow,
        fix=fix,
        among=among,
        launch_path=launch_path,
        task=task,
        trust_remote_code=trust_remote_code,
        arguments=arguments,
        call=call,
    )
    if request.is_script:
        raise InputError(f"{model}: a script is estimated on one card", hint="--gpu NAME, and no --tokens or --price")
    with tempfile.TemporaryDirectory(prefix="autofit-estimate-") as scratch:
        folder = Path(scratch)
        config = fetched_config(request, folder, say)
        server = ForkServer(folder / "forkserver.log", "cpu", modeling_module(config), trains=False)
        with contextlib.closing(server):
            kept = cache_folder() if cache else None
            described = described_model(folder, config, request, server, kept)
            facts = {card: world.of(elsewhere(request, described, card, card.memory_bytes)) for card in asked}
            traces = Traces(facts[asked[0]], config, lambda: server, folder, kept)
            rows = [
                _on_card(card, facts[card], settings, traces, wanted=wanted, price=prices.get(card.name), say=say)
                for card in asked
            ]
    fitting = [row for row in rows if row.hours is not None]
    priced = [row for row in fitting if row.cost is not None]
    work = facts[asked[0]].workload
    return CardsEstimate(
        model=str(model),
        parameters=described.parameters,
        seq_len=work.seq_len,
        task=described.task,
        rows=described.rows_of(work.seq_len),
        global_batch=work.global_batch,
        cards_together=world.processes,
        tokens=wanted,
        unit="tokens" if described.sample_tokens else f"{described.sample}s",
        cards=tuple(rows),
        fastest=min(fitting, key=lambda row: row.hours or math.inf).card if fitting else None,
        cheapest=min(priced, key=lambda row: row.cost or math.inf).card if priced else None,
        notes=_notes(
            work.seq_len, described, rows, prices, smaller=smaller_way(facts[asked[0]], settings), world=world
        ),
        seconds=time.monotonic() - began,
    )


def check_any_fits(found: CardsEstimate) -> None:
    """Leave with a word where there is no plan.

    Raises:
        ModelError: Nothing could be traced.
        NothingFits: No plan fits on any of the cards.
    """
    if not any(row.plan for row in found.cards):
        raise ModelError("nothing can be estimated", hint="`autofit tune` measures what can't be traced")
    if found.fastest is None:
        raise NothingFits("no plan fits", hint="a shorter --seq-len, --allow exact,numeric,method, or larger cards")


# -- what was asked ---------------------------------------------------------------------------------------------------


def _counted(gpu: str, gpus: int | None) -> tuple[str, int | None]:
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
        with of_option(f"--price {text!r}:"):
            card = gpu_catalogue.find(name.strip())
        if card not in cards:
            known = ", ".join(one.name for one in cards)
            raise InputError(
                f"--price {text!r} is for {card.name}, which --gpu does not name", hint=f"it names {known}"
            )
        if card.name in found:
            raise InputError(f"--price is given twice for {card.name}", hint="leave one out")
        found[card.name] = price
    return found if general is None else {card.name: found.get(card.name, general) for card in cards}


# -- what is predicted -----------------------------------------------------------------------------------------------


def _on_card(
    card: Card,
    facts: Facts,
    settings: Search,
    traces: Traces,
    *,
    wanted: float,
    price: float | None,
    say: Callable[[str], None],
) -> OnCard:
    knobs = space.parse_knobs(settings.fix, settings.among, facts)
    plans = space.build(facts, space.parse_allowed(settings.allowed), knobs)
    cast = forecast(plans, traces, facts, card, say)
    found, _, recommended = estimated_plans(plans, cast, traces, facts, MOST_KINDS, say)
    if not found:
        return OnCard(card=card.name, memory_bytes=card.memory_bytes, price=price)
    best = next((one for one in found if one.plan == recommended), found[0])
    if best.verdict == "too large" or best.samples_per_second is None:
        return OnCard(
            card=card.name,
            memory_bytes=card.memory_bytes,
            verdict=best.verdict,
            plan=best.plan,
            device_bytes=best.device_bytes,
            price=price,
        )
    return _timed(card, facts, best, cast, traces, wanted=wanted, price=price)


def _timed(
    card: Card, facts: Facts, best: Estimated, cast: Forecast, traces: Traces, *, wanted: float, price: float | None
) -> OnCard:
    assert best.samples_per_second is not None
    pace = best.samples_per_second
    tokens = pace * facts.tokens_a_sample
    hours = wanted / tokens / 3600
    traces.prepare([without_checkpointing(best.plan)])
    step_flops, peak = model_flops(traces, best.plan, facts), peak_flops(card, best.plan, facts)
    mfu = None if not step_flops or not peak else step_flops * pace / facts.workload.global_batch / peak
    low, high = speed_range(best.plan, facts, cast.spread) if cast.spread else (None, None)
    return OnCard(
        card=card.name,
        memory_bytes=card.memory_bytes,
        verdict=best.verdict,
        plan=best.plan,
        device_bytes=best.device_bytes,
        samples_per_second=pace,
        tokens_per_second=tokens,
        low=low,
        high=high,
        mfu=mfu,
        hours=hours,
        price=price,
        cost=None if price is None else hours * price * facts.workload.processes,
    )


def _notes(
    length: int, model: Model, rows: Sequence[OnCard], prices: Mapping[str, float], *, smaller: str | None, world: World
) -> tuple[str, ...]:
    said = remarks(length, model, "cuda")
    together = world.processes > 1
    if together:
        said.append(f"{world.words()}; hours and costs are of all of them, a price is of one card")
    if smaller and any(row.verdict == "too large" for row in rows):
        said.append(smaller)
    if spread := max((row.high for row in rows if row.high), default=None):
        on_host = not together and any(row.low == 0 for row in rows)
        said.append(f"speeds are {range_words(spread, processes=world.processes, on_host=on_host)}")
    if prices and (without := [row.card for row in rows if row.price is None]):
        said.append(f"no price was given for {', '.join(without)}")
    return tuple(said)
