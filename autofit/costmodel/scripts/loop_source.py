"""A script's plain loop as what a trace trains: the script takes the micro-steps itself, on batches of fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autofit.costmodel.scripts.known_values import storage_of
from autofit.costmodel.scripts.script_source import ScriptSource, apart
from autofit.costmodel.tracing.layers import Marks, TraceDone

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script


_FEW_BYTES = 2**20
"""Of tensors beside the model, which are no matter: where something lies beside it, all of its layers are traced."""


class Together(nn.Module):
    """Models that a script trains together, as one that is never called: hooks on it are on each of them."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, one in enumerate(models):
            self.add_module(str(number), one)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **how: Any) -> Any:  # noqa: D102 - as PyTorch's
        return [one.register_forward_pre_hook(hook, **how) for one in self.children()]


class LoopSource(ScriptSource):
    """A loop that takes its first batch.

    Args:
        recipe: Which its Accelerator was made with.
        script: Whose it is.
        optimizers: The script's, as they were prepared.
        models: Those that it has prepared; the tuned one is wrapped as the plan says.
        loader: The script's own loader.
        moved: Modules that the script has put onto its device.
        sent: Tensors that were put there, such as averages of the weights; those of modules among them.
    """

    def __init__(
        self, recipe: Recipe, script: Script, *,
        optimizers: Sequence[Any], models: Sequence[nn.Module], loader: Any,
        moved: Iterable[nn.Module], sent: Iterable[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__(recipe, script)
        model = models[0] if len(models) == 1 else Together(models)
        self.optimizers, self.prepared_model, self.loader = optimizers, model, loader
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.beside = apart(model, moved)
        self.beside += _kept(sent, [model, *self.beside])

    def model(self, *, fake: bool) -> Any:
        """The script's model."""
        return self.prepared_model

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Take the longest row as often as the plan says; none where the gradients are given."""
        if not given:
            self.collate(self.recipe.micro_batch, grows=grows)

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Step until the marks say enough, with gradients that are given."""
        optimizers, shares = self.optimizers, dict(model.named_parameters())
        for group in (group for one in optimizers for group in one.optimizer.param_groups):
            # those of a plan that splits them are others by now
            group["params"] = [shares.get(self.names.get(id(one), ""), one) for one in group["params"]]
        known = self.stand_ready(model, marks, optimizers, fake=fake)
        with contextlib.suppress(TraceDone), known or contextlib.nullcontext():
            while True:
                marks.step_begin()
                marks.forward_begin()
                loss = model().loss
                marks.forward_end()
                loss.backward()
                marks.backward_end(loss)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                marks.step_end()


def _kept(sent: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """A module that holds those tensors which none of some modules holds, each storage once; none for a few bytes."""
    told = {storage_of(one) for module in modules for one in (*module.parameters(), *module.buffers())}
    others = {storage_of(one): one for one in sent if storage_of(one) not in told}
    if sum(one.nbytes for one in others.values()) < _FEW_BYTES:
        return []
    holder = nn.Module()
    for number, one in enumerate(others.values()):
        holder.register_buffer(f"tensor_{number}", one.detach())
    return [holder]
