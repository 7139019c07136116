"""Does a plan run on the smallest card that an estimate names, and not on one 3 % smaller? On emulated cards.

    python tests/bench/smallest_card_bench.py [--dir DIR] [--json FILE] [--only TEXT]

``autofit estimate --gpu CARD --json`` says of each plan on how many bytes of device memory it runs (``device_bytes``,
without the share to spare). Then it trains for three optimizer steps on an emulated card of that size, and on one of
97 % of it (:mod:`tests.hollow`, whose environment lies in DIR). It should end on the one, and run out of memory on the
other.
"""

import argparse
import datetime as dt
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.gpu.fits import MODELS, Case  # noqa: E402 - the checkout is found first
from tests.gpu.trials import PLAIN  # noqa: E402
from tests.hollow.setup import default_folder  # noqa: E402

CARDS = ("H100 SXM", "A100 SXM 80 GB", "L40S", "RTX 4090", "T4")
SMALLER = 0.97
_BIG = {"micro_batch": 8}
PLANS = {
    "gpt2": (
        {"micro_batch": 16},
        {**_BIG, "precision": "fp32"},
        {"micro_batch": 32, "checkpointing": "full"},
        {"micro_batch": 16, "kernels": "chunked_ce"},
    ),
    "qwen2.5-0.5b": (
        {"micro_batch": 4},
        {"micro_batch": 4, "precision": "fp32"},
        {**_BIG, "checkpointing": "full", "optimizer": "adamw_8bit"},
        {"micro_batch": 4, "accumulation": 2, "precision": "tf32"},
    ),
    "llama-3.2-1b": (
        {"micro_batch": 2, "checkpointing": "full"},
        {"micro_batch": 2, "adapter": "lora:r=16", "quantization": "nf4"},
        {"micro_batch": 1, "optimizer": "adafactor"},
        {"micro_batch": 2, "checkpointing": "full", "precision": "fp32"},
    ),
}
SEQ_LEN = 1024


def cases():
    """Every plan on every card: 60. The first card's come first."""
    for card, (model, plans) in itertools.product(CARDS, PLANS.items()):
        for changes in plans:
            words = " ".join(f"{name}={value}" for name, value in changes.items())
            yield f"{card} {model} {words}", card, model, PLAIN.replaced(**changes)


def estimated(card, model, plan, folder):
    """``device_bytes`` of a plan; a reason, in words, where it is not offered."""
    config = folder / f"{model}.json"
    config.write_text(json.dumps(MODELS[model]))
    fixed = [word for name, value in plan.items() for word in ("--fix", f"{name}={value}")]
    batch = int(plan["micro_batch"]) * int(plan["accumulation"])
    command = [
        sys.executable, "-m", "autofit", "estimate", str(config), "--gpu", card, "--seq-len", str(SEQ_LEN),
        "--global-batch", str(batch), "--allow", "exact,numeric,method", "--json", *fixed,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        return done.stderr.strip().splitlines()[0]
    plans = json.loads(done.stdout)["plans"]
    return plans[0]["device_bytes"] if plans else "no plan"


def trained(options, card, memory_bytes, model, plan):
    """Whether three optimizer steps end on a card of that size."""
    case = Case(model=model, seq_len=SEQ_LEN, plan=dict(plan), allocator="default")
    command = [
        sys.executable, "-m", "tests.hollow", "--dir", str(options.dir), "--gpu", card,
        "--memory", f"{memory_bytes}", "--", "python", __file__, "--train", json.dumps([case.model, case.plan]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"crash": done.stderr[-600:]}


def train(model, plan):
    """The child's side: on the card that is here."""
    from dataclasses import asdict

    from autofit.machine.describe import describe_model
    from tests.gpu.fits import Child, config_folder

    with tempfile.TemporaryDirectory(prefix="autofit-smallest-") as folder:
        described = describe_model(model, config_folder(folder, model), trust_remote_code=False)
        case = Case(model=model, seq_len=SEQ_LEN, plan=plan, allocator="default")
        values = described if isinstance(described, dict) else asdict(described)
        found = Child(case, values, Path(folder)).run(None)
        print(json.dumps({name: found.get(name) for name in ("fits", "crash", "phase", "retries")}))


def main():
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=default_folder(), help="of python -m tests.hollow.setup")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row there")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*json.loads(options.train))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="autofit-smallest-") as folder:
        for name, card, model, plan in cases():
            if options.only not in name:
                continue
            row = {"name": name, "device_bytes": estimated(card, model, plan, Path(folder))}
            if isinstance(row["device_bytes"], int):
                for share in (1.0, SMALLER):
                    row[f"at {share}"] = trained(options, card, round(row["device_bytes"] * share), model, plan)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(document(rows))
    print(json.dumps(summary(rows)))


def summary(rows):
    """How many ran where they should, and did not where they should not."""
    done = [row for row in rows if "at 1.0" in row]
    return {
        "plans": len(done),
        "not_offered": len(rows) - len(done),
        "ran": sum(bool(row["at 1.0"].get("fits")) for row in done),
        "ran_out_3_percent_below": sum(
            row[f"at {SMALLER}"].get("fits") is False and not row[f"at {SMALLER}"].get("crash") for row in done
        ),
    }


def document(rows):
    """All that was found, as JSON."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return json.dumps({"date": date, "emulated": True, "summary": summary(rows), "rows": rows}, indent=1) + "\n"


if __name__ == "__main__":
    main()
