"""The output layer and the loss together, a chunk of the positions at a time: no logits are kept."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from autofit.contract.forward import run_forward_in

from .unmade_logits import unmade_logits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CHUNKS = 16


class ChunkedLoss:
    """Lets an output layer hand its input on to the loss, which then takes both in chunks.

    Attributes:
        losses: Losses that were taken so far.
    """

    def __init__(self) -> None:
        self.losses = 0
        self.on = False
        self.hidden: torch.Tensor | None = None
        self.head: Any = None

    def hand_on(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The output layer's forward pass."""
        self.head, self.hidden = head, hidden
        return hidden

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        *,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """What transformers' ``ForCausalLMLoss`` gives for the logits of the hidden state."""
        from torch.nn import functional

        hidden, head = self.hidden, self.head
        self.hidden = None
        if hidden is None or logits is not hidden:
            raise RuntimeError("kernels=chunked_ce: the model does more to its logits than take their loss")
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(hidden.device)
        total = chunked_cross_entropy(hidden, head.weight, head.bias, shift_labels, ignore_index=ignore_index)
        self.losses += 1
        if num_items_in_batch is None:
            return total / (shift_labels != ignore_index).sum()
        count = num_items_in_batch
        return total / (count if isinstance(count, int) else count.to(total.device))


def chunk_loss(model: PreTrainedModel, chunked: ChunkedLoss, *, evaluates: bool = True) -> PreTrainedModel:
    """Take the loss a chunk at a time while the model trains with labels; its output then has no logits.

    A copy of the model takes its own loss, with its own output layer; so does a model whose vocabulary has grown since.

    Args:
        model: The model; it is changed.
        chunked: Takes the loss.
        evaluates: Whether it takes that of an evaluation too, whose logits are then made when they are asked for. The
            output layer has to hold its whole weight between the steps.
    """
    import torch

    head: Any = cast("Any", model).get_output_embeddings()
    head_forward, whole_loss = type(head).forward, model.loss_function

    def head_or_hidden(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = chunked.hand_on(self, hidden) if chunked.on else head_forward(self, hidden)
        return result

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        **others: Any,
    ) -> torch.Tensor:
        if chunked.on:
            return chunked.loss(logits, labels, **others)
        result: torch.Tensor = whole_loss(logits, labels, vocab_size, **others)
        return result

    def with_chunked_loss(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        keep = kwargs.get("logits_to_keep", 0)
        whole = kwargs.get("labels") is not None and isinstance(keep, int) and keep == 0
        unasked = evaluates and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        chunked.on = whole and (self.training or unasked)
        try:
            output = forward(self, *args, **kwargs)
            if chunked.on and hasattr(output, "logits"):
                # what stands there is the hidden state, and nobody shall take it for logits
                given = {name: value for name, value in output.items() if name != "logits"}
                if not self.training:
                    used = chunked.head
                    given["logits"] = unmade_logits(functools.partial(head_forward, used), used.weight, output.logits)
                output = type(output)(**given)
            return output
        finally:
            chunked.on = False
            chunked.head = None

    def hand_on(head: Any) -> None:
        head.forward = types.MethodType(head_or_hidden, head)  # bound, so that a copy of the layer calls its own

    def set_head(self: Any, head: Any) -> None:
        type(self).set_output_embeddings(self, head)
        hand_on(head)

    hand_on(head)
    # transformers puts another layer there where a vocabulary grows (resize_token_embeddings)
    model.set_output_embeddings = types.MethodType(set_head, model)  # type: ignore[method-assign]
    # a graph that is compiled ends before it: unrolled chunks take long to compile
    model.loss_function = cast("Any", torch.compiler).disable(loss)
    run_forward_in(model, with_chunked_loss)
    return model


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    chunks: int = CHUNKS,
) -> torch.Tensor:
    """The sum of cross-entropies of ``hidden @ weight.T + bias``, without all of these at once.

    Args:
        hidden: Of ``(rows, positions, width)``.
        weight: Of ``(vocabulary, width)``.
        bias: Of ``(vocabulary,)``.
        targets: Of ``(rows, positions)``.
        ignore_index: Target of the positions that do not count.
        chunks: Pieces that the positions are cut into; each holds all rows.
    """
    import torch

    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        result: torch.Tensor = _function().apply(hidden, weight, bias, targets, ignore_index, chunks, dtype)
    return result


@functools.cache
def _function() -> Any:
    """The autograd function; made when torch is there."""
    import torch
    from torch.autograd.function import once_differentiable
    from torch.nn.functional import linear

    class ChunkedCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(  # noqa: PLR0917 - autograd gives them by their places
            ctx: Any,
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            targets: torch.Tensor,
            ignore_index: int,
            chunks: int,
            dtype: torch.dtype,
        ) -> torch.Tensor:
            for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
            matrix = weight.to(dtype)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            of_hidden = torch.empty_like(hidden) if for_hidden else None
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if for_bias and bias is not None else None
            step = -(-hidden.shape[1] // chunks)
            for begin in range(0, hidden.shape[1], step):
                part = slice(begin, begin + step)
                rows = hidden[:, part].reshape(-1, hidden.shape[2]).to(dtype)
                target = targets[:, part].reshape(-1, 1)
                counts = target != ignore_index
                target = target.masked_fill(~counts, 0)
                logits = linear(rows, matrix, None if bias is None else bias.to(dtype))
                scores = logits.float()
                del logits
                scores -= scores.amax(1, keepdim=True)
                right = scores.gather(1, target)
                scores.exp_()
                sums = scores.sum(1, keepdim=True)
                total += ((sums.log() - right) * counts).sum()
                scores *= counts / sums
                scores.scatter_add_(1, target, -counts.float())
                gradient = scores.to(dtype)  # as the gradient of the logits is when autograd makes it
                del scores
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=torch.float32)
                if of_hidden is not None:
                    of_hidden[:, part] = (gradient @ matrix).view(hidden[:, part].shape)
                if of_weight is not None and dtype == torch.float32:
                    torch.addmm(of_weight, gradient.t(), rows, out=of_weight)
                elif of_weight is not None:
                    of_weight += gradient.t() @ rows
            ctx.gradients = of_hidden, of_weight, of_bias
            ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
            return total

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, of_total: torch.Tensor) -> Any:
            if ctx.gradients is None:
                raise RuntimeError("a chunked loss can be gone back through once")
            gradients, ctx.gradients = ctx.gradients, None
            scaled = [
                None if gradient is None else gradient.mul_(of_total).to(dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            ]
            return *scaled, None, None, None, None

    return ChunkedCrossEntropy
