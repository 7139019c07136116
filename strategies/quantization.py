"""Quantization: the frozen weights that an adapter is trained on, in fewer bits.

- ``nf4``: four bits a weight, in blocks of 64 whose scales are quantized too: about 0.52 bytes a weight. Each product
  makes a copy of its weight in the dtype that it computes in, and lets go of it. Dettmers et al., "QLoRA"
  (arXiv 2305.14314).
- ``int8``: eight bits a weight and one scale a row. On CUDA the products are of 8-bit integers, but for the columns
  with outliers; on a CPU the weight is copied as above. Dettmers et al., "LLM.int8()" (arXiv 2208.07339).
- ``int8_torchao``: the same bytes, by torchao's ``Int8WeightOnlyConfig``: only the weight is rounded, and what it is
  multiplied with is not. Autograd keeps the copies until the backward pass, so that it saves memory under
  ``checkpointing`` alone. ``int4_torchao`` is known, and withheld: transformers trains no adapter on it.

Saves: 1.5 (nf4) or 1 (int8) of the 2 bytes that a frozen 16-bit weight has, 3.5 or 3 of the 4 of a float32 one. Costs:
making the copies, in the forward and again in the backward pass; the weights lose digits. Random weights have no
outliers, trained ones have some: ``int8`` is a little slower on them than it was measured.

Only linear layers are quantized: embeddings, norms and the head are not, and keep the dtype that the precision says.
That is what scripts for QLoRA get: under ``bf16`` they are float32 (as ``peft.prepare_model_for_kbit_training`` leaves
them) and products compute in bfloat16, under ``bf16_weights`` they are bfloat16.

One random matrix of each shape is quantized once, kept for the trials after it, and copied to the layers of that shape.

Sources: the papers above; ``bitsandbytes.autograd``; ``transformers.BitsAndBytesConfig``, ``TorchAoConfig``;
``Int8Tensor`` of torchao 0.18. Not covered: stacked weights of experts, which are no linear layers; DoRA and (IA)3 on
quantized weights; ``int8`` in a plain loop; GPTQ and AWQ; a trace of ``int8_torchao``, whose tensors fake ones can't
stand for; the fused 4-bit kernels of bitsandbytes for few tokens, which make no copy: a trace always sees one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.observation import dtype_name
from autofit.contract.technique import Choice, Kind, Part, Prior, Technique, replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Kept, Recipe
    from autofit.contract.trace import TraceRecorder

_BLOCK, _OUTER_BLOCK = 64, 256  # bitsandbytes.nn.Params4bit; bitsandbytes.functional.quantize_4bit
_SIXTEEN = {"bf16": "bfloat16", "fp16": "float16"}
_AUTOCAST = {"bf16", "fp16", "fp8"}
_TORCHAO = {"int8_torchao", "int4_torchao"}


class Quantization(Technique):
    """In how many bits the frozen weights are kept."""

    name = "quantization"
    baseline = "none"
    packages = {"bitsandbytes": "0.50", "peft": "0.18", "torchao": ""}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        lacking = self.lacks(facts, "bitsandbytes", "peft")

        def choice(value: str, reason: str, *, offered: bool) -> Choice:
            if lacking is not None:
                return Choice(value, Kind.METHOD, "withheld", lacking)
            return Choice(value, Kind.METHOD, "offered" if offered else "on_request", reason)

        on_cpu = facts.hardware.device == "cpu"
        int8 = choice(
            "int8", "one byte a frozen weight, for an adapter: slower than nf4 on most devices", offered=False
        )
        if facts.workload.launch_path == "loop" and lacking is None:
            kept = (
                "bitsandbytes lets go of its layers' inputs with the loss, which a plain loop keeps for a step too long"
            )
            int8 = Choice("int8", Kind.METHOD, "withheld", kept)
        return (
            Choice("none", Kind.EXACT, "offered", "weights are kept in the dtype that the precision says"),
            choice("nf4", "half a byte a frozen weight, for an adapter", offered=not on_cpu),
            int8,
            *_of_torchao(facts),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        adapter = str(others["adapter"])
        if value in _TORCHAO and others["precision"] in _AUTOCAST:
            return "autocast passes torchao's weights by, and what they are multiplied with stays float32"
        if value == "none" or "lora" in adapter:
            return None
        if adapter == "none":
            return "quantized weights can't be trained: they need an adapter"
        return f"{adapter.partition(':')[0]} on quantized weights is not covered"

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "none":
            return
        compute = _SIXTEEN.get(recipe.mixed_precision, recipe.weights_dtype)
        on_cpu = recipe.facts.hardware.device == "cpu"
        recipe.load_arguments.append(functools.partial(load_arguments, str(value), compute, on_cpu=on_cpu))
        make = random_torchao_model if value in _TORCHAO else functools.partial(random_model, str(value), compute)
        recipe.random_model = lambda plain: make(plain, on_cpu=on_cpu, kept=recipe.kept)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        return Emission(script=() if value == "none" else (f"load the weights in {value}: model = setup.model(...)",))

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if part == "optimizer":
            return self.baseline
        return None if value in _TORCHAO else value

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        if value == "none" or value in _TORCHAO:
            return contextlib.nullcontext()
        return traced_layers(recorder, on_cuda=facts.hardware.device == "cuda")

    def observe(self, ran: Ran) -> Seen:
        return {"weight": _quantized(ran.products[0]) if ran.products else None}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted = {
            "none": None, "nf4": "nf4 twice", "int8": "int8", "int8_torchao": "Int8Tensor", "int4_torchao": "Int4Tensor"
        }[str(value)]  # fmt: skip
        found = seen.get("weight")
        if found != wanted:
            return f"a linear layer's weight is quantized to {found or 'nothing'}, not {wanted or 'nothing'}"
        return None

    def changes(self, value: Value, facts: Facts) -> str | None:
        experts = " Experts are no linear layers, and stay as they are." if facts.model.has_experts else ""
        said = {
            "none": None,
            "nf4": "The frozen weights of linear layers are rounded to 4 bits (NF4, double quantization).",
            "int8": "The frozen weights of linear layers are rounded to 8 bits, and so is what they are multiplied "
            "with (LLM.int8).",
            "int8_torchao": "The frozen weights of linear layers are rounded to 8 bits, with one scale a row.",
            "int4_torchao": "The frozen weights of linear layers are rounded to 4 bits, in groups of 128.",
        }[str(value)]
        return said + experts if said else None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """Copies of the weights cost the same whatever the batch, so that large batches hide them."""
        return {
            "none": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "nf4": Prior(time=(0.15, 0.15), memory=(-0.6, 0.3)),
            "int8": Prior(time=(0.3, 0.25), memory=(-0.4, 0.3)),
            "int8_torchao": Prior(time=(0.2, 0.25), memory=(-0.2, 0.4)),
            "int4_torchao": Prior(time=(0.2, 0.25), memory=(-0.4, 0.4)),
        }[str(value)]


def _quantized(product: nn.Module) -> str | None:
    """How the weight of a linear layer is quantized; ``twice`` where its scales are, too."""
    weight: Any = getattr(product, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return f"{state.quant_type}{' twice' if state.nested else ''}"
    if type(weight).__module__.startswith("torchao."):
        return type(weight).__name__
    return None if weight is None or weight.dtype.is_floating_point else dtype_name(weight)


def _of_torchao(facts: Facts) -> tuple[Choice, ...]:
    """Torchao's choices."""
    why = Quantization.lacks(facts, "torchao", "peft")
    if facts.model.conv1d:
        why = why or f"the layers of {facts.model.model_type} are Conv1D, which torchao does not quantize"
    int8 = Choice(
        "int8_torchao",
        Kind.METHOD,
        "withheld" if why else "on_request",
        why or "one byte a frozen weight, for an adapter; saves memory beside checkpointing alone",
    )
    untrained = "transformers trains no adapter on torchao's 4-bit weights (its quantizer is not trainable)"
    return int8, Choice("int4_torchao", Kind.METHOD, "withheld", untrained)


