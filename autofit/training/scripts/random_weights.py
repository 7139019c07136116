"""The model that a script loads, with random weights: only its configs are read."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofit.registry import techniques
from autofit.system.errors import InputError
from autofit.training.scripts.leave import Refused
from autofit.training.tasks.loss_scale import of_a_library

_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_OF_WEIGHTS = (
    "state_dict", "tqdm_class", "device_map", "max_memory", "offload_folder", "offload_buffers", "variant",
    "adapter_kwargs", "adapter_name", "gguf_file", "use_safetensors", "weights_only",
    "ignore_mismatched_sizes", "low_cpu_mem_usage", "key_mapping", "trust_remote_code", "code_revision",
    "_commit_hash", "_from_auto", "_from_pipeline", "use_kernels", "kernel_config", "fusion_config",
    "allow_all_kernels", "mirror", "_fast_init", "from_tf", "from_flax", "offload_state_dict", "disable_mmap",
)  # fmt: skip
"""Arguments of ``from_pretrained`` that are for reading weights, of which none are read."""


def random_model(cls: Any, name: Any, given: dict[str, Any], build: Callable[..., Any], *, draws: bool) -> Any:
    """A model of the class, as ``from_pretrained`` would load it, with random weights; only its configs are read."""
    import torch
    from transformers import PreTrainedConfig

    config, with_info = given.pop("config", None), given.pop("output_loading_info", False)
    generation = given.pop("generation_config", None)
    quantized = given.pop("quantization_config", None)
    dtype = given.pop("dtype", None) or given.pop("torch_dtype", None) or "auto"
    attention = given.pop("attn_implementation", None)
    download = {key: given.pop(key) for key in _DOWNLOAD if key in given}
    for key in _OF_WEIGHTS:
        given.pop(key, None)
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config)
    else:
        source = name if config is None else config
        config, given = cls.config_class.from_pretrained(source, return_unused_kwargs=True, **download, **given)
    quantized = getattr(config, "quantization_config", None) or quantized  # the checkpoint's stands over what is said
    config.name_or_path = str(name)
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    given["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if attention is not None:
        given["attn_implementation"] = attention
    make = functools.partial(build, config, **given)
    model = make() if quantized is None else made_quantized(quantized)(make, draws)
    model.eval()
    _generate_alike(model, name, generation, download)
    return (model, {}) if with_info else model


def _generate_alike(model: Any, name: Any, said: Any, download: dict[str, Any]) -> None:
    """Have a model generate as ``from_pretrained`` would: as it was told, or as the checkpoint's files say."""
    if not hasattr(model, "adjust_generation_fn"):
        return
    given = {**dict.fromkeys(_DOWNLOAD), "subfolder": "", "trust_remote_code": None, **download}
    with contextlib.suppress(OSError, TypeError):  # a folder without the files: in place of a path there is None
        model.adjust_generation_fn(said, None, None, name, **given)


def cache_tables_apart() -> None:
    """Have ``datasets`` cache the tables that a script names itself under other names than those of its training.

    Whatever it computes for them by its models, such as embeddings of its texts, is of random weights here. A table
    that has no name has that of what made it, weights included. One that was cached so is read by its name, too.
    """
    if "datasets" not in sys.modules:  # a Trainer imports it where it is installed
        return
    owner = sys.modules["datasets"].Dataset
    own, read = owner.map, owner.from_file.__func__

    def apart(path: Any) -> str:
        return str(Path(path).with_name(f"random-weights-{Path(path).name}"))

    @functools.wraps(own)
    def mapped(table: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("new_fingerprint"):
            kwargs["new_fingerprint"] = hashlib.sha256(f"random {kwargs['new_fingerprint']}".encode()).hexdigest()[:16]
        if kwargs.get("cache_file_name"):
            kwargs["cache_file_name"] = apart(kwargs["cache_file_name"])
        return own(table, *args, **kwargs)

    @functools.wraps(read)
    def from_file(cls: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        return read(cls, apart(filename) if Path(apart(filename)).exists() else filename, *args, **kwargs)

    owner.map, owner.from_file = mapped, classmethod(from_file)


_BEFOREHAND = "_precompute_ref_logps"
_FEW = 16


def take_reference_of_few(kind: type) -> None:
    """Have a class of Trainer of TRL's run its reference over few rows before it trains, whatever its micro-batch.

    Weights are random here, and so is what a reference says: each token of the other rows has the mean. Read in
    TRL 1.16 (``precompute_ref_log_probs`` of DPO and KTO).
    """
    owner: Any = next((one for one in kind.__mro__ if _BEFOREHAND in vars(one) and of_a_library(one)), None)
    if owner is None or hasattr(vars(owner)[_BEFOREHAND], "__wrapped__"):
        return
    own = vars(owner)[_BEFOREHAND]

    @functools.wraps(own)
    def of_few(trainer: Any, dataset: Any, name: str, batch_size: int) -> Any:
        if not hasattr(dataset, "select") or len(dataset) <= _FEW:
            return own(trainer, dataset, name, batch_size)
        count = max(_FEW, batch_size * trainer.accelerator.num_processes)
        told = own(trainer, dataset.select(range(min(count, len(dataset)))), name, batch_size)
        for column in sorted({*told.column_names} - {*dataset.column_names}):
            tokens = _tokens(dataset, column, trainer.args.max_length)
            mean = sum(told[column][:_FEW]) / max(1, tokens[:_FEW].sum())
            dataset = dataset.add_column(column, mean * tokens)
        return dataset

    setattr(owner, _BEFOREHAND, of_few)


def _tokens(dataset: Any, column: str, longest: int | None) -> Any:
    """Tokens of each row that a column tells the log-probability of; one where they are not known yet."""
    import numpy as np
    import pyarrow.compute

    part = column.removeprefix("ref_").removesuffix("logps")
    names = [one for one in (f"{part}ids", f"{part}completion_ids") if one in dataset.column_names]
    if not names or "prompt_ids" not in dataset.column_names:
        return np.ones(len(dataset))
    table = dataset.select_columns([names[0], "prompt_ids"]).with_format("arrow")[:]
    tokens, before = (np.asarray(pyarrow.compute.list_value_length(table[one])) for one in (names[0], "prompt_ids"))
    return tokens if longest is None else np.minimum(tokens, np.maximum(longest - before, 0))


def made_quantized(said: Any) -> Callable[[Callable[[], Any], bool], Any]:
    """What makes a model with random weights as a script's config of quantized ones would have it loaded.

    Raises:
        Refused: No technique knows it, or the one that does can't train it.
    """
    for one in techniques():
        try:
            made = one.made_in_script(said)
        except InputError as error:
            raise Refused(error.message, error.hint or "") from error
        if made is not None:
            return made
    kind = said.get("quant_method") if isinstance(said, Mapping) else getattr(said, "quant_method", said)
    raise Refused(f"the script loads its model with quantized weights ({getattr(kind, 'value', kind)})", _by_name())


def _by_name() -> str:
    """How to have quantized weights: the last of the ways of training of each technique that tells ways apart."""
    fixed = [f"--fix {one.name}={[*one.ways.values()][-1]}" for one in techniques() if one.ways]
    return f"tune by the model's name with {' '.join(fixed)}"
