"""A script that runs up to its Trainer, without a device; from there a process is forked for each trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autofit.costmodel.memory.parts import pack
from autofit.costmodel.scripts.trainer_source import TrainerSource
from autofit.costmodel.tracing import fake_run
from autofit.costmodel.tracing.shard_layout import Layout, layout_of
from autofit.costmodel.tracing.source import prepared
from autofit.costmodel.tracing.timeline import Tape, UnlikeError
from autofit.costmodel.tracing.trace_job import alone_tape, micro_part, optimizer_part, save
from autofit.registry import recipe_of
from autofit.system.errors import AutofitError, ModelError
from autofit.system.job import error_words
from autofit.training.scripts.entry import keep_quiet, on_the_cpu, quiet
from autofit.training.scripts.leave import Enough, Left, Refused, run_until_left
from autofit.training.scripts.patches import Patches, loads_of
from autofit.training.scripts.plain_loop.autocast import autocast_of_gpus
from autofit.training.scripts.snapshot import without_monitor

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script
    from autofit.costmodel.memory.parts import MicroPart
    from autofit.costmodel.scripts.loop_source import LoopSource
    from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests

_LONGEST_TRACE = 300
_APART = 0.05
"""How far a trace of any number of rows may be off one of the script's own number, which is made to check it."""
UNLIKE = 3
UNSAFE = 4
"""Exit codes: layers that were taken to be alike are not; the script can't be forked."""


def report(folder: Path, request: TraceRequest) -> Path:
    """The file that says why a request failed."""
    return folder / f"failed-{Path(request.file).stem}.txt"


