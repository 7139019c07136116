"""What the techniques of a plan write for another project, and what of it that project can't say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.output.text import as_word
from autofit.output.wording import in_float32
from autofit.registry import recipe_of, technique, techniques
from autofit.system.errors import InputError

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan
    from autofit.contract.technique import Technique
    from autofit.output.document import Document

_BY_YAML_ONLY = {"distributed_type", "fsdp_config", "deepspeed_config", "parallelism_config", "fp8_config"}
_REGIONS = "dynamo_use_regional_compilation"
MODULES = {"axolotl": "axolotl.cli.train", "llamafactory": "llamafactory.launcher"}
"""What `accelerate launch -m` starts of the projects that are given a YAML, and no script of the user's."""


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
class Carried:
    """What the techniques write, and what of it a target can't say.

    Attributes:
        float32_weights: Whether the plan's weights are float32, whatever it computes in.
        by_load: Whether the model has to come from :func:`autofit.load`.
        arguments: Fields of ``TrainingArguments``.
        by_yaml: Whether it is to be launched by the Accelerate YAML.
        extra: The target's own settings in the place of what no argument can carry.
    """

    document: Document
    folder: str
    float32_weights: bool
    by_load: bool
    arguments: dict[str, Any]
    by_yaml: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model as another project is told it; the script's name is no model."""
        return self.document.model.name if self.document.workload.script is None else "YOUR_MODEL"

    def processes_of(self, launcher: str) -> None:
        """Say how many processes the plan is for, where a launcher starts one for each card."""
        if self.document.hardware.device == "cuda" and not self.by_yaml:
            count = self.document.workload.processes
            cards = "; CUDA_VISIBLE_DEVICES=0 shows it one" if count == 1 else ""
            self.lacking.append(f"the number of processes, {count}: {launcher} starts one for each card it sees{cards}")


def carried_to(document: Document, target: str, folder: str) -> Carried:
    """What each technique of the plan writes for a target.

    Raises:
        InputError: The target knows no such way of training.
    """
    plan, facts = document.plan, document.facts
    recipe = recipe_of(plan, facts)
    emissions = {one.name: one.emit(plan[one.name], plan, facts) for one in techniques()}
    scripted = techniques() if document.workload.script is not None else ()
    unwritten = {one.name for one in scripted if _unwritten(emissions[one.name], one, plan, facts)}
    by_load = target == "sft" and any(one.script and target not in one.elsewhere for one in emissions.values())
    found = Carried(
        document=document,
        folder=folder,
        float32_weights=in_float32(document),
        by_load=by_load,
        arguments=dict(recipe.emission.training_args),
    )
    for name, emission in emissions.items():
        told = None if by_load and emission.script else emission.elsewhere.get(target)  # autofit.load makes a model so
        if told is not None:
            for key, value in told.items():
                both = isinstance(value, Mapping) and isinstance(found.extra.get(key), Mapping)
                found.extra[key] = {**found.extra[key], **value} if both else value
        said = list(emission.script) if told is None else []
        if needs_yaml(emission) and target != "cli" and not (told and target in MODULES):
            found.by_yaml = True
            behind = f" -m {MODULES[target]} CONFIG" if target in MODULES else ""
            yaml = f"{shlex.quote(as_word(folder))}/accelerate.yaml"
            said.append(f"launch by `accelerate launch --config_file {yaml}{behind}`")
        if name in unwritten and told is None:
            said.append("`autofit run` puts it into the script; no argument says it")
        if emission.script and told is None and target in MODULES:
            said[: len(emission.script)] = [_without_setting(name, plan, target)]
        if target in emission.otherwise:
            said.append(emission.otherwise[target])
        found.lacking += [f"{name}={plan[name]}: {words}" for words in said]
    if found.lacking and any("setup.model" in words for words in found.lacking):
        found.lacking.insert(0, f"where a line says setup: setup = autofit.load({folder!r})")
    if document.estimated is not None:
        found.lacking.insert(0, f"that it was measured: the plan is estimated for {document.hardware.name}")
    return found


def _without_setting(name: str, plan: Plan, target: str) -> str:
    """That a project has no setting for a value, in words.

    Raises:
        InputError: The value says what is trained, and not how: the project would train something else.
    """
    if technique(name).ways:
        words = f"it has no setting for {name}={plan[name]}, and would train otherwise"
        raise InputError(f"--to {target}: {words}", hint="--to sft")
    return "there is no setting for it"


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


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as YAML, in their order."""
    from yaml import safe_dump

    return str(safe_dump(json.loads(json.dumps(dict(settings))), sort_keys=False))
