"""Sizes and durations come back as they were written, and nothing else is taken."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.system import units
from autofit.system.errors import InputError
from autofit.system.units import GIB, KIB, MIB, TIB


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("22GiB", 22 * GIB),
        ("22 gib", 22 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("24GB", 24 * 10**9),
        ("500MB", 500 * 10**6),
        ("800m", 800 * MIB),
        ("2k", 2 * KIB),
        ("3kb", 3000),
        ("1TiB", TIB),
        ("0.5tb", 5 * 10**11),
        ("4096", 4096),
        ("4096 b", 4096),
        ("  7MiB  ", 7 * MIB),
    ],
)
def test_a_size_in_words_is_a_number_of_bytes(text, wanted):
    assert units.parse_size(text) == wanted


NO_SIZE = [
    "",
    " ",
    "0",
    "0GiB",
    "0.4",
    "-1GiB",
    "GiB",
    "22GiBs",
    "22%",
    "1e9",
    "inf",
    "nan",
    "1,5g",
    "٢GiB",
    "1.2.3",
    "²",
]


@pytest.mark.parametrize("text", NO_SIZE)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="is not a size") as caught:
        units.parse_size(text)
    assert "22GiB" in caught.value.hint


@pytest.mark.parametrize(("text", "wanted"), [("90%", 900), ("100 %", 1000), ("0.5%", 5), ("2k", 2048), ("77", 77)])
def test_a_limit_is_a_size_or_a_share_of_what_is_free(text, wanted):
    assert units.parse_limit(text, 1000) == wanted


@pytest.mark.parametrize("text", ["24", "90", " 1000000 "])
def test_a_number_that_can_t_be_meant_in_bytes_is_asked_back(text):
    with pytest.raises(InputError, match=f"--memory {text.strip()} is {text.strip()} bytes") as caught:
        units.check_unit(text, "--memory")
    assert f"{text.strip()}GiB" in caught.value.hint


@pytest.mark.parametrize("text", ["1073741824", "24b", "24GiB", "90%", "most"])
def test_what_has_a_unit_or_may_be_bytes_is_not(text):
    units.check_unit(text, "--memory")


@pytest.mark.parametrize("text", ["0%", "101%", "1000%"])
def test_a_share_is_between_nothing_and_everything(text):
    with pytest.raises(InputError, match="not a share"):
        units.parse_limit(text, 1000)


@pytest.mark.parametrize("text", ["", "most", "-5%", "%", "5%%", "5%GiB"])
def test_a_limit_of_another_form_says_both_forms(text):
    with pytest.raises(InputError, match="not a memory limit") as caught:
        units.parse_limit(text, 1000)
    assert "22GiB" in caught.value.hint
    assert "90%" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "wanted"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("0.2", 0.2)]
)
def test_a_duration_in_words_is_a_number_of_seconds(text, wanted):
    assert units.parse_duration(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "0h", "-1s", "ten", "10d", "inf", "nan", "1:30", "10 %"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(InputError, match="is not a duration"):
        units.parse_duration(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_number_or_an_input_error(text):
    for parse in (units.parse_size, units.parse_duration, lambda words: units.parse_limit(words, GIB)):
        try:
            found = parse(text)
        except InputError:
            continue
        assert found > 0
        assert math.isfinite(found)


@settings(deadline=None)
@given(st.integers(1, 10**14), st.sampled_from(["", "b"]))
def test_whole_bytes_are_kept(count, unit):
    assert units.parse_size(f"{count}{unit}") == count


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (200 * MIB, "200 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (141 * GIB, "141 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-3 * GIB // 2, "-1.50 GiB"),
    ],
)
def test_bytes_for_a_person(count, wanted):
    assert units.size(count) == wanted


@settings(deadline=None)
@given(st.integers(1, 10**15))
def test_a_shown_size_reads_back_within_its_last_digit(count):
    assert units.parse_size(units.size(count)) == pytest.approx(count, rel=0.051)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3599.7, "1 h 0 min"),
        (7260, "2 h 1 min"),
    ],
)
def test_seconds_for_a_person(seconds, wanted):
    assert units.duration(seconds) == wanted
