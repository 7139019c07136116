"""What happens where a script begins to train: it is described, measured for some steps, or trains with the plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.contract.outcome import Evidence
from autofit.contract.recipe import Recipe
from autofit.system.errors import InputError
from autofit.training.expected_rows import Tokens
from autofit.training.loops import counted
from autofit.training.observer import Observer
from autofit.training.rollouts import as_trained, generate_between, take_prompts
from autofit.training.row_order import wanted
from autofit.training.scripts.described import BATCH, asks_otherwise, described, handed_on
from autofit.training.scripts.leave import AS_TUNED, Enough, Refused, name_of, run_to_its_end, run_until_left
from autofit.training.scripts.loading import waits_of, workers_bytes
from autofit.training.scripts.patches import Made, Patches, loads_of
from autofit.training.scripts.plain_loop.autocast import note_autocast
from autofit.training.scripts.plain_loop.described import describe_loops
from autofit.training.scripts.plain_loop.entry import measure_loop, train_loop_with
from autofit.training.scripts.rows import take_in_order
from autofit.training.scripts.traits import changes_since, inner_of, modules_since
from autofit.training.scripts.watched import evaluate_longest, watch, wrap

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.script import Script
    from autofit.training.timing import Clock

_QUIET = {
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "auto_find_batch_size": False,
    "skip_memory_metrics": True,
    "resume_from_checkpoint": None,
}


def keep_quiet() -> None:
    """Tell libraries that report to services that nothing is to be reported."""
    os.environ.update(
        {
            "WANDB_MODE": "disabled",
            "WANDB_DISABLED": "true",
            "COMET_MODE": "DISABLED",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def construct(folder: Path) -> dict[str, Any]:
    """Fields that keep a script's side effects out: it writes into the folder, and tells nobody."""
    return {
        "output_dir": str(folder / "output"),
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
    }


def on_the_cpu(folder: Path) -> dict[str, Any]:
    """The same for a script that is not to touch a device."""
    return {**construct(folder), "use_cpu": True, "tf32": None}


def quiet() -> dict[str, Any]:
    """Attributes that leave out what is beside the training steps, in the types that ``TrainingArguments`` keep."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    kinds = {"save_strategy": SaveStrategy, "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy}
    return {name: kinds[name](value) if name in kinds else value for name, value in _QUIET.items()}


def describe(path: str, arguments: tuple[str, ...], *, call: int, folder: Path, draws: bool = True) -> dict[str, Any]:
    """Run a script up to its training, on the CPU and with random weights, and tell what it would train.

    Returns:
        ``script``: the fields of :class:`autofit.contract.script.Script` but path, arguments, text and call;
        ``model``: the model itself; ``config``: its config as JSON values.

    Raises:
        InputError: It ends before it trains.
        Refused: It does something that can't be tuned.
    """
    began = time.monotonic()

    def entry(trainer: Any, _train: Callable[[], Any]) -> Any:
        raise Enough(described(patches, trainer, time.monotonic() - began, autocasts))

    patches = Patches(
        train=entry,
        call=call,
        construct=on_the_cpu(folder),
        tuned={"bf16": False, "fp16": False, "torch_compile": False},
        quiet=quiet(),
        draws=draws,
    )
    patches.install()
    autocasts = note_autocast()
    failed = describe_loops(path, patches, lambda: time.monotonic() - began, autocasts)
    try:
        run_until_left(path, arguments, new_files_stay=True)
    except Enough as enough:
        found: dict[str, Any] = enough.found
        return found
    except InputError as error:
        if (trains := failed()) is not None:
            return trains
        if 0 < patches.calls < call:
            times = f"{patches.calls} time{'s' * (patches.calls > 1)}"
            told = f"{name_of(path, arguments)} calls train() {times}"
            raise InputError(told, hint=f"no --call {call} is there") from error
        raise
    raise AssertionError("a script was left without a reason")


def measure_steps(clock: Clock, script: Script, *, folder: Path, environment: Mapping[str, str]) -> Evidence:
    """Run a script with the clock's recipe up to its training, and train until the clock says enough.

    Args:
        clock: Listens.
        script: What is run.
        folder: Where the script may write.
        environment: Variables that the launch has set, to stand where the script's own arguments change them.

    Raises:
        Refused: The script does something that can't be tuned.
        InputError: It ends before it trains.
    """
    if not script.trainer:
        return measure_loop(clock, script, construct=construct(folder), environment=environment)

    def entry(trainer: Any, train: Callable[[], Any]) -> Any:
        raise Enough(measured_at(clock, script, trainer, train))

    patches = Patches(train=entry, call=script.call, quiet=quiet())
    put_in(patches, clock, folder=folder, environment=environment)
    patches.install()
    try:
        run_until_left(script.path, script.arguments, measured=True)
    except Enough as enough:
        evidence: Evidence = enough.found
        return evidence
    raise AssertionError("a script was left without a reason")


def put_in(patches: Patches, clock: Clock, *, folder: Path, environment: Mapping[str, str]) -> None:
    """Have a script's Trainer be made with the plan of a clock; see :func:`measure_steps`."""
    recipe, effort = clock.recipe, clock.effort
    patches.construct = construct(folder)
    patches.tuned = {
        **recipe.emission.training_args,
        "gradient_accumulation_steps": clock.accumulation,
        "max_steps": effort.warm_up + effort.max_steps,
    }
    patches.environment = environment
    patches.loads = loads_of(recipe)


