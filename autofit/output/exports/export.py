"""A plan as other projects' own settings, for people to paste; what a project can't carry is said, never dropped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.contract.facts import predicts_next_token
from autofit.output.exports.axolotl import axolotl
from autofit.output.exports.carried import MODULES, Carried, Exported, carried_to
from autofit.output.exports.flags import NO_FLAG, flags
from autofit.output.exports.llamafactory import llamafactory
from autofit.output.text import as_word
from autofit.output.wording import IN_FLOAT32, launch_commands, loads, shell_lines
from autofit.system.errors import InputError, near

if TYPE_CHECKING:
    from autofit.contract.script import Script
    from autofit.output.document import Document


def export(document: Document, target: str, *, folder: str | Path) -> Exported:
    """The plan of an answer as another project's settings.

    Args:
        document: The answer.
        target: One of :data:`TARGETS`.
        folder: Where the answer is, as the user calls it; it goes into the words.

    Raises:
        InputError: There is no such target, or it would train something else.
    """
    if target not in TARGETS:
        raise InputError(f"--to {target!r} is not known", hint=near(target, list(TARGETS)))
    next_token, script = target in _NEXT_TOKEN_TRAINERS, document.workload.script
    other = _other_than_next_token(document)
    if next_token and other is not None:
        raise InputError(f"--to {target}: it trains causal language models, and {other}", hint="--to python")
    if target in MODULES and script is not None and script.adapter:
        own = f"the script puts an adapter on its model itself ({script.adapter})"
        raise InputError(f"--to {target}: {own}, without which all weights would be trained", hint="--to sft")
    carried = carried_to(document, target, str(folder))
    if next_token and script is not None:
        carried.lacking.insert(0, _of_script(document, script))
    elif script is None and not next_token and carried.float32_weights and not loads(carried.lacking):
        carried.lacking.append(IN_FLOAT32)
    elif script is not None and script.undivided and script.accumulation != document.plan["accumulation"]:
        carried.lacking.append(_scale(script.accumulation, int(document.plan["accumulation"])))
    return TARGETS[target](carried)


_ONE_CARD = (
    "that it is for one card: SFTTrainer spreads the layers of a model over all that it sees; CUDA_VISIBLE_DEVICES=0 "
    "shows it one"
)


def _other_than_next_token(document: Document) -> str | None:
    """What an answer trains that is no causal language model, in words."""
    model = document.model
    if document.workload.script is None:
        return None if model.task == "causal-lm" else f"this answer is for {model.task}"
    return None if predicts_next_token(model.architecture) else f"the script of this answer a {model.architecture}"


def _scale(own: int, planned: int) -> str:
    """What `autofit run` does to a loss that nobody divides by the accumulation."""
    return (
        f"the scale of the gradients: nobody divides the script's loss by its accumulation, {own} by itself and "
        f"{planned} here; multiply the loss by {own / planned:g}, or use `autofit run`, which does"
    )


def _of_script(document: Document, script: Script) -> str:
    """What of a script a project that brings its own training knows nothing of."""
    adapter = f" with an adapter ({script.adapter})" if script.adapter else ""
    packed = f" on weights that it quantizes ({script.quantization})" if script.quantization else ""
    trained = f"{document.model.architecture}{adapter}{packed}"
    return (
        f"what {document.model.name} does by itself: it trains a {trained}, with its own "
        "data and loss; the promise holds for that script"
    )


def _python(carried: Carried) -> Exported:
    """``TrainingArguments(...)``."""
    settings = {"output_dir": "run", **carried.arguments}
    return Exported(
        text=f"from transformers import TrainingArguments\n\nargs = {_call('TrainingArguments', settings)}\n",
        settings=settings,
        lacking=tuple(carried.lacking),
    )


def _cli(carried: Carried) -> Exported:
    """Words for a script that reads its arguments by ``HfArgumentParser``; a plain loop reads none."""
    script, run = carried.document.workload.script, shlex.join(launch_commands(carried.document, carried.folder)[0])
    if script is not None and script.factory is None and not script.trainer:
        loop = "the script of this answer trains in a plain loop, which reads no TrainingArguments"
        raise InputError(f"--to cli: {loop}", hint=f"`{run}` trains it with the plan; --to python tells the values")
    own = ("your_script.py",) if script is None or script.factory is not None else script.typed
    words = ["accelerate", "launch", "--config_file", f"{as_word(carried.folder)}/accelerate.yaml", *own]
    lines, lacking = shell_lines([*words, *flags(carried.arguments)]), list(carried.lacking)
    lacking += [
        f"{name}, which no flag says: the script has to set args.{name} = {value}"
        for name, value in carried.arguments.items()
        if name in NO_FLAG and value is not None
    ]
    if script is not None:
        lacking.append(
            f"a script that reads no TrainingArguments from its command line, or all from one file: `{run}` trains any"
        )
    return Exported(text="\n".join(lines) + "\n", settings=carried.arguments, lacking=tuple(lacking))


def _sft(carried: Carried) -> Exported:
    """``SFTConfig(...)``, and the adapter that ``SFTTrainer`` is given."""
    extra, lacking, work = dict(carried.extra), list(carried.lacking), carried.document.workload
    adapter = extra.pop("peft_config", None)
    length = {"max_length": work.seq_len}
    if work.script is not None:  # the longest row that was seen is no bound to cut others by
        length = {}
        lacking.append(f"max_length: keep the script's own; its longest row, as tuned, has {work.seq_len} tokens")
    given = "model"
    if not carried.by_load:
        given = repr(carried.model)
        if work.script is None and carried.float32_weights:
            extra["model_init_kwargs"] = {"dtype": "float32", **extra.get("model_init_kwargs", {})}
        if carried.document.hardware.device == "cuda" and work.processes == 1 and not carried.by_yaml:
            lacking.append(_ONE_CARD)
    settings = {"output_dir": "run", **length, **carried.arguments, **extra}
    lines = ["from trl import SFTConfig", "", f"args = {_call('SFTConfig', settings)}"]
    if adapter is not None:
        lines.insert(0, "from peft import LoraConfig")
        lines += ["", f"peft_config = {_call('LoraConfig', adapter)}"]
    behind = "" if adapter is None else ", peft_config=peft_config"
    named = "  # by its name: it is loaded as args say" if "model_init_kwargs" in extra else ""
    lines += ["", f"# SFTTrainer({given}, args=args{behind}, ...){named}"]
    return Exported(text="\n".join(lines) + "\n", settings=settings, lacking=tuple(lacking))


_NEXT_TOKEN_TRAINERS = {"sft", "axolotl", "llamafactory"}
TARGETS: Mapping[str, Callable[[Carried], Exported]] = {
    "python": _python,
    "cli": _cli,
    "sft": _sft,
    "axolotl": axolotl,
    "llamafactory": llamafactory,
}
"""What a plan can be exported to."""


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call of Python, an argument a line."""
    return "\n".join([f"{name}(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


def comments(exported: Exported, target: str) -> str:
    """What the target can't carry, as comments to stand above the text; empty where it carries all."""
    if not exported.lacking:
        return ""
    return "\n".join((f"# {target} does not carry:", *(f"#   {' '.join(words.split())}" for words in exported.lacking)))
