"""Record what a device does, for the README: one command, on the machine that has the device.

    python tests/gpu/record.py --output DIR [--only STEP]... [--predictions FILE.jsonl]

==========  ============================================================  ===============  =========================
step        what runs                                                     seconds at most  file in DIR
==========  ============================================================  ===============  =========================
doctor      ``autofit doctor --json``                                     60               ``doctor.json``
tune        a 1B-parameter Llama, sequence length 2048, under 40 GiB      720              ``tune.json``
verify      ``autofit verify`` of what the tune wrote                     240              ``verify.json``
script      a script of rows of unlike lengths, a Qwen2 of 0.5B           300              ``script.json``
launch      ``autofit verify`` of what that wrote                         120              ``launch.json``
landscape   ``record_landscape.py``: 60 plans of that Qwen2               600              ``landscape.jsonl``
operators   ``record_operators.py``: each alone, and whole steps          180              ``operators/``
allocator   ``allocator_bench.py``: traces and the real allocator         900              ``allocator.json``
traces      ``tests/gpu/test_trace.py``: each comparison with its bytes     300              ``traces.txt checks.jsonl``
tests       the other tests of ``tests/gpu``                              400              ``tests.txt``
fits        ``tests/gpu/fits.py``: the smallest card of some forty plans  540              ``fits.jsonl``
==========  ============================================================  ===============  =========================

DIR/record.json says of each step what was run, how it ended and how long it took; a step that is run again replaces its
own entry alone. A step that takes too long is ended, and the next one begins. ``--limit-seconds STEP=N`` changes a
limit, ``--budget-seconds N`` ends them all. ``fits`` continues DIR/fits.jsonl, or the file of ``--continue``, and
``landscape`` DIR/landscape.jsonl. What is tuned lies in ``--scratch``, where ``verify`` and ``launch`` find it again
while the machine lives.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from tests.gpu.models import LLAMA_1B, QWEN_05B  # noqa: E402 - the checkout is found first

BENCHES = HERE.parent / "bench"
LIMITS = {
    "doctor": 60.0, "tune": 720.0, "verify": 240.0, "script": 300.0, "launch": 120.0, "landscape": 600.0,
    "operators": 180.0, "allocator": 900.0, "traces": 300.0, "tests": 400.0, "fits": 540.0,
}  # fmt: skip
AUTOFIT = [sys.executable, "-m", "autofit.cli"]
GRACE = 20.0  # between the end that a program is asked for and the one that it is made to


def commands(options, seconds):
    """What each step runs, with the seconds that it has."""
    out, scratch = options.output, options.scratch
    tuned, scripted, qwen = scratch / "tune", scratch / "script", scratch / "qwen"
    fits = [sys.executable, str(HERE / "fits.py"), "--output", str(out / "fits.jsonl")]
    if options.predictions:
        fits += ["--predictions", str(options.predictions)]
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the latter warns, and warnings are errors
    pytest = [sys.executable, "-m", "pytest", "-v", "-n", "0", *plugins, "--durations=15"]
    traces = HERE / "test_trace.py"
    minutes, scripts_minutes = (max(0.5, (seconds[step] - GRACE) / 60) for step in ("tune", "script"))
    recorder = [sys.executable, str(BENCHES / "record_operators.py"), "--output", str(out / "operators")]
    return {
        "doctor": [*AUTOFIT, "doctor", "--json"],
        "operators": [*recorder, "--kernels", "40", "--seconds", f"{max(1.0, seconds['operators'] - GRACE):.0f}"],
        "allocator": [sys.executable, str(BENCHES / "allocator_bench.py"), "--json", str(out / "allocator.json")],
        "traces": [*pytest, str(traces)],
        "tests": [*pytest, *map(str, sorted(set(HERE.glob("test_*.py")) - {traces}, key=_dearest_last))],
        "fits": [*fits, "--budget-seconds", f"{max(1.0, seconds['fits'] - GRACE):.0f}"],
        "tune": [
            *AUTOFIT, "tune", str(scratch / "llama-1b.json"), "--seq-len", "2048", "--global-batch", "32",
            "--memory-limit", options.limit, "--timeout", f"{minutes:.2f}m", "--output", str(tuned), "--json",
            "--resume",
        ],
        "verify": [*AUTOFIT, "verify", str(tuned), "--json"],
        "script": [
            *AUTOFIT, "tune", str(HERE.parent / "data" / "scripts" / "finetune.py"), "--output", str(scripted),
            "--json", "--timeout", f"{scripts_minutes:.2f}m", "--resume",
            "--", "--model", str(qwen), "--rows", "2048", "--batch", "8", "--accumulate", "4",
        ],
        "launch": [*AUTOFIT, "verify", str(scripted), "--json"],
        "landscape": [
            sys.executable, str(BENCHES / "record_landscape.py"), str(qwen), "--output", str(out / "landscape.jsonl"),
            "--rounds", "3", "--budget-seconds", f"{max(1.0, seconds['landscape'] - 2 * GRACE):.0f}",
            "--seq-len", "1024", "--global-batch", "16", *LANDSCAPE,
        ],
    }  # fmt: skip


def _dearest_last(path):
    """The order of the tests: those that try every choice take the longest, and may be cut off."""
    return path.name == "test_device.py", path.name


LANDSCAPE = [
    "--allow", "exact,numeric",
    "--fix", "compile=off", "--fix", "offload=none", "--fix", "attention=default", "--fix", "optimizer=adamw",
    "--among", "precision=bf16,tf32", "--among", "kernels=none,chunked_ce",
    "--among", "checkpointing=off,full,selective",
]  # fmt: skip
"""What the landscapes of ``tests/data/device_landscapes`` hold still, and what they vary beside the micro-batch."""
FILES = {
    "doctor": "doctor.json",
    "traces": "traces.txt",
    "tests": "tests.txt",
    "tune": "tune.json",
    "verify": "verify.json",
    "script": "script.json",
    "launch": "launch.json",
}
"""Where a step's stdout goes; that of the others is only talk."""