def train_with(
    recipe: Recipe,
    path: str,
    arguments: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    around: Callable[[Any, Callable[[], Any], Mapping[str, Any]], Any],
    say: Callable[[str], None],
) -> None:
    """Run a script as it is, with the recipe's plan put in: real weights, every step, all that it does besides.

    It is put into each Trainer whose arguments are those that were tuned, else into the one in the tuned one's place.
    ``around`` is given the Trainer, what trains it, and the arguments that the script itself has made it with.
    ``say`` is told what may be another training than the script's own.

    Raises:
        InputError: It never trained, or what it trains is not what was tuned.
    """
    tuned = recipe.facts.workload.script
    if tuned is not None and not tuned.trainer:
        train_loop_with(recipe, tuned, path, arguments, say)
        return

    entered: list[Any] = []
    asked: list[Made] = []
    alike: list[Made] = []

    def differs(made: Made, kind: type, model: Any) -> dict[str, str]:
        return asks_otherwise(made, kind, model, recipe.facts, recipe.emission.training_args) if tuned else {}

    def takes(made: Made, kind: type) -> str:
        asked.append(made)
        found = differs(made, kind, made.given.get("model"))
        if not found:
            alike.append(made)
        elsewhere = tuned is not None and (alike or entered or len(asked) < tuned.call)
        return ", ".join(found.values()) if elsewhere else ""

    def leaves(differ: str) -> None:
        say(f"another Trainer of the script asks for {differ}: the plan is not put into it")

    def entry(trainer: Any, train: Callable[[], Any]) -> Any:
        made = patches.made[id(trainer)]
        _check_split(patches.asked.since(trainer), recipe)
        if trainer not in entered:
            found = differs(made, type(trainer), trainer.model)
            differ = f"the script asks for {', '.join(found.values())}, as it was tuned"
            if found.keys() & {BATCH, "Trainer", "model", *handed_on(made.given)}:
                raise InputError(f"{differ}: whether the plan trains it alike is not known", hint=AS_TUNED)
            if found:
                say(f"{differ}: it trains as the plan says")
            _check_class(trainer.model, recipe.facts, path)
            _tell_modules(tuned, name_of(path, arguments), say, first=not entered)
            entered.append(trainer)
            wrap(trainer, recipe, accumulation=made.arguments["gradient_accumulation_steps"])
        return around(trainer, train, made.arguments)

    patches = Patches(
        train=entry,
        call=None,
        takes=takes,
        leaves=leaves,
        tuned=recipe.emission.training_args,
        environment=environment,
        loads=loads_of(recipe),
        random_weights=False,
        quiet={"auto_find_batch_size": False},  # or a checkpoint's micro-batch would stand over the plan's
    )
    patches.install()
    run_to_its_end(path, arguments, lambda: bool(entered), by="a transformers Trainer")


