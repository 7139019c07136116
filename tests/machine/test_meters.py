"""The meter counts the process it lives in, so each of these tests is a job in a process of its own."""

import json
import textwrap

import pytest

from autofit.machine.meters import CeilingBroken, out_of_memory
from tests.support.tiny import GIB, MIB

PREAMBLE = """
import json, torch
from autofit.machine.meters import CeilingBroken, HostMeter, guard_host, out_of_memory, status
MIB, GIB = 2**20, 2**30
def filled(mib, value=1): return torch.full((mib * MIB // 4,), value, dtype=torch.float32)
def tell(**seen): (folder / "seen").write_text(json.dumps(seen))
torch.full((64,), 1.0).sum()
"""


@pytest.fixture
def seen_by(server, tmp_path):
    """Runs code in a forked process and returns what it tells."""

    def run(code):
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "fault.py").write_text(PREAMBLE + textwrap.dedent(code), "utf-8")
        assert server.run(folder, kill_after_seconds=120) == 0, (folder / "stderr.log").read_text()
        return json.loads((folder / "seen").read_text())

    return run


def near(mib):
    return pytest.approx(mib * MIB, rel=0.02)


def test_a_tensor_is_seen_as_large_as_it_is(seen_by):
    seen = seen_by("""
        meter = HostMeter(GIB, "device")
        before = meter.peak_bytes()
        tensor = filled(200)
        reading = meter.read()
        tell(before=before, peak=reading.peak_bytes, names=[
            reading.allocated_bytes, reading.reserved_bytes, reading.host_bytes], outside=reading.outside_bytes)
    """)
    assert seen["before"] < 2 * MIB
    assert seen["peak"] == near(200)
    assert set(seen["names"]) == {seen["peak"]}
    assert seen["outside"] == 0


def test_the_peak_stays_when_the_memory_is_given_back(seen_by):
    seen = seen_by("""
        meter = HostMeter(GIB, "device")
        tensor = filled(200)
        del tensor
        tell(peak=meter.read().peak_bytes, now=status()["VmRSS"] - meter.base_bytes)
    """)
    assert seen["peak"] == near(200)
    assert seen["now"] < 20 * MIB


def test_memory_that_is_only_reserved_does_not_count(seen_by):
    seen = seen_by("""
        meter = HostMeter(GIB, "device")
        tensor = torch.empty(200 * MIB // 4)
        untouched = meter.peak_bytes()
        tensor[: 100 * MIB // 4] = 1
        tell(untouched=untouched, half=meter.peak_bytes())
    """)
    assert seen["untouched"] < 4 * MIB
    assert seen["half"] == near(100)


def test_what_a_process_inherits_counts_as_if_it_had_made_it(seen_by):
    """Pages of a file that its parent has read are not in a fork, and pages that it shares are."""
    seen = seen_by("""
        import mmap, os
        from autofit.machine.meters import Inheritance
        def read(mapped): return sum(mapped[place] for place in range(0, len(mapped), 4096))
        (folder / "data").write_bytes(bytes(50 * MIB))
        data = open(folder / "data", "rb")
        inherited = Inheritance()
        gone = filled(300)
        del gone
        tensor = filled(200)
        mapped = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
        read(mapped)
        inherited.leave()
        if os.fork() == 0:
            inherited.take()
            before = filled(20)
            meter = HostMeter(GIB, "device", inherited)
            first, start = meter.peak_bytes(), status()["VmRSS"] - meter.base_bytes
            tensor += 1
            read(mapped)
            more = filled(100)
            tell(first=first, start=start, peak=meter.peak_bytes())
            os._exit(0)
        os.wait()
    """)
    assert seen["first"] == near(300)
    assert seen["start"] == near(250)
    assert seen["peak"] == near(350)


def test_what_was_there_before_is_not_counted(seen_by):
    seen = seen_by("""
        before = filled(300)
        gone = filled(900)
        del gone
        meter = HostMeter(GIB, "device")
        idle = meter.peak_bytes()
        tensor = filled(200)
        tell(idle=idle, peak=meter.peak_bytes())
    """)
    assert seen["idle"] < 2 * MIB
    assert seen["peak"] == near(200)


def test_a_second_meter_starts_anew(seen_by):
    seen = seen_by("""
        peaks = []
        for mib in (300, 100, 200):
            meter = HostMeter(GIB, "device")
            tensor = filled(mib)
            peaks.append(meter.peak_bytes())
            del tensor
        tell(peaks=peaks)
    """)
    assert seen["peaks"] == [near(300), near(100), near(200)]


