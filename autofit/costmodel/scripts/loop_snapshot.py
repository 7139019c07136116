"""Traces of a script that trains in a plain loop: it runs once up to where it prepares, and is forked there.

The script's own statements compute the loss, so that a trace of the micro-steps can't call them: it begins where the
script takes its first batch, or where its weights are about to be split; hands it batches of fake tensors, hears of
each part by what is put into Accelerate, and ends where the last backward pass does. The Accelerator is made anew in
each fork, with the plan's precision, accumulation and engine. The optimizer's step is traced by itself, with gradients
that are given.

Not traced: what the loop does beside forward, backward and the optimizer's step, such as an evaluation or an average
of the weights (EMA) that it steps; clipping, which takes less than a megabyte.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autofit.costmodel.scripts.loop_source import LoopSource
from autofit.costmodel.scripts.snapshot import UNLIKE, Snapshot, check, most, peak_of, report
from autofit.costmodel.tracing import fake_run
from autofit.costmodel.tracing.layers import TraceDone
from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.timeline import UnlikeError
from autofit.costmodel.tracing.trace_job import part_of
from autofit.system.errors import AutofitError, ModelError
from autofit.system.job import error_words
from autofit.training.scripts.leave import Enough, Refused, refusing_to_generate
from autofit.training.scripts.plain_loop.patches import LoopPatches, constructed

if TYPE_CHECKING:
    from autofit.costmodel.scripts.known_values import KnownValues
    from autofit.costmodel.tracing.fake_run import Stepping
    from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests

_GENERATES = Refused(
    "its loop has a model generate, which takes as many steps as their values say, and a trace has none",
    "autofit tune measures it",
)


class LoopSnapshot(Snapshot):
    """One run of a script up to where its loop prepares, and the traces that are forked from there.

    Args:
        job, requests, folder: As for :class:`Snapshot`.
    """

    def __init__(self, job: TraceRequests, requests: tuple[TraceRequest, ...], folder: Path) -> None:
        super().__init__(job, requests, folder)
        self.patches.before_trainer = lambda: None
        self.loop = LoopPatches()
        self.accelerator: Any = None
        self.models: list[nn.Module] = []
        self.loader: Any = None
        self.moved: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.sent = WeakTensorKeyDictionary()
        self.steps: Stepping | None = None
        self.begun: tuple[LoopSource, KnownValues | None] | None = None
        self.taken = False
        self.of_own_rows = False
        """Whether this process traces the script's own rows, for the one that it was forked from."""
        self.own: Any = None
        """What it has told: the peak, or the parameters that get no gradient."""
        self.stack = contextlib.ExitStack()

    def install(self) -> None:
        """Put into transformers and Accelerate what the script is run with."""
        super().install()
        self._hear_of_devices()
        self.loop = LoopPatches(
            construct=self._constructed,
            before_prepare=self._before_prepare,
            loader=self._keep_loader,
            model=self._keep_model,
            preparing=self._preparing,
            batches=self._batches,
            micro_step_begins=lambda *_: self._begins(),
            before_backward=lambda *_: self._before_backward(),
            after_backward=lambda _, loss: self._after_backward(loss),
        )
        self.loop.install()

    def failed(self, error: AutofitError | Refused) -> int:
        """Tell why a trace failed: where it has begun, what the script raised is no matter of the script's."""
        if self.steps is None or self.request is None or error.__cause__ is None:
            return super().failed(error)
        if not self.whole:
            return UNLIKE  # it may need the layers that were left out
        report(self.folder, self.request).write_text(error_words(error.__cause__), "utf-8")
        return 1

    def _trained(self, trainer: Any, train: Any) -> Any:
        raise Refused("the script calls train() of a Trainer, where it trained in a loop before", "tune it again")

    # -- up to the loop -----------------------------------------------------------------------------------------------

    def _hear_of_devices(self) -> None:
        """Note which modules and tensors the script puts onto a device."""
        own, own_of_tensors, moved, sent = nn.Module.to, torch.Tensor.to, self.moved, self.sent

        def onto(*args: Any, device: Any = None, **_: Any) -> bool:
            return any(isinstance(one, str | torch.device) for one in (*args, device))

        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if onto(*args, **kwargs):
                moved.add(module)
            return own(module, *args, **kwargs)

        def tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            made = own_of_tensors(tensor, *args, **kwargs)
            if self.steps is None and onto(*args, **kwargs):
                sent[made] = True
            return made

        nn.Module.to = to  # type: ignore[method-assign, assignment]
        torch.Tensor.to = tensor_to  # type: ignore[method-assign, assignment]

    def _constructed(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.request is None:
            return {**given, "cpu": True, "mixed_precision": "no"}
        changed = constructed(given, self.recipe, accumulation=self._accumulation)
        return {**changed, "cpu": not self._splits}  # on a CPU Accelerate leaves engines out

    @property
    def _splits(self) -> bool:
        """Whether this process's trace is one of weights that are split, and so begins where they are."""
        assert self.request is not None
        return self.layout.splits and self.request.part == "micro_steps"

    @property
    def _accumulation(self) -> int | None:
        if self.is_alone:
            return 1
        return None if self.script.own_split and not self._splits else 2

    def _before_prepare(self, accelerator: Any, given: dict[str, Any]) -> None:
        """Fork once for each trace, and have this process's Accelerator be the plan's."""
        if self.request is not None:
            return
        self._fork()
        self.loop.accumulation = self._accumulation
        accelerator.__init__(**given)
        self.accelerator = accelerator

    def _keep_loader(self, own: Any, number: int) -> Any:
        if number == self.script.loader:
            self.loader = own
        return own

    def _keep_model(self, own: Any, number: int) -> Any:
        for around in self.recipe.model_wraps if number == self.script.model else ():
            own = around(own)
        self.models.append(own)
        self.whole = self.whole or number > 0
        return own

    def _preparing(self, objects: list[Any]) -> None:
        """Begin where the weights are about to be split, so that the engine splits fake ones."""
        if self._splits and any(isinstance(one, nn.Module) for one in objects):
            self._begin([one for one in objects if isinstance(one, torch.optim.Optimizer)])

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _batches(self, number: int, own: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader; of that which is trained on, fake ones, while the micro-steps are traced."""
        if number != self.script.loader or self.taken:
            yield from own
            return
        self.taken = True
        optimizers = self.accelerator._optimizers  # noqa: SLF001 - there is no other list of them
        source, known = self.begun or self._begin(optimizers)
        if known is not None:
            self.stack.enter_context(known)
        for optimizer in optimizers:  # gradients stay for the second micro-step, wherever the script steps
            optimizer.step = optimizer.zero_grad = lambda *_, **__: None
        while True:
            yield source.fresh(known)

    def _begin(self, optimizers: list[Any]) -> tuple[LoopSource, KnownValues | None]:
        """Begin to trace micro-steps, or trace the optimizers' step and leave; models and optimizers become fake."""
        assert self.request is not None
        request, facts, alone = self.request, self.job.facts, self.request.part == "optimizer"
        with self._told():
            if self.loader is None:
                raise ModelError(
                    "a loop that prepares its loader after its model isn't traced if the weights are split"
                )
            if self.script.by_turns:
                raise ModelError(
                    "a loop that steps its optimizers by turns isn't traced: a trace would hold one of them"
                )
            source = LoopSource(
                self.recipe, self.script, optimizers=optimizers, models=self.models, loader=self.loader,
                moved=self.moved, sent=self.sent,
            )  # fmt: skip
        if self.is_alone:
            self.fork_for_each_padding(source)
        elif alone:
            self._trace_own_rows()
        elif int(request.plan["micro_batch"]) > 1:
            self._trace_each_padding(source)
        if alone and not self.of_own_rows:
            raise Enough(self.traced(request, source))
        stepping = fake_run.stepping(
            request.plan, facts, source,
            whole=self.whole, accumulation=1 if self.is_alone else 2, any_rows=not self.of_own_rows,
        )  # fmt: skip
        with self._told():
            self.steps = self.stack.enter_context(stepping)
            known = source.stand_ready(self.steps.model, self.steps.marks, optimizers, fake=True)
            self.stack.enter_context(refusing_to_generate(_GENERATES))
        self.begun = source, known
        return self.begun

    def _trace_each_padding(self, source: LoopSource) -> None:
        """Trace the script's own number of rows, padded or not; the source is told which of both takes more."""
        peaks: dict[bool, float | None] = {}
        for one in source.paddings():
            source.padded = one
            self._trace_own_rows()
            if self.of_own_rows:
                return
            peaks[one] = self.own
        source.padded = most(peaks)
        self.own = peaks[source.padded]

    def _trace_own_rows(self) -> None:
        """Trace the script's own number of rows in a fork, which goes on from here."""
        child = os.fork()
        if child == 0:
            self.of_own_rows, self.recipe.micro_batch = True, self.own_micro_batch
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            self.own = self.told_of_own_rows(code)
        except UnlikeError:
            raise Enough(UNLIKE) from None

    def _unused(self, source: Any) -> frozenset[str]:
        return frozenset(self.own or ())

    def _begins(self) -> None:
        if self.steps is not None:
            marks = self.steps.marks
            if not marks.accumulated:
                marks.step_begin()
            marks.forward_begin()

    def _before_backward(self) -> None:
        if self.steps is not None:
            self.steps.marks.forward_end()

    def _after_backward(self, loss: Any) -> None:
        if self.steps is None:
            return
        try:
            self.steps.marks.backward_end(loss)
        except TraceDone:
            with self._told():
                self._finish(self.steps)
            raise Enough(0) from None

    def _finish(self, steps: Stepping) -> None:
        """Leave what was traced."""
        assert self.request is not None
        self.stack.close()
        assert steps.found is not None
        assert self.begun is not None
        source, _ = self.begun
        tape = lengthen(steps.found.tape, steps.found.copies)
        if self.is_alone:
            self.keep_alone(tape, source)
            return
        part = part_of(steps.found, tape, alone=self.alone(source))
        if self.of_own_rows:
            alone = self.request.part == "optimizer"
            self.tell_own_rows([*steps.found.unused] if alone else peak_of(part, 0))
            return
        if int(self.request.plan["micro_batch"]) > 1:
            check(part, self.own, self.own_micro_batch)
        self.save(self.request, part)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Leave the script where its trace can't be made, and say why.

        Raises:
            Enough: It can't.
        """
        try:
            yield
        except UnlikeError:
            raise Enough(UNLIKE) from None
        except AutofitError as error:
            assert self.request is not None
            report(self.folder, self.request).write_text(error.message, "utf-8")
            raise Enough(1) from None
