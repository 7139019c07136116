"""Optimizer: which one steps, and in how many bytes per parameter it keeps its state.

AdamW and its cheaper arithmetics:

- ``adamw``: AdamW, 8 bytes of state a parameter. Fused where PyTorch has a fused kernel (CUDA, and the CPU): one
  pass over the state, and no temporaries of the size of all parameters as the for-each kernel makes them.
- ``adamw_8bit``: bitsandbytes' AdamW with block-wise 8-bit state, 2 bytes a parameter. A Trainer keeps the state
  of embeddings in 32 bit, and so does this. Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
  (arXiv 2110.02861).
- ``paged_adamw``, ``paged_adamw_8bit``: in CUDA managed memory, which moves to the host when the device is full.
- ``adamw_torchao_8bit``, ``adamw_torchao_4bit``: torchao's AdamW, whose step is compiled for each shape of a
  parameter: the first one takes seconds to minutes. 4 bits: Li et al. (arXiv 2309.01507).
- ``..._stochastic``: the same, with bfloat16 weights rounded up or down by chance in proportion to what is cut off,
  so that small updates are kept on average. Only beside ``precision=bf16_weights``.

Other families (class ``method``):

- ``adafactor``: transformers' own (not PyTorch's), without momentum, ``scale_parameter`` and ``relative_step`` off,
  as a Trainer builds it: its second moment is factored into rows and columns. Shazeer and Stern (arXiv 1804.04235).
- ``sgd``: SGD with momentum 0.9, 4 bytes a parameter. A Trainer's plain ``sgd`` has no momentum: it is asked for
  by ``optim_args``.
- ``lion``, ``lion_8bit``, ``paged_lion_8bit``: the sign of a momentum, 4 bytes or 1. Chen et al. (arXiv 2302.06675).
- ``ademamix``, ``ademamix_8bit``, ``paged_ademamix_8bit``: a second, slow momentum, 12 bytes or 3. Pagliardini et al.
  (arXiv 2409.03137).
- ``galore_adamw``, ``galore_adamw_8bit``, ``galore_adafactor``: state of gradients projected to rank 128 by singular
  vectors, found anew every 200 steps. Zhao et al. (arXiv 2403.03507). ``apollo_adamw``: only the scale of an update
  comes from such state, and the projection is random. Zhu et al. (arXiv 2412.05270).
- ``lomo``, ``adalomo``: each parameter is updated while the backward pass runs, so that no gradients are kept; no
  accumulation, no clipping by norm. Lv et al. (arXiv 2306.09782, 2310.10195).
- ``schedule_free_adamw``, ``schedule_free_radam``: averaged weights in a schedule's place. Defazio et al.
  (arXiv 2405.15682).
- ``stable_adamw``: AdamW with Adafactor's update clipping; with bfloat16 weights it sums by Kahan, which keeps small
  updates at 2 bytes a parameter more. Wortsman et al. (arXiv 2304.13013).

Saves: state, which is half of the 16 bytes a parameter that plain AdamW training holds. Costs: quantizing, projecting
and paging take time in each step; another family costs a new search for its learning rate. Sources: the papers above;
``transformers.trainer_optimizer`` for what each argument builds.

AdamW is the reference (class ``exact``), its state in fewer bits is ``numeric``, another family of optimizers is
``method``: it wants another learning rate, which autofit does not tune.

Not covered: learning rates and schedules; the layer-wise variants of GaLore and APOLLO; what a new projection costs
every 200 steps, which a short trial sees in its warm-up only; how much LOMO needs before it is tried, since a trace
keeps gradients; ``grokadamw``, which takes its state to the host and back in every step. What torchao's compiled step
makes for itself is read off the code that is compiled for a CPU.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from autofit.contract.emission import Emission
from autofit.contract.observation import dtype_name
from autofit.contract.technique import Choice, Kind, Part, Prior, Technique, replacing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import TraceRecorder

MOMENTUM = 0.9
_LEAST_PAGED = 1e5  # bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer
_ANEW = "tune the learning rate anew."
_FAMILY = "another optimizer family: it wants its own learning rate"
_TORCHAO = "torchao.optim.adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One optimizer.

    Attributes:
        optim: What ``TrainingArguments`` call it.
        steps: The class that steps.
        state_bytes: Of state a parameter, about; below zero where gradients are saved too.
        packages: Distributions that it needs.
        args: ``optim_args``.
        bits: Of a number of the state; below 32 they are kept as bytes.
        paged: The state is in managed memory.
        low_rank: Gradients of linear layers are projected.
        in_backward: Steps while the backward pass runs.
        stochastic: Rounds bfloat16 weights by chance.
        modes: Has to be told whether it trains.
        needs_cuda: Why it is of no use on a CPU, where it is of none.
    """

    optim: str
    steps: str
    kind: Kind = Kind.METHOD
    status: Literal["offered", "on_request"] = "on_request"
    state_bytes: float
    reason: str = _FAMILY
    changes: str | None
    packages: tuple[str, ...] = ()
    args: str | None = None
    bits: int = 32
    paged: bool = False
    low_rank: bool = False
    in_backward: bool = False
    stochastic: bool = False
    modes: bool = False
    needs_cuda: str | None = None


