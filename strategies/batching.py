"""Batching: which rows of different lengths make a micro-batch, and how they are padded.

- ``pad``: rows in random order, each as long as the longest of its micro-batch.
- ``pad_to_multiple``: the same, and on to the next multiple of 8 tokens.
- ``group_by_length``: each step takes rows of about the same length (``LengthGroupedSampler``): of every 50 steps' rows
  drawn at random (fewer where the data set has fewer than 200), sorted by length.
- ``padding_free``: the model leaves padding out itself: rows of a micro-batch are joined to one, whose positions begin
  anew at each of them, and attention goes no further than a row.
- ``packing``: withheld, with its reason.

Saves: ``group_by_length`` most of the padding, which is computed on like anything else; ``padding_free`` all of it;
``pad_to_multiple`` gives kernels sizes that suit tensor cores, and a compiler an eighth of the shapes. Costs: up to
seven tokens a row; under ``group_by_length`` the lengths of all rows are read before the first step, unless the data
set has a column of them; under ``padding_free`` PyTorch's own attention takes all tokens of a micro-batch against all,
with a mask of that size (FlashAttention does not: ``flash_attn_varlen_func``).

``pad_to_multiple`` is of class ``exact``: a mask keeps what is added out of the attention, and no loss is taken of it.
It is withheld where a batch has no such mask, or holds something that nobody knows how to pad. ``group_by_length`` is
of class ``method``: a step's rows are alike, so gradients differ more from step to step. It sorts an evaluation, too: a
Trainer's ``predict()`` gives rows in another order. ``autofit run`` keeps a script's evaluation in its own order.

``padding_free`` is of class ``exact`` where transformers finds the rows of a batch by its positions
(``find_packed_sequence_indices`` of ``masking_utils``, 5.23; FlashAttention's ``_is_packed_sequence``). ``_JOINED``
lists the types of model whose loss and gradients a test holds against those of padded rows; ALiBi, positions that a
model counts by itself, a table of masks that ends (GPT-Neo), convolutions, and states that go on over a row's end are
not among them. Batches are padded at their end as ever, and joined in the model's forward pass, in training alone: a
Trainer counts and evaluates as before. A batch that can't be joined exactly is trained on as it is, and told. It is not
traced, since its memory grows with the square of the rows. What the model gives beside its loss has another shape, so
that of scripts only those with transformers' own ``Trainer`` may have it.

What is measured of ``group_by_length`` are micro-batches of an epoch that the Trainer's own sampler makes, taken evenly
from the short to the long ones; the promise is for the mean over all of them. Fit is judged on the longest rows.

Sources: ``Trainer._get_train_sampler``, ``get_length_grouped_indices`` (transformers 5.17 and 5.23). Carried by
``train_sampling_strategy`` of ``TrainingArguments``; ``pad_to_multiple`` by the data collator: ``setup.collator(own)``,
which ``autofit run`` puts into a script.

Not covered: layers that let neighbours mix whatever the mask says (convolutions over tokens), labels that a script's
own loss reads at places where they are -100; ``batch_rebalance``, whose micro-batches have different numbers of rows; a
sampler in a plain loop, which is the loop's own.
"""

from __future__ import annotations

import functools
import math
import types
from typing import TYPE_CHECKING, Any, cast

from autofit.contract.emission import Emission
from autofit.contract.facts import predicts_next_token
from autofit.contract.layout import PARALLEL
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Status, Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from autofit.contract.facts import Facts, Script
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_MULTIPLE = 8
_ALIKE = 0.9
"""Rows whose mean is this share of the longest are hardly padded."""
_STRATEGY = "train_sampling_strategy"
_GROUPS = "group_by_length"
_FREE = "padding_free"
_SAMPLER = "LengthGroupedSampler"
_FILLS = {"attention_mask": 0, "token_type_ids": 0, "labels": -100}
"""What is put behind a row, beside padding tokens: no attention, no loss (``torch.nn.CrossEntropyLoss``)."""
_JOINED = ("cohere", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
           "qwen3", "smollm3", "starcoder2")  # fmt: skip
_JOINS = "leave padding out: model = setup.model(...)"
_LINE = f"pad batches to a multiple of {_MULTIPLE} tokens: data_collator = setup.collator(data_collator)"


