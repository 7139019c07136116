"""Profiled events -> seconds by kind of work, which add up to the wall time of a step, and what binds.

On a CPU an operator's time is its own, without that of operators it calls; what of the wall time no operator takes is
the host's. On a GPU a kernel's time counts where it runs; where kernels overlap, the time is that of the kind that
stands first in ``_FIRST``, so that a copy behind a product costs nothing. Where no kernel runs, the GPU waits: for the
loader where that is at work, else for the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from autofit.training.profiling.kinds import WORDS, Kind, is_bus, is_loader, is_operator, is_optimizer, kind_of

Interval = tuple[float, float]
_FIRST: tuple[Kind, ...] = ("products", "attention", "elementwise", "optimizer", "collectives", "copies")
_BOUND: dict[str, tuple[Kind, ...]] = {
    "products": ("products", "attention"),
    "memory": ("elementwise", "optimizer"),
    "copies": ("copies",),
    "collectives": ("collectives",),
    "loader": ("loader",),
    "host": ("host",),
}
_SENTENCES = {
    "products": "matrix products and attention bind",
    "memory": "memory binds: operators that read and write more than they compute, the optimizer among them",
    "copies": "copies bind",
    "collectives": "collectives bind: processes wait for one another's gradients or weights",
    "loader": "the loader binds: the device waits for rows",
    "host": "the host binds: between operators and kernels the time is Python's and the launches'",
}
_LARGEST = 3
_MICRO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of work in an optimizer step.

    Attributes:
        seconds: Of a step, not hidden behind other work; all rows add up to the step.
        share: Of the step.
        calls: Operators (on a GPU: kernels) in a step.
        largest: Names of those that take the most time, the largest first.
    """

    kind: Kind
    words: str
    seconds: float
    share: float
    calls: float
    largest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of a step goes.

    Attributes:
        steps: Optimizer steps that were profiled.
        step_seconds: Wall time of one, its loader included, under the profiler, which slows it.
        binds: ``products``, ``memory``, ``copies``, ``collectives``, ``loader`` or ``host``: which takes the most
            time; ``None`` where that could not be seen.
        sentence: The same in words.
    """

    steps: int
    step_seconds: float
    rows: tuple[Row, ...]
    binds: str | None
    sentence: str


BREAKDOWN: TypeAdapter[Breakdown] = TypeAdapter(Breakdown)


@dataclass(slots=True)
class _Sums:
    """Over all steps: seconds and calls by kind, and seconds by operator or kernel."""

    spent: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[Kind] = field(default_factory=Counter)
    names: defaultdict[tuple[Kind, str], float] = field(default_factory=lambda: defaultdict(float))


def breakdown(events: Sequence[Any], *, wall_seconds: float, steps: int, on_cuda: bool) -> Breakdown:
    """Add up what ``torch.profiler`` has seen.

    Args:
        events: ``profile.events()``.
        wall_seconds: Of all profiled steps.
        steps: How many these were.
        on_cuda: Whether the steps ran on a GPU.
    """
    host = [one for one in events if not _on_device(one)]
    kernels = [one for one in events if _on_device(one) and not one.is_user_annotation]
    sums = _Sums()
    if kernels:
        _add_kernels(kernels, host, wall_seconds, sums)
    else:
        _add_operators(host, wall_seconds, sums)
    spent, calls, names = sums.spent, sums.calls, sums.names
    if on_cuda and not kernels:  # what the host's operators take is not what the device does
        spent = defaultdict(float, {"loader": spent["loader"], "unattributed": wall_seconds - spent["loader"]})
        names.clear()
    rows = tuple(
        Row(
            kind=kind,
            words=words,
            seconds=spent[kind] / steps,
            share=spent[kind] / wall_seconds,
            calls=calls[kind] / steps,
            largest=tuple(name for of, name in sorted(names, key=lambda one: -names[one]) if of == kind)[:_LARGEST],
        )
        for kind, words in WORDS.items()
        if spent[kind] or calls[kind]
    )
    binds = None if on_cuda and not kernels else _binds(spent)
    return Breakdown(
        steps=steps,
        step_seconds=wall_seconds / steps,
        rows=rows,
        binds=binds,
        sentence=_sentence(binds, spent, wall_seconds),
    )


def _binds(spent: Mapping[Kind, float]) -> str:
    return max(_BOUND, key=lambda name: sum(spent[kind] for kind in _BOUND[name] if kind in spent))


def _sentence(binds: str | None, spent: Mapping[Kind, float], wall_seconds: float) -> str:
    if binds is None:
        return "what binds can't be told: the profiler recorded no kernel of the device"
    share = sum(spent[kind] for kind in _BOUND[binds] if kind in spent) / wall_seconds
    return f"{_SENTENCES[binds]}, {share:.0%} of a step"


def _add_operators(
    host: Sequence[Any],
    wall_seconds: float,
    sums: _Sums,
) -> None:
    """Times of a training on the CPU: each operator's own."""
    for event in host:
        if event.is_async:
            continue
        kind = _kind_on_host(event)
        own = event.self_cpu_time_total * _MICRO
        if kind is None:
            continue
        sums.spent[kind] += own
        if is_operator(event.name):
            sums.names[kind, event.name] += own
            if (
                event.cpu_parent is None
                or _kind_on_host(event.cpu_parent) != kind
                or not is_operator(event.cpu_parent.name)
            ):
                sums.calls[kind] += 1
    waits = _merged(_interval(one) for one in host if one.is_async and kind_of(one.name) == "collectives")
    top = _merged(_interval(one) for one in host if not one.is_async and one.cpu_parent is None)
    sums.spent["collectives"] += _outside(waits, top)
    sums.spent["host"] = max(0.0, wall_seconds - sum(sums.spent.values()))


