"""What an estimate is asked, for one card or for several: checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autofit import space
from autofit.commands.model_source import config_words, fetch
from autofit.commands.request import (
    Request,
    Search,
    as_classes,
    as_knobs,
    batch_of,
    check_request,
    validated,
)
from autofit.contract.facts import LaunchPath, Task
from autofit.output.document import MODEL_FOLDER
from autofit.system.errors import InputError


def asked_question(
    model: str,
    *,
    seq_len: int | None,
    global_batch: int | None,
    allow: str | Sequence[str],
    fix: space.Knobs,
    among: space.Knobs,
    launch_path: LaunchPath,
    task: Task | None,
    trust_remote_code: bool,
    arguments: Sequence[str] = (),
    call: int = 1,
) -> tuple[Request, Search]:
    """The question and the plans that it allows.

    Raises:
        InputError: An argument can't be used.
    """
    request = validated(
        Request,
        {
            "model": str(model),
            "seq_len": seq_len,
            "global_batch": batch_of(str(model), global_batch),
            "launch_path": launch_path,
            "task": task,
            "trust_remote_code": trust_remote_code,
            "arguments": arguments,
            "call": call,
        },
    )
    settings = validated(Search, {"allowed": as_classes(allow), "fix": as_knobs(fix), "among": as_knobs(among)})
    check_request(request, settings)
    return request, settings


def check_script_question(output: str | Path | None) -> None:
    """Refuse what an estimate of a script can't be asked for.

    Raises:
        InputError: Files.
    """
    if output is not None:
        raise InputError(
            "--output: the files for a script are those of a tune", hint="autofit tune SCRIPT on the card writes them"
        )


def fetched_config(request: Request, folder: Path, say: Callable[[str], None]) -> Path:
    """The model's config in a folder of its own; says what becomes of the model's own code, and of quantized weights.

    Raises:
        ModelError: The model can't be read, or is none for the task.
    """
    config = fetch(request.model, folder / MODEL_FOLDER, trust_remote_code=request.trust_remote_code)
    for words in config_words(config, trusted=request.trust_remote_code):
        say(words)
    return config
