"""``autofit.json``: the answer and its evidence, as others read it. The schema ships beside this file."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.contract.layout import data_parallel
from autofit.contract.outcome import Measured, Promise, Trial
from autofit.contract.plan import Plan
from autofit.output.text import one_line
from autofit.registry import check_values, converted
from autofit.search.tradeoffs import Contribution, Point
from autofit.system import strict_json
from autofit.system.errors import InputError, of_option
from autofit.training.guard.equivalence import Guard

FORMAT = 2
DOCUMENT_FILE = "autofit.json"
MODEL_FOLDER = "model"
MOST_BYTES = 256 << 20
"""That a document may have; forty trials take a quarter of a MiB."""
REQUEST = "request.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One value of one technique, and what this machine makes of it."""

    technique: str
    value: int | str
    kind: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Marks an answer that was predicted: no step of it was run.

    Attributes:
        low, high: The factors on the predicted samples/s that four trainings of five lie within; ``low`` is 0 where
            several processes train, since they are those of one card and leave out the link between cards, and where
            the optimizer steps on the host, whose speed is not known.
    """

    low: float
    high: float


TOKENS = 1e9
"""That hours and costs are told of where none are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long a training takes at the promised speed, and what it costs; without evaluation and saving.

    Attributes:
        tokens: That it trains on, without padding; ``None`` where its rows are told.
        rows: That a script's own training takes, from its beginning to its end.
        hours: That it takes.
        price: Of an hour of all its devices, where it was given.
        cost: Of those hours.
    """

    tokens: float | None = None
    rows: float | None = None
    hours: float
    price: float | None = None
    cost: float | None = None

    @classmethod
    def at(
        cls,
        *,
        samples_per_second: float,
        tokens_per_second: float,
        workload: Workload,
        tokens: float | None,
        price: float | None,
    ) -> Training | None:
        """Of so many tokens, by default of what a script trains on, or 1e9; ``None`` where nobody asked."""
        own = workload.own_rows
        if tokens is None and own is not None:
            hours = own / samples_per_second / 3600
        elif tokens is None and price is None:
            return None
        else:
            own, tokens = None, tokens or TOKENS
            hours = tokens / tokens_per_second / 3600
        return cls(tokens=tokens, rows=own, hours=hours, price=price, cost=None if price is None else hours * price)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The answer of one tune, or of an estimate.

    Attributes:
        format: Number of this layout; a reader refuses one that it does not know.
        plan: The winner's value of each technique.
        reason: Why this plan and not another, in words.
        changes: What the winner changes in the training, a sentence each.
        script: What no argument can carry and a script must do, a sentence each.
        offers: Every choice that was considered, offered or not, with its reason.
        notes: What a reader should know of the measurements.
        front: Measured plans that none beats in both speed and memory, the smallest first, the winner last.
        contributions: What each value of the winner that is not the baseline is good for.
        guard: What a short training of the winner showed; ``None`` where there was none.
        seconds: Wall seconds of the whole tune; ``training_share`` of them went into training steps.
        training: How long a training of so many tokens takes, where that was asked.
        estimated: Where the plan and the promise were predicted and not measured; ``None`` for a tune.
        config_sha256: Of the config that it holds for; ``None`` where an older version wrote it.
    """

    format: Literal[2] = 2
    autofit: str
    created: str
    model: Model
    workload: Workload
    hardware: Hardware
    versions: Mapping[str, str]
    plan: Plan
    promise: Promise
    reason: str
    changes: tuple[str, ...]
    script: tuple[str, ...]
    offers: tuple[Offer, ...]
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()
    front: tuple[Point, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    guard: Guard | None = None
    seconds: float
    training_share: float
    median_trial_seconds: float
    training: Training | None = None
    estimated: Estimated | None = None
    config_sha256: str | None = None

    @property
    def facts(self) -> Facts:
        """The facts that the plan was found for."""
        return Facts(model=self.model, hardware=self.hardware, workload=self.workload, packages=self.versions)


DOCUMENT: TypeAdapter[Document] = TypeAdapter(Document)


def read_document(folder: str | Path) -> Document:
    """The document of an output folder.

    Raises:
        InputError: There is none, it is not one of this format, or ``folder`` names none.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"folder is a {type(folder).__name__}", hint="give the path of a folder")
    if folder == "":  # a path without a name were the current folder
        raise InputError("folder is empty", hint="give the folder of a tune; . is the current one")
    path = Path(folder) / DOCUMENT_FILE
    try:
        text = _text_of(path)
        raw = strict_json.loads(text)
    except FileNotFoundError:
        begun = path.with_name(REQUEST).exists()
        hint = "its tune has found no answer yet: go on with it by --resume" if begun else "give the folder of a tune"
        missing = "" if Path(folder).is_dir() else ": there is no such folder"
        raise InputError(f"{folder} holds no {DOCUMENT_FILE}{missing}", hint=hint) from None
    except NotADirectoryError:
        parent = Path(folder).parent
        raise InputError(
            f"{str(folder)!r} is a file, and the output folder of a tune is wanted",
            hint=f"give its folder: {parent}" if (parent / DOCUMENT_FILE).is_file() else "give the folder of a tune",
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}", hint="tune again, or with --resume in that folder") from None
    if not isinstance(raw, dict):
        said = f"{path} can't be read: it holds {one_line(text, 20) or 'nothing'}, and no answer"
        raise InputError(said, hint="tune again, or with --resume in that folder")
    found = raw.get("format")
    if found != FORMAT:
        raise InputError(
            f"{path} has format {found!r}, this version reads {FORMAT}", hint="read it with the version that wrote it"
        )
    try:
        found = strict_json.read(DOCUMENT, text)
    except strict_json.UnknownKeyError as error:
        raise InputError(f"{path} is not valid: {error}", hint="it was edited by hand?") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = strict_json.place_of(first["loc"])
        raise InputError(f"{path} is not valid at {where}: {first['msg']}", hint="it was edited by hand?") from None
    found = _converted(found)
    _check_sound(found, path)
    return found


def _text_of(path: Path) -> str:
    """The text of a document; a pipe or a device, which may never end, is none."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no file")
    if found.st_size > MOST_BYTES:
        raise ValueError(f"it has {found.st_size:,} bytes, and an answer has some thousand")
    return path.read_text(encoding="utf-8")