def in_child(run: Callable[[], int]) -> int:
    """The exit code of a process that is forked to run something."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run()
        except BaseException:  # noqa: BLE001 - the top of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Snapshot:
    """One run of a script up to its Trainer, and the traces that are forked from there.

    Args:
        job: What to trace, of which script.
        requests: Those of one way of loading the model; a single one is traced in the same process.
        folder: Where the script and the traces may write.
    """

    def __init__(self, job: TraceRequests, requests: tuple[TraceRequest, ...], folder: Path) -> None:
        assert job.facts.workload.script is not None
        self.job, self.requests, self.folder = job, requests, folder
        self.script: Script = job.facts.workload.script
        self.request: TraceRequest | None = None
        self.contexts = contextlib.ExitStack()  # never left: the process ends with its trace
        self.whole = self.is_alone = False
        self.layout = Layout()
        self.recipe: Recipe
        self.patches = Patches(
            train=self._trained,
            call=self.script.call,
            construct=on_the_cpu(folder),
            quiet=quiet(),
            loads=loads_of(recipe_of(requests[0].plan, job.facts)),
            before_trainer=self._fork,
            draws=False,
        )

    def run(self) -> int:
        """Run the script; the exit code of this process."""
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as each trace has it
        keep_quiet()
        without_monitor()
        self.install()
        try:
            run_until_left(self.script.path, self.script.arguments)
        except Enough as enough:
            return int(enough.found)
        except (AutofitError, Refused) as error:
            return self.failed(error)
        return 1

    def install(self) -> None:
        """Put into transformers and PyTorch what the script is run with."""
        self.patches.install()
        if self.job.facts.hardware.device != "cpu":
            autocast_of_gpus()

    def failed(self, error: AutofitError | Refused) -> int:
        """Tell why the script was not traced; the exit code of this process."""
        for request in (self.request,) if self.request else self.requests:
            report(self.folder, request).write_text(error.message, "utf-8")
        return 1

    def _fork(self) -> None:
        """Trace each request in a fork; only those come back from here, each with its plan put in."""
        if self.request is not None:
            return
        if len(self.requests) > 1 and threading.active_count() > 1:
            raise Enough(UNSAFE)
        if len(self.requests) == 1:
            self._become(self.requests[0], whole=True)
            return
        waiting: list[tuple[TraceRequest, bool]] = [(request, False) for request in reversed(self.requests)]
        running: dict[int, TraceRequest] = {}
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                request, whole = waiting.pop()
                child = os.fork()
                if child == 0:
                    self._become(request, whole=whole)
                    return
                running[child] = request
            child, status = os.wait()
            done = running.pop(child, None)
            if done is not None and os.waitstatus_to_exitcode(status) == UNLIKE:
                waiting.append((done, True))
        raise Enough(0)

    def _become(self, request: TraceRequest, *, whole: bool) -> None:
        """Have this process trace one request where the script begins to train."""
        self.request, self.whole = request, whole
        scratch = self.scratch
        scratch.mkdir(exist_ok=True)
        self.layout = layout_of(recipe_of(request.plan, self.job.facts))
        of_optimizer = request.part == "optimizer"
        if self.layout.gathers_late and not of_optimizer:
            self._trace_alone()
        signal.alarm(_LONGEST_TRACE)
        micro_steps = 1 if of_optimizer or self.is_alone else 2
        apart = of_optimizer and not self.layout.zero
        self.recipe = self.contexts.enter_context(
            prepared(request.plan, self.job.facts, scratch, alone=apart, accumulation=micro_steps)
        )
        on_cpu = self.recipe.emission.training_args["use_cpu"]  # not where an engine is to be made
        self.patches.construct = {**on_the_cpu(scratch), "use_cpu": on_cpu}
        self.patches.tuned = {
            **self.recipe.emission.training_args,
            "gradient_accumulation_steps": micro_steps,
            "output_dir": str(scratch),
        }
        self.patches.environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    def _trace_alone(self) -> None:
        """Trace the only micro-step of an optimizer step in a fork, which goes on from here; wait for it."""
        child = os.fork()
        if child == 0:
            self.is_alone = True
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise Enough(UNLIKE if code == UNLIKE else 1)

    def _trained(self, trainer: Any, train: Callable[[], Any]) -> Any:
        """Trace the request, where the script would train."""
        assert self.request is not None
        raise Enough(self.traced(self.request, TrainerSource(self.recipe, self.script, trainer, train)))

    def traced(self, request: TraceRequest, source: TrainerSource | LoopSource) -> int:
        """Trace a request; the exit code of this process."""
        try:
            self._trace(request, source)
        except UnlikeError:
            return UNLIKE
        except Left:
            raise
        except Exception as error:  # noqa: BLE001 - a script's own code can raise anything; it is told
            traceback.print_exc()
            report(self.folder, request).write_text(error_words(error), "utf-8")
            return 1
        return 0

    @property
    def scratch(self) -> Path:
        """Where this process's trace may write."""
        assert self.request is not None
        return self.folder / Path(self.request.file).stem

    def save(self, request: TraceRequest, part: MicroPart) -> None:
        """Leave the micro-steps of a request in its file."""
        save(self.job, request, pack(part, None))

    def _trace(self, request: TraceRequest, source: TrainerSource | LoopSource) -> None:
        config, scratch, facts = Path(self.job.config), self.scratch, self.job.facts
        if self.layout.splits and isinstance(source, TrainerSource) and source.trainer.optimizer is not None:
            raise ModelError("an optimizer that is made before the weights are split can't be traced")
        if self.is_alone:
            self.fork_for_each_padding(source)
            tape = alone_tape(request.plan, facts, config, scratch, source=source, whole=self.whole)
            self.keep_alone(tape, source)
        elif request.part == "micro_steps":
            trace = functools.partial(micro_part, request.plan, facts, config, scratch, source=source, whole=self.whole)
            several = int(request.plan["micro_batch"]) > 1
            exact = self._most_padded(source, lambda: peak_of(trace(any_rows=False), 0)) if several else None
            found = dataclasses.replace(trace(), alone=self.alone(source))
            if several:
                check(found, exact, self.own_micro_batch)
            self.save(request, found)
        else:
            unused = self._unused(source)
            part = optimizer_part(request.plan, facts, config, scratch, source=source, unused=unused)
            save(self.job, request, pack(None, part))

    def _most_padded(self, source: TrainerSource | LoopSource, trace: Callable[[], float]) -> float | None:
        """The peak of the script's own number of rows, padded or not as takes more, which the source is told."""
        peaks: dict[bool, float | None] = {}
        for one in source.paddings():
            source.padded = one
            peaks[one] = self._of_own_rows(source, trace)
        source.padded = most(peaks)
        return peaks[source.padded]

    def fork_for_each_padding(self, source: TrainerSource | LoopSource) -> None:
        """Have a fork of this process trace each padding that may come, one after the other, and this one the last."""
        *others, last = source.paddings()
        for one in others:
            source.padded = one
            child = os.fork()
            if child == 0:
                return
            os.waitpid(child, 0)
        source.padded = last

    def keep_alone(self, tape: Tape, source: TrainerSource | LoopSource) -> None:
        """Leave the only micro-step of an optimizer step, which a fork has traced."""
        arrays: dict[str, Any] = dict(tape.arrays())
        np.savez(self.scratch / f"alone-{source.padded}.npz", **arrays)

    def alone(self, source: TrainerSource | LoopSource) -> Tape | None:
        """The micro-step that was traced by itself, where it is another one than the last of several."""
        if not self.layout.gathers_late:
            return None
        with np.load(self.scratch / f"alone-{source.padded}.npz") as arrays:
            return Tape.from_arrays(arrays)

    def _unused(self, source: TrainerSource | LoopSource) -> frozenset[str]:
        """The parameters of the script's model that get no gradient; none are known where a step can't be traced."""
        assert self.request is not None
        job, plan, scratch = self.job, self.request.plan, self.scratch
        trace = functools.partial(fake_run.unused, plan, job.facts, config=Path(job.config), folder=scratch)
        return frozenset(self._of_own_rows(source, lambda: [*trace(source=source, whole=self.whole)]) or ())

    @property
    def own_micro_batch(self) -> int:
        """Rows of a micro-batch of the script's own, two at the least."""
        return max(2, self.script.micro_batch)

    def _of_own_rows(self, source: TrainerSource | LoopSource, trace: Callable[[], object]) -> Any:
        """What a trace of the script's own number of rows gives, made in a fork; ``None`` where that failed.

        Raises:
            UnlikeError: The same as of any number of rows.
        """

        def traced() -> int:
            source.recipe.micro_batch = self.own_micro_batch
            source.evaluates = False  # that is told by the trace of any rows
            try:
                self.tell_own_rows(trace())
            except UnlikeError:
                return UNLIKE
            return 0

        return self.told_of_own_rows(in_child(traced))

    def tell_own_rows(self, found: object) -> None:
        """Leave what was found in a fork."""
        (self.scratch / "own-rows.json").write_text(json.dumps(found), "utf-8")

    def told_of_own_rows(self, code: int) -> Any:
        """What a fork has left that ended with a code; ``None`` where it failed.

        Raises:
            UnlikeError: Layers that were taken to be alike are not.
        """
        if code == UNLIKE:
            raise UnlikeError("layers are not alike")
        return json.loads((self.scratch / "own-rows.json").read_text("utf-8")) if code == 0 else None


def peak_of(part: MicroPart, rows: int) -> float:
    """Peak bytes of a second micro-step of so many rows, the weights and gradients among them."""
    return part.held_bytes + float(part.peaks(np.array([float(rows)]), adding=True)[0][0])


def most(peaks: Mapping[bool, float | None]) -> bool:
    """Which padding takes most, by the peak of each; a trace that has failed has none."""
    return max(peaks, key=lambda one: peaks[one] or 0.0)


def check(part: MicroPart, exact: float | None, rows: int) -> None:
    """Refuse a trace that does not hold for another number of rows: the script's step does not grow with them.

    Raises:
        ModelError: It does not.
    """
    if exact is None:
        raise ModelError(f"a step of {rows} rows can't be traced: its trace failed or was killed")
    said = peak_of(part, rows)
    if not abs(said - exact) <= _APART * exact:
        raise ModelError(
            f"the memory of the script's step does not grow evenly with its rows: {rows} rows need {exact:,.0f} bytes, "
            f"and their growth says {said:,.0f}"
        )
