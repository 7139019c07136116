"""Times every operator of real training steps on the card that is here, each by itself and the whole step beside them.

    python tests/bench/record_operators.py --output DIR [--seconds 120] [--only TEXT]

A program is a model of ``tests/gpu/fits.py`` or ``allocator_bench.py``, a precision, an optimizer and a size. Its step
runs as it is, with the clock around it; then under a dispatch mode that puts two CUDA events around each operator,
behind a kernel that only waits, so that the host is ahead and the events hold the operator alone. What an operator is
(kind, shape, arithmetic, bytes) is written down by the code that writes it down in a trace.

DIR/operators.csv has a line for each distinct operator of a program: the bytes that it made and those that it held at
its peak, how often it was called, the median and the smallest seconds. DIR/steps.csv has a line for each program: the median of the whole step, the sum of its operators.
Both are appended to; programs that they hold are not run again.
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
from dataclasses import astuple, dataclass
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
from tests.gpu.fits import MODELS  # noqa: E402

WAIT_CYCLES = 300_000
"""About 150 µs of an H100: longer than the host takes to issue an operator."""
WHOLE_STEPS, TIMED_STEPS = 6, 2
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12,
         "state_size": 16, "vocab_size": 50280}  # fmt: skip

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
        if one.kind != "nothing" and not is_view(func):
            name = func._schema.name.rpartition("::")[2]
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
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.arguments)
    return func._schema.name in {"aten::_unsafe_view", "aten::_reshape_alias"} or (views and not func._schema.is_mutable)


# -- the training -------------------------------------------------------------------------------------------------


def training_of(program: Program) -> Any:
    """A function that makes one optimizer step."""
    import transformers

    values = dict(MODELS.get(program.model, MAMBA))
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
    each = timed([step], TIMED_STEPS) if program.compiled == "off" else {}
    lines = lines_of(program.name, each, TIMED_STEPS)
    append(folder / "operators.csv", lines)
    total = sum(sum(seconds) for seconds in each.values()) / TIMED_STEPS
    append(folder / "steps.csv", [{
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() or 0, "program": program.name,
        "step_seconds": f"{statistics.median(whole):.5g}", "issued_seconds": f"{statistics.median(issued):.5g}",
        "operator_seconds": f"{total:.5g}", "operators": sum(line["calls"] for line in lines),
        "steps": json.dumps([round(one, 5) for one in whole]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }])  # fmt: skip
    print(f"{program.name}: step {statistics.median(whole):.4f} s, issued {statistics.median(issued):.4f}, "
          f"operators {total:.4f}", flush=True)  # fmt: skip


def timed(functions: list[Any], times: int) -> dict[tuple[Any, ...], list[float]]:
    """Seconds of every call, by what the operator is."""
    each: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for function in functions:
        for _ in range(times):
            with OperatorTimes() as mode:
                function()
            for key, seconds in mode.seconds().items():
                each[key] += seconds
    return each


def lines_of(name: str, each: dict[tuple[Any, ...], list[float]], times: int) -> list[dict[str, Any]]:
    """The lines of a table."""
    return [
        {
            "program": name, "op": key[0], **dict(zip((*COLUMNS, "made", "peak"), key[1:], strict=True)),
            "calls": len(seconds) / times, "seconds": f"{statistics.median(seconds):.4g}",
            "least": f"{min(seconds):.4g}",
        }
        for key, seconds in each.items()
    ]  # fmt: skip


# -- kernels by themselves ----------------------------------------------------------------------------------------

_SHAPES = (
    (768, 768), (3072, 768), (768, 3072), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (14336, 4096),
    (1000, 1024), (50257, 768), (768, 50257), (50264, 768), (2050, 2050), (2052, 2052), (32000, 2048), (2048, 32000),
    (128256, 2048), (5120, 1024), (16, 4096), (4096, 16),
)  # fmt: skip
_ROWS = (1, 64, 500, 512, 2048, 4096, 8192, 16384)
_MOST_SECONDS = 8e-3


def kernels() -> dict[str, list[Any]]:
    """Functions that call one kernel or a few, by the name of their group."""
    functional, halves = torch.nn.functional, torch.bfloat16
    found: dict[str, list[Any]] = defaultdict(list)

    def tensor(*shape: int, dtype: torch.dtype = halves, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)

    def product(m: int, n: int, k: int, dtype: torch.dtype, layout: str, tf32: bool) -> Any:
        def run() -> None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            left = tensor(k, m, dtype=dtype).t() if layout[0] == "t" else tensor(m, k, dtype=dtype)
            right = tensor(n, k, dtype=dtype).t() if layout[1] == "t" else tensor(k, n, dtype=dtype)
            for _ in range(3):
                left @ right
            torch.backends.cuda.matmul.allow_tf32 = False

        return run

    for name, dtype, rate in (("bf16", halves, 4e14), ("tf32", torch.float32, 2e14), ("fp32", torch.float32, 4e13)):
        for number, (n, k) in enumerate(_SHAPES):
            for m in _ROWS[number % 2 :: 2] if name != "bf16" else _ROWS:
                if 2 * m * n * k / rate < _MOST_SECONDS:
                    layouts = ("nt", "nn", "tn") if name == "bf16" else (("nt", "nn", "tn")[number % 3],)
                    found[f"product {name}"] += [product(m, n, k, dtype, one, name == "tf32") for one in layouts]

    def batched(batch: int, rows: int, width: int) -> Any:
        def run() -> None:
            query, key = tensor(batch, rows, width), tensor(batch, rows, width)
            for _ in range(3):
                torch.bmm(torch.bmm(query, key.transpose(1, 2)), key)

        return run

    def attention(batch: int, heads: int, groups: int, rows: int, width: int, dtype: torch.dtype, backend: Any) -> Any:
        def run() -> None:
            query = tensor(batch, heads, rows, width, dtype=dtype, grad=True)
            key, value = (tensor(batch, groups, rows, width, dtype=dtype, grad=True) for _ in range(2))
            with torch.nn.attention.sdpa_kernel(backend):
                for _ in range(2):
                    out = functional.scaled_dot_product_attention(
                        query, key, value, is_causal=True, enable_gqa=heads != groups
                    )
                    out.sum().backward()

        return run

    backends = torch.nn.attention.SDPBackend
    for batch, heads, rows, width in (
        (1, 16, 512, 64), (8, 12, 1024, 64), (4, 32, 2048, 64), (1, 32, 8192, 64), (32, 16, 512, 64), (2, 16, 2048, 128),
        (1, 32, 4096, 128), (4, 32, 2048, 128), (1, 16, 1024, 128), (1, 8, 2048, 256), (16, 12, 256, 64),
        (2, 64, 4096, 128), (8, 8, 512, 64), (8, 14, 512, 64), (7, 12, 512, 64), (2, 12, 500, 64),
    ):  # fmt: skip
        for backend in (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION):
            found["attention"].append(attention(batch, heads, heads, rows, width, halves, backend))
        found["attention"].append(attention(batch, heads, heads // 4, rows, width, halves, backends.FLASH_ATTENTION))
        if rows < 8192:
            found["attention"].append(
                attention(batch, heads, heads, rows, width, torch.float32, backends.EFFICIENT_ATTENTION)
            )
        if rows <= 2048:
            found["batched"].append(batched(batch * heads, rows, width))

    def rows_of(m: int, n: int, dtype: torch.dtype) -> Any:
        def run() -> None:
            x, weight, bias = tensor(m, n, dtype=dtype, grad=True), tensor(n, dtype=dtype, grad=True), tensor(n)
            for _ in range(2):
                functional.layer_norm(x, (n,), weight, bias.to(dtype)).backward(x.detach())
                functional.rms_norm(x, (n,), weight).backward(x.detach())
                functional.softmax(x, -1).backward(x.detach())
                functional.gelu(x).backward(x.detach())
                functional.silu(x).backward(x.detach())
                with torch.no_grad():
                    (x * x, x + x, x * 2, x.float(), x.to(halves), x.sum(-1), x.sum(0), x.pow(2).mean(-1), x.amax(-1))
                    (torch.cat((x, x), -1), x.t().contiguous(), x.view(-1, 2, n // 2).transpose(0, 1).contiguous())
                    (x[:, : n // 2] * x[:, n // 2 :], x * weight, x * x[:, :1], x.square().sum(), x.clone(), -x)
                    (torch.zeros_like(x), functional.dropout(x, 0.1), x.norm())

        return run

    def table(m: int, n: int, words: int, dtype: torch.dtype) -> Any:
        def run() -> None:
            weight, ids = tensor(words, n, dtype=dtype, grad=True), torch.randint(0, words, (m,), device="cuda")
            logits = tensor(m, words, dtype=torch.float32, grad=True)
            for _ in range(2):
                functional.embedding(ids, weight).sum().backward()
                functional.cross_entropy(logits, ids).backward()

        return run

    def update(count: int, number: int, dtype: torch.dtype, **given: bool) -> Any:
        def run() -> None:
            weights = [tensor(count // number, dtype=dtype).requires_grad_() for _ in range(number)]
            for one in weights:
                one.grad = torch.ones_like(one)
            optimizer = torch.optim.AdamW(weights, lr=1e-5, **given)
            for _ in range(3):
                optimizer.step()

        return run

    for m in (512, 2048, 8192, 32768):
        for n in (768, 2048, 4096, 14336):
            for dtype in (halves, torch.float32):
                if m * n <= 1 << 28:
                    found["rows"].append(rows_of(m, n, dtype))
    for m, n, words in ((2048, 2048, 128256), (8192, 768, 50257), (4096, 4096, 32000), (8192, 896, 151936)):
        found["table"] += [table(m, n, words, dtype) for dtype in (halves, torch.float32)]
    for count in (1 << 20, 1 << 26, 1 << 28):
        for number in (1, 64, 400):
            for dtype in (halves, torch.float32):
                found["optimizer"] += [
                    update(count, number, dtype, **given) for given in ({"fused": True}, {"foreach": True})
                ]
    return found


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
    groups = kernels()
    for name, functions in groups.items():
        each: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for number, function in enumerate(functions):
            if time.monotonic() - began > seconds:
                print(f"{name}: the time is spent after {number} of {len(functions)}", flush=True)
                break
            try:
                for key, its in timed([function], 2).items():
                    each[key] += its[len(its) // 2 :]  # the first calls load their kernels
            except Exception as error:  # noqa: BLE001 - the others are still to be timed
                print(f"{name} {number}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            torch.cuda.empty_cache()
        lines = [line for line in lines_of(f"kernels {name}", each, 1) if not line["op"].startswith("normal")]
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
