"""On how small a card does a plan still run, and what was predicted? Some forty plans, one line of JSON each.

    python tests/gpu/fits.py --predict-only --predictions FILE.jsonl                     no device needed
    python tests/gpu/fits.py --output FILE.jsonl [--predictions FILE.jsonl] [--budget-seconds 540] [--only TEXT]

Every plan gets a process of its own, and in it whole fresh runs (model, optimizer, Trainer, a few optimizer steps)::

    no limit | the prediction | a little below or above it ... | halving what is left, until it is known to 0.5 %

The limit is ``torch.cuda.set_per_process_memory_fraction``. Between two runs everything is dropped, cuBLAS' workspaces
too, and the cache is emptied; where something stays, the next run gets a new process. A run that reserved less than its
limit would have gone the same way on a limit of just that, and no run fits into less than its tensors asked for: both
shorten the search. Fitting is not strictly monotone in the limit (:mod:`autofit.costmodel.memory.allocator`), so the
answer is one edge from failing to running.

What is in ``--output`` already is skipped, and what is new is appended: run it again where time ran out. Plans without
a line in ``--predictions`` are predicted first, by the versions installed here, and are added to that file.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.registry import techniques  # noqa: E402 - the checkout is found first
from autofit.system.units import GIB, MIB  # noqa: E402
from tests.gpu.models import LLAMA_1B, QWEN_05B  # noqa: E402

STEPS = 3  # as many as autofit.costmodel.memory.requests puts together
TOLERANCE = 0.005
MOST_TRIES = 6
LEFT_BYTES = 4 * MIB  # a process that keeps more than this between two runs is thrown away
CAPABILITY = (9, 0)
NAMES = ("micro_batch", "accumulation", "precision", "checkpointing", "optimizer", "offload")

# -- what is asked ------------------------------------------------------------------------------------------------

MODELS = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "pythia-410m": {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "rotary_pct": 0.25,
        "max_position_embeddings": 2048,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {**QWEN_05B, "max_position_embeddings": 32768},
    "llama-3.2-1b": LLAMA_1B,
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {  # of the family's shape, with fewer layers and experts
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "llama-3-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
    },
}

# model, tokens in a row, micro-batch, accumulation, precision, checkpointing, optimizer, offload, allocator; those that
# tell most come first: every model, then every technique, then sizes
_CASES = """
llama-3.2-1b   2048  4 1  bf16          off   adamw             none         default
gpt2           1024  8 1  bf16          off   adamw             none         default
qwen2.5-0.5b   1024  8 1  bf16          full  adamw             none         default
gemma-2-2b     1024  2 1  bf16          off   adamw             none         default
llama-3-8b     2048  2 1  bf16_weights  full  adamw             none         default
pythia-410m    2048  4 2  bf16          off   adamw             none         default
qwen3-moe      1024  4 1  bf16          off   adamw             none         default
qwen3-1.7b     2048  4 2  bf16          full  adamw_8bit        none         default
llama-3.2-1b   2048  4 1  bf16          off   adamw             none         expandable
llama-3.2-1b   2048  4 1  fp32          off   adamw             none         default
qwen2.5-0.5b   2048  4 2  bf16          off   adamw_8bit        none         default
llama-3.2-1b   2048  4 1  bf16          off   adafactor         none         default
gpt2           1024 32 1  fp32          full  adamw             none         default
llama-3.2-1b   2048  8 1  bf16          full  sgd               none         default
qwen2.5-0.5b   1024  8 1  bf16          off   adamw             activations  default
llama-3.2-1b   1024  2 2  bf16          full  adamw             optimizer    default
llama-3.2-1b   2048  4 1  bf16_weights  off   adamw             none         default
qwen3-1.7b     1024  4 1  fp16          off   adamw             none         default
qwen2.5-0.5b   1024  4 1  bf16          off   paged_adamw_8bit  none         default
llama-3-8b     1024  1 1  bf16          full  adamw_8bit        none         default
gemma-2-2b     2048  4 1  bf16          full  adamw_8bit        none         default
qwen3-moe      2048  4 2  bf16          full  adamw             none         default
gpt2            512 64 1  bf16          off   adamw             none         default
pythia-410m    1024  8 1  tf32          off   adamw             none         default
llama-3-8b     4096  1 1  bf16_weights  off   adamw             none         default
qwen2.5-0.5b   4096  2 1  bf16          off   adamw             none         default
llama-3.2-1b   4096  2 2  bf16          full  adamw             none         default
qwen3-1.7b     2048  8 1  bf16          full  adamw             none         default
gemma-2-2b     1024  2 2  bf16_weights  off   adafactor         none         default
gpt2           1024  8 1  bf16          off   adamw             none         expandable
qwen2.5-0.5b   1024  8 1  bf16          full  adamw             none         expandable
gpt2           1024  1 1  fp32          off   adamw             none         default
llama-3.2-1b    512  1 1  bf16          off   adamw             none         default
llama-3.2-1b    512 16 1  bf16          off   adamw             none         default
qwen2.5-0.5b    512 32 1  bf16          full  adamw             none         default
llama-3-8b     2048  4 2  bf16_weights  full  adafactor         none         default
qwen3-moe       512 16 1  bf16_weights  off   adamw             none         default
pythia-410m    2048  2 1  fp16          full  sgd               none         default
qwen3-1.7b     1024  2 1  bf16          off   adamw             activations  default
gemma-2-2b     1024  1 1  fp32          full  adamw             none         default
qwen3-1.7b     4096  1 1  bf16_weights  off   adamw_8bit        none         default
llama-3-8b     2048  2 1  bf16_weights  full  adamw             none         expandable
llama-3.2-1b   2048  1 1  fp32          full  adamw             optimizer    default
qwen3-moe      1024  4 1  bf16          off   adamw             none         expandable
llama-3-8b      512  8 1  bf16_weights  off   adamw_8bit        none         default
qwen2.5-0.5b   2048 16 1  bf16          full  adafactor         none         default
gemma-2-2b      512  8 1  bf16          off   adamw             none         expandable
qwen3-1.7b     2048  2 1  tf32          full  adamw             none         default
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan on one model, and the kind of allocator that it runs with."""

    model: str
    seq_len: int
    plan: dict[str, int | str]
    allocator: str

    @property
    def key(self) -> str:
        """Its name in every file."""
        plan = self.plan
        rest = "/".join(str(plan[name]) for name in NAMES[2:])
        return f"{self.model}/s{self.seq_len}/{plan['micro_batch']}x{plan['accumulation']}/{rest}/{self.allocator}"


def cases():
    """All of them, in the order in which they are run."""
    found = []
    for line in _CASES.split("\n"):
        if line.strip():
            model, seq_len, rows, steps, *words, allocator = line.split()
            given = dict(zip(NAMES, (int(rows), int(steps), *words), strict=True))
            plan = {one.name: given.get(one.name, one.baseline) for one in techniques()}
            found.append(Case(model=model, seq_len=int(seq_len), plan=plan, allocator=allocator))
    return found


def lines(path):
    """The whole lines of a file; a torn last one is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in Path(path).read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def append(path, record):
    """Add a line, on a line of its own even after a torn one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(record) + "\n")
        file.flush()


def versions():
    """What is installed, of what matters here."""
    from autofit.machine.packages import installed

    return dict(installed())


# -- what is predicted --------------------------------------------------------------------------------------------


def predict(wanted, path, scratch, say=print):
    """Trace every case, on any machine, and add a line for each to the file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the processes that trace leave the device alone
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from pydantic import TypeAdapter

    from autofit.contract.facts import Model
    from autofit.contract.plan import Plan
    from autofit.costmodel.tracing.trace_store import Traces
    from autofit.training.tasks.choose import describe_model

    groups = {}
    for case in wanted:
        groups.setdefault((case.model, case.seq_len), []).append(case)
    configs = {model: config_folder(scratch, model) for model, _ in groups}
    described = {}
    with server_for(scratch, configs.values()) as server:
        for (model, seq_len), members in groups.items():
            began = time.monotonic()
            if model not in described:
                values = describe_model(model, configs[model], trust_remote_code=False)
                described[model] = TypeAdapter(Model).validate_python(values)
            facts = facts_for(described[model], seq_len, 1)
            cache = Path(scratch) / "traces"
            traces = Traces(facts, configs[model], lambda: server, Path(scratch), cache)
            traces.prepare([Plan(case.plan) for case in members])
            for case in members:
                one = predicted_of(case, traces, described[model])
                append(path, one)
                say(f"predicted {case.key}: {_gib(one.get('allocated_bytes'))} {one.get('error') or ''}", flush=True)
            say(f"{len(members)} cases in {time.monotonic() - began:.1f} s", flush=True)


