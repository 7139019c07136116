"""What is put into Accelerate before a script runs, so that its plain loop trains with a plan.

Five places: where the Accelerator is made, ``prepare``, the training loader's iteration, ``backward`` and the
optimizer's step. Which loader is trained on is seen when the script is described: the one that gave the batch of the
first ``backward``.
The micro-batch is another one where the script trains in ``with accelerator.accumulate(model):``; elsewhere how often
it steps is its own. What the script computes with stays its own: the loader's length, the Accelerator's number of
micro-steps, the micro-batches that it skips to resume. How many come does not: a loop that asks for its loader's length
is told of (``counts``).
Read with accelerate 1.15: ``Accelerator.backward`` and ``_do_sync``, ``AcceleratedOptimizer.step``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.machine.meters import out_of_memory
from autofit.system.errors import InputError
from autofit.training.scripts.leave import Refused, ended, ending
from autofit.training.scripts.patches import keep_files, keep_what_was_there
from autofit.training.scripts.plain_loop.loader import Numbers, begins_at, own_length
from autofit.training.scripts.plain_loop.trackers import init_trackers

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe

COUNTS = (
    "the script asks for its loader's length inside its loop: that is the number of its own micro-batches, not of the "
    "plan's; what it does at a certain one of them may be left out, or come at another row"
)
_STEPS, _PLUGIN = "gradient_accumulation_steps", "gradient_accumulation_plugin"
_SILENT, _SAVES = ("log",), ("save", "save_state", "save_model")
_AFTER = {
    "wait_for_everyone": False, "gather": False, "gather_for_metrics": False, "reduce": False, "unwrap_model": False,
    "get_state_dict": False, "free_memory": False, "print": False, "end_training": True,
}  # fmt: skip
"""What a script may call once it has left its loop, and whether that says that all of the training is over."""


@dataclass(slots=True, kw_only=True)
class LoopPatches:
    """What a plain loop is run with; each may be left out.

    Attributes:
        construct: Given the arguments of the Accelerator by name; returns those that it is made with.
        accumulation: Micro-batches to a step of the plan, which stay where the script sets its own on its Accelerator;
            ``None`` leaves what the script says.
        making: What the Accelerator is made in.
        before_prepare: Given the Accelerator that is about to prepare something, and the arguments that the script
            gave where it made it.
        loader: Given a loader that is prepared and its number; returns the one in its place.
        batches: Given the number of a loader and its batches, which the script begins to take; returns those that it
            gets.
        model: Given a model before it is prepared and its number; returns the one in its place.
        preparing: Given the objects that are about to be prepared together, some of them changed by those above.
        micro_step_begins: Given the number of a loader that has just given a batch, and the batch.
        micro_step_ends: Given the number of a loader that is asked for the next one.
        before_accumulate: Given the Accelerator, where a micro-batch is to be trained on in its ``accumulate``.
        before_backward, after_backward: Given the Accelerator and the loss.
        computes: Whether ``backward`` computes gradients.
        clears: Called where a prepared optimizer is to clear its gradients.
        after_step: Given the optimizer that has stepped, or has left a step out while gradients accumulate.
        left: Given the number of a loader whose loop is left before its end.
        goes_on: Called where the script goes on outside of a micro-step; given whether it saves what it has trained, or
            ends, where it may else evaluate before its next epoch.
        counts: Given the number of a loader whose length is asked for in the middle of its loop.
        skips: Given the number of a loader; whether the micro-batches of it that the script skips are left out.
        quiet: Whether trackers and saving are left out.
        again: Whether a model that is prepared after a training begins another one, such as the next fold's, and its
            loaders are counted anew. Else it is refused.
        foreign: Whether an Accelerator is none of the script's own.
        accumulates: Whether the script has used ``accelerator.accumulate``.
        accumulating: Whether it is inside of that.
        iterated: How many of its loaders are in the middle of their loops.
        steps: Whether an optimizer of the Accelerator's makes a step now.
    """

    construct: Callable[[dict[str, Any]], dict[str, Any]] = dict
    accumulation: int | None = None
    making: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    before_prepare: Callable[[Any, dict[str, Any]], None] = lambda *_: None
    loader: Callable[[Any, int], Any] = lambda loader, _: loader
    batches: Callable[[int, Iterator[Any]], Iterator[Any]] = lambda _, batches: batches
    model: Callable[[Any, int], Any] = lambda model, _: model
    preparing: Callable[[list[Any]], None] = lambda _: None
    micro_step_begins: Callable[[int, Any], None] = lambda *_: None
    micro_step_ends: Callable[[int], None] = lambda _: None
    before_accumulate: Callable[[Any], None] = lambda _: None
    before_backward: Callable[[Any, Any], None] = lambda *_: None
    after_backward: Callable[[Any, Any], None] = lambda *_: None
    computes: Callable[[], bool] = lambda: True
    clears: Callable[[], None] = lambda: None
    after_step: Callable[[Any], None] = lambda _: None
    left: Callable[[int], None] = lambda _: None
    goes_on: Callable[[bool], None] = lambda _: None
    counts: Callable[[int], None] = lambda _: None
    skips: Callable[[int], bool] = lambda _: True
    quiet: bool = True
    again: bool = False
    foreign: Callable[[], bool] = lambda: False
    accumulates: bool = False
    accumulating: bool = False
    iterated: int = 0
    steps: bool = False
    _loaders: Numbers = field(default_factory=Numbers)
    _models: int = 0
    _given: dict[str, Any] = field(default_factory=dict)
    _own_steps: int | None = None
    _inside: bool = False
    _trained: bool = False
    _rows: dict[int, tuple[int, Any, int, int | None]] = field(default_factory=dict)
    """Of each prepared loader its number, the script's own, rows to a micro-batch of the plan's, its own length."""

    def install(self) -> None:
        """Put them in."""
        self._into_accelerator()
        self._into_optimizer()

    def _into_accelerator(self) -> None:
        import accelerate

        owner: Any = accelerate.Accelerator
        make, prepare, accumulate = owner.__init__, owner.prepare, owner.accumulate
        names = inspect.signature(make)

        @functools.wraps(make)
        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            if self.foreign():
                make(accelerator, *args, **kwargs)
                return
            given = dict(names.bind(accelerator, *args, **kwargs).arguments)
            given.pop("self")
            _take_from_environment(given)
            self._given = given
            changed = self.construct(given)
            with self.making():
                make(accelerator, **changed)
            alike = changed.get(_STEPS) == given.get(_STEPS) and changed.get(_PLUGIN) is given.get(_PLUGIN)
            self._own_steps = None if alike else accumulation_of(given)

        @functools.wraps(prepare)
        def prepared(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            if self.foreign():
                return prepare(accelerator, *args, **kwargs)
            self.before_prepare(accelerator, self._given)
            with self._of_the_plan():
                return self._prepared(accelerator, functools.partial(prepare, accelerator, **kwargs), args)

        @functools.wraps(accumulate)
        @contextlib.contextmanager
        def told_accumulate(accelerator: Any, *models: Any) -> Iterator[None]:
            self.accumulates = self.accumulating = True
            self.before_accumulate(accelerator)
            try:
                with accumulate(accelerator, *models):
                    yield
            finally:
                self.accumulating = False

        owner.__init__, owner.prepare, owner.accumulate = init, prepared, told_accumulate
        owner.backward = self._told_backward(owner.backward)
        self._keep_numbers(owner)
        if self.quiet:
            self._keep_files(owner)
        for name, ends in _AFTER.items():
            setattr(owner, name, self._told_of(getattr(owner, name), ends))

    def _told_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def told(accelerator: Any, loss: Any, **kwargs: Any) -> None:
            self.before_backward(accelerator, loss)
            self._trained = True
            if self.computes():
                with self._of_the_plan(), ending(out_of_memory):
                    backward(accelerator, loss, **kwargs)
            self.after_backward(accelerator, loss)

        return told

    def _keep_numbers(self, owner: Any) -> None:
        """Have a script read its own numbers of the Accelerator, and skip as many rows as it means to."""
        import accelerate

        steps, skip = owner.gradient_accumulation_steps, accelerate.data_loader.skip_first_batches
        load_state = owner.load_state

        def own_steps(accelerator: Any) -> int:
            planned = int(steps.fget(accelerator))
            return planned if self._inside or self._own_steps is None else self._own_steps

        def set_steps(accelerator: Any, wanted: int) -> None:
            self._own_steps = wanted
            steps.fset(accelerator, wanted if self.accumulation is None else self.accumulation)

        @functools.wraps(load_state)
        def loaded(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            load_state(accelerator, *args, **kwargs)
            accelerator.step -= accelerator.step % int(steps.fget(accelerator))  # it was saved under another split

        @functools.wraps(skip)
        def skipped(dataloader: Any, num_batches: int = 0) -> Any:
            number, own, rows, length = self._rows.get(id(dataloader), (0, None, 0, None))
            if own is None:
                return skip(dataloader, num_batches)
            passed = num_batches * own.batch_size if self.skips(number) else 0
            rest = skip(dataloader, passed // rows)
            if passed % rows and not begins_at(rest, passed):
                raise InputError(
                    f"the script skips {num_batches} micro-batches of {own.batch_size} rows, which are no whole number "
                    f"of the plan's, of {rows}",
                    hint="resume where an optimizer step has ended",
                )
            self._listen(rest, number, None if length is None else length - num_batches)
            return rest

        owner.gradient_accumulation_steps, owner.load_state = property(own_steps, set_steps), loaded
        for module in (accelerate, accelerate.accelerator, accelerate.data_loader):
            module.skip_first_batches = skipped

    @contextlib.contextmanager
    def _of_the_plan(self) -> Iterator[None]:
        """Have Accelerate itself read the plan's numbers."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _keep_files(self, owner: Any) -> None:
        """Have nothing written over what the script has trained before: the weights here are random."""
        for name in (*_SILENT, *_SAVES):
            setattr(owner, name, lambda *_, **__: None)
        owner.init_trackers = init_trackers
        for name in _SAVES:
            setattr(owner, name, self._told_of(getattr(owner, name), True))
        keep_files(lambda nothing: self._told_of(nothing, True))
        keep_what_was_there(lambda: self.iterated > 0, lambda: self.goes_on(True))

    def _told_of(self, function: Callable[..., Any], ends: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            self.goes_on(ends)
            return function(*args, **kwargs)

        return told

    def _into_optimizer(self) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        owner: Any = AcceleratedOptimizer
        step, clear = owner.step, owner.zero_grad

        @functools.wraps(clear)
        def told_clear(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clears()
            clear(optimizer, *args, **kwargs)

        @functools.wraps(step)
        def told(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.steps = True
            try:
                with ending(out_of_memory):
                    step(optimizer, *args, **kwargs)
            finally:
                self.steps = False
            self.after_step(optimizer)

        owner.step, owner.zero_grad = told, told_clear

    def _prepared(self, accelerator: Any, prepare: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What ``prepare`` gives for a script's objects, some of them changed."""
        from torch import nn
        from torch.utils.data import DataLoader

        if self._trained and any(isinstance(one, nn.Module) for one in args):
            if not self.again:
                raise Refused("the script prepares a model after it has trained", "one training is tuned at a time")
            self._trained, self._loaders, self._models = False, Numbers(), 0
        numbers: dict[int, tuple[int, Any]] = {}
        changed = []
        for place, one in enumerate(args):
            if isinstance(one, DataLoader):
                numbers[place] = self._loaders.take(anew=self._trained), one
                changed.append(self.loader(one, numbers[place][0]))
            elif isinstance(one, nn.Module):
                changed.append(self.model(one, self._models))
                self._models += 1
            else:
                changed.append(one)
        self.preparing(changed)
        result = prepare(*changed)
        for place, one in enumerate(args):
            if isinstance(one, nn.Module):
                (result[place] if len(args) > 1 else result).register_forward_hook(_tell_of_memory, always_call=True)
        for place, (number, own) in numbers.items():
            loader, rows = result[place] if len(args) > 1 else result, changed[place].batch_size
            length = own_length(own, accelerator)
            if own.batch_size and rows:
                self._rows[id(loader)] = number, own, rows, length
            self._listen(loader, number, length)
        return result

    def _listen(self, loader: Any, number: int, length: int | None) -> None:
        """Hear of each micro-step that a prepared loader begins; it tells the length of the script's own."""
        kind = type(loader)
        running = False

        def iterate(_: Any) -> Iterator[Any]:
            nonlocal running
            self.goes_on(False)
            whole, running = False, True
            self.iterated += 1
            try:
                for batch in self.batches(number, kind.__iter__(loader)):
                    with ending():
                        self.micro_step_begins(number, batch)
                    yield batch
                    with ending():
                        self.micro_step_ends(number)
                whole = True
            finally:
                running = False
                self.iterated -= 1
                if not whole:
                    self.left(number)

        members: dict[str, Any] = {"__iter__": iterate}
        if length is not None:

            def told_length(_: Any) -> int:
                if running:
                    self.counts(number)
                return length

            members["__len__"] = told_length

        def told_rows(_: Any) -> int:
            _, own, rows, _ = self._rows.get(id(loader), (0, None, 1, None))
            planned = int(kind.total_batch_size.fget(loader))  # which Accelerate reads itself where a loop begins
            return planned if running or own is None else planned * int(own.batch_size) // rows

        members["total_batch_size"] = property(told_rows)
        made = type(kind.__name__, (kind,), members)
        vars(object)["__class__"].__set__(loader, made)  # Accelerate's own says that it is PyTorch's loader


def _tell_of_memory(_model: Any, _given: Any, output: Any) -> None:
    """Have it stand that memory ran out in a model's forward pass, though a loop may leave such a batch out."""
    error = sys.exc_info()[1] if output is None else None
    if error is not None and out_of_memory(error):
        ended(error)


def _take_from_environment(given: dict[str, Any]) -> None:
    """Take a number of micro-steps that the environment says, as an Accelerator would over a plan's.

    Under DeepSpeed it is the launch's, and so the plan's.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true" and given.get(_PLUGIN) is None:
        said = os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
        given |= {} if said is None else {_STEPS: int(said)}


def accumulation_of(given: Mapping[str, Any]) -> int:
    """Micro-batches to a step, of the arguments of an Accelerator."""
    plugin = given.get(_PLUGIN)
    return int(given.get(_STEPS, 1) if plugin is None else plugin.num_steps)


def constructed(given: Mapping[str, Any], recipe: Recipe, *, accumulation: int | None) -> dict[str, Any]:
    """Arguments of the script's Accelerator with those of the plan in their place.

    Args:
        given: What the script says.
        recipe: Of the plan.
        accumulation: Micro-batches to a step; ``None`` leaves what the script says.
    """
    changed = {**given, "mixed_precision": recipe.mixed_precision}
    if recipe.facts.hardware.device == "cpu":
        changed["cpu"] = True
    if accumulation is None:
        return changed
    plugin = given.get(_PLUGIN)
    if plugin is None:
        changed[_STEPS] = accumulation
    else:  # which says what an epoch's last micro-batches do, too
        changed[_PLUGIN] = dataclasses.replace(plugin, num_steps=accumulation)
    return changed
