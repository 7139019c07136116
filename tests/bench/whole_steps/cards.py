"""Names of cards in published tables -> cards of the catalogue."""

from __future__ import annotations

import functools
import re

from autofit.machine.gpu_catalogue import Card, find
from autofit.system.errors import InputError

_OTHERWISE = (
    (r"gh200", "GH200 96 GB"),
    (r"h200.*nvl", "H200 NVL"),
    (r"h200", "H200 SXM"),
    (r"b200", "B200"),
    (r"h100.*nvl", "H100 NVL"),
    (r"h100.*pcie", "H100 PCIe"),
    (r"h100", "H100 SXM"),
    (r"a100.*40.*pcie|a100.*pcie.*40|a100[ _-]*pcie(?!.*80)", "A100 PCIe 40 GB"),
    (r"a100.*80.*pcie|a100.*pcie.*80", "A100 PCIe 80 GB"),
    (r"a100.*80", "A100 SXM 80 GB"),
    (r"a100", "A100 SXM 40 GB"),
    (r"v100s", "V100S PCIe 32 GB"),
    (r"v100.*32", "V100 SXM2 32 GB"),
    (r"v100", "V100 SXM2 16 GB"),
    (r"(?:rtx )?6000 ?ada|ada ?a?6000", "RTX 6000 Ada Generation"),
    (r"quadro ?rtx ?(\d000)", r"Quadro RTX \1"),
    (r"\b(?:rtx )?(a[2456][05]00)\b", r"RTX \1"),
    (r"\b(l40s|l40|l4|a40|a10g|a10|t4|a30)\b", r"\1"),
    (r"\b(?:rtx )?([2345]0[5-9]0)[ _-]?(ti|super)?\b", r"RTX \1 \2"),
    (r"\b(?:gtx )?(10[678]0)[ _-]?(ti)?\b", r"GTX \1 \2"),
)


@functools.cache
def card_of(name: str) -> Card | None:
    """The card that a table means; ``None`` where the catalogue has none, or a laptop's is meant."""
    plain = re.sub(r"LambdaCloud|LambdaOD_\w*?_?\dx|LambdaBM_\w*?\dx", "", name).strip(" _")
    try:
        return find(plain)
    except InputError:
        pass
    words = plain.lower()
    if re.search(r"laptop|max-?q|mobile", words):
        return None
    for pattern, wanted in _OTHERWISE:
        found = re.search(pattern, words)
        if found:
            try:
                return find(found.expand(wanted).strip())
            except InputError:
                return None
    return None