@contextlib.contextmanager
def server_for(scratch, configs):
    """A server that forks the processes which trace."""
    from autofit.commands.model_source import modeling_module
    from autofit.system.forking.server import ForkServer

    modules = tuple(dict.fromkeys(module for config in configs for module in modeling_module(config)))
    server = ForkServer(Path(scratch) / "trace-server.log", "cpu", modules)
    try:
        yield server
    finally:
        server.close()


def predicted_of(case, traces, model):
    """What the traces say of one case."""
    from dataclasses import asdict as fields

    from autofit.contract.plan import Plan
    from autofit.costmodel.forecast import context_bytes, workspaces
    from autofit.costmodel.memory import allocator
    from autofit.costmodel.memory.requests import requests
    from autofit.costmodel.tracing.trace_store import evaluated_rows

    plan = Plan(case.plan)
    record = {"key": case.key, "case": asdict(case), "model": fields(model), "steps": STEPS, "versions": versions()}
    need, parts = traces.need(plan), traces.parts(plan)
    if need is None or parts is None:
        return {**record, "error": traces.untraced(plan) or "no trace"}
    rows, accumulation = int(plan["micro_batch"]), int(plan["accumulation"])
    held = workspaces(CAPABILITY)
    evaluated = evaluated_rows(plan, traces.facts)
    events, sizes, streams = requests(
        *parts, rows=rows, accumulation=accumulation, steps=STEPS, evaluated_rows=evaluated, workspaces=held
    )
    return {
        **record,
        "allocated_bytes": need.peak_bytes + sum(held),
        "capacity_bytes": {
            "default": allocator.smallest_capacity(events, sizes, streams),
            "expandable": allocator.smallest_capacity(events, sizes, streams, expandable=True),
        },
        "reserved_bytes": allocator.replay(events, sizes, streams).peak_reserved_bytes,
        "workspace_bytes": sum(held),
        "context_bytes": context_bytes(CAPABILITY),
        "elsewhere_bytes": need.elsewhere_bytes,
        "phase": need.phase,
        "segment": need.segment,
        "operator": need.operator,
        "by_category": dict(need.by_category),
    }


