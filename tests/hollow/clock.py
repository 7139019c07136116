"""The seconds of PyTorch's kernels on the emulated card, by the laws that ``autofit estimate`` uses.

Called by ``native/laws.cpp``, once for each operator and shape of a process.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch

from autofit.costmodel.seconds.operator_time import Operators
from autofit.costmodel.seconds.step_time import device_seconds
from autofit.costmodel.tracing.operator_table import calls_of
from autofit.costmodel.tracing.trace_request import groups_experts
from autofit.costmodel.tracing.work import work_of
from autofit.machine import gpu_catalogue

DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip
"""By PyTorch's C++ names; of any other type a byte an element is moved."""


@functools.cache
def card() -> gpu_catalogue.Card:
    """The emulated card."""
    described = os.environ["HOLLOW_CARD"].split(":")
    found = gpu_catalogue.matching(described[-1], int(described[0]))
    assert found is not None, described
    return found


def seconds(text: str) -> float:
    """Of an operator that a device works off behind others, with the gap after it.

    Args:
        text: ``{"op": "aten::mm", "overload": "", "tf32": false, "arguments": [...], "results": [...]}``; a tensor is
            ``{"dtype", "sizes", "strides"}``, what is neither number, tensor nor a list of them ``null``.
    """
    given = json.loads(text)
    packet = getattr(torch.ops.aten, given["op"].removeprefix("aten::"))
    func = getattr(packet, given["overload"] or "default")
    # as below autograd: meta tensors, which no mode of the program that is timed sees
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = _split(func, [_value(one) for one in given["arguments"]])
        outputs = [_value(one) for one in given["results"]]
        result = outputs[0] if len(outputs) == 1 else tuple(outputs)
        _, flops, _ = work_of(func, args, kwargs, result, outputs)
        one, _, calls = calls_of(func, args, kwargs, outputs, flops, groups=groups_experts(card().capability))
    return calls * device_seconds(Operators.of([one]).computed_in(tf32=given["tf32"]), card())


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(one) for one in value]
    if not isinstance(value, dict):
        return value
    dtype = DTYPES.get(value["dtype"], torch.uint8)
    return torch.empty_strided(value["sizes"], value["strides"], dtype=dtype, device="meta")


def _split(func: Any, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as a dispatch mode sees them: defaults at the end left out, those by keyword apart."""
    arguments = list(zip(func._schema.arguments, values, strict=True))
    kwargs = {one.name: value for one, value in arguments if one.kwarg_only and value is not None}
    args = [(one, value) for one, value in arguments if not one.kwarg_only]
    while args and args[-1][0].has_default_value() and args[-1][1] == args[-1][0].default_value:
        args.pop()
    return tuple(value for _, value in args), kwargs
