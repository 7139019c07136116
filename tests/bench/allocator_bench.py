"""The traced memory of a plan against PyTorch's own CUDA caching allocator, over architectures and techniques.

    python -m tests.hollow --gpu H100 -- python tests/bench/allocator_bench.py [--tasks|--scripts] [--json FILE]

Each plan is trained for two optimizer steps on the card that is there, which may be an emulated one, and traced. The
table shows ``max_memory_allocated`` and ``max_memory_reserved`` of both. An error is positive where the trace says
more. Every architecture gets the same dozen plans; every other value of every technique that this machine offers is
tried on Llama. ``--tasks`` takes models of every family of tasks instead (``task_models.py``), ``--scripts`` training
scripts (``task_scripts.py``). What can't run is listed with its reason. Rows that FILE holds already are not run again.
"""

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from autofit import space  # noqa: E402 - the checkout is found first
from autofit.contract.outcome import Measured, Unsupported  # noqa: E402
from autofit.machine.packages import installed  # noqa: E402
from autofit.registry import techniques  # noqa: E402
from autofit.system.units import MIB  # noqa: E402
from tests.bench.task_models import EACH_TASK, TASK_MODELS  # noqa: E402
from tests.bench.task_scripts import EACH_SCRIPT, SCRIPT_NAMES, script_of  # noqa: E402
from tests.gpu.trials import PLAIN, Bench, ScriptBench  # noqa: E402

_BODY = {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 32000, "max_position_embeddings": 1024}
_GROUPED = {**_BODY, "intermediate_size": 2048, "num_hidden_layers": 8, "num_key_value_heads": 4}
_SMALL = {**_GROUPED, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 6}
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 128, "num_attention_heads": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 768, "n_layer": 8, "n_head": 12, "n_positions": 1024, "vocab_size": 32000}),
    "gemma2": ("Gemma2ForCausalLM", {**_SMALL, "num_hidden_layers": 8, "sliding_window": 256}),
    "mixtral": ("MixtralForCausalLM", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 512, "num_hidden_layers": 6, "state_size": 16, "vocab_size": 32000}),
    "phi": ("PhiForCausalLM", {**_BODY, "intermediate_size": 3072, "num_hidden_layers": 8}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_GROUPED,
            "num_key_value_heads": 12,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 512,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}
EACH = (
    {},
    {"precision": "fp32"},
    {"precision": "tf32", "micro_batch": 2, "accumulation": 2},
    {"precision": "bf16_weights", "checkpointing": "full"},
    {"precision": "fp16", "checkpointing": "full", "accumulation": 2},
    {"kernels": "chunked_ce"},
    {"attention": "eager", "micro_batch": 4},
    {"checkpointing": "selective"},
    {"offload": "activations"},
    {"micro_batch": 1, "optimizer": "adamw_8bit"},
    {"adapter": "lora:r=16", "quantization": "nf4"},
    {"micro_batch": 1, "optimizer": "adafactor"},
)
"""What every architecture is tried with."""
_EVALUATION = "evaluation"


def bench_of(model, folder):
    """The bench of an architecture, of a task's model, or of a script, by its name."""
    if model in SCRIPT_NAMES:
        return ScriptBench(folder, *script_of(model, folder))
    if model in TASK_MODELS:
        seq_len, config = TASK_MODELS[model]
        return Bench(folder, config, seq_len=seq_len)
    architecture, config = ARCHITECTURES[model]
    return Bench(folder, {"model_type": model, "architectures": [architecture], **config})


def plan_of(changes):
    """The plan, and the rows that it evaluates at once; 0: as many as usual."""
    return PLAIN.replaced(**{name: value for name, value in changes.items() if name != _EVALUATION}), changes.get(
        _EVALUATION, 0
    )


def changes_of_each_value(facts):
    """One plan for every value that this machine offers, and what it withholds with the reason."""
    wanted, withheld = [], []
    for name, choice in space.offers(facts):
        if name in {"micro_batch", "accumulation"} or choice.value == PLAIN[name]:
            continue
        if choice.status == "withheld":
            withheld.append((f"{name}={choice.value}", choice.reason))
            continue
        if name == "compile":  # traced as the plan that is not compiled, and said so
            withheld.append((f"{name}={choice.value}", "its trace is that of the plan without compilation"))
            continue
        changes = {name: choice.value}
        if name == "optimizer":
            changes |= {"micro_batch": 1}
        if name == "quantization":
            changes |= {"adapter": "lora:r=16"}
        if "stochastic" in str(choice.value):
            changes |= {"precision": "bf16_weights"}
        wanted.append(changes)
    return wanted, withheld


