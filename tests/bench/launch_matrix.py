"""Launch every choice of every technique by `accelerate launch`, on three architectures: does what was written run?

    python tests/bench/launch_matrix.py --json FILE [--only optimizer,adapter] [--models llama] [--again]
                                        [--processes N] [--lengths FILE]
    python -m tests.hollow --gpus 2 -- python tests/bench/launch_matrix.py ...     # on emulated cards

For each value that is to be had here, the baseline plan with that one value is tried, written and launched for two
steps, and `verify` says whether it took effect and stayed inside the ceiling (speeds are not judged: this may run on a
busy machine). A value that can't go with the baseline plan gets what it needs. About a quarter of a minute for each.
Rows of FILE name the device, the processes and the lengths where they are other than the CPU, one and none.

FILE is written after every launch. What it holds already is not launched again, but for what was broken: a run that was
cut goes on. With `--again` everything is launched anew. `--table` only prints FILE as Markdown.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tune_bench import MODELS

from autofit import space
from autofit.commands.facts import read_facts
from autofit.commands.model_source import fetch, modeling_module
from autofit.commands.request import Request
from autofit.commands.tune import tune
from autofit.commands.verify import verify
from autofit.contract.outcome import Measured
from autofit.contract.technique import Kind
from autofit.machine.packages import installed
from autofit.machine.select import choose_device
from autofit.registry import technique, techniques
from autofit.search.decision import changed_values
from autofit.system.errors import AutofitError
from autofit.system.files import write_atomically
from autofit.system.forking.server import ForkServer

BATCH, SEQ_LEN = 4, 64
SMALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048, "num_hidden_layers": 8}


def facts_of(config, scratch, workload):
    """What a tune of the model would read here."""
    device = choose_device("auto")
    fetch(str(config), scratch / "model", trust_remote_code=False)
    server = ForkServer(scratch / "server.log", device, modeling_module(scratch / "model"))
    try:
        request = Request(model=str(config), global_batch=BATCH, seq_len=SEQ_LEN, **workload)
        return read_facts(scratch, request, device, server, lambda _: None)
    finally:
        server.close()


def plan_of(name, value, facts):
    """The plan nearest to the plain one that has the value, in halves of the batch where it says nothing of it."""
    given = {one.name: (one.baseline_for(facts),) for one in techniques()}
    rows = BATCH // facts.workload.processes
    given |= {"micro_batch": (max(rows // 2, 1), rows), "accumulation": (2, 1), "adapter": (), "quantization": ()}
    if facts.hardware.device == "cuda":
        given |= {"parallel": (*given["parallel"], "fsdp"), "offload": ("none", "parameters")}
    half = [name for name in ("bf16", "fp16") if name in facts.hardware.precisions and facts.hardware.device == "cuda"]
    given |= {"precision": ("fp32", *half, "bf16_weights")}
    given = {knob: values for knob, values in given.items() if values} | {name: (value,)}
    if name in {"micro_batch", "accumulation"}:
        given.pop("accumulation" if name == "micro_batch" else "micro_batch")
    plans = space.build(facts, frozenset(Kind), given).plans
    return min(plans, key=lambda plan: (changed_values(plan), plan["accumulation"] != 2))


def label(model, facts, lengths):
    """The model, and what it is trained on."""
    hardware, processes = facts.hardware, facts.workload.processes
    emulated = "emulated " if "HOLLOW_CARD" in os.environ else ""
    where = "" if hardware.device == "cpu" and processes == 1 else f" on {processes} x {emulated}{hardware.name}"
    return f"{model}{where}{', rows of several lengths' if lengths else ''}"


def launch(config, facts, name, value, folder, workload):
    """Whether a value is tried, written, launched and in effect; and what was wrong."""
    try:
        plan = plan_of(name, value, facts)
        tune(
            str(config), output=folder, global_batch=BATCH, seq_len=SEQ_LEN, fix=plan, trials=1, guard=False, **workload
        )
        found = verify(folder, steps=2, tolerance=1.0)
    except AutofitError as error:
        return False, error.message
    return isinstance(found.outcome, Measured) and not found.broken, "; ".join(found.broken)


def table(rows):
    """A row for each value, a column for each model; a reason once."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {}
    for row in rows:
        cells.setdefault((row["technique"], row["value"]), {})[row["model"]] = row
    lines = [f"| technique | value | {' | '.join(models)} | why not |", f"|{'---|' * (len(models) + 3)}"]
    for (name, value), found in cells.items():
        words = [found[model]["result"] if model in found else "" for model in models]
        why = "; ".join(dict.fromkeys(row["why"] for row in found.values() if row["why"]))
        lines.append(f"| `{name}` | `{value}` | {' | '.join(words)} | {why} |")
    return "\n".join(lines)


def said(rows):
    """How many of each result."""
    counts = {word: sum(row["result"] == word for row in rows) for word in ("kept", "refused", "BROKEN")}
    return f"{counts['kept']} kept, {counts['refused']} refused with a reason, {counts['BROKEN']} broken"


def main():
    """A line for each value and model, and a count at last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="techniques, split at commas")
    parser.add_argument("--models", default="llama,gpt_neox,gemma2")
    parser.add_argument("--values", default="", help="of these techniques, split at commas; default: all")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--lengths", help="a file that a tune would take, of rows that differ in length")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="launch what the file holds, too")
    parser.add_argument("--table", action="store_true", help="print the file as Markdown, and launch nothing")
    options = parser.parse_args()
    held = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    if options.table:
        print(table(held), said(held), sep="\n\n")
        return
    rows = {(row["model"], row["technique"], row["value"]): row for row in held}
    wanted = {technique(name).name for name in options.only.split(",") if name}
    values = {value for value in options.values.split(",") if value}
    workload = {"processes": options.processes, "lengths": options.lengths}
    with tempfile.TemporaryDirectory(prefix="autofit-matrix-") as scratch:
        for model in options.models.split(","):
            config = Path(scratch) / f"{model}.json"
            config.write_text(json.dumps({**MODELS[model], **SMALL}))
            facts = facts_of(config, Path(scratch) / f"{model}-facts", workload)
            called = label(model, facts, options.lengths)
            for one in techniques():
                for choice in one.choices(facts) if not wanted or one.name in wanted else ():
                    key = (called, one.name, str(choice.value))
                    if values and key[2] not in values:
                        continue
                    withheld = choice.status == "withheld"
                    done = key in rows and rows[key]["result"] == "kept" and not options.again
                    if done and not withheld:
                        continue
                    began = time.monotonic()
                    folder = Path(scratch) / "-".join((model, *key[1:])).replace(":", "-")
                    if withheld:
                        kept, why = None, choice.reason
                    else:
                        kept, why = launch(config, facts, one.name, choice.value, folder, workload)
                    word = "refused" if kept is None else "kept" if kept else "BROKEN"
                    rows[key] = {"model": called, "technique": one.name, "value": key[2], "result": word, "why": why}
                    written = {"versions": installed(), "rows": list(rows.values())}
                    write_atomically(options.json, json.dumps(written, indent=1) + "\n")
                    took = time.monotonic() - began
                    print(f"{model:9} {one.name:14} {key[2]:30} {word:8} {took:5.0f} s  {why}", flush=True)
    print(said(rows.values()))
    sys.exit(4 if any(row["result"] == "BROKEN" for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