def _converted(document: Document) -> Document:
    """The document with each plan in the values of today."""
    return replace(
        document,
        plan=converted(document.plan),
        trials=tuple(replace(trial, plan=converted(trial.plan)) for trial in document.trials),
        front=tuple(replace(point, plan=converted(point.plan)) for point in document.front),
    )


def _check_sound(document: Document, path: Path) -> None:
    """Refuse what no tune can have written, though each of its fields is of the right kind.

    Raises:
        InputError: There is such a thing.
    """
    batch = document.workload.global_batch
    plans = [document.plan, *(trial.plan for trial in document.trials), *(point.plan for point in document.front)]
    for plan in plans:
        rows, times = plan.get("micro_batch"), plan.get("accumulation")
        ranks = data_parallel(plan, document.workload)
        whole = isinstance(rows, int) and isinstance(times, int) and rows > 0 and times > 0
        if not whole or int(rows or 0) * int(times or 0) * ranks != batch:
            raise InputError(
                f"{path} has a plan that does not make the global batch of {batch}: {plan.words()[:300]}",
                hint="it was edited by hand?",
            )
    with of_option(f"{path} is not valid:"):
        check_values(document.plan, document.facts)
    promise = document.promise
    least = min(promise.samples_per_second, promise.tokens_per_second, promise.step_seconds, promise.limit_bytes)
    measured = [trial.outcome for trial in document.trials if isinstance(trial.outcome, Measured)]
    if min((least, *(min(one.step_seconds, one.samples_per_second) for one in measured))) <= 0:
        raise InputError(f"{path} has a speed or a ceiling of nothing", hint="it was edited by hand?")


def config_sha256(folder: Path) -> str:
    """Of what the model in an output folder is built from: its config, and its own code where that is trusted.

    Raises:
        OSError: It can't be read.
    """
    found, model = hashlib.sha256(), folder / MODEL_FOLDER
    for path in (model / "config.json", *sorted(model.glob("*.py"))):
        found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()


def check_config(document: Document, folder: Path) -> None:
    """Refuse to build a model by a config that was changed since: the answer is for another one.

    Raises:
        InputError: It was, or it can't be read.
    """
    path = folder / MODEL_FOLDER / "config.json"
    if document.config_sha256 is None or document.workload.script is not None:  # a script builds its own
        return
    try:
        same = config_sha256(folder) == document.config_sha256
    except OSError as error:
        raise InputError(
            f"{path} can't be read: {error}", hint="give the whole folder that `autofit tune` wrote"
        ) from None
    if not same:
        raise InputError(
            f"{path.parent} is not what was tuned: its files were changed since, and the answer is for another model",
            hint="put them back as they were, or tune again",
        )


def document_schema() -> dict[str, Any]:
    """JSON Schema of the document, as it is written to ``autofit.schema.json``."""
    found = DOCUMENT.json_schema(mode="serialization")
    for kind in (found, *found["$defs"].values()):
        if "properties" in kind:
            kind["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "autofit.json", **found}
