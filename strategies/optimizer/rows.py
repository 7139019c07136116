"""Every optimizer as one row: what arguments call it, the class that steps, its state, and what it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autofit.contract.technique import Kind

MOMENTUM = 0.9
_ANEW = "tune the learning rate anew."
_FAMILY = "another optimizer family: it wants its own learning rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def _bnb(name: str, family: str, optim: str, **others: Any) -> Row:
    """A row of bitsandbytes."""
    row = {"optim": optim, "steps": f"bitsandbytes.optim.{family}", "packages": ("bitsandbytes",), **others}
    if row.get("paged"):
        row["needs_cuda"] = "bitsandbytes falls back to unpaged state on a CPU"
    if "changes" not in row:
        how = ", in memory that may move to the host" if row.get("paged") else ""
        bits = f" with its state in 8 bits{how}" if row.get("bits") == 8 else how
        row["changes"] = f"{name} instead of AdamW{bits}: {_ANEW}"
    return Row(**row)


def _ao(bits: int, *, stochastic: bool) -> Row:
    """A row of torchao."""
    rounding = " Updated bfloat16 weights are rounded up or down by chance." if stochastic else ""
    return Row(
        optim=f"adamw_torch_{bits}bit",
        steps=f"torchao.optim.adam.AdamW{bits}bit",
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


def _projected(optim: str, steps: str, name: str, args: str, **others: Any) -> Row:
    """A row of GaLore or APOLLO."""
    package = "apollo-torch" if "apollo" in optim else "galore-torch"
    return Row(
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

ROWS = {
    "adamw": Row(
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
    "adafactor": Row(
        optim="adafactor",
        steps="transformers.optimization.Adafactor",
        status="offered",
        state_bytes=0.01,
        changes=f"Adafactor instead of AdamW: factored second moment, no momentum; {_ANEW}",
    ),
    "sgd": Row(
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
    "lomo": Row(
        optim="lomo",
        steps="lomo_optim.lomo.Lomo",
        state_bytes=-4.0,
        packages=("lomo-optim",),
        in_backward=True,
        reason="SGD without state and without gradients kept; another family, with its own learning rate",
        changes=f"LOMO instead of AdamW: SGD that {_LOMO_CHANGES}; {_ANEW}",
    ),
    "adalomo": Row(
        optim="adalomo",
        steps="lomo_optim.adalomo.AdaLomo",
        state_bytes=-3.9,
        packages=("lomo-optim",),
        in_backward=True,
        reason="factored state and no gradients kept; another family, with its own learning rate",
        changes=f"AdaLomo instead of AdamW: it {_LOMO_CHANGES}; {_ANEW}",
        needs_cuda="its state is made on a CUDA device",
    ),
    "schedule_free_adamw": Row(
        optim="schedule_free_adamw",
        steps="schedulefree.adamw_schedulefree.AdamWScheduleFree",
        state_bytes=8.0,
        packages=("schedulefree",),
        modes=True,
        changes=f"Schedule-free AdamW {_SCHEDULE} {_ANEW}",
    ),
    "schedule_free_radam": Row(
        optim="schedule_free_radam",
        steps="schedulefree.radam_schedulefree.RAdamScheduleFree",
        state_bytes=8.0,
        packages=("schedulefree",),
        modes=True,
        changes=f"Schedule-free RAdam {_SCHEDULE} {_ANEW}",
    ),
    "stable_adamw": Row(
        optim="stable_adamw",
        steps="optimi.stableadamw.StableAdamW",
        state_bytes=8.0,
        packages=("torch-optimi",),
        changes=f"StableAdamW instead of AdamW: updates are clipped, bfloat16 weights summed by Kahan; {_ANEW}",
    ),
}  # fmt: skip
