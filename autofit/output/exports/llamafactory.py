"""A plan as LLaMA-Factory's YAML. Read in LLaMA-Factory 0.9.5, which takes the arguments of transformers up to 5.6."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.output.exports.carried import Exported, as_yaml

if TYPE_CHECKING:
    from autofit.output.exports.carried import Carried

_ITS_OWN_WAY = ("use_liger_kernel", "liger_kernel_config")
"""What it is told by a setting of its own, which a technique says."""
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def llamafactory(carried: Carried) -> Exported:
    """LLaMA-Factory's YAML."""
    arguments, lacking = dict(carried.arguments), carried.lacking
    for name in _ITS_OWN_WAY:
        arguments.pop(name, None)
    checkpointed = any(arguments.pop(name, False) for name in _CHECKPOINTING)
    kwargs = [arguments.pop(f"{name}_kwargs", None) or {} for name in _CHECKPOINTING]
    if any("every_n_layers" in one for one in kwargs):
        lacking.append("checkpointing of every n-th layer: LLaMA-Factory checkpoints all or none")
    settings = {
        "model_name_or_path": carried.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "default",
        "cutoff_len": carried.document.workload.seq_len,
        **{name: value for name, value in arguments.items() if value is not None},
        "disable_gradient_checkpointing": not checkpointed,
        "use_reentrant_gc": False,
        "enable_liger_kernel": False,
        **carried.extra,
        "dataset": "YOUR_DATA",
        "output_dir": "run",
        "num_train_epochs": 1,
        "learning_rate": 2e-5,
    }
    carried.processes_of(f"`{'FORCE_TORCHRUN=1 ' if 'deepspeed' in settings else ''}llamafactory-cli train`")
    lacking.append("dataset, template, num_train_epochs and learning_rate are yours to set")
    return Exported(text=as_yaml(settings), settings=settings, lacking=tuple(lacking))
