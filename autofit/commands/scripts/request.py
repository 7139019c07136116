"""A user's own script as the question: what it would train, asked of the script itself."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from autofit import space
from autofit.commands.facts import DEFAULT_CEILING, ceiling, device_facts, lacking_kernels, unused_cards
from autofit.commands.request import Request
from autofit.commands.scripts.named import named
from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.contract.script import Script
from autofit.machine.packages import installed, unsupported
from autofit.output.document import MODEL_FOLDER
from autofit.output.text import parameters, plural
from autofit.system.errors import InputError, MachineError
from autofit.system.files import write_atomically, writing
from autofit.system.forking.server import FAILED_JOB_LOG, ForkServer
from autofit.system.units import duration, size
from autofit.training.jobs import DescribeScriptJob
from autofit.training.scripts.leave import name_of
from autofit.training.scripts.loading import SPLIT_BATCHES

_ENOUGH_ROWS = 500
SCRIPT_TASK: Literal["script"] = "script"
"""What a script trains a model for: whatever it is, it is the script's."""

CONFIG = "config.json"
_OF_A_RUN = {
    "path", "arguments", "seconds", "loading", "batch", "sampled", "longest", "longest_places", "mean_length",
    "tokens_a_row", "lengths", "places", "steps", "epochs_rows", "epochs", "wrote", "weighs",
    "depends_on_rows",
}  # fmt: skip
"""What is told of a script that may be otherwise each time it is run: how long it took, and rows that it draws, with
what they tell of its loss."""
_OTHER_MEAN = 0.1
"""From which share on the mean length of a script's rows is told to be another; rows may be drawn at random."""
LONGEST_SECONDS = 3600.0
"""How long a script may prepare its data before it trains."""


def script_facts(
    folder: Path,
    request: Request,
    device: Literal["cuda", "cpu"],
    server: ForkServer,
    say: Callable[[str], None],
    *,
    tried: bool = True,
) -> Facts:
    """Run the script up to its training in a process of its own, and read the device.

    Where no plan is ``tried``, nothing is said of how long a trial will take, and a model takes no memory.

    Raises:
        InputError: The script ends before it trains, or does what can't be tuned.
        MachineError: The device is there and can't be used.
    """
    run, processes = named(request.model, request.arguments), (request.processes or 1) // (request.nodes or 1)
    say(f"running {run.name} up to its training")
    hardware = device_facts(folder, device, processes, server)
    for words in unused_cards(request, hardware) if tried else ():
        say(words)
    script, model, config = _described(folder, request, server, draws=tried)
    with writing(folder / MODEL_FOLDER):
        (folder / MODEL_FOLDER).mkdir(exist_ok=True)
    write_atomically(folder / MODEL_FOLDER / CONFIG, json.dumps(config, indent=1))
    return Facts(
        model=model, hardware=hardware, workload=_workload(request, script, hardware, say), packages=installed()
    )


def check_same_training(
    folder: Path, request: Request, facts: Facts, server: ForkServer, say: Callable[[str], None]
) -> list[str]:
    """Refuse to go on with a script whose text is the same, and which trains something else: its config was changed.

    Its rows may be chosen at random, so that others are only told of.

    Returns:
        What a reader of the answer should know of its rows, a sentence each.

    Raises:
        InputError: It is another model, or it is trained otherwise.
    """
    then = facts.workload.script
    if then is None:
        return []
    name = named(request.model, request.arguments).name
    say(f"running {name} up to its training")
    now, model, config = _described(folder, request, server)
    path = folder / MODEL_FOLDER / CONFIG
    try:
        kept = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} can't be read: {error}", hint="choose another --output") from error
    pairs = {
        **{key: (_text(kept.get(key)), _text(config.get(key))) for key in {*kept, *config} - {"_name_or_path"}},
        **{key: (getattr(facts.model, key), getattr(model, key)) for key in ("architecture", "parameters")},
        **{
            one.name: (getattr(then, one.name), getattr(now, one.name))
            for one in dataclasses.fields(Script)
            if one.name not in _OF_A_RUN
        },
    }
    changed = sorted(key for key, (before, after) in pairs.items() if before != after)
    if changed:
        raise InputError(
            f"what {name} trains has changed since {folder} was begun: {', '.join(changed[:5])}",
            hint="measurements would not compare: choose another --output",
        )
    return _other_rows(then, now)


