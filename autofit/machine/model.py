"""Sizes and abilities of a model of transformers, read off its class and its modules."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

from autofit.machine.direct_reads import read_directly
from autofit.system.other_kernels import DISTRIBUTIONS, packages_of, without_launches

_FLASH_WIDTH = 256
"""Of the widest head that FlashAttention knows."""
_CONTRASTIVE = ("logit_scale", "temperature")
"""How the trained numbers that scale contrastive logits begin; CLAP has two."""
_POSITIONS = ("max_position_embeddings", "max_target_positions")
"""What a config calls the positions of its texts; Whisper's decoder has the latter."""
_BALANCE = ("router_aux_loss_coef", "aux_loss_coef")
"""What the weight of the loss that balances experts is called, in a config or (DBRX) by the model."""


def describe_built(name: str, settings: Any, model: Any) -> dict[str, Any]:
    """Sizes and abilities of a model of transformers, read off the model as it stands.

    Args:
        name: What the user calls it.
        settings: Its config.
        model: With storage or without.

    Returns:
        Fields of :class:`autofit.contract.facts.Model`.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    text = model.config.get_text_config()  # Pegasus' decoder attends by a copy of its config
    classes = {type(module).__name__ for module in model.modules()}
    experts = any("expert" in part.lower() for part in classes)
    positions = next((one for name in _POSITIONS if (one := getattr(text, name, None))), 0)
    longest = max(0, int(positions))  # XLNet says -1 for no end
    return {
        "name": name,
        "architecture": type(model).__name__,
        "model_type": settings.model_type,
        "parameters": parameters_of(model),
        "layers": _number(text, "num_hidden_layers"),
        "hidden_size": _number(text, "hidden_size"),
        "vocab_size": _vocabulary(model),
        "max_positions": longest or None,
        "supports_checkpointing": bool(model.supports_gradient_checkpointing),
        "layer_classes": _layer_classes(model),
        "unsharded": _unsharded(model),
        "has_experts": experts,
        "lora_on_experts": experts and _lora_on_experts(settings.model_type),
        "attention": str(text._attn_implementation),  # noqa: SLF001 - there is no other
        "attentions": _attentions(model),
        "attention_dropout": any(getattr(text, name, 0) for name in ("attention_dropout", "attn_pdrop")),
        "liger": settings.model_type in _ligers_types(),
        "position_rows": _position_rows(model, longest),
        "depends_on_rows": depends_on_rows(model),
        "named": tuple(settings.architectures or ()),
        "products": _products(model),
        "tensor_split": tuple(sorted(set((getattr(model, "tp_plan", None) or {}).values()))),
        "tensor_sizes": _tensor_sizes(model, text),
        "context_split": _context_split(model),
        "lacking_kernels": _lacking_kernels(model),
        "read_directly": (direct := read_directly(model)),
        "unquantized": (*get_keys_to_not_convert(model), *direct) if direct else (),
    }


def describe_module(name: str, module: Any) -> dict[str, Any]:
    """Sizes of a module of the user's own, of which no config of transformers tells anything.

    Returns:
        Fields of :class:`autofit.contract.facts.Model`; its ``model_type`` is empty.
    """
    import torch

    tables = [one.num_embeddings for one in module.modules() if isinstance(one, torch.nn.Embedding)]
    return {
        "name": name,
        "architecture": type(module).__name__,
        "model_type": "",
        "parameters": parameters_of(module),
        "layers": 0,
        "hidden_size": 0,
        "vocab_size": max(tables, default=1),
        "max_positions": None,
        "supports_checkpointing": False,
        "attention": "its own",
        "attentions": (),
        "depends_on_rows": depends_on_rows(module),
        "products": _products(module),
    }


def parameters_of(model: Any) -> int:
    """How many a model has; of weights that are packed, those that they stand for."""
    return sum(whole_shape(parameter).numel() for parameter in model.parameters())


def whole_shape(weight: Any) -> Any:
    """The shape of a weight; of one that is packed, of what it stands for."""
    state = getattr(weight, "quant_state", None)  # bitsandbytes' in 4 bits
    return weight.shape if state is None else state.shape


def _number(config: Any, name: str) -> int:
    """A number that a config gives; 0 where it gives none, or one for each of its stages or layers."""
    found = None if _differs(config, name) else getattr(config, name, None)
    return found if isinstance(found, int) else 0


def _differs(config: Any, name: str) -> bool:
    """Whether a config gives a value for each layer, as Gemma 4's for its heads, and refuses to tell one of all."""
    try:
        getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of transformers 5.2x
        return True
    return False


