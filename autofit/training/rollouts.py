"""A Trainer that makes the rows it trains on: TRL's GRPO and RLOO, by whatever name their losses have.

A trial generates once as the script does, between two steps, completions as long as they may become: what that takes of
memory the training takes, too. In each step completions of that length are there at once, random ones. So what is timed
is all else: rewards, the reference model's pass, the loss, its gradients, the optimizer.
Where vLLM generates, no measurement starts it, and what it takes of the card is left free. The pass that weighs what it
has drawn is the Trainer's own.
Read in TRL 1.4 to 1.16: ``_generate_single_turn``, ``_calculate_rewards``, ``RepeatSampler`` and ``VLLMGeneration`` of
both trainers.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from autofit.contract.technique import replacing
from autofit.system.units import duration
from autofit.training.row_order import Wanted, expected, in_order, sample
from autofit.training.scripts.leave import Refused, generated_rows

if TYPE_CHECKING:
    import torch

_TRAINERS = {"GRPOTrainer", "RLOOTrainer"}
_GENERATES = "_generate_single_turn"
_ENGINE = "VLLMGeneration"
_RATIO = "importance_sampling_ratio"
_OLDEST = "1.4"
"""Release of TRL whose trainers generate in a function of their own, and tell of it what is known here."""


def makes_rows(kind: type) -> bool:
    """Whether a class of Trainer generates a completion of each prompt, and trains on both."""
    return any(one.__name__ in _TRAINERS and one.__module__.startswith("trl.trainer.") for one in kind.__mro__)


def check_generation(kind: type, arguments: Any, given: Mapping[str, Any], *, measured: bool) -> None:
    """Refuse a Trainer whose generation can't be set apart from its training.

    Args:
        kind: Its class.
        arguments: Its ``TrainingArguments``.
        given: What else it is given, by name.
        measured: Whether its training is measured; else it trains as it is, with a plan.

    Raises:
        Refused: It is such a one.
    """
    if not makes_rows(kind):
        if hasattr(arguments, "generation_batch_size") or getattr(arguments, "use_vllm", False):
            raise generated_rows(kind)
        return
    if measured:
        _check_measurable(kind, arguments, given)
        if arguments.use_vllm:
            _leave_engine_out(kind)


def _check_measurable(kind: type, arguments: Any, given: Mapping[str, Any]) -> None:
    """The same of a Trainer of TRL's."""
    if Version(there := version("trl")) < Version(_OLDEST):
        raise Refused(f"the {kind.__name__} of TRL {there} can't be measured", f"pip install -U 'trl>={_OLDEST}'")
    by_itself = [name for name in ("rollout_func", "environment_factory") if given.get(name) is not None]
    if by_itself:
        raise Refused(
            f"the script's {kind.__name__} makes its completions by its own {by_itself[0]}",
            "leave it out to tune the training: it may be put in again",
        )
    if getattr(arguments, "use_transformers_continuous_batching", False):
        raise Refused(
            f"the script's {kind.__name__} generates by continuous batching, whose cache takes what memory is free",
            "tune it with use_transformers_continuous_batching=False, under a ceiling that leaves the cache its share",
        )
    if not arguments.max_completion_length:
        raise Refused(
            f"the script's {kind.__name__} asks for completions of any length", "give it a max_completion_length"
        )


class _NoEngine:
    """Stands for vLLM until the training begins, from where on completions are there at once."""

    def __init__(self, **_: Any) -> None:
        self.vllm_client = self

    def get_server_info(self) -> dict[str, Any]:
        """What a server is asked for, to warn of another setting of its own."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        """Nobody waits for them."""

    def generate(self, **_: Any) -> Any:
        """Refuse.

        Raises:
            Refused: Always.
        """
        raise Refused("the script has vLLM generate before it trains", "leave that out to tune the training")


def _leave_engine_out(kind: type) -> None:
    """Have a class of Trainer start no vLLM, which need not even be there; for the rest of this process."""
    for one in kind.__mro__:
        module = sys.modules.get(one.__module__)
        if module is not None and hasattr(module, _ENGINE):
            setattr(module, _ENGINE, _NoEngine)


def at_once(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How many rows a Trainer generates at once, and by what: fields of :class:`~autofit.contract.script.Script`.

    Args:
        arguments: Fields of its ``TrainingArguments``; those of one that generates nothing have no such.
    """
    rows = arguments.get("steps_per_generation", 0) * arguments["per_device_train_batch_size"]
    engine, share = "", 0.0
    by_vllm = arguments.get("use_vllm", False)
    if by_vllm and arguments["vllm_mode"] == "server":
        engine = "a vLLM server"
    elif by_vllm:
        share = float(arguments["vllm_gpu_memory_utilization"])
        engine = f"vLLM on {share:.0%} of the card"
    return {"generated_rows": int(rows), "engine": engine, "engine_share": share}


