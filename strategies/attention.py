"""Attention: which implementation computes it.

- ``default``: what transformers picks for the architecture, which is ``sdpa`` where its class supports it.
- ``eager``: products and a softmax as operators of their own; keeps a score for every pair of tokens.
- ``sdpa``: PyTorch's ``scaled_dot_product_attention``, which picks a fused kernel that keeps no scores, or its slow
  ``math`` path where none fits. Which one ran is in the outcome's evidence.
- ``flash_attention_2``, ``flash_attention_3``: the ``flash-attn`` packages, 16-bit arithmetic only. They need no mask
  where a window slides over the sequence, and can do soft caps, which PyTorch's own kernels can't.
- ``flex_attention``: PyTorch's kernel that Triton generates for the mask; compiled in the first step.

Saves: the scores, whose number grows with the square of the sequence, and most of attention's time. Costs: nothing
but an installed package; ``flex_attention`` costs its compilation. All are the same mathematics (class ``exact``).
Sources: Dao et al. (arXiv 2205.14135, 2307.08691), Shah et al. (arXiv 2407.08608), Dong et al. (arXiv 2412.05496);
``PreTrainedModel._check_and_adjust_attn_implementation`` for what an architecture supports.

A trace takes FlashAttention for PyTorch's fused kernel (cuDNN's on cards of 9.x and 10.x), which is the same algorithm
and keeps the same tensors: query, key, value, output and a float32 a row. Where a window slides, that is an upper
bound, since PyTorch's needs a mask.

Not covered: kernels from the hub, which transformers loads by the ``kernels`` package; FlashAttention-4; widths of
heads that a kernel refuses, which a trial finds out; traces of ``flex_attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import PARALLEL, context_ranks
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Status, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_SIXTEEN_BITS = {"bf16", "fp16", "bf16_weights", "fp16_weights"}
_FLASH = {
    "flash_attention_2": ("flash-attn", (8, 0), (99, 0), "Ampere or newer"),
    "flash_attention_3": ("flash-attn-3", (9, 0), (10, 0), "Hopper"),
}
"""Package, the capabilities from and below which it runs, and these in words."""
_PYTORCHS = frozenset({"flash", "efficient", "cudnn", "math"})
_SHOWS = {
    "eager": frozenset(),
    "sdpa": _PYTORCHS,
    "flash_attention_2": frozenset({"flash_attn"}),
    "flash_attention_3": frozenset({"flash_attn"}),
    "flex_attention": frozenset({"flex"}),
}
"""Kernels that a value runs."""
_NODES = {
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductCudnnAttention": "cudnn",
    "SafeSoftmax": "math",
    "FlashAttn": "flash_attn",
    "flash_attn": "flash_attn",
    "FlexAttention": "flex",
    "flex_attention": "flex",
}
"""Kernels, by what the names of their nodes in autograd's graph hold."""
_OPAQUE = ("CompiledFunction", "CheckpointFunction")
"""Nodes that hide what they run: torch.compile's, and reentrant checkpointing's."""
_TITLE = "Which attention ran"


_LLAMA_FACTORY = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2"}
"""What LLaMA-Factory calls the values; it knows ``fa3``, and refuses it for all models but gpt-oss (0.9.5)."""


