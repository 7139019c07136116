"""What happens where a script's plain loop trains: it is measured for some steps, or has the plan put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autofit.contract.recipe import Recipe
from autofit.system.errors import InputError
from autofit.training.expected_rows import Tokens
from autofit.training.loops import counted
from autofit.training.observer import Observer
from autofit.training.row_order import order, wanted
from autofit.training.scripts.leave import AS_TUNED, Enough, Refused, name_of, run_to_its_end, run_until_left
from autofit.training.scripts.loading import waits_of, workers_bytes
from autofit.training.scripts.patches import Patches, loads_of
from autofit.training.scripts.plain_loop.by_number.loop import takes_by_number
from autofit.training.scripts.plain_loop.loader import loader_changes, rebuilt
from autofit.training.scripts.plain_loop.patches import COUNTS, LoopPatches, constructed
from autofit.training.scripts.traits import changes_since, modules_since

if TYPE_CHECKING:
    from autofit.contract.outcome import Evidence
    from autofit.contract.script import Script
    from autofit.training.timing import Clock

_IN_ITS_ORDER = "rows come in the script's own order, since it has cached what belongs to them: fit is judged on these"
_ENOUGH_TO_LEAVE = 3
"""Timed steps, after which a loop is left where it saves."""


@dataclass(slots=True)
class _Measured:
    """A loop while it is measured."""

    clock: Clock
    script: Script
    tokens: Tokens
    observer: Any = None
    accelerator: Any = None
    optimizer: Any = None
    loaded_by: Any = None
    loads: Any = None
    """The data set of its first loader, of which the places of rows are known."""
    begun: set[int] = field(default_factory=set)
    """Loaders that have given a batch since its last backward pass."""
    seen: list[Evidence] = field(default_factory=list)
    fresh: bool = True
    synced: bool = False
    over: bool = False
    leaves: bool = False
    """Whether it is to be left once its step is over, since this process saves: others may not, and go on."""

    def loader(self, own: Any, number: int) -> Any:
        """The plan's loader: the longest rows first, then the order of the script's own sampler."""
        if number != self.script.loader or own.batch_size is None:
            return own
        recipe = self.clock.recipe
        changed = loader_changes(own, recipe)
        prefetch = changed.get("prefetch_factor", own.prefetch_factor)
        if self.loads is None:
            self.loads = own.dataset
            self.clock.waits = waits_of(recipe, changed.get("num_workers", own.num_workers), prefetch)
        ordered = None
        script = self.script
        if takes_by_number(script.own_split):  # what it has cached ends where its own epoch does
            if script.mean_share < 1:
                self.clock.notes.append(_IN_ITS_ORDER)
        elif script.longest_places and own.dataset is self.loads:
            steps = self.clock.loaded_steps
            asked = wanted(self.clock, steps, longest=script.longest_places, places=script.places)
            ordered = order(own.sampler, asked, self.tokens.take)
        self.loaded_by = rebuilt(own, rows=recipe.micro_batch, sampler=ordered, changed=changed)
        return self.loaded_by

    def model(self, own: Any, number: int) -> Any:
        """The plan's model, watched; the others stay the script's own."""
        if number != self.script.model:
            return own
        own = _wrapped(own, self.clock.recipe)
        self.observer = Observer(own, self.clock.recipe)
        return own

    def begins(self, number: int, batch: Any) -> None:
        """A micro-step begins."""
        self.begun.add(number)
        if number != self.script.loader:
            return
        self.over = False
        self.clock.waits.came(inside=not self.fresh)
        self.tokens.count(batch)
        if self.fresh:
            self.clock.step_begin()
            self.fresh = False
        self.clock.forward_begin()

    def before_backward(self, accelerator: Any, _loss: Any) -> None:
        """The loss is there; where it is that of another loader, without the plan, the steps that were made are all."""
        if self.script.own_split is None and self.begun and self.script.loader not in self.begun:
            raise self.enough()
        self.begun.clear()
        if self.accelerator is None:
            self.clock.notes += changes_since(self.script)
        self.accelerator = accelerator
        self.clock.forward_end()

    def after_backward(self, accelerator: Any, loss: Any) -> None:
        """The gradients are there."""
        self.clock.backward_end(loss.detach() / accelerator.gradient_state.num_steps)

    def after_step(self, optimizer: Any) -> None:
        """The optimizer has stepped, unless gradients accumulate."""
        if self.accelerator.sync_gradients:
            self.optimizer, self.synced = optimizer, True

    def ends(self, number: int) -> None:
        """The next batch is asked for: an optimizer step is over where the optimizer has stepped."""
        clock = self.clock
        if number != self.script.loader:
            return
        if not self.synced:
            clock.waits.asked()
            return
        self.fresh, self.synced = True, False
        if self.accelerator.optimizer_step_was_skipped:
            clock.step_skipped()
        enough = clock.step_end() or clock.world.agrees(self.leaves)
        if clock.done == clock.effort.warm_up:
            self.observer.rows, self.observer.loader = clock.recipe.micro_batch, self.loaded_by
            clock.waits.worker_bytes = workers_bytes()
            self.seen.append(self.observer.evidence(self.optimizer, self.accelerator, counted(clock)))
            self.observer.close()
        if enough:
            raise self.enough()
        clock.waits.asked()

    def left(self, number: int) -> None:
        """The script leaves a loop: it has made the steps that it wanted to."""
        self.over = self.over or number == self.script.loader

    def goes_on(self, ends: bool) -> None:
        """The script saves, or has left its loop and evaluates: the steps that were made are all, or are enough.

        What it writes by itself beside what it saves, such as the number of its step, would be over its own: so it is
        left where it saves in its loop, too, once some steps were timed.
        """
        within = ends and len(self.clock.timed) >= _ENOUGH_TO_LEAVE
        if self.clock.world.size > 1:
            self.leaves, within = self.leaves or within, False
        if within or (self.over and (ends or (self.seen and self.clock.timed))):
            raise self.enough()

    def enough(self) -> Enough:
        """The evidence.

        Raises:
            Refused: Too few steps were made.
        """
        clock = self.clock
        if not self.seen or not clock.timed:
            made, warm_up = clock.done + self.synced, clock.effort.warm_up
            raise Refused(
                f"its loop ends after {made} optimizer steps: the first {warm_up} are not timed, nor is the last",
                "give the script more rows, epochs or steps",
            )
        self.over = False
        self.tokens.tell()
        later = self.observer.with_later_state
        return Enough(later(self.seen[0], self.optimizer, self.accelerator, counted(clock)))


def measure_loop(
    clock: Clock, script: Script, *, construct: Mapping[str, Any], environment: Mapping[str, str]
) -> Evidence:
    """Run a script with the clock's recipe, and leave its loop once the clock says enough; see ``measure_steps``."""
    recipe = clock.recipe
    measured = _Measured(clock, script, Tokens(clock))

    def refuse(*_: Any) -> Any:
        raise Refused("the script calls train() of a Trainer, where it trained in a loop before", "tune it again")

    Patches(train=refuse, construct=construct, environment=environment, loads=loads_of(recipe)).install()
    accumulation = _accumulation(script, clock.accumulation)
    LoopPatches(
        construct=lambda given: constructed(given, recipe, accumulation=accumulation),
        accumulation=accumulation,
        making=recipe.tf32_as_planned,
        loader=measured.loader,
        model=measured.model,
        micro_step_begins=measured.begins,
        micro_step_ends=measured.ends,
        before_backward=measured.before_backward,
        after_backward=measured.after_backward,
        after_step=measured.after_step,
        counts=_told_once(recipe, script, clock.notes.append),
        skips=lambda number: number != script.loader,
        left=measured.left,
        goes_on=measured.goes_on,
    ).install()
    try:
        run_until_left(script.path, script.arguments, measured=True)
    except Enough as enough:
        return cast("Evidence", enough.found)
    except InputError:
        if not clock.done:
            raise
    return cast("Evidence", measured.enough().found)


