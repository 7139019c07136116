"""``autofit estimate``: what plans need on a card that need not be here, and where it goes.

The story: card -> facts -> space -> traces -> the largest micro-batch of each family of plans that fits, in order of
predicted speed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autofit import space
from autofit.commands.estimates.answer import Estimate
from autofit.commands.estimates.files import check_card, estimate_folder, write_estimate
from autofit.commands.estimates.other_card import (
    asked_card,
    counted_cards,
    described_model,
    elsewhere,
    on_other_card,
)
from autofit.commands.estimates.plans import MOST_KINDS, estimated_plans, why_recommended
from autofit.commands.estimates.question import asked_question, check_script_question, fetched_config
from autofit.commands.estimates.ways import fixed_bytes, not_outdone, outside_bytes, spaces_by_way
from autofit.commands.estimates.ways import ways as every_way
from autofit.commands.estimates.world import World, asked_world, range_words
from autofit.commands.facts import read_facts, remarks
from autofit.commands.model_source import modeling_module
from autofit.commands.request import Request, Search
from autofit.commands.scripts.request import SCRIPT_TASK, own_training, script_facts, script_notes
from autofit.contract.facts import Facts, LaunchPath, Task
from autofit.contract.plan import Value
from autofit.costmodel.families import families_of, steps_on_host
from autofit.costmodel.forecast import MARGIN, context_bytes, forecast, foresee, workspace_bytes
from autofit.costmodel.seconds.collectives import links_of
from autofit.costmodel.seconds.step_time import StepClock
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine import gpu_catalogue
from autofit.machine.gpu_catalogue import Card
from autofit.machine.select import choose_device
from autofit.output.document import MODEL_FOLDER
from autofit.registry import techniques
from autofit.system import units
from autofit.system.errors import ModelError, NothingFits
from autofit.system.forking.server import ForkServer
from autofit.system.locks import scratch_folder


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    allow: str | Sequence[str] = "exact,numeric",
    fix: space.Knobs = (),
    among: space.Knobs = (),
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    most: int | None = MOST_KINDS,
    ways: bool = False,
    output: str | Path | None = None,
    arguments: Sequence[str] = (),
    call: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Predict the memory and the speed of training plans on a GPU, without a device and without weights.

    Nothing is measured: memory comes from a trace of the training step under fake tensors (peak bytes, with a margin
    of ``margin``), speed from a model of each operator's time on the card (samples/s).

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``; or the path of a training script, which is
            run up to its training.
        gpu: A GPU's name, such as ``"RTX 4090"``, or several of one kind, ``"2x RTX 4090"``; see
            :mod:`autofit.machine.gpu_catalogue`.
        memory: The memory of the GPU instead of its name: bytes, or a size such as ``"24GiB"``. Without either it is
            this machine's device.
        gpus: Cards of that kind that train together in one machine; by default one.
        nodes: Machines that have as many cards each; by default one.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step; by default 32, or what the script takes.
        allow: Classes of techniques that may be used: ``exact``, ``numeric``, ``method``.
        fix: A value for each knob that is held: ``{"precision": "bf16"}``, or ``["precision=bf16"]``.
        among: The values that a knob is restricted to: ``{"micro_batch": [1, 2]}``, or ``["micro_batch=1,2"]``.
        launch_path: ``trainer`` or ``loop``.
        task: What the model is to be trained for; by default what its config names.
        trust_remote_code: Whether the model's own code may run.
        cache: Whether traces are read from the user's cache folder, and written there.
        most: How many kinds of plan to return, the fastest first, and of those with the same memory and speed the
            simplest; ``None`` for all.
        ways: Whether to estimate each way of training too (full, LoRA, QLoRA), whatever ``allow`` says of its class; a
            script has its own. Plans that another one is known to outdo are left out then.
        output: Folder for the files of the recommended plan, as ``tune`` writes them, marked as estimated; none by
            default. The card needs a name, since its speed is predicted. Not for a script.
        arguments: What stands behind the script on its command line.
        call: Which of the script's calls of ``train()`` is estimated.
        say: Called with a line of text for each stage.

    Returns:
        The estimate. Where no plan fits, ``recommended`` is ``None`` and ``plans`` holds the smallest of each kind.

    Raises:
        InputError: An argument can't be used, or the GPU is unknown.
        ModelError: The model can't be read, or is none for the task.
        MachineError: A helper process can't be started, or the device can't be used.
    """
    began = time.monotonic()
    request, settings = asked_question(
        model,
        seq_len=seq_len,
        global_batch=global_batch,
        allow=allow,
        fix=fix,
        among=among,
        launch_path=launch_path,
        task=task,
        trust_remote_code=trust_remote_code,
        arguments=arguments,
        call=call,
    )
    gpu, gpus = counted_cards(gpu, gpus)
    card, given = asked_card(gpu, memory)
    if request.is_script:
        check_script_question(output)
    world = asked_world(gpus, nodes, elsewhere=given is not None)
    if given is not None:
        check_card(card, output)
    with contextlib.ExitStack() as stack:
        target = None if output is None else stack.enter_context(estimate_folder(output))
        folder = stack.enter_context(scratch_folder("estimate"))
        config = folder / MODEL_FOLDER if request.is_script else fetched_config(request, folder, say)
        here = choose_device("auto") if given is None else "cpu"
        modules = () if request.is_script else modeling_module(config)
        server = ForkServer(folder / "forkserver.log", here, modules, trains=request.is_script)
        with contextlib.closing(server):
            kept = cache_folder() if cache else None
            if request.is_script:
                facts = script_facts(folder, world.asking(request), here, server, say, tried=False)
                facts = facts if given is None else world.of(on_other_card(facts, card, given))
                card = card or gpu_catalogue.matching(facts.hardware.name, facts.hardware.total_bytes)
            elif given is not None:
                described = described_model(folder, config, request, server, kept)
                facts = world.of(elsewhere(request, described, card, given))
            else:
                facts = read_facts(folder, request, here, server, lambda _: None)  # the notes say it
                card = gpu_catalogue.matching(facts.hardware.name, facts.hardware.total_bytes)
                check_card(card, output)
            knobs = space.parse_knobs(settings.fix, settings.among, facts)
            allowed = space.parse_allowed(settings.allowed)
            traces = Traces(facts, config, lambda: server, folder, kept)
            spaces = spaces_by_way(facts, knobs, allowed) if ways and not request.is_script else {}
            plans = (not_outdone if spaces else space.build)(facts, allowed, knobs)
            every = [plans, *(one for one in spaces.values() if not isinstance(one, str))]
            traced = server.rest if target is None else lambda: None  # else it loads the files back
            known = foresee(every, traces, facts, card, say, traced=traced)
            cast = forecast(plans, traces, facts, card, say, known=known)
            by_way = every_way(facts, spaces, traces, card, known)
            rows, kinds, recommended = estimated_plans(plans, cast, traces, facts, most, say)
            shown = [*rows, *(one for way in by_way for one in (way.fastest, way.smallest) if one is not None)]
            host = any(steps_on_host(one.plan, facts) for one in shown)
            best = next((one for one in rows if one.plan == recommended), None)
            notes = _notes(
                facts, card, traces, plans, world, host=host, pace=best.samples_per_second if best and card else None,
                slow_host=max(one.slow_host if one else 1.0 for one in (best, *(way.fastest for way in by_way))),
            )  # fmt: skip
            if target is not None and best is not None and card is not None:
                reason = f"Nothing was measured. It is {why_recommended(recommended == rows[0].plan)}."
                took = time.monotonic() - began
                write_estimate(best, facts, card, config, target, server, why=reason, notes=notes, seconds=took)
        untraced = sorted({why for plan in families_of(plans) if (why := traces.untraced(plan))})
        return Estimate(
            model=str(model),
            parameters=facts.model.parameters,
            card=card.name if card else facts.hardware.name,
            memory_bytes=facts.workload.limit_bytes,
            seq_len=facts.workload.seq_len,
            task=facts.model.task,
            rows=facts.model.rows_of(facts.workload.seq_len),
            global_batch=facts.workload.global_batch,
            margin=MARGIN,
            plans=tuple(rows),
            recommended=recommended,
            counted=len(plans.plans),
            kinds=kinds,
            untraced=tuple(untraced),
            processes=world.processes,
            nodes=world.nodes,
            notes=notes,
            remarks=() if request.is_script else tuple(_remarks(facts)),
            seconds=time.monotonic() - began,
            ways=by_way,
            telling=tuple(one.name for one in techniques() if one.ways or len(knobs.get(one.name, ())) == 1),
            asked=_asked(request, settings, knobs),
            folder=str(target) if target is not None and best is not None else None,
        )


