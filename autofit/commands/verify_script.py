"""The script that ``autofit verify`` launches: training from the emitted files, as a user's script does it.

``accelerate launch --config_file DIR/accelerate.yaml verify_script.py DIR RESULT STEPS``. Every tuned setting comes
from the files in DIR: the environment from the YAML, the arguments from ``training_args.json``, the rest from
``autofit.load``. What is measured, and how, is the same code as in a trial.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(folder: Path, result: Path, steps: int) -> None:
    """Train some optimizer steps and write their outcome to ``result``."""
    from autofit.system.forking.imports import load_bitsandbytes

    load_bitsandbytes()
    from transformers import HfArgumentParser, Trainer, TrainingArguments, utils

    from autofit.contract.outcome import OUTCOME, Evidence, Measured
    from autofit.machine.meters import meter, warm_up_threads
    from autofit.output.emit import ARGUMENTS
    from autofit.output.setup import read_setup
    from autofit.system.files import write_atomically
    from autofit.system.strict_json import dump_json
    from autofit.training.jobs import caught
    from autofit.training.loops import run_loop, run_trainer, untuned
    from autofit.training.measure import measure
    from autofit.training.ranks import result_file
    from autofit.training.scripts.entry import keep_quiet, measure_steps, rows_words
    from autofit.training.timing import Clock, Effort

    _ = Trainer  # imported before the base of memory is read
    utils.logging.set_verbosity(logging.ERROR)
    setup = read_setup(folder, any_hardware=True)  # verify itself says which device it is
    effort = Effort(fidelity="whole", min_steps=steps, max_steps=steps, seconds=600.0, target=0.0)

    script = setup.document.workload.script
    environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    def run(clock: Clock) -> Evidence:
        if script is not None:
            keep_quiet()
            return measure_steps(clock, script, folder=result.parent, environment=environment)
        with tempfile.TemporaryDirectory(dir=result.parent) as scratch:  # goes with it where this is killed
            if setup.promise.launch_path == "loop":
                accelerator = setup.accelerator()
                model = setup.model()
                return run_loop(clock, accelerator, model, setup.optimizer(model, output_dir=scratch))
            written = json.loads((folder / ARGUMENTS).read_text("utf-8"))
            reader: Any = HfArgumentParser
            (args,) = reader(TrainingArguments).parse_dict({**written, **untuned(clock, Path(scratch))})
            model = setup.model()
            wrapped = setup.optimizer(model, output_dir=scratch) if setup.recipe.optimizer_wraps else None
            return run_trainer(clock, args, model, wrapped)

    warm_up_threads()
    words = rows_words(script) if script else None
    facts = setup.document.facts
    outcome = caught(facts, lambda: measure(setup.recipe, effort, meter(facts), run, words=words))
    if setup.document.workload.processes == 1:
        write_atomically(result, dump_json(OUTCOME, outcome))
    else:
        write_atomically(result_file(result.parent, int(os.environ["RANK"])), dump_json(OUTCOME, outcome))
        if not isinstance(outcome, Measured):
            os._exit(1)  # the launcher ends the others, which may wait for this one
    if script is not None:
        sys.stdout.flush()
        os._exit(0)  # the script was left in its middle: what it has begun is not ended in order


if __name__ == "__main__":
    from autofit.system.processes import die_with_parent

    die_with_parent(os.getppid(), signal.SIGKILL)  # a launcher that is killed, or its rank's agent, ends no rank
    # the folder of a script comes first in the search path; this one's modules must not stand for others
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
