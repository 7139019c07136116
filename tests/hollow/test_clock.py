"""A step on an emulated card takes what the laws of its operators say."""

import math
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from autofit.costmodel.seconds.operator_time import Operators
from autofit.costmodel.seconds.step_time import device_seconds
from autofit.costmodel.tracing.operator_table import operator_of
from autofit.costmodel.tracing.work import work_of
from autofit.machine import gpu_catalogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("HOLLOW_CARD" not in os.environ, reason="runs under python -m tests.hollow"),
]


class Told(TorchDispatchMode):
    """Adds up what the laws say of each operator, told apart from the clock by PyTorch's own dispatch."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        given = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
        is_view = all(one.untyped_storage()._cdata in given for one in tensors) and not func._schema.is_mutable
        if not is_view and all(one.is_cuda for one in tensors):
            _, flops, _ = work_of(func, args, kwargs or {}, result, outputs)
            self.operators.append(operator_of(func, args, kwargs or {}, outputs, flops)[0])
        return result

    def seconds(self, *, tf32=False):
        name, memory = os.environ["HOLLOW_CARD"].split(":")[-1], os.environ["HOLLOW_CARD"].split(":")[0]
        card = gpu_catalogue.matching(name, int(memory))
        return device_seconds(Operators.of(self.operators).computed_in(tf32=tf32), card)


def clocked(run):
    """Seconds on the device's clock, which has five seconds of work in its queue before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ahead = torch.empty(16384, 16384, device="cuda")
    with Told() as told:
        ahead @ ahead
    for _ in range(math.ceil(5 / told.seconds())):
        ahead @ ahead
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


@pytest.mark.parametrize("tf32", [False, True])
def test_a_product_in_float32_is_as_fast_as_the_program_allows(tf32):
    a = torch.empty(4096, 4096, device="cuda")
    had = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with Told() as told:
            a @ a
        assert clocked(lambda: a @ a) == pytest.approx(told.seconds(tf32=tf32), rel=0.01)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = had


def test_a_step_takes_the_sum_of_its_operators():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=8000,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(8000, (4, 512), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's state
    with Told() as told:
        step()
    assert clocked(step) == pytest.approx(told.seconds(), rel=0.02)


def test_a_program_that_is_compiled_compiles_no_clock():
    @torch._dynamo.disable(recursive=False)
    def asks():
        return torch.empty(139, dtype=torch.int32, device="cuda").add_(1)

    ones = torch.ones(139, dtype=torch.int32, device="cuda")
    assert len(torch.compile(lambda more: asks() + more, backend="eager")(ones)) == 139
