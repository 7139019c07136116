"""What runs on a CUDA device, on a card that is played: PyTorch's counters, the driver's, and how both fail."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autofit.commands import doctor, launching
from autofit.commands import facts as facts_of
from autofit.contract import placement
from autofit.contract.facts import Hardware
from autofit.contract.outcome import Evidence
from autofit.costmodel.jobs import TraceJob
from autofit.machine import describe, jobs, meters, select
from autofit.machine.meters import CeilingBroken, CudaMeter, out_of_memory
from autofit.machine.nvml import device_use, device_used_bytes
from autofit.machine.other_processes import kin
from autofit.registry import recipe_of, technique
from autofit.system.errors import MachineError, ModelError
from autofit.system.job import job_text
from autofit.system.locks import LockHeld, device_lock
from autofit.training.measure import measure
from autofit.training.observer import Observer
from autofit.training.runner import ProcessRunner
from autofit.training.tasks.jobs import DescribeJob
from autofit.training.timing import Clock, Effort
from autofit.worker import main as work
from tests.support.synthetic import GIB, cuda_facts
from tests.support.tiny import MIB, PLAIN, write_config

CONTEXT = 500 * MIB
TOTAL = 24 * GIB
BARE = "12345678-0000-0000-0000-000000000000"


class OnHost(TorchFunctionMode):
    """Tensors that are asked for on the device lie on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Card:
    """A card, PyTorch's allocator on it, and the driver that tells of both."""

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self):
        self.known = f"GPU-{BARE}"
        self.second = {}  # another card's UUID, and what others hold of it
        self.others = self.outside = self.allocated = self.reserved = 0
        self.managed = 0  # of this process, and listed for none
        self.neighbours = {}
        self.own_entry = lambda held: {os.getpid(): held}
        self.meanwhile = []
        self.peak_allocated = self.peak_reserved = 0
        self.capacity = TOTAL
        self.refuses = None

    def hold(self, allocated, reserved=None):
        self.allocated, self.reserved = allocated, max(self.reserved, reserved or allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    # the driver

    def nvmlInit(self):  # noqa: N802
        if self.refuses:
            raise self.NVMLError(self.refuses)

    def nvmlShutdown(self):  # noqa: N802
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != self.known and uuid not in self.second:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle, version):  # noqa: N802
        assert version == self.nvmlMemory_v2
        if handle in self.second:
            return SimpleNamespace(used=self.second[handle])
        listed = sum(held or 0 for held in self.neighbours.values())
        used = self.others + listed + self.outside + self.managed + self.reserved
        if self.meanwhile:
            self.meanwhile.pop()()
        return SimpleNamespace(used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle):  # noqa: N802
        held = self.outside + self.reserved
        listed = {**self.neighbours, **(self.own_entry(held) if held else {})}
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in listed.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle):  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 8

    # PyTorch

    def properties(self, device):
        uuid = BARE if device == 0 else next(iter(self.second))
        return SimpleNamespace(name="Played", major=8, minor=6, uuid=uuid, total_memory=TOTAL, L2_cache_size=6 << 20)

    def set_device(self, _device):
        self.outside = CONTEXT
        self.hold(32 * MIB)  # cuBLAS' workspace, which the first product takes

    def clear_workspaces(self):
        self.allocated = 0

    def fraction(self, share):
        assert isinstance(share, float)
        assert 0 < share <= 1
        self.capacity = share * TOTAL

    def empty_cache(self):
        self.reserved = self.allocated

    def reset_peaks(self):
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


