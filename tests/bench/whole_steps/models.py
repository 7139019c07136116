"""A program -> the model on the meta device, and a function that runs one micro-step of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import torch.utils.checkpoint
from torch import nn

from .programs import Program


def built(program: Program) -> nn.Module:
    """The model, in training mode; call it with the meta device as the default."""
    model = _BUILDERS[program.family](program, dict(program.shape))
    if program.precision in {"half", "pure half"}:
        model = model.to(torch.bfloat16)
    return model.train(program.train)


def forward(program: Program, model: Any, rows: int) -> torch.Tensor:
    """The loss of one micro-batch, as tensors without values."""
    with _autocast(program):
        return _FORWARDS[program.family](program, model, rows)


def _autocast(program: Program) -> Any:
    if program.precision in {"fp32", "pure half"}:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


# -- llm-foundry ----------------------------------------------------------------------------------------------------


class _Norm(nn.LayerNorm):
    """Composer's low-precision LayerNorm where ``low`` is set, else PyTorch's under autocast."""

    low = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.low:
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.to(torch.bfloat16), self.normalized_shape, self.weight, self.bias)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ratio: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _Norm(hidden, bias=bias), _Norm(hidden, bias=bias)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias), nn.Linear(hidden, hidden, bias)
        self.up, self.down = nn.Linear(hidden, ratio * hidden, bias), nn.Linear(ratio * hidden, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (one.transpose(1, 2) for one in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Gpt(nn.Module):
    def __init__(self, program: Program, shape: dict[str, int]) -> None:
        super().__init__()
        hidden, bias = shape["hidden"], bool(shape.get("bias", 0))
        self.checkpointing = program.checkpointing
        self.tokens = nn.Embedding(shape["vocab"], hidden)
        self.positions = nn.Embedding(program.seq_len, hidden)
        self.blocks = nn.ModuleList(
            _Block(hidden, shape["heads"], shape.get("ratio", 4), bias=bias) for _ in range(shape["layers"])
        )
        self.norm = _Norm(hidden, bias=bias)
        for module in self.modules():
            if isinstance(module, _Norm):
                module.low = program.low_precision_norm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def _gpt_loss(program: Program, model: Any, rows: int) -> torch.Tensor:
    ids = torch.empty(rows, program.seq_len, dtype=torch.int64)
    logits = model(ids)
    flat, targets = logits.view(-1, logits.shape[-1]), ids.roll(-1).view(-1)
    if program.metrics:
        for _ in range(2):
            F.cross_entropy(flat.detach(), targets)
    return F.cross_entropy(flat, targets)


# -- transformers -----------------------------------------------------------------------------------------------------


def _bert(program: Program, shape: dict[str, int]) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering

    kind = BertForPreTraining if program.task == "pretraining" else BertForQuestionAnswering
    return kind(
        BertConfig(
            hidden_size=shape["hidden"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            intermediate_size=4 * shape["hidden"],
            vocab_size=shape["vocab"],
            max_position_embeddings=max(512, program.seq_len),
            attn_implementation="eager",
            use_cache=False,
        )
    )


def _bert_loss(program: Program, model: Any, rows: int) -> torch.Tensor:
    ids = torch.empty(rows, program.seq_len, dtype=torch.int64)
    mask = torch.zeros(rows, 1, 1, program.seq_len, dtype=next(model.parameters()).dtype)
    result = model(input_ids=ids, attention_mask=mask)
    if program.task == "pretraining":
        logits = result.prediction_logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))
    place = torch.empty(rows, dtype=torch.int64)
    return F.cross_entropy(result.start_logits, place) + F.cross_entropy(result.end_logits, place)


def _causal(program: Program, shape: dict[str, int]) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    if shape.get("opt"):
        return OPTForCausalLM(
            OPTConfig(
                hidden_size=shape["hidden"],
                num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"],
                ffn_dim=4 * shape["hidden"],
                vocab_size=shape["vocab"],
                word_embed_proj_dim=shape["hidden"],
                max_position_embeddings=shape["positions"],
                attn_implementation="eager",
                use_cache=False,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=shape["hidden"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
            vocab_size=shape["vocab"],
            n_positions=max(shape["positions"], program.seq_len),
            attn_implementation="eager",
            use_cache=False,
        )
    )


def _causal_loss(program: Program, model: Any, rows: int) -> torch.Tensor:
    ids = torch.empty(rows, program.seq_len, dtype=torch.int64)
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


def _resnet(program: Program, shape: dict[str, int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    del program
    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 6, 3], num_labels=shape["classes"]))


def _resnet_loss(program: Program, model: Any, rows: int) -> torch.Tensor:
    pixels = torch.empty(rows, 3, program.seq_len, program.seq_len)
    return F.cross_entropy(model(pixel_values=pixels).logits, torch.empty(rows, dtype=torch.int64))


_BUILDERS: dict[str, Callable[[Program, dict[str, int]], nn.Module]] = {
    "gpt": _Gpt, "bert": _bert, "causal": _causal, "resnet": _resnet,
}  # fmt: skip
_FORWARDS: dict[str, Callable[[Program, Any, int], torch.Tensor]] = {
    "gpt": _gpt_loss, "bert": _bert_loss, "causal": _causal_loss, "resnet": _resnet_loss,
}  # fmt: skip


# -- optimizers -------------------------------------------------------------------------------------------------------

Step = Callable[[], object]


def optimizer_step(program: Program, model: nn.Module) -> Step | None:
    """The optimizer's step and what stands before it, with gradients and state in their places."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if program.optimizer == "none":
        return None
    if program.optimizer == "sharded_adamw":
        return _sharded_adamw(parameters, program.world)
    weights = parameters
    if program.precision == "pure half":  # apex keeps float32 copies
        parameters = [torch.empty_like(one, dtype=torch.float32) for one in weights]
    for one in parameters:
        one.grad = torch.empty_like(one)
    halves = [torch.empty_like(one) for one in weights]
    own = _lamb(parameters) if program.optimizer == "lamb" else _torch_own(program, parameters)

    def step() -> None:
        if parameters is not weights:
            torch._foreach_copy_([one.grad for one in parameters], halves)
        if program.optimizer in {"fused_adam", "lamb"}:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        own()
        if parameters is not weights:
            torch._foreach_copy_(weights, parameters)

    return step


