"""The question: what is to be tuned, read once, kept in the output folder, and the same again on ``--resume``."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from autofit import space
from autofit.cluster.nodes import check_address
from autofit.commands.lengths import check_lengths, check_same_lengths
from autofit.commands.model_source import local_config, read_config
from autofit.commands.scripts.named import is_script, named
from autofit.contract.facts import Facts, LaunchPath, Task
from autofit.machine.packages import installed
from autofit.output.document import MODEL_FOLDER, REQUEST, config_sha256
from autofit.search.samplers import check_sampler
from autofit.system import strict_json, units
from autofit.system.errors import InputError, near, of_option
from autofit.system.files import write_atomically, writing
from autofit.system.strict_json import dump_json
from autofit.training.launch_environment import check_environment
from autofit.training.runner import finished

TRIALS = "trials"
MOST_PROCESSES = 64
"""Of one machine."""
MOST_NODES = 64
DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; see :func:`tune` for each field."""

    model: str
    device: str = "auto"
    processes: int | None = None
    nodes: int | None = None
    seq_len: int | None = None
    global_batch: int | None = 32
    memory_limit: str | None = None
    launch_path: LaunchPath = "trainer"
    trust_remote_code: bool = False
    seed: int = 0
    task: Task | None = None
    lengths: str | None = None
    arguments: tuple[str, ...] = ()
    call: int = 1

    @property
    def is_script(self) -> bool:
        """Whether the user's own script is tuned."""
        return is_script(self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to search; may differ when a tune is resumed."""

    trials: int = 40
    timeout_seconds: float | None = None
    allowed: str = "exact,numeric"
    fix: tuple[str, ...] | dict[str, Any] = ()
    among: tuple[str, ...] | dict[str, Any] = ()
    sampler: str = "autofit"
    storage: str | None = None
    record: Path | None = None
    guard: bool = True
    on: str | None = None
    tokens: float | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What ``request.json`` keeps, so that ``--resume`` goes on with the same question."""

    request: Request
    facts: Facts
    config_sha256: str | None = None


STARTED: TypeAdapter[Started] = TypeAdapter(Started)
Asked = TypeVar("Asked", Request, Search)


def validated(kind: type[Asked], given: Mapping[str, Any]) -> Asked:
    """A request or a search out of what somebody has written in Python.

    Raises:
        InputError: An argument is of a type that does not become what was wanted.
    """
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        option, got = _option(str(first["loc"][0])), first["input"]
        words = first["msg"][:1].lower() + first["msg"][1:]
        choices = re.findall(r"'([^']+)'", first.get("ctx", {}).get("expected", ""))
        hint = near(str(got), choices) if choices else "help(autofit.tune) tells what each argument is"
        raise InputError(f"{option} {got!r}: {words}", hint=hint) from None


def batch_of(model: str, global_batch: int | None) -> int | None:
    """Rows to an optimizer step: what was asked for, or what is usual; ``None`` where a script tells its own."""
    usual = None if is_script(model) else DEFAULT_GLOBAL_BATCH
    return usual if global_batch is None else global_batch


def as_classes(allow: object) -> str:
    """``exact,numeric`` of what was given in Python: that text, or several names."""
    return ",".join(map(str, space.as_tuple(allow)))


def as_knobs(given: object) -> object:
    """Values by knob, as they are; or ``KNOB=VALUE`` texts, one or several."""
    return dict(given) if isinstance(given, Mapping) else space.as_tuple(given)


def check_request(request: Request, settings: Search) -> None:
    """Refuse what needs no machine to be refused."""
    check_environment()
    check_script(request)
    for name, number in (("--global-batch", request.global_batch), ("--trials", settings.trials)):
        if number is not None and not 1 <= number <= 10**7:
            raise InputError(f"{name} {number} is out of range", hint="give a whole number from 1 to 10000000")
    if not 0 <= request.seed < 2**32:
        raise InputError(f"--seed {request.seed} is out of range", hint="give a whole number from 0 to 4294967295")
    if settings.timeout_seconds is not None and not 0 < settings.timeout_seconds < math.inf:
        raise InputError(f"--timeout {settings.timeout_seconds:g} is out of range", hint="write it like 90s or 10m")
    most = MOST_PROCESSES * min(max(1, request.nodes or 1), MOST_NODES)
    if request.processes is not None and not 1 <= request.processes <= most:
        raise InputError(
            f"--processes {request.processes} is out of range", hint=f"give a whole number from 1 to {most}"
        )
    _check_nodes(request, settings)
    if request.seq_len is not None and not 2 <= request.seq_len <= 10**8:
        raise InputError(f"--seq-len {request.seq_len} is out of range", hint="give a whole number from 2 to 100000000")
    check_lengths(request.lengths, request.processes)
    if request.memory_limit is not None:
        with of_option("--memory-limit"):
            units.parse_limit(request.memory_limit, 1 << 40)
        units.check_unit(request.memory_limit, "--memory-limit")
    check_sampler(settings.sampler)
    if settings.on is not None:
        check_address(settings.on)
    if settings.record is not None:
        _check_record(settings.record)
    space.parse_allowed(settings.allowed)


def _check_record(record: Path) -> None:
    """Refuse a recording that can't be written.

    Raises:
        InputError: Its folder is not there, or it is a folder.
    """
    if not record.absolute().parent.is_dir():
        raise InputError(f"--record {str(record)!r}: no folder to write into", hint="make it first")
    if record.is_dir():
        raise InputError(f"--record {str(record)!r} is a folder", hint="name a file in it, such as trials.jsonl")


def _check_nodes(request: Request, settings: Search) -> None:
    """Refuse machines that a training can't be spread over.

    Raises:
        InputError: There are too many, one has no process or another number than the others, or there is no cluster.
    """
    nodes, processes = request.nodes, request.processes or 1
    if nodes is None:
        return
    if not 1 <= nodes <= MOST_NODES:
        raise InputError(f"--nodes {nodes} is out of range", hint=f"give a whole number from 1 to {MOST_NODES}")
    if processes % nodes:
        raise InputError(
            f"--nodes {nodes}: {processes} process{'es' * (processes > 1)} can't be spread over them evenly",
            hint=f"--processes {nodes * -(-processes // nodes)}: those of the whole training",
        )
    if nodes > 1 and settings.on is None:
        raise InputError(
            f"--nodes {nodes}: a tune over several machines runs on a Ray cluster",
            hint="--on auto (this machine's cluster) or its address; `autofit estimate --nodes` needs none",
        )


def check_script(request: Request) -> None:
    """Refuse what a script can't be tuned with, or a model that is none.

    Raises:
        InputError: There is such a thing.
    """
    if not request.is_script:
        if request.arguments or request.call != 1:
            what = f"-- {' '.join(request.arguments)}" if request.arguments else f"--call {request.call}"
            raise InputError(
                f"{what[:200]}: {request.model!r} is no script, and takes none",
                hint="a script is a .py file, a factory MODULE:FUNCTION: autofit tune train.py -- ARGS",
            )
        return
    named(request.model)
    if request.call < 1:
        raise InputError(f"--call {request.call} is out of range", hint="the first call of train() is 1")
    refused = {
        "--seq-len": request.seq_len is not None and "the length of its rows is the script's",
        "--lengths": request.lengths is not None and "the length of its rows is the script's",
        "--task": request.task is not None and "what it trains for is the script's",
        "--launch-path": request.launch_path != "trainer" and "how it trains is the script's",
        "--trust-remote-code": request.trust_remote_code and "whether a model's code runs is the script's",
    }
    for option, why in refused.items():
        if why:
            raise InputError(f"{option}: {why}", hint="leave it out")


def started_before(folder: Path, now: Request, *, resume: bool, say: Callable[[str], None]) -> Started | None:
    """What an earlier tune in the folder was asked, where this one goes on with it."""
    path = folder / REQUEST
    if not path.exists():
        if any(finished(folder / TRIALS)):  # of another question, it may be
            raise InputError(
                f"{folder} holds trials but no {REQUEST}, which says what they were for",
                hint="choose another --output, or delete it",
            )
        if resume:
            say(f"nothing to resume in {folder}: a new tune begins")
        return None
    try:
        started = strict_json.read(STARTED, path.read_bytes())
    except (OSError, ValueError) as error:  # pydantic's own is one of the latter
        raise InputError(f"{path} can't be read: {_first_line(error)}", hint="choose another --output") from error
    then = started.request
    if not resume:
        raise InputError(
            f"{folder} holds a tune of {then.model!r} already",
            hint="go on with it by --resume, choose another --output, or delete it",
        )
    _check_kept_config(started, folder)
    _check_same_model(then, now, folder)
    for name in [one.name for one in dataclasses.fields(Request) if one.name not in {"device", "model"}]:
        if getattr(then, name) != getattr(now, name):
            raise InputError(
                f"{folder} was begun {_as_given(name, then)}, this is {_as_given(name, now)}",
                hint=_OTHERWISE,
            )
    _check_same_script(started.facts, now, folder)
    check_same_lengths(now.lengths, now.seq_len, started.facts, folder)
    if now.device not in {"auto", started.facts.hardware.device}:
        raise InputError(
            f"{folder} was begun on {started.facts.hardware.device}, this is {now.device}",
            hint="choose another --output",
        )
    versions = installed()
    if versions != dict(started.facts.packages):
        changed = sorted({n for n, v in versions.items() if started.facts.packages.get(n) != v})
        raise InputError(
            f"{folder} was begun with other versions of {', '.join(changed) or 'some packages'}",
            hint="measurements would not compare: choose another --output",
        )
    return started


def _first_line(error: OSError | ValueError) -> str:
    """What is wrong with a file; of what is JSON and no request, where and what."""
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    where = strict_json.place_of(first["loc"])
    return f"{first['msg']}{f' at {where}' * bool(where)}"


_OTHERWISE = "repeat the first command with --resume, or choose another --output"


def _check_same_model(then: Request, now: Request, folder: Path) -> None:
    """Refuse to go on with another model; a folder, its config and a copy of it are one and the same.

    Raises:
        InputError: It is another one, or its config was changed since.
    """
    source, kept = local_config(now.model), folder / MODEL_FOLDER / "config.json"
    if now.is_script or then.is_script or source is None or not kept.is_file():
        same = then.model == now.model
    else:
        same = read_config(source, now.model) == read_config(kept, now.model)
        if same and now.trust_remote_code and then.model != now.model:  # the code is what lies beside the config
            began = local_config(then.model)
            same = began is not None and began.resolve().parent == source.resolve().parent
        if not same and then.model == now.model:
            raise InputError(
                f"the config of {now.model!r} has changed since {folder} was begun",
                hint="measurements would not compare: choose another --output",
            )
    if not same:
        raise InputError(
            f"{folder} was begun {_as_given('model', then)}, this is {_as_given('model', now)}", hint=_OTHERWISE
        )


def _check_kept_config(started: Started, folder: Path) -> None:
    """Refuse to go on where the config that trials are built by was changed in the output folder itself."""
    if started.config_sha256 is None:
        return
    hint = "measurements would not compare: put its files back as they were, or choose another --output"
    try:
        same = config_sha256(folder) == started.config_sha256
    except OSError as error:
        raise InputError(f"{error.filename} can't be read: {error.strerror}", hint=hint) from error
    if not same:
        raise InputError(f"{folder / MODEL_FOLDER} has changed since {folder} was begun", hint=hint)


def _check_same_script(facts: Facts, now: Request, folder: Path) -> None:
    """Refuse to go on with a script that was changed since."""
    script = facts.workload.script
    if script is not None and named(now.model).sha256 != script.sha256:
        raise InputError(
            f"{now.model} has changed since {folder} was begun",
            hint="measurements would not compare: choose another --output",
        )


def _option(name: str) -> str:
    """How a field is called on the command line."""
    return f"--{name.removesuffix('_seconds').replace('_', '-')}"


def _as_given(name: str, request: Request) -> str:
    """An option as it was given, in words."""
    option, value = _option(name), getattr(request, name)
    if name == "model":
        return f"for the model {value!r}"
    if name == "arguments":
        return f"with -- {shlex.join(value)}" if value else "without arguments of the script"
    if value is None or value is False:
        return f"without {option}"
    return f"with {option}" if value is True else f"with {option} {value}"


def keep_request(folder: Path, request: Request, facts: Facts) -> None:
    """Write the question down, so that it can be gone on with. From here on the folder holds a tune."""
    with writing(folder):
        started = Started(request=request, facts=facts, config_sha256=config_sha256(folder))
    write_atomically(folder / REQUEST, dump_json(STARTED, started))
