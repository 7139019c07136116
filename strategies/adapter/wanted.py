"""What is asked of an adapter, as its value says it: ``lora:r=8:alpha=8:targets=q_proj+v_proj``."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from autofit.contract.technique import InputError

if TYPE_CHECKING:
    from autofit.contract.plan import Value

RANK = 16
"""The rank unless given."""
LORA = {"lora": "LoRA", "rslora": "rank-stabilized LoRA", "dora": "DoRA"}
_WORD = re.compile(r"(?P<name>r|alpha|dropout|targets)=(?P<value>[\w.+]+)", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An adapter, as its value says it.

    Attributes:
        method: ``lora``, ``rslora``, ``dora`` or ``ia3``.
        rank: Of the matrices; 0 for a method without.
        alpha: Twice the rank unless given.
        dropout: Before the first matrix.
        targets: Names of modules; none for all linear layers.
    """

    method: str
    rank: int = 0
    alpha: int = 0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def words(self) -> str:
        """The value, written in the one way."""
        said = [self.method]
        if self.rank:
            said.append(f"r={self.rank}")
        if self.alpha != 2 * self.rank:
            said.append(f"alpha={self.alpha}")
        if self.dropout:
            said.append(f"dropout={self.dropout:g}")
        if self.targets:
            said.append(f"targets={'+'.join(self.targets)}")
        return ":".join(said)

    def seen_as(self) -> str:
        """How :func:`~strategies.adapter.peft_layers.adapter_on` names it on the live model."""
        if not self.rank:
            return self.method
        scaling = self.alpha / (math.sqrt(self.rank) if self.method == "rslora" else self.rank)
        return f"{'dora' if self.method == 'dora' else 'lora'} r={self.rank} scaling={scaling:.4g}"


def read(text: str) -> Wanted | None:
    """What a text asks for; ``None`` where it can't be read."""
    method, *words = text.split(":")
    matches = [_WORD.fullmatch(word) for word in words]
    found = {match["name"]: match["value"] for match in matches if match is not None}
    names = found.pop("targets", None)
    targets = () if names is None else tuple(sorted(set(names.split("+"))))
    whole = None not in matches and len(matches) == len(found) + (names is not None) and "" not in targets
    if not whole or method not in {"ia3", *LORA} or (method == "ia3" and found):
        return None
    if method == "ia3":
        return Wanted(method=method, targets=targets)
    try:
        rank, dropout = int(found.get("r", RANK)), float(found.get("dropout", 0))
        alpha = int(found.get("alpha", 2 * rank))
    except ValueError:
        return None
    fair = 0 < rank < 1 << 16 and 0 < alpha < 1 << 20 and 0 <= dropout < 1
    return Wanted(method=method, rank=rank, alpha=alpha, dropout=dropout, targets=targets) if fair else None


def wanted_by(value: Value) -> Wanted:
    """The adapter that a value of a plan asks for.

    Raises:
        InputError: It can't be read.
    """
    wanted = read(str(value))
    if wanted is None:
        raise InputError(f"adapter has no value {value!r}", hint=f"write it like adapter=lora:r={RANK}")
    return wanted
