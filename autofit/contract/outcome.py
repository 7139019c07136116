"""Outcomes and promises: frozen values, JSON both ways.

A *trial* turns a plan into an *outcome*, which is one of six kinds; failure is one of the expected values and no
exception. The *promise* is what the winner's own measurements say that training will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from autofit.contract.plan import Plan

Purpose = Literal["search", "final"]
Phase = Literal["load", "forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen while the steps ran, in a trial or in a launch.

    ``None`` means not seen.

    Attributes:
        seq_len: Tokens of a row.
        padding_mask: Whether the model was given a mask of padding.
        parameters: Of the model, frozen ones and an adapter's included; packed weights count as they are stored.
        trainable_parameters: Those of them that are trained.
        compiled_graphs: Graphs that ``torch.compile`` has made of the code, warm-up included.
        recompiles: Those of them that were made after the warm-up.
        techniques: What each technique saw of itself, by its name; each one reads its own to tell whether its value
            took effect.
    """

    seq_len: int | None = None
    padding_mask: bool | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    compiled_graphs: int = 0
    recompiles: int = 0
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, name: str) -> Mapping[str, Any]:
        """What the technique of that name saw of itself; nothing where it saw nothing."""
        return self.techniques.get(name, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan that ran inside the ceiling.

    Where a script's rows differ in length, what counts is how many tokens without padding are trained on in a second:
    ``samples_per_second`` is that, over the tokens of a row in the mean over the data set, and the times of a step are
    those of a step of such rows.

    Attributes:
        step_seconds: Median seconds of one whole optimizer step, accumulation included.
        step_seconds_spread: Half-width of a 95 % interval of that median, in seconds.
        peak_bytes: What the device must hold under the ceiling, as its driver counts it; on the CPU the
            peak resident set above that of the idle process.
        allocated_bytes: Peak of the tensors alone (CUDA); on the CPU the same as ``peak_bytes``.
        reserved_bytes: Peak of what the allocator held (CUDA); on the CPU the same as ``peak_bytes``.
        outside_bytes: Device memory outside the allocator: context, workspaces, managed memory.
        host_bytes: Peak resident set above that of the idle process.
        fidelity: ``parts``: micro-steps and the optimizer step were timed apart and added up;
            ``whole``: whole optimizer steps were timed.
        steps: Seconds of each timed optimizer step, in order, warm-up dropped; waits for the loader are spread evenly.
        loader_seconds: Of ``step_seconds``, what the step waited for its micro-batches.
        padding: Share of the micro-batches' places for tokens that was padding; ``None`` where rows were random.
        training_seconds: Seconds spent in training steps, warm-up included.
        warm_up_seconds: Seconds of the steps that were dropped; what a compiler takes is in them.
        mfu: Model FLOPs utilisation (:mod:`autofit.costmodel.seconds.utilisation`), as a share of one; ``None`` where
            the device's peak rate is not known or the plan can't be traced.
        disturbance: Share of the machine's CPU time that others took while the steps were timed: other processes,
            and other guests of the host.
    """

    kind: Literal["measured"] = "measured"
    step_seconds: Annotated[float, Field(gt=0)]
    step_seconds_spread: float
    samples_per_second: Annotated[float, Field(gt=0)]
    tokens_per_second: float
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int
    host_bytes: int
    limit_bytes: int
    fidelity: Literal["parts", "whole"]
    steps: tuple[float, ...]
    training_seconds: float
    loss: float
    warm_up_seconds: float = 0.0
    loader_seconds: float = 0.0
    padding: float | None = None
    mfu: float | None = None
    alloc_retries: int = 0
    disturbance: float = 0.0
    evidence: Evidence = field(default_factory=Evidence)
    notes: tuple[str, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Whether others took so much of the processors that the times say little.

        Threads of a step wait for one another: on a CPU of two cores, another busy process was seen to make steps
        not twice but twenty times as long.
        """
        return self.disturbance > 0.25

    @property
    def paused(self) -> bool:
        """Whether a step stood still: the process was stopped meanwhile, and the times are no measurement."""
        usual = min(self.steps, default=0.0)
        return not self.evidence.recompiles and max(self.steps, default=0.0) > 5 * usual + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The ceiling was broken, on the device or on the host; ``peak_bytes`` is the most that was seen held.

    ``external_pressure`` (``squeezed`` in files): the plan held less than the ceiling, so another process held the
    rest; it says nothing of the plan.
    """

    kind: Literal["out_of_memory"] = "out_of_memory"
    where: Literal["device", "host"]
    phase: Phase
    limit_bytes: int
    peak_bytes: int
    requested_bytes: int | None = None
    training_seconds: float = 0.0
    external_pressure: Annotated[bool, Field(alias="squeezed")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The trial took longer than it was given."""

    kind: Literal["timed_out"] = "timed_out"
    limit_seconds: float
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """The loss was not finite."""

    kind: Literal["diverged"] = "diverged"
    loss: str
    step: int
    training_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """The plan can't be had here, or a knob was ignored by the libraries."""

    kind: Literal["unsupported"] = "unsupported"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The trial died of something unforeseen; its log says more."""

    kind: Literal["crashed"] = "crashed"
    reason: str
    log_tail: str = ""


Outcome = Annotated[Measured | OutOfMemory | TimedOut | Diverged | Unsupported | Crashed, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeed:
    """Samples per second before anything was measured; four measurements of five lie from ``low`` to ``high``.

    ``low`` is 0 where the optimizer steps on the host, whose speed is not known.
    """

    samples_per_second: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan that was tried.

    ``purpose`` is ``search`` or ``final`` (a finalist measured again). ``predicted_bytes`` is the peak that its trace
    says, before anything was measured; ``None`` where it can't be traced. ``predicted_speed`` is ``None`` there too,
    on a device of which no seconds can be predicted, and on several, whose link decides how far off it is.
    """

    number: int
    plan: Plan
    outcome: Outcome
    wall_seconds: float
    purpose: Purpose = "search"
    predicted_bytes: int | None = None
    predicted_speed: PredictedSpeed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What training through the emitted files will do, from the winner's measurements; see :class:`Measured`."""

    launch_path: Literal["trainer", "loop"]
    samples_per_second: float
    tokens_per_second: float
    step_seconds: float
    step_seconds_spread: float
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int
    limit_bytes: int
    mfu: float | None = None


OUTCOME: TypeAdapter[Any] = TypeAdapter(Outcome)
TRIAL: TypeAdapter[Trial] = TypeAdapter(Trial)
