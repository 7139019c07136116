"""How a command runs in a shell: errors become a line and an exit code, signals end it, data goes to stdout."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from autofit.system.errors import (
    AutofitError,
    InputError,
    Interrupted,
    MachineError,
    NothingFits,
    Stopped,
    Terminated,
)

if TYPE_CHECKING:
    from rich.console import Console


class Command(click.Command):
    """Refuses an option or a folder without a text, such as an unset variable of the shell leaves.

    The option would count as not given, and the folder as the current one.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        script = next((one for one in args if one.endswith(".py")), None)
        try:
            left = super().parse_args(context, args)
        except click.NoSuchOption as error:
            if script is None:
                raise
            behind = f"{script} -- {error.option_name} ..."
            raise InputError(f"there is no option {error.option_name}", hint=f"is it the script's? {behind}") from error
        for option in self.params:
            value = context.params.get(option.name or "")
            if isinstance(option, click.Option) and any(one == "" for one in (value, *_several(value))):
                raise InputError(f"{option.opts[0]} '' is empty", hint="give it a value, or leave it out")
            if option.name in _FOLDERS and "" in {value, *_several(value)}:
                raise InputError("DIR '' is empty", hint="give the folder of a tune; . is the current one")
        return left


_FOLDERS = {"folder", "folders"}
"""Arguments that name the folder of a tune."""


def _several(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


_GARBAGE = 100_000
"""Objects after which garbage is looked for: an answer makes half a million, and hardly any of it is."""


class Commands(click.Group):
    """Turns errors into one line, a hint and an exit code."""

    command_class = Command

    def main(self, *args: Any, **how: Any) -> Any:
        """Run the command line."""
        gc.set_threshold(_GARBAGE)
        try:
            return super().main(*args, **how)
        except OSError as error:  # of --help and --version, which are printed before anything is invoked
            _redirect_to_null(sys.stdout)
            _complain(f"error: {_of_stream(error)}")
            sys.exit(MachineError.exit_code)

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        reopen_closed_streams()
        try:
            refuse_a_lost_folder()
            found = super().invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            _redirect_to_null(sys.stdout)
            if error.errno != errno.EPIPE:  # a reader that has seen enough, such as head, is no failure
                _complain(f"error: {_of_stream(error)}")
                context.exit(MachineError.exit_code)
        except (AutofitError, Stopped) as error:
            _complain(f"{'' if isinstance(error, NothingFits) else 'error: '}{shown(error.message)}")
            if error.hint:
                _complain(f"\nhint: {shown(error.hint)}")
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            _complain("interrupted")
            context.exit(Interrupted.exit_code)
        else:
            return found


def refuse_a_lost_folder() -> None:
    """Say that the current folder is gone: nobody who is started there would find it.

    Raises:
        MachineError: It is.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise MachineError("the current folder is gone", hint="cd to one that is there, and try again") from error


def _complain(words: str) -> None:
    """A line on stderr, where somebody reads it."""
    try:
        click.echo(words, err=True)
    except OSError:
        _redirect_to_null(sys.stderr)


def _of_stream(error: OSError) -> str:
    """An error in words; a full disk without a file is stdout's, since those of our own files name them."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT} and error.filename is None
    return f"stdout can't be written: {error.strerror}" if full else shown(str(error))


def _redirect_to_null(stream: TextIO | None) -> None:
    from autofit.commands.shell.console import redirect_to_null

    redirect_to_null(stream)


@contextlib.contextmanager
def reader_may_be_gone() -> Iterator[None]:
    """Print where nobody may read any more, as behind a terminal that was closed; the exit code stays what it is."""
    try:
        yield
    except OSError:
        _redirect_to_null(sys.stdout)


def reopen_closed_streams() -> None:
    """Open what was closed of the standard streams: a file that gets such a number would be printed into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def shown(words: str) -> str:
    """One line that steers no terminal: paths and configs are somebody else's words."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)


def data_console(width: int = 100) -> Console:
    """A console on stdout that does not cut lines where nobody can see its width.

    What the locale has no letter for is told by its number.
    """
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - rich calls it where the error is handled, and would end the process

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*objects, crop=False, **how)  # a command that is to be pasted may be longer than a line

    seen = sys.stdout is not None and sys.stdout.isatty()
    return Plain(highlight=False, width=None if seen else width)


class terminable:  # noqa: N801 - used like a function
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does: a tune writes the best so far, a launch ends with it."""

    def __enter__(self) -> None:
        def end(number: int, _frame: object) -> None:
            raise Terminated(f"stopped by {signal.Signals(number).name}")

        numbers = (signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup means it
        self._before = {number: signal.signal(number, end) for number in heard}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
