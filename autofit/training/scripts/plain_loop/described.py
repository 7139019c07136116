"""What is told of a script's plain loop before it trains: which batches it trains on, and how it steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.training.scripts.leave import Enough, Refused
from autofit.training.scripts.loading import loading_of, splitting
from autofit.training.scripts.patches import Patches
from autofit.training.scripts.plain_loop import reasons
from autofit.training.scripts.plain_loop.autocast import before_products
from autofit.training.scripts.plain_loop.batches import THREAD, TURNS, note_iterators, own_number
from autofit.training.scripts.plain_loop.gradients import Marked, groups_of, hooked, note_steps
from autofit.training.scripts.plain_loop.loader import blends_rows, counts_calls
from autofit.training.scripts.plain_loop.losses import SUMS, Judged, sums_rows, takes_rows_together
from autofit.training.scripts.plain_loop.patches import LoopPatches
from autofit.training.scripts.plain_loop.some_rows import SomeRows
from autofit.training.scripts.plain_loop.trainers import refuse_loops_of_its_own
from autofit.training.scripts.rows import sample_of
from autofit.training.scripts.traits import longest_batch, shapes, traits

_ENGINES = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")


def describe_loops(
    path: str, patches: Patches, seconds: Callable[[], float], autocasts: list[Mapping[str, str]]
) -> Callable[[], dict[str, Any] | None]:
    """Have a script's loop tell of itself, and leave the script once it is known how it steps.

    Where it trains in ``with accelerator.accumulate(model):`` its first backward pass tells that, and is not computed;
    it goes on until its next batch, or until it saves or evaluates: what it does at the end of a micro-step at which
    gradients accumulate, such as to clear them, it would do at each of the plan's. Some rows of that batch follow, and
    tell how its loss is made of them.

    Returns:
        What is asked where the script has failed: what it trains, where its first backward pass was not computed.
    """
    from accelerate.local_sgd import LocalSGD
    from torch.optim.lr_scheduler import LRScheduler

    seen = _Described(patches, seconds, autocasts)
    loop = LoopPatches(
        construct=seen.construct,
        loader=seen.loader,
        batches=seen.batches,
        model=seen.model,
        micro_step_begins=seen.begins,
        micro_step_ends=seen.ends,
        goes_on=lambda ends: seen.leave() if ends or not (loop.accumulating or loop.iterated) else None,
        before_backward=lambda accelerator, loss: seen.before_backward(accelerator, loss, loop),
        computes=lambda: not loop.accumulates,
        after_step=seen.after_step,
        clears=seen.clearing,
        before_prepare=seen.before_prepare,
        foreign=lambda: bool(patches.made),
        accumulation=2,
    )
    loop.install()
    for owner, told in ((LRScheduler, seen.scheduling), (LocalSGD, seen.averaging)):
        note_steps(owner, told)
    note_iterators(seen.iterators)
    refuse_loops_of_its_own(path, lambda: bool(patches.made or loop.steps), lambda: bool(seen.precision))
    return seen.failed


@dataclass(slots=True)
class _Described:
    """What a loop has shown of itself until it is known how it steps."""

    patches: Patches
    seconds: Callable[[], float]
    autocasts: list[Mapping[str, str]]
    """Which the script is in now."""
    autocast: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Which it calls its models in, by their numbers."""
    loaders: dict[int, Any] = field(default_factory=dict)
    models: list[Any] = field(default_factory=list)
    precision: str = ""
    carries: bool = False
    """Whether gradients accumulate over an epoch's end."""
    number: int | None = None
    """Of the loader that gave the last batch."""
    batch: Any = None
    counts: str | None = None
    """Why how many batches it takes is its own, in words."""
    taken: int = 0
    """Batches that it has taken of its loader before its first backward pass."""
    accelerator: Any = None
    iterators: list[Any] = field(default_factory=list)
    """Weak references to those of loaders that are not prepared."""
    mark: Marked = field(default_factory=Marked)
    """Since the first batch came."""
    clears: bool = False
    """Whether gradients were cleared between that and the first backward pass."""
    averages: bool = False
    """Whether LocalSGD has counted a step."""
    exhausted: bool = False
    """Whether its loader has no more of them."""
    untrained: int = 0
    """Those of them that had no backward pass."""
    between: int = 0
    """Backward passes since the last optimizer step."""
    before: int = 0
    """Backward passes before it."""
    steps: int = 0
    stepped: set[int] = field(default_factory=set)
    """Optimizers that it has stepped between its first backward pass and the next."""
    found: dict[str, Any] | None = None
    """What would be trained, where the first backward pass has told all of it."""
    some: SomeRows = field(default_factory=SomeRows)

    def construct(self, given: dict[str, Any]) -> dict[str, Any]:
        """The Accelerator of a CPU, which keeps nothing of what is asked of a device; gradients accumulate.

        Raises:
            Refused: It says itself how its model is spread over processes.
        """
        if said := [name for name in _ENGINES if given.get(name) is not None]:
            raise Refused(
                f"the script gives its Accelerator {said[0]}, which a plan says",
                "leave it out: autofit tune train.py --processes N tries the ways to spread a model",
            )
        asked = given.get("mixed_precision")
        self.precision = str(getattr(asked, "value", asked))
        given = dict(given)
        plugin = given.pop("gradient_accumulation_plugin", None)
        self.carries = plugin is not None and not plugin.sync_with_dataloader
        return {**given, "cpu": True, "mixed_precision": "no", "gradient_accumulation_steps": 2}

    def before_prepare(self, accelerator: Any, _given: dict[str, Any]) -> None:
        """An Accelerator prepares something."""
        self.accelerator = accelerator

    def loader(self, own: Any, number: int) -> Any:
        """A loader is prepared."""
        self.loaders[number] = own
        return own

    def model(self, own: Any, number: int) -> Any:
        """A model is prepared; where it runs without gradients after its first backward pass, it is evaluated."""
        import torch

        self.models.append(own)

        def begins(*_: Any) -> None:
            if not (torch.is_grad_enabled() or (self.some.asking and self.some.without_gradients)):
                self.leave()
            called()

        def called() -> None:
            self.autocast[number] = self.autocasts[-1] if self.autocasts else {}

        own.register_forward_pre_hook(begins)
        before_products(own, called)
        self.some.watch(own)
        return own

    def leave(self) -> None:
        """The script goes on: to its next batch, to evaluate or to save."""
        if self.found is None:
            return
        if not self.some.asking:
            self._settle(self.found["script"])
        raise Enough(self.found)

    def ends(self, number: int) -> None:
        """The next batch is asked for: some rows of the first one follow, where they are to tell of its loss."""
        if self.found is None or self.some.asking:
            return
        script = self.found["script"]
        self._settle(script)
        if self.some.buffer:
            script["depends_on_rows"] = script["depends_on_rows"] or reasons.BUFFERS.format(self.some.buffer)
        if script["own_split"] or script["depends_on_rows"] or self.accelerator.sync_gradients or number != self.number:
            raise Enough(self.found)
        self.some.asking = True

    def _ask(self, batch: Any) -> Iterator[Any]:
        """Some rows of the first batch.

        Raises:
            Enough: They have told of its loss, or can't.
        """
        assert self.found is not None
        for some in self.some.batches(batch, self.found["script"]["micro_batch"]):
            self.accelerator.step = 0  # so that it makes none
            yield some
        self._judge(self.found["script"])
        raise Enough(self.found)

    def _judge(self, script: dict[str, Any]) -> None:
        """How its loss is made of its rows."""
        judged = self.some.found()
        if self.mark.rated(groups_of(self.accelerator)):
            script["own_split"] = reasons.RATE
        elif own_split := self.some.own_split():
            script["own_split"] = own_split
        elif judged == Judged.SUM:
            script["own_split"] = SUMS
        elif judged == Judged.TOGETHER:
            script["depends_on_rows"] = reasons.TOGETHER
        script["weighs"] = judged == Judged.WEIGHTED

    def _settle(self, script: dict[str, Any]) -> None:
        """What it has done by the end of its first micro-step is known."""
        script["by_turns"] = self._by_turns()
        if not self.accelerator.sync_gradients:
            if self.mark.cleared():
                self._hold(reasons.CLEARS)
            elif self.mark.changed():
                self._hold(reasons.CHANGES)
            if self.mark.rated(groups_of(self.accelerator)):
                self._hold(reasons.RATE)
            if self.averages:
                self._hold(reasons.AVERAGES)
            if hooked(groups_of(self.accelerator)):
                self._hold(reasons.HOOKS)
            if self._by_turns():
                self._hold(TURNS)

    def _by_turns(self) -> bool:
        return bool(self.stepped) and len(self.stepped) < len(self.accelerator._optimizers)  # noqa: SLF001 - no other

    def failed(self) -> dict[str, Any] | None:
        """The script has failed, perhaps for its first backward pass was not computed, or on some rows of its batch."""
        if self.found is not None:
            self._hold(reasons.FAILS if self.some.asking else reasons.GRADIENTS)
        return self.found

    def _hold(self, why: str) -> None:
        """Hold the split of the batch."""
        assert self.found is not None
        self.found["script"]["own_split"] = self.found["script"]["own_split"] or why

    def begins(self, number: int, batch: Any) -> None:
        """A loader has given a batch."""
        if self.some.asking and number == self.number:
            return
        self.leave()
        self.some.begins()
        self.number, self.batch = number, batch
        if not self.before + self.between:
            if not self.taken:  # where it takes more, that is told; and who takes them is looked for in all objects
                self.counts = own_number(sys._getframe(1))  # noqa: SLF001 - there is no other; of the loader's generator
            self.taken += 1
            self.mark.put(groups_of(self.accelerator))
        self.untrained += 1

    def clearing(self) -> None:
        """A prepared optimizer clears its gradients, or would where they do not accumulate."""
        self.clears = self.clears or self.untrained > 0

    def averaging(self) -> None:
        """LocalSGD counts a step."""
        self.averages = True

    def scheduling(self) -> None:
        """A schedule steps."""
        self.mark.scheduled = True

    def batches(self, _number: int, batches: Iterator[Any]) -> Iterator[Any]:
        """A loop over a loader begins: what was taken before is no matter."""
        self.taken = self.untrained = 0
        self.clears = self.exhausted = False
        for batch in batches:
            yield batch
            if self.some.asking:
                yield from self._ask(batch)
        self.exhausted = True

    def before_backward(self, accelerator: Any, loss: Any, loop: LoopPatches) -> None:
        """The loss is there.

        Raises:
            Refused: No plan can be put into such a loop.
        """
        if self.some.asking:
            self.some.note(loss, autocast=any(self.autocast.values()))
            return
        self.some.ends()
        if not accelerator._optimizers:  # noqa: SLF001 - there is no other
            raise Refused(
                "the script trains by an optimizer that it has not given to accelerator.prepare",
                "give it: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        if self.counts == THREAD:
            raise Refused(THREAD, "loop over the loader itself, whose workers read ahead (num_workers)")
        first = not self.before + self.between
        if first and self.exhausted:
            raise Refused(
                "the script takes all batches of its loader before it trains on the first, as by list(loader)",
                "loop over the loader itself",
            )
        self.between += 1
        self.untrained -= 1
        if self.untrained < 0 and self.number is not None:
            raise Refused(
                "the script calls backward() several times for one batch of its loader: a plan counts these as batches",
                "add its losses up and call backward() once for each batch, or let the loader give smaller batches",
            )
        self.leave()  # it trains on a batch that it took ahead
        if loop.accumulates:
            several = loop.iterated > 1 or any(one() is not None for one in self.iterators)
            clears = reasons.CLEARS_FIRST if self.clears or self.mark.cleared() else None
            ahead = reasons.AHEAD if self.taken > 1 else None
            carries = reasons.CARRIES if self.carries else None
            sums = sums_rows(loss, None if self.number is None else self.loaders[self.number])
            own_split = (reasons.SEVERAL if several else None) or ahead or self.counts or clears or carries or sums
            self.found = self._told(accelerator.gradient_accumulation_steps, own_split)
            script = self.found["script"]
            if takes_rows_together(loss, script["micro_batch"]):
                script["depends_on_rows"] = script["depends_on_rows"] or reasons.TOGETHER
        elif first:
            self.mark.take()

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped: a second one without another backward pass belongs to the same step.

        Raises:
            Enough: It is known how often it steps.
            Refused: It trains by other gradients.
        """
        if self.found is None and self.before and self.between:
            raise Enough(self._told(self.between, reasons.MANUAL))
        self.stepped.add(id(optimizer))
        if self.found is not None:
            return
        self.steps += 1
        if self.steps > 1 and not (self.before or self.between):
            raise Refused(
                "the script takes its gradients without its Accelerator",
                "call accelerator.backward(loss) where it calls loss.backward()",
            )
        self.before, self.between = self.before + self.between, 0
        self.untrained = min(self.untrained, 1)  # one that was taken ahead

    def _tuned(self) -> int:
        """The number of the model of which its optimizers hold most."""
        held = {id(one) for group in groups_of(self.accelerator) for one in group["params"]}
        sizes = [sum(one.numel() for one in model.parameters() if id(one) in held) for model in self.models]
        return sizes.index(max(sizes))

    def _told(self, accumulation: int, own_split: str | None) -> dict[str, Any]:
        """All of it.

        Raises:
            Refused: It trains on what no plan can be put into.
        """
        import torch

        if self.number is None or not self.models:
            raise Refused(
                "the script trains on a loader or a model that it has not given to accelerator.prepare",
                "give both to it: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        loader = self.loaders[self.number]
        fixed, counts = reasons.LOADER if loader.batch_size is None else None, counts_calls(loader)
        rows = sample_of(loader.dataset, loader.collate_fn)
        tuned = self._tuned()
        beside = [one for number, one in enumerate(self.models) if number != tuned]
        found = traits(self.patches, self.models[tuned], rows, self.seconds(), beside=beside)
        sized = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
        batch = shapes(self.batch)
        first = next(iter(batch.values()), (1,))
        found["script"] |= {
            "trainer": "",
            "micro_batch": int(sized or first[0]),
            "accumulation": max(1, accumulation),
            "own": {
                "dataloader_drop_last": bool(loader.drop_last),
                **{name: self.precision == name for name in ("bf16", "fp16")},
                "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
                **splitting(self.accelerator),
            },
            "autocast": self.autocast.get(tuned, {}),
            "model": tuned,
            "own_optimizer": True,
            "by_turns": self._by_turns(),
            "own_split": fixed or own_split or counts,
            "loader": self.number,
            "loading": loading_of(loader, int(sized or first[0]), fixed=fixed or counts),
            "batch": shapes(longest_batch(loader, rows, loader.batch_size))
            if loader.batch_size and rows.longest
            else batch,
        }
        if fixed is None and blends_rows(loader, rows.longest):
            found["script"]["depends_on_rows"] = found["script"]["depends_on_rows"] or reasons.BLENDS
        return found
