"""Many cheap cases in one test, where an item each would cost more than the case."""

import functools
import inspect


def looped(**cases):
    """Calls a test with every case in turn; a failure names the case, and the others run all the same.

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
