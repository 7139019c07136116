"""How a script is run, and how it is left."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autofit.contract.technique import replacing
from autofit.system.errors import InputError
from autofit.system.files import search_as_before
from autofit.system.job import error_words
from autofit.training.scripts.children import no_child_trains, note_if_child
from autofit.training.scripts.written import keep_as_it_was, nothing_more_stays

AS_TUNED = "tune it with these arguments, or run it with those that it was tuned with"
"""What to do where a script asks for what was not asked for when it was tuned."""
NOT_AS_TUNED = "{} is not the text that was tuned: its speed and memory may be others"


FACTORY = Path(__file__).with_name("factory.py")
"""The script that stands for a factory, whose name is its first argument."""


_BY_ITSELF = "does it run with these arguments by itself? They stand behind --: autofit tune train.py -- ARGS"
_OF_A_LAUNCHER = (
    "{0} is what torchrun sets, and one process is tuned, without a launcher: read it by os.environ.get, as the only "
    "process where it is missing, and leave making the process group to the Trainer or the Accelerator"
)
_OF_A_PACKAGE = (
    "it is a module of a package, which python -m runs: tune a script that lies beside that package's folder and holds "
    "this line: import runpy; runpy.run_module('{0}', run_name='__main__')"
)
_OF_A_CHILD = (
    "tune what trains in its own process, without a launcher: call the training itself, not by multiprocessing, "
    "subprocess or accelerate launch; autofit starts the processes of a training, by --processes N"
)
_LAUNCHER = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT")


class Left(BaseException):
    """Raised inside a script to leave it: no ``except Exception`` of the script's stops it."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        nothing_more_stays()


class Refused(Left):
    """What the script does can't be tuned.

    Args:
        message: What it does, in one line.
        hint: What to do.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def generated_rows(trainer: type) -> Refused:
    """The refusal of a Trainer that makes the rows that it trains on."""
    return Refused(
        f"the script's {trainer.__name__} generates the rows that it trains on",
        "autofit tunes trainings on rows that are there: SFT, DPO, KTO, a reward model",
    )


@contextlib.contextmanager
def refusing_to_generate(refusal: Refused) -> Iterator[None]:
    """Refuse that a model of transformers generates meanwhile.

    Raises:
        Refused: One does.
    """

    def generate(*_: Any, **__: Any) -> Any:
        raise refusal

    generation = sys.modules.get("transformers.generation.utils")  # no model of a class of its can be there without it
    with replacing([(generation.GenerationMixin, "generate", generate)] if generation else []):
        yield


class Enough(Left):
    """The script has shown what was wanted of it."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


_ended_by: list[BaseException] | None = None
"""What the training of a script that is to be left has ended by, the first one first."""


@contextlib.contextmanager
def ending(counts: Callable[[BaseException], Any] = lambda _: True) -> Iterator[None]:
    """A part of the training of a script that is to be left: what it is ended by stands, though the script catch it.

    Args:
        counts: Whether an error ends the training; by itself each does.

    Raises:
        BaseException: Another part has been ended before, and the script has gone on.
    """
    if _ended_by:
        raise _ended_by[0]
    try:
        yield
    except BaseException as error:
        if counts(error):
            ended(error)
        raise


def ended(error: BaseException) -> None:
    """Have it stand that the training of a script that is to be left is ended by an error."""
    if _ended_by is not None:
        _ended_by.append(error)
        note_if_child()


_running = False
"""Whether this process runs a script with a plan put in, or to learn what it trains."""


def refuse_two_plans() -> None:
    """Refuse to load a plan in a script that has one put in: an adapter, for one, would be put on the model twice.

    Raises:
        Refused: This process runs such a script.
    """
    if _running:
        raise Refused(
            "the script takes a plan by autofit.load, and would have two",
            "launch it as `autofit report` says, or leave autofit.load out of it",
        )


def name_of(path: str, arguments: Sequence[str]) -> str:
    """What people call a script."""
    return arguments[0] if Path(path) == FACTORY else Path(path).name


