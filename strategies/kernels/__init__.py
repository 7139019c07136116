"""Kernels: fused ones in the place of a model's own operators.

- ``none``: the model's own operators. The loss needs a score for every position and token of the vocabulary
  (logits), several times over: in 16 bits, in float32, and their gradient.
- ``chunked_ce``: the output layer and the loss together, a sixteenth of the positions at a time. The gradients of
  the hidden state and of the output layer's weight are made in the forward pass, so that no logits are kept. Made of
  PyTorch's operators: on any device, in any precision. The gradient of the weight is added up in float32.
- ``liger``: Liger's Triton kernels for norms, rotary embeddings, activations and the loss, for the architectures that
  it knows; ``liger_fused_ce`` is its loss alone.

Saves: the logits, which are most of the memory of a small model with a large vocabulary; Liger's others save
activations and passes over memory. Costs: ``chunked_ce`` reads the weight of the output layer and writes its gradient
once a chunk, which shows where a micro-batch is small. All are the same mathematics up to the order of rounding
(class ``exact``). Sources: Hsu et al., "Liger Kernel" (arXiv 2410.10989); ``TrainingArguments.use_liger_kernel``.

PyTorch's own ``linear_cross_entropy`` saves the same, but it is one opaque operator, whose memory a trace can't see; it
does not follow autocast; and it is of PyTorch 2.13.

TRL's trainers take the loss themselves, a chunk of the logits at a time, whatever the value here: then
``watch().ignored()`` says so, and memory and speed differ from the promise.

Not covered: models that cap or scale their logits; scripts that read the logits while they train;
an adapter on the output layer; traces of Liger's kernels.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import PARALLEL, engine_of
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Technique

from .chunked_loss import CHUNKS, ChunkedLoss, chunk_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_LOSS_ALONE = {
    "fused_linear_cross_entropy": True,
    **dict.fromkeys(("cross_entropy", "rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared"), False),
}
"""Liger leaves out what an architecture's function does not take."""
_LIGER: dict[str, dict[str, bool] | None] = {"liger": None, "liger_fused_ce": _LOSS_ALONE}
_LOSS_OF_TRL = (
    "SFTTrainer takes the loss itself, a chunk of the logits at a time, and entropy and accuracy with it, which was "
    "not measured: memory and seconds differ"
)
"""TRL 1.16: ``add_fused_lm_head``. It leaves Liger's loss out, and refuses to be asked for it."""
_AXOLOTL_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
_AXOLOTL_LIGER = (
    "liger_fused_linear_cross_entropy", "liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation",
)  # fmt: skip
"""What that plugin calls Liger's kernels, none of which it puts in unasked; the loss first."""
_LLAMA_FACTORY_LIGER = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gpt_oss",
}  # fmt: skip
"""Models that LLaMA-Factory 0.9.5 puts them in (``apply_liger_kernel``); others it trains without, and warns."""
_LIGERS_LOSS = "liger_kernel.transformers.model."
_LOGIT_BYTES = 2 + 4
_NEXT_TOKEN = {"causal-lm", "script"}
"""Tasks whose loss may be that of next-token prediction."""


