"""Traces on demand: made in throw-away processes, shared between plans, kept on disk.

Plans share their traces: one of the micro-steps serves every number of rows and every optimizer, one of the
optimizer's step serves every sequence and every way of checkpointing. What a technique's value is traced as,
:meth:`~autofit.contract.technique.Technique.traced_as` says.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import struct
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autofit.contract.plan import Plan
from autofit.contract.technique import Part
from autofit.costmodel.jobs import TraceJob
from autofit.costmodel.memory import peak
from autofit.costmodel.memory.parts import MicroPart, OptimizerPart, unpack
from autofit.costmodel.memory.peak import Need
from autofit.costmodel.tracing.trace_request import TraceRequest, groups_experts, kernels_of, traced_plan
from autofit.registry import loaded_rows, recipe_of, source_folders, technique

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.script import Script
    from autofit.system.forking.server import ForkServer

PARTS: tuple[Part, ...] = ("micro_steps", "optimizer")
MANY = 2
"""Rows whose trace stands for any number of them; what it says of one alone may be 3 % off."""
_LONGEST_SECONDS = 900.0
_TOLD_EVERY_SECONDS = 20.0
TRACES = ".traces"
"""Inside a folder for one run: the traces that no cache took."""
_SCRIPT_RUNS = 16
"""A script runs once for each way of loading its model; there are not more."""
_SPOILED = (
    OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, MemoryError, EOFError,
    zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What reading an archive may raise that is cut off, or whose bytes are not those that were written."""


def _why_unwritable(folder: Path) -> str | None:
    """Why nothing can be written into a folder, which is made where it is missing; ``None`` where something can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def cache_folder() -> Path:
    """Where traces are kept: ``$XDG_CACHE_HOME/autofit/traces``; nothing is lost when it is deleted."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path("~/.cache").expanduser()  # a relative one is to be ignored, says XDG
    return base / "autofit" / "traces"


