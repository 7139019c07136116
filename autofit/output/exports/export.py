"""A plan as other projects' own settings, for people to paste; what a project can't carry is said, never dropped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.facts import predicts_next_token
from autofit.output.exports.flags import flags
from autofit.output.text import as_word
from autofit.output.wording import launch_commands, shell_lines
from autofit.registry import recipe_of, techniques
from autofit.system.errors import InputError, near

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan
    from autofit.contract.script import Script
    from autofit.contract.technique import Technique
    from autofit.output.document import Document

_BY_YAML_ONLY = {"distributed_type", "fsdp_config", "deepspeed_config", "parallelism_config", "fp8_config"}
_REGIONS = "dynamo_use_regional_compilation"
_AXOLOTL = {
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "optim": "optimizer",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Axolotl's names of fields of ``TrainingArguments``; the rest it calls the same."""
_LIGER = ("use_liger_kernel", "liger_kernel_config")
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in the words of another project.

    Attributes:
        text: What to paste.
        settings: The same as values, by their names there.
        lacking: What it can't carry, a sentence each.
    """

    text: str
    settings: Mapping[str, Any]
    lacking: tuple[str, ...]


@dataclass(slots=True)
class _Carried:
    """What the techniques write, and what of it a target can't say.

    Attributes:
        float32_weights: Whether the plan's weights are float32, whatever it computes in.
        arguments: Fields of ``TrainingArguments``.
        extra: The target's own settings in the place of what no argument can carry.
    """

    document: Document
    folder: str
    float32_weights: bool
    arguments: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)


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
    if target in {"axolotl", "llamafactory"} and script is not None and script.adapter:
        own = f"the script puts an adapter on its model itself ({script.adapter})"
        raise InputError(f"--to {target}: {own}, without which all weights would be trained", hint="--to sft")
    carried = _carried(document, target, str(folder))
    if next_token and script is not None:
        carried.lacking.insert(0, _of_script(document, script))
    elif script is not None and script.undivided and script.accumulation != document.plan["accumulation"]:
        carried.lacking.append(_scale(script.accumulation, int(document.plan["accumulation"])))
    return TARGETS[target](carried)


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
    return (
        f"what {document.model.name} does by itself: it trains a {document.model.architecture}{adapter}, with its own "
        "data and loss; the promise holds for that script"
    )


def _model(document: Document) -> str:
    """The model as another project is told it; the script's name is no model."""
    return document.model.name if document.workload.script is None else "YOUR_MODEL"


def _carried(document: Document, target: str, folder: str) -> _Carried:
    """What each technique of the plan writes for a target."""
    plan, facts = document.plan, document.facts
    recipe = recipe_of(plan, facts)
    found = _Carried(
        document=document,
        folder=folder,
        float32_weights=recipe.weights_dtype == "float32",
        arguments=dict(recipe.emission.training_args),
    )
    emissions = {one.name: one.emit(plan[one.name], plan, facts) for one in techniques()}
    scripted = techniques() if document.workload.script is not None else ()
    unwritten = {one.name for one in scripted if _unwritten(emissions[one.name], one, plan, facts)}
    by_load = target == "sft" and any(one.script and target not in one.elsewhere for one in emissions.values())
    for name, emission in emissions.items():
        told = None if by_load and emission.script else emission.elsewhere.get(target)  # autofit.load makes a model so
        if told is not None:
            for key, value in told.items():
                both = isinstance(value, Mapping) and isinstance(found.extra.get(key), Mapping)
                found.extra[key] = {**found.extra[key], **value} if both else value
        said = list(emission.script) if told is None else []
        if needs_yaml(emission) and target != "cli":
            said.append(f"launch by `accelerate launch --config_file {shlex.quote(as_word(folder))}/accelerate.yaml`")
        if name in unwritten and told is None:
            said.append("`autofit run` puts it into the script; no argument says it")
        if emission.script and told is None and target in {"axolotl", "llamafactory"}:
            said[: len(emission.script)] = ["there is no setting for it"]
        found.lacking += [f"{name}={plan[name]}: {words}" for words in said]
    if found.lacking and any("setup.model" in words for words in found.lacking):
        found.lacking.insert(0, f"where a line says setup: setup = autofit.load({folder!r})")
    if document.estimated is not None:
        found.lacking.insert(0, f"that it was measured: the plan is estimated for {document.hardware.name}")
    return found