def split_of_generation(arguments: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by which as many optimizer steps as before train on what is generated at once.

    Args:
        arguments: Of a Trainer; those of one that generates nothing need none.
        values: What is to be set in them.
    """
    if not hasattr(arguments, "steps_per_generation"):
        return {}
    rows, then = "per_device_train_batch_size", arguments.gradient_accumulation_steps
    steps = max(1, arguments.steps_per_generation * values.get("gradient_accumulation_steps", then) // then)
    at_once = steps * values.get(rows, getattr(arguments, rows)) * int(os.environ.get("WORLD_SIZE", "1"))
    whole = arguments.num_generations // math.gcd(arguments.num_generations, at_once)  # 1, but for few rows of a trace
    return {"steps_per_generation": steps * whole, "generation_batch_size": None}  # made of the other one


def own_split(trainer: Any) -> str | None:
    """Why the split of its batch is such a Trainer's own; ``None`` where another can be put in."""
    args = trainer.args
    if args.steps_per_generation % args.gradient_accumulation_steps == 0:
        return None
    at_once = args.steps_per_generation * args.per_device_train_batch_size
    return f"it generates {at_once} completions at once, which are no whole optimizer steps"


def averages(trainer: Any) -> bool:
    """Whether the loss of such a Trainer is a mean over the tokens of a micro-batch."""
    return getattr(trainer, "loss_type", None) == "bnpo"


@dataclass(frozen=True, slots=True)
class Completed:
    """Micro-batches of such a Trainer as it trains on them: prompts, and completions of the greatest length.

    Attributes:
        trainer: The Trainer.
        loader: Its loader, of prompts.
        joined: Whether each prompt and its completion are one row, as the model sees them.
    """

    trainer: Any
    loader: Any
    joined: bool = False

    @property
    def dataset(self) -> Any:
        """Its prompts."""
        return self.loader.dataset

    @property
    def batch_sampler(self) -> Any:
        """How its loader makes micro-batches; ``None`` where its data set does."""
        return self.loader.batch_sampler

    def collate_fn(self, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        """A micro-batch of some of its prompts."""
        import torch

        trainer, count = self.trainer, len(rows)
        prompts, images, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])  # noqa: SLF001 - no other place
        if images or any({"image", "images"} & row.keys() for row in rows):
            kind = type(trainer).__name__
            raise Refused(f"the script's {kind} generates for images", "it is tuned where prompts are texts")
        longest = max(len(one) for one in prompts)
        mask = torch.zeros((count, longest), dtype=torch.long)
        for place, one in enumerate(prompts):
            mask[place, longest - len(one) :] = 1
        whole = torch.ones((count, trainer.max_completion_length), dtype=torch.long)
        made = {
            "prompt_ids": torch.ones_like(mask),
            "prompt_mask": mask,
            "completion_ids": whole,
            "completion_mask": whole.clone(),
        }
        return as_trained(made) if self.joined else made | self._scores(torch.zeros(whole.shape))

    def _scores(self, of_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What belongs to completions of so many tokens: how likely each was, and how much better than others."""
        import torch

        of_rows = of_tokens[:, 0]
        if not _is_grpo(self.trainer):
            return {"advantages": of_rows.clone(), "old_logps": of_rows.clone()}
        found = {"advantages": of_rows.clone(), "num_items_in_batch": torch.tensor(of_tokens.numel())}
        if self.trainer.beta:
            found["ref_per_token_logps"] = of_tokens.clone()
        corrects = self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction
        if self.trainer.num_iterations > 1 or corrects:
            found["old_per_token_logps"] = of_tokens.clone()
        if self.trainer.use_vllm:
            found["sampling_per_token_logps"] = of_tokens.clone()
        if corrects:
            of_whole_rows = self.trainer.vllm_importance_sampling_mode.startswith("sequence")
            found[_RATIO] = (of_tokens[:, :1] if of_whole_rows else of_tokens).clone()
        return found

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches in the loader's order."""
        rows = self.trainer.args.per_device_train_batch_size
        for batch in self.loader:
            yield self.collate_fn(batch[:rows])


def as_trained(inputs: Any) -> Any:
    """A micro-batch of such a Trainer as prompts and completions in one."""
    if not isinstance(inputs, Mapping) or "completion_ids" not in inputs:
        return inputs
    import torch

    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    }


def take_prompts(trainer: Any, asked: Wanted, *, alike: bool = False) -> None:
    """Have such a Trainer train on the longest prompts first, then on those that are to be expected.

    What has no length keeps its order.

    Args:
        trainer: Before it trains.
        asked: Which rows.
        alike: Whether all it generates is of the same prompts, those to be expected.
    """

    def sampler(usual: Any) -> Any:
        prompts, micro_steps = usual.batch_size, usual.repeat_count  # generated for at once, and trained on since
        early, later = (asked.accumulation * steps / micro_steps for steps in (asked.warm_up, asked.steps))
        if alike:
            groups = [expected(asked.places, prompts, 1)] * math.ceil(early + later)
        else:
            then = expected(asked.places, prompts, math.ceil(later) + 1)
            longest = [*itertools.islice(itertools.cycle(asked.longest), prompts)]
            groups = [longest] * max(1, int(early))
            groups += [then[first : first + prompts] for first in range(0, len(then), prompts)]
        each, again = range(usual.mini_repeat_count), range(micro_steps)
        return in_order([place for group in groups for _ in again for place in group for _ in each], of=usual)

    if asked.longest:
        sample(trainer, sampler)


