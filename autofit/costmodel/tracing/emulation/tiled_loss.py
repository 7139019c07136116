"""The output layer and the loss of TRL's trainers, a tile of tokens at a time, for any number of rows.

SFT, DPO, KTO and others score tokens by one function that never makes all logits: it takes 4,096 tokens and 32,768
columns of the vocabulary at once. What it makes for a tile grows with the rows up to so many tokens, and no further. A
trace of one number of rows can't tell that, so its function takes the place of TRL's: it makes the same tensors, has
one tile of all tokens, and says where that ends.

On CUDA a tile is folded by Triton kernels, which make no tensors, and tokens without a label are not scored; on a CPU
PyTorch's operators fold it, and every token is scored.

Source: ``ChunkedLogProbFunction`` in ``trl/kernels/chunked_logprob.py``, ``add_fused_lm_head`` in
``trl/trainer/utils.py`` (TRL 1.16). Of a TRL whose function takes other arguments, its own is traced.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder

_GIVEN = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip
_STATISTICS = 7
"""Numbers of each token that the tiles of the vocabulary add to."""


@contextlib.contextmanager
def tiled_loss(recorder: Recorder, *, on_cuda: bool) -> Iterator[None]:
    """Put the function into TRL's module, where a script has loaded it."""
    users: Any = sys.modules.get("trl.trainer.utils")
    own = getattr(users, "_ChunkedLogProbFunction", None)
    if own is None or (*inspect.signature(own.forward).parameters,) != _GIVEN:
        yield
        return
    before = {name: getattr(users, name) for name in ("_ChunkedLogProbFunction", "_use_triton")}
    tiles = _Tiles(recorder, sys.modules[own.__module__], on_cuda=on_cuda)

    class TiledLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, ...]:
            return tiles.score(ctx, **dict(zip(_GIVEN[1:], given, strict=False)))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            with users.maybe_gather_lm_head_ctx(*ctx.saved_tensors[1:3]):
                return *tiles.gradients(ctx, *gradients[:2]), *[None] * (ctx.given - 3)

    vars(users).update(_ChunkedLogProbFunction=TiledLoss, _use_triton=lambda _device: on_cuda)
    try:
        yield
    finally:
        vars(users).update(before)


