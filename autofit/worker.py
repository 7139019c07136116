"""The process of one job: it reads ``job.json`` in its folder and leaves one result file there.

Jobs are ``trial`` (a plan is measured: ``outcome.json``), ``curve`` (it trains a little: ``curve.json``),
``describe`` (facts are read: ``facts.json``), ``rates`` (the device is timed: ``rates.json``), ``check`` (emitted
files are loaded back: ``check.json``) and ``trace`` (plans are run on fake tensors: ``traced.json``).

It is forked by :mod:`autofit.system.fork_server`, which has torch and
transformers loaded; it may also be run by itself, as ``python -m autofit.worker FOLDER``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from autofit.contract.facts import Facts
from autofit.contract.plan import OUTCOME, Crashed, Outcome, OutOfMemory, Plan, Unsupported, dump_json
from autofit.contract.recipe import Recipe
from autofit.contract.technique import Part
from autofit.machine.meters import CeilingBroken, guard_host, guarded, meter
from autofit.system.files import write_atomically
from autofit.system.tensor_cache import KEPT, Kept
from autofit.system.units import GIB, size
from autofit.training.loops import run_recipe
from autofit.training.loss_curve import CURVE, Curve, record
from autofit.training.measure import measure
from autofit.training.timing import Effort

JOB = "job.json"
OUTCOME_FILE = "outcome.json"
FACTS_FILE = "facts.json"
RATES_FILE = "rates.json"
CHECK_FILE = "check.json"
TRACED_FILE = "traced.json"
CURVE_FILE = "curve.json"
PROGRESS_FILE = "progress"
DESCRIBING_BYTES = 4 * GIB
"""Of the host, for the objects of a model without storage; 61 layers of 384 experts take less than 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """Measure one plan."""

    kind: Literal["trial"] = "trial"
    plan: Plan
    facts: Facts
    config: str
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveJob:
    """Train some steps of a plan and write down what it learns."""

    kind: Literal["curve"] = "curve"
    plan: Plan
    facts: Facts
    config: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob:
    """Read the facts of a model's config and of the device."""

    kind: Literal["describe"] = "describe"
    name: str
    config: str
    device: Literal["cuda", "cpu"]
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesJob:
    """Time what the device does in a second."""

    kind: Literal["rates"] = "rates"
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """Load emitted files back."""

    kind: Literal["check"] = "check"
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One trace: which part of a plan's step, and the file that takes it."""

    part: Part
    plan: Plan
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Trace parts of plans."""

    kind: Literal["trace"] = "trace"
    facts: Facts
    config: str
    requests: tuple[TraceRequest, ...]
    folder: str


Job = Annotated[TrialJob | CurveJob | DescribeJob | RatesJob | CheckJob | TraceJob, Field(discriminator="kind")]
JOBS: TypeAdapter[Any] = TypeAdapter(Job)


def main(folder: Path) -> None:
    """Do the job in a folder. Every failure that can be caught becomes a result."""
    job = JOBS.validate_json((folder / JOB).read_bytes())
    if isinstance(job, DescribeJob):
        write_atomically(folder / FACTS_FILE, json.dumps(_described(job), indent=1, allow_nan=False))
        return
    if isinstance(job, RatesJob):
        write_atomically(folder / RATES_FILE, json.dumps(_timed(job), indent=1, allow_nan=False))
        return
    if isinstance(job, CheckJob):
        write_atomically(folder / CHECK_FILE, json.dumps({"error": _refusal(job)}))
        return
    if isinstance(job, TraceJob):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything is imported that asks for the device, and forked
        from autofit.costmodel.trace_job import trace_all

        failed = trace_all(job, folder)
        write_atomically(folder / TRACED_FILE, json.dumps({"failed": failed}))
        return
    if isinstance(job, CurveJob):
        write_atomically(folder / CURVE_FILE, dump_json(CURVE, _trained(job, folder)))
        return
    outcome = _tried(job, folder)
    write_atomically(folder / OUTCOME_FILE, dump_json(OUTCOME, outcome))


def _tried(job: TrialJob, folder: Path) -> Outcome:
    """The outcome of a plan; whatever is unforeseen is a crash with its traceback, never swallowed."""
    try:
        return _measured(job, folder)
    except CeilingBroken as broken:
        work = job.facts.workload
        return OutOfMemory(
            where=broken.where,
            phase="load",
            limit_bytes=work.limit_bytes if broken.where == "device" else work.host_limit_bytes,
            peak_bytes=broken.peak_bytes,
        )
    except ImportError as error:
        traceback.print_exc()
        return Unsupported(reason=f"a package is missing or broken: {error}")
    except Exception as error:  # noqa: BLE001 - the top of the worker
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_first_line(error)}"
        return Crashed(reason=reason, log_tail=traceback.format_exc()[-4000:])


def _trained(job: CurveJob, folder: Path) -> Curve:
    """The curve of a plan; whatever is unforeseen is told in words."""
    try:
        recipe = _launched(job.plan, job.facts, folder)
        return record(recipe, job.steps, meter(job.facts), config=Path(job.config), folder=folder)
    except Exception as error:  # noqa: BLE001 - the top of the worker
        traceback.print_exc()
        return Curve(failed=f"{type(error).__name__}: {_first_line(error)}")


def _measured(job: TrialJob, folder: Path) -> Outcome:
    recipe = _launched(job.plan, job.facts, folder)
    recipe.kept = Kept(folder.parent / KEPT)
    progress = os.open(folder / PROGRESS_FILE, os.O_WRONLY | os.O_CREAT, 0o644)

    def tell(words: str) -> None:
        with contextlib.suppress(OSError):  # in place: a process that is killed here leaves no empty file
            os.pwrite(progress, words.ljust(32).encode(), 0)

    tell("load")
    counter = meter(job.facts)
    return measure(
        recipe,
        job.effort,
        counter,
        lambda clock: run_recipe(clock, config=Path(job.config), folder=folder),
        tell,
    )


def _launched(plan: Plan, facts: Facts, folder: Path) -> Recipe:
    """Become the process that ``accelerate launch`` starts for a plan, and return its recipe."""
    from autofit.machine.describe import given_threads
    from autofit.registry import recipe as recipe_of
    from autofit.training.launch_environment import launch_environment, write_yaml

    recipe = recipe_of(plan, facts)
    config_file = folder / "accelerate.yaml"
    write_yaml(config_file, dict(recipe.emission.accelerate))
    _take_environment(launch_environment(config_file), facts)
    import torch
    from transformers import Trainer, utils

    _ = Trainer  # imported before the base of memory is read
    torch.set_num_threads(given_threads() or 1)
    utils.logging.set_verbosity(logging.ERROR)
    warm_up_threads()
    if facts.hardware.device == "cpu":
        guard_host(facts.workload.limit_bytes)
    return recipe


def warm_up_threads() -> None:
    """Start the threads and load the kernels that every step needs, so that they belong to the base of memory."""
    import torch

    layer = torch.nn.Linear(256, 256)
    layer(torch.ones(256, 256)).sum().backward()


def _take_environment(environment: Mapping[str, str], facts: Facts) -> None:
    """Become a process that ``accelerate launch`` has started."""
    os.environ.update(environment)
    if facts.hardware.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:500] if text else "no message"


def _timed(job: RatesJob) -> dict[str, Any]:
    """The rates as JSON; ``{"error": words}`` where the device can't."""
    import torch

    from autofit.costmodel import device_rates

    torch.set_num_threads(job.facts.hardware.threads)
    try:
        warm_up_threads()
        brought = device_rates.brought_bytes(job.facts)  # before anything else is computed in here
        return {"brought_bytes": brought, "rates": device_rates.rates_of(job.facts)}
    except Exception as error:  # noqa: BLE001 - a driver, a kernel that is missing
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {_first_line(error)}"}


