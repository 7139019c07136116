"""The trees of errors: the drawing at the top of the file is the tree, and the hints point at what is near."""

import re

import pytest

from autofit.system import errors
from autofit.system.errors import AutofitError, near
from autofit.system.units import parse_size


def family():
    """Every error class of the module, by name."""
    return {
        name: one
        for name, one in vars(errors).items()
        if isinstance(one, type)
        and issubclass(one, errors._Told)
        and one.__module__ == errors.__name__
        and name[0] != "_"
    }


def test_the_drawing_is_the_tree():
    drawn, above = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"(.*?)(\w+)\s+(\d+)\s{2,}\S", line)
        if not found:
            continue
        depth = len(found[1])
        above = [(column, name) for column, name in above if column < depth]
        drawn[found[2]] = (int(found[3]), above[-1][1] if above else "_Told")
        above.append((depth, found[2]))
    assert drawn == {name: (one.exit_code, one.__bases__[0].__name__) for name, one in family().items()}


def test_the_exit_codes_are_those_that_are_promised():
    codes = {name: one.exit_code for name, one in family().items()}
    assert codes == {
        "AutofitError": 1,
        "EmissionError": 1,
        "InputError": 2,
        "ModelError": 2,
        "NothingFits": 3,
        "PromiseBroken": 4,
        "MachineError": 5,
        "LockHeld": 5,
        "CantWrite": 5,
        "ServerLost": 5,
        "Stopped": 130,
        "Interrupted": 130,
        "Terminated": 143,
    }


@pytest.mark.parametrize("kind", family().values(), ids=family())
def test_an_error_carries_words_and_a_hint(kind):
    error = kind("it is so", hint="do this")
    assert isinstance(error, AutofitError if kind.exit_code < 128 else KeyboardInterrupt)
    assert isinstance(error, Exception) == (kind.exit_code < 128), "what stops a tune stops a loop around it, too"
    assert (error.message, error.hint) == ("it is so", "do this")
    assert str(error) == "it is so\nhint: do this"
    assert str(kind("it is so")) == "it is so"


def test_a_hint_may_be_given_later():
    error = errors.Interrupted("stopped")
    error.hint = "go on"
    assert str(error) == "stopped\nhint: go on"


@pytest.mark.parametrize(
    ("word", "known", "wanted"),
    [
        ("micro_bach", ["micro_batch", "offload"], "did you mean micro_batch?"),
        ("bf61", ["fp32", "bf16"], "did you mean bf16?"),
        ("zzz", ["fp32", "bf16"], "known: fp32, bf16"),
        ("", ["a"], "known: a"),
        ("3", [1, 2, 4], "known: 1, 2, 4"),
        ("x", [], "none is known here"),
    ],
)
def test_the_nearest_name_or_all_of_them(word, known, wanted):
    assert near(word, known) == wanted


def test_messages_show_what_came():
    with pytest.raises(AutofitError, match="'5 apples'"):
        parse_size("5 apples")