def generate_between(trainer: Any, told: Callable[[str], None]) -> Callable[[], None]:
    """Have such a Trainer train on completions that are there at once.

    Args:
        trainer: Before it trains.
        told: Given in words what generating took.

    Returns:
        Has it generate once for the prompts that came first, as much as it may; to be called between two steps, where
        the optimizer's state is there, as in all but the first one of a training. Where vLLM generates it does nothing.
    """
    generate, length = getattr(trainer, _GENERATES), trainer.max_completion_length
    made = _random_completions(trainer)
    asked: list[functools.partial[Any]] = []

    def completions(prompts: Sequence[Any], *given: Any, **more: Any) -> Any:
        if not asked:
            asked.append(functools.partial(generate, prompts, *given, **more))
        return _told_by(trainer, made(len(prompts)))

    def once() -> None:
        if not asked:
            told("it generates in a way of its own in its steps: their seconds and memory have that in them")
            return
        rows, seconds = len(asked[0].args[0]), None
        if not trainer.use_vllm:
            began = time.perf_counter()
            with replacing([(trainer.generation_config, "min_new_tokens", length)]):
                asked[0]()
            seconds = time.perf_counter() - began
        told(_took(trainer, rows, seconds))

    setattr(trainer, _GENERATES, completions)
    return once


def generate_alike(trainer: Any) -> None:
    """Have such a Trainer train on the same completions each time, in which some are better than others.

    By its own rewards random ones may be all alike, and nothing would be learned of them.

    Args:
        trainer: Before it trains.
    """
    import torch

    made, score = _random_completions(trainer, differ=True), trainer._generate_and_score_completions  # noqa: SLF001 - no other place

    def completions(prompts: Sequence[Any], *_: Any, **__: Any) -> Any:
        return _told_by(trainer, made(len(prompts)))

    def scored(prompts: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = score(prompts)
        own = found["advantages"]
        better = torch.randn(own.shape, generator=torch.Generator().manual_seed(0)) + 1  # else their sum is nothing
        drawn = {_RATIO: torch.ones_like(found[_RATIO])} if _RATIO in found else {}  # as if by the model itself
        return {**found, **drawn, "advantages": better.to(own)}

    setattr(trainer, _GENERATES, completions)
    trainer._generate_and_score_completions = scored  # noqa: SLF001 - as above


def _told_by(trainer: Any, completions: list[list[int]]) -> Any:
    """What a Trainer's generation returns: GRPO's tells how likely each token was, too, where vLLM generates."""
    if not _is_grpo(trainer):
        return completions
    return completions, [[-1.0] * len(one) for one in completions] if trainer.use_vllm else None


def _took(trainer: Any, rows: int, seconds: float | None) -> str:
    """What is told of a generation that took so long; ``None`` where another program would have made it."""
    args = trainer.args
    steps = args.steps_per_generation * getattr(trainer, "num_iterations", 1) / args.gradient_accumulation_steps
    many = f"{rows} completions of {trainer.max_completion_length} tokens"
    words = (
        f"generating {many} took {duration(seconds)}, whose memory counts; samples/s are those of training on "
        "completions that are there"
        if seconds is not None
        else f"{many} were there at once, as if vLLM had made them: samples/s are those of training on them"
    )
    if steps <= 1:
        return words
    return f"{words}; the script generates every {steps:.3g} steps, and computes no reward in the others"


def _is_grpo(trainer: Any) -> bool:
    """Whether a Trainer is GRPO's, which weighs tokens; RLOO's weighs rows."""
    return any(one.__name__ == "GRPOTrainer" for one in type(trainer).__mro__)


def _random_completions(trainer: Any, *, differ: bool = False) -> Callable[[int], list[list[int]]]:
    """Makes so many completions, the same each time: tokens that mean a text, and the one that ends it.

    Args:
        trainer: Whose they are.
        differ: Whether they are of any length up to the greatest; else of that.
    """
    tokenizer, length = trainer._tokenizer, trainer.max_completion_length  # noqa: SLF001 - no other place for it
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = min(len(tokenizer), trainer.model.config.get_text_config().vocab_size)
    usable = [one for one in range(known) if one not in special] or [*range(known)]

    @functools.cache  # steps that are timed make none
    def made(count: int) -> list[list[int]]:
        numbers = random.Random(0)
        sizes = [numbers.randint(1, length) if differ else length for _ in range(count)]
        return [[*numbers.choices(usable, k=size - 1), tokenizer.eos_token_id] for size in sizes]

    return lambda count: [[*one] for one in made(count)]
