"""The commands: options in, one function called, data to stdout, talk to stderr, an exit code."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import click

from autofit._version import __version__
from autofit.commands.shell.options import DOCTOR_OPTIONS, ESTIMATE_OPTIONS, TUNE_OPTIONS, with_options
from autofit.commands.shell.terminal import Commands, data_console, reader_may_be_gone, terminable
from autofit.system.errors import PromiseBroken, Stopped

if TYPE_CHECKING:
    from autofit.output.result import Result


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="autofit-train", prog_name="autofit")
def main() -> None:
    """Find the fastest training configuration that fits, by short real training steps on your own device.

    For completion by the shell, put this into ~/.bashrc (or zsh_source into ~/.zshrc, fish_source for fish):

    eval "$(_AUTOFIT_COMPLETE=bash_source autofit)"
    """


@main.command(short_help="Find the fastest plan, and write the files that launch it.")
@click.argument("model")
@with_options(*TUNE_OPTIONS)
def tune(model: str, as_json: bool, verbose: bool, arguments: tuple[str, ...], **options: Any) -> None:
    """Find the fastest plan for MODEL and write the files that accelerate launch runs.

    MODEL is a hub id (only its config.json is fetched), a folder or file with a config.json, or demo; or the path of
    your own training script, whose arguments stand behind --: autofit tune train.py --trials 20 -- --epochs 3
    Or package.module:function, a function that returns a torch module, its batches and its loss.
    """
    from autofit.commands.scripts.named import is_script
    from autofit.commands.shell.console import ConsoleEvents, StderrConsole
    from autofit.commands.tune import tune as run

    if arguments and not is_script(model):
        raise click.UsageError(f"Got unexpected extra arguments ({' '.join(arguments)}): {model} is no script")
    events = ConsoleEvents(StderrConsole(), options["trials"])
    with terminable():
        try:
            result = run(model, arguments=arguments, events=events, **options)
        except Stopped as stopped:
            if stopped.answer is not None:
                with reader_may_be_gone():
                    _show_answer(stopped.answer, as_json=as_json, verbose=verbose)
            raise
    _show_answer(result, as_json=as_json, verbose=verbose)


def _show_answer(result: Result, *, as_json: bool, verbose: bool) -> None:
    """What a tune has found."""
    from autofit.output.document import DOCUMENT
    from autofit.output.reports.brief import brief
    from autofit.output.reports.report import summary
    from autofit.system.strict_json import dump_json

    if as_json:
        click.echo(dump_json(DOCUMENT, result.document), nl=False)
    else:
        show = summary if verbose else brief
        data_console().print(show(result.document, folder=str(result.folder)))


@main.command(short_help="Predict what plans need on a card; needs no device.")
@click.argument("model")
@with_options(*ESTIMATE_OPTIONS)
def estimate(model: str, as_json: bool, every: bool, **options: Any) -> None:
    """Predict what plans for MODEL need on a card, and where it goes; no device and no weights are needed.

    MODEL is a hub id (only its config.json is fetched), a folder or file with a config.json, or demo; or the path of
    your own training script, whose arguments stand behind --: autofit estimate train.py --gpu 4090 -- --epochs 3
    """
    from autofit.system.forking.begun import begun_ahead

    with contextlib.ExitStack() as stack:
        if (options["gpu"] or options["memory"]) and not model.endswith(".py"):
            stack.enter_context(terminable())  # else a signal would leave the helper's folder
            stack.enter_context(begun_ahead("cpu", trains=False))  # it loads while what asks it is imported
        _estimate(model, as_json=as_json, every=every, **options)


def _estimate(model: str, *, as_json: bool, every: bool, **options: Any) -> None:
    """What plans need on a card."""
    from autofit.commands.estimates.answer import ESTIMATE, table
    from autofit.commands.estimates.estimate import check_fits
    from autofit.commands.estimates.estimate import estimate as run
    from autofit.commands.estimates.plans import MOST_KINDS
    from autofit.commands.estimates.screen import screen
    from autofit.commands.scripts.named import is_script
    from autofit.system.strict_json import dump_json

    if _asks_about_cards(options):
        _estimate_cards(model, as_json=as_json, **options)
        return
    options = {name: value for name, value in options.items() if name not in {"tokens", "price"}}
    with terminable():
        ways_alone = not (as_json or options["output"] or is_script(model))  # the screen shows no kinds of plans
        most = None if every else 0 if ways_alone else MOST_KINDS
        found = run(model, most=most, ways=not every, say=lambda words: click.echo(words, err=True), **options)
    if as_json:
        click.echo(dump_json(ESTIMATE, found), nl=False)
    else:
        data_console(120).print(screen(found) if found.ways else table(found))
    check_fits(found)


@main.command(short_help="Launch your own script with the plan put in.")
@click.argument("folder", metavar="DIR")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
@click.option("--machine-rank", type=int, help="Of an answer for several machines: the number of this one, from 0.")
@click.option("--main-process-ip", metavar="ADDRESS", help="Of it: the first machine's address.")
@click.option("--main-process-port", type=int, help="Of it: a free port there.  [default: 29500]")
@click.pass_context
def run(context: click.Context, /, folder: str, script: str, arguments: tuple[str, ...], **place: Any) -> None:
    """Launch SCRIPT, unmodified, with the plan in DIR; where it fails the exit code is accelerate launch's, 1."""
    from autofit.commands.scripts.run import run as launch

    with terminable():
        status = launch(folder, script, arguments, say=lambda words: click.echo(words, err=True), **place)
    if status:
        context.exit(status)