def _wrapped(model: Any, recipe: Recipe) -> Any:
    """A model with what no argument carries around it."""
    for around in recipe.model_wraps:
        model = around(model)
    return model


def _accumulation(script: Script, wanted: int) -> int | None:
    """What the Accelerator is told; nothing where the script counts its micro-steps itself."""
    return wanted if script.own_split is None else None


def _told_once(recipe: Recipe, script: Script, say: Callable[[str], None]) -> Callable[[int], None]:
    """What is called where a loop asks for its loader's length: it says so once, where the plan's is another one."""
    counted = False

    def counts(number: int) -> None:
        nonlocal counted
        if not counted and number == script.loader and recipe.micro_batch != script.micro_batch:
            counted = True
            say(COUNTS)

    return counts


@dataclass(slots=True)
class _Launched:
    """A loop while it trains with a plan put in."""

    recipe: Recipe
    script: Script
    say: Callable[[str], None]
    accumulation: int | None
    """Micro-batches to a step of the plan; ``None`` where they are the script's own."""
    name: str
    loop: Any = None
    accelerator: Any = None
    steps: int = 0
    own_rows: int = 0
    entered: bool = False
    loads: Any = None
    """The data set of its loader."""
    trained: bool = False
    left: bool = False
    """Whether the training that goes on is another one, of other rows to a step."""
    other: bool = False
    """Whether it trains on another loader than the one that was tuned."""
    said: set[str] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)

    @property
    def tuned_rows(self) -> int:
        """Rows to a step that were tuned."""
        return self.script.micro_batch * self.script.accumulation

    def read(self, accelerator: Any) -> None:
        """Note how many micro-batches the script takes to a step, as it says now, before it prepares or trains."""
        self.accelerator = accelerator
        self.steps = self.script.accumulation if self.accumulation is None else accelerator.gradient_accumulation_steps

    def loader(self, own: Any, number: int) -> Any:
        """The plan's loader; the script's own where it asks for other rows after a training, which would be lost."""
        if number != self.script.loader:
            return own
        self.own_rows = own.batch_size or self.script.micro_batch
        steps = self.steps
        self.left, self.other = self.trained and self.own_rows * steps != self.tuned_rows, False
        self._let()
        if self.left:
            self.say(
                f"another training of the script asks for {self.own_rows * steps} rows a step, not {self.tuned_rows}: "
                "its batches stay its own, and its memory and speed were not measured"
            )
            return own
        if self.trained and own.dataset is not self.loads:
            anew = "the script prepares its loader anew, on another data set"
            self._say_once(f"{anew}: whether its rows are longer was not seen")
        self.entered, self.loads = True, own.dataset
        return rebuilt(own, rows=self.recipe.micro_batch, changed=loader_changes(own, self.recipe))

    def _let(self) -> None:
        """Have a step take as many micro-batches as the script says, where the plan's loader does not give them."""
        own = self.left or self.other
        if self.accumulation is not None and own != (self.loop.accumulation is None):
            self.loop.accumulation = None if own else self.accumulation
            self.accelerator.gradient_accumulation_steps = self.steps

    def before_accumulate(self, accelerator: Any) -> None:
        """A micro-batch is to be trained on, which another loader may have given."""
        if self.begun and self.accumulation is not None:
            self.other = self.script.loader not in self.begun
            self.read(accelerator)
            self._let()
            if self.other:
                self._say_once(
                    "the script trains on another loader, too, than on the one that was tuned: its batches stay its "
                    "own, and its memory and speed were not measured"
                )
        self.begun.clear()

    def _say_once(self, words: str) -> None:
        if words not in self.said:
            self.said.add(words)
            self.say(words)

    def as_tuned(self, accelerator: Any, _loss: Any) -> None:
        """Hold the script to the rows that it was tuned with: it may set its accumulation before it trains, or then."""
        if self.left or self.other:
            return
        self.read(accelerator)
        steps = self.steps
        own_rows = self.own_rows or self.script.micro_batch
        if (asked := own_rows * steps) != self.tuned_rows:
            raise InputError(
                f"the script asks for {asked} rows a step on each device; it was tuned with {self.tuned_rows}, and its "
                "schedule would count other steps than it makes",
                hint=AS_TUNED,
            )
        for words in [] if self.trained else modules_since(self.script, self.name):
            self.say(words)
        self.trained = True
        recipe = self.recipe
        if own_rows != recipe.micro_batch:
            self._say_once(
                f"a step takes {recipe.micro_batch} x {recipe.accumulation} rows, the script's own {own_rows} x "
                f"{steps}: what it counts or sums by micro-step, such as a loss that it logs, is another number"
            )


