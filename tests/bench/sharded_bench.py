"""The traced memory of sharded plans against PyTorch's own CUDA caching allocator on every rank.

    python -m tests.hollow --gpu H100 --gpus 2 -- python tests/bench/sharded_bench.py [--json FILE] [--only TEXT]
    python -m tests.hollow --gpu H100 --gpus 8 -- python tests/bench/sharded_bench.py --models llama --families

Each plan is trained for two optimizer steps by as many ranks as there are cards, which may be emulated ones, and traced
in one process. The table shows the largest ``max_memory_allocated`` and ``max_memory_reserved`` of the ranks. An error
is positive where the trace says more. What can't run is listed with its reason. Rows that FILE holds are not run again.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]

from allocator_bench import ARCHITECTURES, document, refusal, row_of, show, summary, words  # noqa: E402

from autofit.contract.layout import data_parallel  # noqa: E402
from tests.gpu.trials import PLAIN, Bench  # noqa: E402 - the checkout is found first

EACH = (
    {"parallel": "ddp"},
    {"parallel": "ddp", "precision": "fp32", "accumulation": 2},
    {"parallel": "ddp", "adapter": "lora:r=16"},
    {"parallel": "fsdp"},
    {"parallel": "fsdp", "precision": "fp32"},
    {"parallel": "fsdp", "precision": "bf16_weights", "micro_batch": 2},
    {"parallel": "fsdp", "checkpointing": "full"},
    {"parallel": "fsdp", "accumulation": 2},
    {"parallel": "fsdp", "kernels": "chunked_ce", "micro_batch": 2},
    {"parallel": "fsdp:noreshard"},
    {"parallel": "fsdp:noreshard", "accumulation": 2, "micro_batch": 2},
    {"parallel": "fsdp", "offload": "parameters"},
    {"parallel": "fsdp", "adapter": "lora:r=16"},
    {"parallel": "fsdp", "adapter": "lora:r=16", "quantization": "nf4"},
    {"parallel": "fsdp", "optimizer": "sgd", "micro_batch": 1},
)
"""What every architecture is tried with; four cards and more get hybrid sharding, too."""
TENSOR = (
    {},
    {"precision": "fp32"},
    {"precision": "bf16_weights", "micro_batch": 2},
    {"checkpointing": "full"},
    {"accumulation": 2, "micro_batch": 2},
    {"optimizer": "sgd", "micro_batch": 1},
)
"""What tensor parallelism is tried with: over two cards, and over two of four and more."""
CONTEXT = (
    {},
    {"precision": "bf16_weights", "micro_batch": 2},
    {"checkpointing": "full"},
    {"accumulation": 2, "micro_batch": 2},
    {"accumulation": 2, "sync_each_batch": "on"},
    {"kernels": "chunked_ce"},
    {"adapter": "lora:r=16"},
    {"adapter": "lora:r=16", "quantization": "nf4", "checkpointing": "full"},
    {"optimizer": "sgd", "micro_batch": 1},
)
"""What context parallelism is tried with, over as many cards."""
ZERO = (
    {"parallel": "zero1"},
    {"parallel": "zero1", "precision": "fp32", "micro_batch": 2},
    {"parallel": "zero2", "adapter": "lora:r=16"},
    {"parallel": "zero2", "accumulation": 2, "micro_batch": 2},
    {"parallel": "zero3"},
    {"parallel": "zero3", "checkpointing": "full", "micro_batch": 2},
    {"parallel": "zero3", "accumulation": 2, "micro_batch": 2},
)
"""What DeepSpeed is tried with, where it is installed."""
_SECONDS_A_RANK = 75
"""A trial's limit, so that many ranks can share a few cores."""


