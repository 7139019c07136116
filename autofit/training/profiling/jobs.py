"""The job that profiles a plan: a trial's recipe, run as a trial runs it, with the profiler on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import TypeAdapter

from autofit.contract.facts import Facts
from autofit.contract.outcome import OUTCOME, Measured, Outcome
from autofit.contract.plan import Plan
from autofit.system import strict_json
from autofit.system.files import write_atomically
from autofit.system.strict_json import dump_json
from autofit.training.jobs import TrialJob, is_rank, tried, tried_by_ranks
from autofit.training.profiling.breakdown import BREAKDOWN, Breakdown
from autofit.training.profiling.record import StepProfiler
from autofit.training.ranks import rank_folder, result_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What came of it.

    Attributes:
        outcome: Of the steps, whose times are slowed by the profiler.
        breakdown: ``None`` where the steps failed.
    """

    outcome: Outcome
    breakdown: Breakdown | None = None


_BREAKDOWN = "breakdown.json"
PROFILED: TypeAdapter[Profiled] = TypeAdapter(Profiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """Profile some optimizer steps of a plan; of several processes the first."""

    RESULT: ClassVar[str] = "profile.json"
    kind: Literal["profile"] = "profile"
    plan: Plan
    facts: Facts
    config: str
    steps: int

    def run(self, folder: Path) -> None:
        """Leave ``profile.json``, and beside it the trace and the memory's time line."""
        profiler = StepProfiler(self.steps, on_cuda=self.facts.hardware.device == "cuda")
        job = TrialJob(plan=self.plan, facts=self.facts, config=self.config, effort=profiler.effort)

        def profiled(where: Path, rank: int | None = None) -> Outcome:
            outcome = tried(job, where, folder.parent, rank, profiler.on_step if not rank else _unheard)
            if isinstance(outcome, Measured) and not rank:
                write_atomically(folder / _BREAKDOWN, dump_json(BREAKDOWN, profiler.write(folder)))
            return outcome

        def train(rank: int) -> None:
            found = profiled(rank_folder(folder, rank), rank)
            write_atomically(result_file(folder, rank), dump_json(OUTCOME, found))

        if is_rank(train):
            return
        alone = self.facts.workload.processes == 1
        outcome = profiled(folder) if alone else tried_by_ranks(self.facts, folder, train)
        found = None
        if isinstance(outcome, Measured):
            found = strict_json.read(BREAKDOWN, (folder / _BREAKDOWN).read_bytes())
        write_atomically(folder / self.RESULT, dump_json(PROFILED, Profiled(outcome=outcome, breakdown=found)))


def _unheard(_: int) -> None:
    """What is told of the steps of the other processes."""