def _tell_modules(tuned: Script | None, name: str, say: Callable[[str], None], *, first: bool) -> None:
    """Say, before the first training, where what a script imports is not what was tuned."""
    for words in modules_since(tuned, name) if tuned and first else []:
        say(words)


def _check_split(since: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse what a script has set in the arguments of a Trainer since it was made, where it is not the plan's.

    Raises:
        InputError: There is such a thing.
    """
    for name, value in since.items():
        if value != (planned := recipe.emission.training_args.get(name, value)):
            raise InputError(
                f"the script sets {name} to {value} after its Trainer is made, and the plan's is {planned}",
                hint="set it where the arguments are made, or tune the script as it is",
            )


def _check_class(model: Any, facts: Facts, path: str) -> None:
    """Refuse a model of another class than the plan of a config was found for.

    Raises:
        InputError: It is none.
    """
    kind, told = type(inner_of(model)), facts.model.architecture
    if facts.workload.script is None and told not in {one.__name__ for one in kind.__mro__}:
        raise InputError(
            f"the script trains a {kind.__name__}, and the plan was found for {told}",
            hint=f"tune the script itself: autofit tune {Path(path).name}",
        )


def measured_at(clock: Clock, script: Script, trainer: Any, train: Callable[[], Any]) -> Evidence:
    """Train with a script's Trainer until the clock says enough."""
    recipe, effort = clock.recipe, clock.effort
    trainer.model_init = None
    clock.notes += changes_since(script)
    wrap(trainer, recipe)
    observer = Observer(trainer.model, recipe)
    seen: list[Evidence] = []
    tokens = Tokens(clock)
    arguments = trainer.args
    clock.waits = waits_of(recipe, arguments.dataloader_num_workers, arguments.dataloader_prefetch_factor)
    arguments.max_steps = clock.most_steps
    if recipe.joined_rows is None:
        asked = wanted(clock, clock.loaded_steps, longest=script.longest_places, places=script.places)
        if script.generated:
            take_prompts(trainer, asked)
        else:
            take_in_order(trainer, asked, tokens)
    generates = generate_between(trainer, clock.notes.append) if script.generated else None
    get_batch_samples = trainer.get_batch_samples

    def timed_batches(*args: Any, **kwargs: Any) -> Any:
        clock.waits.asked()
        found = get_batch_samples(*args, **kwargs)
        clock.waits.came(len(found[0]), inside=False)
        return found

    def stepped() -> None:
        if clock.done == effort.warm_up:
            observer.rows = rows_of(trainer)
            observer.loader = trainer.callback_handler.train_dataloader
            clock.waits.worker_bytes = workers_bytes()
            seen.append(observer.evidence(trainer.optimizer, trainer.accelerator, counted(clock)))
            observer.close()
            if generates is not None:
                generates()
            if recipe.facts.workload.evaluated_rows:
                evaluate_longest(trainer, recipe.facts.workload.evaluated_rows)

    watch(trainer, clock, count=lambda inputs: tokens.count(as_trained(inputs)), stepped=stepped)
    trainer.get_batch_samples = timed_batches
    train()
    if not (seen and clock.steps):
        raise Refused(
            f"its training ends after {clock.done} optimizer steps, and of the first {effort.warm_up}, and those with "
            "which an epoch ends early, none is timed",
            "give the script more rows, or leave out what stops it",
        )
    tokens.tell()
    return observer.with_later_state(seen[0], trainer.optimizer, trainer.accelerator, counted(clock))


def rows_of(trainer: Any) -> int | None:
    """Rows that the loader puts into a micro-batch."""
    loader = trainer.callback_handler.train_dataloader
    inside = getattr(loader, "batch_sampler", None)
    rows = getattr(inside, "batch_size", None) or getattr(loader, "batch_size", None)
    return int(rows) // getattr(trainer.args, "steps_per_generation", 1) if rows else None


def rows_words(script: Script) -> str:
    """What a script's measurement trained on, in words."""
    rows = "prompts, each with a random completion of the greatest length" if script.generated else "rows"
    return (
        f"the script's own {rows}: the longest while warming up, those to be expected while timed"
        if script.longest_places
        else f"the script's own {rows}, in their order"
    )