class _Tiles:
    """What the function computes, by the shapes.

    Args:
        recorder: Of the trace; where it is of one number of rows alone, there are as many tiles as on a device.
        kernels: TRL's module.
        on_cuda: Whether Triton's kernels fold a tile.
    """

    def __init__(self, recorder: Recorder, kernels: Any, *, on_cuda: bool) -> None:
        self.recorder, self.kernels, self.on_cuda = recorder, kernels, on_cuda
        self.most: int = kernels.TOKEN_CHUNK_SIZE

    def score(self, ctx: Any, **given: Any) -> tuple[torch.Tensor | None, ...]:
        """A score of each token, and what else is asked of it."""
        hidden, weight, bias, targets = (given[name] for name in _GIVEN[1:5])
        names = self.kernels.OPTIONAL_OUTPUTS
        outputs, softcap = given.get("outputs", names), given.get("final_logit_softcapping")
        ctx.set_materialize_grads(False)
        ctx.given, ctx.width = len(given), given["chunk_size"]
        ctx.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        ctx.settings = {
            "logit_scale": given.get("logit_scale", 1.0),
            "softcap": softcap or 1.0,
            "inv_t": 1 / given["temperature"],
            "HAS_SOFTCAP": softcap is not None,
            "BLOCK_SIZE": 0,
        }
        asked = {f"HAS_{name.upper()}": name in outputs for name in names}
        numbers = [hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(_STATISTICS)]
        for place, span, _, tile, _ in self._projected(hidden, weight, bias, ctx, twice=False):
            of_tokens = [one[place] for one in (targets, *numbers)]
            if self.on_cuda:
                torch.sum(tile, -1, dtype=torch.float32, out=of_tokens[-1])  # the kernel reads it once
            else:
                width = span.stop - span.start
                self.kernels._forward_tile(tile, 0, *of_tokens, span.start, width, **asked, **ctx.settings)
        top, total, *_, found = numbers
        log_z = top + torch.log(total)
        scores = found - log_z
        more = {name: found >= top if name == "is_top1" else scores.clone() for name in names if name in outputs}
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, more.get("entropy", log_z))
        ctx.mark_non_differentiable(*(one for name, one in more.items() if name != "entropy"))
        return scores, *map(more.get, names)

    def gradients(
        self, ctx: Any, of_scores: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """The gradients of the hidden states, of the weight and of the bias; they are added up in float32."""
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        sums = [
            torch.zeros(one.shape, dtype=torch.float32) if needed else None
            for one, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        of_hidden, of_weight, of_bias = sums
        flags = {"HAS_LOGPROB_GRAD": of_scores is not None, "HAS_ENTROPY_GRAD": of_entropy is not None}
        each = [log_z if one is None else one.float().contiguous() for one in (of_scores, of_entropy)]
        for place, span, part, tile, matrix in self._projected(hidden, weight, bias, ctx, twice=True):
            if self.on_cuda:
                tile.mul_(1)  # the kernel reads it, and writes its gradient there
            else:
                of_tokens = [one[place] for one in (targets, log_z, entropy, *each)]
                width = span.stop - span.start
                self.kernels._backward_tile(tile, 0, *of_tokens, span.start, width, **flags, **ctx.settings)
            if of_hidden is not None:
                self._add_product(of_hidden[place], tile, matrix)
            if of_weight is not None:
                self._add_product(of_weight[span], tile.t(), part)
            if of_bias is not None:
                of_bias[span] += tile.sum(dim=0, dtype=torch.float32)
        return [None if one is None else one.to(of.dtype) for one, of in zip(sums, (hidden, weight, bias), strict=True)]

    def _projected(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ctx: Any, *, twice: bool
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, Any]]:
        """Each tile of logits, in one buffer: its tokens and columns, the hidden states, the logits and the weight.

        Args:
            hidden: Of ``(tokens, width)``.
            weight: Of ``(vocabulary, width)``.
            bias: Of ``(vocabulary,)``.
            ctx: Says in which type, and how many columns a tile has.
            twice: Whether the weight is kept for what is done with the tile, until the next one's is there.
        """
        tokens, matrix = len(hidden), None
        spans = [slice(begin, min(begin + ctx.width, len(weight))) for begin in range(0, len(weight), ctx.width)]
        any_rows = bool(self.recorder.rows and tokens)
        of_tile = tokens if any_rows else self.most
        with self.recorder.up_to(self.most / tokens) if any_rows else contextlib.nullcontext():
            buffer = torch.empty((min(tokens, of_tile), ctx.width), dtype=ctx.dtype)
            for begin in range(0, tokens, of_tile):
                place = slice(begin, min(begin + of_tile, tokens))
                part = hidden[place].to(ctx.dtype)
                for span in spans:
                    again = twice and any_rows and len(spans) == 1 and weight.dtype != ctx.dtype
                    with (
                        self._weight_of_the_tile_before(weight, ctx.dtype, tokens)
                        if again
                        else contextlib.nullcontext()
                    ):
                        matrix = weight[span].to(ctx.dtype)
                    tile = buffer[: len(part), : span.stop - span.start]
                    torch.mm(part, matrix.t(), out=tile)
                    matrix = matrix if twice else None
                    if bias is not None:
                        tile.add_(bias[span].to(ctx.dtype))
                    yield place, span, part, tile, matrix

    def _weight_of_the_tile_before(
        self, weight: torch.Tensor, dtype: torch.dtype, tokens: int
    ) -> contextlib.AbstractContextManager[None]:
        """The copy that lives while the next tile's is made: of one tile of columns, from the second of tokens on."""
        assert self.recorder.rows is not None
        after = self.most // max(1, tokens // self.recorder.rows)
        return self.recorder.holding(weight.numel() * dtype.itemsize, name="the copy before", after=after)

    def _add_product(self, there: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a product to what is in float32, which CUDA does without copies, whatever type its factors have."""
        if self.on_cuda:
            there.addmm_(left, right)
        else:
            self.kernels._addmm_fp32(there, left, right)
