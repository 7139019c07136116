"""What collectives cost: their seconds on the links of a world, how much of them compute hides, and NCCL's own memory.

A collective of ``n`` ranks over ``w`` machines moves ``wire`` bytes through each rank: of a payload of ``S`` bytes
``(n - 1)/n S`` for a gather or a scatter, twice that for an all-reduce (NCCL's *bus bandwidth* counts the same), ``S``
where each rank sends it to another (a permutation)::

    seconds = (start^r + (wire / rate)^r)^(1/r)        start = s log2(n), which every rank waits for
    rate    = 1 / (1/inside + 1/across)
    inside  = share of the card's link, NVLink or PCIe; another share for all-reduces that NVSwitch sums (NVLS)
    across  = share of a machine's network / w^p       only where the ranks are in several machines

While they run the device computes: FSDP gathers a layer ahead, DDP reduces while the backward pass goes on. What is
longer than what it runs beside stays, and of the rest a fitted share.

``s``, ``r``, ``p`` and the shares are in ``collective_coefficients.json``, made by ``tests/bench/fit_collectives.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from autofit.contract.layout import PARALLEL, engine_of, layout_of
from autofit.costmodel.seconds.operator_time import TIMED_KINDS, Operator, Operators, row_of
from autofit.machine.gpu_catalogue import PCIE_BYTES_PER_SECOND, since

if TYPE_CHECKING:
    from autofit.contract.facts import Workload
    from autofit.contract.plan import Value
    from autofit.contract.trace import Ints
    from autofit.costmodel.memory.parts import MicroPart
    from autofit.costmodel.seconds.roofline import Numbers
    from autofit.machine.gpu_catalogue import Card

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_COLLECTIVE = TIMED_KINDS.index("collective")
_BUCKET_BYTES = 25 << 20
"""Of DDP's reducer (``bucket_cap_mb``)."""
_ZERO_BUCKET_BYTES = 10**9
"""Of DeepSpeed's ``reduce_bucket_size`` and ``allgather_bucket_size``, 5e8 elements of 16 bits."""
_BACKWARD_SHARE = 2 / 3
"""Of a micro-step: two products of a backward pass to one of a forward pass."""
_NETWORK_BYTES_PER_SECOND = {7: 50e9, 8: 200e9, 9: 400e9}
"""Of eight cards with NVLink, as rented: 4 x 100 Gbit/s (DGX-1), 8 x 200 (A100), 8 x 400 (H100)."""
_PLAIN_NETWORK = 12.5e9
"""Of a machine without NVLink: 100 Gbit/s."""
_CPU_LINK, _CPU_START = 1e9, 1e-4
"""Gloo over loopback: of the right order and not more."""
_OF_TWO_BYTES, _OF_MORE_BYTES = 544 * 10**6, 688 * 10**6
"""Of a communicator on A100s, channels' buffers included, as ``nvidia-smi`` shows it (NVIDIA/nccl issue 964); it lies
outside PyTorch's allocator. It depends on NCCL's version, the topology and ``NCCL_BUFFSIZE``: to be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the ranks of a world talk over.

    Attributes:
        inside: Bytes a second of a card's link to the others of its machine, one way.
        across: Bytes a second of a machine's network, one way.
        sums: Whether the switch adds up all-reduces (NVLink SHARP).
        a_machine: Ranks in each.
        plain_start: Seconds before anything moves, where no law holds (a CPU); ``None`` where the law does.
    """

    inside: float
    across: float
    sums: bool = False
    a_machine: int = 8
    plain_start: float | None = None