def _bnb(name: str, family: str, optim: str, **others: Any) -> _Row:
    """A row of bitsandbytes."""
    row = {"optim": optim, "steps": f"bitsandbytes.optim.{family}", "packages": ("bitsandbytes",), **others}
    if row.get("paged"):
        row["needs_cuda"] = "bitsandbytes falls back to unpaged state on a CPU"
    if "changes" not in row:
        how = ", in memory that may move to the host" if row.get("paged") else ""
        bits = f" with its state in 8 bits{how}" if row.get("bits") == 8 else how
        row["changes"] = f"{name} instead of AdamW{bits}: {_ANEW}"
    return _Row(**row)


def _ao(bits: int, *, stochastic: bool) -> _Row:
    """A row of torchao."""
    rounding = " Updated bfloat16 weights are rounded up or down by chance." if stochastic else ""
    return _Row(
        optim=f"adamw_torch_{bits}bit",
        steps=f"{_TORCHAO}.AdamW{bits}bit",
        kind=Kind.NUMERIC,
        state_bytes=bits / 4 + 0.03,
        reason="bfloat16 weights that keep small updates on average; the first step is compiled"
        if stochastic
        else f"{bits // 4} byte{'s' if bits > 4 else ''} of state a parameter; the first step is compiled",
        changes=f"AdamW keeps its state in {bits} bits, in blocks of 256.{rounding}",
        packages=("torchao",),
        args=f"bf16_stochastic_round={stochastic}",
        bits=bits,
        stochastic=stochastic,
    )


def _projected(optim: str, steps: str, name: str, args: str, **others: Any) -> _Row:
    """A row of GaLore or APOLLO."""
    package = "apollo-torch" if "apollo" in optim else "galore-torch"
    return _Row(
        optim=optim,
        steps=steps,
        args=args,
        low_rank=True,
        reason="state of projected gradients; the first step finds the projections",
        changes=f"{name} instead of AdamW: gradients of linear layers are projected to rank 128; {_ANEW}",
        **{"packages": (package,), **others},
    )


_GALORE = "rank=128,update_proj_gap=200,scale=0.25,proj_type=std"
_APOLLO = "rank=128,proj=random,scale_type=channel,update_proj_gap=200,scale=1.0,proj_type=std"
_LOMO_CHANGES = "steps while the backward pass runs, without clipping by norm"
_SCHEDULE = "without a schedule: ask for a constant learning rate, and"

