"""Batching: which rows of different lengths make a micro-batch, and how they are padded.

- ``pad``: rows in random order, each as long as the longest of its micro-batch.
- ``pad_to_multiple``: the same, and on to the next multiple of 8 tokens.
- ``group_by_length``: each step takes rows of about the same length (``LengthGroupedSampler``): of every 50 steps' rows
  drawn at random (fewer where the data set has fewer than 200), sorted by length.
- ``padding_free``: the model leaves padding out itself: rows of a micro-batch are joined to one, whose positions begin
  anew at each of them, and attention goes no further than a row.
- ``packing``: rows are joined to full ones, as long as the longest, of which a step takes as many as have about as many
  tokens as the global batch has without padding.

Saves: ``group_by_length`` most of the padding, which is computed on like anything else; ``padding_free`` all of it,
``packing`` nearly all, with micro-batches that are all of one size;
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

``packing`` is of class ``method``: the global batch is one of tokens. A plan of ``m`` rows takes as many packed rows a
micro-batch as have about as many tokens, and is left out where no whole number has within 10 %. Which rows are joined
is found before the first step, for all of them (best fit decreasing, as TRL's ``bfd``); none is cut. They are kept
apart as those of ``padding_free``, for the types of model in ``_JOINED``; under FlashAttention transformers does so in
a micro-batch of one row alone (``_is_packed_sequence``). Its trace is that of full rows with a mask, and its guard
trains on rows that are not packed. Carried by ``setup.dataset(rows, collator)`` and ``setup.collator(collator)``; a
script's Trainer is given them in the place of its data set.

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

import math
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.facts import predicts_next_token
from autofit.contract.layout import PARALLEL
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Status, Technique

from .joined import joining
from .multiple import FILLS, MULTIPLE, ToMultiple
from .packed import Filling, Packed, mean_tokens, not_packed, packed_share, packed_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script

_ALIKE = 0.9
"""Rows whose mean is this share of the longest are hardly padded."""
_STRATEGY = "train_sampling_strategy"
_GROUPS = "group_by_length"
_FREE = "padding_free"
_PACKED = "packing"
_PACKING_TRAINERS = ("Trainer", "SFTTrainer")
"""Trainers whose loss is known to take packed rows; TRL's own packing gives them such."""
_SAMPLER = "LengthGroupedSampler"
_JOINED = ("cohere", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2",
           "qwen3", "smollm3", "starcoder2")  # fmt: skip