@pytest.fixture
def card(monkeypatch):
    found = Card()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    for name, played in {
        "set_device": found.set_device,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": found.properties,
        "set_per_process_memory_fraction": found.fraction,
        "memory_reserved": lambda: found.reserved,
        "max_memory_reserved": lambda: found.peak_reserved,
        "max_memory_allocated": lambda: found.peak_allocated,
        "memory_stats": lambda: {"num_alloc_retries": 3},
        "empty_cache": found.empty_cache,
        "reset_peak_memory_stats": found.reset_peaks,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", found.clear_workspaces, raising=False)
    with OnHost():
        yield found


# memory


def test_a_meter_leaves_the_allocator_as_a_launch_finds_it(card):
    """Without cuBLAS' workspace, which a launch has behind what loading leaves free, and not before it."""
    CudaMeter(10 * GIB, 4 * GIB, card.known)
    assert (card.outside, card.allocated, card.reserved) == (CONTEXT, 0, 0)


def test_the_ceiling_is_held_by_the_allocator_less_what_lies_outside(card):
    card.others = 2 * GIB
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    room = 10 * GIB - CONTEXT - 32 * MIB
    assert card.capacity == pytest.approx(room)
    card.hold(3 * GIB, 4 * GIB)
    card.outside += 100 * MIB  # kernels that the first steps load
    meter.settle()
    assert card.capacity == pytest.approx(room - 100 * MIB)
    found = meter.read()
    assert (found.allocated_bytes, found.reserved_bytes, found.alloc_retries) == (3 * GIB, 4 * GIB, 3)
    assert found.outside_bytes == CONTEXT + 100 * MIB
    assert found.peak_bytes == 4 * GIB + found.outside_bytes


def test_what_is_reserved_above_the_ceiling_is_given_back_after_the_warm_up(card):
    meter = CudaMeter(4 * GIB, 4 * GIB, card.known)
    card.hold(2 * GIB, 3 * GIB)
    card.outside += GIB
    meter.settle()
    assert meter.read().reserved_bytes == 2 * GIB
    assert meter.read().peak_bytes <= 4 * GIB


def test_what_a_neighbour_takes_while_steps_are_timed_is_told_from_the_plan_s_own(card):
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.hold(9 * GIB)
    meter.settle()
    card.hold(9 * GIB, 10 * GIB - CONTEXT - 32 * MIB)  # all that the allocator may have
    card.others += 100 * MIB
    reading = meter.read()
    assert reading.peak_bytes > 10 * GIB
    recipe = recipe_of(PLAIN, cuda_facts(limit_bytes=10 * GIB, global_batch=4))
    found = measure(recipe, Effort(), meter, lambda _: Evidence())
    assert (found.kind, found.external_pressure) == ("out_of_memory", True)
    card.hold(10 * GIB)
    assert not measure(recipe, Effort(), meter, lambda _: Evidence()).external_pressure


@pytest.mark.parametrize("kernels", [0, 100 * MIB])
@pytest.mark.parametrize(("then", "now"), [(0, 4 * GIB), (4 * GIB, GIB), (4 * GIB, None)])
def test_a_neighbour_that_takes_or_gives_back_memory_during_warm_up_is_not_the_trial_s(card, then, now, kernels):
    card.neighbours = {2**22: then}
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.hold(3 * GIB)
    card.outside += kernels
    card.neighbours = {} if now is None else {2**22: now}
    meter.settle()
    assert card.capacity == pytest.approx(10 * GIB - CONTEXT - kernels - 32 * MIB)
    card.neighbours = {2**22: 6 * GIB}
    assert meter.read().outside_bytes == CONTEXT + kernels


@pytest.mark.parametrize("then", [0, 4 * GIB])
def test_what_is_listed_for_nobody_is_the_trial_s_own(card, then):
    """Managed memory; a neighbour's can't be told from it."""
    card.neighbours = {2**22: then}
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.managed = GIB
    card.neighbours = {2**22: 2 * GIB}
    meter.settle()
    assert meter.read().outside_bytes == CONTEXT + GIB


@pytest.mark.parametrize(
    "own_entry",
    [
        lambda _: {},
        lambda _: {os.getpid(): None},
        lambda _: {os.getpid(): 0},
        lambda held: {os.getpid(): held - CONTEXT - 1},
    ],
    ids=["absent", "not available", "nothing", "less than the allocator holds"],
)
def test_a_driver_that_does_not_tell_the_trial_s_own_has_the_device_s_growth_counted(card, own_entry):
    card.own_entry = own_entry
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.hold(3 * GIB)
    card.neighbours = {2**22: GIB}
    meter.settle()
    assert meter.read().outside_bytes == CONTEXT + GIB


def test_a_slice_of_a_card_that_lists_no_processes_has_its_growth_counted(card, monkeypatch):
    def refuse(*_):
        raise card.NVMLError("Not Supported")

    card.known = f"MIG-{BARE}"
    monkeypatch.setattr(card, "nvmlDeviceGetComputeRunningProcesses", refuse)
    meter = CudaMeter(10 * GIB, 4 * GIB, None)
    card.neighbours = {2**22: GIB}
    meter.settle()
    assert meter.read().outside_bytes == CONTEXT + GIB


def test_a_process_of_another_container_that_has_the_same_number_is_not_the_trial(card):
    card.own_entry = lambda held: {2**21: held}  # as the host counts
    card.neighbours = {os.getpid(): 5 * GIB}
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.hold(3 * GIB)
    meter.settle()
    assert meter.read().outside_bytes == CONTEXT


def test_what_another_rank_takes_of_the_same_card_counts(card, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = kin()
    assert {os.getpid(), child.pid} <= found
    assert os.getppid() not in found
    monkeypatch.setattr(meters, "kin", lambda: {os.getpid(), 2**22})
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.neighbours = {2**22: CONTEXT}
    meter.settle()
    assert meter.read().outside_bytes == 2 * CONTEXT


def test_the_device_is_looked_at_while_nobody_takes_memory(card):
    card.meanwhile = [lambda: card.neighbours.update({2**22: 4 * GIB})]
    found = device_use(card.known)
    assert (found.used_bytes, found.held_bytes) == (4 * GIB, {2**22: 4 * GIB})


def test_what_the_trial_takes_outside_of_the_allocator_after_warm_up_is_its_own(card):
    meter = CudaMeter(10 * GIB, 4 * GIB, card.known)
    card.hold(10 * GIB - CONTEXT - 32 * MIB)
    meter.settle()
    card.outside += 100 * MIB
    recipe = recipe_of(PLAIN, cuda_facts(limit_bytes=10 * GIB, global_batch=4))
    found = measure(recipe, Effort(), meter, lambda _: Evidence())
    assert (found.kind, found.external_pressure) == ("out_of_memory", False)


def test_the_card_that_is_measured_is_the_one_that_is_seen(card):
    """A launch may see another one than was tuned on."""
    assert CudaMeter(10 * GIB, 4 * GIB, "GPU-of-another-machine").uuid == card.known


def test_memory_that_comes_back_late_is_waited_for_also_under_a_low_ceiling(tmp_path, monkeypatch):
    facts = cuda_facts(limit_bytes=4 * GIB)
    free = iter([12 * GIB, 18 * GIB, 24 * GIB, *[20 * GIB] * 1000])
    said = []
    runner = ProcessRunner(tmp_path / "trials", facts, tmp_path, None, note=said.append)
    monkeypatch.setattr(runner, "free_bytes", lambda: next(free))
    runner.settle()
    assert next(free) == 20 * GIB, "it went on when all had come back, and not before"
    runner.settle(patience_seconds=0.1)
    began = time.monotonic()
    runner.settle()
    assert time.monotonic() - began < 1, "for somebody who stays it is waited once"
    assert not said, "there is room for every trial"


def test_a_ceiling_below_the_context_is_broken_at_once(card):
    with pytest.raises(CeilingBroken) as caught:
        CudaMeter(400 * MIB, 4 * GIB, card.known)
    assert (caught.value.where, caught.value.peak_bytes) == ("device", CONTEXT)


def test_a_kernel_without_the_peak_of_the_resident_set_is_asked_in_another_way(monkeypatch):
    monkeypatch.setattr(meters, "reset_peak", lambda: None)
    meter = meters.HostMeter(GIB, "host")
    usual = meters.status()
    monkeypatch.setattr(meters, "status", lambda: {name: size for name, size in usual.items() if name != "VmHWM"})
    assert meter.peak_bytes() >= usual["VmHWM"] - meter.base_bytes - MIB


def test_a_driver_that_does_not_answer_is_told_in_words(card):
    card.refuses = "Not Supported"
    with pytest.raises(MachineError, match=r"does not answer \(Not Supported\)"):
        device_used_bytes(card.known)


def test_memory_that_the_host_can_t_pin_is_the_host_s(monkeypatch):
    words = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported"

    def empty(*_, **__):
        raise RuntimeError(words.format(said))

    monkeypatch.setattr(torch, "empty_like", empty)
    said = "out of memory"
    with pytest.raises(MemoryError) as caught:
        placement.Cuda().to_host(torch.ones(4))
    assert out_of_memory(caught.value) == ("host", None)
    said = "an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        placement.Cuda().to_host(torch.ones(4))


# what the device is


@pytest.mark.parametrize("prefix", ["GPU", "MIG"])
def test_the_card_is_described_before_there_is_a_context(card, monkeypatch, prefix):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    card.known, card.others = f"{prefix}-{BARE}", GIB
    found = describe.describe_hardware("cuda")
    assert (found["uuid"], found["visible_id"], found["capability"]) == (card.known, "3", (8, 6))
    assert (found["total_bytes"], found["free_bytes"], found["others_bytes"]) == (TOTAL, TOTAL - GIB, GIB)
    assert found["precisions"] == ("fp32", "tf32", "bf16", "fp16")
    assert (found["driver"], found["l2_bytes"]) == ("580.65.06", 6 << 20)


@pytest.mark.parametrize(("first", "second", "index"), [(0, 15 * GIB, 1), (GIB, 0, 0)])
def test_of_several_cards_the_one_with_the_least_free_memory_decides(card, monkeypatch, tmp_path, first, second, index):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("AUTOFIT_LOCKS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card.others, card.second = first, {"GPU-second": second}
    found = describe.describe_hardware("cuda", processes=2)
    uuids = [card.known, "GPU-second"]
    assert (found["uuid"], found["visible_id"]) == (uuids[index], "31"[index])
    assert (found["free_bytes"], found["others_bytes"]) == (TOTAL - first - second, first + second)
    assert found["beside"] == ((uuids[1 - index], TOTAL),)
    hardware = Hardware(**found)
    facts = dataclasses.replace(cuda_facts(), hardware=hardware)
    assert ProcessRunner(tmp_path, facts, tmp_path, None).free_bytes() == TOTAL - first - second
    with select.hardware_lock(hardware):
        for uuid in uuids:
            with pytest.raises(LockHeld), device_lock(uuid):
                pass
    assert describe.describe_hardware("cuda")["beside"] == ()


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 1), ({"CUDA_VISIBLE_DEVICES": "3"}, 8), ({"CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_ID": "7"}, 1)],
    ids=["all there is", "one of eight", "what a scheduler gave"],
)
@pytest.mark.usefixtures("card")
def test_a_launch_is_held_to_the_device_that_was_chosen_of_several(monkeypatch, environment, count):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = describe.describe_hardware("cuda")
    assert found["count"] == count
    hardware = dataclasses.replace(cuda_facts().hardware, count=count, visible_id=found["visible_id"])
    written = recipe_of(PLAIN, dataclasses.replace(cuda_facts(global_batch=4), hardware=hardware)).emission.accelerate
    assert written.get("gpu_ids") == ("3" if count > 1 else None)


