"""The script that ``autofit run`` launches: it puts a plan into the user's script and runs that, whole.

``accelerate launch --config_file DIR/accelerate.yaml run_script.py DIR SCRIPT ARGS``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from autofit.system.errors import AutofitError


def main(folder: str, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script with the plan of an output folder; at its end, tell which knobs took no effect."""
    from autofit.system.forking.imports import load_bitsandbytes

    load_bitsandbytes()
    import transformers

    from autofit.output.setup import read_setup
    from autofit.system.errors import AutofitError, InputError
    from autofit.training.scripts.entry import rows_of, train_with
    from autofit.training.scripts.leave import Refused

    _ = transformers.Trainer  # what it imports, before the script is timed or anything is patched
    try:
        setup = read_setup(folder)
        setup.check()
    except AutofitError as error:
        _stop(error)
    environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    def around(trainer: Any, train: Callable[[], Any], own: Mapping[str, Any]) -> Any:
        asked = own["per_device_train_batch_size"] * own["gradient_accumulation_steps"] * trainer.args.world_size
        by_config = setup.recipe.facts.workload.script is None  # of a script that was tuned it is told before
        if by_config and asked != (rows := setup.recipe.facts.workload.global_batch):
            _tell(f"the script asks for {asked} rows an optimizer step; it trains with {rows}, as it was tuned")
        watches = [] if trainer.model_init else [setup.watch(trainer.model)]  # or it makes another where it begins

        def begins() -> None:
            if not watches:
                watches.append(setup.watch(trainer.model))

        result, steps = _counted(trainer, train, begins)
        if steps:  # else it went on from a checkpoint of its last step
            for words in watches[0].ignored(trainer.optimizer, trainer.accelerator, steps, rows=rows_of(trainer)):
                _tell(f"took no effect: {words}")
        return result

    try:
        train_with(setup.recipe, script, arguments, environment=environment, around=around, say=_tell)
    except AutofitError as error:
        _stop(error)
    except Refused as error:
        _stop(InputError(error.message, hint=error.hint))


def _counted(trainer: Any, train: Callable[[], Any], begins: Callable[[], Any] = lambda: None) -> tuple[Any, int]:
    """What a training returns, and the optimizer steps that it made: those before its checkpoint were another's.

    ``begins`` is called where the model that it trains is made and prepared.
    """
    from transformers import TrainerCallback

    class Begun(TrainerCallback):
        step = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.step = state.global_step
            begins()

    begun = Begun()
    trainer.add_callback(begun)
    result = train()
    trainer.remove_callback(begun)
    return result, trainer.state.global_step - begun.step


def _tell(words: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the others say the same
        print(f"autofit: {words}", file=sys.stderr)  # noqa: T201 - beside what the script prints


def _stop(error: AutofitError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 - it is a program of its own
    sys.exit(error.exit_code)


if __name__ == "__main__":
    from autofit.system.processes import die_with_parent

    die_with_parent(os.getppid(), signal.SIGTERM)  # a launcher that is killed ends no script; one may save then
    # the folder of a script comes first in the search path; this one's modules must not stand for others
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    main(sys.argv[1], sys.argv[2], tuple(sys.argv[3:]))
