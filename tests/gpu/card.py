"""What the device tests train on: the facts of this machine's card."""

import dataclasses
import json
import os
from pathlib import Path

from autofit.system.units import GIB
from tests.support.tiny import describe

EMULATED = "HOLLOW_CARD" in os.environ
"""The card of tests/hollow: what its host does takes what this machine needs, so its speed is not judged."""


def facts_on_card(server, config, *, most_bytes=12 * GIB, global_batch=8, seq_len=512):
    """The facts of a model on this machine's card, under a ceiling that leaves others some of it."""
    facts = describe(server, config, device="cuda", seq_len=seq_len, global_batch=global_batch)
    work = dataclasses.replace(
        facts.workload,
        limit_bytes=min(most_bytes, int(facts.hardware.free_bytes * 0.9)),
        host_limit_bytes=int(facts.hardware.host_free_bytes * 0.8),
    )
    return dataclasses.replace(facts, workload=work)


def note(name, **values):
    """Leave a line for the record."""
    path = os.environ.get("AUTOFIT_GPU_CHECKS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"check": name, **values}) + "\n")
    print(name, values)
