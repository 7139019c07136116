"""What an estimate is asked, for one card or for several: checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autofit import space
from autofit.commands.model_source import fetch, own_code
from autofit.commands.request import Request, Search, as_classes, as_knobs, check_request, validated
from autofit.contract.facts import LaunchPath, Task
from autofit.output.document import MODEL_FOLDER


def asked_question(
    model: str,
    *,
    seq_len: int | None,
    global_batch: int,
    allow: str | Sequence[str],
    fix: space.Knobs,
    among: space.Knobs,
    launch_path: LaunchPath,
    task: Task | None,
    trust_remote_code: bool,
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
            "global_batch": global_batch,
            "launch_path": launch_path,
            "task": task,
            "trust_remote_code": trust_remote_code,
        },
    )
    settings = validated(Search, {"allowed": as_classes(allow), "fix": as_knobs(fix), "among": as_knobs(among)})
    check_request(request, settings)
    return request, settings


def fetched_config(request: Request, folder: Path, say: Callable[[str], None]) -> Path:
    """The model's config in a folder of its own; says where the model's own code will run.

    Raises:
        ModelError: The model can't be read, or is none for the task.
    """
    config = fetch(request.model, folder / MODEL_FOLDER, trust_remote_code=request.trust_remote_code)
    code = own_code(config, trusted=request.trust_remote_code)
    if code is not None:
        say(code)
    return config
