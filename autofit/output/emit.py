"""Winner -> files, each loaded back with the library that will read it.

``accelerate.yaml`` and ``training_args.json`` are written beside their places and checked there; only then are they
renamed, ``autofit.json`` last. An Accelerate YAML refuses unknown top-level keys but takes anything inside its
sub-mappings, so those are held against the launcher's own options.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import YAMLError, safe_load

from autofit._version import __version__
from autofit.machine import gpu_catalogue
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, MODEL_FOLDER, Document, read_document
from autofit.output.text import one_line
from autofit.registry import recipe_of
from autofit.system.errors import EmissionError, InputError
from autofit.system.files import copy_folder, write_atomically, writing
from autofit.system.strict_json import dump_json
from autofit.training.launch_environment import launcher_parser, write_yaml

if TYPE_CHECKING:
    from collections.abc import Callable

YAML = "accelerate.yaml"
ARGUMENTS = "training_args.json"
REPORT = "report.html"
ASIDE = ".emitting"
_TOLD = 4
"""Settings that are told of those which are gone."""
_ASK_THE_CARD = {"bf16", "tf32"}
"""Fields that ``TrainingArguments`` refuses where this machine's card, not the answer's, can't compute so."""


def emit(document: Document, folder: Path, report: str, check: Callable[[Path], None]) -> None:
    """Write the four files.

    Args:
        document: The answer.
        folder: The output folder; its ``model/`` holds the config already.
        report: The HTML page.
        check: Loads a folder of files back; see :func:`check_files`. It imports torch, so a caller that does not
            want that runs it in another process.

    Raises:
        MachineError: The disk is full, or the folder can't be written.
        EmissionError: A file was refused by its reader.
    """
    recipe = recipe_of(document.plan, document.facts)
    aside = folder / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    copy_folder(folder / MODEL_FOLDER, aside / MODEL_FOLDER)
    with writing(aside):
        write_yaml(aside / YAML, dict(recipe.emission.accelerate))
    arguments = json.dumps(dict(recipe.emission.training_args), indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_atomically(aside / ARGUMENTS, arguments)
    write_atomically(aside / REPORT, report)
    write_atomically(aside / DOCUMENT_FILE, dump_json(DOCUMENT, document))
    check(aside)
    for name in (YAML, ARGUMENTS, REPORT, DOCUMENT_FILE):
        with writing(folder / name):
            (aside / name).replace(folder / name)
    shutil.rmtree(aside, ignore_errors=True)


def edited_settings(document: Document, folder: Path) -> list[str]:
    """What the two files that carry the plan say otherwise than when they were written, a sentence each.

    Fields that somebody has added are none of the plan's; a file that is not there says nothing.

    Raises:
        InputError: One can't be read.
    """
    emission, said = recipe_of(document.plan, document.facts).emission, []
    for name, plans in ((YAML, emission.accelerate), (ARGUMENTS, emission.training_args)):
        written, ours = _settings(folder / name), json.loads(json.dumps(dict(plans)))
        if written is None:
            continue
        both = sorted(written.keys() & ours.keys())
        changed = [f"{one} is {written[one]!r}, not {ours[one]!r}" for one in both if written[one] != ours[one]]
        if gone := [f"{one}={ours[one]!r}" for one in sorted(ours.keys() - written.keys())]:
            more = f" and {len(gone) - _TOLD} more" if len(gone) > _TOLD else ""
            changed.append(f"without {', '.join(gone[:_TOLD])}{more}")
        if document.autofit == __version__ and changed:  # another one may have written others
            said.append(f"{folder / name} is not as the plan in {DOCUMENT_FILE}: {'; '.join(changed)}")
    return said


def _settings(path: Path) -> dict[str, Any] | None:
    """The settings in a file; ``None`` where it is not there.

    Raises:
        InputError: It can't be read, or holds none.
    """
    hint = "put it back as it was, or tune again with --resume in that folder"
    try:
        found = (safe_load if path.name == YAML else json.loads)(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, YAMLError) as error:
        raise InputError(f"{path} can't be read: {one_line(str(error))}", hint=hint) from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no settings: it was changed since it was written", hint=hint)
    return found


def check_files(folder: Path) -> None:
    """Load every emitted file back with the installed libraries.

    Raises:
        EmissionError: One is refused, or does not come back as it was written.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import HfArgumentParser, TrainingArguments

    from autofit.output.setup import read_setup

    try:
        config = load_config_from_file(str(folder / YAML))
        known = set(vars(launcher_parser().parse_args(["script.py"])))
        for name in ("fsdp_config", "deepspeed_config", "dynamo_config", "fp8_config", "parallelism_config"):
            unknown = set(getattr(config, name, None) or {}) - known
            if unknown:
                raise EmissionError(f"{YAML}: {name} has keys that the launcher ignores: {sorted(unknown)}")
        written = json.loads((folder / ARGUMENTS).read_text("utf-8"))
        known = {one.name for one in fields(TrainingArguments)}
        asking = _ASK_THE_CARD & known if _card_is_elsewhere(folder) else set()
        reader: Any = HfArgumentParser
        read = {name: value for name, value in written.items() if name not in asking}
        (args,) = reader(TrainingArguments).parse_dict(read)
        changed = {name for name, value in read.items() if _plain(getattr(args, name), value) != value}
        if changed:
            raise EmissionError(f"{ARGUMENTS}: {sorted(changed)} come back changed")
        read_setup(folder)
    except (AttributeError, ImportError, InputError, KeyError, OSError, TypeError, ValueError, YAMLError) as error:
        raise EmissionError(f"an emitted file is refused by its reader: {error}") from error


def _card_is_elsewhere(folder: Path) -> bool:
    """Whether the answer is an estimate for a card, and none of that kind is here."""
    import torch

    found = read_document(folder)
    if found.estimated is None or found.hardware.device != "cuda":
        return False
    if not torch.cuda.is_available():
        return True
    here = torch.cuda.get_device_properties(0)
    card = gpu_catalogue.matching(here.name, int(here.total_memory))
    return card is None or card.name != found.hardware.name


def _plain(value: object, written: object) -> object:
    """An enumeration as the string that was written, and of an object with defaults the fields that were."""
    if isinstance(written, dict) and not isinstance(value, dict):
        return {name: getattr(value, name, None) for name in written}
    return getattr(value, "value", value)
