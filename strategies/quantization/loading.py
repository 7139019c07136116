"""Models whose weights are quantized: what loads pretrained ones, and random ones as loading leaves them."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.recipe import TensorCache

_BLOCK, _OUTER_BLOCK = 64, 256  # bitsandbytes.nn.Params4bit; bitsandbytes.functional.quantize_4bit


def quantization_config(value: str, compute: str, storage: str = "uint8", kept: tuple[str, ...] = ()) -> Any:
    """Transformers' config of a value.

    Args:
        value: How weights are quantized.
        compute: Names the dtype that products compute in.
        storage: Names the dtype that packed 4-bit weights are kept in; FSDP2 shards floats only.
        kept: The modules that are left as they are; those that transformers leaves by itself where none are given.
    """
    import transformers

    if value == "int8_torchao":
        torchao: Any = import_module("torchao.quantization")
        with_torchao: Any = transformers.TorchAoConfig
        return with_torchao(torchao.Int8WeightOnlyConfig(), modules_to_not_convert=list(kept) or None)
    config: Any = transformers.BitsAndBytesConfig
    if value == "int8":
        return config(load_in_8bit=True, llm_int8_skip_modules=list(kept) or None)
    return config(
        llm_int8_skip_modules=list(kept) or None,  # whatever the bits
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def load_arguments(
    value: str, compute: str, *, on_cpu: bool, storage: str = "uint8", kept: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What ``from_pretrained`` is given: it quantizes weights as it loads them, on the device that will train."""
    place = {"": "cpu" if on_cpu else int(os.environ.get("LOCAL_RANK", "0"))}
    return {"quantization_config": quantization_config(value, compute, storage, kept), "device_map": place}


def made_as_said(said: Any) -> Callable[[Callable[[], PreTrainedModel], bool], PreTrainedModel] | None:
    """What makes a model of random weights as a ``quantization_config`` would have it loaded; see ``Technique``."""
    import transformers
    from transformers.quantizers.auto import AutoQuantizationConfig

    from autofit.contract.recipe import TensorCache

    config: Any = said
    if isinstance(said, dict):
        named = str(said.get("quant_method", "")).startswith("bitsandbytes")
        if not named and not said.get("load_in_4bit") and not said.get("load_in_8bit"):
            return None
        config = AutoQuantizationConfig.from_dict(said)
    if not isinstance(config, transformers.BitsAndBytesConfig) or not (config.load_in_4bit or config.load_in_8bit):
        return None
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise InputError(
            "the script keeps weights in 16 bits, and has them rounded to 8 in each step (llm_int8_has_fp16_weight)",
            hint="leave that out: an adapter trains on weights that stay in 8 bits",
        )

    def made(make: Callable[[], PreTrainedModel], draws: bool) -> PreTrainedModel:
        model = random_model(config, make, on_cpu=True, cache=TensorCache(), zeros=not draws, moves=draws)
        return keep_as_loaded(model)

    return made


def random_model(
    config: Any,
    make: Callable[[], PreTrainedModel],
    *,
    on_cpu: bool,
    cache: TensorCache,
    zeros: bool = False,
    moves: bool = False,
) -> PreTrainedModel:
    """A model with random weights as ``from_pretrained`` would have loaded it.

    Linear layers are never made in full: each is quantized from one random matrix of its shape, so that no more than
    one of them is there at a time, and none has to be quantized twice.

    Args:
        config: How, a ``BitsAndBytesConfig``.
        make: Makes the plain model.
        on_cpu: Whether the model will train there.
        cache: Holds the matrices from trial to trial.
        zeros: Whether quantized weights are zeros instead.
        moves: Whether it is moved to its device later, so that a buffer would not be the table that it stands for.
    """
    import torch
    from bitsandbytes.nn import modules
    from transformers.quantizers.auto import AutoHfQuantizer

    layers: Any = modules
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    device = _device(on_cpu=on_cpu)
    with torch.device(device):
        with linear_layers_without_weights():
            model: Any = make()
        dtype = model.dtype
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
        known: dict[tuple[int, int], nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, layers.Linear4bit):
                _fill_4bit(module, known, dtype, cache, zeros=zeros)
                if not moves:
                    _count_tables(module)
            elif isinstance(module, layers.Linear8bitLt):
                _fill_8bit(module, known, dtype, cache, zeros=zeros)
                if moves:
                    module.__class__ = _moving()
                else:
                    module.register_buffer("scales", module.weight.SCB, persistent=False)
            elif device.type != "meta" and any(one.is_meta for one in module.parameters(recurse=False)):
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)  # noqa: SLF001 - as the model itself does
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    built: PreTrainedModel = model
    return built


def keep_as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """Keep evaluation from packing 4-bit weights anew, as bitsandbytes does on a CPU with AVX-512 for bfloat16.

    Packed weights have no gradient, so that no training step may follow; and where a width is no multiple of 64,
    packing fails (``bitsandbytes.nn.Linear4bit.forward`` and ``matmul_4bit`` of 0.50). Traces of a GPU run on the CPU.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - declared by bitsandbytes alone
    return model


def random_torchao_model(
    config: Any, make: Callable[[], PreTrainedModel], *, on_cpu: bool, cache: TensorCache
) -> PreTrainedModel:
    """The same with torchao's weights; the config is a ``TorchAoConfig``."""
    import torch
    from torch import nn
    from transformers.quantizers.auto import AutoHfQuantizer

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
                known[shape] = _of_torchao_cached(shape, model.dtype, lambda it: quantize(it, config.quant_type), cache)
            module.weight = nn.Parameter(known[shape].detach().clone(), requires_grad=False)
            _fill_bias(module, model.dtype)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    built: PreTrainedModel = model
    return built


