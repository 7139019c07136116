"""How many cases of a test are run, and when."""

import functools
import inspect

import pytest


def looped(**cases):
    """Calls a test with every case in turn, for cases that cost less than an item of pytest's.

    A failure names its case, and the other cases are run all the same.

    Args:
        cases: The test's argument, and its values by name.
    """
    ((argument, values),) = cases.items()

    def decorate(test):
        @functools.wraps(test)
        def run(subtests, **given):
            for name, value in values.items():
                with subtests.test(name):
                    test(**given, **{argument: value})

        taken = inspect.signature(test)
        kept = [one for name, one in taken.parameters.items() if name != argument]
        added = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = taken.replace(parameters=[*kept, added])
        return run

    return decorate


def some_slow(values, always, ids=str):
    """Parameters of which only some are run by default; the others are marked ``slow``.

    Args:
        values: All of them.
        always: Which ones are run by default: a function of the value.
        ids: How a value is called.
    """
    return [pytest.param(value, id=ids(value), marks=() if always(value) else pytest.mark.slow) for value in values]


def slow_but(always, cases):
    """Parameters of several arguments each, by what they are called, of which only some are run by default."""
    return [
        pytest.param(*values, id=name, marks=() if name in always else pytest.mark.slow)
        for name, values in cases.items()
    ]
