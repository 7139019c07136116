"""Times every operator of real training steps on the card that is here, each by itself and the whole step beside them.

    python tests/bench/record_operators.py --output DIR [--seconds 120] [--kernels 40] [--only TEXT]

A program is a model of ``tests/gpu/fits.py``, a precision, an optimizer and a size. Its step
runs as it is, with the clock around it; then under a dispatch mode that puts two CUDA events around each operator,
behind a kernel that only waits, so that the host is ahead and the events hold the operator alone. What an operator is
(kind, shape, arithmetic, bytes) is written down by the code that writes it down in a trace.

DIR/operators.csv has a line for each distinct operator of a program: the bytes that it made and those that it held at
its peak, how often it was called, the median and the smallest seconds; ``own_operators.py`` reads it. DIR/steps.csv has
a line for each program: the median of the whole step, the sum of its operators. Both are appended to; programs that
they hold are not run again. ``--kernels N`` times those of ``lone_kernels.py`` before, for so many seconds.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.costmodel.seconds.operator_time import COLUMNS  # noqa: E402 - the checkout is found first
from autofit.costmodel.tracing.operator_table import operator_of  # noqa: E402
from autofit.costmodel.tracing.work import work_of  # noqa: E402
from tests.bench.lone_kernels import kernels  # noqa: E402
from tests.gpu.fits import MODELS  # noqa: E402

WAIT_CYCLES = 300_000
"""About 150 µs of an H100: longer than the host takes to issue an operator."""
_MADE_UP = ("rand", "normal", "uniform")
"""Operators that make the rows and weights."""
WHOLE_STEPS, TIMED_STEPS = 6, 2

# model, tokens in a row, rows, precision, optimizer, attention, compiled parts; those that tell most come first
PROGRAMS = """
llama-3.2-1b   2048   4  bf16          adamw       sdpa   off
llama-3.2-1b   2048   4  bf16          adamw       sdpa   regions
qwen2.5-0.5b   1024   8  bf16_weights  adamw_8bit  sdpa   off
llama-3-8b     2048   1  nf4_lora      adamw       sdpa   off
qwen3-moe      1024   4  bf16          adamw       sdpa   off
llama-3-8b     2048   2  bf16_weights  sgd         sdpa   off
gpt2           1024  16  bf16          adamw       sdpa   regions
qwen2.5-0.5b    512  32  bf16          forloop     sdpa   off
llama-3.2-1b   8192   1  bf16_weights  sgd         sdpa   off
qwen3-1.7b     4096   1  bf16_weights  adamw       sdpa   off
llama-3.2-1b    512  16  bf16_weights  adamw       sdpa   off
pythia-410m    2048   4  bf16          adamw       sdpa   regions
qwen2.5-0.5b   4096   2  bf16          adamw       sdpa   off
gpt2           1024  16  bf16          adamw       sdpa   off
gpt2           1024   8  fp32          adamw       sdpa   off
gemma-2-2b     1024   2  bf16_weights  adafactor   eager  off
pythia-410m    2048   4  bf16          foreach     sdpa   off
pythia-410m    1024   8  tf32          adamw       sdpa   off
gpt2            512   1  bf16          adamw       sdpa   off
pythia-410m    1024   4  fp16          adamw       sdpa   off
gpt2           1024   4  bf16          adamw       eager  off
"""


@dataclass(frozen=True, slots=True)
class Program:
    """One training."""

    model: str
    seq_len: int
    rows: int
    precision: str
    optimizer: str
    attention: str
    compiled: str

    @property
    def name(self) -> str:
        return "/".join(map(str, astuple(self)))


def programs() -> list[Program]:
    """All of them, in their order."""
    found = []
    for line in PROGRAMS.strip().splitlines():
        model, seq_len, rows, *words = line.split()
        found.append(Program(model, int(seq_len), int(rows), *words))
    return found


class OperatorTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator alone while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[tuple[Any, ...], torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.reset_peak_memory_stats()
        before = allocated()["current"]
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        result = func(*args, **kwargs)
        end.record()
        after = allocated()
        outputs = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        one, _ = operator_of(func, args, kwargs, outputs, work_of(func, args, kwargs, result, outputs)[1])
        name = func._schema.name.rpartition("::")[2]
        if one.kind != "nothing" and not is_view(func) and not name.startswith(_MADE_UP):
            if one.kind == "product" and one.arithmetic == "fp32" and torch.backends.cuda.matmul.allow_tf32:
                one = replace(one, arithmetic="tf32")
            taken = after["current"] - before, after["peak"] - before
            self.calls.append(((name, *(getattr(one, column) for column in COLUMNS), *taken), begin, end))
        return result

    def seconds(self) -> dict[tuple[Any, ...], list[float]]:
        """Of every call, by what the operator is."""
        torch.cuda.synchronize()
        found = defaultdict(list)
        for key, begin, end in self.calls:
            found[key].append(begin.elapsed_time(end) / 1e3)
        return found


def allocated() -> dict[str, int]:
    """Bytes that the allocator has given out, now and at most since they were last reset."""
    found: dict[str, int] = torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return found


def is_view(func: Any) -> bool:
    """Whether an operator launches nothing and only looks at its input otherwise."""
    if func._schema.name in {"aten::_unsafe_view", "aten::_reshape_alias"}:
        return True
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.arguments)
    return views and not func._schema.is_mutable


# -- the training -------------------------------------------------------------------------------------------------


def training_of(program: Program) -> Any:
    """A function that makes one optimizer step."""
    import transformers

    values = dict(MODELS[program.model])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = program.attention
    config.use_cache = False
    halves = program.precision in {"bf16_weights", "nf4_lora"}
    torch.backends.cuda.matmul.allow_tf32 = program.precision == "tf32"
    torch.set_default_dtype(torch.bfloat16 if halves else torch.float32)
    try:
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    if program.precision == "nf4_lora":
        model = with_adapters(in_four_bits(model))
    if program.compiled == "regions":
        for layer in next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList)):
            layer.compile()
    optimizer = optimizer_of(program.optimizer, [one for one in model.parameters() if one.requires_grad])
    ids = torch.randint(0, config.vocab_size, (program.rows, program.seq_len), device="cuda")
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16, "nf4_lora": torch.bfloat16}.get(program.precision)

    def step() -> None:
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_four_bits(model: Any) -> Any:
    """The linear layers of the blocks in nf4, as bitsandbytes keeps them."""
    import bitsandbytes as bnb

    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                new = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4", device="meta",
                )  # fmt: skip
                new.weight = bnb.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                )
                setattr(module, name, new.to("cuda"))
    return model


def with_adapters(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def optimizer_of(name: str, weights: list[Any]) -> Any:
    """One of the techniques' optimizers."""
    if name == "adamw_8bit":
        import bitsandbytes as bnb

        return bnb.optim.AdamW8bit(weights, lr=1e-5)
    if name == "adafactor":
        import transformers

        return transformers.Adafactor(weights, lr=1e-5, scale_parameter=False, relative_step=False)
    if name == "sgd":
        return torch.optim.SGD(weights, lr=1e-5)
    return torch.optim.AdamW(weights, lr=1e-5, fused=name == "adamw", foreach=name == "foreach")


