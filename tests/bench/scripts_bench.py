"""Tunes public and common training scripts, unmodified, on the CPU, and prints what came of each.

``python tests/bench/scripts_bench.py [--only NAME...] [--json FILE] [--accelerate FOLDER] [--transformers FOLDER]``.
The scripts are TRL's, as installed (``trl/scripts``), those in ``tests/data/scripts``, and the examples of accelerate
and of transformers where a checkout is given (``public_scripts.py`` has what these need). Models and data are tiny and
made here; nothing is fetched. A row's speed-up is against the script's own values (its micro-batch, accumulation,
precision and checkpointing), measured under the same ceiling.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from autofit.output.document import read_document
from tests.bench import public_scripts
from tests.support.scripted import SCRIPTS, autofit, glue, preference_data, tiny_bert, tiny_llama

FAMILIES = (
    "token", "masked", "causal", "question", "choice", "seq2seq", "image", "convolution", "segmentation", "speech",
    "audio", "contrastive", "image_text",
)  # fmt: skip
CPU = ("--output_dir", "trained", "--use_cpu", "--bf16", "False", "--report_to", "none")


def rows(accelerate, transformers=None):
    """Name, script and arguments of each row."""
    yield "classify", SCRIPTS / "classify.py", ("--model", "bert")
    for name in FAMILIES:
        yield f"families {name}", SCRIPTS / "families.py", ("--family", name)
    yield "families causal lora", SCRIPTS / "families.py", ("--family", "causal", "--lora")
    yield "loop accumulate", SCRIPTS / "loop.py", ("--model", "bert")
    yield "loop by hand", SCRIPTS / "loop.py", ("--model", "bert", "--by-hand")
    found = find_spec("trl")
    if found is not None and found.origin is not None:
        trl = Path(found.origin).parent / "scripts"
        small = ("--per_device_train_batch_size", "4", "--max_length", "64", *CPU)
        yield "trl sft", trl / "sft.py", ("--model_name_or_path", "llama", "--dataset_name", "texts", *small)
        lora = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")
        yield (
            "trl sft lora",
            trl / "sft.py",
            ("--model_name_or_path", "llama", "--dataset_name", "texts", *small, *lora),
        )
        yield "trl dpo", trl / "dpo.py", ("--model_name_or_path", "llama", "--dataset_name", "pairs", *small)
        yield "trl reward", trl / "reward.py", ("--model_name_or_path", "reward", "--dataset_name", "pairs", *small)
        yield "trl kto", trl / "kto.py", ("--model_name_or_path", "llama", "--dataset_name", "judged", *small)
    if accelerate is not None:
        examples = accelerate / "examples"
        yield "accelerate nlp_example", examples / "nlp_example.py", ("--cpu",)
        steps = ("--cpu", "--gradient_accumulation_steps", "2")
        yield "accelerate gradient_accumulation", examples / "by_feature" / "gradient_accumulation.py", steps
    if transformers is not None:
        yield from public_scripts.scripts(transformers)


def own_values(script):
    """The plan that the script trains with by itself, as knobs."""
    precision = "bf16" if script.own.get("bf16") else "fp16" if script.own.get("fp16") else "fp32"
    values = {
        "micro_batch": script.micro_batch,
        "accumulation": script.accumulation,
        "checkpointing": "full" if script.own.get("activation_checkpointing") else "off",
        "attention": "default",
    }
    if script.weights_dtype == "float32":
        values["precision"] = precision
    if not script.own_optimizer:
        values["optimizer"] = "adamw"
    return [f"--fix={name}={value}" for name, value in values.items()]


def measured(folder, name, script, arguments, trials):
    """One row of the table."""
    place = name.replace(" ", "-")
    words = ("--device", "cpu", "--memory-limit", "2GiB")
    began = time.monotonic()
    done = autofit(
        folder, "tune", script, "--output", place, "--trials", trials, *words, "--", *arguments, seconds=1500
    )
    row = {"script": name, "exit": done.returncode, "tune_seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("error", "Nothing", "hint"))]
        return {**row, "reason": " ".join(errors)[:300] or done.stderr.strip().splitlines()[-1][:300]}
    found = read_document(folder / place)
    knobs = own_values(found.workload.script)
    own = autofit(
        folder,
        "tune",
        script,
        "--output",
        f"{place}-own",
        "--trials",
        1,
        *words,
        *knobs,
        "--",
        *arguments,
        seconds=1500,
    )
    row |= {
        "before_seconds": round(found.workload.script.seconds, 2),
        "tuned": " ".join(
            f"{key}={value}" for key, value in found.plan.items() if value not in {"none", "off", "default"}
        ),
        "held": [note.split(":")[0] for note in found.notes if "is left alone" in note],
        "samples_per_second": round(found.promise.samples_per_second, 1),
    }
    if own.returncode == 0:
        row["speed_up"] = round(
            found.promise.samples_per_second / read_document(folder / f"{place}-own").promise.samples_per_second, 2
        )
    else:
        row["own_failed"] = own.stderr.strip().splitlines()[-1][:300]
    ran = autofit(folder, "run", place, script, "--", *arguments, seconds=1500)
    verified = autofit(folder, "verify", place, "--json", seconds=1500)
    row |= {"run": ran.returncode, "ignored": ran.stderr.count("took no effect"), "verify": verified.returncode}
    if ran.returncode:
        row["run_said"] = [line for line in ran.stderr.splitlines() if "Error" in line][-2:]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--accelerate", type=Path, help="A checkout of accelerate, for its examples.")
    parser.add_argument("--transformers", type=Path, help="A checkout of transformers, for its examples.")
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny_bert(folder / "bert")
        tiny_llama(folder)
        preference_data(folder)
        if options.accelerate:
            glue(folder)
        if options.transformers:
            public = folder / "public"
            public.mkdir()
            public_scripts.models(public)
            public_scripts.data(public)
            os.environ |= {"HF_HOME": str(public / "hub"), "NLTK_DATA": str(public / "nltk")}
        for name, script, arguments in rows(options.accelerate, options.transformers):
            if options.only and not any(part in name for part in options.only):
                continue
            place = folder / "public" if name.startswith("transformers") else folder
            table.append(measured(place, name, script, arguments, options.trials))
            print(json.dumps(table[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
