"""Emulated ranks hold what ranks on cards would: a collective waits for all of them, and carries their values."""

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("HOLLOW_CARD" not in os.environ, reason="runs under python -m tests.hollow"),
]

HEAD = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)

def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cuda")
"""

VALUES = """
found = {}

def reduced(word, *values, dtype=torch.float32, **how):
    given = tensor(*values, dtype=dtype)
    dist.all_reduce(given, **how)
    found[word] = given.tolist()

reduced("sum", rank + 1, 2 * rank)
reduced("mean", rank + 1, dtype=torch.bfloat16, op=dist.ReduceOp.AVG)
reduced("most", rank + 2**62, dtype=torch.int64, op=dist.ReduceOp.MAX)
mesh = init_device_mesh("cuda", (2, 2))
reduced("row", rank, group=mesh.get_group(1))
reduced("column", rank, group=mesh.get_group(0))
gathered = torch.empty(ranks, device="cuda")
dist.all_gather_into_tensor(gathered, tensor(rank))
found["gathered"] = gathered.tolist()
part = torch.empty(1, device="cuda")
dist.reduce_scatter_tensor(part, tensor(*(10.0 * rank + place for place in range(ranks))))
found["scattered"] = part.tolist()
given = tensor(rank)
dist.broadcast(given, src=3)
found["broadcast"] = given.tolist()
objects = [None] * ranks
dist.all_gather_object(objects, "rank %d" % rank)
found["objects"] = objects
open(os.path.join(sys.argv[1], "%d.json" % rank), "w").write(json.dumps(found))
dist.destroy_process_group()
"""

DEATH = """
dist.barrier()
if rank == 1:
    os._exit(0)
dist.all_reduce(tensor(1.0))
"""

LATE = """
dist.all_reduce(tensor(1.0))
torch.cuda.synchronize()
if rank == 1:
    time.sleep(1)
begin = time.monotonic()
dist.all_reduce(tensor(1.0))
torch.cuda.synchronize()
open(os.path.join(sys.argv[1], "%d.json" % rank), "w").write(json.dumps(time.monotonic() - begin))
"""


def ranks(count, text, folder):
    """Runs a program on so many emulated cards; what each rank wrote, and how it ended."""
    script = folder / "program.py"
    script.write_text(HEAD + text)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", str(script), str(folder)]
    done = subprocess.run(
        [sys.executable, *launch], env=os.environ | {"HOLLOW_GPUS": str(count)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]
    return found, done


def test_a_collective_carries_every_ranks_values(tmp_path):
    found, done = ranks(4, VALUES, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(found):
        assert one == {
            "sum": [10, 12], "mean": [2.5], "most": [3 + 2**62],
            "row": [[1, 1, 5, 5][rank]], "column": [[2, 4, 2, 4][rank]],
            "gathered": [0, 1, 2, 3], "scattered": [60 + 4 * rank], "broadcast": [3],
            "objects": [f"rank {other}" for other in range(4)],
        }  # fmt: skip
    assert len(found) == 4


def test_a_rank_waits_for_the_slowest(tmp_path):
    (first, second), done = ranks(2, LATE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert first > 0.5 > second


def test_a_rank_that_ends_is_an_error_for_the_others(tmp_path):
    begin = time.monotonic()
    _, done = ranks(2, DEATH, tmp_path)
    assert done.returncode != 0
    assert "a rank has ended" in done.stderr
    assert time.monotonic() - begin < 60
