"""The table over several cards: what is asked, what is told, and what is refused."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from autofit import cli
from autofit.commands.estimates import cards
from autofit.commands.estimates import estimate as estimates
from autofit.commands.estimates.answer import amount
from autofit.commands.estimates.cards import (
    CARDS_ESTIMATE,
    CardsEstimate,
    OnCard,
    asked_cards,
    asked_prices,
    check_any_fits,
    estimate_cards,
)
from autofit.commands.estimates.cards_table import _mfu, cards_table
from autofit.commands.estimates.world import World
from autofit.commands.shell.terminal import data_console
from autofit.machine import gpu_catalogue
from autofit.system.errors import InputError
from autofit.system.units import MIB, parse_tokens
from tests.support.replay import Lent
from tests.support.synthetic import cuda_facts

BOTH = ("H100", "4090")


def test_cards_are_found_by_the_names_people_use():
    assert [card.name for card in asked_cards("H100, A100-80GB,4090 ,L40S")] == [
        "H100 SXM 80 GB", "A100 SXM 80 GB", "RTX 4090", "L40S",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("H100,,4090", "a comma without a card"),
        ("H100,", "a comma without a card"),
        ("H100,H9000", "'H9000' is no card"),
        ("H100,H100", "names H100 SXM 80 GB twice"),
        ("RTX 4090,4090", "names RTX 4090 twice"),
        (",".join(["H100"] * 65), "names 65 cards"),
    ],
)
def test_a_list_of_cards_that_is_none_is_refused(gpu, words):
    with pytest.raises(InputError, match=words):
        asked_cards(gpu)


def test_a_price_is_for_every_card_or_for_one():
    cards = asked_cards(",".join(BOTH))
    assert asked_prices(["2.5/h"], cards) == {"H100 SXM 80 GB": 2.5, "RTX 4090": 2.5}
    assert asked_prices(["H100=$3/hour"], cards) == {"H100 SXM 80 GB": 3.0}
    assert asked_prices(["2.5/h", "4090=0.4/h"], cards) == {"H100 SXM 80 GB": 2.5, "RTX 4090": 0.4}
    assert asked_prices([], cards) == {}


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        (["cheap"], "no price of an hour"),
        (["-1/h"], "no price of an hour"),
        (["H100="], "no price of an hour"),
        (["9" * 305], "no price of an hour"),
        (["A100-80GB=1/h"], "which --gpu does not name"),
        (["H9000=1/h"], "'H9000' is no card that is known here\nhint: --gpu names H100 SXM 80 GB, RTX 4090"),
        (["A100=1/h"], "'A100' may be several cards\nhint: --gpu names H100 SXM 80 GB, RTX 4090"),
        (["1/h", "2/h"], "twice for every card"),
        (["H100=1/h", "h100=2/h"], "twice for H100 SXM 80 GB"),
    ],
)
def test_a_price_that_is_none_is_refused(prices, words):
    with pytest.raises(InputError, match=words):
        asked_prices(prices, asked_cards(",".join(BOTH)))


def test_a_large_amount_is_written_out():
    assert [amount(one) for one in (1_234_567.0, 1e6, 987_654.0, 61.342, 0.35412)] == [
        "1,230,000", "1,000,000", "988,000", "61.3", "0.354",
    ]  # fmt: skip


def test_tokens_are_a_number_that_a_training_can_have():
    assert parse_tokens("2.5e8") == 2.5e8
    for given in ("0", "-1", "nan", "inf", "many", "", "0.5", "1e300"):
        with pytest.raises(InputError, match=r"no number of tokens from 1 to 1e\+18"):
            parse_tokens(given)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H100,H100"], "twice"),
        (["--gpu", "H100", "--tokens", "0"], "from 1 to 1e+18"),
        (["--gpu", "H100", "--price", "4090=1/h"], "does not name"),
        (["--tokens", "1e9"], "a card with a name"),
        (["--memory", "24GiB", "--tokens", "1e9"], "a card with a name"),
        (["--gpu", "H100", "--memory", "24GiB", "--tokens", "1e9"], "both say how large the card is"),
        (["--gpu", "2x H100,4090"], "says different numbers of cards"),
        (["--gpu", "2x H100", "--gpus", "4", "--tokens", "1e9"], "says 2 cards and --gpus says 4"),
        (["--gpu", "H100,4090", "--gpus", "0"], "out of range"),
    ],
)
def test_the_command_refuses_with_exit_code_2(arguments, words):
    found = CliRunner().invoke(cli.main, ["estimate", "demo", *arguments])
    assert found.exit_code == 2
    assert words in found.stderr


@pytest.fixture
def told(server, monkeypatch):
    """The demo on two kinds of card."""
    monkeypatch.setattr(cards, "ForkServer", lambda *_, **__: Lent(server))
    return lambda gpu="H100,4090": estimate_cards(
        "demo",
        gpu=gpu,
        price=["4090=0.5/h"],
        tokens=1e9,
        seq_len=32,
        global_batch=8,
        fix={"precision": "bf16", "optimizer": "adamw"},
    )


def test_the_note_of_a_table_names_the_least_and_the_most_of_its_ranges():
    """The slowest host of one card was taken with the widest range of another: 0.73 was nobody's least."""
    ranges = ((1.10, 1.06), (1.30, 1.0), (1.05, 1.2))
    rows = [
        OnCard(card=str(high), memory_bytes=1, low=1 / high / slow, high=high, slow_host=slow) for high, slow in ranges
    ]
    (said,) = [one for one in cards._notes(cuda_facts(), rows, {}, smaller=None, world=World()) if "speeds are" in one]
    assert "lie within 0.77 to 1.30 times them" in said


