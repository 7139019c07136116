"""What the Python of checkpointing takes of the host, in operators: ``strategies/checkpointing/tracing.py``.

    OMP_NUM_THREADS=1 python tests/bench/host_bench.py

Models so small that a step is all host, forward and backward on one CPU core: without checkpointing, with ``full`` and
with ``selective``. What a checkpointed step takes beyond the operators that it recomputes is Python's part. It is told
in units of an operator of the plain step, and shared out by what a trace counts: regions, tensors that autograd would
save, operators that a selective region looks at. A region counts as 14 saved tensors, as in chains of tiny operators
(60 to 90 operators against 4.3 to 4.5, by the slope and the intercept of the chain's length).
"""

import importlib
import itertools
import json
import logging
import statistics
import time
from collections import Counter

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.costmodel.tracing.recorder import Recorder
from autofit.registry import technique

MODELS = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 6, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "qwen3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
ROUNDS = 60
A_REGION_IN_SAVED_TENSORS = 14


class Told(Counter):
    """Stands where a trace's recorder does, and counts what it is told."""

    def busies_host(self, operators):
        """Python keeps the host busy."""
        self[operators] += 1


def build(name, way, strategy):
    """The model under a way of checkpointing."""
    settings = AutoConfig.for_model(name, vocab_size=64, **MODELS[name])
    settings.use_cache = False
    model = AutoModelForCausalLM.from_config(settings).train()
    wraps = {"full": strategy.switch_on, "selective": lambda one: strategy.keep_products(one, strategy.KeptOutputs())}
    return wraps[way](model) if way in wraps else model


def step(model, rows):
    """Forward and backward."""
    model(input_ids=rows, labels=rows).loss.backward()


def measure(name, strategy):
    """Python's part in one model."""
    rows = torch.randint(0, 64, (1, 8))
    models = {way: build(name, way, strategy) for way in ("off", "full", "selective")}
    operators, told = {}, {}
    for way, model in models.items():
        with Recorder(fake=False) as recorder:
            recorder.mark("step")
            step(model, rows)
        operators[way] = float(recorder.tape(since=1).work.sum(axis=(0, 1))[2])
        told[way] = Told()
        with strategy.counting(told[way]):
            step(model, rows)
    found = {way: [] for way in models}
    for _, (way, model) in itertools.product(range(ROUNDS), models.items()):  # in turn: all see the same machine
        began = time.perf_counter()
        step(model, rows)
        found[way].append(time.perf_counter() - began)
    seconds = {way: statistics.median(every) for way, every in found.items()}
    unit = seconds["off"] / operators["off"]
    beyond = {way: seconds[way] / unit - operators[way] for way in models}
    regions, saved = told["full"][strategy.tracing._HOST_A_REGION], told["full"][strategy.tracing._HOST_A_SAVED_TENSOR]
    each = beyond["full"] / (saved + A_REGION_IN_SAVED_TENSORS * regions)
    return {
        "microseconds_per_operator": round(1e6 * unit, 1),
        "operators_per_region": round(A_REGION_IN_SAVED_TENSORS * each, 1),
        "operators_per_saved_tensor": round(each, 2),
        "operators_per_seen_operator": round(
            (beyond["selective"] - beyond["full"]) / told["selective"][strategy.tracing._HOST_A_SEEN_OPERATOR], 2
        ),
    }


def main():
    """Print the figures as one JSON object."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    assert technique("checkpointing")
    strategy = importlib.import_module("autofit.strategies.checkpointing")
    print(json.dumps({name: measure(name, strategy) for name in MODELS}, indent=1))


if __name__ == "__main__":
    main()