def _unwritten(emission: Emission, one: Technique, plan: Plan, facts: Facts) -> bool:
    """Whether a value is not what a script does by itself, and is written as if it were."""
    value = one.own(facts)
    own = one.emit(value, plan, facts)
    return plan[one.name] != value and all(
        getattr(emission, name) == getattr(own, name) for name in ("accelerate", "training_args", "script")
    )


def needs_yaml(emission: Emission) -> bool:
    """Whether only an Accelerate YAML carries the choice."""
    keys = {name for name, value in emission.accelerate.items() if value != "NO"}
    regions = emission.accelerate.get("dynamo_config", {}).get(_REGIONS, False)
    return regions or bool(_BY_YAML_ONLY & keys)


def _python(carried: _Carried) -> Exported:
    """``TrainingArguments(...)``."""
    settings = {"output_dir": "run", **carried.arguments}
    return Exported(
        text=f"from transformers import TrainingArguments\n\nargs = {_call('TrainingArguments', settings)}\n",
        settings=settings,
        lacking=tuple(carried.lacking),
    )


def _cli(carried: _Carried) -> Exported:
    """Words for a script that reads its arguments by ``HfArgumentParser``; a plain loop reads none."""
    script, run = carried.document.workload.script, shlex.join(launch_commands(carried.document, carried.folder)[0])
    if script is not None and script.factory is None and not script.trainer:
        loop = "the script of this answer trains in a plain loop, which reads no TrainingArguments"
        raise InputError(f"--to cli: {loop}", hint=f"`{run}` trains it with the plan; --to python tells the values")
    own = ("your_script.py",) if script is None or script.factory is not None else script.typed
    words = ["accelerate", "launch", "--config_file", f"{as_word(carried.folder)}/accelerate.yaml", *own]
    lines, lacking = shell_lines([*words, *flags(carried.arguments)]), list(carried.lacking)
    if script is not None:
        lacking.append(
            f"a script that reads no TrainingArguments from its command line, or all from one file: `{run}` trains any"
        )
    return Exported(text="\n".join(lines) + "\n", settings=carried.arguments, lacking=tuple(lacking))


def _sft(carried: _Carried) -> Exported:
    """``SFTConfig(...)``, and the adapter that ``SFTTrainer`` is given."""
    extra, lacking, work = dict(carried.extra), list(carried.lacking), carried.document.workload
    adapter = extra.pop("peft_config", None)
    length = {"max_length": work.seq_len}
    if work.script is not None:  # the longest row that was seen is no bound to cut others by
        length = {}
        lacking.append(f"max_length: keep the script's own; its longest row, as tuned, has {work.seq_len} tokens")
    settings = {"output_dir": "run", **length, **carried.arguments, **extra}
    lines = ["from trl import SFTConfig", "", f"args = {_call('SFTConfig', settings)}"]
    if adapter is not None:
        lines.insert(0, "from peft import LoraConfig")
        lines += ["", f"peft_config = {_call('LoraConfig', adapter)}  # SFTTrainer(..., peft_config=peft_config)"]
    return Exported(text="\n".join(lines) + "\n", settings=settings, lacking=tuple(lacking))