def depends_on_rows(model: Any) -> str | None:
    """Why the loss of a row depends on the others of its micro-batch, in words; ``None`` where it does not."""
    import torch

    norms = (torch.nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 - the base of all of them
    if any(isinstance(module, norms) for module in model.modules()):
        return "its BatchNorm layers take the mean and variance of each micro-batch"
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return None  # a module of the user's own
    # a number that is trained (CLIP's, ALIGN's); Cohere's models, too, scale their logits, by one of the config
    if any(name.startswith(_CONTRASTIVE) and one.numel() == 1 for name, one in model.named_parameters(recurse=False)):
        return "its contrastive loss compares the rows of a micro-batch with each other"
    if _fills_together(model):
        return "the tokens of a micro-batch share the places of its experts"
    text = model.config.get_text_config()
    weighs = any(getattr(one, name, 0) for one in (model, text) for name in _BALANCE)
    if getattr(text, "output_router_logits", False) and weighs:
        return "the loss that balances its experts is taken of each micro-batch"
    return None


def _fills_together(model: Any) -> bool:
    """Whether an expert has room for so many tokens of a micro-batch (NLLB-MoE), and not of each row (Switch).

    Seen by having a copy of the router send two like tokens, each a row, where there is room for one.
    """
    import torch

    router = next((one for one in model.modules() if hasattr(one, "expert_capacity")), None)
    if router is None:
        return False
    copied = copy.deepcopy(router).to_empty(device="cpu").train()
    copied.expert_capacity = 1
    try:
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
            sent = copied(weight.new_zeros(2, 1, weight.shape[-1]))[0]
        return not torch.equal(sent[0], sent[1])
    except Exception:  # noqa: BLE001 - a router of another kind, whose code can raise anything
        return False


def _products(model: Any) -> list[tuple[int, int, int]]:
    """Inputs, outputs and number of the linear layers; a ``Conv1D``'s weight lies the other way round."""
    import torch

    weights = [
        whole_shape(module.weight)[::-1] if type(module).__name__ == "Conv1D" else whole_shape(module.weight)
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding) and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    counted = Counter((int(inputs), int(outputs)) for outputs, inputs in weights)
    return [(*shape, count) for shape, count in sorted(counted.items())]


def _tensor_sizes(model: Any, config: Any) -> dict[str, int]:
    """What ranks that share a micro-batch each have a part of; empty where no heads are told."""
    heads = _number(config, "num_attention_heads")
    pairs = _number(config, "num_key_value_heads") or heads
    width = _number(config, "intermediate_size")
    found = {
        "attention heads": heads,
        "key-value heads": pairs,
        "columns of the feed-forward layers": width,
        "entries of the vocabulary": _vocabulary(model),
    }
    return found if all(found.values()) else {}


def _layer_classes(model: Any) -> tuple[str, ...]:
    """The classes that a model is to be split by; BERT and ViT name one of their embeddings among them.

    It is left out: Accelerate shards the embeddings by themselves, and PyTorch no weight twice.
    Source: ``accelerate.utils.fsdp_utils.fsdp2_prepare_model`` of 1.14 and 1.15.
    """
    named, tables = set(getattr(model, "_no_split_modules", None) or ()), _tables(model) or ()
    found = {type(one).__name__ for one in model.modules() if not any(part in tables for part in one.modules())}
    return tuple(sorted(named & found))


def _unsharded(model: Any) -> str | None:
    """Why Accelerate can't split the weights by FSDP2, in words: what it does first is to shard the embeddings."""
    tables = _tables(model)
    if tables is None:
        return f"Accelerate shards a model by its embeddings, and {type(model).__name__} tells none"
    own = {part for table in tables for part in table.modules()}
    weights = {id(weight) for table in tables for weight in table.parameters()}
    for name, module in model.named_modules():
        if module not in own and any(id(weight) in weights for weight in module.parameters(recurse=False)):
            return f"its {name} holds a weight of its embeddings, too, and FSDP2 shards none in two places"
    return None


def _lacking_kernels(model: Any) -> tuple[str, ...]:
    """The distributions whose kernels the model's layers would run, and that can't be imported."""
    modules = {type(one).__module__ for one in model.modules()}
    wanted = {package for one in modules if one.startswith("transformers.models.") for package in packages_of(one)}
    return tuple(sorted(DISTRIBUTIONS.get(one, one) for one in wanted if not _can_import(one)))


def _lora_on_experts(model_type: str) -> bool:
    """Whether PEFT's LoRA takes stacked weights of experts for linear layers (``_convert_peft_config_moe``)."""
    try:
        conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    except ImportError:  # none is installed, or one that does not
        return False
    like = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)  # noqa: SLF001 - there is no other
    return like in getattr(conversion, "_MOE_FUSED_TARGETS", ())


