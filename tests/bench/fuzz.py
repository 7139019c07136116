"""Fuzzing: inputs that nobody means, for every parser and every command, none of which may end in a traceback or hang.

    python tests/bench/fuzz.py [--inputs 100000] [--seed 0] [--only NAME] [--json FILE]

An input is a good one that was spoiled: text with letters taken out, doubled or put in, JSON with values replaced by
what no writer of ours would write, bytes cut and flipped. It is given to the function that meets it first in a real
run, and the commands are run whole, in this process, up to where a process would be started. What may come of it is an
answer, an error of autofit's own or of the command line's parser, within a second of processor time (or twenty of the
clock, should it sleep: a shared machine may be slow); whatever else comes is counted and shown.

The last line is one JSON object; the status is 1 where anything was found.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import numpy as np
import optuna
from click.testing import CliRunner
from rich.console import Console

from autofit import cli, space
from autofit.commands import doctor, launching, model_source, request
from autofit.commands.estimates import estimate
from autofit.commands.request import STARTED, Request, Started
from autofit.commands.tunes import backend
from autofit.contract.outcome import OUTCOME, TRIAL
from autofit.costmodel.tracing.trace_store import Traces
from autofit.machine import gpu_catalogue
from autofit.output import setup
from autofit.output.document import DOCUMENT, read_document
from autofit.output.reports import report
from autofit.registry import techniques
from autofit.search.recordings import landscape, replay
from autofit.search.recordings.writer import Writer
from autofit.search.study import open_study, record
from autofit.space import Space
from autofit.system import units
from autofit.system.errors import AutofitError, MachineError
from autofit.system.strict_json import dump_json
from autofit.training.runner import Effort, ProcessRunner, finished, training_seconds
from tests.output import test_report
from tests.support.synthetic import Landscape, cpu_facts, cuda_facts
from tests.support.tiny import CONFIGS

HANGS_SECONDS, SLEEPS_SECONDS = 1.0, 20.0
HOSTILE_TEXTS = (
    "", " ", "\0", "\n", "\r\n", "'", '"', "`reboot`", "$(reboot)", "; rm -rf ~", "..", "../../etc/passwd", "/", "~",
    "-", "--", "%", "100%%", "0", "-1", "1e999", "nan", "inf", "٣", "²", "½", "１２", "0x10", "1_000", "9" * 400,
    "x" * 4000, "é", "e\u0301", "\u202e", "\ud800", "\U0001f600", "\x1b[2J", "<script>alert(1)</script>", "{{7*7}}",
    "!!python/object", "a" * 255, "{}", "[]", "null", "true", "https://", "file:///etc/passwd", "org/na--me", "=", "==",
    ",", ",,", "=,=", "%s%n", "\\", "*", "?", "[bold]", "COM1", "🦙" * 50,
)  # fmt: skip
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320,
    1e308, float("nan"), float("inf"), [], {}, [[]], [None], [0] * 50, {"": ""}, {"kind": "measured"},
)  # fmt: skip


class Hang(BaseException):
    """The second is over."""


class Stopped:
    """Stands where a process would be started."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        def stop(*_: object, **__: object) -> Any:
            raise MachineError("no process is started here", hint="it is only a test")

        return stop

    def close(self) -> None:
        """Nothing was opened."""