def _other_rows(then: Script, now: Script) -> list[str]:
    """That the rows of a script are longer or shorter than when its tune was begun."""
    if then.batch != now.batch:
        what = "longest rows are others than"
    elif not math.isclose(then.mean_length, now.mean_length, rel_tol=_OTHER_MEAN):
        what = f"rows are {'longer' if now.mean_length > then.mean_length else 'shorter'} in the mean than"
    else:
        return []
    return [f"the script's {what} when the tune was begun, and trials of both are compared: are its data the same?"]


def _text(value: object) -> str:
    """A value of a config, so that it can be compared: NaN is not even equal to itself."""
    return json.dumps(value, sort_keys=True)


def _described(
    folder: Path, request: Request, server: ForkServer, *, draws: bool = True
) -> tuple[Script, Model, dict[str, Any]]:
    """What the script would train, the model itself, and its config, told by the script itself.

    Raises:
        InputError: The script ends before it trains, or does what can't be tuned.
    """
    run = named(request.model, request.arguments)
    job = DescribeScriptJob(path=str(run.path), arguments=run.arguments, call=request.call, draws=draws)
    try:
        with server.ask(folder, job, kill_after_seconds=LONGEST_SECONDS) as answer:
            found = _checked(answer, run.name)
    except MachineError as error:
        raise InputError(
            f"{run.name} ended its process before it trained: {error.message}",
            hint=f"does it run with these arguments by itself? Its log is {folder / FAILED_JOB_LOG}",
        ) from error
    script = TypeAdapter(Script).validate_python(
        {
            **found["script"],
            "path": str(run.path),
            "arguments": run.arguments,
            "sha256": run.sha256,
            "factory": run.name if run.factory else None,
            "call": request.call,
        }
    )
    told = {"name": request.model, "task": SCRIPT_TASK, "sample_tokens": int(script.tokens is not None)}
    return script, TypeAdapter(Model).validate_python({**found["model"], **told}), found["config"]


