"""Accelerate's paths of several GPUs on a CPU, over gloo: FSDP2 and hybrid sharding as it makes them of its YAML.

Loaded by a fork server as one of its modules. Accelerate looks for FSDP under a distributed type of a GPU only, and a
Trainer's ``use_cpu`` takes another way to the process group: both are told that the CPU is such a device.
DistributedDataParallel is not, which wants no device of a CPU.
PyTorch's ring attention gets the CPU's kernel.
"""

import importlib
import os

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

from accelerate import state
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

_begin = state.PartialState.__init__
_wrap = DistributedDataParallel.__init__


def begin(self, *_, **options):
    _begin(self, **{**options, "cpu": False})


def backend(*_, **__):
    return ("gloo", DistributedType.MULTI_GPU) if "LOCAL_RANK" in os.environ else (None, DistributedType.NO)


def wrap(self, module, **options):
    _wrap(self, module, **{**options, "device_ids": None, "output_device": None})


state.PartialState.__init__ = begin
state.PartialState._prepare_backend = backend
DistributedDataParallel.__init__ = wrap
for owner, name, new in importlib.import_module("autofit.strategies.parallel.context").on_cpu():
    setattr(owner, name, new)