class Traces:
    """Every trace that the plans of one question need.

    Args:
        facts: What the plans are for.
        config: Folder that holds the ``config.json``.
        server: Forks the processes that trace; asked only for what is not kept already.
        scratch: Folder for the job while it runs.
        cache: Where traces are kept; ``None``, or a folder that can't be written, keeps them for this run only, in
            ``scratch/.traces``, as one does that has no room for more.
    """

    def __init__(
        self, facts: Facts, config: Path, server: Callable[[], ForkServer], scratch: Path, cache: Path | None = None
    ) -> None:
        self.facts = facts
        self.config = config
        self.server = server
        self.scratch = scratch
        self.spare = scratch / TRACES
        self.cache = cache or self.spare
        self.failed: dict[str, str] = {}
        self.made = 0
        self.capacities: dict[Hashable, int] = {}  # bytes that the allocator needs, by what :meth:`alike` says
        self._parts: dict[str, MicroPart | OptimizerPart] = {}
        self._ground = ground_of(facts, config)
        self._waiting = facts.workload.launch_path == "trainer"
        script = facts.workload.script
        self._generates = script is not None and script.generated_at_once(1) > 0
        self._generating: dict[int, MicroPart] = {}  # by the ``id`` of what was traced of one row

    # -- which traces ---------------------------------------------------------------------------------------------

    def untraced(self, plan: Plan) -> str | None:
        """Why the plan has no estimate, or ``None``."""
        for name in untraceable(plan):
            return f"{name}={plan[name]} can't be traced"
        for part in PARTS:
            traced = traced_plan(plan, part)
            reason = self.failed.get(self._key(part, traced)) if traced else None
            if reason:
                return reason
        return None

    def prepare(self, plans: Iterable[Plan], say: Callable[[str], None] = lambda _: None) -> None:
        """Make every trace that these plans need and that is not there yet, side by side.

        Raises:
            MachineError: No process can be started.
        """
        wanted = self._wanted(list(plans))
        if not wanted:
            return
        if self.cache != self.spare and (why := _why_unwritable(self.cache)) is not None:
            say(f"traces are kept for this run only: {self.cache} can't be written: {why}")
            self.cache = self.spare
            self.prepare(plans, say)
            return
        say(f"tracing {len(wanted)} parts of a step")
        job = TraceJob(
            facts=self.facts,
            config=str(self.config.resolve()),
            requests=tuple(wanted.values()),
            folder=str(self.cache.resolve()),
            spare=str(self.spare.resolve()),
        )
        script = self.facts.workload.script
        longest = _LONGEST_SECONDS if script is None else _LONGEST_SECONDS + _SCRIPT_RUNS * script.seconds
        with (
            self._told_meanwhile([one.file for one in wanted.values()], say),
            self.server().ask(self.scratch, job, kill_after_seconds=longest) as answer,
        ):
            reasons = {} if answer is None else dict(answer["failed"])
        if self.cache != self.spare and any((self.spare / one.file).exists() for one in wanted.values()):
            say(f"some traces are kept for this run only: {self.cache} takes no more of them: is its disk full?")
        for key, request in wanted.items():
            if request.file in reasons:
                self.failed[key] = reasons[request.file]
            elif self._known(key):
                self.made += 1
            else:
                self.failed[key] = "its trace took too long or was killed"

    def _wanted(self, plans: Sequence[Plan]) -> dict[str, TraceRequest]:
        """The traces that these plans need and that are not there yet, by their keys."""
        wanted: dict[str, TraceRequest] = {}
        for part in PARTS:
            traced = {one for one in (traced_plan(plan, part) for plan in plans) if one is not None}
            if part == "micro_steps" and self._generates:  # many rows at once, beside a micro-batch of one
                traced |= {one.replaced(micro_batch=MANY) for one in traced}
            for one in traced:
                if not self._known(key := self._key(part, one)):
                    wanted[key] = TraceRequest(part=part, plan=one, file=f"{key}.npz")
        return wanted

    @contextlib.contextmanager
    def _told_meanwhile(self, names: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
        """Say now and then how many of the traces are there."""
        ended = threading.Event()

        def tell() -> None:
            told = -1
            while not ended.wait(_TOLD_EVERY_SECONDS):
                made = sum((self.cache / name).exists() for name in names)
                if made > told:
                    say(f"{made} of {len(names)} parts traced")
                told = made

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _known(self, key: str) -> bool:
        if key in self._parts or key in self.failed:
            return True
        for folder in dict.fromkeys((self.cache, self.spare)):
            try:
                # opened here: numpy leaves a file that is no whole archive open
                with (folder / f"{key}.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    self._parts[key] = unpack(arrays)
            except _SPOILED:
                continue  # not there, or cut off: it is made again
            return True
        return False

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as one command
    def _key(self, part: Part, traced: Plan) -> str:
        text = json.dumps([self._ground, part, sorted(traced.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    # -- what they say --------------------------------------------------------------------------------------------

    def parts(self, plan: Plan) -> tuple[MicroPart, OptimizerPart] | None:
        """The two parts of a plan; ``None`` where it can't be traced. Made by :meth:`prepare` before.

        Where one row alone was not traced, many stand for it.
        """
        micro = self._part(plan, "micro_steps") or self._part(plan.replaced(micro_batch=MANY), "micro_steps")
        optimizer = self._part(plan, "optimizer")
        if micro is None or optimizer is None:
            return None
        assert isinstance(micro, MicroPart)
        assert isinstance(optimizer, OptimizerPart)
        return self._of_many(micro, plan) if self._generates else micro, optimizer

    def _of_many(self, micro: MicroPart, plan: Plan) -> MicroPart:
        """The same with what many rows take where they are generated at once, which one alone does not tell."""
        many = self._part(plan.replaced(micro_batch=MANY), "micro_steps")
        if not isinstance(many, MicroPart) or many is micro:
            return micro
        return self._generating.setdefault(id(micro), replace(micro, evaluation=many.evaluation))

    @staticmethod
    def alike(plan: Plan, facts: Facts) -> Hashable:
        """Equal for plans that ask for the same memory in the same order, on cards whose libraries do."""
        traced = (traced_plan(plan, part) for part in PARTS)
        rows = (loaded_rows(plan, facts), int(plan["accumulation"]) > 1, evaluated_rows(plan, facts))
        return (*traced, *rows, facts.hardware.capability)

    def _part(self, plan: Plan, part: Part) -> MicroPart | OptimizerPart | None:
        traced = traced_plan(plan, part)
        return None if traced is None else self._parts.get(self._key(part, traced))

    def need(self, plan: Plan) -> Need | None:
        """What a plan needs; ``None`` where it can't be traced."""
        found = self.parts(plan)
        if found is None:
            return None
        rows, accumulation = loaded_rows(plan, self.facts), int(plan["accumulation"])
        evaluated = evaluated_rows(plan, self.facts)
        return peak.need(*found, rows=rows, accumulation=accumulation, waiting=self._waiting, evaluated_rows=evaluated)


def evaluated_rows(plan: Plan, facts: Facts) -> int:
    """Rows of an evaluation step of the plan, as it is written; of a script those that its model generates at once."""
    script = facts.workload.script
    if script is not None:  # how it evaluates is its own
        return script.generated_at_once(int(plan["micro_batch"]) * int(plan["accumulation"]))
    return int(recipe_of(plan, facts).emission.training_args.get("per_device_eval_batch_size", 0))


def untraceable(plan: Plan) -> list[str]:
    """The techniques whose values keep a plan from being traced."""
    return [
        name
        for name, value in plan.items()
        if not technique(name).traced_in(plan) or any(technique(name).traced_as(value, part) is None for part in PARTS)
    ]


def ground_of(facts: Facts, config: Path) -> list[object]:
    """All that a trace depends on, but the plan."""
    versions = {name: facts.packages.get(name) for name in sorted(facts.packages)}
    work, on_cuda = facts.workload, facts.hardware.device == "cuda"
    return [
        source_hash(),
        versions,
        model_of(config),
        facts.hardware.device,
        [one(facts.hardware.capability) for one in (kernels_of, groups_experts)] if on_cuda else None,
        work.seq_len,
        bool(work.lengths),  # then there is a mask
        work.processes,
        work.launch_path,
        facts.model.trust_remote_code,
        facts.model.task,
        *(script_of(work.script) if work.script is not None else ()),
    ]


def script_of(script: Script) -> list[object]:
    """What a script's step is made of: its text and that of its own modules, what it is told, its rows."""
    path = Path(script.path)
    beside = sorted((one.name, hashlib.sha256(one.read_bytes()).hexdigest()) for one in path.parent.glob("*.py"))
    texts = [script.sha256, sorted(script.modules.items()), beside]
    loaded = [script.weights_dtype, script.adapter, script.quantization, script.generated, script.engine]
    said = [script.path, script.arguments, script.call, *texts, *loaded]
    return [*said, sorted(script.batch.items()), script.longest_places[:1], script.own]


def model_of(config: Path) -> list[object]:
    """What a model is made of: its config, and its own code if it has some."""
    settings = json.loads((config / "config.json").read_text("utf-8"))
    return [settings, sorted((path.name, path.read_text("utf-8", "replace")) for path in config.glob("*.py"))]


@functools.cache
def source_hash() -> str:
    """Of autofit's own code: a trace is as old as the code that made it."""
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