class Spoiler:
    """Makes bad inputs out of good ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, good: str) -> str:
        """A text with some letters otherwise, or another one altogether."""
        pick = self.random
        if pick.random() < 0.2:
            return pick.choice(HOSTILE_TEXTS)
        letters = list(good)
        for _ in range(pick.choice((1, 1, 1, 2, 3, 8))):
            place = pick.randrange(len(letters) + 1)
            match pick.randrange(6):
                case 0 if letters:
                    del letters[place - 1]
                case 1:
                    letters.insert(
                        place, chr(pick.choice((pick.randrange(32), pick.randrange(32, 127), pick.randrange(0xD800))))
                    )
                case 2 if letters:
                    letters[place - 1] = pick.choice("0123456789.,:=%-+eExX/\\ abkmgt")
                case 3:
                    letters[place:place] = pick.choice(HOSTILE_TEXTS)
                case 4 if letters:
                    letters = letters * pick.choice((2, 2, 3, 50))
                case _:
                    pick.shuffle(letters)
            if len(letters) > 20_000:
                break
        return "".join(letters)

    def value(self) -> Any:
        """A value that no writer of ours would write."""
        pick = self.random
        return copy.deepcopy(pick.choice(HOSTILE_VALUES)) if pick.random() < 0.7 else pick.choice(HOSTILE_TEXTS)

    def tree(self, good: Any) -> Any:
        """A JSON value with a few of its parts taken out, replaced, renamed, doubled or swapped."""
        spoiled = copy.deepcopy(good)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            spoiled = self._once(spoiled)
        return spoiled

    def _once(self, tree: Any) -> Any:
        pick, above, key, here = self.random, None, None, tree
        while isinstance(here, dict | list) and here and (above is None or pick.random() < 0.85):
            above = here
            key = pick.choice(list(here)) if isinstance(here, dict) else pick.randrange(len(here))
            here = here[key]
        if above is None or pick.random() < 0.003:
            return self.value()
        match pick.randrange(8):
            case 0:
                del above[key]
            case 1 if isinstance(above, dict):
                above[self.text(str(key))] = above.pop(key)
            case 2 if isinstance(above, list):
                above.extend(copy.deepcopy(above[:20]))
            case 3 if isinstance(here, str):
                above[key] = self.text(here)
            case 4 if isinstance(here, int | float):
                above[key] = here * pick.choice((-1, 0, 2, 1e6, 1e300, 0.5))
            case 5:
                other = pick.choice(list(above)) if isinstance(above, dict) else pick.randrange(len(above))
                above[key], above[other] = above[other], above[key]
            case _:
                above[key] = self.value()
        return tree

    def json(self, good: Any) -> bytes:
        """JSON out of a spoiled tree, now and then with its bytes spoiled too."""
        data = json.dumps(self.tree(good), ensure_ascii=self.random.random() < 0.5).encode("utf-8", "surrogatepass")
        return self.bytes(data) if self.random.random() < 0.15 else data

    def bytes(self, good: bytes) -> bytes:
        """Bytes cut off, flipped, doubled or put in."""
        pick, data = self.random, bytearray(good)
        for _ in range(pick.choice((1, 1, 2, 5))):
            place = pick.randrange(len(data) + 1)
            match pick.randrange(5):
                case 0:
                    del data[place:]
                case 1 if data:
                    data[place - 1] ^= 1 << pick.randrange(8)
                case 2:
                    data[place:place] = pick.randbytes(pick.randrange(1, 9))
                case 3:
                    del data[place : place + pick.randrange(64)]
                case _:
                    data[place:place] = pick.choice(
                        (b"[" * 2000, b'{"a":' * 2000, b"\xff\xfe", b"NaN", b"1e999", b"\n")
                    )
        return bytes(data)


@dataclass
class Target:
    """Something that meets inputs.

    Attributes:
        make: A bad input.
        give: Gives it to the program.
        share: Of all inputs, relative to the other targets.
    """

    make: Callable[[Spoiler], Any]
    give: Callable[[Any], Any]
    share: float = 1.0
    seconds: float = field(default=0.0)
    count: int = field(default=0)
    outcomes: Counter[str] = field(default_factory=Counter)


def targets(folder: Path) -> dict[str, Target]:  # noqa: C901, PLR0915 - a list
    """Everything that reads."""
    small = cpu_facts(global_batch=4)
    gpu = cuda_facts(global_batch=4)
    good_document = json.loads(dump_json(DOCUMENT, test_report.document()))
    land = Landscape(facts=small)
    a_space = space.build(small, given={"optimizer": ("adamw",), "kernels": ("none",)})
    some = [land.trial(plan, number) for number, plan in enumerate(a_space.plans[:12])]
    started = Started(request=Request(model="demo"), facts=replace(small, packages=setup.installed()))
    good_started = json.loads(dump_json(STARTED, started))
    good_trial = json.loads(dump_json(TRIAL, some[0]))
    good_outcome = json.loads(dump_json(OUTCOME, some[0].outcome))
    writer = Writer(folder / "good.jsonl", small, a_space)
    for trial in some:
        writer.add(trial)
    good_landscape = [json.loads(line) for line in (folder / "good.jsonl").read_text().splitlines()]
    good_journal = _journal(folder / "good", a_space, some)
    archive = io.BytesIO()
    np.savez_compressed(archive, weights=np.arange(4), notes=np.array(["a"]), sizes=np.ones(3))
    good_archive = archive.getvalue()
    knobs = [f"{one.name}={choice.value}" for one in techniques() for choice in one.choices(gpu)]
    knobs += ["adapter=lora:r=8:alpha=16:dropout=0.05:targets=q_proj+v_proj", "micro_batch=1,2,4"]
    sizes = ("22GiB", "800MiB", "24GB", "90%", "1.5g", "123456789", "90s", "10m", "1.5h")
    cards = [name for card in gpu_catalogue.cards() for name in (card.name, *card.aliases, *card.driver_names)]
    models = (
        "Qwen/Qwen2.5-0.5B",
        "gpt2",
        "./my-model",
        str(folder / "none"),
        "meta-llama/Llama-3.1-8B",
        "~/model",
        "demo",
    )
    configs = [{**config, "auto_map": {"AutoModelForCausalLM": "code.Mine"}} for config in CONFIGS.values()]
    traces = Traces(small, _config(folder / "config", CONFIGS["llama"]), Stopped, folder, folder)
    words = _Words(folder, knobs, sizes, cards, models)

    def read_units(text: str) -> None:
        for parse in (units.parse_size, units.parse_duration, lambda text: units.parse_limit(text, 1 << 34)):
            parse(text)

    def read_knobs(given: tuple[str, str, str]) -> None:
        fix, among, allow = given
        for facts in (small, gpu):
            space.parse_knobs([fix], [], facts)
            space.parse_knobs([], [among], facts)
        space.parse_allowed(allow)

    def written(name: str, data: bytes) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def read_answer(data: bytes) -> None:
        written("out/autofit.json", data)
        found = read_document(folder / "out")
        report.html(found, folder="out")
        Console(file=io.StringIO(), width=80).print(report.summary(found, folder="out"))
        setup.load(folder / "out")

    def read_config(data: bytes) -> None:
        config = model_source.fetch(str(written("model/config.json", data)), folder / "into")
        model_source.modeling_module(config)
        model_source.own_code(config, trusted=False)

    def read_started(data: bytes) -> None:
        written("resumed/request.json", data)
        found = request.started_before(folder / "resumed", Request(model="demo"), resume=True, say=lambda _: None)
        assert found is not None
        space.build(found.facts, given={one.name: (one.baseline,) for one in techniques()[2:]})

    def read_trial(data: bytes) -> None:
        written("trials/00000/trial.json", data)
        for trial in finished(folder / "trials"):
            record(trial, 1 << 30)
            training_seconds(trial)

    def read_outcome(data: bytes) -> None:
        written("one/outcome.json", data)
        runner = ProcessRunner(folder, small, folder, Stopped())
        runner._outcome(folder / "one", 0, 5.0, host_ran_out=False, lost="")

    def read_landscape(lines: bytes) -> None:
        found = landscape.Landscape.read(written("land.jsonl", lines))
        found.best(1 << 40)
        player = replay.Replay(found)
        for number, plan in enumerate(list(found.space.plans)[:3]):
            player.run(number, plan, Effort(), purpose="search", limit_seconds=1.0)

    def read_journal(lines: bytes) -> None:
        written("study/journal.log", lines)
        for old in (folder / "study").glob("*.broken-*"):
            old.unlink()
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = open_study(
            folder / "study", storage=None, sampler=sampler, trials=some, space=a_space, limit_bytes=1 << 33
        )
        held = [one.user_attrs["number"] for one in study.get_trials(deepcopy=False) if "number" in one.user_attrs]
        assert sorted(held) == [trial.number for trial in some], held

    def read_archive(data: bytes) -> None:
        written("key.npz", data)
        traces._parts.clear()
        traces._known("key")

    def lines_of(spoiler: Spoiler, good: list[Any]) -> bytes:
        lines = [json.dumps(line).encode() for line in good]
        place = spoiler.random.randrange(len(lines))
        lines[place] = spoiler.json(good[place])
        return b"\n".join(lines) + spoiler.random.choice((b"\n", b"\n", b""))

    def run(given: list[str]) -> str:
        done = CliRunner().invoke(cli.main, given, prog_name="autofit")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert "Traceback" not in done.stderr, done.stderr
        assert done.exit_code in range(6), done.exit_code
        return f"exit {done.exit_code}"

    return {
        "units": Target(lambda s: s.text(s.random.choice(sizes)), read_units, 16),
        "knobs": Target(
            lambda s: (s.text(s.random.choice(knobs)), s.text(s.random.choice(knobs)), s.text("exact,numeric,method")),
            read_knobs, 14,
        ),
        "cards": Target(lambda s: s.text(s.random.choice(cards)), gpu_catalogue.find, 5),
        "model names": Target(
            lambda s: s.text(s.random.choice(models)),
            lambda name: model_source.fetch(_no_folder(name), folder / "into"),
            6,
        ),
        "config.json": Target(lambda s: s.json(s.random.choice(configs)), read_config, 12),
        "autofit.json": Target(lambda s: s.json(good_document), read_answer, 2),
        "request.json": Target(lambda s: s.json(good_started), read_started, 6),
        "trial.json": Target(lambda s: s.json(good_trial), read_trial, 10),
        "outcome.json": Target(lambda s: s.json(good_outcome), read_outcome, 10),
        "landscape": Target(lambda s: lines_of(s, good_landscape), read_landscape, 3),
        "journal.log": Target(lambda s: lines_of(s, good_journal), read_journal, 1.5),
        "traces": Target(lambda s: s.bytes(good_archive), read_archive, 4),
        "autofit tune": Target(words.tune, run, 4),
        "autofit estimate": Target(words.estimate, run, 4),
        "autofit doctor, schema, nonsense": Target(words.others, run, 2),
        "autofit verify, report": Target(
            lambda s: (s.random.choice(("verify", "report")), s.json(good_document)),
            lambda given: _command(folder, run, *given), 1,
        ),
    }  # fmt: skip


@dataclass
class _Words:
    """Command lines."""

    folder: Path
    knobs: list[str]
    sizes: tuple[str, ...]
    cards: list[str]
    models: tuple[str, ...]

    def _given(self, spoiler: Spoiler, command: str, options: dict[str, tuple[str, ...]]) -> list[str]:
        pick = spoiler.random
        words = [command, _no_folder(pick.choice((self.models[-1], spoiler.text(pick.choice(self.models)))))]
        for name in pick.sample(list(options), pick.randrange(1, 4)):
            good = pick.choice(options[name])
            words += [name, spoiler.text(good) if pick.random() < 0.6 else good] if good else [name]
        if pick.random() < 0.05:
            words[pick.randrange(len(words))] = pick.choice(HOSTILE_TEXTS)
        return [word.replace("\ud800", "?") for word in words]

    def tune(self, spoiler: Spoiler) -> list[str]:
        """``autofit tune``."""
        words = self._given(
            spoiler, "tune",
            {
                "--device": ("auto", "cpu", "cuda"), "--seq-len": ("128", "2"), "--global-batch": ("32", "1"),
                "--memory-limit": self.sizes, "--trials": ("40",), "--timeout": ("10m", "90s"),
                "--allow": ("exact,numeric",), "--fix": tuple(self.knobs), "--among": tuple(self.knobs),
                "--sampler": ("autofit", "tpe"), "--launch-path": ("trainer", "loop"), "--record": ("record",),
                "--trust-remote-code": ("",), "--storage": ("sqlite:///study.db",), "--resume": ("",), "--seed": ("7",),
                "--no-guard": ("",), "--json": ("",),
            },
        )  # fmt: skip
        return [*words, "--output", str(self.folder / "tuned")] if spoiler.random.random() < 0.9 else words

    def estimate(self, spoiler: Spoiler) -> list[str]:
        """``autofit estimate``."""
        return self._given(
            spoiler, "estimate",
            {
                "--gpu": tuple(self.cards), "--memory": self.sizes, "--seq-len": ("128",), "--global-batch": ("32",),
                "--allow": ("exact,numeric",), "--fix": tuple(self.knobs), "--among": tuple(self.knobs),
                "--launch-path": ("trainer", "loop"), "--trust-remote-code": ("",), "--no-cache": ("",), "--all": ("",),
                "--json": ("",),
            },
        )  # fmt: skip

    def others(self, spoiler: Spoiler) -> list[str]:
        """The other commands, and none."""
        pick = spoiler.random
        given = pick.choice((
            ["doctor", "--device", "auto", "--model", "demo"], ["schema"], ["verify", "out", "--steps", "5"],
            ["report", "out", "--json"], ["--version"], ["--help"], ["tune", "--help"],
        ))  # fmt: skip
        place = pick.randrange(len(given))
        given[place] = _no_folder(spoiler.text(given[place])).replace("\ud800", "?")
        return given


def _command(folder: Path, run: Callable[[list[str]], str], command: str, data: bytes) -> str:
    """A command on a folder whose ``autofit.json`` is spoiled."""
    (folder / "out" / "model").mkdir(parents=True, exist_ok=True)
    (folder / "out" / "autofit.json").write_bytes(data)
    for name in ("accelerate.yaml", "training_args.json", "model/config.json"):
        (folder / "out" / name).touch()
    return run([command, str(folder / "out"), *(["--json"] if len(data) % 2 else [])])


def _no_folder(name: str) -> str:
    """A name that is not a big folder of this machine, such as the root."""
    return name if name.strip("/~. ") else "none" + name


def _config(folder: Path, config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _journal(folder: Path, plans: Space, some: list[Any]) -> list[Any]:
    """The lines of a journal that holds some trials."""
    sampler = optuna.samplers.RandomSampler(seed=0)
    folder.mkdir()
    open_study(folder, storage=None, sampler=sampler, trials=some, space=plans, limit_bytes=1 << 33)
    return [json.loads(line) for line in (folder / "journal.log").read_text().splitlines()]


def outcome_of(target: Target, given: Any) -> tuple[str, str]:
    """What comes of an input: a word, and the traceback of what should not have come."""

    def end(*_: object) -> None:
        raise Hang

    before = {number: signal.signal(number, end) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, SLEEPS_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, HANGS_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = target.give(given)
        return answer if isinstance(answer, str) and answer.startswith("exit") else "answer", ""
    except (AutofitError, click.ClickException) as error:
        return type(error).__name__, ""
    except Hang:
        return "hang", traceback.format_exc()
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return f"traceback: {type(error).__name__}", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def fuzz(inputs: int, seed: int, only: str | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Give every target its share of inputs.

    Returns:
        Counts by target and by outcome, and the first few inputs that broke something.
    """
    broken: list[dict[str, str]] = []
    began = time.monotonic()
    home, here = os.environ.get("HOME", ""), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="autofit-fuzz-") as scratch, contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        os.environ["HOME"] = scratch
        os.chdir(scratch)
        stack.callback(os.environ.__setitem__, "HOME", home)
        stack.callback(os.chdir, here)
        for module in (backend, estimate, doctor):
            stack.callback(setattr, module, "ForkServer", module.ForkServer)
            module.ForkServer = Stopped  # type: ignore[attr-defined]
        stack.callback(setattr, launching, "launch_here", launching.launch_here)
        launching.launch_here = lambda *_: (("accelerate",), test_report.measured(50.0, 15.0))
        every = targets(Path(scratch))
        if only:
            every = {name: target for name, target in every.items() if only in name}
        whole = sum(target.share for target in every.values())
        for name, target in every.items():
            spoiler = Spoiler(seed)
            target.count = max(1, -(-inputs * target.share // whole).__int__())
            start = time.monotonic()
            for number in range(target.count):
                given = target.make(spoiler)
                word, trace = outcome_of(target, given)
                target.outcomes[word] += 1
                if trace:
                    if target.outcomes[word] <= 3:
                        say(f"--- {name}, input {number}: {repr(given)[:600]}\n{trace}")
                    broken.append({"target": name, "input": repr(given)[:2000], "outcome": word})
            target.seconds = time.monotonic() - start
            say(f"{name}: {target.count} inputs in {target.seconds:.0f} s: {dict(target.outcomes)}")
    every_outcome = Counter[str]()
    for target in every.values():
        every_outcome.update(target.outcomes)
    return {
        "inputs": sum(target.count for target in every.values()),
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "tracebacks": sum(count for word, count in every_outcome.items() if word.startswith("traceback")),
        "hangs": every_outcome["hang"],
        "targets": {
            name: {"inputs": target.count, "seconds": round(target.seconds, 1), "outcomes": dict(target.outcomes)}
            for name, target in every.items()
        },
        "broken": broken[:50],
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="targets whose name holds this")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    arguments = parser.parse_args()
    found = fuzz(
        arguments.inputs, arguments.seed, arguments.only, lambda words: print(words, file=sys.stderr, flush=True)
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found))
    return 1 if found["tracebacks"] or found["hangs"] else 0


if __name__ == "__main__":
    sys.exit(main())
