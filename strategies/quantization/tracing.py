"""What stands in for bitsandbytes' kernels while a trace runs."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from autofit.contract.trace import TraceRecorder


@contextlib.contextmanager
def traced_layers(recorder: TraceRecorder, *, on_cuda: bool) -> Iterator[None]:
    """Run bitsandbytes' layers on tensors that may be fake, and show what their kernels take for themselves.

    The layers, and what they keep for the backward pass, are bitsandbytes' own. Source: ``_dequant_linear_fallback``,
    ``int8_vectorwise_quant`` and ``int8_mm_dequant`` in ``bitsandbytes/backends/cuda/ops.py``.
    """
    import torch
    from bitsandbytes.nn import modules
    from torch.utils.flop_counter import flop_registry

    ops: Any = torch.ops.bitsandbytes
    stand_ins: dict[Any, Any] = {ops.gemm_4bit.default: _gemm_4bit}
    if on_cuda:
        stand_ins[ops.int8_vectorwise_quant.default] = _quantized_rows
        stand_ins[ops.int8_mixed_scaled_mm.default] = _product_beside_outliers
        stand_ins[ops.int8_scaled_mm.default] = _product_of_integers
    counters = {
        ops.gemm_4bit: _flops_4bit,
        ops.int8_mixed_scaled_mm: lambda _, *given, **__: _flops_8bit(*given),
        ops.int8_scaled_mm: _flops_8bit,
    }
    layers: Any = modules
    replaced: list[tuple[Any, str, Any]] = []
    if recorder.fake:
        replaced = [
            (layers, "fix_4bit_weight_quant_state_from_module", _tables_of_its_module),
            (layers.Linear8bitLt, "forward", functools.partialmethod(_forward_8bit, on_cuda=on_cuda)),
        ]
    recorder.stand_ins.update(stand_ins)
    flop_registry.update(counters)
    try:
        with replacing(replaced):
            yield
    finally:
        for counter in counters:
            del flop_registry[counter]


def _tables_of_its_module(module: Any) -> None:
    """A fake weight has lost its tables; its module has them, as fake as the weight."""
    if getattr(module.weight, "quant_state", None) is None:
        state = copy.copy(module.quant_state)
        state.absmax, state.code = module.absmax, module.code
        if state.nested:
            state.offset, state.state2 = module.offset, copy.copy(state.state2)
            state.state2.absmax, state.state2.code = module.nested_absmax, module.nested_code
        module.weight.quant_state = state


def _forward_8bit(module: Any, x: torch.Tensor, *, on_cuda: bool) -> torch.Tensor:
    """``Linear8bitLt.forward`` of a weight that is quantized already, with the product of the device that is traced."""
    from bitsandbytes.autograd import _functions

    functions: Any = _functions
    state = module.state
    state.is_training = module.training
    state.CB, state.SCB = module.weight.data, module.scales
    if module.bias is not None and module.bias.dtype != x.dtype:
        module.bias.data = module.bias.data.to(x.dtype)
    product = functions.MatMul8bitLt if on_cuda else functions.MatMul8bitFp
    result: torch.Tensor = product.apply(x, module.weight, None, module.bias, state)
    return result


def _gemm_4bit(recorder: TraceRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Twice the scales in float32, where they are quantized, and the whole weight in the dtype of its input."""
    given, count, block = args[0], args[2][0] * args[2][1], args[4]
    nested = kwargs.get("absmax_8bit", args[7] if len(args) > 7 else None) is not None
    scales = 4 * -(-count // block)
    held = (*((scales, scales) if nested else ()), count * given.element_size())
    with recorder.holding(*held, name="the weight in full"):
        recorder.passes(*held)
        result: torch.Tensor = func(*args, **kwargs)
        recorder.follow(result, func, args)
    return result


def _quantized_rows(recorder: TraceRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows in 8 bits, their scales, and no outliers: magnitudes are compared with the threshold, where there is one."""
    import torch

    given, judged = args[0], bool(kwargs.get("threshold", args[1] if len(args) > 1 else 0.0))
    scales = torch.empty(given.numel() // given.shape[-1], dtype=torch.float32)
    rows = torch.empty(given.shape, dtype=torch.int8)
    outliers = torch.empty(0, dtype=torch.int64) if judged else None
    for tensor in (scales, rows) if outliers is None else (scales, rows, outliers):
        recorder.follow(tensor, func, args)
    if judged:
        with recorder.holding(given.nbytes, given.numel(), name="outliers"):
            recorder.passes(given.nbytes, given.numel())
    return rows, scales, outliers


def _product_beside_outliers(recorder: TraceRecorder, func: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    """A product in integers, and no outliers to multiply."""
    import torch

    given, rows, weight = args[:3]
    product = _product_of_integers(recorder, func, (rows, weight), {"dtype": given.dtype})
    return product, torch.empty(0, dtype=given.dtype)


def _product_of_integers(
    recorder: TraceRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A product in 32-bit integers, which becomes float16, which becomes the dtype that is wanted."""
    import torch

    rows, weight = args[:2]
    wanted = kwargs.get("dtype") or torch.float16
    count = rows.numel() // rows.shape[-1] * weight.shape[0]
    held = (4 * count,) if wanted == torch.float16 else (4 * count, 2 * count)
    with recorder.holding(*held, name="products of integers"):
        recorder.passes(*held)
        result = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=wanted)
        recorder.follow(result, func, args)
    return result


def _flops_4bit(given: torch.Tensor, _: Any, shape: list[int], *__: Any, **___: Any) -> float:
    return 2.0 * given.numel() * shape[0]


def _flops_8bit(rows: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> float:
    return 2.0 * rows.numel() * weight.shape[0]
