"""Does a plan run on the smallest card that an estimate names, and not on one 3 % smaller? On emulated cards.

    python -m tests.hollow -- python tests/bench/smallest_card_bench.py [--json FILE] [--only TEXT] [--share K/N]

``autofit estimate --gpu CARD`` says of each plan on how many bytes of device memory it runs (``device_bytes``, without
the share to spare). Then the plan trains for three optimizer steps and evaluates a batch on an emulated card of that
size, and on one of 97 % of it. It should end on the one, and run out of memory on the other. A context takes what the
estimate takes it for: how large one truly is, an emulated card does not tell.

Each run has a process of its own, forked from one that has the libraries loaded and never sees a card. Rows that FILE
holds already are not run again.
"""

import argparse
import datetime as dt
import itertools
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from autofit.commands.estimates.estimate import estimate  # noqa: E402 - the checkout is found first
from autofit.costmodel.forecast import context_bytes  # noqa: E402
from autofit.machine.gpu_catalogue import find  # noqa: E402
from autofit.system.errors import AutofitError  # noqa: E402
from autofit.system.units import MIB  # noqa: E402
from tests.gpu.fits import MODELS, Case, preload  # noqa: E402
from tests.gpu.trials import PLAIN  # noqa: E402
from tests.hollow.cards import describe  # noqa: E402

CARDS = ("H100 SXM", "A100 SXM 80 GB", "L40S", "RTX 4090", "T4")
SIXTEEN_BITS = {"T4": "fp16"}
"""What stands for bf16 on a card that has none."""
SMALLER = 0.97
PLANS = {
    "gpt2": (
        {"micro_batch": 16},
        {"micro_batch": 8, "precision": "fp32"},
        {"micro_batch": 32, "checkpointing": "full"},
        {"micro_batch": 16, "kernels": "chunked_ce"},
    ),
    "qwen2.5-0.5b": (
        {"micro_batch": 4},
        {"micro_batch": 4, "precision": "fp32"},
        {"micro_batch": 8, "checkpointing": "full", "optimizer": "adamw_8bit"},
        {"micro_batch": 4, "accumulation": 2, "checkpointing": "selective"},
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
            sixteen = SIXTEEN_BITS.get(card, PLAIN["precision"])
            yield f"{card} {model} {words}", card, model, PLAIN.replaced(**{"precision": sixteen, **changes})


def estimated(card, model, plan, folder):
    """``device_bytes`` of a plan; a reason, in words, where it is not offered."""
    config = folder / f"{model}.json"
    config.write_text(json.dumps(MODELS[model]))
    batch = int(plan["micro_batch"]) * int(plan["accumulation"])
    try:
        found = estimate(
            str(config), gpu=card, seq_len=SEQ_LEN, global_batch=batch, allow="exact,numeric,method", fix=dict(plan)
        )
    except AutofitError as error:
        return str(error)
    return found.plans[0].device_bytes if found.plans else "no plan"


def trained(card, memory_bytes, model, plan, folder):
    """Whether three optimizer steps end on a card of that size; in a process of its own."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.environ["HOLLOW_CARD"] = describe(card, memory_bytes)
        os.environ["HOLLOW_CONTEXT_MIB"] = str(context_bytes(find(card).capability) // MIB)
        try:
            answer.write_text(json.dumps(train(model, dict(plan), folder)))
        except BaseException as error:  # noqa: BLE001 - the top of the process
            traceback.print_exc()
            answer.write_text(json.dumps({"crash": f"{type(error).__name__}: {error}"[:600]}))
        finally:
            sys.stderr.flush()
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return json.loads(answer.read_text()) if answer.exists() else {"crash": f"ended with status {status}"}


def train(model, plan, folder):
    """The child's side: on the card that is here."""
    from dataclasses import asdict

    from autofit.training.tasks.choose import describe_model
    from tests.gpu.fits import Child, config_folder

    described = describe_model(model, config_folder(folder, model), trust_remote_code=False)
    case = Case(model=model, seq_len=SEQ_LEN, plan=plan, allocator="default")
    values = described if isinstance(described, dict) else asdict(described)
    found = Child(case, values, folder).run(None)
    kept = ("fits", "crash", "phase", "step", "retries", "allocated_bytes", "reserved_bytes", "outside_bytes")
    return {name: found[name] for name in kept if found.get(name) is not None}


def row_of(name, card, model, plan, folder):
    """What was said of a plan, and what became of it."""
    row = {"name": name, "device_bytes": estimated(card, model, plan, folder)}
    if isinstance(row["device_bytes"], int):
        for share in (1.0, SMALLER):
            row[f"at {share}"] = trained(card, round(row["device_bytes"] * share), model, plan, folder)
    return row


def main():
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are kept there, and those in it are not run")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="only every N-th case, from the K-th on")
    options = parser.parse_args()
    first, every = map(int, options.share.split("/"))
    preload(PLANS)
    held = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    rows = {row["name"]: row for row in held}
    with tempfile.TemporaryDirectory(prefix="autofit-smallest-") as folder:
        for name, card, model, plan in itertools.islice(cases(), first - 1, None, every):
            if options.only not in name or name in rows:
                continue
            rows[name] = row_of(name, card, model, plan, Path(folder))
            print(json.dumps(rows[name]), flush=True)
            if options.json:
                options.json.write_text(document(list(rows.values())))
    print(json.dumps(summary(list(rows.values()))))


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