# -- loading ------------------------------------------------------------------------------------------------------


def quantization_config(value: str, compute: str) -> Any:
    """Transformers' config of a value; ``compute`` names the dtype that products compute in."""
    import transformers

    if value == "int8_torchao":
        torchao: Any = import_module("torchao.quantization")
        with_torchao: Any = transformers.TorchAoConfig
        return with_torchao(torchao.Int8WeightOnlyConfig())
    config: Any = transformers.BitsAndBytesConfig
    if value == "int8":
        return config(load_in_8bit=True)
    return config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def load_arguments(value: str, compute: str, *, on_cpu: bool) -> dict[str, Any]:
    """What ``from_pretrained`` is given: it quantizes weights as it loads them, on the device that will train."""
    place = {"": "cpu" if on_cpu else int(os.environ.get("LOCAL_RANK", "0"))}
    return {"quantization_config": quantization_config(value, compute), "device_map": place}


def random_model(
    value: str, compute: str, make: Callable[[], PreTrainedModel], *, on_cpu: bool, kept: Kept
) -> PreTrainedModel:
    """A model with random weights as ``from_pretrained`` would have loaded it.

    Linear layers are never made in full: each is quantized from one random matrix of its shape, so that no more than
    one of them is there at a time, and none has to be quantized twice.

    Args:
        value: How.
        compute: Names the dtype that products compute in.
        make: Makes the plain model.
        on_cpu: Whether the model will train there.
        kept: Holds the matrices from trial to trial.
    """
    import torch
    from bitsandbytes.nn import modules
    from transformers.quantizers.auto import AutoHfQuantizer

    layers: Any = modules
    quantizer = AutoHfQuantizer.from_config(quantization_config(value, compute), pre_quantized=False)
    device = _device(on_cpu=on_cpu)
    with torch.device(device):
        with linear_layers_without_weights():
            model: Any = make()
        dtype = model.dtype
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
        known: dict[tuple[int, int], nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, layers.Linear4bit):
                _fill_4bit(module, known, dtype, kept)
            elif isinstance(module, layers.Linear8bitLt):
                _fill_8bit(module, known, dtype, kept)
            elif device.type != "meta" and any(one.is_meta for one in module.parameters(recurse=False)):
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)  # noqa: SLF001 - as the model itself does
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    built: PreTrainedModel = model
    return built