def run(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path arguments`` would."""
    sys.argv = [path, *arguments]
    search_as_before()
    folder = str(Path(path).resolve().parent)  # Python, too, follows a link
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    global _running  # noqa: PLW0603 - the script asks by autofit.load, and nothing of it is handed over
    _running = True
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        _running = False


def run_to_its_end(path: str, arguments: Sequence[str], trained: Callable[[], bool], *, by: str) -> None:
    """Run a script as it is, with a plan put in.

    Args:
        path: Of the script.
        arguments: What stands behind it on its command line.
        trained: Whether the plan was put into a training.
        by: What trains it, in words.

    Raises:
        InputError: It ended well, and trained nothing by that.
    """
    try:
        run(path, arguments)
    except SystemExit as end:
        if end.code or trained():
            raise
    if not trained():
        raise InputError(
            f"{name_of(path, arguments)} ended without training by {by}: the plan was put into nothing",
            hint="does it need an argument for that, such as --do_train?",
        )


def run_until_left(
    path: str, arguments: Sequence[str], *, measured: bool = False, new_files_stay: bool = False
) -> None:
    """Run a script until something inside it leaves it.

    Args:
        path: Of the script.
        arguments: What stands behind it on its command line.
        measured: Let an error through as it is: it may be memory that ran out, or a loss that is not finite.
        new_files_stay: Let stay what it makes: later runs may read it. What it changes is as before in any case.

    Raises:
        Left: It was left, as it should be.
        Refused: Something in it can't be tuned; where it is described, a process that it starts would have trained.
        InputError: It ended before, by itself or by an error.
        Exception: The script's own, where it is measured.
    """
    if not new_files_stay:
        _run_until_left(path, arguments, measured=measured, new_files_stay=False)
        return
    search_as_before()
    with no_child_trains() as child_trained:
        try:
            _run_until_left(path, arguments, measured=measured, new_files_stay=True)
        except InputError as error:
            if not child_trained():
                raise
            raise Refused(
                f"{name_of(path, arguments)} trains in a process that it starts itself", _OF_A_CHILD
            ) from error


def _run_until_left(path: str, arguments: Sequence[str], *, measured: bool, new_files_stay: bool) -> None:
    """The same, whoever trains."""
    name = name_of(path, arguments)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Nothing()))
    keep_as_it_was(Path(path), new_files_stay=new_files_stay)
    try:
        _run_until_ended(path, arguments)
    except Left:
        if os.environ.get("CUDA_VISIBLE_DEVICES") != visible:
            raise Refused(
                f"{name} sets CUDA_VISIBLE_DEVICES itself",
                "take that line out and set it where you call autofit, which tunes on the first device that it sees",
            ) from None
        raise
    except SystemExit as end:
        raise InputError(
            f"{name} ended before it trained (exit {end.code!r}){_last_line() if end.code else ''}",
            hint=_BY_ITSELF,
        ) from end
    except EOFError as error:
        raise InputError(
            f"{name} reads from stdin before it trains", hint="give what it asks for as an argument or in a file"
        ) from error
    except Exception as error:
        if measured:
            raise
        raise InputError(
            f"{name} failed before it trained{_line(error, path)}: {error_words(error)}",
            hint=_hint(error, Path(path)),
        ) from error
    raise InputError(
        f"{name} ended without training: it called neither train() of a transformers Trainer nor backward() of an "
        "Accelerator",
        hint="does it need an argument for that, such as --do_train? Training in processes that the script starts "
        "itself, and loops without Accelerate, can't be tuned",
    )


def _run_until_ended(path: str, arguments: Sequence[str]) -> None:
    """Run a script; what has ended its training is raised, whatever the script has made of it."""
    global _ended_by  # noqa: PLW0603 - it is told from inside the script
    _ended_by = []
    try:
        run(path, arguments)
    finally:
        ended, _ended_by = _ended_by, None
        if ended:
            raise ended[0]


def _hint(error: Exception, path: Path) -> str:
    """What to do where a script has failed."""
    if wanted := _launcher_variable(error):
        return _OF_A_LAUNCHER.format(wanted)
    if isinstance(error, ImportError) and "relative import with no known parent package" in str(error):
        packages = list(itertools.takewhile(lambda one: (one / "__init__.py").is_file(), path.parents))
        names = [one.name for one in reversed(packages or [path.parent])]  # a package may do without that file
        return _OF_A_PACKAGE.format(".".join([*names, path.stem]))
    return _BY_ITSELF


def _launcher_variable(error: Exception) -> str | None:
    """The environment variable of a launcher that a script has missed; ``None`` where that is not why it failed."""
    missed = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    told = "environment variable {} expected"  # torch.distributed
    return next((one for one in _LAUNCHER if missed == one or told.format(one) in str(error)), None)


class _Nothing(io.RawIOBase):
    """What a script reads from where nobody types: an end that can't be taken for an empty file."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, _: Any) -> int:
        raise EOFError


def _last_line() -> str:
    """The last line on stderr, where a job keeps that in a file: argparse says there what is wrong."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
        log = Path("/proc/self/fd/2")
        if log.is_file():
            lines = [line for line in log.read_text(errors="replace")[-4000:].splitlines() if line.strip()]
    return f": {lines[-1].strip()[:500]}" if lines else ""


def _line(error: BaseException, path: str) -> str:
    """Where in the user's own script an error came up, in words."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" (line {lines[-1]})" if lines and Path(path) != FACTORY else ""
