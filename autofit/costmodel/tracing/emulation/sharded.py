"""A world of many processes, traced in one of them.

A *fake process group* has every rank and sends nothing: collectives return at once, and each rank's own tensors are as
large as in a real world. The trace is that of rank 0, which holds the largest shard: FSDP2 pads every shard to the size
of the first (``FSDPParam._init_sharded_param`` of torch 2.13).

===========================  ==========================================================================================
device mesh                  its constructor reads values, so it is built outside of fake mode
DTensor                      its own dispatch is left alone: what counts are its local tensors
sharding propagation         runs operators on tensors of the *global* shape, in a fake mode of its own; not counted
``resize_`` of a storage     how FSDP2 frees a gathered parameter and takes its memory again; no dispatch mode sees it
``DistributedDataParallel``  its reducer is C++ that fake tensors can't go through: :class:`FakeReducer`
===========================  ==========================================================================================

Not in the tape, since they lie outside of PyTorch's allocator: NCCL's own buffers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from autofit.contract.technique import replacing
from autofit.costmodel.tracing.emulation.fake_mode import resize_native
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.timeline import AFTER_EVALUATION


@contextlib.contextmanager
def fake_world(processes: int, rank: int = 0) -> Iterator[None]:
    """A fake process group of this many ranks, in which Accelerate believes to be on so many GPUs."""
    from accelerate import state
    from accelerate.utils import DistributedType
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import training_args

    def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "fake", DistributedType.MULTI_GPU

    changes = [
        (state.PartialState, "_prepare_backend", backend),
        (torch.nn.parallel, "DistributedDataParallel", FakeReducer),
        (training_args, "is_torch_bf16_gpu_available", lambda: True),
    ]
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in mine.items()}, ACCELERATE_TORCH_DEVICE="cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        with replacing(changes):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def following(recorder: Recorder, *, evaluates: bool) -> Iterator[None]:
    """Let the recorder see what a sharded step does beside its operators; ``evaluates`` says whether a Trainer does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
    from torch.distributed.tensor import _sharding_prop

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        native = recorder.fake and storage.device.type != "meta"
        result = resize_native(storage, size) if native else resize(storage, size)
        recorder.resized(storage)
        return result

    propagator: Any = _sharding_prop.ShardingPropagator
    names = [name for name in dir(propagator) if name.startswith("_propagate_tensor_meta")]
    methods = [(name, getattr(propagator, name)) for name in names if callable(getattr(propagator, name))]
    changes = [(propagator, name, _within(recorder.paused, method)) for name, method in methods]
    changes.append((torch.UntypedStorage, "resize_", resized))
    changes.append((FakeTensor, "data_ptr", _address))
    # FSDP2 makes its mesh of the accelerator that PyTorch was built for, though none is visible here
    changes.append((torch._C, "_get_accelerator", lambda *_: torch.device("cpu")))
    exchanges = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
    changes += [(groups, name, _within(recorder.communicating, getattr(groups, name))) for name in exchanges]
    if evaluates:
        changes.append(_after_evaluation(recorder))
    with replacing([*changes, *_real_meshes()]):
        yield


def _after_evaluation(recorder: Recorder) -> tuple[Any, str, Any]:
    """What has the first backward pass of a trace gather what the first one after an evaluation does.

    FSDP2 notes each forward pass until a backward pass ends, and an evaluation has none. So what is used first seems to
    follow on what was used last, which is gathered ahead for nothing (``FSDPParamGroup._backward_prefetch``).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    prefetch = FSDPParamGroup._backward_prefetch

    def prefetched(group: Any) -> None:
        used_first = group._post_forward_indices[-1:] == [0]
        prefetch(group)
        if used_first and recorder.segments[-1].startswith("0:"):
            with _after_evaluation_alone():
                group._prefetch_unshard(group.comm_ctx.post_forward_order[-1], "backward")

    return FSDPParamGroup, "_backward_prefetch", prefetched


def _after_evaluation_alone() -> contextlib.AbstractContextManager[None]:
    """What runs in here takes memory, which has its own name on the tape, but no time in most steps."""
    new = Recorder._new_block

    def named(recorder: Recorder, size: int, _: str, category: int) -> int:
        return new(recorder, size, AFTER_EVALUATION, category)

    untimed = [(Recorder, name, lambda *_: None) for name in ("_send", "_count")]
    return replacing([*untimed, (Recorder, "_new_block", named)])


def _address(tensor: torch.Tensor) -> int:
    """What tells storages apart: Accelerate finds an optimizer's parameters again by it."""
    address: int = tensor.untyped_storage()._cdata
    return address


class FakeReducer(nn.Module):
    """``DistributedDataParallel`` without its reducer, whose buckets are counted apart.

    See :meth:`~autofit.costmodel.tracing.shard_layout.Layout.buckets_bytes`. Where it is to find unused parameters, as
    a Trainer has it do, it hands on copies of what the module returns (``_DDPSink``).
    """

    def __init__(self, module: nn.Module, **given: Any) -> None:
        super().__init__()
        self.module = module
        self.copies = bool(given.get("find_unused_parameters")) and not given.get("static_graph")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.clone, output) if self.copies else output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent in any case."""
        yield


def _real_meshes() -> list[tuple[Any, str, Any]]:
    """What makes a device mesh, in every module that has a name for it: out of all modes, since it reads values."""
    from torch.distributed import device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    mesh, build = device_mesh.DeviceMesh, device_mesh.init_device_mesh
    owners = [one for one in list(sys.modules.values()) if vars(one).get("init_device_mesh") is build]
    methods = [(mesh, name, getattr(mesh, name)) for name in ("__init__", "__getitem__", "_flatten")]
    found = [*((owner, "init_device_mesh", build) for owner in owners), *methods]
    return [(owner, name, _within(_disable_current_modes, function)) for owner, name, function in found]


def _within(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs inside of a context."""

    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return within
