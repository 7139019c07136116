"""The files of an estimate: the same as a tune's, marked as estimated and not measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from autofit.commands.estimates.plans import Estimated
from autofit.commands.tunes.output_folder import BEGUN, CONFIG_FILES, check_kinds, names_in, remove_answer
from autofit.contract.facts import Facts
from autofit.contract.outcome import Promise
from autofit.costmodel.families import speed_range
from autofit.costmodel.seconds.step_time import StepClock
from autofit.machine.gpu_catalogue import Card
from autofit.output import document
from autofit.output.document import DOCUMENT_FILE, MODEL_FOLDER, read_document
from autofit.output.result import compose_estimate, write_result
from autofit.system import units
from autofit.system.errors import InputError
from autofit.system.files import copy_folder, usable_folder
from autofit.system.forking.server import ForkServer
from autofit.system.locks import held

LOCK = ".estimate.lock"


def check_card(card: Card | None, output: str | Path | None) -> None:
    """Refuse files for a card whose speed can't be predicted.

    Raises:
        InputError: Files are asked for, and the card has no name in the catalogue.
    """
    if output is not None and card is None:
        raise InputError(
            "the files hold a predicted speed, and how fast this device is can't be told without its name",
            hint='name a card by --gpu, like --gpu "RTX 4090"; `autofit tune` measures this machine',
        )


@contextlib.contextmanager
def estimate_folder(output: str | Path) -> Iterator[Path]:
    """The folder of an estimate's files, held against others; a former estimate there is written over.

    Where the estimate fails before its answer is whole, nothing of it stays: the next one would be refused for that.

    Raises:
        InputError: It holds a tune, or files that no estimate wrote.
        MachineError: It can't be written, or another estimate is writing it.
    """
    folder = Path(output)
    ours = False  # what an answer is made of, should it be there at the end
    with contextlib.suppress(OSError, ValueError):
        ours = not folder.exists()
        there = names_in(folder)
        if there & BEGUN:
            raise InputError(f"{folder} holds a tune", hint="name a new or an empty folder by --output")
        clash = sorted(there & CONFIG_FILES)
        if clash and (DOCUMENT_FILE not in there or read_document(folder).estimated is None):
            raise InputError(
                f"{folder} holds {', '.join(clash)}, which no estimate wrote: it would be written over",
                hint="name a new or an empty folder by --output",
            )
        ours = True
        check_kinds(folder, there)
    usable_folder(folder)
    with held(folder / LOCK, f"another estimate is writing {folder}", "give each its own --output"):
        try:
            yield folder
        finally:
            if ours and not (folder / DOCUMENT_FILE).exists():  # it is written last
                remove_answer(folder)


def write_estimate(  # noqa: PLR0917 - what an estimate has found out
    one: Estimated, facts: Facts, card: Card, config: Path, output: Path, server: ForkServer, *,
    why: str, notes: Sequence[str], seconds: float,
) -> None:  # fmt: skip
    """Write the four files of one plan, each loaded back.

    Args:
        one: The plan, whose speed is predicted.
        facts: The card and the question.
        card: The catalogue's.
        config: Folder of the model's config.
        output: From :func:`estimate_folder`.
        server: Loads the files back.
        why: This plan.
        notes: What was assumed.
        seconds: That the estimate took.
    """
    assert one.samples_per_second is not None
    pace, work = one.samples_per_second, facts.workload
    low, high = speed_range(one.plan, facts, StepClock(card).spread, one.slow_host)
    promise = Promise(
        launch_path=work.launch_path,
        samples_per_second=pace,
        tokens_per_second=pace * facts.tokens_a_sample,
        step_seconds=work.global_batch / pace,
        step_seconds_spread=0.0,
        peak_bytes=one.device_bytes,
        allocated_bytes=round(one.need.peak_bytes),
        reserved_bytes=max(round(one.need.peak_bytes), one.device_bytes - one.outside_bytes),
        outside_bytes=one.outside_bytes,
        limit_bytes=work.limit_bytes,
    )
    if one.need.elsewhere_bytes:
        each = f", {units.size(one.need.elsewhere_bytes * work.processes)} in all" if work.processes > 1 else ""
        waiting = f"{units.size(one.need.elsewhere_bytes)} wait on the host for each process{each}"
        notes = [*notes, f"{waiting}: so much of its memory is to be free"]
    found = compose_estimate(
        one.plan, promise, facts.evaluating(one.evaluated_rows),
        estimated=document.Estimated(low=low, high=high), reason=why, notes=notes, seconds=seconds,
    )  # fmt: skip
    copy_folder(config, output / MODEL_FOLDER)
    write_result(found, output, server)
