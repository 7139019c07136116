"""The recipe: the named slots that techniques fill, and the objects that are built from them.

One recipe is run three times: traced, tried and trained. A slot is either an argument that a file carries
(:class:`~autofit.contract.emission.Emission`) or a piece of code that :func:`autofit.load` applies in the user's
script.
This module imports torch and transformers only inside its functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from autofit.contract.emission import Emission
from autofit.system.tensor_cache import TensorCache as TensorCache  # noqa: PLC0414 - techniques are handed one

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, TrainingArguments

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan

ModelWrap = Callable[["PreTrainedModel"], "PreTrainedModel"]
Collate = Callable[..., Any]
OptimizerWrap = Callable[["torch.optim.Optimizer"], "torch.optim.Optimizer"]


def ground(facts: Facts) -> Emission:
    """What every plan writes, whatever the techniques say: the processes, on the devices that were measured."""
    hardware, nodes = facts.hardware, facts.workload.nodes
    on_cpu = hardware.device == "cpu"
    accelerate: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": facts.workload.processes,
        "use_cpu": on_cpu,
    }
    if hardware.count > 1 and facts.workload.processes == 1 and not on_cpu:
        # without it the process sees every device and a Trainer makes it torch.nn.DataParallel
        accelerate["gpu_ids"] = hardware.visible_id
    script: tuple[str, ...] = ()
    if nodes > 1:  # each machine says on its command line which it is, and where the first one is
        accelerate |= {"rdzv_backend": "static", "same_network": True}
        counted = "--machine_rank counts them from 0, --main_process_ip is the address of the first"
        script = (f"run the launch line on each of the {nodes} machines: {counted}",)
    else:
        accelerate["machine_rank"] = 0
    if facts.workload.processes > 1 and nodes == 1:
        accelerate["main_process_port"] = 0  # a free one, so that two trainings on a machine don't meet
    return Emission(accelerate=accelerate, training_args={"use_cpu": on_cpu}, decides=("cpu",), script=script)


@dataclass(slots=True, kw_only=True)
class Recipe:
    """How one plan loads its model, wraps it, and builds its optimizer, arguments and accelerator.

    Attributes:
        emission: Everything that a file carries, of all techniques together.
        sync_each_batch: Whether gradients are sent in each micro-step; only the loop path reads it here, a Trainer
            reads its argument.
        weights_dtype: Name of the dtype that the parameters are kept in.
        tf32: Whether float32 matrix products may run in TF32; only the loop path reads it here, a Trainer
            reads its argument.
        model_arguments: Further arguments of ``from_config`` and ``from_pretrained``.
        load_arguments: Further arguments of ``from_pretrained``, asked for when a model is loaded.
        random_model: Given what makes the plain model, makes random weights as those arguments would load them.
        spread: Given a model that stands, with storage or without, splits it over the ranks of the world as loading it
            with those arguments does; a trace has it split what it has made.
        tensor_cache: Holds what takes long to make and is the same in every trial; without a folder it holds nothing.
        loader_arguments: Arguments of PyTorch's ``DataLoader`` in place of the script's own; only the loop path reads
            them here, a Trainer reads its arguments.
        collate_wraps: Applied in order to what makes a batch of rows.
        model_wraps: Applied in order to the loaded model.
        optimizer_wraps: Applied in order to the optimizer that the arguments name.
        unpadded: Whether the model leaves out the padding of its batches itself.
        dataset_wraps: Applied in order to the rows that are trained on, each with what makes a batch of them.
        joined_rows: Rows that a loader takes for a micro-batch, where several of the data's are joined to one.
        state: What a technique's own code counts while it runs, by the technique's name; it alone reads it.
        slow_start: What takes long in the first step, in a word, for a trial that is cut off in it.
        product_bits: Mantissa bits of the operands of matrix products, without the leading one; 23 in float32.
        state_bits: Bits of a number of the optimizer's state.
    """

    plan: Plan
    facts: Facts
    emission: Emission = field(default_factory=Emission)
    micro_batch: int = 1
    accumulation: int = 1
    sync_each_batch: bool = False
    weights_dtype: str = "float32"
    tf32: bool = False
    mixed_precision: str = "no"
    model_arguments: dict[str, Any] = field(default_factory=dict)
    load_arguments: list[Callable[[], dict[str, Any]]] = field(default_factory=list)
    random_model: Callable[[Callable[[], PreTrainedModel]], PreTrainedModel] | None = None
    spread: ModelWrap | None = None
    tensor_cache: TensorCache = field(default_factory=TensorCache)
    loader_arguments: dict[str, Any] = field(default_factory=dict)
    collate_wraps: list[Callable[[Collate], Collate]] = field(default_factory=list)
    model_wraps: list[ModelWrap] = field(default_factory=list)
    optimizer_wraps: list[OptimizerWrap] = field(default_factory=list)
    unpadded: bool = False
    dataset_wraps: list[Callable[[Any, Collate], Any]] = field(default_factory=list)
    joined_rows: int | None = None
    state: dict[str, Any] = field(default_factory=dict)
    slow_start: str = ""
    product_bits: int = 23
    state_bits: int = 32

    def add(self, emission: Emission) -> None:
        """Join one technique's emission to what is there; two techniques never write one key."""
        for name in ("accelerate", "training_args"):
            twice = getattr(self.emission, name).keys() & getattr(emission, name).keys()
            if twice:
                raise AssertionError(f"two techniques write {name} {sorted(twice)}")
        self.emission = Emission(
            accelerate={**self.emission.accelerate, **emission.accelerate},
            training_args={**self.emission.training_args, **emission.training_args},
            decides=self.emission.decides + emission.decides,
            script=self.emission.script + emission.script,
        )

    @property
    def sixteen_bits(self) -> Literal["bf16", "fp16"] | None:
        """The format of most products: that of autocast, else that of the weights; ``None`` in float32."""
        of_weights = {"bfloat16": "bf16", "float16": "fp16"}.get(self.weights_dtype)
        found = of_weights if self.mixed_precision == "no" else self.mixed_precision
        return cast('Literal["bf16", "fp16"] | None', found)

    @property
    def loaded_rows(self) -> int:
        """Rows that a loader takes for a micro-batch."""
        return self.micro_batch if self.joined_rows is None else self.joined_rows

    def join_rows(self, rows: int, wrap: Callable[[Any, Collate], Any]) -> None:
        """Have a loader take so many rows for a micro-batch, of which each is several of the data's."""
        self.joined_rows = rows
        self.dataset_wraps.append(wrap)
        arguments = {**self.emission.training_args, "per_device_train_batch_size": rows}
        self.emission = replace(self.emission, training_args=arguments)

    def training_arguments(self, **others: Any) -> TrainingArguments:
        """``TrainingArguments`` with every tuned field, and ``others`` for what is not tuned.

        Raises:
            InputError: One of ``others`` is what the plan says, or no field.
        """
        from transformers import TrainingArguments

        instead = "tune again with --fix to hold a value, or change the field of the returned arguments"
        self.emission.check_beside(others, TrainingArguments, instead)
        return TrainingArguments(**{**self.emission.training_args, **others})

    def model(
        self, source: str | Path | None, *, config: Path, device: str | None = None, others: Mapping[str, Any] = {}
    ) -> PreTrainedModel:
        """The model, wrapped as the plan says.

        Args:
            source: A pretrained model's id or folder; ``None`` builds random weights from ``config``.
            config: Folder that holds the ``config.json``.
            device: Where random weights are made, such as ``cuda:0``; pretrained ones are loaded to the host,
                as a script does.
            others: Arguments of ``from_pretrained`` that no plan sets.
        """
        import torch
        import transformers

        trust = self.facts.model.trust_remote_code
        auto: Any = getattr(transformers, self.facts.model.auto)
        built: PreTrainedModel
        given: dict[str, Any] = {"dtype": getattr(torch, self.weights_dtype), "trust_remote_code": trust}
        given |= self.model_arguments
        if source is None:
            settings = transformers.AutoConfig.from_pretrained(config, trust_remote_code=trust)
            make = functools.partial(auto.from_config, settings, **given)
            with torch.device(device or "cpu"), without_drawing() if device == "meta" else quick_random_weights():
                built = make() if self.random_model is None else self.random_model(make)
            if self.spread is not None and device != "meta":
                built = self.spread(built)
        else:
            given |= {name: value for arguments in self.load_arguments for name, value in arguments().items()}
            built = auto.from_pretrained(source, **others, **given)
        built.config.use_cache = False  # keys and values of past tokens are for generation
        for wrap in self.model_wraps:
            built = wrap(built)
        return built

    def dataset(self, own: Any, collate: Collate) -> Any:
        """The rows to train on, as the plan says, given what makes a batch of them."""
        for wrap in self.dataset_wraps:
            own = wrap(own, collate)
        return own

    def collator(self, own: Collate) -> Collate:
        """What makes a batch of rows, wrapped as the plan says."""
        for wrap in self.collate_wraps:
            own = wrap(own)
        return own

    def optimizer(self, model: PreTrainedModel, **others: Any) -> torch.optim.Optimizer:
        """The optimizer that a Trainer with these arguments builds, wrapped as the plan says.

        Args:
            model: The model, on its device or not.
            others: Fields of ``TrainingArguments`` that are not tuned, such as ``learning_rate``.
        """
        with accelerate_state_kept():
            args = self.training_arguments(**others)
        built = trainer_optimizer(model, args)
        for wrap in self.optimizer_wraps:
            built = wrap(built)
        return built

    def accelerator(self, **others: Any) -> Accelerator:
        """An ``Accelerator`` for a plain loop; under ``accelerate launch`` its YAML says the same."""
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin

        on_cpu = self.facts.hardware.device == "cpu"
        steps = others.pop("gradient_accumulation_steps", self.accumulation)
        given: dict[str, Any] = {
            # by a plugin: over the argument Accelerate takes what the environment says
            "gradient_accumulation_plugin": GradientAccumulationPlugin(
                num_steps=steps, sync_each_batch=self.sync_each_batch
            ),
            "mixed_precision": self.mixed_precision,
            # told to use the CPU, Accelerate leaves its engines out
            "cpu": on_cpu and self.emission.accelerate["distributed_type"] in {"NO", "MULTI_GPU"},
        }
        with self.tf32_as_planned():
            return Accelerator(**{**given, **others})

    @contextlib.contextmanager
    def tf32_as_planned(self) -> Iterator[None]:
        """Around what makes an ``Accelerator``: switch TF32 on or off, as a Trainer's argument does."""
        import torch

        if self.facts.hardware.device == "cpu":
            yield
            return
        torch.backends.fp32_precision = "tf32" if self.tf32 else "ieee"  # type: ignore[attr-defined]
        keep_flags_alike()
        yield
        # beside a compiled model an Accelerator switches TF32 on, whatever was said, by the older flag
        torch.backends.cuda.matmul.allow_tf32 = self.tf32


