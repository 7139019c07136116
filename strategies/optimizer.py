"""Optimizer: which one steps, and in how many bytes per parameter it keeps its state.

- ``adamw``: AdamW, 8 bytes of state a parameter. Fused where PyTorch has a fused kernel (CUDA, and the CPU): one
  pass over the state, and no temporaries of the size of all parameters as the for-each kernel makes them.
- ``adamw_8bit``: bitsandbytes' AdamW with block-wise 8-bit state, 2 bytes a parameter. A Trainer keeps the state
  of embeddings in 32 bit, and so does this. Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
  (arXiv 2110.02861).
- ``paged_adamw_8bit``: the same in CUDA managed memory, which moves to the host when the device is full.
- ``adafactor``: transformers' own (not PyTorch's), without momentum, ``scale_parameter`` and ``relative_step`` off,
  as a Trainer builds it: its second moment is factored into rows and columns. Shazeer and Stern (arXiv 1804.04235).
- ``sgd``: SGD with momentum 0.9, 4 bytes a parameter. A Trainer's plain ``sgd`` has no momentum: it is asked for
  by ``optim_args``.

Saves: state, which is half of the 16 bytes a parameter that plain AdamW training holds. Costs: quantizing and paging
take time in each step; another family costs a new search for its learning rate. Sources: the papers above;
``Trainer.get_optimizer_cls_and_kwargs`` for what each argument builds.

AdamW is the reference (class ``exact``), its 8-bit state is ``numeric``, another family of optimizers is
``method``: it wants another learning rate, which autofit does not tune.

Not covered: learning rates and schedules; torchao's optimizers; optimizers that step inside the backward pass.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from autofit.technique import Choice, Emission, Kind, Part, Prior, Technique

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from autofit.facts import Facts
    from autofit.plan import Evidence, Value
    from autofit.recorder import Recorder

_OPTIM = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_CLASS = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw_8bit": "bitsandbytes.optim.adamw.AdamW",
    "paged_adamw_8bit": "bitsandbytes.optim.adamw.AdamW",
    "adafactor": "transformers.optimization.Adafactor",
    "sgd": "torch.optim.sgd.SGD",
}
MOMENTUM = 0.9
_LEAST_PAGED = 1e5  # bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer
_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03, "paged_adamw_8bit": 2.03, "adafactor": 0.01, "sgd": 4.0}


class Optimizer(Technique):
    """Which optimizer steps."""

    name = "optimizer"
    plain = "adamw"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        has_bnb = facts.has("bitsandbytes")
        on_cpu = facts.hardware.device == "cpu"
        missing = "bitsandbytes is not installed"
        other = "another optimizer family: it wants its own learning rate"
        return (
            Choice("adamw", Kind.EXACT, "offered", "the reference, with a fused kernel"),
            Choice(
                "adamw_8bit",
                Kind.NUMERIC,
                "offered" if has_bnb else "withheld",
                "2 bytes of state a parameter instead of 8" if has_bnb else missing,
            ),
            Choice(
                "paged_adamw_8bit",
                Kind.NUMERIC,
                "offered" if has_bnb and not on_cpu else "withheld",
                missing
                if not has_bnb
                else "bitsandbytes falls back to unpaged state on a CPU"
                if on_cpu
                else "8-bit state that moves to the host when the device is full",
            ),
            Choice("adafactor", Kind.METHOD, "offered", other),
            Choice("sgd", Kind.METHOD, "offered", other),
        )

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        momentum = f"momentum={MOMENTUM}" if value == "sgd" else None
        return Emission(training_args={"optim": _OPTIM[str(value)], "optim_args": momentum})

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return value if part == "optimizer" else self.plain

    @contextlib.contextmanager
    def stand_in(self, value: Value, facts: Facts, recorder: Recorder) -> Iterator[None]:
        """Bitsandbytes looks at a table's values when it is made, and takes paged memory from the driver."""
        if "8bit" not in str(value):
            yield
            return
        import torch
        from bitsandbytes import functional
        from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit

        GlobalOptimManager.get_instance().initialize()  # type: ignore[no-untyped-call]  # of a trace before this one

        maps = {signed: functional.create_dynamic_map(signed=signed) for signed in (True, False)}  # type: ignore[no-untyped-call]
        on_cuda = facts.hardware.device == "cuda"

        def state(_: object, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            paged = on_cuda and "paged" in str(value) and p.numel() >= _LEAST_PAGED
            with recorder.elsewhere() if paged else contextlib.nullcontext():
                return torch.zeros_like(p, dtype=dtype)

        def prefetch(self: Any, p: torch.Tensor) -> None:
            held = self.state[p]
            if "state1" in held and recorder.lies_elsewhere(held["state1"]):
                recorder.transfer(2 * (held["state1"].nbytes + held["state2"].nbytes))  # in, and out again

        replaced: tuple[tuple[Any, str, Any], ...] = (
            (functional, "create_dynamic_map", lambda signed=True, *_: maps[signed].clone()),
            (Optimizer8bit, "get_state_buffer", state),
            (Optimizer8bit, "prefetch_state", prefetch),
        )
        before = [getattr(owner, name) for owner, name, _ in replaced]
        for owner, name, new in replaced:
            setattr(owner, name, new)
        try:
            yield
        finally:
            for (owner, name, _), old in zip(replaced, before, strict=True):
                setattr(owner, name, old)

    def in_effect(self, value: Value, evidence: Evidence, facts: Facts) -> str | None:
        if evidence.engine == "deepspeed":
            return None  # DeepSpeed steps with an optimizer of its own, which offload checks
        wanted = _CLASS[str(value)]
        if evidence.optimizer != wanted:
            return f"{evidence.optimizer} stepped, not {wanted}"
        if value == "adamw" and evidence.optimizer_fused is False:
            return "AdamW stepped without its fused kernel"
        if "8bit" in str(value) and "uint8" not in evidence.optimizer_state_dtypes:
            return f"no 8-bit state: every parameter is too small for it (state is {evidence.optimizer_state_dtypes})"
        if value == "sgd" and evidence.optimizer_momentum != MOMENTUM:
            return f"SGD stepped with momentum {evidence.optimizer_momentum}, not {MOMENTUM}"
        return None

    def changes(self, value: Value, facts: Facts) -> str | None:
        return {
            "adamw": None,
            "adamw_8bit": "AdamW keeps its state in 8 bits, in blocks of 256 (embeddings stay in 32 bits).",
            "paged_adamw_8bit": "AdamW keeps its state in 8 bits, in memory that may move to the host.",
            "adafactor": "Adafactor instead of AdamW: factored second moment, no momentum; "
            "tune the learning rate anew.",
            "sgd": f"SGD with momentum {MOMENTUM} instead of AdamW: tune the learning rate anew.",
        }[str(value)]

    def prior(self, value: Value, facts: Facts) -> Prior:
        """State is what an optimizer saves: out of 16 bytes a parameter in all, before activations."""
        saved = _STATE_BYTES["adamw"] - _STATE_BYTES[str(value)]
        memory = math.log(1 - saved / 16) * 0.7
        if value == "adamw":
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        slower = 0.05 if facts.hardware.device == "cuda" else 0.15
        return Prior(time=(slower, 0.15), memory=(memory, 0.15))