def _of_torchao_cached(
    shape: tuple[int, int], dtype: torch.dtype, quantize: Callable[[nn.Module], None], cache: TensorCache
) -> torch.Tensor:
    """A random matrix in torchao's 8 bits, whose tensors are cached."""
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

    held = made() if _nowhere() else cache.tensors(_name("int8_torchao", shape, dtype), made)
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
    """What a cached matrix is called: all that it depends on."""
    return f"{value}-{shape[0]}x{shape[1]}-{str(dtype).removeprefix('torch.')}"


def _nowhere() -> bool:
    """Whether what is made now has no storage."""
    import torch

    return torch.get_default_device().type == "meta"


def _fill_bias(module: nn.Linear, dtype: torch.dtype) -> None:
    import torch
    from torch import nn

    if module.bias is not None:
        module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=dtype))


def _fill_4bit(
    module: Any, known: dict[tuple[int, int], Any], dtype: torch.dtype, cache: TensorCache, *, zeros: bool
) -> None:
    """Give a layer random weights in 4 bits, or zeros."""
    import torch
    from bitsandbytes.nn import modules

    params: Any = modules.Params4bit
    shape = module.out_features, module.in_features
    asked = {
        name: getattr(module.weight, name)
        for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    }
    if shape in known:
        weight = copy.deepcopy(known[shape])
    elif zeros or _nowhere():
        storage = asked["quant_storage"]
        packed = _zeros(-(-shape[0] * shape[1] // (2 * storage.itemsize)), 1, dtype=storage)
        state = _zero_state(torch.Size(shape), asked["quant_type"], dtype, nested=asked["compress_statistics"])
        weight = params(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **asked)
    else:

        def made() -> dict[str, torch.Tensor]:
            value = _random(*shape, dtype)
            whole = params(value, requires_grad=False, **asked).to(value.device)
            return {"weight": whole.data, **whole.quant_state.as_dict(packed=True)}

        wide = "" if asked["quant_storage"] == torch.uint8 else "-stored-wide"
        kind = f"{asked['quant_type']}{'' if asked['compress_statistics'] else '-plain'}{wide}"
        held = cache.tensors(_name(kind, shape, dtype), made)
        data = held.pop("weight")
        weight = known[shape] = params.from_prequantized(data, held, device=data.device)
    weight.module = module
    module.weight, module.quant_state = weight, weight.quant_state
    _fill_bias(module, dtype)


def _zeros(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros that take no memory under ``large_weights_left_zero``, which ``torch.zeros`` writes."""
    import torch

    return torch.empty(*shape, dtype=dtype).zero_()


def _zero_state(shape: torch.Size, kind: str, dtype: torch.dtype, *, nested: bool) -> Any:
    """What belongs to zeros in 4 bits: their scales, which may be quantized too, and what the bits stand for."""
    import torch
    from bitsandbytes import functional

    state_of: Any = functional.QuantState
    blocks = -(-shape[0] * shape[1] // _BLOCK)
    given = {"shape": shape, "code": torch.zeros(16), "blocksize": _BLOCK, "quant_type": kind, "dtype": dtype}
    if not nested:
        return state_of(absmax=_zeros(blocks), **given)
    inner = state_of(
        absmax=_zeros(-(-blocks // _OUTER_BLOCK)),
        code=torch.zeros(256),
        blocksize=_OUTER_BLOCK,
        dtype=torch.float32,
    )
    return state_of(absmax=_zeros(blocks, dtype=torch.uint8), offset=torch.zeros(()), state2=inner, **given)


def _count_tables(module: Any) -> None:
    """Keep what belongs to a layer's weights in 4 bits as buffers, too, so that it is counted."""
    state = module.quant_state
    tables = {"absmax": state.absmax, "code": state.code}
    if state.nested:
        inner = state.state2
        tables |= {"offset": state.offset, "nested_absmax": inner.absmax, "nested_code": inner.code}
    for name, tensor in tables.items():
        module.register_buffer(name, tensor, persistent=False)


def _fill_8bit(
    module: Any, known: dict[tuple[int, int], Any], dtype: torch.dtype, cache: TensorCache, *, zeros: bool
) -> None:
    """Give a layer random weights in 8 bits, or zeros."""
    import torch
    from bitsandbytes.nn import modules

    params: Any = modules.Int8Params
    shape = module.out_features, module.in_features
    device = torch.get_default_device()
    if zeros or _nowhere():
        data, scales = _zeros(*shape, dtype=torch.int8), _zeros(shape[0], dtype=torch.float32)
    else:
        if shape not in known:

            def made() -> dict[str, torch.Tensor]:
                whole = params(_random(*shape, dtype).cpu(), requires_grad=False).to(device)  # quantized as it moves
                return {"weight": whole.data, "scales": whole.SCB}

            held = cache.tensors(_name("int8", shape, dtype), made)
            known[shape] = held["weight"], held["scales"]
        data, scales = (tensor.clone() for tensor in known[shape])
    module.weight = params(data, requires_grad=False, CB=data, SCB=scales)
    _fill_bias(module, dtype)


@functools.cache
def _moving() -> type:
    """A layer in 8 bits whose tables move with its weight.

    Bitsandbytes 0.50 leaves them behind where a model moves that the layer is in: ``torch.nn.Module.to`` changes a
    weight in place, and drops what ``Int8Params.to`` makes.
    """
    from bitsandbytes.nn import modules

    layers: Any = modules

    class Linear8bitLt(layers.Linear8bitLt):  # type: ignore[misc]
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            super()._apply(*args, **kwargs)
            for holder in (self.weight, self.state):  # the second from the first forward pass on
                if holder.CB is not None:
                    holder.CB, holder.SCB = self.weight.data, holder.SCB.to(self.weight.device)
            return self

    return Linear8bitLt
