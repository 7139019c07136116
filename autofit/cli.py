"""Words in, words out, exit code. Data goes to stdout, talk to stderr."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import click

from autofit._version import __version__
from autofit.system.errors import (
    AutofitError,
    Interrupted,
    MachineError,
    ModelError,
    NothingFits,
    PromiseBroken,
    Stopped,
    Terminated,
)

if TYPE_CHECKING:
    from rich.console import Console


class Commands(click.Group):
    """Turns errors into one line, a hint and an exit code."""

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        _hold_streams()
        try:
            found = super().invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            _let_go(sys.stdout)
            if error.errno != errno.EPIPE:  # a reader that has seen enough, such as head, is no failure
                _complain(f"error: {_shown(str(error))}")
                context.exit(MachineError.exit_code)
        except (AutofitError, Stopped) as error:
            _complain(f"{'' if isinstance(error, NothingFits) else 'error: '}{_shown(error.message)}")
            if error.hint:
                _complain(f"\nhint: {_shown(error.hint)}")
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            _complain("interrupted")
            context.exit(Interrupted.exit_code)
        else:
            return found


def _complain(words: str) -> None:
    """A line on stderr, where somebody reads it."""
    try:
        click.echo(words, err=True)
    except OSError:
        _let_go(sys.stderr)


def _let_go(stream: TextIO | None) -> None:
    from autofit.commands.console import let_go

    let_go(stream)


def _hold_streams() -> None:
    """Open what was closed of the standard streams: a file that gets such a number would be printed into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="autofit-train", prog_name="autofit")
def main() -> None:
    """Find the fastest training configuration that fits, by short real training steps on your own device."""


