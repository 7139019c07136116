"""What a Trainer of a user's script is about to train, and what it asks for otherwise than when it was tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autofit.training import rollouts
from autofit.training.scripts.asked import OPTIMIZER
from autofit.training.scripts.loading import drops_last, ignores_workers, length_of, loading_of, splitting
from autofit.training.scripts.patches import Made, Patches
from autofit.training.scripts.plain_loop.autocast import autocast_of
from autofit.training.scripts.plain_loop.loader import blends_rows, counts_calls
from autofit.training.scripts.plain_loop.reasons import BLENDS
from autofit.training.scripts.plain_loop.trainer_loss import ROWS, loss_of_rows, samples_otherwise, told
from autofit.training.scripts.rows import of_one_batch, sample_of, why_ungrouped
from autofit.training.scripts.traits import (
    inner_of,
    longest_batch,
    loss_takes_rows_together,
    own_split,
    shapes,
    traits,
)
from autofit.training.tasks.loss_scale import averages, script_leaves_undivided

if TYPE_CHECKING:
    from autofit.contract.facts import Facts


def described(patches: Patches, trainer: Any, seconds: float, autocasts: list[Mapping[str, str]]) -> dict[str, Any]:
    """What a Trainer is about to train; ``autocasts`` are those that the script is in."""
    made, since = patches.made[id(trainer)], patches.asked.since(trainer)
    loader: Any = trainer.get_train_dataloader()
    generates = rollouts.makes_rows(type(trainer))
    trained = rollouts.Completed(trainer, loader, joined=True) if generates else loader
    rows = of_one_batch(sample_of(trained.dataset, trained.collate_fn), loader)
    batch = longest_batch(trained, rows, trainer.args.per_device_train_batch_size)
    found = traits(patches, trainer.model, rows, seconds)
    own_rows = int(made.arguments["per_device_train_batch_size"])
    counts = None if generates else counts_calls(loader)
    loading = loading_of(loader, own_rows, fixed=ignores_workers(trainer, loader) or counts)
    evaluated = int(made.arguments["per_device_eval_batch_size"])
    rate = dict(loading["rows_per_second"]).get(0)
    undivided = False if generates else script_leaves_undivided(trainer, batch)  # its loss is divided
    found["script"] |= {
        "trainer": type(trainer).__name__,
        "micro_batch": own_rows,
        "accumulation": int(made.arguments["gradient_accumulation_steps"]),
        **length_of(loader, made.arguments),
        "own": {
            **_own(made.arguments),
            **handed_on(made.given),
            **splitting(trainer.args.accelerator_config),
            "dataloader_drop_last": drops_last(loader),
            **({_BEFOREHAND: True} if made.arguments.get(_BEFOREHAND) else {}),
        },
        "own_optimizer": _makes_its_optimizer(trainer, made.given) or any(name in since for name in OPTIMIZER),
        "evaluated_rows": 0 if generates or trainer.eval_dataset is None else evaluated,
        "generated": trainer.max_completion_length if generates else 0,
        **(rollouts.at_once(made.arguments) if generates else {}),
        "loading": loading,
        "ungrouped": why_ungrouped(trainer, loader.dataset, 1 / rate if rate else None),
        "batch": shapes(batch),
        "undivided": bool(undivided),
        "averages": rollouts.averages(trainer) if generates else averages(trainer, batch),
        "depends_on_rows": found["script"]["depends_on_rows"] or loss_takes_rows_together(trainer),
        "own_split": own_split(trainer, loader, since.keys() - OPTIMIZER, untold=undivided is None)
        or (rollouts.own_split(trainer) if generates else counts),
    }
    if not generates and blends_rows(loader, rows.longest):
        found["script"]["depends_on_rows"] = found["script"]["depends_on_rows"] or BLENDS
    if not (generates or found["script"]["own_split"] or found["script"]["depends_on_rows"]):
        several = longest_batch(trained, rows, ROWS) if rows.longest else batch
        told(found["script"], *loss_of_rows(trainer, several))
        found["script"]["own_split"] = found["script"]["own_split"] or samples_otherwise(trainer, several)
    found["script"]["autocast"] = {} if generates else autocast_of(trainer, batch, autocasts)
    return found


_COMPLETION = "max_completion_length"
_BEFOREHAND = "precompute_ref_log_probs"
_ITSELF = "the model itself"
BATCH = "rows a step on each device of"
_DECIDED_ON = (
    "optim", "optim_args", "optim_target_modules", "bf16", "fp16", "tf32", "activation_checkpointing", "torch_compile",
    "use_liger_kernel", "per_device_eval_batch_size", "eval_strategy", "train_sampling_strategy",
    "dataloader_drop_last", "max_grad_norm",
)  # fmt: skip


def _own(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a script's arguments that techniques decide on, as JSON values."""
    found: dict[str, Any] = json.loads(json.dumps({name: arguments.get(name) for name in _DECIDED_ON}, default=str))
    return found


def handed_on(given: Mapping[str, Any]) -> dict[str, str]:
    """What else a Trainer is given that says how it trains, in words by the names of its parameters."""
    from torch.utils.data import IterableDataset

    loss, optimizers = given.get("compute_loss_func"), given.get("optimizers") or ()
    by_order = isinstance(given.get("train_dataset"), IterableDataset)
    return {
        "compute_loss_func": "none" if loss is None else getattr(loss, "__qualname__", type(loss).__qualname__),
        "train_dataset": "read in order" if by_order else "read by number",
        "optimizers": "given" if any(one is not None for one in optimizers) else "none",
    }


def asks_otherwise(made: Made, kind: type, model: Any, facts: Facts, tuned: Mapping[str, Any]) -> dict[str, str]:
    """What a Trainer asks for that was not asked for when the script was tuned, in words, by its name.

    Args:
        made: What the script makes it with.
        kind: Its class.
        model: What it trains, where that is made.
        facts: What was tuned.
        tuned: Fields of its ``TrainingArguments`` that the plan sets: what it leaves alone is no matter.
    """
    script, own, given = facts.workload.script, _own(made.arguments), handed_on(made.given)
    assert script is not None
    rows = made.arguments["per_device_train_batch_size"] * made.arguments["gradient_accumulation_steps"]
    asked: dict[str, tuple[Any, Any]] = {
        "Trainer": (kind.__name__, script.trainer),
        BATCH: (rows, script.micro_batch * script.accumulation),
        **{name: (own[name], script.own[name]) for name in _DECIDED_ON if name in tuned and name in script.own},
        **{name: (now, script.own[name]) for name, now in given.items() if name in script.own},
    }
    if script.generated:
        asked[_COMPLETION] = made.arguments.get(_COMPLETION), script.generated
        now = rollouts.at_once(made.arguments)["engine"]
        asked["generating by"] = now or _ITSELF, script.engine or _ITSELF
    if hasattr(model, "parameters"):  # not made yet, or told by its name
        asked["model"] = (type(inner_of(model)).__name__, facts.model.architecture)
    return {name: f"{name} {now}, not {then}" for name, (now, then) in asked.items() if now != then}


def _makes_its_optimizer(trainer: Any, given: Mapping[str, Any]) -> bool:
    """Whether the optimizer is no matter of the arguments."""
    from transformers import Trainer

    handed = trainer.optimizer is not None or given.get("optimizer_cls_and_kwargs") is not None
    makes = [getattr(trainer, name) for name in ("create_optimizer", "get_optimizer_cls_and_kwargs")]
    own = [getattr(one, "__func__", one) for one in makes]  # a method of its class, or set in the Trainer itself
    return handed or own != [Trainer.create_optimizer, Trainer.get_optimizer_cls_and_kwargs]