def train_loop_with(
    recipe: Recipe, script: Script, path: str, arguments: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Run a script with a plain loop as it is, with the recipe's plan put in.

    ``say`` is told what of the script may be another training than its own, a sentence each.

    Raises:
        InputError: It never prepared the loader that it trains on, or asks for another batch.
    """
    launched = _Launched(recipe, script, say, _accumulation(script, recipe.accumulation), name_of(path, arguments))

    def plain(_trainer: Any, train: Callable[[], Any]) -> Any:
        return train()

    Patches(train=plain, loads=loads_of(recipe), random_weights=False, rewrites=False).install()
    launched.loop = LoopPatches(
        construct=lambda given: constructed(given, recipe, accumulation=launched.loop.accumulation),
        accumulation=launched.accumulation,
        making=recipe.tf32_as_planned,
        before_prepare=lambda accelerator, _: launched.read(accelerator),
        loader=launched.loader,
        micro_step_begins=lambda number, _: launched.begun.add(number),
        before_accumulate=launched.before_accumulate,
        before_backward=launched.as_tuned,
        model=lambda own, number: _wrapped(own, recipe) if number == script.model else own,
        counts=_told_once(recipe, script, say),
        quiet=False,
        again=True,
    )
    launched.loop.install()
    run_to_its_end(str(Path(path).absolute()), arguments, lambda: launched.entered, by="a loop with an Accelerator")
