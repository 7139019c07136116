"""A plan as Axolotl's YAML. Read in Axolotl 0.19, with the versions of transformers and PEFT that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.output.exports.carried import Exported, as_yaml

if TYPE_CHECKING:
    from autofit.output.exports.carried import Carried

_NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "optim": "optimizer",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Its names of fields of ``TrainingArguments``; the rest it calls the same."""
_ITS_OWN_WAY = ("train_sampling_strategy", "use_liger_kernel", "liger_kernel_config")
"""What it is told by settings of its own, which the techniques say."""
_AS_A_TRAINER = {
    "lr_scheduler": "linear",
    "warmup_steps": 0,
    "dataloader_num_workers": 0,
    "pad_to_sequence_len": False,
}
"""What a Trainer does by itself. Axolotl's own: a cosine after a warm-up, a worker process a card that holds 256
batches ready, rows padded to a multiple of 64 tokens."""


def axolotl(carried: Carried) -> Exported:
    """Axolotl's YAML."""
    arguments, lacking = dict(carried.arguments), carried.lacking
    for name in _ITS_OWN_WAY:
        arguments.pop(name, None)
    if arguments.pop("use_cpu", False):
        lacking.append("training on the CPU: Axolotl trains on GPUs, where another plan may be faster")
    if arguments.pop("dataloader_persistent_workers", False):
        lacking.append("worker processes that stay between epochs: Axolotl starts them anew")
    if not arguments.get("torch_compile"):
        for name in ("torch_compile_backend", "torch_compile_mode"):
            arguments.pop(name, None)
    if arguments.get("optim_target_modules") == "all-linear":
        arguments["optim_target_modules"] = "all_linear"
    tuned: dict[str, Any] = {_NAMES.get(name, name): value for name, value in arguments.items() if value is not None}
    plain = {name: value for name, value in _AS_A_TRAINER.items() if name not in tuned}
    if "pad_to_multiple_of" in carried.extra:
        del plain["pad_to_sequence_len"]
    settings = {
        "base_model": carried.model,
        "sequence_len": carried.document.workload.seq_len,
        "sample_packing": False,
        **tuned,
        **plain,
        **carried.extra,
        "datasets": [{"path": "YOUR_DATA", "type": "completion"}],
        "output_dir": "run",
        "num_epochs": 1,
        "learning_rate": 2e-5,
    }
    if "fsdp_config" in settings and carried.document.workload.processes == 1:
        lacking.append(
            "that FSDP wants a process group, also of one: `axolotl train CONFIG --launcher torchrun` makes it"
        )
    else:
        carried.processes_of("`axolotl train`")
    lacking.append("datasets, num_epochs and learning_rate are yours to set")
    return Exported(text=as_yaml(settings), settings=settings, lacking=tuple(lacking))