def _kind_on_host(event: Any) -> Kind | None:
    """The kind of a range of the host; ``None`` where its own time is nobody's but the host's."""
    above = event
    while above is not None:
        if is_loader(above.name):
            return "loader"
        if is_optimizer(above.name):
            return "optimizer" if is_operator(event.name) else None
        above = above.cpu_parent
    return kind_of(event.name) if is_operator(event.name) else None


def _add_kernels(
    kernels: Sequence[Any],
    host: Sequence[Any],
    wall_seconds: float,
    sums: _Sums,
) -> None:
    """Times of a training on a GPU: where each kind's kernels run, and what the GPU waits for between them."""
    operators = {one.id: one for one in host if is_operator(one.name)}
    by_kind: dict[Kind, list[Interval]] = {}
    for kernel in kernels:
        operator = operators.get(kernel.linked_correlation_id)
        kind = _kind_on_device(kernel.name, operator)
        begin, end = _interval(kernel)
        by_kind.setdefault(kind, []).append((begin, end))
        sums.calls[kind] += 1
        sums.names[kind, operator.name if operator else kernel.name[:60]] += end - begin
    taken: list[Interval] = []
    for kind in _FIRST:
        intervals = _merged(by_kind.get(kind, ()))
        sums.spent[kind] = _outside(intervals, taken)
        taken = _merged([*taken, *intervals])
    busy = sum(end - begin for begin, end in taken)
    loading = _merged(_interval(one) for one in host if is_loader(one.name))
    sums.spent["loader"] = _outside(loading, taken)
    sums.spent["host"] = max(0.0, wall_seconds - busy - sums.spent["loader"])


def _kind_on_device(kernel: str, operator: Any | None) -> Kind:
    if is_bus(kernel):
        return "copies"
    of_kernel = kind_of(kernel)
    if of_kernel == "collectives" or operator is None:
        return of_kernel
    of_operator = _kind_on_host(operator) or of_kernel
    if of_operator == "loader":
        return of_kernel
    return of_kernel if of_operator == "elementwise" else of_operator


def _on_device(event: Any) -> bool:
    return bool(event.device_type.name != "CPU")


def _interval(event: Any) -> Interval:
    return event.time_range.start * _MICRO, event.time_range.end * _MICRO


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _outside(intervals: Sequence[Interval], taken: Sequence[Interval]) -> float:
    """How much of a union lies outside another one."""
    both = sum(end - begin for begin, end in _merged([*intervals, *taken]))
    return both - sum(end - begin for begin, end in taken)
