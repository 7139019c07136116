"""Facts that are read once: the model, the hardware, the workload, the installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from packaging.version import InvalidVersion, Version
from pydantic import Field, TypeAdapter

from autofit.contract.script import Positive, Script

Device = Literal["cuda", "cpu"]
LaunchPath = Literal["trainer", "loop"]
Task = Literal[
    "causal-lm",
    "masked-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "seq2seq-lm",
    "image-classification",
    "semantic-segmentation",
    "object-detection",
    "audio-classification",
    "ctc",
    "speech-seq2seq",
    "contrastive",
]
"""What a model is trained for; :mod:`autofit.training.tasks` has each one's batch."""

_CONV1D = {"gpt2", "openai-gpt", "imagegpt"}


def predicts_next_token(architecture: str) -> bool:
    """Whether a class of transformers is a causal language model, by its name."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """What the length of a row counts.

    Attributes:
        unit: Tokens of a text, pixels on the longer side of an image, samples or frames of a sound.
        usual: Where nobody says how many; ``None``: what is usual for a text.
        fixed: Why the model takes no other, in words; ``None`` where it does.
    """

    unit: Literal["tokens", "pixels", "samples", "frames"] = "tokens"
    usual: int | None = None
    fixed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What matters of a model: its sizes and what its class can do. No weights.

    Attributes:
        task: What it is trained for; of a script, that is the script's own business.
        auto: The Auto class of transformers that builds it.
        trained_on: What it learns, in words.
        main_input: What its class calls its main input (``main_input_name``).
        sample: What a row is, in a word: ``row`` (of tokens), ``image``, ``clip``, ``pair``.
        sample_tokens: Rows of tokens that make a sample; 0 where it is no text.
        depends_on_rows: Why the loss of a row depends on the others of its micro-batch, so that accumulation is not
            exact; ``None`` where it does not.
        undivided: Whether a Trainer leaves it to the model to divide its loss over an accumulation, and the model does
            not: gradients add up.
        attention: The implementation that transformers picks where none is asked for.
        attentions: Every implementation that the class says it supports.
        attention_dropout: Whether attention weights are dropped in training.
        plain_head: Whether the loss is transformers' own for causal language models, of nothing but what the output
            layer makes: no cap on the logits, no factor.
        liger: Whether Liger, where it is installed, has kernels for the model's type.
        unsharded: Why Accelerate can't split its weights by FSDP2; ``None`` where it can.
        lora_on_experts: Whether PEFT counts the stacked weights of its experts as linear layers.
        position_rows: Tokens of the longest row that its learned table of positions has room for; ``None`` without one.
        named: What the config itself says that it is of.
        products: Inputs, outputs and number of its linear layers, the output layer among them.
        new_modules: Its modules that are learned anew, which pretrained weights have nothing for: a classifier's head.
        tensor_split: The ways in which its class splits its modules over ranks that share a micro-batch, as
            transformers calls them (``tp_plan``); empty where it has no such plan.
        tensor_sizes: What each of those ranks has a part of, and how many: attention heads, entries of the vocabulary.
        context_split: Whether ranks can each have a part of a row's tokens: all of its attention is causal over the
            whole row, in modules whose mask Accelerate can drop, with heads that FlashAttention knows.
        lacking_kernels: Distributions whose kernels its layers would run, and that can't be imported.
        read_directly: Paths of its linear layers whose weights it reads itself, past what is put in their place;
            ``.*.`` stands for any number, so that each is a regular expression, too.
        unquantized: Where there are such layers: what loading it in fewer bits is to leave as it is.
        unread: What its class reads beside what its rows hold, in words: ``images``, ``sounds``.
    """

    name: str
    task: Task | Literal["script"] = "causal-lm"
    auto: str = "AutoModelForCausalLM"
    trained_on: str = "next-token prediction"
    main_input: str = "input_ids"
    sample: str = "row"
    sample_tokens: int = 1
    length: Length = Length()
    depends_on_rows: str | None = None
    undivided: bool = False
    architecture: str
    model_type: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    supports_checkpointing: bool
    layer_classes: tuple[str, ...] = ()
    unsharded: str | None = None
    has_experts: bool = False
    lora_on_experts: bool = False
    trust_remote_code: bool = False
    attention: str = "sdpa"
    attentions: tuple[str, ...] = ("eager", "sdpa")
    attention_dropout: bool = False
    plain_head: bool = False
    liger: bool = False
    position_rows: int | None = None
    named: tuple[str, ...] = ()
    products: tuple[tuple[int, int, int], ...] = ()
    new_modules: tuple[str, ...] = ()
    tensor_split: tuple[str, ...] = ()
    tensor_sizes: Mapping[str, int] = field(default_factory=dict)
    context_split: bool = False
    lacking_kernels: tuple[str, ...] = ()
    read_directly: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def plain_module(self) -> bool:
        """Whether it is a module of the user's own, and none of transformers'."""
        return not self.model_type

    @property
    def usual_seq_len(self) -> int:
        """The length where nobody says how many: of tokens 1024, or what the model is made for where that is less."""
        if self.length.usual is not None:
            return self.length.usual
        return min(1024, self.max_positions or 1024, self.position_rows or 1024)

    def rows_of(self, length: int) -> str:
        """Its rows of a length, in words: ``rows of 128 tokens``, ``clips with texts of 128 tokens``."""
        if self.task == "script" and not self.sample_tokens:
            return "the script's own rows"
        if self.length.unit == "pixels":
            return f"images of {length} pixels"
        texts = " with texts" if self.sample != "row" and self.length.unit == "tokens" else ""
        return f"{self.sample}s{texts} of {length} {self.length.unit}"

    @property
    def conv1d(self) -> bool:
        """Whether its layers are transformers' ``Conv1D``, which much that looks for ``nn.Linear`` passes by."""
        return self.model_type in _CONV1D


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device that training will use, and its host.

    Attributes:
        precisions: What the device computes by itself, of ``fp32``, ``tf32``, ``bf16`` and ``fp16``; an
            emulated precision is not in it.
        total_bytes: The device's memory; on the CPU the host's (or the control group's limit).
        free_bytes: What of it is free when asked.
        visible_id: How ``CUDA_VISIBLE_DEVICES`` calls the device.
        count: Devices of this kind that a launched process may see.
        others_bytes: Device memory that other processes hold.
        beside: UUID and memory of the cards that the other processes of the training have on this machine; what is told
            of the device itself is told of the one with the least memory free.
        l2_bytes: The cache that all of the device shares; 0 where it is not known, and on the CPU.
        threads: CPU threads that ``accelerate launch`` will give to the process.
        compilers: What a process finds to compile with, of ``cc``, ``c++`` and ``python.h``.
    """

    device: Device
    name: str
    uuid: str | None = None
    visible_id: str = "0"
    total_bytes: int
    free_bytes: int
    others_bytes: int = 0
    beside: tuple[tuple[str, int], ...] = ()
    host_total_bytes: int
    host_free_bytes: int
    precisions: tuple[str, ...]
    capability: tuple[int, int] | None = None
    l2_bytes: int = 0
    threads: int = 1
    driver: str | None = None
    count: int = 1
    compilers: tuple[str, ...] = ("cc", "c++", "python.h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be trained and inside of what.

    ``micro_batch x accumulation x data-parallel ranks == global_batch`` holds in every plan; see
    :mod:`autofit.contract.layout`.

    Attributes:
        processes: The world size: processes of the whole training, one on each device.
        nodes: Machines that they run on, as many on each.
        limit_bytes: The ceiling on each device; on the CPU of each process.
        host_limit_bytes: The ceiling on the host, for each process.
        script: The user's own training script; ``None`` where a model is tuned by its config.
        lengths: Of rows that are to be expected, in tokens, the shortest first; none is above ``seq_len``. Empty: all
            are as long.
        told_rows: Rows that these lengths were told of, before they were thinned out.
        evaluated_rows: That a Trainer evaluates at once beside the chosen plan, where more than usual were found to
            have room, or so many of a script's own rows; 0: what is usual, or a script's own, which was not tried.
    """

    seq_len: Annotated[int, Field(ge=2)]
    global_batch: Positive
    processes: Positive = 1
    nodes: Positive = 1
    limit_bytes: Positive
    host_limit_bytes: Positive
    launch_path: LaunchPath = "trainer"
    seed: int = 0
    script: Script | None = None
    lengths: tuple[Positive, ...] = ()
    told_rows: Annotated[int, Field(ge=0)] = 0
    evaluated_rows: Annotated[int, Field(ge=0)] = 0

    @property
    def own_rows(self) -> float | None:
        """Rows that a script's own training takes; ``None`` where the script does not tell, or there is none."""
        return None if self.script is None else self.script.training_rows(self.global_batch)

    @property
    def besides(self) -> str:
        """What a script's own training does that is not counted in the seconds of its steps, in words."""
        script = self.script
        if script is None:
            return "evaluating and saving"
        before = "its reference's log-probabilities, " * bool(script.own.get("precompute_ref_log_probs"))
        return f"{before}{'generating, ' * bool(script.generated)}evaluating and saving"


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a technique may look at when it says what it offers.

    Attributes:
        rates: How much of each kind of work (:data:`autofit.costmodel.seconds.roofline.WORK`) the device did in a
            second, as far as it was timed before the first trial.
        kernel_overhead_bytes: Device memory that the kernels of some of them take on top of the tensors, where that was
            measured; ``brought_bytes`` in files.
    """

    model: Model
    hardware: Hardware
    workload: Workload
    packages: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    kernel_overhead_bytes: Annotated[Mapping[str, int], Field(alias="brought_bytes")] = field(default_factory=dict)

    @property
    def tokens_a_sample(self) -> int:
        """Tokens of a sample; 1 where it is no text."""
        return self.model.sample_tokens * self.workload.seq_len or 1

    @property
    def depends_on_rows(self) -> str | None:
        """Why the loss of a row depends on the others of its micro-batch, in words; ``None`` where it does not."""
        script = self.workload.script
        return self.model.depends_on_rows if script is None else script.depends_on_rows

    def evaluating(self, rows: int) -> Facts:
        """The same where a Trainer evaluates so many rows at once; 0: what is usual."""
        return replace(self, workload=replace(self.workload, evaluated_rows=rows))

    def release(self, package: str) -> tuple[int, ...]:
        """The numbers of a distribution's version; ``(0,)`` where it is not installed or its version is none."""
        return _version(self.packages.get(package, "0")).release

    def lacks(self, package: str, oldest: str = "") -> str | None:
        """What is wrong with a distribution, in words; ``None`` where it is installed, and new enough."""
        there = self.packages.get(package)
        if there is None:
            return f"{package} is not installed: pip install {package}"
        if oldest and _version(there) < Version(oldest):
            return f"{package} {there} is too old, {oldest} is needed: pip install -U {package}"
        return None

    def lacks_triton(self) -> str | None:
        """What Triton lacks to compile kernels on this machine, in words; ``None`` where it has all."""
        if lacking := self.lacks("triton"):
            return lacking
        if "cc" not in self.hardware.compilers:
            return "no C compiler (gcc) is installed, which Triton needs"
        if "python.h" not in self.hardware.compilers:
            return "Python's headers (python3-dev) are not installed, which Triton needs"
        return None


FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)