def _axolotl(carried: _Carried) -> Exported:
    """Axolotl's YAML."""
    arguments, lacking = dict(carried.arguments), list(carried.lacking)
    arguments.pop("train_sampling_strategy", None)  # by an older name, which a technique says
    if arguments.pop("use_cpu", False):
        lacking.append("training on the CPU: Axolotl trains on GPUs, where another plan may be faster")
    whole = not any(name in carried.extra for name in ("load_in_4bit", "load_in_8bit"))
    if carried.float32_weights and whole and (arguments.get("bf16") or arguments.get("fp16")):
        lacking.append(
            "float32 weights: Axolotl loads them in the 16 bits that it computes in, which is another training"
        )
    if any(arguments.pop(name, None) for name in _LIGER):
        lacking.append("Liger kernels: add its plugin, axolotl.integrations.liger.LigerPlugin")
    kwargs = arguments.get("activation_checkpointing_kwargs") or arguments.get("gradient_checkpointing_kwargs") or {}
    if "every_n_layers" in kwargs:
        lacking.append("checkpointing of every n-th layer: Axolotl checkpoints all or none")
    if not arguments.get("torch_compile"):
        for name in ("torch_compile_backend", "torch_compile_mode"):
            arguments.pop(name, None)
    tuned = {_AXOLOTL.get(name, name): value for name, value in arguments.items() if value is not None}
    settings = {
        "base_model": _model(carried.document),
        "sequence_len": carried.document.workload.seq_len,
        "sample_packing": False,
        **tuned,
        **carried.extra,
        "datasets": [{"path": "YOUR_DATA", "type": "completion"}],
        "output_dir": "run",
        "num_epochs": 1,
        "learning_rate": 2e-5,
    }
    lacking.append("datasets, num_epochs and learning_rate are yours to set")
    return Exported(text=_yaml(settings), settings=settings, lacking=tuple(lacking))


def _llamafactory(carried: _Carried) -> Exported:
    """LLaMA-Factory's YAML, whose training arguments are those of transformers."""
    arguments, lacking = dict(carried.arguments), list(carried.lacking)
    liger = [arguments.pop(name, None) for name in _LIGER]
    checkpointed = any(arguments.pop(name, False) for name in _CHECKPOINTING)
    kwargs = [arguments.pop(f"{name}_kwargs", None) or {} for name in _CHECKPOINTING]
    if any("every_n_layers" in one for one in kwargs):
        lacking.append("checkpointing of every n-th layer: LLaMA-Factory checkpoints all or none")
    if liger[1]:
        lacking.append("the choice of Liger's kernels: LLaMA-Factory takes all of them")
    settings = {
        "model_name_or_path": _model(carried.document),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "default",
        "cutoff_len": carried.document.workload.seq_len,
        **{name: value for name, value in arguments.items() if value is not None},
        "disable_gradient_checkpointing": not checkpointed,
        "use_reentrant_gc": False,
        "enable_liger_kernel": bool(liger[0]),
        **carried.extra,
        "dataset": "YOUR_DATA",
        "output_dir": "run",
        "num_train_epochs": 1,
        "learning_rate": 2e-5,
    }
    lacking.append("dataset, template, num_train_epochs and learning_rate are yours to set")
    return Exported(text=_yaml(settings), settings=settings, lacking=tuple(lacking))


_NEXT_TOKEN_TRAINERS = {"sft", "axolotl", "llamafactory"}
TARGETS: Mapping[str, Callable[[_Carried], Exported]] = {
    "python": _python,
    "cli": _cli,
    "sft": _sft,
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
}
"""What a plan can be exported to."""


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call of Python, an argument a line."""
    return "\n".join([f"{name}(", *(f"    {key}={value!r}," for key, value in arguments.items()), ")"])


def _yaml(settings: Mapping[str, Any]) -> str:
    from yaml import safe_dump

    return str(safe_dump(json.loads(json.dumps(dict(settings))), sort_keys=False))


def comments(exported: Exported, target: str) -> str:
    """What the target can't carry, as comments to stand above the text; empty where it carries all."""
    if not exported.lacking:
        return ""
    return "\n".join((f"# {target} does not carry:", *(f"#   {' '.join(words.split())}" for words in exported.lacking)))
