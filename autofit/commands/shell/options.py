"""The options of the commands. What two commands share is written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from autofit.commands.shell.tune_config import read_config

Option = Callable[[Any], Any]


def with_options(*options: Option) -> Option:
    """A decorator that adds options to a command, in their order."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_SEQ_LEN = click.option(
    "--seq-len",
    type=int,
    help="Tokens in a row (pixels, samples or frames).  [default: the lesser of 1024 and the model's]",
)
_GLOBAL_BATCH = click.option(
    "--global-batch", type=int, help="Rows to an optimizer step.  [default: 32, or the script's]"
)
_ALLOW = click.option(
    "--allow", default="exact,numeric", show_default=True, help="What may change: exact, numeric, method."
)
_FIX = click.option(
    "--fix",
    multiple=True,
    metavar="KNOB=VALUE",
    help="Hold a knob (a technique) at a value; repeatable. autofit doctor lists them.",
)
_AMONG = click.option("--among", multiple=True, metavar="KNOB=V1,V2", help="Hold a knob to some values; repeatable.")
_LAUNCH_PATH = click.option(
    "--launch-path", default="trainer", show_default=True, help="trainer or loop: how you will train."
)
_TASK = click.option(
    "--task", help="What the model is trained for: causal-lm, seq2seq-lm, ctc...  [default: as its config says]"
)
_TRUST = click.option("--trust-remote-code", is_flag=True, help="Let the model's own code run here.")

_ARGUMENTS = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
_CALL = click.option("--call", type=int, default=1, show_default=True, help="Which of a script's calls of train().")

TUNE_OPTIONS: tuple[Option, ...] = (
    _ARGUMENTS,
    _CALL,
    click.option("--output", default="autofit-out", show_default=True, help="Folder for the files and the trials."),
    click.option("--device", default="auto", show_default=True, help="auto, cuda or cpu."),
    click.option("--processes", type=int, help="Processes of the training, one on each GPU.  [default: 1]"),
    click.option("--nodes", type=int, help="Machines of a cluster (--on) that they are spread over.  [default: 1]"),
    _SEQ_LEN,
    _GLOBAL_BATCH,
    click.option("--memory-limit", help="Ceiling: 22GiB, or 90% of what is free.  [default: 92%]"),
    click.option(
        "--trials",
        type=int,
        default=40,
        show_default=True,
        help="At most so many plans; repeats and the playoff come on top.",
    ),
    click.option("--timeout", help="At most so long: 90s, 10m, 1h."),
    _ALLOW,
    _FIX,
    _AMONG,
    click.option("--sampler", default="autofit", show_default=True, help="autofit, tpe, gp, random or grid."),
    _LAUNCH_PATH,
    _TASK,
    click.option(
        "--lengths", metavar="FILE", help="Tokens of your rows, a number on each line.  [default: all as --seq-len]"
    ),
    click.option("--record", help="Append each trial as a line of JSON to this file."),
    _TRUST,
    click.option("--storage", help="URL of an Optuna storage, instead of a journal in the folder."),
    click.option("--resume", is_flag=True, help="Go on with what the folder holds."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the search and of the random tokens."),
    click.option(
        "--guard/--no-guard",
        default=True,
        show_default=True,
        help="Refuse a winner whose losses or gradients differ from a float32 baseline's.",
    ),
    click.option(
        "--on",
        metavar="ADDRESS",
        help="Measure side by side: local (this machine's cards), or a Ray cluster: auto, HOST:PORT, ray://HOST.",
    ),
    click.option("--tokens", help="Tell the hours that a training of so many tokens takes: 1e9."),
    click.option("--price", metavar="PRICE/h", help="Tell what they cost, at 2.5/h for all its devices."),
    click.option("--wait", is_flag=True, help="Wait for a device that another tune holds."),
    click.option(
        "--config",
        is_eager=True,
        expose_value=False,
        callback=read_config,
        metavar="FILE",
        help="Options from a file, as tune.yaml in a tune's folder; what is on the command line wins.",
    ),
    click.option("--verbose", is_flag=True, help="End with all that was found, not with one screen of it."),
    click.option("--json", "as_json", is_flag=True, help="Print autofit.json to stdout, and nothing else there."),
)

ESTIMATE_OPTIONS: tuple[Option, ...] = (
    _ARGUMENTS,
    _CALL,
    click.option(
        "--gpu", help='The card: "RTX 4090", H100...; several with commas.  [default: this machine\'s device]'
    ),
    click.option("--tokens", help="Tell the hours that a training of so many tokens takes: 1e9."),
    click.option(
        "--price",
        multiple=True,
        metavar="[CARD=]PRICE/h",
        help="Tell what they cost: 2.5/h for an hour of a card, or H100=2.5/h; repeatable.",
    ),
    click.option("--memory", help="A card's memory instead: 24GiB."),
    click.option("--gpus", type=int, help="Cards of that kind that train together in a machine.  [default: 1]"),
    click.option("--nodes", type=int, help="Machines with as many cards each.  [default: 1]"),
    _SEQ_LEN,
    _GLOBAL_BATCH,
    _ALLOW,
    _FIX,
    _AMONG,
    _LAUNCH_PATH,
    _TASK,
    _TRUST,
    click.option("--cache/--no-cache", default=True, show_default=True, help="Keep traces in the user's cache folder."),
    click.option("--all", "every", is_flag=True, help="Show every kind of plan."),
    click.option("--output", help="Write the recommended plan's files here, marked as estimated; needs --gpu."),
    click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON to stdout."),
)

DOCTOR_OPTIONS: tuple[Option, ...] = (
    click.option("--device", default="auto", show_default=True, help="auto, cuda or cpu."),
    click.option("--model", default="demo", show_default=True, help="The model that the techniques are asked about."),
    _TASK,
    click.option("--all", "every", is_flag=True, help="Show every value of every technique, with its reason."),
    click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON to stdout."),
)
