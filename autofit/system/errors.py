"""Every error that autofit raises on purpose, and what stops it: two trees.

    AutofitError                 1   never raised itself
    ├── InputError               2   what the user gave can't be used
    │   └── ModelError           2   MODEL can't be read, or nothing can be built from it
    ├── NothingFits              3   every plan that was tried breaks the ceiling
    ├── PromiseBroken            4   a launch did not keep what was promised
    ├── EmissionError            1   an emitted file is not one that its reader takes: a bug
    └── MachineError             5   the machine stands in the way: disk, device, a second tune
        ├── CantWrite            5   a file or a folder can't be written: a tune goes on with what is kept
        ├── LockHeld             5   another process holds a lock: it may be waited for
        └── ServerLost           5   the process that starts trials died while one ran
    Stopped                    130   no ``Exception``, and never raised itself
    ├── Interrupted            130   Ctrl-C
    └── Terminated             143   SIGTERM or SIGHUP

The number is the exit code of the command line. Expected failures of a *trial* are not errors but
values: see :mod:`autofit.contract.outcome`.
"""

from __future__ import annotations

import contextlib
import difflib
from typing import TYPE_CHECKING, Any

from autofit.system.redact import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class _Told(BaseException):
    """A message that a person can act on.

    Args:
        message: One line that says what came and what was wanted.
        hint: One line that says what to do, shown after the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class AutofitError(_Told, Exception):
    """An error whose message a person can act on; see the tree above."""


class InputError(AutofitError):
    """What the user gave can't be used."""

    exit_code = 2


class ModelError(InputError):
    """MODEL can't be read, or no model can be built from its config."""


class NothingFits(AutofitError):  # noqa: N818 - an answer more than an error
    """Every plan that was tried breaks the ceiling."""

    exit_code = 3


class PromiseBroken(AutofitError):  # noqa: N818 - an answer more than an error
    """A launch of the emitted files did not keep the promise."""

    exit_code = 4


class EmissionError(AutofitError):
    """An emitted file is not one that its reader takes: a bug, shown as it is."""


class MachineError(AutofitError):
    """The machine stands in the way: a full disk, a missing device, another tune on the same device."""

    exit_code = 5


class CantWrite(MachineError):  # noqa: N818 - what happened
    """A file or a folder can't be written: the disk is full, it is read-only, it is gone."""


class LockHeld(MachineError):  # noqa: N818 - what happened
    """Another process holds a lock, such as that of a device."""


class ServerLost(MachineError):  # noqa: N818 - what happened
    """The process that starts trials died while one ran; the next trial gets a new one."""


class Stopped(_Told, KeyboardInterrupt):
    """Stopped from outside: a loop over many tunes that catches every ``Exception`` stops too.

    Attributes:
        answer: The best so far of a tune, as a :class:`autofit.output.result.Result`, where it was written.
    """

    exit_code = 130
    answer: Any = None


class Interrupted(Stopped):
    """Ctrl-C. What was known until then has been written."""


class Terminated(Stopped):
    """SIGTERM or SIGHUP. What was known until then has been written."""

    exit_code = 143


@contextlib.contextmanager
def of_option(option: str) -> Iterator[None]:
    """Name the option whose text can't be read: the error begins with that text."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{option} {error.message}", hint=error.hint) from error


def near(word: str, known: Iterable[object], unlike: str = "") -> str:
    """Words for a hint: the known name nearest to ``word``, or ``unlike``, or all of them.

    >>> near("micro_bach", ["micro_batch", "offload"])
    'did you mean micro_batch?'
    """
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return unlike or "known: " + ", ".join(names) if names else "none is known here"