def _checked(answer: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    if answer is None:
        raise InputError(
            f"{name} did not begin to train in {duration(LONGEST_SECONDS)}",
            hint="prepare its data once and let the script read what was prepared, or give it fewer rows",
        )
    if "error" in answer:
        raise InputError(answer["error"], hint=answer["hint"])
    return answer


def _workload(request: Request, script: Script, hardware: Hardware, say: Callable[[str], None]) -> Workload:
    """The sizes and ceilings of the script's training."""
    processes = request.processes or 1
    if processes > 1 and script.own.get(SPLIT_BATCHES):
        raise InputError(
            "--processes: the script asks for split_batches, so processes share each of its batches",
            hint="leave split_batches out: its batch is what each process takes then",
        )
    own = script.micro_batch * script.accumulation * processes
    if request.global_batch not in {None, own} and script.own_split is not None:
        raise InputError(
            f"--global-batch {request.global_batch}: the script's {own} rows can't be changed: {script.own_split}",
            hint="leave it out, or train in `with accelerator.accumulate(model):`",
        )
    held = script.micro_batch * processes
    if request.global_batch is not None and script.depends_on_rows and request.global_batch % held:
        raise InputError(
            f"--global-batch {request.global_batch} can't be made of the script's micro-batches of "
            f"{script.micro_batch} rows{f' on {processes} processes' * (processes > 1)}, which it is held at: "
            f"{script.depends_on_rows}",
            hint=f"give a multiple of {held}",
        )
    rows = request.global_batch or own
    counts = not script.generated and (script.loading is None or script.loading.fixed is None)
    if counts and script.rows is not None and script.rows < rows:
        raise InputError(
            f"the script's data set has {plural(script.rows, 'row')}, and an optimizer step is to take {rows}",
            hint="give the script more rows, or smaller batches",
        )
    return Workload(
        seq_len=max(2, script.tokens or 2),
        global_batch=rows,
        processes=processes,
        nodes=request.nodes or 1,
        limit_bytes=_beside_engine(ceiling(request, hardware, say), request, script, hardware, say),
        host_limit_bytes=int(hardware.host_free_bytes * DEFAULT_CEILING) // (processes // (request.nodes or 1)),
        launch_path="loop" if not script.trainer else "trainer",
        seed=request.seed,
        script=script,
    )


def _beside_engine(limit: int, request: Request, script: Script, hardware: Hardware, say: Callable[[str], None]) -> int:
    """The ceiling of the training where another program generates on the same device; one that is asked for stays.

    Raises:
        InputError: It takes all there is.
    """
    taken = script.engine_bytes(hardware.total_bytes)
    if not taken:
        return limit
    if request.memory_limit is not None:
        if limit + taken > hardware.total_bytes:
            say(
                f"the ceiling of {size(limit)} and the {size(taken)} of {script.engine} are more than there is: they "
                "fit where it gives its memory back while the script trains (vllm_enable_sleep_mode)"
            )
        return limit
    if taken >= limit:
        raise InputError(
            f"the script generates by {script.engine}, {size(taken)}, which leaves nothing of {size(limit)}",
            hint="lower its vllm_gpu_memory_utilization, or give the ceiling of the training (--memory-limit)",
        )
    say(f"the ceiling of the training is {size(limit - taken)}: {script.engine} takes {size(taken)}")
    return limit - taken


def script_notes(facts: Facts, *, tried: bool = True) -> list[str]:
    """What a reader should know of the script, a sentence each; nothing where no script is tuned.

    Args:
        facts: Of the question.
        tried: Whether plans are tried; else they are estimated.
    """
    script = facts.workload.script
    if script is None:
        return []
    processes, asked = facts.workload.processes, facts.workload.global_batch
    own = script.micro_batch * script.accumulation * processes
    several = f" x {processes} processes" * (processes > 1)
    batch = f"the script's own batch is {script.micro_batch} x {script.accumulation}{several} = {own} rows"
    said = unsupported(facts.packages)
    said.append(
        f"{batch}; the plans take {asked}, as asked for" if asked != own else f"{batch}, and so is every plan's"
    )
    if tried:
        each = "" if script.trainer and facts.workload.processes == 1 else ", in each trial"  # else trials tell it
        said.append(f"the script takes {duration(script.seconds)} until it trains{each}")
    said += [
        f"{name}={held.value}: {held.reason}" if not held.by_script else f"{name} is left alone: {held.reason}"
        for name, held in space.held_by_script(facts)
    ]
    if tried and script.call == 1 and _trains_often(script):
        said.append(
            "its text has several trainings, or one in a loop: the first that is made is tuned (--call N tunes "
            "another), and `autofit run` puts the plan into each whose arguments are alike"
        )
    if script.beside:
        others = " and ".join(f"a {name} ({parameters(size)})" for name, size in script.beside)
        said.append(
            f"it prepares {others} beside the {facts.model.architecture}, which is tuned: what a plan does to a model, "
            "such as to recompute its layers, is done to that one alone"
        )
    if script.rows is None:
        said.append("the data set tells no number of rows: fit is judged on the rows that come first")
    elif script.mean_share < 1:
        seen = f"{script.sampled:,} of its {script.rows:,} rows"
        unit = "samples/s" if script.tokens_a_row is None else "tokens/s without padding"
        counts = f"what counts is {unit} on the rows to be expected" if tried else "samples/s are theirs"
        said.append(
            f"rows differ: the mean is {script.mean_share:.0%} of the longest of {seen}; fit is "
            f"judged on the longest, and {counts}"
        )
    if script.evaluated_rows and not tried:
        rows = plural(script.evaluated_rows, "row")
        said.append(f"it evaluates {rows} at once: that is not measured, nor held against the ceiling")
    said += _apart(script, tried=tried)
    if 0 < script.sampled < min(script.rows or 0, _ENOUGH_ROWS):
        said.append(
            f"the data set is slow: {script.sampled:,} of its {script.rows:,} rows were looked at, and longer ones may "
            "be among the others"
        )
    return said + _wrote(script) + lacking_kernels(facts.model, facts.hardware.device)


def _apart(script: Script, *, tried: bool) -> list[str]:
    """What a reader should know of what a script's trials leave out of its training."""
    if script.generated:
        return [_generating(script, tried=tried)]
    if script.trainer or not tried:
        return []
    return ["a plain loop is not run by the guard: no plan's gradients were compared with a float32 baseline's"]


def _generating(script: Script, *, tried: bool) -> str:
    """What a reader should know of the figures of a script that generates."""
    by = f" by {script.engine}" * bool(script.engine)
    begin = f"its {script.trainer} generates{by}, at most {script.generated} tokens for a prompt: samples/s are those"
    if not tried:
        left = "; the card's memory is told without vLLM's share" * bool(script.engine_share)
        more = left if script.engine else ", its memory is but where the model is split over several cards"
        return f"{begin} of training on as many. The seconds of generating are not estimated{more}"
    generates = (
        "No trial starts vLLM: neither its seconds nor sending it the weights is measured"
        if script.engine
        else "Each trial generates once, before it is timed: the memory of that counts, and its seconds are told"
    )
    return (
        f"{begin} of training on as many, random ones, with the script's own rewards. {generates}. What the script "
        "evaluates is not measured"
    )


def _wrote(script: Script) -> list[str]:
    """What a reader should know of files that the script has written with random weights."""
    if not script.wrote:
        return []
    names, more = ", ".join(script.wrote[:3]), len(script.wrote) - 3
    them = f"{names} and {more} more" if more > 0 else names
    it = "it" if len(script.wrote) == 1 else "them"
    name = name_of(script.path, script.arguments)
    wrote = f"{name} wrote {them} while its models had random weights"
    return [f"{wrote}: delete {it} before you train, if {name} would read {it} again"]


def own_training(facts: Facts, samples_per_second: float | None) -> list[str]:
    """How long its own training takes at a predicted speed of its longest rows; empty where that is not known."""
    script, rows = facts.workload.script, facts.workload.own_rows
    if script is None or not rows or samples_per_second is None:
        return []
    most, share = rows / samples_per_second, script.mean_share
    took = f"~{duration(most)}" if share == 1 else f"~{duration(most * share)} to {duration(most)}"
    differ = "" if share == 1 else ": the less, the less of it is padding"
    own = f"its own training, {plural(round(rows), 'row')}"
    return [f"{own}, takes {took} with the recommended plan, besides {facts.workload.besides}{differ}"]


def _trains_often(script: Script) -> bool:
    """Whether a script's text trains by a Trainer, or by a function that does, several times or in a loop."""
    if script.factory is not None:
        return False
    try:
        tree = ast.parse(Path(script.path).read_bytes())
    except (OSError, ValueError, SyntaxError):  # it is gone since, when a tune is resumed
        return False

    def is_made(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer")

    nodes = list(ast.walk(tree))
    targets = [target for one in nodes if isinstance(one, ast.Assign) and is_made(one.value) for target in one.targets]
    made = {ast.unparse(target) for target in targets}

    def trains(node: ast.AST) -> bool:
        of = node.func if isinstance(node, ast.Call) else None
        return (
            isinstance(of, ast.Attribute)
            and of.attr == "train"
            and (is_made(of.value) or ast.unparse(of.value) in made)
        )

    functions = [one for one in nodes if isinstance(one, ast.FunctionDef)]
    training = {one.name for one in functions if any(map(trains, ast.walk(one)))}

    def called(node: ast.AST) -> str | None:
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        return name if name in training else None

    names = {one.id for one in nodes if isinstance(one, ast.Name)}
    idle = {inner for one in functions if one.name not in names for inner in ast.walk(one)}  # as a launcher's _mp_fn
    calls = Counter(filter(None, map(called, (one for one in nodes if one not in idle))))
    loops = [one for one in nodes if isinstance(one, ast.For | ast.While)]
    in_loops = [inner for loop in loops for inner in ast.walk(loop)]
    return (
        sum(map(trains, nodes)) > 1
        or max(calls.values(), default=0) > 1
        or any(trains(one) or called(one) for one in in_loops)
    )