def run(command, limit_seconds, stdout, environment):
    """Run a command with its own time limit: TERM to its group, and KILL a little later."""
    began = time.monotonic()
    errors = stdout.with_suffix(".stderr")
    with stdout.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True)
        status, late = None, False
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                status = process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
    entry = {
        "command": command,
        "status": status,
        "timed_out": late,
        "seconds": round(time.monotonic() - began, 1),
        "stdout_tail": _tail(stdout),
        "stderr_tail": _tail(errors),
    }
    errors.unlink()
    return entry


def _tail(path, most=8000):
    return path.read_bytes()[-most:].decode("utf-8", "replace")


def assignment(text):
    """``STEP=N``."""
    step, _, seconds = text.partition("=")
    if step not in LIMITS:
        raise argparse.ArgumentTypeError(f"{step!r} is none of {', '.join(LIMITS)}")
    return step, float(seconds)


def main(arguments=None):
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=list(LIMITS), metavar="STEP", help=", ".join(LIMITS))
    parser.add_argument("--limit-seconds", action="append", type=assignment, default=[], metavar="STEP=N")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument("--predictions", type=Path, help="for fits: made before by fits.py --predict-only")
    parser.add_argument("--continue", type=Path, dest="before", help="for fits: what another machine's run recorded")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/autofit-record"))
    parser.add_argument("--limit", default="40GiB", help="for tune: its ceiling")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    options.output.mkdir(parents=True, exist_ok=True)
    options.scratch.mkdir(parents=True, exist_ok=True)
    (options.scratch / "llama-1b.json").write_text(json.dumps(LLAMA_1B))
    (options.scratch / "qwen").mkdir(exist_ok=True)
    (options.scratch / "qwen" / "config.json").write_text(json.dumps(QWEN_05B))
    if options.before and not (options.output / "fits.jsonl").exists():
        shutil.copyfile(options.before, options.output / "fits.jsonl")
    steps = [step for step in LIMITS if not options.only or step in options.only]
    failed = record_steps(steps, options, deadline)
    sys.exit(1 if failed else 0)


def record_steps(steps, options, deadline):
    """Run the steps in order and write each one's entry as soon as it has ended; those that failed."""
    path = options.output / "record.json"
    record = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    environment = {**os.environ, "AUTOFIT_GPU_CHECKS": str(options.output.resolve() / "checks.jsonl")}
    environment["PYTHONUNBUFFERED"] = "1"
    failed = []
    for step in steps:
        limits = {**LIMITS, **dict(options.limit_seconds)}
        limits[step] = min(limits[step], deadline - time.monotonic())
        if limits[step] < 5:
            print(f"{step}: no time is left", flush=True)
            failed.append(step)
            continue
        stdout = options.output / FILES.get(step, f"{step}.txt")
        entry = run(commands(options, limits)[step], limits[step], stdout, environment)
        if step not in FILES:
            stdout.unlink()
        record["steps"][step] = entry
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(record, indent=1))
        aside.replace(path)
        ended = "ended for taking too long" if entry["timed_out"] else f"status {entry['status']}"
        print(f"{step}: {ended} after {entry['seconds']:.0f} s", flush=True)
        print("\n".join(entry["stdout_tail"].splitlines()[-12:]), flush=True)
        if entry["status"]:
            failed.append(step)
    return failed


if __name__ == "__main__":
    main()