def test_library_pages_that_are_used_later_belong_to_the_base(seen_by):
    seen = seen_by("""
        import ctypes, pathlib, re
        meter = HostMeter(GIB, "device")
        library = re.search(r"\\S+/libtorch_cpu\\.so", pathlib.Path("/proc/self/maps").read_text())[0]
        spans = [line.split()[0] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
                 if line.endswith(library) and line.split()[1].startswith("r")]
        bounds = [[int(part, 16) for part in span.split("-")] for span in spans]
        for start, end in bounds:
            for page in range(start, end, 4096):
                ctypes.string_at(page, 1)
        tell(size=sum(end - start for start, end in bounds), peak=meter.peak_bytes())
    """)
    assert seen["size"] > 100 * MIB
    assert seen["peak"] < 4 * MIB


@pytest.mark.parametrize("where", ["device", "host"])
def test_check_raises_above_the_ceiling_and_not_below(seen_by, where):
    seen = seen_by(f"""
        meter = HostMeter(150 * MIB, {where!r})
        first = filled(100)
        meter.check()
        second = filled(100)
        del first, second  # what counts is the peak
        try:
            meter.check()
        except CeilingBroken as error:
            tell(where=error.where, peak=error.peak_bytes)
        else:
            tell(where=None)
    """)
    assert seen["where"] == where
    assert seen["peak"] == near(200)


def test_the_guard_stops_an_allocation_far_above_the_ceiling(seen_by):
    seen = seen_by("""
        import resource
        before = status()["VmData"]
        guard_host(100 * MIB)
        held = filled(500)
        try:
            torch.empty(3 * GIB, dtype=torch.uint8)
        except RuntimeError as error:
            tell(found=out_of_memory(error), text=str(error), net=resource.getrlimit(resource.RLIMIT_DATA)[0] - before)
        else:
            tell(found=None)
    """)
    assert seen["found"] == ["host", 3 * GIB], seen
    assert seen["net"] == pytest.approx(150 * MIB + GIB, abs=64 * MIB)


def test_the_guard_makes_python_s_own_allocations_fail(seen_by):
    seen = seen_by("""
        guard_host(100 * MIB)
        try:
            bytearray(3 * GIB)
        except MemoryError as error:
            tell(found=out_of_memory(error))
        else:
            tell(found=None)
    """)
    assert seen["found"] == ["host", None]


def test_a_guard_never_loosens_a_limit(seen_by):
    seen = seen_by("""
        import resource
        limit = status()["VmData"] + 400 * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        guard_host(64 * GIB)
        tell(limits=resource.getrlimit(resource.RLIMIT_DATA), limit=limit)
    """)
    assert seen["limits"] == [seen["limit"], seen["limit"]]


def test_numpy_s_failure_is_told_as_memory(seen_by):
    seen = seen_by("""
        import numpy
        guard_host(100 * MIB)
        try:
            numpy.ones(3 * GIB, dtype=numpy.uint8)
        except MemoryError as error:
            tell(found=out_of_memory(error), kind=type(error).__name__)
        else:
            tell(found=None)
    """)
    assert seen["found"] == ["host", None]


def test_cuda_s_own_error_names_the_device_and_the_size():
    import torch

    words = (
        "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 79.25 GiB of which 1.44 GiB is free."
    )
    assert out_of_memory(torch.OutOfMemoryError(words.format("2.50 GiB"))) == ("device", int(2.5 * GIB))
    assert out_of_memory(torch.OutOfMemoryError(words.format("20.00 MiB"))) == ("device", 20 * MIB)
    assert out_of_memory(torch.OutOfMemoryError("no size is told")) == ("device", None)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA out of memory at line 42 of pythonInterface.cpp",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "Triton Error [CUDA]: out of memory",
        "NCCL error, ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'",
    ],
)
def test_libraries_with_allocators_of_their_own_run_out_on_the_device(words):
    assert out_of_memory(RuntimeError(words)) == ("device", None)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("out of memory"),
        KeyError("DefaultCPUAllocator: can't allocate memory"),
        OSError(28, "No space left on device"),
        CeilingBroken("device", 1),
    ],
)
def test_other_errors_are_no_memory(error):
    assert out_of_memory(error) is None