def config_folder(scratch, model):
    """The folder that holds a model's ``config.json``."""
    from autofit.commands.model_source import fetch

    source = Path(scratch) / f"{model}.json"
    source.write_text(json.dumps(MODELS[model]), "utf-8")
    return fetch(str(source), Path(scratch) / f"config-{model}")


def facts_for(model, seq_len, global_batch, hardware=None):
    """Facts of a case: on this device, or on a Hopper card that is not here."""
    from autofit.contract.facts import Facts, Hardware, Workload
    from autofit.machine.packages import installed

    elsewhere = Hardware(
        device="cuda",
        name="NVIDIA H200",
        total_bytes=140 * GIB,
        free_bytes=140 * GIB,
        host_total_bytes=1 << 50,
        host_free_bytes=1 << 50,
        precisions=("fp32", "tf32", "bf16", "fp16"),
        capability=CAPABILITY,
    )
    work = Workload(
        seq_len=seq_len, global_batch=global_batch, limit_bytes=(hardware or elsewhere).total_bytes,
        host_limit_bytes=1 << 50,
    )  # fmt: skip
    return Facts(model=model, hardware=hardware or elsewhere, workload=work, packages=installed())


# -- the search ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Where a plan stops running.

    Attributes:
        free: The run without a limit; ``None`` where it did not end well.
        runs_bytes: The smallest limit that it is known to run on.
        fails_bytes: The largest limit below that on which it is known to fail.
        tries: Every run, in order.
    """

    free: dict | None
    runs_bytes: int | None
    fails_bytes: int | None
    tries: list[dict]


def search(predicted, run, *, tolerance=TOLERANCE, most=MOST_TRIES, more=lambda: True):
    """Find the edge by whole runs.

    Args:
        predicted: Where to look first, in bytes, or ``None``.
        run: Called with a limit in bytes (``None`` for no limit); says whether it ``fits``, and what it ``requested``,
            and ``reserved`` at its peak. Anything else that went wrong is a ``crash``.
        tolerance: How well the edge is to be known, of its own size.
        most: Runs under a limit.
        more: Whether there is time for one more.
    """
    tries = [run(None)]
    free = tries[0]
    if not free.get("fits"):
        return Edge(free=None, runs_bytes=None, fails_bytes=None, tries=tries)
    low, high = free["requested_bytes"] - 1, free["reserved_bytes"]
    seen_low = seen_high = False
    upwards = predicted is not None and predicted <= low
    step, limit = 2 * tolerance, predicted
    while len(tries) <= most and high - low > tolerance * high and more():
        middle = (low + high) // 2
        if limit is None or not low < limit < high:
            if seen_low and seen_high:
                limit = middle
            elif seen_low or (upwards and not seen_high):
                limit, step = min(middle, round(low * (1 + step))), 2 * step
            else:
                limit, step = max(middle, round(high * (1 - step))), 2 * step
        tried = run(limit)
        tries.append(tried)
        if "crash" in tried:
            break
        if tried["fits"]:
            high, seen_high = min(limit, tried["reserved_bytes"]), True
        else:
            low, seen_low = limit, True
        limit = None
    return Edge(free=free, runs_bytes=high, fails_bytes=low, tries=tries)


# -- the device ---------------------------------------------------------------------------------------------------


class Count:
    """Stands where a trial has its clock, and only counts the steps."""

    on_cuda = True
    in_parts = False

    def __init__(self, recipe, steps):
        from autofit.training.timing import Effort

        self.recipe = recipe
        self.effort = Effort(warm_up=steps, min_steps=0, max_steps=0)
        self.accumulation = recipe.accumulation
        self.accumulated = self.done = 0
        self.phase = "load"

    def step_begin(self):
        self.accumulated = 0

    def forward_begin(self):
        self.phase = "forward"

    def forward_end(self):
        self.phase = "backward"

    def backward_end(self, loss):
        self.accumulated += 1
        self.phase = "optimizer"

    def step_skipped(self):
        """Nothing to do."""

    def step_end(self):
        self.done += 1
        return self.done >= self.effort.warm_up


class Child:
    """One plan in a process of its own, which runs it on one limit after another."""

    def __init__(self, case, model, scratch):
        import logging
        import warnings

        from pydantic import TypeAdapter

        from autofit.contract.facts import Model
        from autofit.contract.plan import Plan
        from autofit.machine.describe import describe_hardware
        from autofit.machine.nvml import device_used_bytes
        from autofit.registry import recipe_of
        from autofit.training.launch_environment import launch_environment, write_yaml

        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        self.used = device_used_bytes
        self.before_bytes = device_used_bytes(None)
        import torch

        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{case.allocator == 'expandable'}")
        self.case = case
        self.folder = Path(scratch) / f"run-{os.getpid()}"
        self.folder.mkdir()
        self.config = config_folder(self.folder, case.model)
        plan = Plan(case.plan)
        batch = int(plan["micro_batch"]) * int(plan["accumulation"])
        self.facts = facts_for(
            TypeAdapter(Model).validate_python(model), case.seq_len, batch, _hardware(describe_hardware("cuda"))
        )
        self.build = lambda: recipe_of(plan, self.facts)
        config_file = self.folder / "accelerate.yaml"
        write_yaml(config_file, dict(self.build().emission.accelerate))
        os.environ.update(launch_environment(config_file))
        from transformers import Trainer

        _ = Trainer
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.cuda.set_device(0)
        self.total_bytes = torch.cuda.get_device_properties(0).total_memory

    def run(self, limit):
        """A whole run on a limit; what it took, and what stayed behind."""
        import torch

        # half a byte more, so that the fraction, once multiplied out and cut off, is this very number of bytes
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else (limit + 0.5) / self.total_bytes)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        began = time.monotonic()
        found = {"limit_bytes": limit, **self._steps()}
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        found.update(
            seconds=round(time.monotonic() - began, 2),
            allocated_bytes=after["allocated_bytes.all.peak"],
            requested_bytes=after["requested_bytes.all.peak"],
            reserved_bytes=after["reserved_bytes.all.peak"],
            retries=after["num_alloc_retries"] - before.get("num_alloc_retries", 0),
            outside_bytes=self.used(None) - self.before_bytes - torch.cuda.memory_reserved(),
        )
        if self.case.allocator == "expandable" and limit is None:
            found["expandable_seen"] = any(one.get("is_expandable") for one in torch.cuda.memory_snapshot())
        self._drop(found)
        return found

    def _steps(self):
        """Whether the steps could be done."""
        from accelerate.state import AcceleratorState, GradientState, PartialState

        from autofit.machine.meters import out_of_memory
        from autofit.registry import techniques
        from autofit.training.loops import run_recipe

        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        recipe = self.build()
        count = Count(recipe, STEPS)
        try:
            evidence = run_recipe(count, config=self.config, folder=self.folder)
        except Exception as error:  # noqa: BLE001 - told in words
            where = out_of_memory(error)
            if where is not None and where[0] == "device":
                return {"fits": False, "phase": count.phase, "step": count.done}
            words = (str(error).strip() or "no message").splitlines()[0][:300]
            return {"fits": False, "crash": f"{type(error).__name__}: {words}", "phase": count.phase}
        ignored = [one.in_effect(recipe.plan[one.name], evidence.of(one.name), self.facts) for one in techniques()]
        return {"fits": True, "not_in_effect": [words for words in ignored if words]}

    def _drop(self, found):
        """Give everything back."""
        import torch

        gc.collect()
        held = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        found["workspace_bytes"] = held - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()
        found["left_bytes"] = torch.cuda.memory_reserved()


def _hardware(values):
    from pydantic import TypeAdapter

    from autofit.contract.facts import Hardware

    return TypeAdapter(Hardware).validate_python(values)


class Process:
    """The parent's side of a :class:`Child`: a forked process, made again where the last one did not end clean.

    The parent has torch loaded, and never touches the device.
    """

    def __init__(self, case, model, scratch, deadline, make=Child):
        self.case, self.model, self.scratch, self.deadline, self.make = case, model, scratch, deadline, make
        self.pid = self.socket = None
        self.forks = 0

    def run(self, limit):
        """One run; a process that dies or takes too long is a crash."""
        if self.pid is None:
            self._fork()
        line = b""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(json.dumps(limit).encode() + b"\n")
            readable, _, _ = select.select([self.socket], [], [], max(1.0, self.deadline - time.monotonic()))
            while readable and not line.endswith(b"\n") and (part := self.socket.recv(65536)):
                line += part
        if not line.endswith(b"\n"):
            late = time.monotonic() >= self.deadline
            status = self.close()
            return {"limit_bytes": limit, "fits": False, "crash": "out of time" if late else f"ended: status {status}"}
        found = json.loads(line)
        paged = "paged" in str(self.case.plan["optimizer"])  # bitsandbytes never gives managed memory back
        if paged or "crash" in found or found.get("left_bytes", 0) > LEFT_BYTES:
            self.close()
        return found

    def _fork(self):
        ours, theirs = socket.socketpair()
        self.forks += 1
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ours.close()
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                if os.getppid() == parent:
                    self._serve(theirs)
                    code = 0
            except BaseException:  # noqa: BLE001 - the top of the process
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        theirs.close()
        self.socket = ours

    def _serve(self, ours):
        os.dup2(2, 1)  # stdout carries the parent's words
        child = None
        for line in ours.makefile("rb"):
            try:
                child = child or self.make(self.case, self.model, self.scratch)
                answer = child.run(json.loads(line))
            except Exception as error:  # noqa: BLE001 - told in words
                import traceback

                traceback.print_exc()
                answer = {"fits": False, "crash": f"{type(error).__name__}: {str(error)[:300]}"}
            ours.sendall(json.dumps(answer).encode() + b"\n")

    def close(self):
        """End it; how it ended."""
        if self.pid is None:
            return 0
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pid = self.socket = None
        return status


def settle(patience_seconds=5.0, slack_bytes=64 * MIB, base=[]):  # noqa: B006 - the base is read once
    """Wait until the device's memory has come back."""
    from autofit.machine.nvml import device_used_bytes

    if not base:
        base.append(device_used_bytes(None))
    deadline = time.monotonic() + patience_seconds
    while device_used_bytes(None) > base[0] + slack_bytes and time.monotonic() < deadline:
        time.sleep(0.05)