def random_torchao_model(make: Callable[[], PreTrainedModel], *, on_cpu: bool, kept: Kept) -> PreTrainedModel:
    """The same with torchao's weights."""
    import torch
    from torch import nn
    from transformers.quantizers.auto import AutoHfQuantizer

    config = quantization_config("int8_torchao", "float32")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantize: Any = import_module("torchao.quantization").quantize_
    device = _device(on_cpu=on_cpu)
    with torch.device(device):
        with linear_layers_without_weights():
            model: Any = make()
        quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
        known: dict[tuple[int, int], Any] = {}
        for name, module in model.named_modules():
            if not any(one.is_meta for one in module.parameters(recurse=False)):
                continue
            if not isinstance(module, nn.Linear) or not quantizer.param_needs_quantization(model, f"{name}.weight"):
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)  # noqa: SLF001 - as the model itself does
                continue
            shape = module.out_features, module.in_features
            if shape not in known:
                known[shape] = _of_torchao_kept(shape, model.dtype, lambda it: quantize(it, config.quant_type), kept)
            module.weight = nn.Parameter(known[shape].detach().clone(), requires_grad=False)
            _fill_bias(module, model.dtype)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    built: PreTrainedModel = model
    return built


def _of_torchao_kept(
    shape: tuple[int, int], dtype: torch.dtype, quantize: Callable[[nn.Module], None], kept: Kept
) -> torch.Tensor:
    """A random matrix in torchao's 8 bits, whose tensors are kept."""
    import torch
    from torch import nn

    def quantized(matrix: torch.Tensor) -> Any:
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        quantize(layer)
        return layer.weight.detach()

    def made() -> dict[str, torch.Tensor]:
        whole = quantized(_random(*shape, dtype))
        return {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}

    held = made() if _nowhere() else kept.tensors(_name("int8_torchao", shape, dtype), made)
    empty = quantized(torch.empty(shape, dtype=dtype, device="meta"))
    whole: torch.Tensor = type(empty).__tensor_unflatten__(held, empty.__tensor_flatten__()[1], None, None)
    return whole