def _can_import(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # noqa: BLE001 - built for another torch, or for a device that is not here
        return False
    return True


def _tables(model: Any) -> tuple[Any, ...] | None:
    """Its input embeddings and its output layer, as far as it has them; ``None`` where it can't tell."""
    try:
        found = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return tuple(one for one in found if one is not None)


def _context_split(model: Any) -> bool:
    """Whether Accelerate can split the tokens of a row: it drops the masks of modules of one name, and those alone.

    Source: ``accelerate.big_modeling._attach_context_parallel_hooks`` of 1.15.
    """
    text = model.config.get_text_config()
    layers, heads = _number(text, "num_hidden_layers"), _number(text, "num_attention_heads")
    named = [name for name, _ in model.named_modules() if name.endswith("self_attn")]
    if not heads or len(named) != layers or _number(text, "v_head_dim") or _differs(text, "head_dim"):
        return False
    width = _number(text, "head_dim") or _number(text, "hidden_size") // heads
    return width <= _FLASH_WIDTH and bool(getattr(model, "supports_context_parallel", False))


def _input_embeddings(model: Any) -> Any:
    """The table of the vocabulary; ``None`` where the model reads no tokens."""
    import torch

    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, torch.nn.Embedding) else None


def _vocabulary(model: Any) -> int:
    """Rows of that table; 1 where the model reads no tokens."""
    table = _input_embeddings(model)
    return 1 if table is None else int(table.weight.shape[0])


def _position_rows(model: Any, longest: int) -> int | None:
    """How many tokens a row may have by the model's learned table of positions, where it has one.

    Some tables begin with entries that no token has: OPT's ``offset``, RoBERTa's padding.
    """
    import torch

    found = [
        module.num_embeddings
        - int(getattr(module, "offset", 0) or 0)
        - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and module.num_embeddings >= longest > 0
        and ("position" in name or name.endswith("wpe"))
        and module is not _input_embeddings(model)
    ]
    return min(found, default=None)


def _ligers_types() -> tuple[str, ...]:
    """Model types that Liger has kernels for, read off its source: importing it may take the device."""
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        return ()
    source = Path(spec.submodule_search_locations[0]) / "transformers" / "monkey_patch.py"
    try:
        tree = ast.parse(source.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN":
            return tuple(ast.literal_eval(key) for key in getattr(node.value, "keys", ()))
    return ()


def _attentions(model: Any) -> tuple[str, ...]:
    """Implementations of attention that the model's class says it supports."""
    found = ["eager"]
    if getattr(model, "_supports_sdpa", False):
        found.append("sdpa")
    if getattr(model, "_supports_flash_attn", False):
        # a class may name the only ones it goes with; transformers takes one of those for any other
        only = getattr(model, "_compatible_flash_implementations", None)
        found += [name for name in ("flash_attention_2", "flash_attention_3") if only is None or name in only]
    if getattr(model, "_supports_flex_attn", False):
        found.append("flex_attention")
    return tuple(found)


def beside_the_base(model: Any) -> tuple[str, ...]:
    """Names of a model's modules that stand beside its base model, and have weights.

    Some have no base model, but a part of it: the tower of CLIP's or SigLIP's classifier, an encoder, a backbone.
    """
    from transformers import PreTrainedModel

    parts = [(name, one) for name, one in model.named_children() if any(True for _ in one.parameters())]
    base = [one for name, one in parts if name == model.base_model_prefix]
    base = base or [one for _, one in parts if isinstance(one, PreTrainedModel) or one is _input_embeddings(model)]
    return tuple(name for name, one in parts if one not in base)


def has_plain_head(model: Any) -> bool:
    """Whether the output layer's product goes as it is into transformers' loss for causal language models, and no more.

    Bamba may add a loss of their size (z-loss). Seen by running what the class does behind its layers, on a hidden
    state without storage.
    """
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Given(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None  # fields of other models' outputs

    head, seen, losses = model.get_output_embeddings(), [], []
    own = getattr(model, "loss_function", None)
    if type(head) is not torch.nn.Linear or own is not ForCausalLMLoss or model.base_model is model:
        return False

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(logits)
        losses.append(logits.new_zeros(()))
        return losses[-1]

    made: list[torch.Tensor] = []
    head.to(torch.bfloat16)  # so that a class which makes float32 of it is seen to do so
    handle = head.register_forward_hook(lambda *run: made.append(run[-1]))
    try:
        hidden = torch.empty(1, 4, head.in_features, dtype=head.weight.dtype, device="meta")
        model.base_model.forward = lambda *_, **__: Given(last_hidden_state=hidden)
        model.loss_function = loss
        ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
        with without_launches():
            trained = model(input_ids=ids, labels=ids).loss
    except Exception:  # noqa: BLE001 - a class that can't be run like this is not one that is known
        return False
    finally:
        handle.remove()
    return len(made) == len(seen) == 1 and seen[0] is made[0] and trained is losses[0]
