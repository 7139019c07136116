"""A script that has run up to its first Trainer, without touching a device; trials are forked from it there.

What a plan says where a model is loaded comes before that, so trials share a run only where their plans say the same
there. All else of a plan is put in after the fork. A script is not forked where a child would share what only one
process can use: a thread, a child process, a connection, a place in an open file, memory that others write to, a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import tqdm  # type: ignore[import-untyped]

from autofit.contract.technique import replacing
from autofit.machine.meters import Inheritance, warm_up_threads
from autofit.system.errors import AutofitError
from autofit.system.forking.imports import load_bitsandbytes
from autofit.system.job import error_words
from autofit.training.measure import concluded
from autofit.training.scripts.entry import construct, measured_at, put_in, quiet, rows_words
from autofit.training.scripts.leave import Enough, Refused, run_until_left
from autofit.training.scripts.patches import Patches, loads_of

if TYPE_CHECKING:
    from autofit.contract.facts import Hardware
    from autofit.contract.outcome import Evidence, Outcome
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script
    from autofit.training.timing import Clock

_PROBE_SECONDS = 60.0

Begin = Callable[[Path, Inheritance], "tuple[Clock, Mapping[str, str]]"]
"""Given a trial's folder, in its process, and what that has inherited: its clock, and the variables of its launch."""


@dataclass(slots=True, kw_only=True)
class ScriptSnapshot:
    """One run of a script up to its first Trainer, and the trials that are forked from there.

    Attributes:
        recipe: Of a plan that says what all of the trials' say where a model is loaded.
        folder: Where the script may write until then.
        threads: That a trial computes with.
        next_job: Waits until a trial is forked; returns in its process, with its folder.
        begin: Called there.
        own: The trial's folder, in its process.
        clock: What listens to the trial, in its process, once it has begun.
    """

    recipe: Recipe
    folder: Path
    threads: int
    next_job: Callable[[], Path]
    begin: Begin
    own: Path | None = None
    clock: Clock | None = None
    _patches: Patches = field(init=False)
    _inherited: Inheritance = field(init=False)
    _kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _files: Mapping[int, str] = field(default_factory=dict)
    _shared: frozenset[str] = frozenset()
    _touched: list[str] = field(default_factory=list)
    _asked: bool = False

    @property
    def script(self) -> Script:
        """The script."""
        found = self.recipe.facts.workload.script
        assert found is not None
        return found

    def run(self) -> Any:
        """Run the script.

        Returns:
            In a trial's process its evidence, or the error that it ended by; else why no trial can be forked, in words.
        """
        import torch

        script, hardware = self.script, self.recipe.facts.hardware
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        try:
            if hardware.device == "cuda":
                self._touched = self._kept.enter_context(off_the_device(hardware, script.path))
            self._prepare(hardware.device == "cuda")
            run_until_left(script.path, script.arguments, measured=True)
        except Enough as enough:
            return enough.found
        except (Exception, Refused) as error:  # noqa: BLE001 - it is told, or raised again as the trial's own
            if self.own is not None:
                return error
            if not isinstance(error, AutofitError | Refused):
                traceback.print_exc()
            return error.message if isinstance(error, AutofitError | Refused) else f"it fails: {error_words(error)}"
        raise AssertionError("a script was left without a reason")

    def outcome(self, found: Evidence | BaseException) -> Outcome:
        """A trial's outcome, given what :meth:`run` has returned in its process.

        Raises:
            Exception: What the trial has ended by, where that is none of the expected failures.
        """

        def evidence() -> Evidence:
            if isinstance(found, BaseException):
                raise found
            return found

        if self.clock is None:  # it has not begun
            evidence()
        assert self.clock is not None
        return concluded(self.clock, evidence, words=rows_words(self.script))

    def _prepare(self, on_cuda: bool) -> None:
        load_bitsandbytes()
        from transformers import Trainer, utils

        _ = Trainer  # imported before the base of memory is read
        utils.logging.set_verbosity(logging.ERROR)
        without_monitor()
        tqdm.tqdm.set_lock(threading.RLock())  # its own is shared by forks: one that is killed would keep it
        if not on_cuda:  # autograd would start a thread for each GPU
            warm_up_threads()
        self._patches = Patches(
            train=self._train,
            call=self.script.call,
            quiet=quiet(),
            construct=construct(self.folder),
            loads=loads_of(self.recipe),
            before_trainer=self._fork,
        )
        self._patches.install()
        self._files, self._shared = _open_files(), frozenset(_shared_memory())
        self._inherited = Inheritance()

    def _fork(self) -> None:
        """Have trials forked from here, where the script makes its first Trainer; only they come back."""
        if self._asked:
            return
        self._asked = True
        self._inherited.leave()
        why = self._unsafe()
        if why is not None:
            raise Enough(why)
        self.own = self.next_job()
        self._kept.close()
        self._inherited.take()
        try:
            self.clock, environment = self.begin(self.own, self._inherited)
        except Exception as error:
            raise Enough(error) from error
        put_in(self._patches, self.clock, folder=self.own, environment=environment)

    def _train(self, trainer: Any, train: Callable[[], Any]) -> Any:
        assert self.clock is not None
        raise Enough(measured_at(self.clock, self.script, trainer, train))

    def _unsafe(self) -> str | None:
        """Why the script can't be forked here, in words; ``None`` where it can."""
        if self._touched:  # and the script has caught it
            return self._touched[0]
        when = "when it begins to train"
        close_hub = getattr(sys.modules.get("huggingface_hub"), "close_session", None)
        if close_hub is not None:
            close_hub()  # it is opened again where it is used
        others = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
        if others:
            return f"a thread of its own runs {when} ({', '.join(others)})"
        children = psutil.Process().children()
        if children:
            return f"a process that it has started runs {when}"
        for handle, name in _open_files().items():
            if self._files.get(handle) != name and (words := _shared_by_children(handle, name)):
                return f"{words} is open {when}"
        if {*_shared_memory()} - self._shared:
            return f"memory that other processes write to is mapped {when}"
        return _forked_otherwise(self._probe)

    def _probe(self) -> None:
        """Compute in a fork as a trial would: what hangs or fails there is not tried."""
        import torch

        self._kept.close()
        torch.set_num_threads(self.threads)
        warm_up_threads()
        _ = torch.ones(1 << 20).sum().item()
        if self.recipe.facts.hardware.device == "cuda":
            _ = torch.ones(2, device="cuda").sum().item()


