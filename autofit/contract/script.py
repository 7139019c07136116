"""What is known of the user's own training script: what it was asked to do, what it does by itself, its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

_DIFFER = 0.9
Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How the loader of a user's script makes micro-batches, and how fast it does so by itself.

    Attributes:
        workers, prefetch, persistent, pinned: The script's own settings; the names are those of PyTorch's loader,
            ``num_workers``, ``prefetch_factor``, ``persistent_workers``, ``pin_memory``.
        fixed: Why another number of workers can't be had; ``None`` where it can.
        cores: Processors that its process may use.
        rows_per_second: Rows that were loaded without a training step, by the number of workers; 0: in the process
            itself. Empty where none were.
        worker_bytes: Memory that a worker held for itself; the data set's pages that it shares do not count.
    """

    workers: Annotated[int, Field(ge=0)] = 0
    prefetch: int | None = None
    persistent: bool = False
    pinned: bool = False
    fixed: str | None = None
    cores: Positive = 1
    rows_per_second: tuple[tuple[int, float], ...] = ()
    worker_bytes: int = 0

    def row_seconds(self, workers: int) -> float | None:
        """Seconds a row with so many workers: of the next smaller number that was timed; ``None`` where none was."""
        timed = [rate for count, rate in self.rows_per_second if count <= workers]
        return 1 / timed[-1] if timed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The user's own training script, run unmodified: what it was asked to do, and what it does by itself.

    Attributes:
        path: Of the script, absolute.
        arguments: What stands behind it on its command line.
        sha256: Of the script's text when it was tuned.
        modules: The SHA-256 of the text of each module that it imported and that is not installed, by its name.
        factory: What it is called, ``MODULE:FUNCTION``, where it is a factory that autofit's own script trains.
        call: Which of its calls of ``train()`` is tuned, from 1.
        trainer: The class of its Trainer; empty where it trains in a plain loop with Accelerate.
        micro_batch, accumulation: The script's own.
        steps: Optimizer steps that its Trainer is asked for, whatever the epochs; 0 where it is not.
        epochs_rows: Rows in all its Trainer's epochs; ``None`` where that is not known.
        epochs: Its Trainer's, of which the last may be a fraction, trained to the end of an optimizer step.
        own: Its other arguments that techniques decide on, as JSON values: fields of ``TrainingArguments``, and what
            else its Trainer is given, in words.
        evaluated_rows: That its Trainer evaluates at once; 0 where it is given none to evaluate.
        generated: Tokens of the longest completion of a prompt, where its Trainer generates what it trains on; else 0.
        generated_rows: That it generates at once on each device.
        engine: What generates, in words, where it is another program than the training; else empty.
        engine_share: The share of the device's memory that it takes beside the training.
        loads: What it says itself where it loads its model, as texts: ``attn_implementation``, ``dtype``.
        weights_dtype: Of its model's largest weight.
        adapter: The adapter that it puts on its model, in words.
        trains_adapter: Whether that is all that it trains, of a model that it loads.
        quantization: How it quantizes weights where it loads them, in words.
        checkpointing: What its model recomputes by itself, whatever its Trainer is told, or why it must not, in words.
        autocast: The dtype of the autocast in which it calls its model's layers itself, by the kind of device.
        own_optimizer: Whether it hands its Trainer an optimizer, or makes it in a method of its own.
        compiled: Whether it compiles its model itself.
        by_turns: Whether it steps one of its optimizers with some batches and another with others; in a plain loop.
        own_split: Why the split of its batch is its own; ``None`` where another can be put in.
        loader: Which of the loaders that it has prepared it trains on, from 0; in a plain loop.
        model: Which of the models that it has prepared is tuned, from 0: the one of which it trains most; in a plain
            loop.
        beside: Classes and numbers of parameters of the others, which stay as they are.
        loading: How that loader loads; ``None`` where it was not looked at.
        depends_on_rows: Why its loss depends on the rows of a micro-batch, so that accumulation is not exact.
        undivided: Whether its Trainer takes its loss for divided by the accumulation, and nobody divides it: the plan's
            gradients are kept as large as those of its own accumulation.
        weighs: Whether the loss of its plain loop is a mean that counts one row for more than another.
        averages: Whether its Trainer takes the mean of its micro-batches' losses, whatever rows they have.
        ungrouped: Why its Trainer can't take rows of about the same length together; ``None`` where it can.
        batch: Shapes of a micro-batch of its longest rows, by the names of the model's arguments.
        rows: In its data set; ``None`` where it has no length.
        sampled: Rows of it that were looked at, to find the longest.
        longest, mean_length: Numbers in a batch of the longest of these alone, and of one in the mean, all tensors
            together.
        tokens_a_row: Mean tokens of a row without its padding; ``None`` where it has none.
        lengths: Tokens of some rows without their padding, evenly spread over the data set; empty where that is None.
        places: Some rows, evenly spread over the data set, by their numbers in it; the shortest first.
        longest_places: The longest rows; the first ones together make the largest micro-batch.
        seconds: From its start until its training begins.
        wrote: Files of arrays that it wrote until then, by their paths, while its models had random weights.
    """

    path: str
    arguments: tuple[str, ...] = ()
    sha256: str
    modules: Mapping[str, str] = field(default_factory=dict)
    factory: str | None = None
    call: Positive = 1
    trainer: str
    micro_batch: Positive
    accumulation: Positive
    steps: Annotated[int, Field(ge=0)] = 0
    epochs_rows: float | None = None
    epochs: float = 1.0
    own: Mapping[str, Any] = field(default_factory=dict)
    evaluated_rows: Annotated[int, Field(ge=0)] = 0
    generated: Annotated[int, Field(ge=0)] = 0
    generated_rows: Annotated[int, Field(ge=0)] = 0
    engine: str = ""
    engine_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    loads: Mapping[str, str] = field(default_factory=dict)
    weights_dtype: str = "float32"
    adapter: str | None = None
    trains_adapter: bool = False
    quantization: str | None = None
    checkpointing: str | None = None
    autocast: Mapping[str, str] = field(default_factory=dict)
    own_optimizer: bool = False
    compiled: bool = False
    by_turns: bool = False
    own_split: str | None = None
    loader: int = 0
    model: int = 0
    beside: tuple[tuple[str, int], ...] = ()
    loading: Loading | None = None
    depends_on_rows: str | None = None
    undivided: bool = False
    weighs: bool = False
    averages: bool = False
    ungrouped: str | None = None
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: int | None = None
    sampled: int = 0
    longest: int = 0
    mean_length: float = 0.0
    tokens_a_row: float | None = None
    lengths: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    longest_places: tuple[int, ...] = ()
    seconds: float = 0.0
    wrote: tuple[str, ...] = ()

    def training_rows(self, global_batch: int) -> float | None:
        """Rows that its own training takes, from its beginning to its end; ``None`` where that is not known.

        Args:
            global_batch: Rows to an optimizer step.
        """
        if self.steps:
            return float(self.steps * global_batch)
        if self.epochs_rows is None or self.epochs.is_integer():
            return self.epochs_rows
        each = self.epochs_rows / self.epochs
        of_an_epoch = max(1, math.ceil(round(each) / global_batch))
        whole, rest = divmod(math.ceil(self.epochs * of_an_epoch), of_an_epoch)
        return whole * each + rest * global_batch

    def generated_at_once(self, rows: int) -> int:
        """Rows that its model generates at once on a device, where an optimizer step takes so many ``rows`` there."""
        if self.engine or not self.generated_rows:
            return 0
        return math.ceil(self.generated_rows * rows / (self.micro_batch * self.accumulation))

    def engine_bytes(self, total_bytes: int) -> int:
        """What another program that generates takes of a device's memory, beside the training."""
        return int(self.engine_share * total_bytes)

    @property
    def mean_share(self) -> float:
        """How large a row is in the mean beside the longest, from 0 to 1; 1 where they hardly differ."""
        share = self.mean_length / self.longest if self.longest and self.rows is not None else 1.0
        return share if share < _DIFFER else 1.0

    @property
    def typed(self) -> tuple[str, ...]:
        """What stands for it on a command line, and what stands behind ``--``."""
        return (self.path, *self.arguments) if self.factory is None else (self.factory, *self.arguments[2:])

    @property
    def tokens(self) -> int | None:
        """Tokens of the longest row, in the mean where a collator joins rows to one; ``None`` where there are none."""
        shape = self.batch.get("input_ids", ())
        return shape[-1] * min(shape[0], self.micro_batch) // self.micro_batch if len(shape) > 1 else None
