"""Outcomes and promises: frozen values, JSON both ways.

A *trial* turns a plan into an *outcome*, which is one of six kinds; failure is one of the expected values and no
exception. The *promise* is what the winner's own measurements say that training will do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from autofit.contract.plan import Plan

Phase = Literal["load", "forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen of each knob while the steps ran, in a trial or in a launch.

    ``None`` means not seen. A technique reads it to tell whether its value took effect.

    Attributes:
        layers: Those that ran.
        layers_recomputed: Of them, those that ran more than once in a micro-step.
        layer_forwards: The most that one of them did.
        attention: The implementation that the model's config holds.
        attention_kernels: Which kernels attended, of ``flash``, ``efficient``, ``cudnn``, ``math`` (all of PyTorch's
            own), ``flash_attn`` and ``flex``; empty where attention is made of plain operators.
        whole_logits: Whether the output layer made a score of every token of the vocabulary, for every position.
        chunked_losses: Losses that were computed a piece of the logits at a time.
        liger_modules: Modules of Liger whose functions stand in the model.
        compiled_graphs: Graphs that ``torch.compile`` has made of the code, warm-up included.
        recompiles: Those of them that were made after the warm-up.
        cuda_graphs: Whether kernels are replayed from recorded CUDA graphs.
    """

    micro_batch: int | None = None
    seq_len: int | None = None
    accumulation: int | None = None
    padding_mask: bool | None = None
    compute_dtype: str | None = None
    weights_dtype: str | None = None
    float8_linears: int = 0
    gradient_scaler: bool | None = None
    tf32: bool | None = None
    layer_forwards: int | None = None
    layers: int | None = None
    layers_recomputed: int | None = None
    kept_outputs: int = 0
    optimizer: str | None = None
    optimizer_fused: bool | None = None
    optimizer_momentum: float | None = None
    optimizer_paged: bool | None = None
    optimizer_projected: int = 0
    optimizer_stochastic: bool | None = None
    optimizer_state_dtypes: tuple[str, ...] = ()
    optimizer_state_devices: tuple[str, ...] = ()
    parameter_devices: tuple[str, ...] = ()
    offloaded_activation_bytes: int = 0
    attention: str | None = None
    attention_kernels: tuple[str, ...] | None = None
    whole_logits: bool | None = None
    chunked_losses: int = 0
    liger_modules: tuple[str, ...] = ()
    parameters: int | None = None
    trainable_parameters: int | None = None
    adapter: str | None = None
    adapted: tuple[str, ...] = ()
    quantized: str | None = None
    engine: str = "none"
    compiled: Literal["none", "regions", "model"] = "none"
    compile_mode: str | None = None
    compiled_graphs: int = 0
    recompiles: int = 0
    cuda_graphs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan that ran inside the ceiling.

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
        steps: Seconds of each timed optimizer step, in order, warm-up dropped.
        training_seconds: Seconds spent in training steps, warm-up included.
        warm_up_seconds: Seconds of the steps that were dropped; what a compiler takes is in them.
        mfu: Model FLOPs utilisation (:mod:`autofit.costmodel.utilisation`), as a share of one; ``None`` where the
            device's peak rate is not known or the plan can't be traced.
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

    ``squeezed``: the plan held less than the ceiling, so that somebody else held the rest; it says nothing of the plan.
    """

    kind: Literal["out_of_memory"] = "out_of_memory"
    where: Literal["device", "host"]
    phase: Phase
    limit_bytes: int
    peak_bytes: int
    requested_bytes: int | None = None
    training_seconds: float = 0.0
    squeezed: bool = False


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
class Trial:
    """One plan that was tried.

    ``purpose`` is ``search`` or ``final`` (a finalist measured again). ``predicted_bytes`` is the peak that its trace
    says, before anything was measured; ``None`` where it can't be traced.
    """

    number: int
    plan: Plan
    outcome: Outcome
    wall_seconds: float
    purpose: Literal["search", "final"] = "search"
    predicted_bytes: int | None = None


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
