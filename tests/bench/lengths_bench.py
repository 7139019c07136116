"""Plans for rows of very different lengths, each launched over all of the data: their pace, and whether they fit.

``python tests/bench/lengths_bench.py [--rounds 3] [--ceiling 400MiB] [--json FILE]`` tunes
``tests/data/scripts/finetune.py`` as it stands, then with all rows padded to the longest, and with each way of
batching, under the same ceiling and over the same values. The launches are interleaved; pace is in tokens a second
without padding, and the peak is that of the whole training, in which the longest rows come up. On a CPU, with one
thread.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit.output.document import read_document
from autofit.output.plan_words import plan_words
from autofit.system.units import size
from tests.support.scripted import SCRIPTS, autofit

SCRIPT = SCRIPTS / "finetune.py"
SIZES = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
METHOD = ("--allow", "exact,numeric,method")
WAYS = {
    "its own lengths": ((), ()),
    "full length": ((), ("--full",)),
    "its own lengths, padding_free": (("--fix", "batching=padding_free"), ()),
    "its own lengths, group_by_length": ((*METHOD, "--fix", "batching=group_by_length"), ()),
    "its own lengths, packing": ((*METHOD, "--fix", "batching=packing"), ()),
}
"""What each plan is chosen for: options of the tune, and arguments of the script."""
SPACE = (
    "--fix", "precision=fp32", "--fix", "attention=default", "--fix", "optimizer=adamw", "--fix", "adapter=none",
    "--fix", "loader=default", "--among", "checkpointing=off,full", "--among", "micro_batch=1,2,4,8,16",
)  # fmt: skip


def ran(folder, *words):
    """What a command printed.

    Raises:
        RuntimeError: It failed.
    """
    done = autofit(folder, *words, seconds=900)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-1500:]}")
    return done.stdout


def measured(folder: Path, ceiling: str, rounds: int, rows: int) -> list[dict]:
    """A row for each plan."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder / "llama")
    given = ("--model", "llama", "--rows", str(rows))
    table, seen = [], {}
    for number, (way, (options, more)) in enumerate(WAYS.items()):
        limits = ("--memory-limit", ceiling, "--device", "cpu", "--output", f"out{number}")
        ran(folder, "tune", SCRIPT, *limits, *SPACE, *options, "--", *given, *more)
        found = read_document(folder / f"out{number}")
        promise = found.promise
        row = {"chosen_for": way, "plan": plan_words(found.plan), "trials": len(found.trials)}
        row |= {"promised_tokens_per_second": promise.tokens_per_second, "limit_bytes": promise.limit_bytes}
        table.append({**row, "promised_peak_bytes": promise.peak_bytes, "changes": list(found.changes)})
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    for _ in range(rounds):
        for number, row in enumerate(table):
            ran(folder, "run", f"out{number}", SCRIPT, "--", *given, "--told", "told.json")
            seen.setdefault(row["chosen_for"], []).append(json.loads((folder / "told.json").read_text("utf-8")))
    for row in table:
        runs = seen[row["chosen_for"]]
        row["tokens_per_second"] = [round(one["tokens"] / one["seconds"], 1) for one in runs]
        row["peak_bytes"] = max(one["peak_bytes"] for one in runs)
        row["fits"] = row["peak_bytes"] <= row["limit_bytes"]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--ceiling", default="400MiB")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lengths-") as folder:
        table = measured(Path(folder), options.ceiling, options.rounds, options.rows)
    full = next(statistics.median(one["tokens_per_second"]) for one in table if one["chosen_for"] == "full length")
    print("| plan chosen for | plan | tokens/s, launched | against full length | peak | fits |")
    print("|---|---|---|---|---|---|")
    for one in table:
        pace = statistics.median(one["tokens_per_second"])
        cells = (
            one["chosen_for"], one["plan"], f"{pace:,.0f}", f"{pace / full:.2f} x", size(one["peak_bytes"]),
            "yes" if one["fits"] else "NO",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")
    found = {"bench": "lengths", "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "rows": table}
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0 if all(one["fits"] for one in table) else 1


if __name__ == "__main__":
    sys.exit(main())
