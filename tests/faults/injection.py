"""The faults that a tune survives, each injected for real into the real command line, and what must hold after it.

Each fault is a function that is given an :class:`Arena`, brings the fault about, and checks what the tune made of it;
:func:`survives` then checks what must hold after any of them: no process and no temporary file is left, the journal
can be read, ``--resume`` goes on, and the answer is that of an undisturbed tune.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from autofit.contract.outcome import Crashed, Diverged, Measured, OutOfMemory, TimedOut
from autofit.system.statistics import spread
from autofit.training.runner import finished
from tests.support.scripted import tiny_bert
from tests.support.tiny import wait_until, write_config
from tests.support.warm import MARK, Warm

PATIENT = 240.0
WINNER = "16-off"
"""The trial that most faults hit: that of the plan which wins where nothing happens."""
CONSTANTS = {"MOST_REPEATS": 0, "LEAST_LIMIT_SECONDS": 6.0, "SLOWEST": 3}
CGROUPS = Path("/sys/fs/cgroup/memory")
OPTIONS = (
    "--fix", "precision=fp32", "--fix", "optimizer=adamw", "--fix", "attention=default", "--fix", "kernels=none",
    "--among", "micro_batch=1,4,16", "--sampler", "grid",
)  # fmt: skip


class Impossible(Exception):  # noqa: N818 - it becomes a skip
    """This machine does not let the fault be injected; the reason."""


class Place:
    """What many arenas share: a warm process, what is tuned, a cache of traces, and an undisturbed answer.

    A tiny Llama from its config is tuned, or a script, which trains a tiny BERT in as many rows a step.
    """

    def __init__(self, root: Path, script: Path | None = None):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        if script is None:
            self.target = [str(write_config(root / "tiny", vocab_size=1024)), "--seq-len", "32", "--global-batch", "16"]
            self.arguments: list[str] = []
        else:
            self.target = [str(script), "--fix", "loader=default"]
            self.arguments = ["--", "--model", str(tiny_bert(root / "tiny")), "--batch", "4", "--accumulate", "4"]
        self.script = script
        self.mark = uuid.uuid4().hex
        self.clock = root / "clock"
        self.clock.write_bytes(struct.pack("d", 0.0))
        given = {MARK: self.mark, "XDG_CACHE_HOME": str(root / "cache")}
        self.fake_clock = build_clock(root)
        if self.fake_clock:
            given |= {"LD_PRELOAD": str(self.fake_clock), "AUTOFIT_TEST_CLOCK": str(self.clock)}
        self.warm = Warm(root / "warm.log", given)
        self.count = itertools.count()
        self._undisturbed = None

    def arena(self, name: str) -> Arena:
        return Arena(self, self.root / f"{next(self.count):03d}-{re.sub('[^a-z0-9]+', '-', name.lower())[:40]}")

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock of all that the warm process starts."""
        with self.clock.open("r+b") as clock:  # in place: it is mapped
            clock.write(struct.pack("d", seconds))

    def undisturbed(self) -> dict:
        """Seconds by plan, and their spread, where nothing happens."""
        if self._undisturbed is None:
            arena = self.arena("undisturbed")
            tune = arena.start()
            assert tune.end() == 0, tune.said()
            steps: dict = {}
            for trial in arena.trials():
                if isinstance(trial.outcome, Measured):
                    steps.setdefault(trial.plan, []).extend(trial.outcome.steps)
            self._undisturbed = {plan: (min(found), spread(found)) for plan, found in steps.items()}
        return self._undisturbed

    def processes(self) -> list[psutil.Process]:
        """All that the warm process has started, and that they have, whoever their parent is now."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = one.environ().get(MARK) == self.mark and one.pid != self.warm.process.pid
                if ours and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def close(self) -> None:
        for one in self.processes():
            with contextlib.suppress(psutil.Error):
                one.kill()
        self.warm.close()


class Tune:
    """A command that runs."""

    def __init__(self, arena: Arena, pid: int, out: Path, err: Path):
        self.arena, self.pid, self.out, self.err = arena, pid, out, err

    def end(self, seconds: float = PATIENT) -> int:
        found = self.arena.place.warm.status(self.pid, seconds)
        assert found is not None, f"the tune did not end: {self.said()[-2000:]}"
        return found

    def running(self) -> bool:
        return self.arena.place.warm.status(self.pid, 0.01) is None

    def said(self) -> str:
        return self.err.read_text("utf-8", "replace") if self.err.is_file() else ""

    def printed(self) -> str:
        return self.out.read_text("utf-8", "replace") if self.out.is_file() else ""


class Arena:
    """A folder of its own for one fault."""

    def __init__(self, place: Place, root: Path):
        self.place, self.root = place, root
        self.output, self.scripts, self.tmp = root / "out", root / "scripts", root / "tmp"
        for folder in (self.scripts, self.tmp):
            folder.mkdir(parents=True)
        self.undo = contextlib.ExitStack()
        self.count = itertools.count()
        self.options: tuple[str, ...] = ("--memory-limit", "1GiB", "--no-guard")
        self.space: tuple[str, ...] = ("--among", "checkpointing=off")
        self.group: str | None = None
        self.seen = ""
        """What the user saw, in the tune's own words."""
        self.words = ""
        """What these have to match."""

    @property
    def forks(self) -> bool:
        """Whether trials are forked from a run of a script."""
        return self.place.script is not None and "Trainer" in self.place.script.read_text("utf-8")

    def start(
        self, *more: str, out: str | None = "", err: str | None = "", ignored: int = 0, **constants: float
    ) -> Tune:
        """Start a tune; ``out`` and ``err`` may be closed (``None``) or be other files."""
        number = next(self.count)
        given = [self.root / f"{number}.{name}" if path == "" else path for name, path in (("out", out), ("err", err))]
        space = () if any(option.startswith("checkpointing=") for option in more) else self.space
        environment = {"TMPDIR": str(self.tmp), "AUTOFIT_LOCKS": str(self.tmp), "AUTOFIT_FAULTS": str(self.scripts)}
        pid = self.place.warm.start(
            arguments=[
                "tune", *self.place.target, "--output", str(self.output), "--json", *OPTIONS, *self.options, *space,
                *more, *self.place.arguments,
            ],
            folder=str(self.root),
            environment=environment,
            out=None if given[0] is None else str(given[0]),
            err=None if given[1] is None else str(given[1]),
            constants={**CONSTANTS, **constants},
            group=self.group,
            ignored=ignored,
        )  # fmt: skip
        return Tune(self, pid, Path(given[0] or os.devnull), Path(given[1] or os.devnull))

    def script(self, name: str, code: str) -> None:
        """What a job does instead of its work, once."""
        text = f"from pathlib import Path\nroot = Path({str(self.root)!r})\n" + textwrap.dedent(code)
        (self.scripts / f"{name}.py").write_text(text, "utf-8")

    def gate(self, name: str = WINNER, also: str = "") -> None:
        """Let a job wait until :meth:`open`; what comes after it is ``also``, or its work."""
        wait = "import time\n(root / 'reached').touch()\nwhile not (root / 'go').exists(): time.sleep(0.01)\n"
        self.script(name, wait + (textwrap.dedent(also) or "honest(folder)\n"))

    def reach(self, tune: Tune) -> None:
        """Wait until the gate is reached."""

        def there() -> bool:
            assert tune.running(), tune.said()
            return (self.root / "reached").exists()

        wait_until(there, PATIENT, "the gate")

    def open(self) -> None:
        (self.root / "go").touch()

    def trials(self) -> list:
        return list(finished(self.output / "trials"))

    def of(self, name: str = WINNER) -> list:
        """The outcomes of a plan, in order."""
        rows, checkpointing = name.split("-")
        return [
            trial.outcome
            for trial in self.trials()
            if str(trial.plan["micro_batch"]) == rows and trial.plan["checkpointing"] == checkpointing
        ]

    def fired(self, name: str = WINNER) -> bool:
        return (self.scripts / f"{name}.done").exists()

    def see(self, tune: Tune, words: str) -> None:
        """Keep the first line that holds these words, which must be there."""
        lines = [line for line in tune.said().splitlines() if re.search(words, line)]
        assert lines, f"no {words!r} in: {tune.said()}"
        self.seen, self.words = lines[0].strip(), words
        assert "Traceback" not in tune.said(), tune.said()


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    injected: str
    """How, in words."""
    inject: Callable[[Arena], None]
    answers: bool = True
    """Whether the answer must be that of an undisturbed tune."""
    code: str | None = None
    """What a trial does, where the fault is one of a trial's process."""
    kind: type | None = None
    """What becomes of that trial."""
    of_scripts: bool = False
    """Whether it can only happen where a script is tuned."""