def _asks_about_cards(options: dict[str, Any]) -> bool:
    """Whether the answer is a table of cards."""
    return "," in (options["gpu"] or "") or options["tokens"] is not None or bool(options["price"])


def _estimate_cards(model: str, *, as_json: bool, **options: Any) -> None:
    """The best plan on each of some cards, with hours and costs."""
    from autofit.commands.estimates.cards import CARDS_ESTIMATE, check_any_fits, estimate_cards
    from autofit.commands.estimates.cards_table import cards_table
    from autofit.system.strict_json import dump_json

    if options.pop("output") is not None:
        raise click.UsageError("--output writes the files for one card: leave out --tokens, --price and other cards")
    with terminable():
        found = estimate_cards(model, say=lambda words: click.echo(words, err=True), **options)
    if as_json:
        click.echo(dump_json(CARDS_ESTIMATE, found), nl=False)
    else:
        data_console(140).print(cards_table(found))
    check_any_fits(found)


@main.command(short_help="Launch the files, and hold them to the promise.")
@click.argument("folder", metavar="DIR")
@click.option("--steps", type=click.IntRange(2, 1000), default=5, show_default=True, help="Timed optimizer steps.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    help="Share of the promised speed that may be missing.  [default: 0.1 on a GPU, 0.3 on a CPU; of an "
    "estimate, what its range allows]",
)
@click.option("--on", metavar="ADDRESS", help="Launch on machines of a Ray cluster: auto, HOST:PORT or ray://HOST.")
@click.option("--json", "as_json", is_flag=True, help="Print the verification as JSON to stdout.")
def verify(folder: str, steps: int, tolerance: float | None, on: str | None, as_json: bool) -> None:
    """Launch the files in DIR with accelerate launch, and compare with the promise (exit 4 where it is broken)."""
    from autofit.commands.verify import VERIFICATION
    from autofit.commands.verify import verify as run
    from autofit.contract.outcome import Crashed, Measured, Unsupported
    from autofit.system import units
    from autofit.system.strict_json import dump_json

    with terminable():
        found = run(folder, steps=steps, tolerance=tolerance, on=on, say=lambda words: click.echo(words, err=True))
    if as_json:
        click.echo(dump_json(VERIFICATION, found), nl=False)
    elif isinstance(found.outcome, Measured):
        promise, outcome = found.promise, found.outcome
        first = "estimated" if found.estimated else "promised "
        click.echo(
            f"{first} {promise.samples_per_second:.4g} samples/s at {units.size(promise.peak_bytes)}\n"
            f"launched  {outcome.samples_per_second:.4g} samples/s at {units.size(outcome.peak_bytes)} "
            f"({found.speed_ratio:.0%} of the speed; tolerance {found.tolerance:.0%} below)\n"
            f"ceiling   {units.size(promise.limit_bytes)}"
        )
    if found.broken:
        hint = "is something else running here? Otherwise tune again"
        if isinstance(found.outcome, Crashed):
            hint = (
                "was one of its files changed? Call it where you tuned, if files are named from there; `autofit verify "
                "--json` has the launch's log"
            )
        elif found.estimated:
            hint = "`autofit tune` measures here"
        elif isinstance(found.outcome, Unsupported):
            hint = "was one of its files changed, or a package? Otherwise tune again"
        raise PromiseBroken(
            f"the launch broke the {'estimate' if found.estimated else 'promise'}: " + "; ".join(found.broken),
            hint=hint,
        )
    if not as_json:
        if found.estimated:
            click.echo("kept: every knob took effect, speed and memory are within what was estimated")
        elif tolerance is None and found.speed_ratio > 1 / (1 - found.tolerance):
            click.echo("kept: every knob took effect, memory is as promised, and the speed is far above the promise:")
            click.echo("was the machine busy when it was tuned? Then tune again: another plan may be faster")
        else:
            click.echo("kept: every knob took effect, speed and memory are as promised")


@main.command(short_help="Tell where the time of a step goes.")
@click.argument("folder", metavar="DIR")
@click.option("--steps", type=click.IntRange(1, 100), default=3, show_default=True, help="Profiled optimizer steps.")
@click.option("--output", help="Folder for the trace and the time line of memory.  [default: DIR/profile]")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON to stdout.")
def profile(folder: str, steps: int, output: str | None, as_json: bool) -> None:
    """Run some steps of the plan in DIR under PyTorch's profiler, and tell what takes the time."""
    from autofit.commands.profile import PROFILE
    from autofit.commands.profile import profile as run
    from autofit.commands.shell.profile_table import table
    from autofit.system.strict_json import dump_json

    with terminable():
        found = run(folder, steps=steps, output=output, say=lambda words: click.echo(words, err=True))
    if as_json:
        click.echo(dump_json(PROFILE, found), nl=False)
    else:
        data_console(120).print(table(found))


@main.command()
@with_options(*DOCTOR_OPTIONS)
def doctor(device: str, model: str, task: str | None, every: bool, as_json: bool) -> None:
    """Tell what this machine can use, and why not the rest."""
    from autofit.commands.doctor import DIAGNOSIS, examine
    from autofit.commands.shell.doctor_table import everything, screen
    from autofit.system.strict_json import dump_json

    with terminable():
        found = examine(device, model, task)
    if as_json:
        click.echo(dump_json(DIAGNOSIS, found), nl=False)
    else:
        data_console().print(everything(found) if every else screen(found))


@main.command(short_help="Show again what a tune found.")
@click.argument("folder", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print autofit.json to stdout.")
def report(folder: str, as_json: bool) -> None:
    """Show again what a tune found in DIR, and write its report.html anew."""
    from pathlib import Path

    from autofit.output.document import DOCUMENT, read_document
    from autofit.output.emit import REPORT
    from autofit.output.reports.report import html, summary
    from autofit.system.files import write_atomically
    from autofit.system.strict_json import dump_json

    document = read_document(folder)
    try:
        write_atomically(Path(folder) / REPORT, html(document, folder=folder))
    finally:  # an answer in a folder that is somebody else's can be shown all the same
        if as_json:
            click.echo(dump_json(DOCUMENT, document), nl=False)
        else:
            data_console().print(summary(document, folder=folder))


@main.command(short_help="Show several answers side by side.")
@click.argument("folders", metavar="DIR DIR...", nargs=-1, required=True)
def compare(folders: tuple[str, ...]) -> None:
    """Show the answers in several folders side by side: what was asked, what won, and what differs."""
    from autofit.output.document import read_document
    from autofit.output.reports.compare import comparison

    data_console(120).print(comparison({folder: read_document(folder) for folder in folders}))


@main.command(short_help="Print an answer as another project's settings.")
@click.argument("folder", metavar="DIR")
@click.option("--to", "target", required=True, help="python, cli, sft, axolotl or llamafactory.")
def export(folder: str, target: str) -> None:
    """Print the plan in DIR as what people paste elsewhere, with what it can't carry as comments.

    python: TrainingArguments(...). cli: flags of a script. sft: TRL's SFTConfig(...). axolotl, llamafactory: a YAML.
    """
    from autofit.output.document import read_document
    from autofit.output.exports.export import comments
    from autofit.output.exports.export import export as run

    found = run(read_document(folder), target, folder=folder)
    click.echo("\n".join(part for part in (comments(found, target), found.text) if part), nl=False)


@main.command(hidden=True)
def schema() -> None:
    """Print the JSON schema of autofit.json."""
    from autofit.output.document import document_schema

    click.echo(json.dumps(document_schema(), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
