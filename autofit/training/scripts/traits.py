"""What is told of a script's model, whatever trains it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import replacing
from autofit.machine.model import depends_on_rows, parameters_of
from autofit.registry import source_folders, techniques
from autofit.training.scripts.leave import FACTORY, NOT_AS_TUNED, Refused, name_of
from autofit.training.scripts.loading import rows_of_batches
from autofit.training.scripts.patches import Patches
from autofit.training.scripts.plain_loop.by_number.text import line_of_calls
from autofit.training.scripts.rows import Sample
from autofit.training.tasks.loss_scale import of_a_library

if TYPE_CHECKING:
    import torch

    from autofit.contract.script import Script


def traits(patches: Patches, model: Any, rows: Sample, seconds: float, beside: Sequence[Any] = ()) -> dict[str, Any]:
    """What a script trains, but for how its loop or its Trainer does; ``beside`` are its other models.

    Returns:
        ``script``: fields of :class:`autofit.contract.script.Script`; ``model``: the model itself; ``parameters``: how
        many are in it, in an adapter that lies beside it, too; ``config``: its config as JSON values, empty where it is
        none of transformers.

    Raises:
        Refused: The model has no weights, or they can't be trained as they are.
    """
    from transformers import PreTrainedModel

    inner = inner_of(model)
    first = max(_unpacked(inner), key=lambda one: one.numel(), default=None)
    if first is None:
        raise Refused(f"the script trains a {type(inner).__name__}, which has no parameters", "hand on the whole model")
    # a module of sentence-transformers has the config of the model inside, and is none itself
    settings: Any = inner.config if isinstance(inner, PreTrainedModel) else None
    text = "{}" if settings is None else settings.to_json_string(use_diff=False)
    dtype = str(first.dtype).removeprefix("torch.")
    others = (one for each in beside for one in each.parameters())
    _check_dtypes(first.dtype, {one.dtype for one in (*_unpacked(model), *others) if one.requires_grad})
    asked = {name: value for name, value in patches.said.items() if name == "attn_implementation"}
    attends = getattr(settings, "_attn_implementation", None)
    if not patches.loaded and isinstance(attends, str):  # made by its class, so that nothing else can be asked for
        asked["attn_implementation"] = attends
    script = {
        "loads": asked,
        "weights_dtype": dtype,
        **{one.name: words for one in techniques() if (words := one.in_script(model)) is not None},
        "trains_adapter": patches.loaded and any(one.trains_alone(model) for one in techniques()),
        "compiled": hasattr(model, "_orig_mod"),
        "depends_on_rows": next(filter(None, map(depends_on_rows, (inner, *map(inner_of, beside)))), None),
        "beside": [(type(inner_of(one)).__name__, parameters_of(one)) for one in beside],
        "rows": rows.rows,
        "sampled": rows.looked_at,
        "longest": rows.longest_size,
        "mean_length": sum(rows.sizes.values()) / max(1, len(rows.sizes)),
        "tokens_a_row": rows.tokens,
        "lengths": rows.counts,
        "places": rows.spread,
        "longest_places": rows.longest,
        "seconds": seconds,
        "modules": _modules(),
        "wrote": patches.written.arrays(),
    }
    return {"script": script, "model": inner, "parameters": parameters_of(model), "config": json.loads(text)}


def _unpacked(model: Any) -> list[Any]:
    """Its weights that are not packed: 4 bits may be kept as floats, 8 bits are integers."""
    import torch

    every = model.parameters()
    return [one for one in every if one.dtype != torch.int8 and getattr(one, "quant_state", None) is None]


def _check_dtypes(largest: torch.dtype, trained: set[torch.dtype]) -> None:
    """Refuse what can't be trained as it is: of float16 weights only frozen ones, under others that are trained.

    Raises:
        Refused: It can't be.
    """
    import torch

    if torch.float16 in (trained or {largest}):
        raise Refused(
            "the script trains weights in float16, which lose almost every update",
            "keep what is trained in float32, an adapter's weights, too (autocast_adapter_dtype), and ask for --fp16",
        )
    if largest not in {torch.float32, torch.bfloat16, torch.float16}:
        words = str(largest).removeprefix("torch.")
        raise Refused(f"the script's model is in {words}, and plans are not", "load the model in float32 or bfloat16")


def changes_since(script: Script) -> list[str]:
    """What of a script that is run here is not as it was tuned, a sentence each."""
    path, name = Path(script.path), name_of(script.path, script.arguments)
    said = modules_since(script, name)
    with contextlib.suppress(OSError):
        if path != FACTORY and hashlib.sha256(path.read_bytes()).hexdigest() != script.sha256:
            said.append(NOT_AS_TUNED.format(name))
    return said


def modules_since(script: Script, name: str) -> list[str]:
    """The same of the modules alone that it has imported by now."""
    now = _modules()
    changed = [one for one, text in script.modules.items() if now.get(one, text) != text]
    return [NOT_AS_TUNED.format(f"{one}, which {name} imports,") for one in changed[:3]]


def _modules() -> dict[str, str]:
    """The SHA-256 of the text of what the script has imported: of each module neither installed nor Python's own."""
    library, own = Path(sysconfig.get_paths()["stdlib"]), source_folders()
    searched = {Path(entry or ".").resolve() for entry in sys.path}
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        installed = {library, *own} & set(path.parents) or {"site-packages", "dist-packages"} & set(path.parts)
        if name != "__main__" and path.suffix == ".py" and not installed and searched & set(path.parents):
            with contextlib.suppress(OSError):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