def run(program: Program, folder: Path) -> None:
    """Time a program and write down what was found."""
    step = training_of(program)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    whole, issued = [], []
    for _ in range(WHOLE_STEPS):
        began = time.perf_counter()
        step()
        issued.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    peak_bytes = torch.cuda.max_memory_allocated()  # before each operator's own is asked
    each = timed(step, TIMED_STEPS) if program.compiled == "off" else {}
    lines = lines_of(program.name, each, TIMED_STEPS)
    append(folder / "operators.csv", lines)
    total = sum(sum(seconds) for seconds in each.values()) / TIMED_STEPS
    append(folder / "steps.csv", [{
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() or 0, "program": program.name,
        "step_seconds": f"{statistics.median(whole):.5g}", "issued_seconds": f"{statistics.median(issued):.5g}",
        "operator_seconds": f"{total:.5g}", "operators": sum(line["calls"] for line in lines),
        "steps": json.dumps([round(one, 5) for one in whole]),
        "peak_bytes": peak_bytes,
    }])  # fmt: skip
    print(f"{program.name}: step {statistics.median(whole):.4f} s, issued {statistics.median(issued):.4f}, "
          f"operators {total:.4f}", flush=True)  # fmt: skip


def timed(function: Any, times: int) -> dict[tuple[Any, ...], list[float]]:
    """Seconds of every call, by what the operator is."""
    each: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for _ in range(times):
        with OperatorTimes() as mode:
            function()
        for key, seconds in mode.seconds().items():
            each[key] += seconds
    return each


def _number(value: Any) -> Any:
    """Whole numbers without a point, words as they are."""
    return int(value) if isinstance(value, (bool, float)) and value == int(value) else value


def lines_of(name: str, each: dict[tuple[Any, ...], list[float]], times: int) -> list[dict[str, Any]]:
    """The lines of a table."""
    return [
        {
            "program": name, "op": key[0],
            **{column: _number(value) for column, value in zip((*COLUMNS, "made", "peak"), key[1:], strict=True)},
            "calls": len(seconds) / times, "seconds": f"{statistics.median(seconds):.4g}",
            "least": f"{min(seconds):.4g}",
        }
        for key, seconds in each.items()
    ]  # fmt: skip


# -- kernels by themselves ----------------------------------------------------------------------------------------


def run_kernels(folder: Path, seconds: float) -> None:
    """Time them, a group's functions spread over its sizes, and an empty pair of events beside."""
    began = time.monotonic()
    pairs = []
    for _ in range(200):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    print("an empty pair of events:", statistics.median(one.elapsed_time(two) for one, two in pairs) / 1e3, flush=True)
    for name, functions in kernels().items():
        each: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for number, function in enumerate(functions):
            if time.monotonic() - began > seconds:
                print(f"{name}: the time is spent after {number} of {len(functions)}", flush=True)
                break
            try:
                for key, its in timed(function, 2).items():
                    each[key] += its[len(its) // 2 :]  # the first calls load their kernels
            except Exception as error:  # noqa: BLE001 - the others are still to be timed
                print(f"{name} {number}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            torch.cuda.empty_cache()
        lines = lines_of(f"kernels {name}", each, 1)
        append(folder / "operators.csv", lines)
        print(f"{name}: {len(lines)} operators, {time.monotonic() - began:.0f} s", flush=True)


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    """Add lines to a table."""
    if not lines:
        return
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0])
        if new:
            writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    """Time them all, or those that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    parser.add_argument("--kernels", type=float, default=0.0, help="seconds for kernels by themselves, before")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.kernels:
        run_kernels(options.output, options.kernels)
    known = options.output / "steps.csv"
    done = {line["program"] for line in csv.DictReader(known.open())} if known.exists() else set()
    for program in programs():
        if time.monotonic() - began > options.seconds:
            print("the time is spent", flush=True)
            break
        if options.only not in program.name or program.name in done:
            continue
        try:
            run(program, options.output)
        except Exception as error:  # noqa: BLE001 - the others are still to be timed
            print(f"{program.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