_ROWS = {
    "adamw": _Row(
        optim="adamw_torch_fused",
        steps="torch.optim.adamw.AdamW",
        kind=Kind.EXACT,
        status="offered",
        state_bytes=8.0,
        reason="the reference, with a fused kernel",
        changes=None,
    ),
    "adamw_8bit": _bnb(
        "AdamW", "adamw.AdamW", "adamw_bnb_8bit",
        kind=Kind.NUMERIC,
        status="offered",
        state_bytes=2.03,
        bits=8,
        reason="2 bytes of state a parameter instead of 8",
        changes="AdamW keeps its state in 8 bits, in blocks of 256 (embeddings stay in 32 bits).",
    ),
    "paged_adamw_8bit": _bnb(
        "AdamW", "adamw.AdamW", "paged_adamw_8bit",
        kind=Kind.NUMERIC,
        status="offered",
        state_bytes=2.03,
        bits=8,
        paged=True,
        reason="8-bit state that moves to the host when the device is full",
        changes="AdamW keeps its state in 8 bits, in memory that may move to the host.",
    ),
    "paged_adamw": _bnb(
        "AdamW", "adamw.AdamW", "paged_adamw_32bit",
        kind=Kind.EXACT,
        state_bytes=8.0,
        paged=True,
        reason="state that moves to the host when the device is full",
        changes="AdamW keeps its state in memory that may move to the host.",
    ),
    "adamw_torchao_8bit": _ao(8, stochastic=False),
    "adamw_torchao_4bit": _ao(4, stochastic=False),
    "adamw_torchao_8bit_stochastic": _ao(8, stochastic=True),
    "adamw_torchao_4bit_stochastic": _ao(4, stochastic=True),
    "adafactor": _Row(
        optim="adafactor",
        steps="transformers.optimization.Adafactor",
        status="offered",
        state_bytes=0.01,
        changes=f"Adafactor instead of AdamW: factored second moment, no momentum; {_ANEW}",
    ),
    "sgd": _Row(
        optim="sgd",
        steps="torch.optim.sgd.SGD",
        status="offered",
        state_bytes=4.0,
        args=f"momentum={MOMENTUM}",
        changes=f"SGD with momentum {MOMENTUM} instead of AdamW: {_ANEW}",
    ),
    "lion": _bnb("Lion", "lion.Lion", "lion_32bit", state_bytes=4.0),
    "lion_8bit": _bnb("Lion", "lion.Lion", "lion_8bit", state_bytes=1.02, bits=8),
    "paged_lion_8bit": _bnb("Lion", "lion.Lion", "paged_lion_8bit", state_bytes=1.02, bits=8, paged=True),
    "ademamix": _bnb("AdEMAMix", "ademamix.AdEMAMix", "ademamix", state_bytes=12.0),
    "ademamix_8bit": _bnb("AdEMAMix", "ademamix.AdEMAMix", "ademamix_8bit", state_bytes=3.05, bits=8),
    "paged_ademamix_8bit": _bnb(
        "AdEMAMix", "ademamix.AdEMAMix", "paged_ademamix_8bit", state_bytes=3.05, bits=8, paged=True
    ),
    "galore_adamw": _projected("galore_adamw", "galore_torch.adamw.AdamW", "GaLore", _GALORE, state_bytes=2.0),
    "galore_adamw_8bit": _projected(
        "galore_adamw_8bit", "galore_torch.adamw8bit.AdamW8bit", "GaLore with 8-bit state", _GALORE,
        state_bytes=1.0,
        bits=8,
        packages=("galore-torch", "bitsandbytes"),
        needs_cuda="its step synchronizes with CUDA",
    ),
    "galore_adafactor": _projected(
        "galore_adafactor", "galore_torch.adafactor.Adafactor", "GaLore with Adafactor", _GALORE, state_bytes=0.5
    ),
    "apollo_adamw": _projected("apollo_adamw", "apollo_torch.apollo.AdamW", "APOLLO", _APOLLO, state_bytes=1.0),
    "lomo": _Row(
        optim="lomo",
        steps="lomo_optim.lomo.Lomo",
        state_bytes=-4.0,
        packages=("lomo-optim",),
        in_backward=True,
        reason="SGD without state and without gradients kept; another family, with its own learning rate",
        changes=f"LOMO instead of AdamW: SGD that {_LOMO_CHANGES}; {_ANEW}",
    ),
    "adalomo": _Row(
        optim="adalomo",
        steps="lomo_optim.adalomo.AdaLomo",
        state_bytes=-3.9,
        packages=("lomo-optim",),
        in_backward=True,
        reason="factored state and no gradients kept; another family, with its own learning rate",
        changes=f"AdaLomo instead of AdamW: it {_LOMO_CHANGES}; {_ANEW}",
        needs_cuda="its state is made on a CUDA device",
    ),
    "schedule_free_adamw": _Row(
        optim="schedule_free_adamw",
        steps="schedulefree.adamw_schedulefree.AdamWScheduleFree",
        state_bytes=8.0,
        packages=("schedulefree",),
        modes=True,
        changes=f"Schedule-free AdamW {_SCHEDULE} {_ANEW}",
    ),
    "schedule_free_radam": _Row(
        optim="schedule_free_radam",
        steps="schedulefree.radam_schedulefree.RAdamScheduleFree",
        state_bytes=8.0,
        packages=("schedulefree",),
        modes=True,
        changes=f"Schedule-free RAdam {_SCHEDULE} {_ANEW}",
    ),
    "stable_adamw": _Row(
        optim="stable_adamw",
        steps="optimi.stableadamw.StableAdamW",
        state_bytes=8.0,
        packages=("torch-optimi",),
        changes=f"StableAdamW instead of AdamW: updates are clipped, bfloat16 weights summed by Kahan; {_ANEW}",
    ),
}  # fmt: skip


