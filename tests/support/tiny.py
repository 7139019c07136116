"""Models that train in milliseconds on a CPU, facts of this very machine for them, and processes to watch."""

import json
import signal
import time
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.contract.plan import Plan
from autofit.machine.describe import _cpu_multiplies_bf16
from autofit.machine.packages import installed
from autofit.training.tasks.jobs import DescribeJob

SUPPORT = Path(__file__).resolve().parent
"""Holds the modules that helper processes are told to load."""
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
LANDSCAPES = TESTS / "data" / "landscapes"
GIB = 2**30
MIB = 2**20
CPU_PRECISIONS = ("fp32", "bf16") if _cpu_multiplies_bf16() else ("fp32",)
"""What this processor multiplies by itself: bfloat16 not everywhere."""

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
CONFIGS = {
    "llama": {"model_type": "llama", **_GROUPED},
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL},
    "gemma2": {"model_type": "gemma2", **_GROUPED, "head_dim": 16, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", **_GROUPED},
    "mixtral": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
LLAMA = CONFIGS["llama"]

PLAIN = Plan(
    {
        "parallel": "none",
        "sync_each_batch": "off",
        "micro_batch": 1,
        "accumulation": 4,
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


def write_config(folder, config=LLAMA, **changes):
    """A folder with a ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None, **config, **changes}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return folder


def describe(server, config, *, device="cpu", limit_bytes=4 * GIB, seq_len=32, global_batch=4, launch_path="trainer"):
    """The facts of a config on this machine, read as a tune reads them."""
    job = DescribeJob(name="tiny", config=str(config), device=device, trust_remote_code=False)
    with server.ask(config, job) as answer:
        return Facts(
            model=TypeAdapter(Model).validate_python(answer["model"]),
            hardware=TypeAdapter(Hardware).validate_python(answer["hardware"]),
            workload=Workload(
                seq_len=seq_len,
                global_batch=global_batch,
                limit_bytes=limit_bytes,
                host_limit_bytes=limit_bytes,
                launch_path=launch_path,
            ),
            packages=installed(),
        )


def wait_until(true, seconds=60.0, what="it"):
    """Poll until a condition holds; what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come in {seconds} s")


def hear_signals():
    """Let programs that are started from here hear signals, also where nohup or a shell's ``&`` made this one deaf."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)


def alive(pid):
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*pids, seconds=10.0):
    """Whether all of these processes end in so many seconds."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def offspring(pid):
    """The pids of all that a process has started, and that they have."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