FAULTS: list[Fault] = []


def fault(name: str, injected: str, **more: object) -> Callable:
    def add(inject: Callable[[Arena], None]) -> Callable[[Arena], None]:
        FAULTS.append(Fault(name=name, injected=injected, inject=inject, **more))
        return inject

    return add


class OtherAnswer(AssertionError):  # noqa: N818 - what happened
    """A tune survived, and found another plan than one that nothing disturbed: a fault's doing, or a busy machine's."""


def survives(place: Place, one: Fault) -> dict:
    """Inject a fault and check all that must hold after it.

    Returns:
        The row of the table.

    Raises:
        AssertionError: It did not survive.
        OtherAnswer: It did, with another answer.
        Impossible: This machine does not let it be injected.
    """
    best = place.undisturbed()
    arena = place.arena(one.name)
    began = time.monotonic()
    with arena.undo:
        one.inject(arena)
        row = {"fault": one.name, "injected": one.injected, "sees": arena.seen}
        left = wait_until(lambda: not place.processes() or None, 15.0, f"the end of {place.processes()}")
        assert left
        strays = [path.name for path in arena.tmp.iterdir() if not re.fullmatch(r"autofit-cpu\.lock", path.name)]
        assert not strays, strays
        cached = [path for path in (place.root / "cache").rglob("*") if path.name.endswith(".tmp")]
        assert not cached, cached
        arena.scripts.rename(arena.root / "scripts-done")
        arena.scripts.mkdir()
        again = arena.start("--resume")
        assert again.end() == 0, again.said()
        assert "Traceback" not in again.said(), again.said()
        for line in (arena.output / "journal.log").read_text("utf-8").splitlines():
            assert isinstance(json.loads(line), dict)
        leftovers = [path for path in arena.output.rglob("*") if re.search(r"\.tmp$|^\.ask-|^\.emitting$", path.name)]
        assert not leftovers, leftovers
        document = json.loads((arena.output / "autofit.json").read_text("utf-8"))
        assert not place.processes()
    (plan,) = [plan for plan in best if dict(plan) == document["plan"]]
    fastest = min(best, key=lambda name: best[name][0])
    behind = best[plan][0] - best[fastest][0]
    noise = max(0.1 * best[fastest][0], min(best[plan][1] + best[fastest][1], 0.5 * best[fastest][0]))
    same = plan == fastest or behind <= noise
    if one.answers and not same:
        raise OtherAnswer(f"the answer is {plan.words()}, not {fastest.words()}")
    shutil.rmtree(arena.root, ignore_errors=True)
    answers = [f"{name['micro_batch']}-{name['checkpointing']}" for name in (plan, fastest)]
    return {
        **row,
        "same_plan": plan == fastest,
        "answer": answers[0],
        "undisturbed": answers[1],
        "seconds": round(time.monotonic() - began, 1),
    }


