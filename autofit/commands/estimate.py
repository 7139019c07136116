"""``autofit estimate``: what plans need on a card that need not be here, and where it goes.

The story: card -> facts -> space -> traces -> the largest micro-batch of each family of plans that fits, in order of
predicted speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter

from autofit import space
from autofit.commands.model_source import fetch, modeling_module, own_code
from autofit.commands.request import (
    Request,
    Search,
    as_classes,
    as_knobs,
    check_request,
    read_facts,
    remarks,
    row_length,
    validated,
)
from autofit.contract.facts import Facts, Hardware, LaunchPath, Model, Task, Workload
from autofit.contract.plan import Plan
from autofit.costmodel import allocator, peak
from autofit.costmodel.forecast import CONTEXT_BYTES, MARGIN, Forecast, families_of, forecast, workspace_bytes
from autofit.costmodel.peak import Need
from autofit.costmodel.tracing.timeline import Floats
from autofit.costmodel.tracing.trace_store import Traces, cache_folder, model_of, source_hash
from autofit.machine import gpu_catalogue
from autofit.machine.describe import host_memory
from autofit.machine.gpu_catalogue import Card
from autofit.machine.packages import installed
from autofit.machine.select import choose_device
from autofit.output.document import MODEL_FOLDER
from autofit.registry import changes, techniques
from autofit.search.decision import extras
from autofit.system import units
from autofit.system.errors import InputError, MachineError
from autofit.system.files import write_atomically
from autofit.system.fork_server import ForkServer
from autofit.system.parallel import on_every_core
from autofit.system.strict_json import dump_json
from autofit.system.units import MIB

Verdict = Literal["fits", "tight", "too large"]
HOST_BYTES = 1 << 50
"""Of a host that is not here: offload is not refused for it, what it takes is shown."""
_MANY_KINDS = 50
_AS_FAST = 0.03
_EVERY_PRECISION = ("fp32", "bf16", "fp16")
"""Of a card that is not known, where memory alone is told: TF32 takes what float32 takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """One plan, predicted.

    Attributes:
        need: Of its tensors, by category.
        device_bytes: The smallest card on which it runs: allocator, workspaces and context included.
        verdict: ``fits`` with the margin, ``tight`` without it, or ``too large``.
        samples_per_second: By roofline, about 30 % off; ``None`` on a card that is not in the catalogue.
        changes: What the plan changes in the training.
    """

    plan: Plan
    need: Need
    device_bytes: int
    verdict: Verdict
    samples_per_second: float | None
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The answer of ``autofit estimate``.

    Attributes:
        card: The catalogue's name of the card, or of this machine's device.
        memory_bytes: What a process can have of it.
        plans: For each family of plans its largest micro-batch that fits, or its smallest where none does; the ones
            that fit first, the fastest of them first.
        recommended: The plainest of those that fit and are as fast as the fastest, by 3 %; ``None`` where none fits. By
            roofline, with nominal rates on a card that is not in the catalogue.
        counted: Plans that were judged.
        kinds: Families of plans that can be estimated: those that differ in more than the micro-batch.
        untraced: Why some values have no estimate.
        notes: What was assumed.
    """

    model: str
    parameters: int
    card: str
    memory_bytes: int
    seq_len: int
    global_batch: int
    margin: float
    plans: tuple[Estimated, ...]
    recommended: Plan | None
    counted: int
    kinds: int
    untraced: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


ESTIMATE: TypeAdapter[Estimate] = TypeAdapter(Estimate)


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    seq_len: int | None = None,
    global_batch: int = 32,
    allow: str | Sequence[str] = "exact,numeric",
    fix: space.Knobs = (),
    among: space.Knobs = (),
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    most: int | None = 12,
    say: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Predict the memory and the speed of training plans on a GPU, without a device and without weights.

    Nothing is measured: memory comes from a trace of the training step under fake tensors (peak bytes, with a margin
    of ``margin``), speed from a roofline (samples/s, about 30 % off).

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``.
        gpu: A GPU's name, such as ``"RTX 4090"``; see :mod:`autofit.machine.gpu_catalogue`.
        memory: The memory of the GPU instead of its name: bytes, or a size such as ``"24GiB"``. Without either it is
            this machine's device.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step.
        allow: Classes of techniques that may be used: ``exact``, ``numeric``, ``method``.
        fix: A value for each knob that is held: ``{"precision": "bf16"}``, or ``["precision=bf16"]``.
        among: The values that a knob is restricted to: ``{"micro_batch": [1, 2]}``, or ``["micro_batch=1,2"]``.
        launch_path: ``trainer`` or ``loop``.
        task: ``causal-lm`` estimates next-token prediction, whatever the config names; by default a config that names
            a model for another task is refused.
        trust_remote_code: Whether the model's own code may run.
        cache: Whether traces are read from the user's cache folder, and written there.
        most: How many kinds of plan to return, the fastest first, and of those with the same memory and speed the
            simplest; ``None`` for all.
        say: Called with a line of text for each stage.

    Returns:
        The estimate. Where no plan fits, ``recommended`` is ``None`` and ``plans`` holds the smallest of each kind.

    Raises:
        InputError: An argument can't be used, or the GPU is unknown.
        ModelError: The model can't be read, or is no causal language model.
        MachineError: A helper process can't be started, or the device can't be used.
    """
    began = time.monotonic()
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
    settings = validated(
        Search,
        {
            "allowed": as_classes(allow),
            "fix": as_knobs(fix),
            "among": as_knobs(among),
        },
    )
    check_request(request, settings)
    card, given = _card(gpu, memory)
    with tempfile.TemporaryDirectory(prefix="autofit-estimate-") as scratch:
        folder = Path(scratch)
        config = fetch(str(model), folder / MODEL_FOLDER, trust_remote_code=trust_remote_code)
        code = own_code(config, trusted=trust_remote_code)
        if code is not None:
            say(code)
        here = choose_device("auto") if given is None else "cpu"
        server = ForkServer(folder / "forkserver.log", here, modeling_module(config), trains=False)
        with contextlib.closing(server):
            kept = cache_folder() if cache else None
            if given is not None:
                described = _described(folder, config, request, server, kept)
                facts = elsewhere(request, described, card, given)
            else:
                facts = read_facts(folder, request, here, server, lambda _: None)  # the notes say it
                card = gpu_catalogue.matching(facts.hardware.name, facts.hardware.total_bytes)
            knobs = space.parse_knobs(settings.fix, settings.among, facts)
            plans = space.build(facts, space.parse_allowed(settings.allowed), knobs)
            traces = Traces(facts, config, lambda: server, folder, kept)
            cast = forecast(plans, traces, facts, card, say)
        rows, kinds, recommended = _rows(plans, cast, traces, facts, most, say)
        untraced = sorted({why for plan in families_of(plans) if (why := traces.untraced(plan))})
        return Estimate(
            model=str(model),
            parameters=facts.model.parameters,
            card=card.name if card else facts.hardware.name,
            memory_bytes=facts.workload.limit_bytes,
            seq_len=facts.workload.seq_len,
            global_batch=global_batch,
            margin=MARGIN,
            plans=tuple(rows),
            recommended=recommended,
            counted=len(plans.plans),
            kinds=kinds,
            untraced=tuple(untraced),
            notes=_notes(facts, card, traces, plans),
            seconds=time.monotonic() - began,
        )


