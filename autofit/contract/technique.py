"""The contract between the core and a technique.

A technique is one file in ``strategies/``. It answers three questions: which choices it has for this model on
this machine, each with its reason; how a choice fills the recipe; how a choice is emitted. Beyond these it reads its
own evidence off what ran and says whether a choice really took effect, what it changes in the training, and what to
expect of it before anything was measured.
"""

from __future__ import annotations

import contextlib
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autofit.contract.emission import Emission
from autofit.contract.layout import PARALLEL, context_ranks, engine_of
from autofit.contract.observation import Hooks, Ran, Read, Seen
from autofit.contract.plan import Value
from autofit.system.errors import InputError as InputError  # noqa: PLC0414 - techniques raise it

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import Ints, TraceRecorder


class Kind(enum.StrEnum):
    """What a choice does to the training."""

    EXACT = "exact"
    """The same mathematics, up to rounding order."""
    NUMERIC = "numeric"
    """The same method in another arithmetic."""
    METHOD = "method"
    """Another training method."""


@dataclass(frozen=True, slots=True)
class Held:
    """The value that a user's script holds a technique at, and why.

    ``firm`` says that no other value can be had, also where the user names one; ``by_script`` that the script does it
    itself: then nothing is applied, written or checked for it.
    """

    value: Value
    reason: str
    firm: bool = False
    by_script: bool = False


