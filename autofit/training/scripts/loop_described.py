"""What is told of a script's plain loop before it trains: which batches it trains on, and how it steps."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.training.scripts.leave import Enough, Refused
from autofit.training.scripts.loading import loading_of, splitting
from autofit.training.scripts.loop import LoopPatches
from autofit.training.scripts.patches import Patches
from autofit.training.scripts.rows import sample_of
from autofit.training.scripts.traits import longest_batch, shapes, traits

_MANUAL = "it does not train in `with accelerator.accumulate(model):`, so how often it steps is its own"
_LOADER = "its loader makes its micro-batches itself"
_SEVERAL = "it takes the batches of several loaders together"
_BY_HAND = "it asks for each batch by itself, as by next(), so how many it takes is its own"
_AHEAD = "it takes several batches before it trains on the first, so how many is its own"
_ENGINES = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
_CLEARS = "it clears its gradients by model.zero_grad(), which does not wait until they have accumulated"


def describing(path: str, patches: Patches, seconds: Callable[[], float]) -> LoopPatches:
    """What tells of a script's loop, and leaves the script once it is known how it steps.

    Where it trains in ``with accelerator.accumulate(model):`` its first backward pass tells that, and is not computed;
    it goes on until its next batch, or until it saves or evaluates, since it may call ``backward`` again before.
    """
    seen = _Described(patches, seconds)
    loop = LoopPatches(
        construct=seen.construct,
        loader=seen.loader,
        batches=seen.batches,
        model=seen.model,
        micro_step_begins=seen.begins,
        micro_step_ends=seen.leave,
        goes_on=seen.leave,
        before_backward=lambda accelerator, _: seen.before_backward(accelerator, loop),
        computes=lambda: not loop.accumulates,
        after_step=seen.after_step,
        foreign=lambda: bool(patches.made),
    )
    _refuse_loops_of_its_own(path, lambda: bool(patches.made or loop.steps), lambda: bool(seen.precision))
    return loop


@dataclass(slots=True)
class _Described:
    """What a loop has shown of itself until it is known how it steps."""

    patches: Patches
    seconds: Callable[[], float]
    loaders: dict[int, Any] = field(default_factory=dict)
    trained: Any = None
    precision: str = ""
    splits: dict[str, bool] = field(default_factory=dict)
    number: int | None = None
    """Of the loader that gave the last batch."""
    batch: Any = None
    by_hand: bool = False
    """Whether the script has asked for that one by itself, and not in a loop over its loader."""
    taken: int = 0
    """Batches that it has taken of its loader before its first backward pass."""
    clears: bool = False
    """Whether it clears the model's gradients itself, while it trains."""
    untrained: int = 0
    """Those of them that had no backward pass."""
    between: int = 0
    """Backward passes since the last optimizer step."""
    before: int = 0
    """Backward passes before it."""
    steps: int = 0
    found: dict[str, Any] | None = None
    """What would be trained, where the first backward pass has told all of it."""

    def construct(self, given: dict[str, Any]) -> dict[str, Any]:
        """The Accelerator of a CPU, which keeps nothing of what is asked of a device.

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
        return {**given, "cpu": True, "mixed_precision": "no"}

    def loader(self, own: Any, number: int) -> Any:
        """A loader is prepared."""
        self.loaders[number] = own
        return own

    def model(self, own: Any) -> Any:
        """The model is prepared; where it runs without gradients after its first backward pass, it is evaluated."""
        import torch

        self.trained = own
        own.register_forward_pre_hook(lambda *_: None if torch.is_grad_enabled() else self.leave())
        clear = own.zero_grad

        @functools.wraps(clear)
        def cleared(*args: Any, **kwargs: Any) -> None:
            self.clears = self.number is not None
            clear(*args, **kwargs)

        own.zero_grad = cleared
        return own

    def leave(self, *_: Any) -> None:
        """The script goes on: to its next batch, to evaluate or to save."""
        if self.found is not None:
            if self.clears:
                self.found["script"]["own_split"] = self.found["script"]["own_split"] or _CLEARS
            raise Enough(self.found)

    def begins(self, number: int, batch: Any) -> None:
        """A loader has given a batch."""
        self.leave()
        self.number, self.batch, self.by_hand = number, batch, _asked_by_hand()
        self.taken += not self.before + self.between
        self.untrained += 1

    def batches(self, _number: int, batches: Iterator[Any]) -> Iterator[Any]:
        """A loop over a loader begins: what was taken before is no matter."""
        self.taken = self.untrained = 0
        return batches

    def before_backward(self, accelerator: Any, loop: LoopPatches) -> None:
        """The loss is there.

        Raises:
            Refused: No plan can be put into such a loop.
        """
        if not accelerator._optimizers:  # noqa: SLF001 - there is no other
            raise Refused(
                "the script trains by an optimizer that it has not given to accelerator.prepare",
                "give it: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        self.splits = splitting(accelerator)
        self.between += 1
        self.untrained -= 1
        if self.untrained < 0 and self.number is not None:
            raise Refused(
                "the script calls backward() several times for one batch of its loader: a plan counts these as batches",
                "add its losses up and call backward() once for each batch, or let the loader give smaller batches",
            )
        if loop.accumulates:
            own_split = _SEVERAL if loop.iterated > 1 else self._counts_batches()
            self.found = self._told(accelerator.gradient_accumulation_steps, own_split)

    def after_step(self, _optimizer: Any) -> None:
        """An optimizer has stepped: a second one without another backward pass belongs to the same step.

        Raises:
            Enough: It is known how often it steps.
            Refused: It trains by other gradients.
        """
        if self.found is not None:
            return
        self.steps += 1
        if self.before and self.between:
            raise Enough(self._told(self.between, _MANUAL))
        if self.steps > 1 and not (self.before or self.between):
            raise Refused(
                "the script takes its gradients without its Accelerator",
                "call accelerator.backward(loss) where it calls loss.backward()",
            )
        self.before, self.between = self.before + self.between, 0
        self.untrained = min(self.untrained, 1)  # one that was taken ahead

    def _counts_batches(self) -> str | None:
        """Why how many batches a step takes is the script's own, in words; ``None`` where its loop takes all."""
        return _BY_HAND if self.by_hand else _AHEAD if self.taken > 1 else None

    def _told(self, accumulation: int, own_split: str | None) -> dict[str, Any]:
        """All of it.

        Raises:
            Refused: It trains on what no plan can be put into.
        """
        import torch

        if self.number is None or self.trained is None:
            raise Refused(
                "the script trains on a loader or a model that it has not given to accelerator.prepare",
                "give both to it: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        loader = self.loaders[self.number]
        rows = sample_of(loader.dataset, loader.collate_fn)
        found = traits(self.patches, self.trained, rows, self.seconds())
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
                **self.splits,
            },
            "own_optimizer": True,
            "own_split": _LOADER if loader.batch_size is None else own_split,
            "loader": self.number,
            "loading": loading_of(loader, int(sized or first[0]), own_batches=loader.batch_size is None),
            "batch": shapes(longest_batch(loader, rows, loader.batch_size))
            if loader.batch_size and rows.longest
            else batch,
        }
        return found