def test_a_utilisation_above_one_hundred_percent_is_explained():
    """Its range ended at 100 %, below it."""
    row = OnCard(card="A100", memory_bytes=1, low=0.8, high=1.25, mfu=1.12)
    assert _mfu(row) == "112% (90% to 112%)"
    assert _mfu(dataclasses.replace(row, mfu=0.9)) == "90% (72% to 100%)"
    said = [
        [one for one in cards._notes(cuda_facts(), [each], {}, smaller=None, world=World()) if "MFU" in one]
        for each in (row, dataclasses.replace(row, mfu=0.9), dataclasses.replace(row, mfu=None))
    ]
    words = "MFU counts attention's whole square, of which a causal kernel computes half: hence above 100 %"
    assert said == [[words], [], []]


@pytest.mark.slow
def test_each_card_has_its_best_plan_hours_and_cost(told):
    told = told()
    first, second = told.cards
    assert (first.card, second.card) == ("H100 SXM 80 GB", "RTX 4090")
    for one in told.cards:
        assert one.verdict == "fits"
        assert one.tokens_per_second == pytest.approx(one.samples_per_second * 32)
        assert one.hours == pytest.approx(1e9 / one.tokens_per_second / 3600)
        assert 0 < one.low < 1 < one.high
        assert 0 < one.mfu < 1
        card = gpu_catalogue.find(one.card)
        flops = one.mfu * card.bf16
        assert one.samples_per_second * 32 * 6 * 7.3e6 == pytest.approx(flops, rel=0.5)
    assert first.samples_per_second >= second.samples_per_second
    assert (first.price, first.cost) == (None, None)
    assert second.cost == pytest.approx(second.hours * 0.5)
    assert told.cheapest == "RTX 4090"
    shown = _shown(told)
    assert "no price was given for H100 SXM 80 GB" in shown
    assert "cheapest: RTX 4090" in shown
    assert json.loads(CARDS_ESTIMATE.dump_json(told))["cards"][1]["cost"] == second.cost


@pytest.mark.slow
def test_the_usual_global_batch_is_told(server, monkeypatch):
    monkeypatch.setattr(cards, "ForkServer", lambda *_, **__: Lent(server))
    asked = {"seq_len": 32, "global_batch": None, "fix": {"precision": "bf16", "optimizer": "adamw"}}
    found = estimate_cards("demo", gpu="H100,4090", **asked)
    assert found.global_batch == 32
    assert "global batch 32;" in _shown(found)