def measure(case, prediction, scratch, deadline):
    """One line of the output."""
    began = time.monotonic()
    process = Process(case, prediction["model"], scratch, deadline)
    capacity = prediction.get("capacity_bytes", {}).get(case.allocator)
    longest = [0.0]

    def run(limit):
        start = time.monotonic()
        found = process.run(limit)
        longest[0] = max(longest[0], time.monotonic() - start)
        return found

    try:
        settle()
        edge = search(capacity, run, more=lambda: time.monotonic() + 1.5 * longest[0] < deadline)
    finally:
        process.close()
    return record_of(case, prediction, edge, seconds=time.monotonic() - began, processes=process.forks)


_PREDICTED = (
    "allocated_bytes", "reserved_bytes", "capacity_bytes", "workspace_bytes", "context_bytes", "elsewhere_bytes",
    "phase", "segment", "operator", "by_category", "error", "versions",
)  # fmt: skip


def record_of(case, prediction, edge, *, seconds, processes=1):
    """What is written of a case: what was predicted, what was measured, and the relative error."""
    free = edge.free
    capacity = prediction.get("capacity_bytes", {}).get(case.allocator)
    crash = next((one["crash"] for one in edge.tries if "crash" in one), None)
    return {
        "key": case.key,
        "case": asdict(case),
        "steps": STEPS,
        "predicted": {name: prediction.get(name) for name in _PREDICTED},
        "measured": None
        if free is None
        else {
            "allocated_bytes": free["allocated_bytes"],
            "requested_bytes": free["requested_bytes"],
            "reserved_bytes": free["reserved_bytes"],
            "outside_bytes": max(one.get("outside_bytes", 0) for one in edge.tries),
            "workspace_bytes": free.get("workspace_bytes"),
            "smallest_capacity_bytes": edge.runs_bytes,
            "largest_failing_bytes": edge.fails_bytes,
        },
        "error": None if free is None or capacity is None else capacity / edge.runs_bytes - 1,
        "allocated_error": None
        if free is None or not prediction.get("allocated_bytes")
        else prediction["allocated_bytes"] / free["allocated_bytes"] - 1,
        "failed": crash or (None if free else "out of memory without a limit"),
        "not_in_effect": (free or {}).get("not_in_effect", []),
        "tries": edge.tries,
        "processes": processes,
        "seconds": round(seconds, 1),
        "versions": versions(),
    }