def _card(gpu: str | None, memory: str | int | None) -> tuple[Card | None, int | None]:
    """The card that was asked for, and its memory; ``None`` for this machine's own."""
    if gpu is not None and memory is not None:
        raise InputError("--gpu and --memory both say how large the card is", hint="give one of them")
    if gpu is not None:
        card = gpu_catalogue.find(gpu)
        return card, card.memory_bytes
    if memory is not None:
        units.check_unit(str(memory), "--memory")
        return None, units.parse_size(memory) if isinstance(memory, str) else int(memory)
    return None, None


def _described(folder: Path, config: Path, request: Request, server: ForkServer, cache: Path | None) -> Model:
    """The model's facts, kept on disk beside the traces."""
    adapter = TypeAdapter(Model)
    ground = [source_hash(), installed(), request.trust_remote_code, request.task, model_of(config)]
    key = hashlib.sha256(json.dumps(ground).encode()).hexdigest()[:32]
    path = cache / f"{key}.json" if cache else None
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return replace(adapter.validate_json(path.read_bytes()), name=request.model)
    model = read_facts(folder, request, "cpu", server, lambda _: None).model
    if path is not None:
        with contextlib.suppress(MachineError, OSError):  # it is only a cache
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, dump_json(adapter, model))
    return model


def elsewhere(request: Request, model: Model, card: Card | None, memory_bytes: int) -> Facts:
    """The question on a card that is not here."""
    host_total, _ = host_memory()
    host = max(host_total, HOST_BYTES)
    return Facts(
        model=model,
        hardware=Hardware(
            device="cuda",
            name=card.name if card else f"a card of {units.size(memory_bytes)}",
            total_bytes=memory_bytes,
            free_bytes=memory_bytes,
            host_total_bytes=host,
            host_free_bytes=host,
            precisions=card.precisions() if card else _EVERY_PRECISION,
            capability=card.capability if card else None,
        ),
        workload=Workload(
            seq_len=row_length(request.seq_len, model),
            global_batch=request.global_batch,
            limit_bytes=memory_bytes,
            host_limit_bytes=host,
            launch_path=request.launch_path,
            seed=request.seed,
        ),
        packages=installed(),
    )


