"""Launch every choice of every technique by `accelerate launch`, on three architectures: does what was written run?

    python tests/bench/launch_matrix.py [--only optimizer,adapter] [--models llama] [--json FILE]

For each value that is to be had here, the plain plan with that one value is tried, written and launched for two steps,
and `verify` says whether it took effect and stayed inside the ceiling (speeds are not judged: this may run on a busy
machine). A value that cannot go with the plain plan gets what it needs. A quarter of a minute to one for each.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tune_bench import MODELS

from autofit.device import choose_device
from autofit.errors import AutofitError
from autofit.forkserver import ForkServer
from autofit.plan import Measured
from autofit.question import Request, read_facts
from autofit.registry import technique, techniques
from autofit.source import fetch, modeling_module
from autofit.tuning import tune
from autofit.verify import verify

BATCH = 4
NEEDS = {
    ("quantization", "nf4"): {"adapter": "lora:r=16"},
    ("quantization", "int8"): {"adapter": "lora:r=16", "checkpointing": "full"},
    ("adapter", "dora:r=16"): {},
}
"""What a value can't be without."""
SMALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048}


def choices(config: Path, scratch: Path) -> list[tuple[str, str, str]]:
    """Technique, value and status of every value, and why one is withheld."""
    device = choose_device("auto")
    fetch(str(config), scratch / "model", trust_remote_code=False)
    server = ForkServer(scratch / "server.log", device, modeling_module(scratch / "model"))
    try:
        facts = read_facts(scratch, Request(model=str(config), global_batch=BATCH), device, server, print)
    finally:
        server.close()
    return [
        (one.name, str(choice.value), "" if choice.status != "withheld" else choice.reason)
        for one in techniques()
        if one.name != "accumulation"
        for choice in one.choices(facts)
    ]


def launch(config: Path, name: str, value: str, folder: Path) -> tuple[bool, str]:
    """Whether a value is tried, written, launched and in effect; and what was wrong."""
    plan = {one.name: str(one.plain) for one in techniques()} | NEEDS.get((name, value), {}) | {name: value}
    whole = "lomo" in value  # it can't accumulate
    plan["micro_batch"] = str(BATCH) if whole else plan["micro_batch"] if name == "micro_batch" else "2"
    plan["accumulation"] = str(BATCH // int(plan["micro_batch"]))
    try:
        tune(str(config), output=folder, global_batch=BATCH, seq_len=64, fix=plan, trials=1, guard=False)
        found = verify(folder, steps=2)
    except AutofitError as error:
        return False, error.message
    slow = [words for words in found.broken if "samples/s" in words]
    broken = [words for words in found.broken if words not in slow]
    return isinstance(found.outcome, Measured) and not broken, "; ".join(broken)


def main() -> None:
    """A line for each value and model, and a count at last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--models", default="llama,gpt_neox,gemma2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = {technique(name).name for name in options.only.split(",") if name}
    rows = []
    with tempfile.TemporaryDirectory(prefix="autofit-matrix-") as scratch:
        for model in options.models.split(","):
            config = Path(scratch) / f"{model}.json"
            config.write_text(json.dumps({**MODELS[model], **SMALL}))
            for name, value, withheld in choices(config, Path(scratch) / f"{model}-facts"):
                if wanted and name not in wanted:
                    continue
                began = time.monotonic()
                kept, why = (None, withheld) if withheld else launch(
                    config, name, value, Path(scratch) / f"{model}-{name}-{value.replace(':', '-')}"
                )  # fmt: skip
                word = "refused" if kept is None else "kept" if kept else "BROKEN"
                took = time.monotonic() - began
                rows.append({"model": model, "technique": name, "value": value, "result": word, "why": why})
                print(f"{model:9} {name:14} {value:28} {word:8} {took:5.0f} s  {why}", flush=True)
    broken = sum(row["result"] == "BROKEN" for row in rows)
    kept = sum(row["result"] == "kept" for row in rows)
    print(f"{kept} kept, {len(rows) - kept - broken} refused with a reason, {broken} broken")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(4 if broken else 0)


if __name__ == "__main__":
    main()