@pytest.mark.slow
def test_hours_of_a_model_that_reads_no_text_are_of_its_samples(told):
    found = told()
    assert found.unit == "tokens"
    assert "tokens/s" in _shown(found)
    shown = _shown(dataclasses.replace(found, unit="images"))
    assert "hours for 1B images" in shown
    assert "tokens" not in shown.split("fastest:")[0].partition("hours for")[2]


def test_tokens_of_a_model_that_reads_one_text_and_writes_another_are_those_of_both():
    rest = {"parameters": 1, "seq_len": 128, "task": "", "rows": "", "global_batch": 8, "tokens": 1e9, "cards": ()}
    found = CardsEstimate(model="t5", fastest=None, cheapest=None, notes=(), seconds=1.0, sample_tokens=2, **rest)
    assert "hours for 1B tokens of both its texts" in _shown(found)
    assert "texts" not in _shown(dataclasses.replace(found, sample_tokens=1))


@pytest.mark.slow
def test_cards_that_train_together_are_told_and_paid_for_together(told):
    found = told("2x 4090")
    (pair,) = found.cards
    assert (found.cards_together, pair.card) == (2, "RTX 4090")
    assert pair.plan["parallel"] != "none"
    assert pair.hours == pytest.approx(1e9 / pair.tokens_per_second / 3600)
    assert pair.cost == pytest.approx(pair.hours * 0.5 * 2)
    shown = " ".join(_shown(found).split())
    assert "2x RTX 4090" in shown
    assert "hours and costs are of all of them" in shown
    assert "how far the link between cards is off is not known" in shown
    assert "fastest" not in shown, "of one kind"


@pytest.mark.slow
def test_a_plan_without_the_margin_is_told_as_tight_and_not_ranked(server, monkeypatch):
    monkeypatch.setattr(cards, "ForkServer", lambda *_, **__: Lent(server))
    asked = {"gpu": "4090,H100", "price": ["1/h"], "tokens": 1e9, "seq_len": 32, "global_batch": 8}
    held = {"micro_batch": 8, "precision": "bf16", "optimizer": "adamw", "checkpointing": "off", "kernels": "none"}
    held |= {"offload": "none", "compile": "off"}
    roomy, other = estimate_cards("demo", fix=held, **asked).cards

    def small(gpu, *, need=roomy.device_bytes + MIB):
        return tuple(dataclasses.replace(one, usable_bytes=need) for one in asked_cards(gpu))

    monkeypatch.setattr(cards, "asked_cards", small)
    found = estimate_cards("demo", fix=held, **asked)
    assert [one.verdict for one in found.cards] == ["tight", "too large"]
    assert found.cards[0].hours == roomy.hours
    assert (found.fastest, found.cheapest) == (None, None)
    check_any_fits(found)
    shown = " ".join(_shown(found).split())
    assert "iB, tight ~" in shown
    assert "tight: the card has not 5% more than the plan needs, so that it is not ranked" in shown
    assert other.device_bytes > roomy.device_bytes


@pytest.mark.slow
def test_where_nothing_fits_the_plan_that_needs_the_least_is_told(told, monkeypatch):
    needs, real = [], cards.estimated_plans

    def largest_first(*given):
        found, count, _ = real(*given)
        needs.append(sorted(one.device_bytes for one in found))
        large = [dataclasses.replace(one, verdict="too large") for one in found]
        return sorted(large, key=lambda one: -one.device_bytes), count, None

    monkeypatch.setattr(cards, "estimated_plans", largest_first)
    (one,) = told("4090").cards
    assert needs[0][0] < needs[0][-1]
    assert one.device_bytes == needs[0][0]


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_table_recommends_what_the_estimate_of_one_card_does(server, monkeypatch):
    for module in (cards, estimates):
        monkeypatch.setattr(module, "ForkServer", lambda *_, **__: Lent(server))
    asked = {"gpu": "H100", "seq_len": 128, "allow": "exact,numeric,method"}
    assert estimate_cards("demo", tokens=1e9, **asked).cards[0].plan == estimates.estimate("demo", **asked).recommended


def _shown(found):
    console = data_console(140)
    with console.capture() as captured:
        console.print(cards_table(found))
    return captured.get()