class Batching(Technique):
    """Which rows make a micro-batch, and how they are padded."""

    name = "batching"
    baseline = "pad"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        alike = _alike(facts)
        pad = Choice(
            "pad", Kind.EXACT, "offered", alike or "rows in random order, as long as the longest of each batch"
        )

        def choice(value: str, kind: Kind, why: str | None, words: str, status: Status = "offered") -> Choice:
            why = alike or why
            return Choice(value, kind, "withheld" if why else status, why or words)

        on_cuda = facts.hardware.device == "cuda"
        multiple = f"rows of a multiple of {_MULTIPLE} tokens" + ("" if on_cuda else ": a CPU gains little by it")
        joined = "rows of a micro-batch are joined without padding; attention keeps them apart"
        packed = "what is promised is a global batch in rows, and packing makes it one of tokens"
        return (
            pad,
            choice("pad_to_multiple", Kind.EXACT, _unpadded(facts), multiple, "offered" if on_cuda else "on_request"),
            choice(_GROUPS, Kind.METHOD, _ungrouped(facts), "rows of about the same length are trained on together"),
            choice(_FREE, Kind.EXACT, _apart(facts), joined, "on_request"),
            choice("packing", Kind.METHOD, packed, ""),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value in {_GROUPS, _FREE} and others["micro_batch"] == 1:
            return "a micro-batch of one row has no padding"
        if value == _FREE and others[PARALLEL] not in {"none", "ddp"}:
            return f"it was not tried under parallel={others[PARALLEL]}"
        if value == _FREE and others["compile"] != "off":
            return "code would be compiled for each number of tokens"
        return None

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        own = _own_strategy(script)
        if own in {"random", "sequential"}:
            return None
        value = _GROUPS if own == _GROUPS else self.baseline
        return Held(value, f"the script takes its rows by {_STRATEGY}={own}", firm=True, by_script=True)

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == _FREE:
            counted = recipe.state[self.name] = {"joined": 0, "padded": 0}
            recipe.unpadded = True
            recipe.model_wraps.append(lambda model: joining(model, counted))
        if value == "pad_to_multiple":
            told: dict[str, Any] = {"fill": 0}
            recipe.state[self.name] = told

            def ask(model: Any) -> Any:
                config: Any = getattr(model, "config", None)
                text = config.get_text_config() if hasattr(config, "get_text_config") else config
                told["fill"] = int(getattr(text, "pad_token_id", None) or 0)
                return model

            recipe.model_wraps.append(ask)
            recipe.collate_wraps.append(lambda own: ToMultiple(own, told))

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if _alike(facts):
            return Emission()
        script = facts.workload.script
        padded = value == "pad_to_multiple"
        arguments = {_STRATEGY: _GROUPS if value == _GROUPS else _own_strategy(script)}
        elsewhere: dict[str, Mapping[str, Any]] = {"axolotl": {_GROUPS: True}} if value == _GROUPS else {}
        return Emission(
            training_args=arguments if facts.workload.launch_path == "trainer" else {},
            script=() if script is not None else (_LINE,) if padded else (_JOINS,) if value == _FREE else (),
            elsewhere={"sft": {"pad_to_multiple_of": _MULTIPLE}} if padded else elsewhere,
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        """The longest rows are traced, whatever stands beside them; joined ones by no line that goes up with them."""
        if value == _FREE and part != "optimizer":
            return None
        return value if value == "pad_to_multiple" and part != "optimizer" else self.baseline

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        return plan if self.name in plan else {**plan, self.name: self.baseline}

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Count the micro-batches that are a multiple long."""
        if _alike(recipe.facts):
            return self.observe
        counted = {"micro_steps": 0, "multiples": 0}
        main = recipe.facts.model.main_input

        def count(_module: nn.Module, args: Any, kwargs: Any) -> None:
            import torch

            ids = kwargs.get(main, args[0] if args else None)
            if not torch.compiler.is_compiling() and isinstance(ids, torch.Tensor):
                counted["micro_steps"] += 1
                counted["multiples"] += int(ids.shape[-1]) % _MULTIPLE == 0

        hooks.before(model, count)
        return lambda ran: {**counted, **_of_loader(ran.loader), **self.observe(ran)}

    def observe(self, ran: Ran) -> Seen:
        return dict(ran.recipe.state.get(self.name, {})) if ran.recipe.plan[self.name] == _FREE else {}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        return _not_joined(seen) if value == _FREE else _otherwise(value, seen)

    def changes(self, value: Value, facts: Facts) -> str | None:
        if value == "packing":
            return "Rows are joined and cut into rows of one length, so a step takes another number of them."
        if value != _GROUPS:
            return None
        own = facts.workload.script is None
        evaluated = "; a Trainer's predict() gives its rows in another order, too" if own else ""
        return f"Rows of about the same length are trained on together, in no order that is wholly random{evaluated}."

    def prior(self, value: Value, facts: Facts) -> Prior:
        """What grouping leaves out is the padding, which is counted where lengths are told; of a script guessed."""
        if value == _GROUPS:
            used = math.log(min(1.0, max(0.05, _used(facts))))
            return Prior(time=(0.7 * used, 0.1 - 0.3 * used), memory=(0.0, 0.02))
        if value == _FREE:  # attention over all tokens of a micro-batch may cost more than the padding
            return Prior(time=(0.5 * math.log(max(0.05, _used(facts))), 0.4), memory=(0.0, 0.4))
        if value == self.baseline:
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        return Prior(time=(0.0, 0.05), memory=(0.01, 0.02))


def joining(model: Any, counted: dict[str, int]) -> Any:
    """The model, which joins the rows of a padded batch when it trains, and counts how many batches it did so."""
    own = model.forward

    @functools.wraps(getattr(own, "__func__", own))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            found = None if args else joined(kwargs)
            counted["padded" if found is None else "joined"] += 1
            kwargs = found or kwargs
        return own(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return model


def joined(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rows of a batch as one without padding; ``None`` where that would be another training.

    Each row keeps its tokens and positions. Its first label goes, which nothing in it predicts.
    """
    import torch

    ids, mask, labels = (cast("Any", batch.get(name)) for name in ("input_ids", "attention_mask", "labels"))
    tensors = {name for name, one in batch.items() if isinstance(one, torch.Tensor) and one.ndim}
    if not {"input_ids", "labels"} <= tensors <= {"input_ids", "attention_mask", "labels"} or labels.shape != ids.shape:
        return None
    places = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if kept.shape != ids.shape or not ((kept == (places < kept.sum(-1, keepdim=True))) & (kept | (labels < 0))).all():
        return None
    told = labels.masked_fill(places == 0, -100)
    each = {"input_ids": ids, "labels": told, "position_ids": places}
    return {**batch, "attention_mask": None, **{name: one[kept][None] for name, one in each.items()}}


class ToMultiple:
    """A collator whose batches are padded on, to a multiple of tokens; else it is the one inside.

    Args:
        own: Makes a batch of rows.
        told: Holds the padding token as ``fill``, once the model is there.
    """

    def __init__(self, own: Callable[..., Any], told: Mapping[str, int]) -> None:
        self.own, self.told = own, told

    def __getattr__(self, name: str) -> Any:
        if name in {"own", "told"}:
            raise AttributeError(name)
        return getattr(self.own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The batch of the collator inside, padded on where it has a mask of its tokens."""
        return padded_on(self.own(*args, **kwargs), fill=self.told["fill"])


def padded_on(batch: Any, *, fill: int) -> Any:
    """A batch with rows of a multiple of tokens; as it is where it has no mask that tells padding."""
    import torch

    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if not isinstance(ids, torch.Tensor) or getattr(mask, "shape", None) != ids.shape:
        return batch
    short = -ids.shape[-1] % _MULTIPLE
    for name, value in {"input_ids": fill, **_FILLS}.items():
        held = batch.get(name)
        if short and isinstance(held, torch.Tensor) and held.shape == ids.shape and not held.is_floating_point():
            batch[name] = torch.nn.functional.pad(held, (0, short), value=value)
    return batch


def _not_joined(seen: Seen) -> str | None:
    """Why rows were trained on with their padding, in words; ``None`` where all were joined."""
    if not seen.get("joined"):
        return "no micro-batch was joined: are rows padded at their beginning, or is another model trained?"
    left = seen.get("padded", 0)
    return f"{left} micro-batches could not be joined, and were trained on with their padding" if left else None


def _otherwise(value: Value, seen: Seen) -> str | None:
    """What else was done with the rows than the value says, in words."""
    steps, multiples, sampler = seen.get("micro_steps", 0), seen.get("multiples", 0), seen.get("sampler")
    if value == "pad_to_multiple" and multiples < steps:
        return f"{steps - multiples} of {steps} micro-batches are no multiple of {_MULTIPLE} tokens long"
    if value == "pad_to_multiple" and seen.get("pads_on") is False:
        return "the loader's collator is none that pads on: does the script make its loader itself?"
    if value != "pad_to_multiple" and seen.get("pads_on"):
        return f"batches are padded to a multiple of {_MULTIPLE} tokens"
    if value == _GROUPS and sampler not in {None, _SAMPLER}:
        return f"rows are chosen by {sampler}: does the script make its loader itself?"
    if value != _GROUPS and sampler == _SAMPLER:
        return "rows are grouped by their length"
    return None


def _of_loader(loader: Any) -> dict[str, Any]:
    """What a loader tells of how it makes batches; nothing where it is not known."""
    if loader is None:
        return {}
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    collate = getattr(loader, "collate_fn", None)
    within = [collate, getattr(collate, "data_collator", None)]  # a Trainer leaves unused columns out before
    return {
        "sampler": getattr(sampler, "own", None) or type(sampler).__name__,
        "pads_on": any(isinstance(one, ToMultiple) for one in within),
    }


def _own_strategy(script: Script | None) -> str:
    """In which order a script itself takes its rows, as its Trainer calls it."""
    return "random" if script is None else str(script.own.get(_STRATEGY, "random"))


def _alike(facts: Facts) -> str | None:
    """Why there is nothing to batch, in words; ``None`` where rows differ in length."""
    script = facts.workload.script
    if script is None:
        lengths = facts.workload.lengths
        if not lengths:
            return "all rows are as long: --lengths tells of others"
        return None if lengths[0] < lengths[-1] else "all rows are as long"
    if not script.longest_places or script.tokens_a_row is None:
        return "nothing is known of the lengths of its rows"
    return None if script.mean_length < _ALIKE * script.longest else "its batches have hardly any padding"


def _unpadded(facts: Facts) -> str | None:
    """Why batches can't be padded on, in words."""
    work, model = facts.workload, facts.model
    longest = -(-work.seq_len // _MULTIPLE) * _MULTIPLE
    table = model.position_rows
    if table is not None and longest > table >= work.seq_len:
        return f"its table of positions has {table} rows, and the longest of the data would have {longest}"
    return None if work.script is None else _unknown(work.script)


def _apart(facts: Facts) -> str | None:
    """Why rows that are joined would not be kept apart, or nobody knows whether they are, in words."""
    script, model = facts.workload.script, facts.model
    if model.model_type not in _JOINED or not predicts_next_token(model.architecture):
        return f"whether {model.architecture} keeps joined rows apart is not known"
    if script is None:
        return None
    if script.trainer != "Trainer":
        return f"{script.trainer or 'a loop'} may read of its model what has another shape where rows are joined"
    if script.batch.get("labels") != script.batch.get("input_ids"):
        return "its batches have no label for each token"
    return _unknown(script)


def _unknown(script: Script) -> str | None:
    """What of a script's batches can't be padded on, in words."""
    ids = script.batch.get("input_ids")
    if ids is None or script.batch.get("attention_mask") != ids:
        return "its batches have no mask that tells padding from tokens"
    known = {"input_ids", *_FILLS}
    other = next((name for name, shape in script.batch.items() if len(shape) > 1 and name not in known), None)
    return None if other is None else f"its batches hold {other}, which nobody here knows how to pad"


def _ungrouped(facts: Facts) -> str | None:
    """Why rows can't be grouped, in words."""
    script = facts.workload.script
    if facts.workload.launch_path == "loop":
        return "a plain loop's sampler is its own: a Trainer groups rows (--launch-path trainer)"
    return None if script is None else script.ungrouped


def _used(facts: Facts) -> float:
    """The share of a micro-batch of some eight random rows that is no padding."""
    script, lengths = facts.workload.script, facts.workload.lengths
    if script is not None:
        return min(1.0, 1.5 * script.mean_length / max(1, script.longest))
    if not lengths:
        return 1.0
    count = len(lengths)
    longest = sum(one * (((place + 1) / count) ** 8 - (place / count) ** 8) for place, one in enumerate(lengths))
    return sum(lengths) / count / longest