_JOINS = "leave padding out: model = setup.model(...)"
_PACKS = (
    "pack the rows: train_dataset = setup.dataset(train_dataset, collator), data_collator = setup.collator(collator)"
)
_LINE = f"pad batches to a multiple of {MULTIPLE} tokens: data_collator = setup.collator(data_collator)"
_LINES = {"pad_to_multiple": _LINE, _FREE: _JOINS, _PACKED: _PACKS}


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
        multiple = f"rows of a multiple of {MULTIPLE} tokens" + ("" if on_cuda else ": a CPU gains little by it")
        joined = "rows of a micro-batch are joined without padding; attention keeps them apart"
        packed = "rows are joined to full ones; attention keeps them apart, and a step takes about as many tokens"
        return (
            pad,
            choice("pad_to_multiple", Kind.EXACT, _unpadded(facts), multiple, "offered" if on_cuda else "on_request"),
            choice(_GROUPS, Kind.METHOD, _ungrouped(facts), "rows of about the same length are trained on together"),
            choice(_FREE, Kind.EXACT, _apart(facts), joined, "on_request"),
            choice(_PACKED, Kind.METHOD, _unpacked(facts), packed),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value in {_GROUPS, _FREE} and others["micro_batch"] == 1:
            return "a micro-batch of one row has no padding"
        if value == _FREE and others[PARALLEL] not in {"none", "ddp"}:
            return f"it was not tried under parallel={others[PARALLEL]}"
        if value == _FREE and others["compile"] != "off":
            return "code would be compiled for each number of tokens"
        return not_packed(others, facts) if value == _PACKED else None

    def loaded_rows(self, value: Value, rows: int, facts: Facts) -> int:
        return max(1, round(rows * packed_share(facts))) if value == _PACKED else rows

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
        if value in {"pad_to_multiple", _PACKED}:
            told: dict[str, Any] = {"fill": 0}
            recipe.state[self.name] = told

            def ask(model: Any) -> Any:
                config: Any = getattr(model, "config", None)
                text = config.get_text_config() if hasattr(config, "get_text_config") else config
                told["fill"] = int(getattr(text, "pad_token_id", None) or 0)
                return model

            recipe.model_wraps.append(ask)
            room = recipe.facts.workload.seq_len
            if value == _PACKED:
                rows = self.loaded_rows(value, recipe.micro_batch, recipe.facts)
                recipe.join_rows(rows, lambda own, collate: Packed(own, collate, room))
                recipe.collate_wraps.append(lambda own: Filling(own, room, told))
            else:
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
            script=() if script is not None or value not in _LINES else (_LINES[value],),
            elsewhere={name: {"pad_to_multiple_of": MULTIPLE} for name in ("sft", "axolotl")} if padded else elsewhere,
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        """The longest rows are traced, whatever stands beside them; joined ones by no line that goes up with them."""
        if value == _FREE and part != "optimizer":
            return None
        return value if value == "pad_to_multiple" and part != "optimizer" else self.baseline

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        return plan if self.name in plan else {**plan, self.name: self.baseline}

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Count the micro-batches that are a multiple long, and those of packed rows."""
        if _alike(recipe.facts):
            return self.observe
        counted = {"micro_steps": 0, "multiples": 0}
        main = recipe.facts.model.main_input
        if recipe.plan[self.name] == _PACKED:
            counted["packed"] = 0

        def count(_module: nn.Module, args: Any, kwargs: Any) -> None:
            import torch

            ids = kwargs.get(main, args[0] if args else None)
            if not torch.compiler.is_compiling() and isinstance(ids, torch.Tensor):
                counted["micro_steps"] += 1
                counted["multiples"] += int(ids.shape[-1]) % MULTIPLE == 0
                if "packed" in counted:
                    apart = kwargs.get("attention_mask") is None and kwargs.get("position_ids") is not None
                    counted["packed"] += apart and int(ids.shape[-1]) == recipe.facts.workload.seq_len

        hooks.before(model, count)
        return lambda ran: {**counted, **_of_loader(ran.loader), **self.observe(ran)}

    def observe(self, ran: Ran) -> Seen:
        return dict(ran.recipe.state.get(self.name, {})) if ran.recipe.plan[self.name] == _FREE else {}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        if value == _PACKED and (left := seen.get("micro_steps", 0) - seen.get("packed", 0)):
            return (
                f"{left} of {seen['micro_steps']} micro-batches are not of packed rows (setup.dataset, setup.collator)"
            )
        return _not_joined(seen) if value == _FREE else _otherwise(value, seen)

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        if value == _PACKED:
            return packed_words(plan, facts)
        if value != _GROUPS or _own_strategy(facts.workload.script) == _GROUPS:
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
        if value == _PACKED:  # its trace is of full rows, and so is that of padded ones
            full = _used(facts) / mean_tokens(facts) * facts.workload.seq_len
            return Prior(time=(math.log(max(1.0, full)), 0.3), memory=(0.0, 0.1))
        if value == self.baseline:
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        return Prior(time=(0.0, 0.05), memory=(0.01, 0.02))


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
        return f"{steps - multiples} of {steps} micro-batches are no multiple of {MULTIPLE} tokens long"
    if value == "pad_to_multiple" and seen.get("pads_on") is False:
        return "the loader's collator is none that pads on: does the script make its loader itself?"
    if value != "pad_to_multiple" and seen.get("pads_on"):
        return f"batches are padded to a multiple of {MULTIPLE} tokens"
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
    longest = -(-work.seq_len // MULTIPLE) * MULTIPLE
    table = model.position_rows
    if table is not None and longest > table >= work.seq_len:
        return f"its table of positions has {table} rows, and the longest of the data would have {longest}"
    return None if work.script is None else _unknown(work.script)


def _apart(facts: Facts) -> str | None:
    """Why rows that are joined would not be kept apart, or nobody knows whether they are, in words."""
    script = facts.workload.script
    why = _not_joinable(facts)
    if script is None or why:
        return why
    if script.trainer != "Trainer":
        return f"{script.trainer or 'a loop'} may read of its model what has another shape where rows are joined"
    return _unlabelled(script)


def _not_joinable(facts: Facts) -> str | None:
    """Why a model may not keep joined rows apart, in words."""
    model = facts.model
    if model.model_type in _JOINED and predicts_next_token(model.architecture):
        return None
    return f"whether {model.architecture} keeps joined rows apart is not known"


def _unlabelled(script: Script) -> str | None:
    """Why a script's rows can't be joined, in words."""
    if script.batch.get("labels") != script.batch.get("input_ids"):
        return "its batches have no label for each token"
    return _unknown(script)


def _unknown(script: Script) -> str | None:
    """What of a script's batches can't be padded on, in words."""
    if script.generated:
        return "its Trainer pads prompts and completions itself"
    ids = script.batch.get("input_ids")
    if ids is None or script.batch.get("attention_mask") != ids:
        return "its batches have no mask that tells padding from tokens"
    known = {"input_ids", *FILLS}
    other = next((name for name, shape in script.batch.items() if len(shape) > 1 and name not in known), None)
    return None if other is None else f"its batches hold {other}, which nobody here knows how to pad"


def _unpacked(facts: Facts) -> str | None:
    """Why rows can't be packed, in words."""
    script = facts.workload.script
    if script is None:
        return _apart(facts)
    if script.trainer not in _PACKING_TRAINERS:
        return f"{script.trainer or 'a loop'} may read of its rows what packed ones have not"
    return _not_joinable(facts) or _unlabelled(script) or script.ungrouped


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
