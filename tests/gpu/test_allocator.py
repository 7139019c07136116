"""The model of the caching allocator against the real one: the same sequences, block by block, on the device.

Each kind of allocator gets a process of its own, in which nothing else allocates; this file is also its script.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SEGMENT = 20 * 2**20  # addresses are the driver's, so a choice between equals may go the other way


def perform(events, sizes, capacity_bytes):
    """Allocate and free for real; what the allocator counted."""
    import torch

    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0, "something is left of the sequence before"
    total = torch.cuda.get_device_properties(0).total_memory
    # half a byte more, so that the fraction, once multiplied out and cut off, is this very number of bytes
    torch.cuda.set_per_process_memory_fraction(1.0 if capacity_bytes is None else (capacity_bytes + 0.5) / total)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    live, failed_at = {}, None
    for index, event in enumerate(events):
        if event < 0:
            del live[~event]
            continue
        try:
            live[event] = torch.empty(sizes[event], dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            failed_at = index
            break
    after = torch.cuda.memory_stats()
    live.clear()
    return {
        "failed_at": failed_at,
        "peak_allocated_bytes": after["allocated_bytes.all.peak"],
        "peak_reserved_bytes": after["reserved_bytes.all.peak"],
        "retries": after["num_alloc_retries"] - before.get("num_alloc_retries", 0),
        "mallocs": after["num_device_alloc"] - before.get("num_device_alloc", 0),
    }


def main():
    import torch

    torch.empty(1, device="cuda")  # the context exists
    job = json.load(sys.stdin)
    results = [perform(job["events"], job["sizes"], capacity) for capacity in job["capacities"]]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
    sys.exit()

from autofit.costmodel.memory.allocator import replay, smallest_capacity  # noqa: E402 - the script needs torch alone
from autofit.system.units import KIB, MIB  # noqa: E402
from tests.costmodel.test_allocator import training  # noqa: E402


def real(events, sizes, capacities, *, expandable):
    """The sequence on the device, once for each capacity."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=json.dumps({"events": events, "sizes": sizes, "capacities": capacities}),
        env={**clean, "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def scattered(seed, largest):
    """Blocks of any size, freed in any order, no more than 40 alive."""
    rng = random.Random(seed)
    events, sizes, live = [], [], []
    for _ in range(1500):
        if live and rng.random() < len(live) / 40:
            events.append(~live.pop(rng.randrange(len(live))))
        else:
            sizes.append(int(2 ** rng.uniform(6, largest)))
            live.append(len(sizes) - 1)
            events.append(live[-1])
    return events, sizes


SEQUENCES = {
    "edges": (
        list(range(9)),
        [1, 513, MIB, MIB + 1, 10 * MIB - 511, 11 * MIB - 512, 11 * MIB, 21 * MIB, 19 * MIB // 2],
    ),
    "small": scattered(1, 20),
    "middle": scattered(2, 23.5),
    "large": scattered(3, 26),
    "steps": training(layers=6, hidden=1024, tokens=4096, steps=3),
    "more steps": training(layers=8, hidden=512, tokens=8192, steps=8, seed=1),
    "odd steps": training(layers=8, hidden=1000, tokens=3001, steps=8, seed=2),
}


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_without_a_ceiling_the_counters_are_the_same(name, expandable):
    events, sizes = SEQUENCES[name]
    (seen,) = real(events, sizes, [None], expandable=expandable)
    told = replay(events, sizes, expandable=expandable)
    assert seen["failed_at"] is None
    assert seen["peak_allocated_bytes"] == told.peak_allocated_bytes
    assert abs(seen["peak_reserved_bytes"] - told.peak_reserved_bytes) <= SEGMENT
    assert seen["retries"] == 0


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", [name for name in SEQUENCES if name != "edges"])
def test_the_smallest_ceiling_is_the_same(name, expandable):
    """Within one segment: real runs on every ceiling around the one that the model names."""
    events, sizes = SEQUENCES[name]
    least = smallest_capacity(events, sizes, expandable=expandable)
    tried = [c for c in range(least - SEGMENT - 2 * MIB, least + SEGMENT + 1, 2 * MIB) if c > 64 * KIB]
    results = real(events, sizes, tried, expandable=expandable)
    ran = [capacity for capacity, seen in zip(tried, results, strict=True) if seen["failed_at"] is None]
    assert ran, "the device needs more"
    assert ran[0] > tried[0], "the device needs less"
    on_it = results[tried.index(least)]
    told = replay(events, sizes, capacity_bytes=least, expandable=expandable)
    if on_it["failed_at"] is None:
        assert abs(on_it["retries"] - told.retries) <= max(2, told.retries // 2)