Status = Literal["offered", "on_request", "withheld"]
Part = Literal["micro_steps", "optimizer", "evaluation"]
"""What a trace looks at: forward and backward passes, or the optimizer's step; behind the micro-steps an evaluation."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of a technique, and whether it is to be had here.

    ``offered`` joins the search, ``on_request`` needs ``--fix`` or ``--among``, ``withheld`` can't be had;
    ``reason`` says why, for each of them. ``at_best`` is its class beside values that make it milder than ``kind``;
    :meth:`Technique.kind` tells which.
    """

    value: Value
    kind: Kind
    status: Status
    reason: str
    at_best: Kind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What to expect of a choice against the baseline, before anything was measured.

    Each pair is a mean and a standard deviation of the natural logarithm of a factor: on the seconds per
    sample, and on the peak memory. ``extra_seconds`` is what a trial costs beyond its steps.
    """

    time: tuple[float, float] = (0.0, 0.1)
    memory: tuple[float, float] = (0.0, 0.1)
    extra_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOffload:
    """Where weights, gradients and optimizer state wait on the host: what of them is not there all the time.

    Attributes:
        held_bytes: Of weights and gradients, on the device while a micro-step runs.
        micro_step_bytes: Copied between host and device in each micro-step.
        step_bytes: Copied, or moved through the host's own memory, in each optimizer step.
    """

    held_bytes: float
    micro_step_bytes: float
    step_bytes: float


class Technique(ABC):
    """One technique. Stateless: an instance is only a name and its answers."""

    name: ClassVar[str]
    baseline: ClassVar[Value]
    """The value when the technique is off: what a script trains with that does not use it."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Distributions that it looks for, each with the oldest version that will do; empty where any will."""
    saves: ClassVar[Mapping[str, tuple[Value, str]]] = {}
    """The value that saves most of a category of memory (such as ``logits``), and what that value is, in words."""
    recomputes: ClassVar[bool] = False
    """Whether its values free activations that the backward pass needs, and compute them again."""
    says_itself: ClassVar[bool] = False
    """Whether a value tells people by itself what it is of; tables then show the baseline too."""
    ways: ClassVar[Mapping[str, Value]] = {}
    """The values that people call a way of training, by its name: LoRA. An estimate shows each way apart."""

    @abstractmethod
    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        """Every value the technique knows, offered or not, each with its reason. Simple ones first."""

    def baseline_for(self, facts: Facts) -> Value:
        """The value that stands for the technique being off: the baseline, unless that can't be had here."""
        return self.baseline

    def choice(self, value: Value, facts: Facts) -> Choice:
        """What is said of a value that it knows, also of one that :meth:`choices` does not list."""
        listed = (one for one in self.choices(facts) if one.value == value)
        return next(listed, Choice(value, Kind.EXACT, "on_request", "asked for"))

    def kind(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Kind:
        """The class of a value in the plan that it belongs to."""
        return self.choice(value, facts).kind

    def outdone_by(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Value | None:
        """The value with which such a plan is no slower and no larger than with this; ``None`` where none is known."""
        return None

    @abstractmethod
    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        """What is written for the value; ``plan`` is the whole plan that it belongs to."""

    def apply(self, value: Value, recipe: Recipe) -> None:  # noqa: B027 - most values need arguments only
        """Fill the recipe's slots with what no argument carries."""

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        """What stands in, while a trace runs, for kernels that fake tensors can't go through.

        It makes and keeps the tensors that the real one does.
        """
        return contextlib.nullcontext()

    def traced_as(self, value: Value, part: Part) -> Value | None:
        """The value that a part of a step is traced with in this one's place, since both keep the same tensors.

        ``None`` says that this part can't be traced.
        """
        return value

    def traced_in(self, plan: Mapping[str, Value]) -> bool:
        """Whether a plan that has this technique's value can be traced, as far as its other values go."""
        return True

    def runs_as(self, value: Value) -> Value:
        """The value whose micro-steps make the same tensors in the same order, wherever weights and gradients wait."""
        return value

    def alone_as(self, value: Value) -> Value:
        """The value whose first micro-step makes the same tensors as one that is the only one of its optimizer step."""
        return value

    def host_offload(self, value: Value, plan: Mapping[str, Value], facts: Facts, weights: Ints) -> HostOffload | None:
        """What a value that can't be traced leaves of its plain twin's weights, gradients and state on the device.

        Args:
            value: Of this technique.
            plan: The whole plan that it belongs to.
            facts: What the plan is for.
            weights: Bytes of each of the model's weights, of shape ``(weights,)``.

        Returns:
            ``None`` where it leaves all of them there, or is no matter of them.
        """
        return None

    def loaded_rows(self, value: Value, rows: int, facts: Facts) -> int:
        """Rows of a micro-batch as the model gets it, where the value joins so many of the data's to fewer."""
        return rows

    def untraced_bytes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> int:
        """Device memory that a plan with the value takes, at most, beyond what its trace shows."""
        return 0

    def bytes_if_asked(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> int:
        """Device memory of each row of an evaluation that is taken only where a metric reads its predictions."""
        return 0

    def fused_share(self, value: Value, facts: Facts) -> float:
        """The share of the model's element-wise operators, by their seconds, that a compiler leaves out."""
        return 0.0

    def period(self, value: Value) -> int:
        """After how many of the repeated layers what the value does to them repeats.

        A trace leaves out whole periods only.
        """
        return 1

    def in_script(self, model: nn.Module) -> str | None:
        """What a script's own model has of the technique, in words; ``None`` where nothing.

        The words are kept in :class:`~autofit.contract.script.Script`, in the field of the technique's name.
        """
        return None

    def trains_alone(self, model: nn.Module) -> bool:
        """Whether a script trains nothing else of its own model than what the technique has put on it."""
        return False

    def made_in_script(self, said: Any) -> Callable[[Callable[[], PreTrainedModel], bool], PreTrainedModel] | None:
        """What makes the model that a script loads with a ``quantization_config``, with random weights.

        Args:
            said: The config, as ``from_pretrained`` is given it or as a checkpoint has it; an object or a mapping.

        Returns:
            Given what makes the plain model, and whether weights are drawn (else they are zeros), it makes the model on
            the CPU. ``None`` where the technique does not know the config.

        Raises:
            InputError: It knows the config, and such weights are not trained.
        """
        return None

    def held(self, facts: Facts) -> Held | None:
        """The value that the user's script holds it at; ``None`` where a plan decides, or no script is tuned."""
        return None

    def own(self, facts: Facts) -> Value:
        """What the user's script does by itself; of no script the baseline."""
        held = self.held(facts)
        return self.baseline_for(facts) if held is None else held.value

    @classmethod
    def lacks(cls, facts: Facts, *packages: str) -> str | None:
        """What of some of its packages is missing or too old, in words, the first one; ``None`` where nothing is."""
        return next((words for name in packages if (words := facts.lacks(name, cls.packages[name]))), None)

    def word(self, value: Value) -> str | None:
        """The value in a table of plans, in a word or two; ``None`` where it is left out, as baselines are."""
        return str(value) if value != self.baseline or self.says_itself else None

    def leanest(self, facts: Facts) -> Value:
        """The value of class ``exact`` that saves the most memory, for a plan that only has to fit."""
        return self.baseline_for(facts)

    def spends_host(self, value: Value) -> bool:
        """Whether the value keeps in the host's memory what lies on the device without it."""
        return False

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Begin to watch a model that is about to train; what is returned reads what was seen, as JSON values.

        Most techniques need not watch: :meth:`observe` reads what they want to know off what ran.
        """
        return self.observe

    def observe(self, ran: Ran) -> Seen:
        """The technique's own evidence, as JSON values, read between two optimizer steps, after the second."""
        return {}

    @abstractmethod
    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        """Why the value did not take effect, or ``None`` where it did.

        Args:
            value: Of this technique.
            seen: What :meth:`observe` read; empty where nothing was seen.
            facts: What the plan is for.
        """

    def finding(self, seen: Seen) -> tuple[str, str] | None:
        """What a reader of the report should know of what was seen: a heading and a sentence."""
        return None

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        """Why the value can't go with the values of the techniques before it in ``ALL``, or ``None``."""
        return None

    def not_tried_split(
        self,
        value: Value,
        others: Mapping[str, Value],
        tried: Collection[Value],
        by_tokens: Collection[Value] | None = None,
    ) -> str | None:
        """Why the value can't go with processes that share the rows of a micro-batch, or ``None``.

        Args:
            value: The value.
            others: The plan.
            tried: Values that were tried with weights that several processes have a part of each.
            by_tokens: Those that were tried with processes that share the tokens of each row; ``None``: all.
        """
        parallel = others.get(PARALLEL, "none")
        known = tried if engine_of(parallel) == "tensor" else by_tokens if context_ranks(parallel) > 1 else None
        return None if known is None or value in known else f"{self.name}={value} was not tried under {parallel}"

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        """What the value changes in the training, in one sentence; ``None`` where nothing worth saying.

        ``plan`` is the whole plan that it belongs to.
        """
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """What to expect before anything was measured."""
        return Prior()

    def parse(self, text: str, facts: Facts) -> Value:
        """A value from the command line.

        Raises:
            InputError: The technique has no such value, or not here.
        """
        choices = self.choices(facts)
        value: Value = text
        if isinstance(self.baseline, int):
            if not text.isascii() or not text.isdigit() or len(text) > 9:
                raise InputError(
                    f"{self.name}={text}: a whole number is wanted", hint=f"write it like {self.name}={self.baseline}"
                )
            value = int(text)
        for choice in choices:
            if choice.value == value:
                return self.allow(choice, facts)
        raise InputError(f"{self.name} has no value {text!r}", hint=self.suggest(value, facts))

    def allow(self, choice: Choice, facts: Facts) -> Value:
        """The value of a choice that was asked for.

        Raises:
            InputError: It can't be had here.
        """
        if choice.status != "withheld":
            return choice.value
        here = ", ".join(str(one.value) for one in self.choices(facts) if one.status != "withheld")
        raise InputError(
            f"{self.name}={choice.value} can't be had here: {choice.reason}", hint=f"values of {self.name} here: {here}"
        )

    def knows(self, value: object, facts: Facts) -> bool:
        """Whether this is one of its values, to be had here or not; for plans that come out of a file.

        Numbers may be any above zero: which ones divide the batch is no question of what they mean.
        """
        if isinstance(self.baseline, int):
            return type(value) is int and value > 0
        return any(choice.value == value for choice in self.choices(facts))

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        """A plan out of a file, which an earlier version may have written, with this technique's value of today."""
        return plan

    def suggest(self, value: Value, facts: Facts) -> str:
        """A hint for a value that the technique does not have."""
        from autofit.system.errors import near

        return near(str(value), [choice.value for choice in self.choices(facts) if choice.status != "withheld"])


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@contextlib.contextmanager
def replacing(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other attributes in the place of some for a while: each an owner, a name, and what it is meanwhile."""
    before = [getattr_static(owner, name) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(changes, before, strict=True):
            setattr(owner, name, old)
