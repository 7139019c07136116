"""The best plan on each of several cards, what a training of so many tokens takes there, and what it costs.

One trace, many clocks: what a step computes and holds does not depend on the card, so that it is traced once; how long
it takes and whether it fits is worked out card by card.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from autofit import space
from autofit.commands.estimates.asked_cards import asked_cards, asked_prices, counted_kinds
from autofit.commands.estimates.other_card import check_one_size, described_model, elsewhere, on_other_card
from autofit.commands.estimates.plans import MOST_KINDS, Estimated, Verdict, estimated_plans
from autofit.commands.estimates.question import asked_question, fetched_config
from autofit.commands.estimates.ways import not_outdone, smaller_way
from autofit.commands.estimates.world import World, asked_world, range_words
from autofit.commands.facts import remarks
from autofit.commands.model_source import modeling_module
from autofit.commands.request import Search
from autofit.commands.scripts.request import script_facts, script_notes
from autofit.contract.facts import Facts, LaunchPath, Task
from autofit.contract.plan import Plan
from autofit.costmodel.families import speed_range, without_checkpointing
from autofit.costmodel.forecast import MARGIN, Forecast, forecast, plans_to_trace
from autofit.costmodel.seconds.utilisation import model_flops, peak_flops
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine.gpu_catalogue import Card
from autofit.output.document import MODEL_FOLDER, TOKENS
from autofit.system import units
from autofit.system.errors import InputError, ModelError, NothingFits
from autofit.system.forking.server import ForkServer
from autofit.system.locks import scratch_folder
from autofit.training.expected_rows import mean_tokens


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
        samples_per_second, tokens_per_second: Predicted, where it fits or is tight.
        low, high: The factors on both that four trainings of five lie within; ``low`` is 0 where the plan steps on the
            host or several cards train together: that host's speed, or their link's, is not known.
        slow_host: How many times as long it takes beside a slow host, for which ``low`` allows.
        mfu: Model FLOPs over the card's peak in the plan's precision; they count all of causal attention's square, of
            which half is computed, so that it may pass 1.
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
    slow_host: float = 1.0
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
        tokens: That hours and cost are of; samples, where these are no text; rows of a script's own training.
        unit: What is counted, in words: ``tokens``, ``images`` or ``rows``.
        sample_tokens: Rows of tokens that make a sample, all of which count: 2 where the model reads a text and writes
            another; 0 where no tokens are counted.
        cards: In the order in which they were asked for.
        fastest, cheapest: Names of cards that a plan fits; ``None`` where nothing fits, or no price was given.
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
    sample_tokens: int = 1
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
        model: Hub id, folder or file with a ``config.json``, or ``demo``; or the path of a training script.
        gpu: Names of cards with commas between them.
        price: Of an hour of a card: ``2.5/h`` for every kind, ``H100=2.5/h`` for one of them.
        tokens: Of the training; by default a script's own, or 1e9.
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
        arguments: What stands behind the script on its command line.
        call: Which of the script's calls of ``train()`` is estimated.
        say: Called with a line of text for each stage.

    Raises:
        InputError: A card is unknown or named twice, a price is for a card that is not asked about, or is no price, the
            tokens are no number from 1 to 1e18, or another argument can't be used.
        ModelError: The model can't be read, or is none for the task.
        MachineError: A helper process can't be started.
    """
    began = time.monotonic()
    if not gpu:
        raise InputError("hours and costs are those of a card with a name", hint="name it: --gpu H100,A100-80GB")
    check_one_size(gpu, memory)
    gpu, gpus = counted_kinds(gpu, gpus)
    asked, world = asked_cards(gpu), asked_world(gpus, nodes, elsewhere=True)
    prices = asked_prices(price, asked)
    tokens = None if tokens is None else units.parse_tokens(tokens)
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
    with scratch_folder("estimate") as folder:
        config = folder / MODEL_FOLDER if request.is_script else fetched_config(request, folder, say)
        modules = () if request.is_script else modeling_module(config)
        server = ForkServer(folder / "forkserver.log", "cpu", modules, trains=request.is_script)
        with contextlib.closing(server):
            kept = cache_folder() if cache else None
            if request.is_script:
                here = script_facts(folder, world.asking(request), "cpu", server, say, tried=False)
                facts = {card: world.of(on_other_card(here, card, card.memory_bytes)) for card in asked}
            else:
                described = described_model(folder, config, request, server, kept)
                facts = {card: world.of(elsewhere(request, described, card, card.memory_bytes)) for card in asked}
            first = facts[asked[0]]
            wanted = _wanted(first, tokens)
            traces = Traces(first, config, lambda: server, folder, kept)
            spaces = {card: _space(facts[card], settings) for card in asked}
            traces.prepare([plan for card in asked for plan in plans_to_trace(spaces[card], facts[card])], say)
            server.rest()
            rows = [
                _on_card(card, facts[card], spaces[card], traces, wanted=wanted, price=prices.get(card.name), say=say)
                for card in asked
            ]
    fitting = [row for row in rows if row.verdict == "fits" and row.hours is not None]
    priced = [row for row in fitting if row.cost is not None]
    work, about = first.workload, first.model
    return CardsEstimate(
        model=str(model),
        parameters=about.parameters,
        seq_len=work.seq_len,
        task=about.task,
        rows=about.rows_of(work.seq_len),
        global_batch=work.global_batch,
        cards_together=world.processes,
        tokens=wanted.amount,
        unit=wanted.unit,
        sample_tokens=about.sample_tokens if wanted.unit == "tokens" else 0,
        cards=tuple(rows),
        fastest=min(fitting, key=lambda row: row.hours or math.inf).card if fitting else None,
        cheapest=min(priced, key=lambda row: row.cost or math.inf).card if priced else None,
        notes=_notes(first, rows, prices, smaller=smaller_way(first, settings), world=world),
        seconds=time.monotonic() - began,
    )