def _torch_own(program: Program, parameters: list[torch.Tensor]) -> Step:
    if program.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=program.optimizer == "fused_adam")
    optimizer.step()  # makes the state
    return optimizer.step  # type: ignore[no-any-return]


def _sharded_adamw(parameters: list[torch.Tensor], world: int) -> Step:
    """Composer's decoupled AdamW, a loop over the flat parameters' float32 shards, and the clipping before it."""
    whole = sum(one.numel() for one in parameters)
    count = 1 + sum(one.dim() > 1 for one in parameters) // _MATRICES_OF_A_BLOCK
    shards = [torch.empty(-(-whole // (world * count))) for _ in range(count)]
    gradients, first, second = ([torch.empty_like(one) for one in shards] for _ in range(3))

    def step() -> None:
        norms = [torch.linalg.vector_norm(one) for one in gradients]
        scale = torch.stack(norms).norm()
        for shard, gradient, one, two in zip(shards, gradients, first, second, strict=True):
            gradient.mul_(scale)
            shard.mul_(0.9)
            one.mul_(0.9).add_(gradient, alpha=0.1)
            two.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            shard.addcdiv_(one, two.sqrt().add_(1e-8), value=-0.1)

    return step


_MATRICES_OF_A_BLOCK = 4


def _lamb(parameters: list[torch.Tensor]) -> Step:
    """apex' FusedLAMB: two passes over float32 lists, and both norms."""
    gradients: list[Any] = [one.grad for one in parameters]
    first, second = ([torch.empty_like(one) for one in parameters] for _ in range(2))

    def step() -> None:
        torch._foreach_lerp_(first, gradients, 0.1)
        torch._foreach_addcmul_(second, gradients, gradients, 0.01)
        torch._foreach_norm(parameters)
        torch._foreach_norm(gradients)
        torch._foreach_addcdiv_(parameters, first, second, -0.1)

    return step