class Kernels(Technique):
    """Which fused kernels stand in the place of the model's own operators."""

    name = "kernels"
    baseline = "none"
    packages = {"liger-kernel": "", "triton": ""}
    saves = {"logits": ("chunked_ce", "a fused linear cross-entropy")}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        model = facts.model
        chunked = Choice("chunked_ce", Kind.EXACT, "offered", f"the logits of 1/{CHUNKS} of the positions at a time")
        if not model.plain_head:
            own = f"{model.architecture} does more to its logits than take their loss"
            if model.task not in _NEXT_TOKEN:
                own = f"{model.architecture} is trained on {model.trained_on}: its loss is no next-token prediction's"
            chunked = Choice("chunked_ce", Kind.EXACT, "withheld", own)
        why = None
        if facts.hardware.device == "cpu":
            why = "its kernels run on a GPU only"
        elif lacking := self.lacks(facts, "liger-kernel") or facts.lacks_triton():
            why = lacking
        elif not model.liger:
            why = f"Liger does not know {model.model_type}"
        elif model.task not in _NEXT_TOKEN:
            why = f"Liger's loss is that of next-token prediction, and {model.architecture} has another"
        return (
            Choice("none", Kind.EXACT, "offered", "the model's own operators"),
            chunked,
            Choice("liger_fused_ce", Kind.EXACT, "withheld" if why else "on_request", why or "Liger's loss alone"),
            Choice("liger", Kind.EXACT, "withheld" if why else "offered", why or "all of Liger's Triton kernels"),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value == "chunked_ce" and others.get("parallel") == "zero3":
            return "DeepSpeed holds the output layer's weight only while that layer runs"
        return self.not_tried_split(value, others, {"none"}, {"none", "chunked_ce"})

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is None:
            return None
        if script.own.get("use_liger_kernel"):
            return Held(self.baseline, "the script asks for Liger's kernels itself", by_script=True)
        return Held(self.baseline, "the script's own loss is trained", by_script=True)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        said = ("take the loss a chunk of the logits at a time: model = setup.model(...)",)
        elsewhere: dict[str, dict[str, Any]] = {}
        otherwise: dict[str, str] = {}
        script = facts.workload.script
        if script is None or script.trainer != "SFTTrainer":  # else that is what was measured
            otherwise["sft"] = _LOSS_OF_TRL
        if value in {"chunked_ce", "liger_fused_ce"}:  # TRL refuses another's fused loss beside its own
            plain = {} if value == "chunked_ce" else {"use_liger_kernel": False, "liger_kernel_config": None}
            elsewhere["sft"] = {**plain, "loss_type": "nll"}
        if value in _LIGER:
            flags = _AXOLOTL_LIGER if value == "liger" else _AXOLOTL_LIGER[:1]
            elsewhere["axolotl"] = {"plugins": [_AXOLOTL_PLUGIN], **dict.fromkeys(flags, True)}
            elsewhere["llamafactory"] = {"enable_liger_kernel": True}
            if facts.model.model_type not in _LLAMA_FACTORY_LIGER:
                otherwise["llamafactory"] = f"LLaMA-Factory has no kernels of Liger for {facts.model.model_type}"
            elif value != "liger":
                otherwise["llamafactory"] = "LLaMA-Factory takes all of Liger's kernels"
        return Emission(
            training_args={"use_liger_kernel": value in _LIGER, "liger_kernel_config": _LIGER.get(str(value))},
            script=said if value == "chunked_ce" else (),
            elsewhere=elsewhere,
            otherwise=otherwise,
        )

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "chunked_ce":
            chunked = recipe.state[self.name] = ChunkedLoss()
            evaluates = _head_is_whole(recipe.plan)
            recipe.model_wraps.append(functools.partial(chunk_loss, chunked=chunked, evaluates=evaluates))
        elif value in _LIGER and recipe.facts.workload.launch_path == "loop":
            recipe.model_wraps.append(functools.partial(_apply_liger, settings=_LIGER[str(value)] or {}))

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if part == "optimizer":
            return self.baseline
        return None if value in _LIGER else value

    def bytes_if_asked(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> int:
        """Logits in 16 bits and in float32, which an evaluation of ``chunked_ce`` makes when they are read."""
        unmade = value == "chunked_ce" and _head_is_whole(plan)
        return _LOGIT_BYTES * facts.workload.seq_len * facts.model.vocab_size if unmade else 0

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Whether the output layer makes a score of every token of the vocabulary, for every position."""
        import torch

        vocabulary, whole, by_trl = recipe.facts.model.vocab_size, dict[str, bool](), set[bool]()

        def compiled(context: Any) -> None:
            whole["logits"] = int(context.get_local("scores").as_fake().shape[-1]) >= vocabulary

        def after_head(_module: nn.Module, args: tuple[Any, ...], scores: Any) -> None:
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - there is no other door to a graph's making
            elif scores is not args[0] and scores.shape[-1] >= vocabulary:
                whole["logits"] = True

        def after_model(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if not torch.compiler.is_compiling():
                whole.setdefault("logits", False)
                by_trl.add(type(output).__module__.startswith("trl."))

        def read(ran: Ran) -> Seen:
            chunked = ran.recipe.state.get(self.name)
            return {
                "liger_modules": _liger_modules(ran.model),
                "chunked_losses": chunked.losses if isinstance(chunked, ChunkedLoss) else 0,
                "whole_logits": whole.get("logits"),
                "loss_of_trl": True in by_trl,
            }

        hooks.after(model, after_model)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            hooks.after(head, after_head)
        return read

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        if seen.get("loss_of_trl"):
            return "TRL's trainer takes the loss itself, a chunk of the logits at a time, which was not measured"
        ligers, losses = seen.get("liger_modules", []), seen.get("chunked_losses", 0)
        loss = [name for name in ligers if name.startswith(_LIGERS_LOSS)]
        wanted = {"liger": len(ligers) > len(loss), "liger_fused_ce": len(ligers) == len(loss) > 0}
        if not wanted.get(str(value), not ligers):
            return f"Liger's modules that stand in the model: {', '.join(ligers) or 'none'}"
        if (value == "chunked_ce") != bool(losses):
            return f"{losses or 'no'} losses were taken a chunk at a time"
        if value in {"chunked_ce", "liger_fused_ce"} and seen.get("whole_logits"):
            return "the logits of all positions were made"
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """The logits' part of memory goes with the vocabulary; what is saved of it is known by its trace."""
        return {
            "none": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "chunked_ce": Prior(time=(0.03, 0.1), memory=(-0.2, 0.2)),
            "liger_fused_ce": Prior(time=(0.02, 0.1), memory=(-0.2, 0.2)),
            "liger": Prior(time=(-0.1, 0.1), memory=(-0.3, 0.2)),
        }[str(value)]


def _head_is_whole(plan: Mapping[str, Value]) -> bool:
    """Whether each process holds the whole weight of the output layer at all times."""
    return engine_of(plan.get(PARALLEL, "none")) in {"none", "ddp"}


def _apply_liger(model: PreTrainedModel, settings: Mapping[str, bool]) -> PreTrainedModel:
    """Put Liger's kernels in by hand, where no Trainer reads the argument."""
    from transformers.integrations import liger

    apply: Any = liger.apply_liger_kernel
    apply(model, dict(settings))
    return model


def _liger_modules(model: nn.Module) -> list[str]:
    """Modules of Liger that hold the forward functions of this model's modules, also where autocast wraps them."""
    named = {getattr(inspect.unwrap(module.forward), "__module__", None) or "" for module in model.modules()}
    return sorted(name for name in named if name.startswith("liger_kernel"))
