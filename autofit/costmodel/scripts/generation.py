"""What a Trainer that generates holds meanwhile: its prompts at once, then token after token beside what came before.

Traced are two passes without gradients: of the prompts, and of the last token of the longest completions, whose layers
find the keys and values of all tokens before. A layer makes them anew with each token, and then lets the old ones go.
Source: ``generate`` of transformers 5.24, and ``DynamicLayer.update`` in its ``cache_utils.py``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from autofit.training.scripts.traits import inner_of

if TYPE_CHECKING:
    from autofit.costmodel.tracing.layers import Marks


class _Filled(DynamicCache):
    """Keys and values of so many tokens, of which each layer gets the last one, and makes the others then."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__(config=config)
        self.length = length
        self.held: list[torch.Tensor] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the last one."""
        return self.length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens a layer looks at, and how many came before these."""
        seen = self._seen(layer_idx)
        return seen, self.length - seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer looks at, with the last token."""
        layer: Any = self.layers[layer_idx]
        layer.lazy_initialization(key_states, value_states)  # up to 5.23 values take the type of their keys
        seen, last, kinds = self._seen(layer_idx), (key_states, value_states), (layer.keys.dtype, layer.values.dtype)
        before = [self._before(one, seen, kind) for one, kind in zip(last, kinds, strict=True)]
        keys, values = (torch.cat([before.pop(0), one], dim=-2) for one in last)  # values wait while keys are made
        self.held += [keys, values]
        return keys, values

    @staticmethod
    def _before(last: torch.Tensor, seen: int, kind: torch.dtype) -> torch.Tensor:
        *rows, count, width = last.shape
        return last.new_empty(*rows, seen - count, width, dtype=kind)

    def _seen(self, layer: int) -> int:
        return min(self.length, getattr(self.layers[layer], "sliding_window", None) or self.length)


def trace_generation(trainer: Any, marks: Marks, prompts: Any) -> None:
    """Run both passes, where the micro-steps of a trace are over.

    Args:
        trainer: Has trained; its model recomputes nothing from here on, as while it generates.
        marks: Name the segments.
        prompts: A micro-batch as it trains on them.
    """
    model, config = inner_of(trainer.model), trainer.model.config
    trainer.model.gradient_checkpointing_disable()
    parameters = inspect.signature(model.forward).parameters
    last_alone = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    past = "cache" if "cache" in parameters else "past_key_values"  # from 5.24 on, and before
    tokens, mask = prompts["prompt_ids"], prompts["prompt_mask"]

    def one_pass(tokens: torch.Tensor, mask: torch.Tensor, cache: Any) -> None:
        marks.accumulated += 1  # its segments have names of their own
        marks.mark("pre")
        made = model(input_ids=tokens, attention_mask=mask, use_cache=True, **{past: cache}, **last_alone)
        scores = made.logits[:, -1].to(copy=True, dtype=torch.float32)
        if trainer.top_k or trainer.top_p < 1:
            scores, _ = scores.sort()
        scores.softmax(-1)

    with torch.no_grad():
        one_pass(tokens, mask, DynamicCache(config=config))
        generated = mask.new_ones(len(mask), trainer.max_completion_length)
        tokens, mask = (torch.cat([one, generated], dim=1) for one in (tokens, mask))
        one_pass(tokens[:, -1:], mask, _Filled(config, mask.shape[1]))
