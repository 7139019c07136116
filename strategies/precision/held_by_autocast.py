"""The precision of a script that calls its model under an autocast of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.contract.technique import Held

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_VALUES = {"bfloat16": "bf16", "float16": "fp16"}


def held_by_autocast(facts: Facts) -> Held | None:
    """What it computes in by ``torch.autocast``, which stands over its Accelerator's; ``None`` where there is none.

    Where its Accelerator is asked for a precision besides, that is kept on.
    """
    script = facts.workload.script
    dtype = "" if script is None else script.autocast.get(facts.hardware.device, "")
    if script is None or dtype not in _VALUES:
        return None
    alone = not (script.own.get("bf16") or script.own.get("fp16"))
    why = f"the script calls its model under torch.autocast in {dtype}"
    return Held(_VALUES[dtype], why, firm=True, by_script=alone)