@pytest.mark.parametrize(("here", "processes"), [(True, 1), (False, 1), (True, 2)])
def test_verify_shows_a_launch_of_one_process_the_device_that_was_tuned_on(card, here, processes):
    said = []
    uuid = card.known if here else "GPU-of-another-machine"
    hardware = dataclasses.replace(cuda_facts().hardware, uuid=uuid)
    tuned = SimpleNamespace(hardware=hardware, workload=SimpleNamespace(processes=processes))
    shown = {"CUDA_VISIBLE_DEVICES": uuid} if here and processes == 1 else {}
    assert launching.on_its_device(tuned, said.append) == shown
    assert bool(said) is not here


@pytest.mark.parametrize("visible", [None, "5"])
def test_a_card_that_is_none_by_its_number_is_told_with_the_number(monkeypatch, visible):
    """PyTorch says no more than "No CUDA GPUs are available"."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ("CUDA_VISIBLE_DEVICES='5'" in select.unusable("cuda", "a reason").hint) == (visible is not None)
    assert select.unusable("cpu", "a reason").hint is None


def test_a_card_that_is_left_unused_is_told(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = {"/dev/nvidiactl"}
    monkeypatch.setattr(select, "Path", lambda path: SimpleNamespace(exists=lambda: path in there))
    monkeypatch.setattr(select, "missing_cuda", lambda: "the installed torch is built without CUDA")
    assert select.left_unused() == "the installed torch is built without CUDA"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert select.left_unused() is None, "it is hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    there.clear()
    assert select.left_unused() is None


def test_triton_needs_more_than_itself():
    facts = dataclasses.replace(cuda_facts(), packages={"triton": "3.6", "liger-kernel": "0.8.5"})
    known = dataclasses.replace(facts.model, liger=True, attentions=("eager", "sdpa", "flex_attention"))
    for found, wanted in ((("cc", "python.h"), None), (("cc",), "python3-dev"), ((), "gcc")):
        hardware = dataclasses.replace(facts.hardware, compilers=found)
        here = dataclasses.replace(facts, model=known, hardware=hardware)
        for name, value in (("compile", "regions"), ("kernels", "liger"), ("attention", "flex_attention")):
            said = technique(name).choice(value, here)
            assert (said.status == "withheld") is (wanted is not None)
            assert wanted is None or wanted in said.reason


def test_a_card_that_the_driver_does_not_know_is_told(card):
    card.known = "GPU-of-another-machine"
    with pytest.raises(MachineError, match=r"knows no such device \(Not Found\)"):
        describe.describe_hardware("cuda")


def test_a_device_that_is_there_and_can_t_be_used_is_the_machine_s_fault(tmp_path, monkeypatch):
    said = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"

    def refuse(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(jobs, "describe_hardware", refuse)
    config = write_config(tmp_path / "model")
    job = DescribeJob(name="tiny", config=str(config), device="cuda", trust_remote_code=False)
    (tmp_path / "job.json").write_text(job_text(job))
    work(tmp_path)
    answer = json.loads((tmp_path / "facts.json").read_text())
    with pytest.raises(MachineError, match=r"can't be used: RuntimeError: .* too old \(found version 12020\)\.\n"):
        facts_of.described(answer, "tiny", "cuda")
    with pytest.raises(ModelError, match="of 'tiny': no such thing"):
        facts_of.described({"error": "no such thing"}, "tiny", "cuda")


def test_the_doctor_tells_of_a_card_that_can_t_be_used(monkeypatch):
    asked = []

    def described(_model, chosen, _task):
        asked.append(chosen)
        if chosen == "cuda":
            raise MachineError("no kernel image is available")
        return cuda_facts().model, dataclasses.replace(cuda_facts().hardware, device="cpu")

    monkeypatch.setattr(doctor, "_described", described)
    for module in (doctor, select):
        monkeypatch.setattr(module, "missing_cuda", lambda: None)
    found = doctor.examine("auto")
    assert asked == ["cuda", "cpu"]
    assert (found.cuda, found.hardware.device) == ("no kernel image is available", "cpu")
    with pytest.raises(MachineError, match="no kernel image"):
        doctor.examine("cuda")


def test_a_torch_for_rocm_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text("cuda: str | None = None\nhip: str | None = '6.4.43483'\n")
    monkeypatch.setattr(select, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert select.torch_cuda() is None
    assert "ROCm 6.4" in select.missing_cuda()


# TF32


@pytest.fixture
def flags():
    """The flags of TF32, put back as they were."""
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.usefixtures("flags")
def test_a_plain_loop_has_the_precision_that_was_asked_for_beside_a_compiled_model(monkeypatch, precision):
    def switched_on(**_):  # as accelerate.state.AcceleratorState does on CUDA
        torch.backends.cuda.matmul.allow_tf32 = True

    monkeypatch.setattr("accelerate.Accelerator", switched_on)
    facts = cuda_facts(launch_path="loop", global_batch=4)
    recipe_of(PLAIN.replaced(precision=precision, compile="regions"), facts).accelerator()
    wanted = precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if wanted else "ieee")
    assert torch.backends.cuda.matmul.allow_tf32 is wanted, "it can be read in both ways"


def test_a_trainer_s_compiled_model_has_no_fp32():
    facts = cuda_facts()
    said = technique("compile").conflict("regions", {"precision": "fp32"}, facts)
    assert "precision=tf32" in said
    for others in ({"precision": "tf32"}, {"precision": "bf16"}):
        assert technique("compile").conflict("regions", others, facts) is None
    assert technique("compile").conflict("off", {"precision": "fp32"}, facts) is None
    loop = cuda_facts(launch_path="loop")
    older = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, precisions=("fp32", "fp16")))
    for other in (loop, older):
        assert technique("compile").conflict("regions", {"precision": "fp32"}, other) is None


@pytest.mark.parametrize(
    ("precision", "older", "good"), [("fp32", False, False), ("bf16_weights", False, True), ("fp32", True, True)]
)
def test_a_flag_of_tf32_that_does_nothing_is_no_fault(precision, older, good):
    facts = cuda_facts()
    if older:
        facts = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, precisions=("fp32", "fp16")))
    dtype = "bfloat16" if precision == "bf16_weights" else "float32"
    seen = {"compute_dtype": dtype, "weights_dtype": dtype, "tf32": True}
    said = technique("precision").in_effect(precision, seen, facts)
    assert said is None if good else "TF32 is on" in said


def test_a_trace_s_process_is_shown_no_device(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        "autofit.costmodel.tracing.trace_job.trace_all",
        lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or {},
    )
    job = TraceJob(facts=cuda_facts(), config=str(tmp_path), requests=(), folder=str(tmp_path))
    (tmp_path / "job.json").write_text(job_text(job))
    with contextlib.suppress(FileNotFoundError):
        work(tmp_path)
    assert seen == [""]


def test_a_step_that_the_scaled_loss_skipped_is_not_timed():
    facts = cuda_facts(global_batch=4)
    clock = Clock(
        recipe=recipe_of(PLAIN, facts),
        effort=Effort(warm_up=1, min_steps=2, max_steps=2),
        meter=meters.HostMeter(8 * GIB, "device"),
        accumulation=4,
        on_cuda=False,
    )
    for skipped in (True, True, False, False):
        clock.step_begin()
        for _ in range(4):
            clock.backward_end(torch.zeros(()))
        if skipped:
            clock.step_skipped()
        enough = clock.step_end()
    assert (clock.done, len(clock.steps), enough) == (4, 2, True)


def test_a_step_that_was_never_taken_is_told():
    seen = {"class": "torch.optim.adamw.AdamW", "fused": True, "loss_scaled": True}
    words = technique("optimizer").in_effect("adamw", seen, cuda_facts())
    assert "no step was taken" in words
    stepped = {**seen, "state_dtypes": ["float32"]}
    assert technique("optimizer").in_effect("adamw", stepped, cuda_facts()) is None


def test_a_state_that_comes_after_skipped_steps_is_seen():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    observer = Observer(model, recipe_of(PLAIN, cuda_facts()))
    before = observer.evidence(optimizer, None, 4)
    assert before.of("optimizer")["state_dtypes"] == []
    assert observer.with_later_state(before, optimizer, None, 4) == before
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    after = observer.with_later_state(before, optimizer, None, 4)
    assert after.of("optimizer")["state_dtypes"] == ["float32"]
    assert after.of("offload")["state_devices"] == ["cpu"]
    assert after.of("accumulation") == {"micro_steps": 4}
    once = observer.evidence(optimizer, None, 4)
    optimizer.state.clear()
    assert observer.with_later_state(once, optimizer, None, 4) is once
