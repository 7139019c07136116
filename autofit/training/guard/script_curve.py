"""A short training of a script, for the guard: with random weights and the script's own rows, loss and collator.

It runs up to its training as in a trial. From there on nothing is dropped out, and every optimizer step trains on the
same rows, so that two plans that train the same way leave the same curve. What a script may do otherwise each time
(other weights, other rows, rows that change at random) is found by checksums, and then nothing is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.training.guard.loss_curve import Curve, CurveListener, learning, written
from autofit.training.guard.rounding import Rounding, rounded
from autofit.training.rollouts import as_trained, generate_alike, take_prompts
from autofit.training.row_order import wanted
from autofit.training.scripts.entry import construct, quiet
from autofit.training.scripts.leave import Enough, run_until_left
from autofit.training.scripts.patches import Patches, loads_of
from autofit.training.scripts.rows import take_the_same
from autofit.training.scripts.watched import watch, wrap

if TYPE_CHECKING:
    from autofit.contract.script import Script


def script_curve(
    listener: CurveListener,
    script: Script,
    *,
    folder: Path,
    environment: Mapping[str, str],
    rounding: Rounding | None = None,
) -> Curve:
    """Run a script with a Trainer up to its training, and train until the listener has seen enough.

    Args:
        listener: Writes the curve of its recipe.
        script: What is run.
        folder: Where the script may write.
        environment: Variables that the launch has set, to stand where the script's own arguments change them.
        rounding: The arithmetic to train in.

    Raises:
        Refused: The script does something that can't be tuned.
        Exception: The script's own.
    """
    recipe = listener.recipe
    most = listener.effort.warm_up + listener.effort.max_steps

    def entry(trainer: Any, train: Callable[[], Any]) -> Any:
        raise Enough(written(listener, lambda: _train(trainer, train)))

    def _train(trainer: Any, train: Callable[[], Any]) -> None:
        from transformers import set_seed

        trainer.model_init = None
        wrap(trainer, recipe, joins=False)  # the same rows as the baseline's
        drop_nothing(trainer.model)
        set_seed(recipe.facts.workload.seed)
        listener.begin(trainer.model)
        asked = wanted(listener, most, longest=script.longest_places, places=script.places)
        if script.generated:
            take_prompts(trainer, asked, alike=True)
            generate_alike(trainer)
        else:
            take_the_same(trainer, asked)
        watch(trainer, listener, count=lambda inputs: listener.count(as_trained(inputs)))
        with rounded(rounding) if rounding else contextlib.nullcontext():
            train()

    Patches(
        train=entry,
        call=script.call,
        construct=construct(folder),
        tuned={
            **recipe.emission.training_args,
            **learning(recipe),
            "max_steps": most,
            "per_device_train_batch_size": recipe.micro_batch,
        },
        quiet=quiet(),
        environment=environment,
        loads=loads_of(recipe),
    ).install()
    try:
        run_until_left(script.path, script.arguments, measured=True)
    except Enough as enough:
        curve: Curve = enough.found
        return curve
    raise AssertionError("a script was left without a reason")


def drop_nothing(model: Any) -> None:
    """Set every share of what is dropped out to 0, in the modules and in the configs that some of them read."""
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    for holder in [*model.modules(), *configs.values()]:
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