def check_any_fits(found: CardsEstimate) -> None:
    """Leave with a word where there is no plan.

    Raises:
        ModelError: Nothing could be traced.
        NothingFits: No plan fits on any of the cards, not even without the margin.
    """
    if not any(row.plan for row in found.cards):
        raise ModelError("nothing can be estimated", hint="`autofit tune` measures what can't be traced")
    if all(row.hours is None for row in found.cards):
        raise NothingFits("no plan fits", hint="a shorter --seq-len, --allow exact,numeric,method, or larger cards")


# -- what is predicted -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The training that hours and costs are of.

    Attributes:
        amount: How much it takes.
        unit: What that counts.
        samples: The same in samples.
    """

    amount: float
    unit: str
    samples: float


def _wanted(facts: Facts, tokens: float | None) -> _Wanted:
    """The training that was asked about: so many tokens without padding, a script's own, or 1e9."""
    script, own = facts.workload.script, facts.workload.own_rows
    if tokens is None and own:
        return _Wanted(amount=own, unit="rows", samples=own)
    if script is not None and script.tokens is None and tokens is not None:
        raise InputError("--tokens: the script is not trained on text", hint="leave it out")
    amount = TOKENS if tokens is None else tokens
    unit = "tokens" if facts.model.sample_tokens else f"{facts.model.sample}s"
    return _Wanted(amount=amount, unit=unit, samples=amount / (mean_tokens(facts) or facts.tokens_a_sample))


def _space(facts: Facts, settings: Search) -> space.Space:
    """The plans that are asked about, of a model without those that can't be the best."""
    knobs = space.parse_knobs(settings.fix, settings.among, facts)
    build = space.build if facts.workload.script is not None else not_outdone
    return build(facts, space.parse_allowed(settings.allowed), knobs)


def _on_card(
    card: Card,
    facts: Facts,
    plans: space.Space,
    traces: Traces,
    *,
    wanted: _Wanted,
    price: float | None,
    say: Callable[[str], None],
) -> OnCard:
    cast = forecast(plans, traces, facts, card, say)
    found, _, recommended = estimated_plans(plans, cast, traces, facts, MOST_KINDS, say)
    if not found:
        return OnCard(card=card.name, memory_bytes=facts.workload.limit_bytes, price=price)
    best = next((one for one in found if one.plan == recommended), min(found, key=lambda one: one.device_bytes))
    if best.verdict == "too large" or best.samples_per_second is None:
        return OnCard(
            card=card.name,
            memory_bytes=facts.workload.limit_bytes,
            verdict=best.verdict,
            plan=best.plan,
            device_bytes=best.device_bytes,
            price=price,
        )
    return _timed(card, facts, best, cast, traces, wanted=wanted, price=price)


def _timed(
    card: Card, facts: Facts, best: Estimated, cast: Forecast, traces: Traces, *, wanted: _Wanted, price: float | None
) -> OnCard:
    assert best.samples_per_second is not None
    pace = best.samples_per_second
    hours = wanted.samples / pace / 3600
    traces.prepare([without_checkpointing(best.plan)])
    step_flops, peak = model_flops(traces, best.plan, facts), peak_flops(card, best.plan, facts)
    mfu = None if not step_flops or not peak else step_flops * pace / facts.workload.global_batch / peak
    low, high = speed_range(best.plan, facts, cast.spread, best.slow_host) if cast.spread else (None, None)
    return OnCard(
        card=card.name,
        memory_bytes=facts.workload.limit_bytes,
        verdict=best.verdict,
        plan=best.plan,
        device_bytes=best.device_bytes,
        samples_per_second=pace,
        tokens_per_second=pace * (mean_tokens(facts) or facts.tokens_a_sample),
        low=low,
        high=high,
        slow_host=best.slow_host,
        mfu=mfu,
        hours=hours,
        price=price,
        cost=None if price is None else hours * price * facts.workload.processes,
    )


def _notes(
    facts: Facts, rows: Sequence[OnCard], prices: Mapping[str, float], *, smaller: str | None, world: World
) -> tuple[str, ...]:
    script = facts.workload.script
    said = script_notes(facts, tried=False) or remarks(facts.workload.seq_len, facts.model, "cuda")
    if script is not None and script.mean_share < 1:
        said.append("hours and costs are those of its longest rows, so they are less by the padding that is saved")
    together = world.processes > 1
    if together:
        said.append(f"{world.words()}; hours and costs are of all of them, a price is of one card")
    if smaller and any(row.verdict == "too large" for row in rows):
        said.append(smaller)
    if any(row.verdict == "tight" for row in rows):
        said.append(f"tight: the card has not {MARGIN:.0%} more than the plan needs, so that it is not ranked")
    if any(row.mfu > 1 for row in rows if row.mfu):
        said.append("MFU counts attention's whole square, of which a causal kernel computes half: hence above 100 %")
    if spread := max((row.high for row in rows if row.high), default=None):
        on_host = not together and any(row.low == 0 for row in rows)
        slow = max(row.high * row.slow_host for row in rows if row.high) / spread  # down to the least low of them
        said.append(f"speeds are {range_words(spread, processes=world.processes, on_host=on_host, slow_host=slow)}")
    if prices and (without := [row.card for row in rows if row.price is None]):
        said.append(f"no price was given for {', '.join(without)}")
    return tuple(said)