def _rows(  # noqa: PLR0917 - of the story above
    plans: space.Space,
    cast: Forecast,
    traces: Traces,
    facts: Facts,
    most: int | None,
    say: Callable[[str], None],
) -> tuple[list[Estimated], int, Plan | None]:
    """For each family the plan with the largest micro-batch that fits, or the smallest plan.

    The first look is at the tensors alone; for ``most`` of the families the allocator is then replayed.

    Returns:
        Them, of how many families, and which is recommended.
    """
    limit = facts.workload.limit_bytes
    need = cast.predicted_bytes * (1 + MARGIN)
    # on a card that is not known the order of speed is all that can be had
    pace_of = cast.seconds if cast.known_card else cast.work @ cast.nominal
    candidates = []
    for members in families_of(plans).values():
        traced = sorted(
            (place for place in members if not np.isnan(need[place])),
            key=lambda place: -int(plans.plans[place]["micro_batch"]),
        )
        fitting = [place for place in traced if need[place] <= limit]
        if traced:
            candidates.append((not fitting, fitting or [min(traced, key=lambda place: float(need[place]))]))

    def rank(candidate: tuple[bool, list[int]]) -> tuple[float, ...]:
        beyond, places = candidate
        first = places[0]
        pace = float(need[first]) if beyond else float(pace_of[first])
        return (
            beyond,
            np.inf if np.isnan(pace) else pace,
            -int(plans.plans[first]["micro_batch"]),
            float(need[first]),
        )

    ranked = [places for _, places in sorted(candidates, key=rank)]
    chosen = ranked if most is None else _apart(ranked, plans, need, pace_of)[:most]
    if len(chosen) > _MANY_KINDS:
        say(f"replaying {len(chosen)} kinds of plan through the allocator")

    def judge(places: list[int]) -> tuple[Estimated, float]:
        for place in places:  # from the largest micro-batch down, until it fits
            one = _estimated(place, plans, cast, traces, facts)
            if one.verdict == "fits":
                break
        return one, float(pace_of[place])

    found = on_every_core(judge, chosen)
    order = {"fits": 0, "tight": 1, "too large": 2}
    # a smaller micro-batch than the first look hoped for may be a slower one
    found.sort(key=lambda one: (order[one[0].verdict], one[1] if one[0].verdict == "fits" else 0.0))
    fast = [(one.plan, pace) for one, pace in found if one.verdict == "fits"]
    alike = [plan for plan, pace in fast if not pace > fast[0][1] * (1 + _AS_FAST)]
    return [one for one, _ in found], len(candidates), min(alike, key=extras, default=None)