def plans_of(model, bench):
    """The changes to the plain plan that a model is tried with; combinations that a technique refuses are left out."""
    wanted, withheld = list(EACH_SCRIPT if model in SCRIPT_NAMES else EACH_TASK if model in TASK_MODELS else EACH), []
    if model == "llama":
        more, withheld = changes_of_each_value(bench.facts_for(PLAIN))
        wanted += [changes for changes in more if changes not in wanted]
    possible = []
    for changes in wanted:
        plan, _ = plan_of(changes)
        reason = refusal(plan, bench.facts_for(plan))
        if reason:
            withheld.append((words(changes), reason))
        else:
            possible.append(changes)
    return possible, withheld


def refusal(plan, facts):
    """Why a technique refuses the plan, if one does."""
    for one in techniques():
        choice = one.choice(plan[one.name], facts)
        reason = choice.reason if choice.status == "withheld" else one.conflict(plan[one.name], plan, facts)
        if reason:
            return reason
    return None


def words(changes):
    """A plan by what it changes."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "plain"


def row_of(bench, model, changes):
    """One row: both allocators, or why there is no such row."""
    plan, bench.evaluated = plan_of(changes)
    row = {"model": model, "plan": words(changes), "changes": changes}
    outcome = bench.trial(plan)
    if not isinstance(outcome, Measured):
        kind = "unsupported" if isinstance(outcome, Unsupported) else type(outcome).__name__
        return {**row, "failed": f"{kind}: {getattr(outcome, 'reason', getattr(outcome, 'phase', ''))}"[-600:]}
    found = bench.compare(plan, outcome)
    if isinstance(found, str):
        return {**row, "failed": f"no trace: {found}"}
    errors = {"allocated_error": found.allocated_error, "reserved_error": found.reserved_error}
    return {**row, **asdict(found), **{name: round(value, 5) for name, value in errors.items()}}


def show(row):
    """One line of the table."""
    name = f"{row['model']:19s} {row['plan']:58s}"
    if "failed" in row:
        print(f"{name} {row['failed'].splitlines()[0][:150]}", flush=True)
        return
    allocated, reserved = row["allocated"] / MIB, row["reserved"] / MIB
    at = " ".join(row["at"][1:])
    print(
        f"{name} {allocated:8.0f} {row['allocated_error']:+8.2%} {reserved:8.0f} {row['reserved_error']:+8.2%}  {at}",
        flush=True,
    )


def summary(rows):
    """Median, worst and lowest error of both counters."""
    done = [row for row in rows if "failed" not in row]
    found = {"plans": len(done), "failed": len(rows) - len(done)}
    for name in ("allocated", "reserved"):
        errors = [row[f"{name}_error"] for row in done]
        if errors:
            sizes = [abs(one) for one in errors]
            found[name] = {
                "median_absolute_error": round(statistics.median(sizes), 5),
                "worst_absolute_error": max(sizes),
                "lowest_error": min(errors),
                "more_than_1_percent_below": sum(one < -0.01 for one in errors),
            }
    return found


def main():
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are kept there, and those in it are not run")
    parser.add_argument("--plans", type=int, metavar="N", help="no more than the first N of each model")
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--tasks", action="store_true", help="models of every family of tasks")
    table.add_argument("--scripts", action="store_true", help="training scripts")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="those that are named")
    parser.add_argument("--only", help="only plans whose words hold this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    held = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows, withheld = held.get("rows", []), held.get("not_run", {})
    done = {(row["model"], row["plan"]) for row in rows}
    print(f"{'model':19s} {'plan':58s} {'MiB':>8s} {'error':>8s} {'reserved':>8s} {'error':>8s}  peak of the trace")
    for model in options.models or (
        SCRIPT_NAMES if options.scripts else TASK_MODELS if options.tasks else ARCHITECTURES
    ):
        with tempfile.TemporaryDirectory(prefix="autofit-allocator-") as folder:
            bench = bench_of(model, Path(folder))
            with contextlib.closing(bench):
                possible, reasons = plans_of(model, bench)
                withheld |= {f"{model} {name}": reason for name, reason in reasons}
                wanted = [changes for changes in possible if not options.only or options.only in words(changes)]
                for changes in wanted[: options.plans]:
                    if (model, words(changes)) in done:
                        continue
                    rows.append(row_of(bench, model, changes))
                    show(rows[-1])
                    if options.json:
                        options.json.write_text(document(rows, withheld))
    print("\nnot run here:")
    for name, reason in withheld.items():
        print(f"  {name}: {reason}")
    print(json.dumps(summary(rows)))


def document(rows, withheld):
    """All that was found, as JSON."""
    said = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "emulated": "HOLLOW_CARD" in os.environ,
        "versions": dict(installed()),
        "summary": summary(rows),
        "not_run": withheld,
        "rows": rows,
    }
    return json.dumps(said, indent=1) + "\n"


if __name__ == "__main__":
    main()
