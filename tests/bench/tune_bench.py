"""autofit against the batch finders, on the CPU: five architectures, a ceiling that the naive plan breaks.

    python tests/bench/tune_bench.py [--only llama,qwen2] [--share 0.6] [--json FILE]

For each tiny model: the naive plan (fp32, the whole global batch at once) is measured; the ceiling is 60 % of its peak
(``--share``).
The finders' answer is the largest micro-batch whose fp32 plan fits, all else plain: what shrinking until it fits gives.
autofit tunes under the same ceiling. Then both plans are measured whole and interleaved, and the ratio of their medians
is the figure; last, `autofit verify` launches the winner.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from autofit.commands.model_source import modeling_module
from autofit.commands.tune import tune
from autofit.commands.verify import verify
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.contract.technique import divisors
from autofit.output.document import MODEL_FOLDER
from autofit.output.result import Result
from autofit.search.loop import FINAL
from autofit.system import units
from autofit.system.forking.server import ForkServer
from autofit.system.statistics import median, spread
from autofit.training.runner import ProcessRunner

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4, **SIZES},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "max_window_layers": 4, **SIZES},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES},
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 64, **SIZES},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, **SIZES},
}
BATCH = 16
ROUNDS = 3


def plain(rows: int) -> Plan:
    """The plan of a script that only ever shrinks its batch."""
    return Plan(
        {
            "parallel": "none",
            "sync_each_batch": "off",
            "micro_batch": rows,
            "accumulation": BATCH // rows,
            "precision": "fp32",
            "attention": "default",
            "kernels": "none",
            "checkpointing": "off",
            "adapter": "none",
            "quantization": "none",
            "optimizer": "adamw",
            "offload": "none",
            "compile": "off",
            "batching": "pad",
            "loader": "default",
        }
    )


def naive_peak(config: Path, folder: Path) -> int:
    """Peak bytes of the naive plan, from a tune that may try nothing else."""
    fix = [f"{name}={value}" for name, value in plain(BATCH).items()]
    found = tune(str(config), output=folder, device="cpu", global_batch=BATCH, fix=fix, trials=1)
    return found.promise.peak_bytes


def compare(result: Result, folder: Path) -> dict[str, object]:
    """The finders' plan and the winner, measured whole and interleaved."""
    folder.mkdir()
    facts = result.document.facts
    config = result.folder / MODEL_FOLDER
    server = ForkServer(folder / "server.log", "cpu", modeling_module(config))
    runner = ProcessRunner(folder / "trials", facts, config, server)
    number = 0

    def measured(plan: Plan) -> Measured | None:
        nonlocal number
        number += 1
        outcome = runner.run(number, plan, FINAL, purpose="final", limit_seconds=600).outcome
        return outcome if isinstance(outcome, Measured) else None

    try:
        finder = next(plan for rows in reversed(divisors(BATCH)) if measured(plan := plain(rows)) is not None)
        times: dict[str, list[float]] = {"finder": [], "winner": []}
        peaks = {"finder": 0, "winner": 0}
        for _ in range(ROUNDS):
            for name, plan in (("finder", finder), ("winner", result.plan)):
                outcome = measured(plan)
                if outcome is not None:
                    times[name].append(outcome.step_seconds)
                    peaks[name] = max(peaks[name], outcome.peak_bytes)
    finally:
        server.close()
    seconds = {name: median(found) for name, found in times.items()}
    return {
        "finder_plan": dict(finder),
        "finder_samples_per_second": BATCH / seconds["finder"],
        "winner_samples_per_second": BATCH / seconds["winner"],
        "ratio": seconds["finder"] / seconds["winner"],
        "noise": sum(spread(found) / median(found) for found in times.values()),
        "finder_peak_bytes": peaks["finder"],
        "winner_peak_bytes": peaks["winner"],
    }


def row(name: str, scratch: Path, share: float) -> dict[str, object]:
    """One architecture."""
    config = scratch / f"{name}.json"
    config.write_text(json.dumps(MODELS[name]))
    peak = naive_peak(config, scratch / f"{name}-naive")
    limit = int(peak * share)
    result = tune(str(config), output=scratch / name, device="cpu", global_batch=BATCH, memory_limit=limit)
    compared = compare(result, scratch / name / "compare")
    checked = verify(scratch / name)
    return {
        "model": name,
        "naive_peak_bytes": peak,
        "limit_bytes": limit,
        "plan": dict(result.plan),
        "promise_peak_bytes": result.promise.peak_bytes,
        "trials": len(result.document.trials),
        "out_of_memory": sum(trial.outcome.kind == "out_of_memory" for trial in result.document.trials),
        "seconds": result.document.seconds,
        "training_share": result.document.training_share,
        "median_trial_seconds": result.document.median_trial_seconds,
        **compared,
        "verified": not checked.broken,
        "verify_speed_ratio": checked.speed_ratio,
        "broken": list(checked.broken),
    }


def line(one: dict[str, object]) -> str:
    """A row for people."""
    return (
        f"{one['model']:9} ceiling {units.size(one['limit_bytes'])}: "
        f"winner {one['winner_samples_per_second']:.1f} samples/s at {units.size(one['promise_peak_bytes'])}, "
        f"finder {one['finder_samples_per_second']:.1f}, ratio {one['ratio']:.2f} (noise {one['noise']:.2f}); "
        f"{one['trials']} trials, {one['out_of_memory']} out of memory, {one['seconds']:.0f} s; "
        f"verified {one['verified']}"
    )


def main() -> None:
    """Print a line a model, and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--share", type=float, default=0.6, help="of the naive plan's peak: the ceiling")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="autofit-bench-") as scratch:
        for name in options.only.split(","):
            one = row(name, Path(scratch), options.share)
            rows.append(one)
            print(line(one), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"processors": os.cpu_count(), "rows": rows}, indent=1))
    sys.exit(0 if all(one["verified"] for one in rows) else 4)


if __name__ == "__main__":
    main()