def _apart(ranked: list[list[int]], plans: space.Space, need: Floats, pace_of: Floats) -> list[list[int]]:
    """Of the kinds that need and give the same, by three digits, the plainest, in the place of the first."""
    alike: dict[tuple[str, str], list[int]] = {}
    for places in ranked:
        key = f"{need[places[0]]:.3g}", f"{pace_of[places[0]]:.3g}"
        if key not in alike or extras(plans.plans[places[0]]) < extras(plans.plans[alike[key][0]]):
            alike[key] = places  # a key keeps its place
    return list(alike.values())


def _estimated(place: int, plans: space.Space, cast: Forecast, traces: Traces, facts: Facts) -> Estimated:
    plan, seconds = plans.plans[place], float(cast.seconds[place])
    found = traces.need(plan)
    parts = traces.parts(plan)
    assert found is not None
    assert parts is not None
    # on a CPU it is what processes were seen to hold for such tensors
    on_cpu = facts.hardware.device == "cpu"
    device = round(float(cast.device_bytes[place])) if on_cpu else _smallest_card(found, parts, plan, facts)
    limit = facts.workload.limit_bytes
    verdict: Verdict = "fits" if device * (1 + MARGIN) <= limit else "tight" if device <= limit else "too large"
    return Estimated(
        plan=plan,
        need=found,
        device_bytes=device,
        verdict=verdict,
        samples_per_second=None if np.isnan(seconds) else 1 / seconds,
        changes=tuple(changes(plan, facts)),
    )


def _smallest_card(found: Need, parts: tuple[peak.MicroPart, peak.OptimizerPart], plan: Plan, facts: Facts) -> int:
    """On which a plan runs: its allocations replayed through the allocator, and what lies outside."""
    rows, accumulation = int(plan["micro_batch"]), int(plan["accumulation"])
    events, sizes = peak.requests(*parts, rows=rows, accumulation=accumulation)
    rounded = [round(size) for size in sizes]
    resolution = max(2 * MIB, found.peak_bytes // 400)
    if sum(rounded) > allocator.MOST_BYTES:  # no card of this world
        capacity = found.peak_bytes
    else:
        capacity = allocator.smallest_capacity(events, rounded, resolution_bytes=resolution)
    return capacity + workspace_bytes(facts.hardware.capability) + CONTEXT_BYTES


def _notes(facts: Facts, card: Card | None, traces: Traces, plans: space.Space) -> tuple[str, ...]:
    """What was assumed."""
    said = remarks(facts.workload.seq_len, facts.model)
    if facts.hardware.device == "cuda":
        workspace = units.size(workspace_bytes(facts.hardware.capability))
        said.append(f"{units.size(CONTEXT_BYTES)} for the CUDA context and {workspace} for cuBLAS are included")
    if facts.hardware.device == "cuda" and card is None:
        said.append("the order is that of a nominal card's speed: --gpu NAME tells samples/s")
    if card is not None:
        said.append("samples/s are a roofline's: about 30 % off, good for the order")
        if card.usable_bytes is None:
            said.append(f"the memory of {card.name} is the nominal one; its driver keeps some of it")
    micro = {note for plan in families_of(plans) if (parts := traces.parts(plan)) for note in parts[0].notes}
    return (*said, *sorted(micro))


def cause(one: Estimated) -> str:
    """What makes the peak, in words, and what would help where that is known."""
    need = one.need
    logits = need.by_category.get("logits", 0)
    where = {"load": "while loading", "forward": "in the forward pass", "backward": "in the backward pass"}
    words = f"{where.get(need.phase, 'in the optimizer step')}, at {need.operator}"
    if need.segment in {"head", "loss", "headB"} and logits > 0.05 * need.peak_bytes:
        said = f"{words}: logits and loss take {units.size(logits)}"
        saves = [(one.name, *one.saves["logits"]) for one in techniques() if "logits" in one.saves]
        return (
            f"{said}, most of which "
            + " or ".join(f"{what} ({name}={value}) would save" for name, value, what in saves)
            if saves
            else said
        )
    largest = max(need.by_category, key=lambda name: need.by_category[name])
    return f"{words}; the largest part is {largest} ({units.size(need.by_category[largest])})"