# --- a trial dies, hangs, or finds no memory --------------------------------------------------------------------------


def in_a_trial(name: str, injected: str, code: str, kind: type, words: str) -> None:
    """A fault inside the process of the winner's first trial; the trial is looked at twice, and the plan still wins."""

    @fault(name, injected, code=textwrap.dedent(code), kind=kind)
    def inject(arena: Arena) -> None:
        arena.script(WINNER, code)
        tune = arena.start()
        assert tune.end() == 0, tune.said()
        failed_once(arena, tune, kind, words)
        assert re.search(arena.words, " ".join(json.loads(tune.printed())["notes"]))


def failed_once(arena: Arena, tune: Tune, kind: type, words: str) -> None:
    """The winner's first trial came to a bad end: it is measured again.

    One that crashed where it was forked from a script is run anew at once, and no other is forked any more.
    """
    assert arena.fired()
    first, *others = arena.of()
    if arena.forks and kind is Crashed:
        assert isinstance(first, Measured), first
        words = r"from here on each trial runs the script .*: trial 2 ended as crashed \(.*\) when it was"
    else:
        assert isinstance(first, kind), first
        assert isinstance(others[0], Measured), others
    arena.see(tune, words)


def midst(action: str, phase: str = "backward") -> str:
    return f"import ctypes, os, signal, time\ndef act():\n    {action}\nat({phase!r}, act)\nhonest(folder)\n"


DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    "segmentation fault": ("ctypes.string_at(0)", "killed by SIGSEGV"),
    "abort in native code": ("ctypes.CDLL(None).abort()", "killed by SIGABRT"),
    "bus error": ("os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS"),
    "illegal instruction": ("os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL"),
    "silent exit": ("os._exit(3)", "ended with status 3"),
}
for _name, (_action, _words) in DEATHS.items():
    in_a_trial(f"trial: {_name}", f"`{_action}` in the backward pass", midst(_action), Crashed, f"crashed .*{_words}")

in_a_trial(
    "trial: unforeseen exception",
    "`raise` in the forward pass",
    midst("raise ArithmeticError('the abacus is broken')", "forward"),
    Crashed,
    "crashed .ArithmeticError: the abacus",
)
in_a_trial(
    "trial: torn result file",
    "half of `outcome.json`, then exit",
    "(folder / 'outcome.json').write_text('{\"kind\": \"measu')\nimport os; os._exit(0)\n",
    Crashed,
    "crashed .ended with status 0",
)
in_a_trial(
    "trial: children left behind",
    "a child, and a grandchild in a session of its own that ignores SIGTERM; then exit",
    """
    import os, signal, time
    for daemon in (False, True):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if daemon:
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(1000)
    time.sleep(0.2)
    os._exit(9)
    """,
    Crashed,
    "crashed .ended with status 9",
)
HANGS = {
    "in Python": "while True: time.sleep(0.01)",
    "in native code, holding the GIL": "ctypes.PyDLL(None).sleep(1000)",
    "ignoring SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
    "stopped by SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
}
for _name, _action in HANGS.items():
    in_a_trial(f"trial hangs {_name}", f"`{_action}`", midst(_action), TimedOut, "hung .step 1")

for _phase in ("load", "forward", "backward", "optimizer"):
    _words = {"load": "the first allocation of a step", "optimizer": "the optimizer's step"}.get(_phase, _phase)
    in_a_trial(
        f"device out of memory: {_words}",
        "`torch.OutOfMemoryError` as the allocator raises it, far below the ceiling",
        midst("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB.')", _phase),
        OutOfMemory,
        "ran out of memory that other processes held",
    )
in_a_trial(
    "host out of memory: RLIMIT_AS",
    "the address space is closed in the forward pass, 64 MiB are asked for, and it is opened again",
    midst(
        "import resource as r, torch; before = r.getrlimit(r.RLIMIT_AS)\n"
        "    r.setrlimit(r.RLIMIT_AS, (1 << 20, before[1]))\n"
        "    try: torch.empty(1 << 26)\n"
        "    finally: r.setrlimit(r.RLIMIT_AS, before)",
        "forward",
    ),
    OutOfMemory,
    "ran out of memory that other processes held",
)
in_a_trial(
    "loss is not a number",
    "the loss of a step becomes NaN",
    """
    from autofit.training.timing import Clock
    usual = Clock.backward_end
    Clock.backward_end = lambda clock, loss: usual(clock, loss * float("nan"))
    honest(folder)
    """,
    Diverged,
    "was not finite",
)


def control_group(arena: Arena, limit_bytes: int) -> Path:
    """A memory-limited control group."""
    group = CGROUPS / f"autofit-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        raise Impossible(f"no memory control group can be made here: {error}") from error

    def remove() -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not (group / "cgroup.procs").read_text().strip() or None, 20)
        with contextlib.suppress(OSError):
            group.rmdir()

    arena.undo.callback(remove)
    return group