class Attention(Technique):
    """Which implementation computes attention."""

    name = "attention"
    baseline = "default"
    packages = {**{row[0]: "" for row in _FLASH.values()}, "triton": ""}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        model = facts.model
        default = "the model's own" if model.plain_module else f"transformers picks {model.attention} here"
        # seen to win on a recorded landscape of a CPU, where rows are short and the fused kernel is no faster
        eager: Status = "offered" if facts.hardware.device == "cpu" else "on_request"
        explicit = (
            self._choice("sdpa", facts, "offered", "PyTorch's fused kernels"),
            self._choice("eager", facts, eager, "operators of their own, and a score for every pair of tokens"),
            *(self._flash(value, facts) for value in _FLASH),
            self._flex(facts),
        )
        return (Choice("default", Kind.EXACT, "offered", default), *explicit)

    def _choice(self, value: str, facts: Facts, status: Status, reason: str) -> Choice:
        """A value, withheld where it would be the default again or where the class does not know it."""
        model = facts.model
        if value == model.attention:
            return Choice(value, Kind.EXACT, "withheld", f"it is the default for {model.architecture}")
        if value not in model.attentions:
            return Choice(value, Kind.EXACT, "withheld", f"{model.architecture} does not support it")
        return Choice(value, Kind.EXACT, status, reason)

    def _flash(self, value: str, facts: Facts) -> Choice:
        package, least, below, generation = _FLASH[value]
        capability, why = facts.hardware.capability, None
        if facts.hardware.device == "cpu":
            why = "it runs on CUDA devices only"
        elif capability is None or not least <= capability < below:
            why = f"it needs {generation}, and {facts.hardware.name} is none"
        elif lacking := self.lacks(facts, package):
            why = lacking
        elif value == "flash_attention_3" and facts.model.attention_dropout:
            why = f"{facts.model.architecture} drops attention weights, which it can't"
        if why is not None:
            return Choice(value, Kind.EXACT, "withheld", why)
        return self._choice(value, facts, "offered", f"kernels of {package}, in 16 bits")

    def _flex(self, facts: Facts) -> Choice:
        why = facts.lacks_triton()
        if facts.hardware.device == "cpu":
            why = "it can't be trained with on a CPU"
        if why is not None:
            return Choice("flex_attention", Kind.EXACT, "withheld", why)
        return self._choice("flex_attention", facts, "on_request", "a kernel that is compiled in the first step")

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value in _FLASH and others["precision"] not in _SIXTEEN_BITS:
            return f"{value} computes in 16 bits, not in {others['precision']}"
        chosen = facts.model.attention if value == self.baseline else value
        if context_ranks(others.get(PARALLEL, "none")) > 1 and chosen != "sdpa":
            return f"{others[PARALLEL]} splits the rows of sdpa alone, not of {chosen}"
        return None

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value != self.baseline:
            recipe.model_arguments["attn_implementation"] = str(value)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        asked = None if script is None else script.loads.get("attn_implementation")
        if asked is None:
            return None
        return Held(self.baseline, f"the script makes its model with {asked}", by_script=True)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        elsewhere: dict[str, dict[str, Any]] = {}
        ran = facts.model.attention if value == self.baseline else str(value)
        if ran in _LLAMA_FACTORY:  # by itself it takes another for some models, as for Gemma 2
            elsewhere["llamafactory"] = {"flash_attn": _LLAMA_FACTORY[ran]}
        if value == self.baseline:
            return Emission(elsewhere=elsewhere)
        elsewhere["sft"] = {"model_init_kwargs": {"attn_implementation": str(value)}}
        elsewhere["axolotl"] = {"attn_implementation": str(value)}
        return Emission(script=(f"load the model with {value}: model = setup.model(...)",), elsewhere=elsewhere)

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if part == "optimizer":
            return self.baseline
        if value in _FLASH:
            return "sdpa"
        return None if value == "flex_attention" else value

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Which kernels ran is read off autograd's graph, once, behind the first forward pass."""
        import torch

        looked: list[list[str] | None] = []

        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if not looked and not torch.compiler.is_compiling():  # a compiled model shows no graph
                looked.append(_kernels_behind(output))

        def read(ran: Ran) -> Seen:
            config: Any = getattr(ran.model, "config", None)
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            asked = getattr(text, "_attn_implementation", None)
            return {"implementation": asked, "kernels": looked[0] if looked else None}

        hooks.after(model, hook)
        return read

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        asked, kernels = seen.get("implementation"), seen.get("kernels")
        if asked is None or not facts.model.model_type:  # a module of the user's own attends as it does
            return None
        wanted = facts.model.attention if value == self.baseline else str(value)
        if asked != wanted:
            return f"the model attends by {asked}, not {wanted}"
        if value == self.baseline or kernels is None:
            return None  # what an architecture does by itself is what a script gets
        shows = _SHOWS[wanted]
        if bool(shows) != bool(shows & set(kernels)) or set(kernels) - shows:
            return f"the layers do not attend by {wanted}: kernels seen are {', '.join(kernels) or 'none'}"
        return None

    def finding(self, seen: Seen) -> tuple[str, str] | None:
        asked, kernels = seen.get("implementation"), seen.get("kernels")
        if kernels is None:
            return None
        if not kernels:
            return _TITLE, f"No fused kernel ran: attention is made of plain operators ({asked})."
        whose = "PyTorch's own" if set(kernels) <= _PYTORCHS else "another package's"
        slow = "; math is the slow one, which keeps all scores" if "math" in kernels else ""
        return _TITLE, f"Asked for was {asked}, and what ran is {' and '.join(kernels)} ({whose}{slow})."

    def prior(self, value: Value, facts: Facts) -> Prior:
        """What fusing saves grows with the sequence; on one of a thousand tokens attention is a tenth of the step."""
        if value in {self.baseline, facts.model.attention}:
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        if value == "eager":
            return Prior(time=(0.15, 0.2), memory=(0.3, 0.3))
        if facts.model.attention == "eager":
            return Prior(time=(-0.2, 0.2), memory=(-0.2, 0.2))
        return Prior(time=(-0.02, 0.1), memory=(0.0, 0.05))


def _kernels_behind(output: Any) -> list[str] | None:
    """Kernels of attention in the graph behind a model's output; ``None`` where the graph does not show them."""
    from torch.utils._pytree import tree_leaves

    waiting = [value.grad_fn for value in tree_leaves(output) if getattr(value, "grad_fn", None) is not None]
    met, found = set(waiting), set[str]()
    while waiting:
        node = waiting.pop()
        name = node.name()
        if any(part in name for part in _OPAQUE):
            return None
        found.update(kernel for part, kernel in _NODES.items() if part in name)
        for before, _ in node.next_functions:
            if before is not None and before not in met:
                met.add(before)
                waiting.append(before)
    return sorted(found) if met else None