def keep_flags_alike() -> None:
    """Have cuDNN's older flag of TF32 say what the newer one says.

    Where they differ, ``torch.backends.cudnn.flags`` raises (PyTorch 2.13), in which speech models take the CTC loss;
    ``TrainingArguments(tf32=False)`` sets the newer one alone (transformers 5.23).
    """
    import torch

    if torch.backends.cudnn.conv.fp32_precision == "ieee":  # type: ignore[attr-defined]
        torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def accelerate_state_kept() -> Iterator[None]:
    """Keep Accelerate's process-wide state, which making ``TrainingArguments`` resets.

    Without it an ``Accelerator`` that a script made before is broken afterwards
    (``TrainingArguments._setup_devices`` calls ``AcceleratorState._reset_state``).
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = (AcceleratorState, GradientState, PartialState)
    kept = [(state._shared_state, dict(state._shared_state)) for state in states]  # noqa: SLF001 - there is no other
    yield
    for shared, before in kept:
        if before:
            shared.clear()
            shared.update(before)


def trainer_optimizer(model: PreTrainedModel, args: TrainingArguments) -> torch.optim.Optimizer:
    """The optimizer that ``Trainer(model, args)`` creates, by Trainer's own code and without a Trainer.

    That keeps its habits: no weight decay on norms and biases, embeddings' 8-bit state in 32 bit, its own
    Adafactor. Source: ``transformers.Trainer.create_optimizer`` (5.17 to 5.23).
    """
    from transformers import Trainer

    class OptimizerOnly(Trainer):
        def __init__(self) -> None:  # a Trainer makes an accelerator and moves the model: not wanted here
            self.model = model
            self.args = args
            self.optimizer = None
            self.optimizer_cls_and_kwargs = None

    optimizer: torch.optim.Optimizer = OptimizerOnly().create_optimizer()
    return optimizer


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """Have PyTorch's modules draw no weights, for a device without memory: it takes as long as to make the modules.

    ``transformers.initialization.no_init_weights`` leaves out the tying of weights, too.
    """
    from torch.nn import init

    drawn = {name: function for name, function in vars(init).items() if name.endswith("_") and callable(function)}
    names = [name for name in drawn if not name.startswith("_")]
    vars(init).update(dict.fromkeys(names, lambda tensor, *_, **__: tensor))
    try:
        yield
    finally:
        vars(init).update(drawn)


_LARGE_BYTES = 1 << 20
_TILE = 1_048_573
"""A prime, so that no two rows of a weight are alike."""
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of ``mallopt(3)``: so many bytes are zeros, and memory is taken where they are written to."""