MIB = 2**20
FILL = "block = bytearray({bytes})\nfor place in range(0, len(block), 4096): block[place] = 1\n"


@fault("trial: the kernel's OOM killer", "the trial joins a memory control group of 48 MiB and fills 400 MiB")
def killed_for_memory(arena: Arena) -> None:
    group = control_group(arena, 48 * MIB)
    arena.script(WINNER, f"Path({str(group)!r}, 'cgroup.procs').write_text('0')\n" + FILL.format(bytes=400 * MIB))
    tune = arena.start()
    assert tune.end() == 0, tune.said()
    assert arena.fired()
    first, second, *_ = arena.of()
    assert isinstance(first, OutOfMemory), first
    assert isinstance(second, Measured), second
    arena.see(tune, "ran out of memory that other processes held")


@fault(
    "another process takes the device's memory",
    "all in one memory control group: a process takes two thirds, the kernel kills the trial; then it goes",
)
def foreign_process(arena: Arena) -> None:
    group = control_group(arena, 1200 * MIB)
    arena.group = str(group)
    arena.options = ("--memory-limit", "700MiB", "--no-guard")
    hoard = f"Path('/proc/self/oom_score_adj').write_text('1000')\n{FILL.format(bytes=600 * MIB)}honest(folder)"
    arena.gate(also=hoard)
    tune = arena.start()
    arena.reach(tune)
    code = (
        f"from pathlib import Path\nPath({str(group)!r}, 'cgroup.procs').write_text('0')\n"
        f"{FILL.format(bytes=750 * MIB)}"
        "print('taken', flush=True)\nimport time; time.sleep(1000)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"taken\n"
        arena.open()
        wait_until(lambda: "other processes held" in tune.said() or not tune.running(), PATIENT, "the notice")
        wait_until(lambda: "another process took memory" in tune.said() or not tune.running(), PATIENT, "the report")
    finally:
        other.kill()
        other.communicate()
    assert tune.end() == 0, tune.said()
    first, second, *_ = arena.of()
    assert isinstance(first, OutOfMemory), first
    assert first.external_pressure
    assert isinstance(second, Measured), second
    arena.see(tune, "another process took memory")


@fault(
    "a driver spills to host memory",
    "a trial takes 87 % of what is there and its steps stand still, as over a bus, instead of failing",
)
def spill(arena: Arena) -> None:
    arena.group = str(control_group(arena, 3072 * MIB))
    arena.options = ("--memory-limit", "3072MiB", "--no-guard")
    arena.space = ("--among", "checkpointing=off,full")
    code = f"""
from autofit.training.timing import Clock
import time
kept = []
def slow(clock, usual=Clock.forward_begin):
    if not kept:
        {"; ".join(line for line in FILL.format(bytes=2680 * MIB).splitlines()[:1])}
        for place in range(0, len(block), 4096): block[place] = 1
        kept.append(block)
    time.sleep(1.0)
    usual(clock)
Clock.forward_begin = slow
honest(folder)
"""
    arena.script("16-full", code)
    tune = arena.start(LEAST_LIMIT_SECONDS=60.0)
    assert tune.end() == 0, tune.said()
    (only,) = arena.of("16-full")
    assert isinstance(only, OutOfMemory), only
    arena.see(tune, "spilled into the host's memory")


def orphaned(arena: Arena, ancestor: int, words: str) -> None:
    """A process that a trial comes from, 0 being its parent, is killed in the midst of the trial."""
    arena.script(WINNER, midst(f"import psutil; psutil.Process().parents()[{ancestor}].kill(); time.sleep(100)"))
    tune = arena.start()
    assert tune.end() == 0, tune.said()
    failed_once(arena, tune, Crashed, words)


@fault("the process that starts trials dies", "SIGKILL to it while a trial runs")
def lost_server(arena: Arena) -> None:
    orphaned(arena, 1 if arena.forks else 0, "the process that starts trials ended")


@fault("the script's run that trials are forked from dies", "SIGKILL to it while a trial runs", of_scripts=True)
def lost_snapshot(arena: Arena) -> None:
    if not arena.forks:
        raise Impossible("a plain loop is not forked")
    orphaned(arena, 0, "from here on each trial runs the script")


# --- the disk and the folder ------------------------------------------------------------------------------------------


def small_disk(arena: Arena, folder: Path, size: str) -> None:
    """A file system of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        raise Impossible(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    arena.undo.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)


FULL = """
def fill(path):
    handle = open(path, "wb", buffering=0)
    try:
        while True: handle.write(bytes(1024))
    except OSError: pass
    handle.close()
"""


@fault("disk full: a trial's folder", "the output folder is a tmpfs of 1 MiB, filled while a trial runs")
def full_in_a_trial(arena: Arena) -> None:
    small_disk(arena, arena.output, "1m")
    arena.script(WINNER, FULL + "fill(root / 'out' / 'filler')\nhonest(folder)\n")
    tune = arena.start()
    assert tune.end() == 5, tune.said()
    arena.see(tune, "^error: the disk is full")
    assert "the best so far" in tune.said()
    (arena.output / "filler").unlink()


@fault("disk full: the journal", "the journal lies on a tmpfs of 1 MiB that is filled while a trial runs")
def full_in_the_journal(arena: Arena) -> None:
    disk = arena.root / "disk"
    small_disk(arena, disk, "1m")
    arena.gate("1-off")  # more is written after it than the last page of the file has room for
    tune = arena.start()
    arena.reach(tune)
    path = arena.output / "journal.log"
    shutil.copyfile(path, disk / path.name)
    path.unlink()
    path.symlink_to(disk / path.name)
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(64))
    arena.open()
    assert tune.end() == 5, tune.said()
    arena.see(tune, "^error: .*journal.* can't be read or written: No space left")
    (disk / "filler").unlink()


@fault(
    "disk full: the emission",
    "the output folder is a tmpfs of 1 MiB, filled before the files are written",
)
def full_in_the_emission(arena: Arena) -> None:
    if arena.place.script is not None and not arena.forks:
        raise Impossible("nothing trains between a plain loop's last trial and the files")
    small_disk(arena, arena.output, "1m")
    arena.options = ("--memory-limit", "1GiB")
    arena.script("curve", FULL + "honest(folder)\nfill(root / 'out' / 'filler')\n")
    tune = arena.start()
    assert tune.end() == 5, tune.said()
    arena.see(tune, "^error: the disk is full")
    assert not (arena.output / "autofit.json").exists()
    (arena.output / "filler").unlink()


@fault("output folder deleted", "removed with all that is in it while a trial runs")
def deleted(arena: Arena) -> None:
    arena.gate()
    tune = arena.start()
    arena.reach(tune)
    shutil.rmtree(arena.output)
    arena.open()
    assert tune.end() == 5, tune.said()
    arena.see(tune, "^error: .*(gone|was deleted)")
    assert "the best so far" in tune.said()
    assert not arena.output.exists()


@fault("output folder moved away", "renamed while a trial runs, and put back")
def moved(arena: Arena) -> None:
    arena.gate()
    tune = arena.start()
    arena.reach(tune)
    arena.output.rename(arena.root / "elsewhere")
    arena.open()
    assert tune.end() == 5, tune.said()
    arena.see(tune, "^error: .*(gone|was deleted)")
    assert not arena.output.exists()
    (arena.root / "elsewhere").rename(arena.output)


@fault("output folder made read-only", "`chattr -R +i`, which binds root too, while a trial runs")
def read_only(arena: Arena) -> None:
    arena.gate()
    tune = arena.start()
    arena.reach(tune)
    done = subprocess.run(["chattr", "-R", "+i", str(arena.output)], capture_output=True, check=False)
    arena.undo.callback(subprocess.run, ["chattr", "-R", "-i", str(arena.output)], capture_output=True, check=False)
    arena.open()
    code = tune.end()
    subprocess.run(["chattr", "-R", "-i", str(arena.output)], capture_output=True, check=False)
    if done.returncode:
        raise Impossible(f"no file can be made immutable here: {done.stderr.decode().strip()}")
    assert code == 5, tune.said()
    arena.see(tune, "^error: .*can't be (written|read or written)")


# --- the journal ------------------------------------------------------------------------------------------------------


def on_the_journal(name: str, injected: str, change: Callable[[Path], None]) -> None:
    """Something is done to the journal while a trial runs; the tune goes on to its end."""

    @fault(name, injected)
    def inject(arena: Arena) -> None:
        arena.gate()
        tune = arena.start()
        arena.reach(tune)
        path = arena.output / "journal.log"
        change(path)
        arena.open()
        assert tune.end() == 0, tune.said()
        assert "Traceback" not in tune.said(), tune.said()
        arena.seen = "nothing: the tune ends as ever"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def garbage(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(len(lines) // 2, b"\x00\xff garbage {\n")
    path.write_bytes(b"".join(lines))


def foreign_version(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"op_code": 99, "worker_id": "of another version", "study_id": 0}\n')


def second_writer(path: Path) -> None:
    code = f"""
import optuna
from pathlib import Path
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from autofit.search.journal import JournalLock
path = Path({str(path)!r})
lock = JournalLock(path.with_name(path.name + ".lock"))
study = optuna.load_study(study_name="autofit", storage=JournalStorage(JournalFileBackend(str(path), lock_obj=lock)))
for number in range(5):
    trial = study.ask()
    trial.suggest_categorical("micro_batch", [1, 4, 16])
    trial.set_user_attr("number", 2)
    study.tell(trial, 1e9)
study.ask()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


on_the_journal("journal: cut in mid-line", "40 bytes off its end while a trial runs", cut)
on_the_journal("journal: garbage in the middle", "a line of bytes that are no JSON while a trial runs", garbage)
on_the_journal("journal: of another version", "a record with an unknown op_code while a trial runs", foreign_version)
on_the_journal("journal: two writers", "another process tells trials of its own while a trial runs", second_writer)
on_the_journal("journal: deleted", "removed while a trial runs", Path.unlink)


@fault("two tunes on one folder and one device", "a second and a third tune while a trial runs")
def two_tunes(arena: Arena) -> None:
    arena.gate()
    tune = arena.start()
    arena.reach(tune)
    second = arena.start("--resume")
    third = arena.start("--output", str(arena.root / "other"))
    assert (second.end(), third.end()) == (5, 5)
    assert not (arena.root / "other").exists()
    assert "another tune is measuring on this device" in third.said()
    arena.open()
    assert tune.end() == 0, tune.said()
    arena.see(second, "^error: another tune is writing")


# --- signals and streams ----------------------------------------------------------------------------------------------


def stopped_by(number: signal.Signals, code: int, words: str) -> None:
    @fault(f"{number.name} to the tune", "while a trial runs")
    def inject(arena: Arena) -> None:
        arena.gate()
        tune = arena.start()
        arena.reach(tune)
        os.kill(tune.pid, number)
        assert tune.end() == code, tune.said()
        if words:
            arena.see(tune, words)
            assert json.loads((arena.output / "autofit.json").read_text())["plan"]
        else:
            arena.seen = "nothing; --resume goes on"


stopped_by(signal.SIGINT, 130, "^error: stopped by Ctrl-C")
stopped_by(signal.SIGTERM, 143, "^error: stopped by SIGTERM")
stopped_by(signal.SIGHUP, 143, "^error: stopped by SIGHUP")
stopped_by(signal.SIGKILL, -9, "")


@fault("SIGINT twice", "while a trial runs, and again while the best so far is being written")
def twice(arena: Arena) -> None:
    arena.gate()
    arena.script("check", "import time\n(root / 'checking').touch()\ntime.sleep(1000)\n")
    tune = arena.start()
    arena.reach(tune)
    os.kill(tune.pid, signal.SIGINT)
    wait_until(lambda: (arena.root / "checking").exists() or not tune.running(), PATIENT, "the writing")
    began = time.monotonic()
    os.kill(tune.pid, signal.SIGINT)
    assert tune.end() == 130, tune.said()
    assert time.monotonic() - began < 20
    assert not (arena.output / "autofit.json").exists()
    arena.see(tune, "^error: stopped by Ctrl-C")


def reader_gone(name: str) -> None:
    @fault(f"std{name} closed by its reader", "a pipe whose reader goes while a trial runs, as with `| head`")
    def inject(arena: Arena) -> None:
        pipe = arena.root / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        arena.gate()
        tune = arena.start(**{name: str(pipe)})
        arena.reach(tune)
        os.close(reader)
        arena.open()
        assert tune.end() == 0, tune.said()
        assert "Traceback" not in tune.said(), tune.said()
        arena.seen = "the files, and exit code 0"


reader_gone("out")
reader_gone("err")


@fault("stdout and stderr closed from the start", "both descriptors closed before the command begins, as by `>&- 2>&-`")
def closed(arena: Arena) -> None:
    tune = arena.start(out=None, err=None)
    assert tune.end() == 0
    assert json.loads((arena.output / "autofit.json").read_text())["plan"]
    arena.seen = "the files, and exit code 0"


@fault("SIGHUP under nohup", "ignored from the start, as by `nohup`; sent while a trial runs")
def nohup(arena: Arena) -> None:
    arena.gate()
    tune = arena.start(ignored=int(signal.SIGHUP))
    arena.reach(tune)
    os.kill(tune.pid, signal.SIGHUP)
    arena.open()
    assert tune.end() == 0, tune.said()
    arena.seen = "nothing: the tune ends as ever"


# --- time -------------------------------------------------------------------------------------------------------------

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile double *offset;
__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("AUTOFIT_TEST_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offset = found;
}
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (!status && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += (time_t)*offset;
    return status;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def build_clock(root: Path) -> Path | None:
    """A wall clock that can be set, for the processes that load it; the machine's own stays as it is."""
    source, library = root / "clock.c", root / "clock.so"
    source.write_text(CLOCK)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], capture_output=True, check=False
    )
    return library if done.returncode == 0 else None