def _device(*, on_cpu: bool) -> torch.device:
    """Where random weights are made: where they will train, since a Trainer does not move them there."""
    import torch

    device = torch.get_default_device()
    if device.type == "cpu" and not on_cpu and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


@contextlib.contextmanager
def linear_layers_without_weights() -> Iterator[None]:
    """Linear layers that are made in here have shapes only."""
    from torch import nn

    init = nn.Linear.__init__

    @functools.wraps(init)
    def on_meta(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        if type(self) is nn.Linear and len(args) < 4:  # the fourth is a device
            kwargs["device"] = "meta"
        init(self, *args, **kwargs)

    nn.Linear.__init__ = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__ = init  # type: ignore[method-assign]


def _random(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in every trial, whatever else is random in it."""
    import torch

    device = torch.get_default_device()
    numbers = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    return torch.empty(outputs, inputs, dtype=dtype).normal_(std=0.02, generator=numbers)


def _name(value: str, shape: tuple[int, int], dtype: torch.dtype) -> str:
    """What a kept matrix is called: all that it depends on."""
    return f"{value}-{shape[0]}x{shape[1]}-{str(dtype).removeprefix('torch.')}"


def _nowhere() -> bool:
    """Whether what is made now has no storage."""
    import torch

    return torch.get_default_device().type == "meta"


def _fill_bias(module: nn.Linear, dtype: torch.dtype) -> None:
    import torch
    from torch import nn

    if module.bias is not None:
        module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=dtype), requires_grad=False)


def _fill_4bit(module: Any, known: dict[tuple[int, int], Any], dtype: torch.dtype, kept: Kept) -> None:
    """Give a layer random weights in 4 bits; what belongs to them is kept as buffers, so that it is counted."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import modules

    params: Any = modules.Params4bit
    state_of: Any = functional.QuantState
    shape = module.out_features, module.in_features
    asked = {
        name: getattr(module.weight, name)
        for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    }
    if shape in known:
        weight = copy.deepcopy(known[shape])
    elif _nowhere():
        blocks = -(-shape[0] * shape[1] // _BLOCK)
        state = state_of(
            absmax=torch.empty(blocks, dtype=torch.uint8), shape=torch.Size(shape), code=torch.empty(16),
            blocksize=_BLOCK, quant_type="nf4", dtype=dtype, offset=torch.empty(()),
            state2=state_of(absmax=torch.empty(-(-blocks // _OUTER_BLOCK)), code=torch.empty(256),
                              blocksize=_OUTER_BLOCK, dtype=torch.float32),
        )  # fmt: skip
        packed = torch.empty(-(-shape[0] * shape[1] // 2), 1, dtype=torch.uint8)
        weight = params(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **asked)
    else:

        def made() -> dict[str, torch.Tensor]:
            value = _random(*shape, dtype)
            whole = params(value, requires_grad=False, **asked).to(value.device)
            return {"weight": whole.data, **whole.quant_state.as_dict(packed=True)}

        held = kept.tensors(_name("nf4", shape, dtype), made)
        data = held.pop("weight")
        weight = known[shape] = params.from_prequantized(data, held, device=data.device)
    weight.module = module
    module.weight, module.quant_state = weight, weight.quant_state
    _fill_bias(module, dtype)
    for name, tensor in _tables(weight.quant_state).items():
        module.register_buffer(name, tensor, persistent=False)


def _tables(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a quantization with quantized scales."""
    inner = state.state2
    return {
        "absmax": state.absmax,
        "code": state.code,
        "offset": state.offset,
        "nested_absmax": inner.absmax,
        "nested_code": inner.code,
    }


def _fill_8bit(module: Any, known: dict[tuple[int, int], Any], dtype: torch.dtype, kept: Kept) -> None:
    """Give a layer random weights in 8 bits."""
    import torch
    from bitsandbytes.nn import modules

    params: Any = modules.Int8Params
    shape = module.out_features, module.in_features
    device = torch.get_default_device()
    if _nowhere():
        data, scales = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0])
    else:
        if shape not in known:

            def made() -> dict[str, torch.Tensor]:
                whole = params(_random(*shape, dtype).cpu(), requires_grad=False).to(device)  # quantized as it moves
                return {"weight": whole.data, "scales": whole.SCB}

            held = kept.tensors(_name("int8", shape, dtype), made)
            known[shape] = held["weight"], held["scales"]
        data, scales = (tensor.clone() for tensor in known[shape])
    module.weight = params(data, requires_grad=False, CB=data, SCB=scales)
    _fill_bias(module, dtype)
    module.register_buffer("scales", scales, persistent=False)


# -- tracing ------------------------------------------------------------------------------------------------------


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
        stand_ins[ops.int8_mixed_scaled_mm.default] = _product_of_integers
    counters = {ops.gemm_4bit: _flops_4bit, ops.int8_mixed_scaled_mm: _flops_8bit}
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
        state.state2 = copy.copy(state.state2)
        state.absmax, state.code, state.offset = module.absmax, module.code, module.offset
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
    """Twice the scales in float32, and the whole weight in the dtype of its input."""
    given, count, block = args[0], args[2][0] * args[2][1], args[4]
    scales = 4 * -(-count // block)
    held = (scales, scales, count * given.element_size())
    with recorder.holding(*held, name="the weight in full"):
        recorder.passes(*held)
        result: torch.Tensor = func(*args, **kwargs)
        recorder.follow(result, func, args)
    return result


def _quantized_rows(recorder: TraceRecorder, func: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    """Rows in 8 bits, their scales, and no outliers: magnitudes are compared with the threshold."""
    import torch

    given = args[0]
    with recorder.holding(given.nbytes, given.numel(), name="outliers"):
        recorder.passes(given.nbytes, given.numel())
        made = (
            torch.empty(given.shape, dtype=torch.int8),
            torch.empty(given.numel() // given.shape[-1]),
            torch.empty(0, dtype=torch.int64),
        )
        for tensor in made:
            recorder.follow(tensor, func, args)
    return made


def _product_of_integers(recorder: TraceRecorder, func: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    """A product in 32-bit integers, which becomes float16, which becomes the dtype that is wanted."""
    import torch

    given, rows, weight = args[:3]
    count = rows.numel() // rows.shape[-1] * weight.shape[0]
    with recorder.holding(4 * count, 2 * count, name="products of integers"):
        recorder.passes(4 * count, 2 * count)
        result = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=given.dtype)
        recorder.follow(result, func, args)
    return result, torch.empty(0, dtype=given.dtype)


def _flops_4bit(given: torch.Tensor, _: Any, shape: list[int], *__: Any, **___: Any) -> float:
    return 2.0 * given.numel() * shape[0]


def _flops_8bit(given: torch.Tensor, _: Any, weight: torch.Tensor, *__: Any, **___: Any) -> float:
    return 2.0 * given.numel() * weight.shape[0]