@contextlib.contextmanager
def large_weights_left_zero() -> Iterator[None]:
    """Draw no large weights on the CPU, which then are zeros that take no memory and no time.

    For a run that is to tell what a model is made of, and whose own code must find tensors of the CPU. The process
    goes on to take each large block of memory from the system.
    """
    import ctypes

    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    fills = ("normal_", "uniform_", "fill_", "zero_", "mul_", "add_", "clamp_", "erfinv_")
    with _large_filled(fills, lambda *_, **__: None):
        yield


def quick_random_weights() -> contextlib.AbstractContextManager[None]:
    """Make large random tensors of the CPU by repeating a tile of random numbers.

    Drawing a billion normal numbers takes a CPU core ten seconds, copying them takes one. Small tensors are
    drawn as ever; every value a model needs (norm weights, biases, scales) is set by the model's own code.
    """

    def fill(draw: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        whole = tensor.numel() // _TILE * _TILE
        if whole < 2 * _TILE or not tensor.is_contiguous():
            draw(tensor, *args, **kwargs)
            return
        flat = tensor.view(-1)
        tile = draw(flat[:_TILE], *args, **kwargs)
        flat[_TILE:whole].view(-1, _TILE).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])

    return _large_filled(("normal_", "uniform_"), fill)


@contextlib.contextmanager
def _large_filled(names: Iterable[str], fill: Callable[..., None]) -> Iterator[None]:
    """Have ``fill`` do what in-place operators of these names would do to a large tensor of the CPU.

    It is called with the operator and what that was. To a mode of functions, those of ``torch.nn.init`` are one call.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    filling = {getattr(torch.ops.aten, name) for name in names}

    class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func.overloadpacket in filling and args[0].device.type == "cpu" and args[0].nbytes >= _LARGE_BYTES:
                fill(func, *args, **(kwargs or {}))
                return args[0]
            return func(*args, **(kwargs or {}))

    with Filled():  # type: ignore[no-untyped-call]
        yield