def _asked_by_hand() -> bool:
    """Whether the batch that a loader gives now was asked for by a call, such as ``next``, and not by a ``for``."""
    frame = sys._getframe(2).f_back  # noqa: SLF001 - there is no other; what has the loader's generator go on
    while frame is not None:
        if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
            if frame.f_code.co_name != "__next__":
                return True
        elif not frame.f_code.co_flags & inspect.CO_GENERATOR:  # which another one asks in its turn
            return False
        frame = frame.f_back
    return False


def _refuse_loops_of_its_own(path: str, known: Callable[[], bool], accelerated: Callable[[], bool]) -> None:
    """Leave a script where its first optimizer step is neither a Trainer's nor an Accelerator's.

    Such a loop would train to its end. Where the script's text takes a Trainer or an Accelerator from elsewhere, and
    prepares something with that, it may come before these.

    Args:
        path: Of the script.
        known: Whether it has made a Trainer, or an optimizer of an Accelerator's steps now.
        accelerated: Whether it has made an Accelerator.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken = functools.cache(lambda: _taken(path))  # each of its steps asks

    def stepped(*_: Any) -> None:
        if not (known() or _may_train_later(*taken(), accelerated=accelerated())):
            raise Refused(
                f"{Path(path).name} trains in a loop without Accelerate, into which no plan can be put",
                "have an Accelerator prepare model, optimizer and loader, and call its backward(loss); or write a "
                "function that returns the model, its batches and its loss: autofit tune my.nets:make",
            )

    register_optimizer_step_post_hook(stepped)


def _taken(path: str) -> tuple[list[tuple[str, str]], bool]:
    """What a script's text takes from which modules, and whether it prepares anything."""
    nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    named = {
        alias.asname or alias.name: alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names
    }
    attributes = [one for one in nodes if isinstance(one, ast.Attribute)]
    taken = [(named.get(ast.unparse(one.value)), one.attr) for one in attributes]
    taken += [(one.module, alias.name) for one in nodes if isinstance(one, ast.ImportFrom) for alias in one.names]
    prepares = any(one.attr.startswith("prepare") for one in attributes)
    return [(module, name) for module, name in taken if module], prepares


def _may_train_later(taken: list[tuple[str, str]], prepares: bool, *, accelerated: bool) -> bool:
    """Whether a script takes a Trainer of transformers, or an Accelerator that prepares something."""
    kinds = {kind for module, name in taken for kind in _trainers(module, name)}
    return "Trainer" in kinds or (prepares if "Accelerator" in kinds else accelerated)


def _trainers(module: str, name: str) -> Iterator[str]:
    """Which of Trainer and Accelerator a name of a module is; what is not imported yet may be what it is called."""
    from accelerate import Accelerator
    from transformers import Trainer

    there = sys.modules.get(module)
    for one in dir(there) if name == "*" else [name]:
        if not one.endswith(("Trainer", "Accelerator")):
            continue
        kind = getattr(there, one, None)
        for known in (Trainer, Accelerator):
            if issubclass(kind, known) if isinstance(kind, type) else one.endswith(known.__name__):
                yield known.__name__
