"""A script's plain loop as what a trace trains: the script takes the micro-steps itself, on batches of fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from autofit.costmodel.scripts.script_source import ScriptSource, apart
from autofit.costmodel.tracing.layers import Marks, TraceDone

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script


class LoopSource(ScriptSource):
    """A loop that takes its first batch.

    Args:
        recipe: Which its Accelerator was made with.
        script: Whose it is.
        optimizer: The script's, as it was prepared, if it was.
        model: The model, wrapped as the plan says.
        loader: The script's own loader.
        moved: Modules that the script has put onto its device.
    """

    def __init__(
        self, recipe: Recipe, script: Script, *, optimizer: Any, model: Any, loader: Any, moved: Iterable[nn.Module]
    ) -> None:
        super().__init__(recipe, script)
        self.optimizer, self.prepared_model, self.loader = optimizer, model, loader
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.beside = apart(model, moved)

    def model(self, *, fake: bool) -> Any:
        """The script's model."""
        return self.prepared_model

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Take the longest row as often as the plan says; none where the gradients are given."""
        if not given:
            self.collate(self.recipe.micro_batch, grows=grows)

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Step until the marks say enough, with gradients that are given."""
        optimizer, shares = self.optimizer, dict(model.named_parameters())
        for group in optimizer.optimizer.param_groups:  # those of a plan that splits them are others by now
            group["params"] = [shares.get(self.names.get(id(one), ""), one) for one in group["params"]]
        known = self.stand_ready(model, marks, optimizer, fake=fake)
        with contextlib.suppress(TraceDone), known or contextlib.nullcontext():
            while True:
                marks.step_begin()
                marks.forward_begin()
                loss = model().loss
                marks.forward_end()
                loss.backward()
                marks.backward_end(loss)
                optimizer.step()
                optimizer.zero_grad()
                marks.step_end()