def _refusal(job: CheckJob) -> str | None:
    """Why an emitted file was refused, or ``None``."""
    from autofit.output.emit import check_files
    from autofit.system.errors import EmissionError

    try:
        check_files(Path(job.folder))
    except EmissionError as error:
        return str(error)
    return None


def _described(job: DescribeJob) -> dict[str, Any]:
    """The facts as JSON; ``{"error": words}`` where the config is wrong, ``{"device": words}`` where the device is."""
    from transformers import modeling_utils

    from autofit.machine.describe import describe_hardware, describe_model

    _ = modeling_utils  # what it imports may ask for the device, whose driver takes more than the guard leaves
    try:
        with guarded(DESCRIBING_BYTES):
            model = describe_model(job.name, Path(job.config), trust_remote_code=job.trust_remote_code)
    except MemoryError:
        return {"error": f"its modules alone take more than {size(DESCRIBING_BYTES)} of the host: are its sizes right?"}
    except Exception as error:  # noqa: BLE001 - libraries raise anything on a bad config; the words reach the user
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {_first_line(error)}"}
    try:
        return {"model": model, "hardware": describe_hardware(job.device)}
    except Exception as error:  # noqa: BLE001 - a driver, too
        traceback.print_exc()
        return {"device": f"{type(error).__name__}: {_first_line(error)}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