def clock_is_set(name: str, seconds: float) -> None:
    @fault(f"the clock is set {name}", f"by {abs(seconds):g} s while a trial runs, for all processes of the tune")
    def inject(arena: Arena) -> None:
        if arena.place.fake_clock is None:
            raise Impossible("no C compiler is here")
        arena.undo.callback(arena.place.set_clock, 0.0)
        arena.gate(also="import time\n(root / 'now').write_text(str(time.time()))\nhonest(folder)\n")
        tune = arena.start("--timeout", "30m")
        arena.reach(tune)
        arena.place.set_clock(seconds)
        arena.open()
        assert tune.end() == 0, tune.said()
        shown = float((arena.root / "now").read_text()) - time.time()
        assert abs(shown - seconds) < 600, "the clock was not set"
        assert all(isinstance(trial.outcome, Measured) for trial in arena.trials())
        assert "the time is spent" not in tune.said()
        arena.seen = "nothing"


clock_is_set("back", -86400.0)
clock_is_set("forward", 86400.0)


@fault("the machine sleeps", "SIGSTOP to the tune and all its processes for longer than a trial may take, then SIGCONT")
def sleeps(arena: Arena) -> None:
    wait = "(root / 'reached').touch(); deadline = time.monotonic() + 2\n    while time.monotonic() < deadline: pass"
    arena.script(WINNER, midst(wait, "forward").replace("at('forward', act)", "at('forward', act, 3)"))
    tune = arena.start(MOST_REPEATS=9)
    arena.reach(tune)
    asleep = arena.place.processes()
    assert len(asleep) >= 3
    for one in asleep:
        one.suspend()
    time.sleep(CONSTANTS["LEAST_LIMIT_SECONDS"] + 4)
    for one in reversed(asleep):
        one.resume()
    assert tune.end() == 0, tune.said()
    assert not any(isinstance(trial.outcome, TimedOut) for trial in arena.trials()), "a limit fired for the pause"
    first, second, *_ = arena.of()
    assert first.paused
    assert not second.paused
    arena.see(tune, "the machine was paused during a step")