_PACKAGE = "sentence_transformers"
_ROW_BY_ROW = {
    "BinaryCrossEntropyLoss", "ContrastiveLoss", "CosineSimilarityLoss", "CrossEntropyLoss", "DistillKLDivLoss",
    "EmbedDistillLoss", "MSELoss", "MarginMSELoss", "MultiVectorDistillKLDivLoss", "MultiVectorMarginMSELoss",
    "SoftmaxLoss", "SparseMSELoss", "TripletLoss",
}  # fmt: skip
"""Losses of sentence-transformers (6.2) that are a mean over rows, each by itself."""
_AROUND = {"AdaptiveLayerLoss", "Matryoshka2dLoss", "MatryoshkaLoss"}
"""Those that take another one several times."""


def loss_takes_rows_together(trainer: Any) -> str | None:
    """Why the loss of a Trainer of TRL or sentence-transformers depends on the rows of a micro-batch; else ``None``."""
    if any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__):
        return _of_trl(trainer)
    if not any(_is_of_package(kind) for kind in type(trainer).__mro__):
        return None
    loss: Any = getattr(trainer, "loss", None)
    for one in loss.values() if isinstance(loss, Mapping) else [loss]:
        inner: Any = one
        while type(inner).__name__ in _AROUND and _is_of_package(type(inner)):
            inner = inner.loss
        if not _is_row_by_row(inner):
            takes = "takes" if _is_of_package(type(inner)) else "may take"
            return f"its {type(inner).__name__} {takes} the rows of a micro-batch together"
    if isinstance(getattr(trainer, "train_dataset", None), Mapping):
        return "the rows of a micro-batch are of one of its data sets"
    chooses = getattr(getattr(trainer, "args", None), "batch_sampler", "batch_sampler")
    if chooses != "batch_sampler":
        return f"its batch_sampler ({getattr(chooses, 'value', chooses)}) chooses the rows of a micro-batch"
    return None


def _of_trl(trainer: Any) -> str | None:
    """The same of TRL's trainers (1.16): KTO's, DPO's where it aligns distributions (AOT), GRPO's of some tokens."""
    if getattr(trainer, "calculate_KL", False):
        return "the KL divergence in its loss is that of the rows of a micro-batch"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1:
        return "its loss takes the tokens of a micro-batch together (top_entropy_quantile)"
    sorts = {"aot", "aot_unpaired"}.intersection(getattr(trainer, "loss_types", ()))
    return f"its loss ({min(sorts)}) sorts the rows of a micro-batch" if sorts else None