# -- the program --------------------------------------------------------------------------------------------------


def finished(record):
    """Whether a line is an answer; what ran out of time or crashed is tried again."""
    return record.get("failed") in {None, "out of memory without a limit"}


def _gib(count):
    return "?" if count is None else f"{count / GIB:.2f} GiB"


def _words(record):
    measured, capacity = record["measured"] or {}, record["predicted"]["capacity_bytes"] or {}
    error = "" if record["error"] is None else f" {record['error']:+.1%}"
    return (
        f"{record['key']}: predicted {_gib(capacity.get(record['case']['allocator']))}, measured "
        f"{_gib(measured.get('smallest_capacity_bytes'))}{error} in {record['seconds']:.0f} s, "
        f"{len(record['tries'])} runs {record['failed'] or ''}"
    )


def preload(models):
    """What every child needs, loaded once; touches no device."""
    import importlib
    from importlib.util import find_spec

    for name in ("torch", "torch._dynamo", "transformers", "accelerate.commands.launch"):
        importlib.import_module(name)
    if find_spec("torchao"):  # transformers' models import it, and it asks for the device
        return
    importlib.import_module("transformers.modeling_utils")
    for model in sorted(models):
        kind = MODELS[model]["model_type"]
        with contextlib.suppress(ImportError):
            importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def predict_in_a_process(wanted, path, scratch):
    """Tracing must not leave its environment behind in the process that measures."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            predict(wanted, path, scratch)
            code = 0
        except BaseException:  # noqa: BLE001 - the top of the process
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(pid, 0)


def main(arguments=None):
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON lines; appended to")
    parser.add_argument("--predictions", type=Path, help="JSON lines, made by --predict-only; what is missing is added")
    parser.add_argument("--predict-only", action="store_true", help="needs no device")
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--only", help="only cases whose name holds this text")
    parser.add_argument("--most", type=int, help="only the first so many cases")
    options = parser.parse_args(arguments)
    if options.predict_only is (options.output is not None):
        parser.error("one of --output FILE and --predict-only is wanted")
    if options.predict_only and options.predictions is None:
        parser.error("--predict-only writes to --predictions FILE")
    deadline = time.monotonic() + options.budget_seconds
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    wanted = [case for case in cases() if not options.only or options.only in case.key][: options.most]
    with tempfile.TemporaryDirectory(prefix="autofit-fits-") as folder:
        kept = options.predictions or Path(folder) / "predictions.jsonl"
        if not options.predict_only:
            done = {record["key"] for record in lines(options.output) if finished(record)}
            wanted = [case for case in wanted if case.key not in done]
        known = {record["key"] for record in lines(kept)}
        missing = [case for case in wanted if case.key not in known]
        if missing:
            predict_in_a_process(missing, kept, folder)
        if options.predict_only:
            return
        measure_all(wanted, {one["key"]: one for one in lines(kept)}, options.output, folder, deadline)


def measure_all(wanted, predictions, output, scratch, deadline):
    """Measure until everything is measured or time is out."""
    from autofit.machine.select import missing_cuda

    missing = missing_cuda()
    if missing:
        sys.exit(f"nothing can be measured: {missing}")
    preload({case.model for case in wanted})
    usual = 15.0
    for place, case in enumerate(wanted):
        if time.monotonic() + usual > deadline:
            print(f"out of time: {len(wanted) - place} cases are left", flush=True)
            return
        if case.key not in predictions:
            print(f"{case.key}: could not be described", flush=True)
            continue
        record = measure(case, predictions[case.key], scratch, deadline)
        append(output, record)
        print(_words(record), flush=True)


if __name__ == "__main__":
    main()