class Ranks(Bench):
    """One model on all cards of this machine."""

    def __init__(self, folder, config, processes):
        super().__init__(folder, config)
        self.processes = processes

    def trial(self, plan):
        """The outcome of a trial of two optimizer steps."""
        return super().trial(plan, limit_seconds=max(200, _SECONDS_A_RANK * self.processes))

    def facts_for(self, plan):
        """The facts of one card, for as many processes as there are cards."""
        rows = int(plan["micro_batch"]) * int(plan["accumulation"])
        facts = self.facts(rows)
        work = dataclasses.replace(facts.workload, processes=self.processes)
        whole = rows * data_parallel(plan, work)
        return dataclasses.replace(facts, workload=dataclasses.replace(work, global_batch=whole))


def families(processes):
    """One plan or two of each way to train by several processes."""
    half = processes // 2
    return [
        {"parallel": "ddp"},
        {"parallel": "ddp", "precision": "fp32", "accumulation": 2},
        {"parallel": "fsdp"},
        {"parallel": "fsdp", "precision": "bf16_weights", "micro_batch": 2},
        {"parallel": "fsdp", "checkpointing": "full", "accumulation": 2},
        {"parallel": "fsdp:noreshard", "micro_batch": 2},
        {"parallel": f"hsdp:2x{half}"},
        {"parallel": f"hsdp:{half}x2", "accumulation": 2, "micro_batch": 2},
        {"parallel": "fsdp", "offload": "parameters"},
        {"parallel": "fsdp", "adapter": "lora:r=16"},
        {"parallel": "fsdp", "adapter": "lora:r=16", "quantization": "nf4"},
        {"parallel": "fsdp", "optimizer": "sgd", "micro_batch": 1},
        {"parallel": f"tp2xfsdp{half}"},
        {"parallel": f"tp{half}xfsdp2"},
        {"parallel": f"tp{processes}xfsdp1", "micro_batch": 2},
        {"parallel": f"cp2xfsdp{half}"},
        {"parallel": f"cp{processes}xfsdp1"},
        *({"parallel": f"zero{stage}"} for stage in (1, 2, 3)),
    ]


def plans(processes):
    """The changes to the plain plan that are tried on so many cards."""
    halves = [{"parallel": f"hsdp:2x{processes // 2}", **more} for more in ({}, {"accumulation": 2, "micro_batch": 2})]
    split = [{"parallel": f"tp2xfsdp{processes // 2}", **more} for more in TENSOR if processes % 2 == 0]
    parted = [{"parallel": f"cp2xfsdp{processes // 2}", **more} for more in CONTEXT if processes % 2 == 0]
    parted += [{"parallel": f"cp{processes}xfsdp1"}] if processes > 2 else []
    return [*EACH, *(halves if processes >= 4 else []), *split, *parted, *ZERO]


def main():
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are kept there, and those in it are not run")
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=["llama", "gpt2", "qwen3"])
    parser.add_argument("--only", help="only plans whose words hold this text")
    parser.add_argument("--families", action="store_true", help="a plan or two of each way to spread a model")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    processes = torch.cuda.device_count()
    held = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows, withheld = held.get("rows", []), held.get("not_run", {})
    done = {(row["ranks"], row["model"], row["plan"]) for row in rows}
    print(f"{processes} ranks on {torch.cuda.get_device_name()}")
    print(f"{'model':12s} {'plan':58s} {'MiB':>8s} {'error':>8s} {'reserved':>8s} {'error':>8s}  peak of the trace")
    for model in options.models:
        architecture, config = ARCHITECTURES[model]
        with tempfile.TemporaryDirectory(prefix="autofit-sharded-") as folder:
            bench = Ranks(Path(folder), {"model_type": model, "architectures": [architecture], **config}, processes)
            with contextlib.closing(bench):
                for changes in (families if options.families else plans)(processes):
                    name = words(changes)
                    if (options.only and options.only not in name) or (processes, model, name) in done:
                        continue
                    plan = PLAIN.replaced(**changes)
                    reason = refusal(plan, bench.facts_for(plan))
                    if reason:
                        withheld[f"{model} {name}"] = reason
                        continue
                    rows.append({"ranks": processes, **row_of(bench, model, changes)})
                    show(rows[-1])
                    if options.json:
                        options.json.write_text(document(rows, withheld))
    for name, reason in withheld.items():
        print(f"not run here: {name}: {reason}")
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
