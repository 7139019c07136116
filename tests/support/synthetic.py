"""A synthetic ground truth: facts of machines that nobody has, and outcomes by physics instead of by a device."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.contract.outcome import Measured, Outcome, OutOfMemory, Trial
from autofit.contract.plan import Plan
from autofit.registry import technique
from autofit.system.statistics import median, spread

GIB = 2**30
SHAPING = {"precision", "checkpointing", "optimizer", "offload"}
"""Techniques whose plain values shape the land, too."""
PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.17.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.0",
    "deepspeed": "0.18.0",
    "peft": "0.18.0",
}


def model(parameters=500_000_000, **changes):
    values = {
        "name": "synthetic",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "parameters": parameters,
        "layers": 24,
        "hidden_size": 1024,
        "vocab_size": 32000,
        "max_positions": 4096,
        "supports_checkpointing": True,
        "layer_classes": ("LlamaDecoderLayer",),
    }
    return Model(**{**values, **changes})


def cpu_facts(*, global_batch=32, seq_len=128, limit_bytes=8 * GIB, **workload):
    """A CPU with bfloat16 of its own, and every package."""
    return Facts(
        model=model(),
        hardware=Hardware(
            device="cpu",
            name="Synthetic CPU",
            total_bytes=64 * GIB,
            free_bytes=48 * GIB,
            host_total_bytes=64 * GIB,
            host_free_bytes=48 * GIB,
            precisions=("fp32", "bf16"),
            threads=8,
        ),
        workload=Workload(
            seq_len=seq_len, global_batch=global_batch, limit_bytes=limit_bytes, host_limit_bytes=40 * GIB, **workload
        ),
        packages=PACKAGES,
    )


def cuda_facts(*, global_batch=32, seq_len=1024, limit_bytes=22 * GIB, parameters=500_000_000, **workload):
    """An Ampere GPU, and every package."""
    return Facts(
        model=model(parameters),
        hardware=Hardware(
            device="cuda",
            name="Synthetic GPU",
            uuid="GPU-0",
            total_bytes=24 * GIB,
            free_bytes=24 * GIB,
            host_total_bytes=128 * GIB,
            host_free_bytes=120 * GIB,
            precisions=("fp32", "tf32", "bf16", "fp16"),
            capability=(8, 6),
            threads=8,
        ),
        workload=Workload(
            seq_len=seq_len, global_batch=global_batch, limit_bytes=limit_bytes, host_limit_bytes=100 * GIB, **workload
        ),
        packages=PACKAGES,
    )


def measured(steps, peak_bytes, facts, **changes):
    """A measured outcome out of step times in seconds."""
    work = facts.workload
    seconds = median(steps)
    values = {
        "step_seconds": seconds,
        "step_seconds_spread": spread(steps),
        "samples_per_second": work.global_batch / seconds,
        "tokens_per_second": work.global_batch * work.seq_len / seconds,
        "peak_bytes": int(peak_bytes),
        "allocated_bytes": int(peak_bytes),
        "reserved_bytes": int(peak_bytes),
        "outside_bytes": 0,
        "host_bytes": 0,
        "limit_bytes": work.limit_bytes,
        "fidelity": "whole",
        "steps": tuple(steps),
        "training_seconds": sum(steps),
        "loss": 5.0,
    }
    return Measured(**{**values, **changes})


def out_of_memory(facts, peak_bytes=None, phase="forward", where="device", requested_bytes=2**26):
    limit = facts.workload.limit_bytes
    return OutOfMemory(
        where=where,
        phase=phase,
        limit_bytes=limit,
        peak_bytes=int(0.97 * limit if peak_bytes is None else peak_bytes),
        requested_bytes=requested_bytes,
    )


CHECKPOINTED = {
    "off": (1.0, 1.0, 1.0), "full": (1.3, 1.25, 0.12), "every_2": (1.15, 1.12, 0.56), "every_4": (1.08, 1.06, 0.78),
    "selective": (1.08, 1.35, 0.5), "full_offload": (1.42, 1.3, 0.06),
}  # fmt: skip
"""What checkpointing makes of a row's seconds, a micro-step's overhead, and a row's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """What each plan costs on a machine of its own.

    Time per micro-step is ``overhead + rows x work``, plus the optimizer's step; memory is the larger of the
    backward pass and the optimizer step, each ``fixed + slope x rows``. Every value has its factor, and every
    pair of values one of its own (``interaction`` is the standard deviation of its logarithm).

    Attributes:
        overhead_seconds: Of one micro-step, whatever the rows.
        row_seconds: Per row in fp32, checkpointing off.
        row_bytes: Activations per row in fp32, checkpointing off.
        noise: Relative standard deviation of one measured step.
    """

    facts: Facts
    seed: int = 0
    overhead_seconds: float = 0.03
    row_seconds: float = 0.05
    row_bytes: float = 1.2 * GIB
    interaction: float = 0.08
    noise: float = 0.01

    def _factor(self, kind, plan, std):
        total = 0.0
        # a knob that is not turned leaves the land as it was before there was such a knob
        split = {"micro_batch", "accumulation"}
        turned = (name for name in plan if name in SHAPING or plan[name] != technique(name).baseline)
        knobs = [f"{name}={plan[name]}" for name in turned if name not in split]
        words = knobs + [f"{a}&{b}" for i, a in enumerate(knobs) for b in knobs[i + 1 :]]
        for word in words:
            key = hashlib.sha256(f"{self.seed} {kind} {word}".encode()).digest()
            total += random.Random(key).gauss(0, std)
        return math.exp(total / 2)

    def step_seconds(self, plan):
        """True seconds of one optimizer step."""
        rows = plan["micro_batch"]
        row = (
            self.row_seconds
            * {"fp32": 1.0, "tf32": 0.5, "bf16": 0.38, "fp16": 0.4, "bf16_weights": 0.35}[plan["precision"]]
        )
        overhead = self.overhead_seconds * (1.15 if plan["precision"] in {"bf16", "fp16"} else 1.0)
        more_row, more_overhead, _ = CHECKPOINTED[plan["checkpointing"]]
        row, overhead = row * more_row, overhead * more_overhead
        billions = self.facts.model.parameters / 1e9
        step = 0.03 * billions * {"adamw": 1.0, "adamw_8bit": 0.7, "paged_adamw_8bit": 0.9}.get(plan["optimizer"], 0.8)
        if plan["offload"] == "activations":
            row += 0.06 * self.row_seconds + 0.03
        elif plan["offload"] == "optimizer" and plan.get("parallel", "none") == "none":
            step += 0.8 * billions
        elif plan["offload"] != "none":
            step += 1.0 * billions
            overhead += 0.15 * billions
        micro = (overhead + rows * row) * (1 + 0.02 * math.log2(rows / 8) if rows > 8 else 1)
        return (micro * plan["accumulation"] + step) * self._factor("time", plan, self.interaction)

    def peak_bytes(self, plan):
        """True bytes that the device must hold."""
        rows, parameters = plan["micro_batch"], self.facts.model.parameters
        weights, gradients, state = 4.0, 4.0, {"adamw": 8.0, "sgd": 4.0, "adafactor": 0.1}.get(plan["optimizer"], 2.1)
        if plan["precision"] == "bf16_weights":
            weights, gradients, state = 2.0, 2.0, state / 2
        copies = 2.0 if plan["precision"] in {"bf16", "fp16"} else 0.0
        row = self.row_bytes * {"fp32": 1.0, "tf32": 1.0}.get(plan["precision"], 0.6)
        logits = 0.15 * self.row_bytes
        row *= CHECKPOINTED[plan["checkpointing"]][2]
        if plan["offload"] == "activations":
            row *= 0.3
        elif plan["offload"] == "optimizer":
            state = 0.3
        elif plan["offload"] == "parameters":
            weights, gradients, state = 0.6, 0.6, 0.1
        backward = parameters * (weights + gradients + state + copies) + rows * (row + logits)
        step = parameters * (weights + gradients + state + 1.0)
        return (0.5 * GIB + max(backward, step)) * self._factor("memory", plan, self.interaction / 2)

    def fits(self, plan):
        return self.peak_bytes(plan) <= self.facts.workload.limit_bytes

    def outcome(self, plan, number=0) -> Outcome:
        """What a trial of the plan would say; ``number`` seeds its noise."""
        peak, limit = self.peak_bytes(plan), self.facts.workload.limit_bytes
        if peak > limit:
            return out_of_memory(self.facts)
        rng = random.Random(f"{self.seed} {number} {plan.words()}")
        steps = [self.step_seconds(plan) * math.exp(rng.gauss(0, self.noise)) for _ in range(6)]
        return measured(steps, peak, self.facts)

    def trial(self, plan: Plan, number: int, purpose="search") -> Trial:
        return Trial(number=number, plan=plan, outcome=self.outcome(plan, number), wall_seconds=1.0, purpose=purpose)

    def best_seconds(self, space):
        """Step seconds of the fastest plan that fits."""
        return min(self.step_seconds(plan) for plan in space.plans if self.fits(plan))