def _is_of_package(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE


def _is_row_by_row(loss: Any) -> bool:
    """Whether a loss is a known one, that takes the mean of what PyTorch's own losses are of each row."""
    import torch

    if type(loss).__name__ not in _ROW_BY_ROW or not _is_of_package(type(loss)):
        return False
    inside = [one for one in loss.children() if isinstance(one, torch.nn.modules.loss._Loss)]  # noqa: SLF001 - the base
    given = getattr(loss, "loss_fct", None)
    return (
        getattr(loss, "size_average", True)
        and (given is None or given in inside)
        and all(one.reduction in {"mean", "batchmean"} and getattr(one, "weight", None) is None for one in inside)
    )


_ROWS = "(gradient_accumulation_steps|per_device_train_batch_size)"
_SETS_ROWS = re.compile(rf"""\.{_ROWS}\s*[*/+-]*=(?!=)|setattr\([^"']*["']{_ROWS}["']""")
_PLANS = ("create_scheduler", "create_optimizer", "create_optimizer_and_scheduler", "_get_train_sampler")
"""Methods of a Trainer that say how fast, or on which rows, it trains."""
_READS_ROWS = re.compile(r"\b(per_device_train_batch_size|train_batch_size|get_train_dataloader)\b")
_STEPS = "gradient_accumulation_steps"
_UNTOLD = "whether its loss is divided by the accumulation can't be told, so another split may be another training"


def own_split(trainer: Any, loader: Any, since: Iterable[str], *, untold: bool) -> str | None:
    """Why a Trainer's micro-batches or their number are the script's own, in words; ``None`` where a plan says them.

    Args:
        trainer: About to train.
        loader: Its loader.
        since: Arguments that the script has set since the Trainer was made.
        untold: Whether it is not known if its loss is divided by the accumulation.

    Raises:
        Refused: Its micro-batches are not those of its arguments.
    """
    from transformers import Trainer

    if names := " and ".join(since):
        return f"the script sets {names} after its Trainer is made"
    if why := _by_its_own_code(trainer):
        return why
    kind, rows = type(trainer), rows_of_batches(loader)
    if kind.get_train_dataloader is Trainer.get_train_dataloader or rows is None:
        return _UNTOLD if untold else None
    arguments = trainer.args
    more = arguments.per_device_train_batch_size + 1
    with replacing([(arguments, "per_device_train_batch_size", more), (trainer, "_train_batch_size", more)]):
        if rows_of_batches(trainer.get_train_dataloader()) != rows:
            return _UNTOLD if untold else None
    if rows != arguments.train_batch_size:
        raise Refused(
            f"the loader of the script's {kind.__name__} makes micro-batches of {rows} rows, and its arguments say "
            f"{arguments.train_batch_size}",
            "have get_train_dataloader take self.args.train_batch_size, or give both the same number",
        )
    return f"the loader of its {kind.__name__} makes micro-batches of {rows} rows, whatever its arguments say"


def _by_its_own_code(trainer: Any) -> str | None:
    """What a script's own classes do with each micro-batch, or with their number, in words."""
    from transformers import TrainerCallback

    if _acts_in_backward(trainer):
        return "its gradients are taken in each backward pass (an optimizer's step, or a hook), so they can't be summed"
    for one in trainer.callback_handler.callbacks:
        name, hears = type(one).__name__, type(one).on_substep_end
        if hears is not TrainerCallback.on_substep_end and not of_a_library(hears):
            return f"its {name} acts after each micro-batch (on_substep_end)"
        with contextlib.suppress(OSError, TypeError):  # a class without a text
            if found := _SETS_ROWS.search(inspect.getsource(type(one))):
                return f"its {name} sets {found[1] or found[2]} while it trains"
    losses = [trainer.compute_loss_func]
    steps = [vars(kind).get(name) for kind in type(trainer).__mro__ for name in ("compute_loss", "training_step")]
    for step in (one for one in (*losses, *steps) if one is not None and not of_a_library(one)):
        if line := line_of_calls(step, trainer):
            return f"its {step.__qualname__}() goes by what it keeps of the micro-batches before (line {line})"
    return _plans_by_rows(type(trainer))


def _plans_by_rows(kind: type) -> str | None:
    """What a Trainer of the script's own makes by its micro-batches, and not by its optimizer steps, in words."""
    for name in _PLANS:
        if of_a_library(plans := getattr(kind, name, None)) or not callable(plans):
            continue
        with contextlib.suppress(OSError, TypeError):  # a method without a text
            text = inspect.getsource(plans)
            if bool(_READS_ROWS.search(text)) != (_STEPS in text):  # by both it asks for the rows of a step
                return f"its {plans.__qualname__}() goes by the rows of a micro-batch, or by how many a step takes"
    return None


def _acts_in_backward(trainer: Any) -> bool:
    """Whether something takes a parameter's gradient as soon as a backward pass has it, as layer-wise optimizers do."""
    if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in trainer.model.parameters()):
        return True
    try:  # transformers makes such hooks with the optimizer, and tells by an error where it would not
        with replacing([(trainer.args, "gradient_accumulation_steps", 2)]):
            trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except Exception as error:  # noqa: BLE001 - of another one the training itself tells
        return "accumulation" in str(error)
    return False


def longest_batch(loader: Any, rows: Sample, micro_batch: int) -> Any:
    """A micro-batch of the longest rows, as a script's own collator makes it; its first, where they are not known."""
    if not rows.longest or loader.collate_fn is None:
        return next(iter(loader))
    places = [*itertools.islice(itertools.cycle(rows.longest), micro_batch)]
    return loader.collate_fn([loader.dataset[place] for place in places])


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a micro-batch's tensors, by their names."""
    import torch

    if not isinstance(batch, Mapping):
        return {}
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def inner_of(model: Any) -> Any:
    """The model of transformers inside of a compiled one, or below an adapter."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model