def without_monitor() -> None:
    """Keep progress bars from starting a thread, beside which nothing is forked."""
    tqdm.tqdm.monitor_interval = 0


@contextlib.contextmanager
def off_the_device(hardware: Hardware, path: str) -> Iterator[list[str]]:
    """Leave a script that is about to use the GPU; what only asks what the GPU can do is answered as it would.

    Args:
        hardware: Has the GPU.
        path: Of the script.

    Returns:
        How the script was about to use it, in words, each time that it was left.
    """
    import torch
    from torch.utils import _triton

    touched: list[str] = []

    def refuse(*_: Any) -> Any:
        lines = [frame.lineno for frame in traceback.extract_stack() if frame.filename == path]
        touched.append(f"it uses the GPU before it trains{f' (line {lines[-1]})' if lines else ''}")
        raise Enough(touched[0])

    def set_device(device: Any) -> None:
        if torch.device(device).index:
            refuse()

    able = hardware.capability or (0, 0)
    ampere = able >= (8, 0)
    cuda: Any = torch.cuda
    changes: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_init", refuse),  # noqa: SLF001 - all else comes here
        (cuda, "set_device", set_device),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda *_: able),
        *([(cuda, "is_bf16_supported", lambda *_, **__: True)] if ampere else []),
        # torchao asks while it is imported, which transformers does where it is installed
        (_triton, "has_triton", lambda: able >= (7, 0) and _triton.has_triton_package()),
    ]
    with replacing(changes):
        from transformers import training_args

        with replacing([(training_args, "is_torch_tf32_available", lambda: ampere)]):
            yield touched


def _open_files() -> dict[int, str]:
    """What this process has open, by its number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that by which they are listed
            found[int(entry.name)] = str(entry.readlink())
    return found


def _shared_by_children(handle: int, name: str) -> str | None:
    """What is open that only one process can use, in words; ``None`` where others may use it, too."""
    if name.startswith("/dev/") and not name.startswith("/dev/shm/"):  # noqa: S108 - not a file that is made
        return "the GPU's driver" if "nvidia-uvm" in name else None
    if not name.startswith("/"):
        return {"socket": "a connection", "pipe": "a pipe"}.get(name.partition(":")[0], name)
    with contextlib.suppress(OSError):
        flags = next(
            int(line.split()[1], 8)
            for line in Path(f"/proc/self/fdinfo/{handle}").read_text("ascii").splitlines()
            if line.startswith("flags:")
        )
        if flags & os.O_ACCMODE == os.O_WRONLY or name in Path("/proc/self/maps").read_text("utf-8", "replace"):
            return None  # a log; or read as memory, without a place in it
        return name
    return None


def _shared_memory() -> Iterator[str]:
    """The mappings that this process and its children write to together."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        access, path = line.split(maxsplit=5)[1], line.split(maxsplit=5)[5:]
        if access[1] == "w" and access[3] == "s" and not "".join(path).startswith("/dev/nvidia"):
            yield line


def _forked_otherwise(run: Callable[[], None]) -> str | None:
    """Why something does not run in a fork of this process, in words; ``None`` where it does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:  # noqa: BLE001 - the top of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], _PROBE_SECONDS)
    os.close(handle)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not ended:
        return "a process that is forked from it hangs as soon as it computes"
    return None if status == 0 else "a process that is forked from it can't compute"