class Optimizer(Technique):
    """Which optimizer steps."""

    name = "optimizer"
    baseline = "adamw"
    # before 0.50 the optimizers of bitsandbytes don't run without a GPU, and so can't be traced
    packages = {**{name: "" for row in _ROWS.values() for name in row.packages}, "bitsandbytes": "0.50"}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        made = []
        for value, row in _ROWS.items():
            why_not = _why_not(row, facts)
            made.append(Choice(value, row.kind, "withheld" if why_not else row.status, why_not or row.reason))
        return tuple(made)

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        row = _ROWS[str(value)]
        if row.stochastic and others["precision"] != "bf16_weights":
            return f"{value} rounds bfloat16 weights, and {others['precision']} has none"
        if row.in_backward and others["accumulation"] != 1:
            return f"{value} steps in every backward pass, so that gradients can't be accumulated"
        if row.in_backward and others["precision"] == "fp16":
            return f"{value} steps before the gradients of a scaled loss are scaled back"
        if (row.in_backward or row.low_rank) and others.get("adapter", "none") != "none":
            return f"{value} saves on the gradients of all weights, and an adapter leaves few"
        return None

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.state_bits = _ROWS[str(value)].bits
        if _ROWS[str(value)].modes and recipe.facts.workload.launch_path == "loop":
            recipe.optimizer_wraps.append(_in_training)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        row = _ROWS[str(value)]
        lines: tuple[str, ...] = ()
        if row.modes and facts.workload.launch_path == "loop":
            lines = ("setup.optimizer(model) stands in training mode: optimizer.eval() before evaluating or saving",)
        return Emission(
            training_args={
                "optim": row.optim,
                "optim_args": row.args,
                "optim_target_modules": "all-linear" if row.low_rank else None,
            },
            script=lines,
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if _ROWS[str(value)].in_backward:
            return None  # parts of a step are traced one after the other
        return value if part == "optimizer" else self.baseline

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        row, on_cuda = _ROWS[str(value)], facts.hardware.device == "cuda"
        replaced: list[tuple[Any, str, Any]] = []
        if "bitsandbytes" in row.packages:
            replaced += _bitsandbytes(recorder, paged=row.paged and on_cuda)
        if "torchao" in row.packages:
            replaced += _torchao()
        if "apollo-torch" in row.packages:
            projector = import_module("apollo_torch.random_projector")
            replaced.append((projector, "next_seed", lambda seed, *_: seed + 1))  # it reads numbers off a tensor
        if "torch-optimi" in row.packages and on_cuda:
            # one Triton kernel a parameter, in place
            replaced.append((import_module("optimi.stableadamw"), "stableadamw", lambda **_: None))
        return replacing(replaced)

    def observe(self, ran: Ran) -> Seen:
        real, kind = ran.optimizer, type(ran.optimizer)
        group = real.param_groups[0] if getattr(real, "param_groups", None) else {}
        rounded = getattr(real, "bf16_stochastic_round", None)  # transformers reads a number off its argument
        projected = [one for one in getattr(real, "param_groups", ()) if "rank" in one]
        # torchao's state says what it stands for
        dtypes = {dtype_name(getattr(tensor, "codes", tensor)) for tensor in ran.state_tensors()}
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "engine": ran.engine,
            "fused": group.get("fused"),
            "momentum": group.get("momentum"),
            "paged": getattr(real, "is_paged", None),
            "projected": sum(len(one["params"]) for one in projected),
            "stochastic": None if rounded is None else bool(rounded),
            "loss_scaled": getattr(ran.accelerator, "scaler", None) is not None,
            "state_dtypes": sorted(dtypes),
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        if seen.get("engine") == "DEEPSPEED":
            return None  # DeepSpeed steps with an optimizer of its own, which offload checks
        row = _ROWS[str(value)]
        if seen.get("class") != row.steps:
            return f"{seen.get('class')} stepped, not {row.steps}"
        dtypes, paged, stochastic = seen.get("state_dtypes", []), seen.get("paged"), seen.get("stochastic")
        fewer = "uint8" in dtypes
        failures = {
            "no step was taken: the gradients of the scaled loss overflowed in each": (
                seen.get("loss_scaled") is True and row.state_bytes > 0 and not dtypes
            ),
            "AdamW stepped without its fused kernel": value == "adamw" and seen.get("fused") is False,
            f"no {row.bits}-bit state: every parameter is too small for it (state is {', '.join(dtypes)})": (
                row.bits < 32 and not fewer
            ),
            f"the state is kept in fewer bits ({', '.join(dtypes)})": row.bits == 32 and fewer,
            f"SGD stepped with momentum {seen.get('momentum')}, not {MOMENTUM}": (
                value == "sgd" and seen.get("momentum") != MOMENTUM
            ),
            f"the state is {'' if paged else 'not '}paged": (paged is not None and paged != row.paged),
            "no gradient was projected: the model has no linear layers of their own": (
                row.low_rank and not seen.get("projected")
            ),
            f"weights were {'' if stochastic else 'not '}rounded by chance": (
                stochastic is not None and stochastic != row.stochastic
            ),
        }
        return next((words for words, failed in failures.items() if failed), None)

    def spends_host(self, value: Value) -> bool:
        return _ROWS[str(value)].paged

    def changes(self, value: Value, facts: Facts) -> str | None:
        return _ROWS[str(value)].changes

    def prior(self, value: Value, facts: Facts) -> Prior:
        """State is what an optimizer saves: out of 16 bytes a parameter in all, before activations."""
        saved = _ROWS["adamw"].state_bytes - _ROWS[str(value)].state_bytes
        memory = math.log(1 - saved / 16) * 0.7
        if value == "adamw":
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        slower = 0.05 if facts.hardware.device == "cuda" else 0.15
        return Prior(time=(slower, 0.15), memory=(memory, 0.15))


def _why_not(row: _Row, facts: Facts) -> str | None:
    """Why an optimizer can't be had here, or ``None``."""
    if {"galore-torch", "bitsandbytes"} <= set(row.packages):
        return "galore-torch gives bitsandbytes arguments by their places, which are others since 0.50"
    lacking = Optimizer.lacks(facts, *row.packages)
    if lacking is not None:
        return lacking
    reasons = {
        row.needs_cuda: facts.hardware.device == "cpu",
        f"{facts.hardware.name} would emulate the bfloat16 weights that it rounds": (
            row.stochastic and "bf16" not in facts.hardware.precisions
        ),
        "a plain loop does not hand it the learning rate: its accelerator.backward(loss) takes none": (
            row.in_backward and facts.workload.launch_path == "loop"
        ),
        f"the layers of {facts.model.model_type} are Conv1D, whose gradients are not projected": (
            row.low_rank and facts.model.conv1d
        ),
        "it steps before gradients are summed over the processes": row.in_backward and facts.workload.processes > 1,
    }
    return next((words for words, holds in reasons.items() if words and holds), None)


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A Trainer tells it before each micro-step; a plain loop does not."""
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


# -- what stands in, while a trace runs ------------------------------------------------------------------------------


def _bitsandbytes(recorder: TraceRecorder, *, paged: bool) -> list[tuple[Any, str, Any]]:
    """Bitsandbytes looks at a table's values when it is made, and takes paged memory from the driver."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.optim.ademamix import AdEMAMix
    from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit

    GlobalOptimManager.get_instance().initialize()  # type: ignore[no-untyped-call]  # of a trace before this one

    maps = {signed: functional.create_dynamic_map(signed=signed) for signed in (True, False)}  # type: ignore[no-untyped-call]

    def place(p: torch.Tensor) -> AbstractContextManager[None]:
        return recorder.elsewhere() if paged and p.numel() >= _LEAST_PAGED else contextlib.nullcontext()

    def state(_: object, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with place(p):
            return torch.zeros_like(p, dtype=dtype)

    def two_states(_: object, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with place(p):
            return torch.zeros((2, *p.shape), dtype=dtype)

    def prefetch(self: Any, p: torch.Tensor) -> None:
        held = [tensor for name, tensor in self.state[p].items() if name in {"state1", "state2"}]
        # in, and out again
        recorder.transfer(2 * sum(tensor.nbytes for tensor in held if recorder.lies_elsewhere(tensor)))

    return [
        (functional, "create_dynamic_map", lambda signed=True, *_: maps[signed].clone()),
        (Optimizer8bit, "get_state_buffer", state),
        (AdEMAMix, "_get_state_double_buffer", two_states),
        (Optimizer8bit, "prefetch_state", prefetch),
        (torch.cuda, "synchronize", lambda *_: None),
    ]


def _torchao() -> list[tuple[Any, str, Any]]:
    """Torchao wraps tensors for its state and compiles its step, and fake tensors can go through neither.

    What the compiled code makes for itself is made here: both moments in float32, and with 4 bits also their codes,
    unpacked and as 64-bit numbers. Source: what PyTorch 2.13 compiles for a CPU.
    """
    import torch

    adam = import_module("torchao.optim.adam")

    def state_of(bits: int) -> Any:
        def state(p: torch.Tensor, _: bool, block_size: int) -> SimpleNamespace:
            count = p.numel()
            kept = SimpleNamespace(
                codes=torch.zeros(count * bits // 8, dtype=torch.uint8),
                scale=torch.zeros(count // block_size),
                qmap=torch.zeros(2**bits),
            )
            kept.to = lambda _: kept
            return kept

        return staticmethod(state)

    def step(p: torch.Tensor, *others: Any) -> None:
        made = []
        for moment in others[2:4]:
            if not hasattr(moment, "codes"):
                continue
            if moment.codes.numel() < p.numel():
                made += [torch.empty_like(p, dtype=dtype) for dtype in (torch.uint8, torch.int64)]
            made.append(torch.empty_like(p, dtype=torch.float32))

    not_compiled = SimpleNamespace(**{**vars(torch), "compile": lambda function, **_: function})
    return [
        (adam.AdamW8bit, "_subclass_zeros", state_of(8)),
        (adam.AdamW4bit, "_subclass_zeros", state_of(4)),
        (adam, "single_param_adam", step),
        (adam, "torch", not_compiled),
        (adam, "Tensor", object),  # so that the learning rate stays a number: schedulers copy it with its value
    ]
