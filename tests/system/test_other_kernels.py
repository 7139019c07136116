"""Kernels that models take from other packages: they are named, and none is launched where tensors have no values."""

import sys
import types

import pytest
import torch

from autofit.system.other_kernels import packages_of, without_launches


@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("transformers.models.qwen3_5.modeling_qwen3_5", {"fla", "causal_conv1d"}),
        ("transformers.models.mamba2.modeling_mamba2", {"mamba_ssm", "causal_conv1d"}),
        ("transformers.models.llama.modeling_llama", set()),
        ("transformers.models.llama.there_is_none", set()),
        ("there_is_none.at_all", set()),
    ],
)
def test_the_packages_of_a_model_are_read_off_its_module(module, packages):
    assert packages_of(module) == packages


class KernelInterface:
    """As Triton's: a kernel is launched as ``kernel[grid](*arguments)``."""

    def run(self, *_arguments, grid):
        raise AssertionError("there is no device")

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)


class Autotuner(KernelInterface):
    """Stands above a kernel, and runs it to find out how it is fastest."""

    configs = ("narrow", "wide")


def test_a_kernel_is_told_of_and_not_launched(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(KernelInterface=KernelInterface))
    told, kernel = [], Autotuner()
    with without_launches(told.append), torch.cuda.device(3):
        kernel[lambda _: (1,)]("a", "b", BLOCK=64)
    assert told == [("a", "b", 64)]
    assert kernel.best_config == "narrow", "who launches one may ask what was chosen"
    with pytest.raises(AssertionError, match="no device"):
        kernel[1,]("a")


def test_without_triton_there_is_nothing_to_launch(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton.runtime.jit", raising=False)
    with without_launches():
        pass