def _remarks(facts: Facts) -> list[str]:
    return remarks(facts.workload.seq_len, facts.model, facts.hardware.device)


def _asked(request: Request, settings: Search, knobs: Mapping[str, tuple[Value, ...]]) -> tuple[str, ...]:
    """Options of a question that are not as they are by default, as words, but for ``knobs`` of one value."""
    words = [] if settings.allowed == Search().allowed else ["--allow", settings.allowed]
    words += ["--task", request.task] if request.task else []
    words += ["--launch-path", request.launch_path] if request.launch_path != "trainer" else []
    for one in techniques():
        values = () if one.ways else knobs.get(one.name, ())
        words += ["--among", f"{one.name}={','.join(map(str, values))}"] if len(values) > 1 else []
    words += ["--trust-remote-code"] if request.trust_remote_code else []
    return tuple(words)


def _notes(
    facts: Facts,
    card: Card | None,
    traces: Traces,
    plans: space.Space,
    world: World,
    *,
    host: bool,
    slow_host: float,
    pace: float | None,
) -> tuple[str, ...]:
    """What was assumed.

    Args:
        facts: What the plans are for.
        card: The device, where the catalogue has it.
        traces: Theirs.
        plans: All of them.
        world: The cards that train together.
        host: Whether plans are shown that step there.
        slow_host: How many times as long the fastest of each way take beside a slow host.
        pace: Samples/s of the recommended plan, where it is known.
    """
    said = own_training(facts, pace) + script_notes(facts, tried=False) or _remarks(facts)
    if facts.hardware.device == "cuda":
        context, workspace = (units.size(one(facts.hardware.capability)) for one in (context_bytes, workspace_bytes))
        said.append(f"{context} for the CUDA context and {workspace} for cuBLAS are included")
    if world.processes > 1:
        links = links_of(card, processes=world.processes, nodes=world.nodes)
        over = f" and {links.across / 1e9:.4g} GB/s between machines" if world.nodes > 1 else ""
        said += [
            world.words(),
            (
                "NCCL's buffers and the time of collectives are included, at a link of "
                f"{links.inside / 1e9:.4g} GB/s a card{over}, which such machines usually have"
            ),
        ]
    if facts.hardware.device == "cuda" and card is None:
        said.append("the order is that of a nominal card's speed: --gpu NAME tells samples/s")
    if card is not None:
        worth = range_words(StepClock(card).spread, processes=world.processes, on_host=host, slow_host=slow_host)
        said.append(f"samples/s are {worth}")
        if card.usable_bytes is None:
            said.append(f"the memory of {card.name} is the nominal one; its driver keeps some of it")
    micro = {note for plan in families_of(plans) if (parts := traces.parts(plan)) for note in parts[0].notes}
    return (*said, *sorted(micro))


def check_fits(found: Estimate) -> None:
    """Hold an estimate to have found a plan that fits.

    Raises:
        ModelError: Nothing could be traced.
        NothingFits: No plan fits the card; the hint says what would help, as far as that is known.
    """
    seen = [*found.plans, *(one for way in found.ways for one in (way.fastest, way.smallest) if one is not None)]
    if not seen:
        why = "; ".join(found.untraced) or "no plan could be traced"
        raise ModelError(f"nothing can be estimated: {why}", hint="`autofit tune` measures what can't be traced")
    if any(one.verdict != "too large" for one in seen):
        return
    smallest = min(seen, key=lambda one: one.device_bytes)
    helps = [f"a card with {units.size(smallest.device_bytes * (1 + found.margin))}"]
    if fixed_bytes(smallest) + outside_bytes(smallest) <= found.memory_bytes:
        helps.insert(0, "shorter rows" if found.task == SCRIPT_TASK else "a shorter --seq-len")
    if not any("method" in word for word in found.asked):
        helps.append("--allow exact,numeric,method")
    raise NothingFits("no plan fits", hint=", ".join(helps[:-1]) + ", or " * (len(helps) > 1) + helps[-1])