def links_of(card: Card | None, *, processes: int, nodes: int, on_cpu: bool = False) -> Links:
    """Those that such cards usually have; the network is assumed, since no catalogue knows it."""
    a_machine = max(1, processes // nodes)
    if on_cpu:
        return Links(inside=_CPU_LINK, across=_CPU_LINK, a_machine=a_machine, plain_start=_CPU_START)
    major = 8 if card is None or card.capability is None else card.capability[0]
    nvlink = None if card is None else card.nvlink_bytes_per_second
    return Links(
        inside=PCIE_BYTES_PER_SECOND[major] if card is None else nvlink or card.bus_bytes_per_second,
        across=since(_NETWORK_BYTES_PER_SECOND, major) if nvlink else _PLAIN_NETWORK,
        sums=nvlink is not None and major >= 9,
        a_machine=a_machine,
    )


@functools.cache
def coefficients() -> dict[str, Any]:
    """Those that ship."""
    text = resources.files("autofit.costmodel.seconds").joinpath("collective_coefficients.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def collective(
    kind: CollectiveKind, payload_bytes: float, ranks: int, stride: int = 1, *, waits: bool = False
) -> Operator:
    """A collective as an operator.

    Args:
        kind: Which one.
        payload_bytes: Of the whole: what is gathered, scattered or reduced.
        ranks: Of the group.
        stride: From each rank of the group to the next.
        waits: Whether it sends activations, which the next operator needs.
    """
    code, batch = float(COLLECTIVES.index(kind)), 2.0 if waits else 1.0
    return Operator(kind="collective", moved_bytes=payload_bytes, batch=batch, m=float(ranks), k=float(stride), n=code)


def collectives_of(operators: Operators) -> Operators:
    """Those of some operators that are collectives of more than one rank."""
    return operators.at(np.flatnonzero((operators.kind == _COLLECTIVE) & (operators.m > 1)))


def seconds(operators: Operators, links: Links, fit: Mapping[str, float] | None = None) -> Numbers:
    """Of one call of each collective, of shape ``(operators,)``.

    Args:
        operators: As :func:`collective` makes them.
        links: What they run over.
        fit: Coefficients; those that ship by default.
    """
    fit = coefficients()["fit"] if fit is None else fit
    ranks, kind = operators.m, operators.n
    reduces = kind == COLLECTIVES.index("all_reduce")
    passed_on = kind == COLLECTIVES.index("permute")
    wire = operators.moved_bytes * np.where(passed_on, 1.0, (ranks - 1) / ranks) * np.where(reduces, 2.0, 1.0)
    # a group whose ranks are further apart than one machine is wide has each rank in another
    machines = np.minimum(ranks, np.ceil(ranks * operators.k / links.a_machine))
    if links.plain_start is not None:
        return np.asarray(links.plain_start * np.log2(ranks) + wire * ranks / links.inside)
    share = np.where(reduces, fit["summed" if links.sums else "ring"], fit["gathered"])
    # ranks that lie a machine apart share its network with the other groups that run beside them
    across = fit["network"] * links.across / machines ** fit["machines"]
    apart = np.maximum(1.0, np.minimum(operators.k, links.a_machine))
    rate = 1 / (1 / (share * links.inside) + (machines > 1) * apart / across)
    start = fit["start"] * np.log2(ranks)
    return np.asarray((start ** fit["ramp"] + (wire / rate) ** fit["ramp"]) ** (1 / fit["ramp"]))


def step_collectives(
    micro: MicroPart, parallel: Value, work: Workload, accumulation: int, *, half: bool = False, rows: float = 1.0
) -> Operators:
    """The collectives of a whole optimizer step, with all of their calls.

    Those of FSDP, of DeepSpeed, of tensor and of context parallelism are traced. DDP's reducer is not: it reduces the
    gradients in buckets, in the last micro-step. Nor is DeepSpeed where something waits on the host: it reduces them in
    buckets of 16 bits where it computes in 16 bits, in each micro-step from stage 2 on, and gathers the weights: after
    each step, in stage 3 in each pass.

    Args:
        micro: The micro-steps.
        parallel: What spreads the plan.
        work: The world.
        accumulation: Micro-steps to an optimizer step.
        half: Whether it computes in 16 bits.
        rows: Of a micro-batch, which ranks that share it send activations of.
    """
    if engine_of(parallel) == "ddp":
        return _in_buckets([("all_reduce", float(micro.buckets_bytes), 1)], _BUCKET_BYTES, work.processes)
    traced = collectives_of(micro.exchanges(accumulation, rows))
    if engine_of(parallel) == "deepspeed" and not len(traced.calls):
        stage = int(str(parallel)[-1])
        whole = float(micro.weights.sum()) * (0.5 if half else 1.0)
        reduces = ("all_reduce", 1) if stage == 1 else ("reduce_scatter", accumulation)
        gathers = 2 * accumulation if stage == 3 else 1
        found = [(reduces[0], whole, reduces[1]), ("all_gather", whole, gathers)]
        return _in_buckets(found, _ZERO_BUCKET_BYTES, work.processes)
    return traced


def _in_buckets(found: list[tuple[Any, float, int]], bucket_bytes: float, ranks: int) -> Operators:
    """Collectives of the whole world, each a kind, a payload and how often it is sent, cut into buckets."""
    counts = [max(1.0, np.ceil(payload / bucket_bytes)) for _, payload, _ in found]
    rows = [
        row_of(collective(kind, payload / count, ranks))
        for (kind, payload, _), count in zip(found, counts, strict=True)
    ]
    times = [count * often for (_, _, often), count in zip(found, counts, strict=True)]
    return Operators.from_rows(np.array(rows), np.array(times))


def exposed(
    exchanged: Numbers, computed: Numbers, parallel: Value, accumulation: Ints, fit: Mapping[str, float] | None = None
) -> Numbers:
    """Seconds of a step's collectives that are not hidden behind its compute, of shape ``(plans,)``.

    Args:
        exchanged: Seconds of all collectives of a step.
        computed: Seconds of the step without them.
        parallel: DDP communicates in the backward pass of the last micro-step alone.
        accumulation: Micro-steps to an optimizer step.
        fit: Coefficients; those that ship by default.
    """
    fit = coefficients()["fit"] if fit is None else fit
    beside = computed * _BACKWARD_SHARE / accumulation if engine_of(parallel) == "ddp" else computed
    return np.asarray(np.maximum(exchanged - beside, 0.0) + fit["unhidden"] * np.minimum(exchanged, beside))


def exposed_seconds(
    micro: MicroPart,
    parallel: Value,
    work: Workload,
    links: Links,
    *,
    accumulation: Ints,
    rows: Numbers,
    computed: Numbers,
    half: bool,
) -> Numbers:
    """What the collectives of each plan add to its step, of shape ``(plans,)``.

    Args:
        micro: The micro-steps that the plans share.
        parallel: What spreads them.
        work: The world.
        links: What its ranks talk over.
        accumulation: Micro-steps to an optimizer step, of each plan.
        rows: Of a micro-batch, of each plan.
        computed: Seconds of each step without collectives.
        half: Whether they compute in 16 bits.
    """
    if work.processes == 1:
        return np.zeros(len(accumulation))
    layout = layout_of(parallel, work.processes)
    shared = layout is not None and layout.tensor * layout.context > 1
    plans = list(zip(accumulation.tolist(), (rows if shared else np.ones_like(rows)).tolist(), strict=True))
    beside, between = dict[tuple[int, float], float](), dict[tuple[int, float], float]()
    for times, each in set(plans):
        found = step_collectives(micro, parallel, work, times, half=half, rows=each)
        took = found.calls * seconds(found, links)
        waits = shared & (found.batch > 1)
        beside[times, each], between[times, each] = float(took[~waits].sum()), float(took[waits].sum())
    exchanged, waited = (np.array([sums[plan] for plan in plans]) for sums in (beside, between))
    if links.plain_start is not None:
        return np.asarray(exchanged + waited)  # the cores that would hide it are the ones that send
    return np.asarray(exposed(exchanged, computed, parallel, accumulation) + waited)


def nccl_bytes(plan: Mapping[str, Value], work: Workload) -> int:
    """Device memory of the plan's communicators: one of the whole world, and one for each further group of a rank."""
    layout = layout_of(plan.get(PARALLEL, "none"), work.processes)
    if layout is None or layout.world == 1:
        return 0
    groups = [layout.world]
    groups += [
        size for size in (layout.replicate, layout.shard, layout.tensor, layout.context) if 1 < size < layout.world
    ]
    return sum(_OF_TWO_BYTES if size == 2 else _OF_MORE_BYTES for size in groups)