def _shown(words: str) -> str:
    """One line that steers no terminal: paths and configs are somebody else's words."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


@main.command(short_help="Find the fastest plan, and write the files that launch it.")
@click.argument("model")
@_options(
    click.option("--output", default="autofit-out", show_default=True, help="Folder for the files and the trials."),
    click.option("--device", default="auto", show_default=True, help="auto, cuda or cpu."),
    click.option("--seq-len", type=int, help="Tokens in a row.  [default: the lesser of 1024 and the model's]"),
    click.option("--global-batch", type=int, default=32, show_default=True, help="Rows to an optimizer step."),
    click.option("--memory-limit", help="Ceiling: 22GiB, or 90% of what is free.  [default: 92%]"),
    click.option(
        "--trials",
        type=int,
        default=40,
        show_default=True,
        help="At most so many plans; repeats and the playoff come on top.",
    ),
    click.option("--timeout", help="At most so long: 90s, 10m, 1h."),
    click.option(
        "--allow", default="exact,numeric", show_default=True, help="What may change: exact, numeric, method."
    ),
    click.option("--fix", multiple=True, metavar="KNOB=VALUE", help="Hold a knob at a value; repeatable."),
    click.option("--among", multiple=True, metavar="KNOB=V1,V2", help="Hold a knob to some values; repeatable."),
    click.option("--sampler", default="autofit", show_default=True, help="autofit, tpe, gp, random or grid."),
    click.option("--launch-path", default="trainer", show_default=True, help="trainer or loop: how you will train."),
    click.option("--task", help="causal-lm: next-token prediction, whatever task the config is for."),
    click.option("--record", help="Append each trial as a line of JSON to this file."),
    click.option("--trust-remote-code", is_flag=True, help="Let the model's own code run here."),
    click.option("--storage", help="URL of an Optuna storage, instead of a journal in the folder."),
    click.option("--resume", is_flag=True, help="Go on with what the folder holds."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the search and of the random tokens."),
    click.option(
        "--guard/--no-guard",
        default=True,
        show_default=True,
        help="Refuse a winner whose losses or gradients differ from a float32 baseline's.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print autofit.json to stdout, and nothing else there."),
)
def tune(model: str, as_json: bool, **options: Any) -> None:
    """Find the fastest plan for MODEL and write the files that accelerate launch runs.

    MODEL is a hub id (only its config.json is fetched), a folder or file with a config.json, or demo.
    """
    from autofit.commands.console import ConsoleEvents, Talk
    from autofit.commands.tune import tune as run
    from autofit.output.document import DOCUMENT
    from autofit.output.report import summary
    from autofit.system.strict_json import dump_json

    with _terminable():
        result = run(model, events=ConsoleEvents(Talk(), options["trials"]), **options)
    if as_json:
        click.echo(dump_json(DOCUMENT, result.document), nl=False)
    else:
        _console().print(summary(result.document, folder=str(result.folder)))


@main.command(short_help="Predict what plans need on a card; needs no device.")
@click.argument("model")
@_options(
    click.option("--gpu", help='The card: "RTX 4090", H100, A100-80GB...  [default: this machine\'s device]'),
    click.option("--memory", help="A card's memory instead: 24GiB."),
    click.option("--seq-len", type=int, help="Tokens in a row.  [default: the lesser of 1024 and the model's]"),
    click.option("--global-batch", type=int, default=32, show_default=True, help="Rows to an optimizer step."),
    click.option(
        "--allow", default="exact,numeric", show_default=True, help="What may change: exact, numeric, method."
    ),
    click.option("--fix", multiple=True, metavar="KNOB=VALUE", help="Hold a knob at a value; repeatable."),
    click.option("--among", multiple=True, metavar="KNOB=V1,V2", help="Hold a knob to some values; repeatable."),
    click.option("--launch-path", default="trainer", show_default=True, help="trainer or loop: how you will train."),
    click.option("--task", help="causal-lm: next-token prediction, whatever task the config is for."),
    click.option("--trust-remote-code", is_flag=True, help="Let the model's own code run here."),
    click.option("--cache/--no-cache", default=True, show_default=True, help="Keep traces in the user's cache folder."),
    click.option("--all", "every", is_flag=True, help="Show every kind of plan."),
    click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON to stdout."),
)
def estimate(model: str, as_json: bool, every: bool, **options: Any) -> None:
    """Predict what plans for MODEL need on a card, and where it goes; no device and no weights are needed.

    MODEL is a hub id (only its config.json is fetched), a folder or file with a config.json, or demo.
    """
    from autofit.commands.estimate import ESTIMATE
    from autofit.commands.estimate import estimate as run
    from autofit.commands.estimates.table import table
    from autofit.system.strict_json import dump_json

    with _terminable():
        most = None if every else 12
        found = run(model, most=most, say=lambda words: click.echo(words, err=True), **options)
    if as_json:
        click.echo(dump_json(ESTIMATE, found), nl=False)
    else:
        _console(120).print(table(found))
    if not found.plans:
        why = "; ".join(found.untraced) or "no plan could be traced"
        raise ModelError(f"nothing can be estimated: {why}", hint="`autofit tune` measures what can't be traced")
    if not any(one.verdict != "too large" for one in found.plans):
        raise NothingFits("no plan fits", hint="a shorter --seq-len, --allow exact,numeric,method, or a larger card")


@main.command(short_help="Launch the files, and hold them to the promise.")
@click.argument("folder", metavar="DIR")
@click.option("--steps", type=click.IntRange(2, 1000), default=5, show_default=True, help="Timed optimizer steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the verification as JSON to stdout.")
def verify(folder: str, steps: int, as_json: bool) -> None:
    """Launch the files in DIR with accelerate launch, and compare with the promise (exit 4 where it is broken)."""
    from autofit.commands.verify import VERIFICATION
    from autofit.commands.verify import verify as run
    from autofit.contract.outcome import Measured
    from autofit.system import units
    from autofit.system.strict_json import dump_json

    with _terminable():
        found = run(folder, steps=steps, say=lambda words: click.echo(words, err=True))
    if as_json:
        click.echo(dump_json(VERIFICATION, found), nl=False)
    elif isinstance(found.outcome, Measured):
        promise, outcome = found.promise, found.outcome
        click.echo(
            f"promised  {promise.samples_per_second:.4g} samples/s at {units.size(promise.peak_bytes)}\n"
            f"launched  {outcome.samples_per_second:.4g} samples/s at {units.size(outcome.peak_bytes)} "
            f"({found.speed_ratio:.0%} of the speed; tolerance {found.tolerance:.0%} below)\n"
            f"ceiling   {units.size(promise.limit_bytes)}"
        )
    if found.broken:
        raise PromiseBroken(
            "the launch broke the promise: " + "; ".join(found.broken),
            hint="is something else running here? Otherwise tune again",
        )
    if not as_json:
        click.echo("kept: every knob took effect, speed and memory are as promised")


@main.command()
@click.option("--device", default="auto", show_default=True, help="auto, cuda or cpu.")
@click.option("--model", default="demo", show_default=True, help="The model that the techniques are asked about.")
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON to stdout.")
def doctor(device: str, model: str, as_json: bool) -> None:
    """Tell what this machine can use, and why not the rest."""
    from rich.table import Table
    from rich.text import Text

    from autofit.commands.doctor import DIAGNOSIS, examine
    from autofit.system import units
    from autofit.system.strict_json import dump_json

    found = examine(device, model)
    if as_json:
        click.echo(dump_json(DIAGNOSIS, found), nl=False)
        return
    hardware = found.hardware
    click.echo(f"autofit {found.autofit} on {hardware.name} ({hardware.device})")
    click.echo(f"memory: {units.size(hardware.free_bytes)} free of {units.size(hardware.total_bytes)}")
    click.echo(f"computes: {', '.join(hardware.precisions)}; {hardware.threads} CPU thread(s) a process")
    for words in found.warnings:
        click.echo(_shown(words))
    if found.cuda:
        click.echo(f"no CUDA device: {found.cuda}")
    click.echo("packages: " + ", ".join(f"{name} {version}" for name, version in found.packages.items()))
    click.echo("not installed: " + (", ".join(found.missing) or "none"))
    table = Table(box=None, pad_edge=False)
    for heading in ("knob", "value", "class", "here", "why"):
        table.add_column(heading, overflow="fold")
    for offer in found.choices:
        here = {"offered": "yes", "on_request": "on request", "withheld": "no"}[offer.status]
        table.add_row(*(Text(str(cell)) for cell in (offer.technique, offer.value, offer.kind, here, offer.reason)))
    _console().print(table)


@main.command(short_help="Show again what a tune found.")
@click.argument("folder", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print autofit.json to stdout.")
def report(folder: str, as_json: bool) -> None:
    """Show again what a tune found in DIR, and write its report.html anew."""
    from pathlib import Path

    from autofit.output.document import DOCUMENT, read_document
    from autofit.output.emit import REPORT
    from autofit.output.report import html, summary
    from autofit.system.files import write_atomically
    from autofit.system.strict_json import dump_json

    document = read_document(folder)
    write_atomically(Path(folder) / REPORT, html(document, folder=folder))
    if as_json:
        click.echo(dump_json(DOCUMENT, document), nl=False)
    else:
        _console().print(summary(document, folder=folder))


@main.command(hidden=True)
def schema() -> None:
    """Print the JSON schema of autofit.json."""
    from autofit.output.document import document_schema

    click.echo(json.dumps(document_schema(), indent=1, sort_keys=True))


def _console(width: int = 100) -> Console:
    """A console on stdout that does not cut lines where nobody can see its width."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - rich calls it where the error is handled, and would end the process

    seen = sys.stdout is not None and sys.stdout.isatty()
    return Plain(highlight=False, width=None if seen else width)


class _terminable:  # noqa: N801 - used like a function
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


if __name__ == "__main__":
    main()
