"""Slots of a cluster: each holds the cards of one trial, in a placement group, with a host on its machine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.cluster.host import Files
from autofit.cluster.nodes import Cluster, Node, Note, last_line
from autofit.contract.facts import FACTS, Device
from autofit.system.strict_json import dump_json

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_JOINED_SECONDS = 15.0
"""Between two looks for machines that have joined."""
_CLOSED_SECONDS = 15.0


@dataclass(slots=True, eq=False)
class Slot:
    """The cards of one trial.

    Attributes:
        number: Slots with a smaller one are used first, so that trials that run alone run on the same card.
        host: The actor on its machine.
    """

    number: int
    node: Node
    host: Any
    held: contextlib.ExitStack
    alive: bool = True


class Slots:
    """All slots of a tune: made where cards are, lost with their machines, made anew where machines join.

    Args:
        cluster: The connection.
        device: ``cuda`` or ``cpu``.
        modules: To be loaded by the fork servers beforehand.
        note: Told of machines that are left out, join or are lost.
        processes: Of a trial: as many GPUs of one machine.

    Attributes:
        closing: Whether the tune ends: trials that run now are killed.
    """

    def __init__(
        self, cluster: Cluster, device: Device, modules: tuple[str, ...], note: Note, processes: int = 1
    ) -> None:
        self.cluster = cluster
        self.processes = processes
        self.device = device
        self.modules = modules
        self.note = note
        self.slots: list[Slot] = []
        self._free: queue.PriorityQueue[tuple[int, Slot]] = queue.PriorityQueue()
        self._question: tuple[str, Files] | None = None
        self._said: set[str] = set()
        self._refused: Counter[str] = Counter()
        self._made = 0
        self.closing = False
        self._looked = -_JOINED_SECONDS
        self._lock = threading.RLock()

    @property
    def count(self) -> int:
        """Trials that can run at once now; machines that have joined are taken in."""
        with self._lock:
            if self._question is not None and time.monotonic() - self._looked >= _JOINED_SECONDS:
                before = len(self._living())
                self.extend()
                if len(self._living()) > before:
                    self.note(f"a machine has joined: {len(self._living())} trials run at once")
            return len(self._living())

    def _living(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.alive]

    def first(self) -> Slot:
        """A slot for what is done once; made where there is none yet.

        Raises:
            MachineError: No machine can be used.
        """
        with self._lock:
            if not self._living():
                self.extend(most=1)
            if not self._living():
                raise self.cluster.none_left()
            return min(self._living(), key=lambda slot: slot.number)

    def open(self, facts: Facts, config: Files) -> None:
        """Give the question to every slot, and make as many as there are cards.

        Raises:
            MachineError: No machine can be used.
        """
        with self._lock:
            self._question = dump_json(FACTS, facts), config
            early, self.slots = self._living(), []
            for slot in early:
                self._take_in(slot)
            self.extend()
            if not self.slots:
                raise self.cluster.none_left()
            names = Counter(slot.node.name for slot in self.slots)
            self.note(
                f"{len(self.slots)} trials run at once, on "
                + ", ".join(f"{name}{f' ({count})' if count > 1 else ''}" for name, count in names.items())
                + "; finalists run alone"
            )

    def extend(self, most: int | None = None) -> None:
        """Make slots of the cards that have none."""
        self._looked = time.monotonic()
        used = Counter(slot.node.id for slot in self._living())
        added = 0
        for node in self.cluster.nodes(self.device, self.note):
            if not self._fitting(node):
                self._say(
                    node, f"it has {node.cards} GPUs, and a trial is of {self.processes} processes on one machine"
                )
            for _ in range(self._fitting(node) - used[node.id] - self._refused[node.id]):
                if most is not None and added >= most:
                    return
                if (slot := self._placed(node)) is None:
                    break
                added += 1
                if self._question is None:
                    self.slots.append(slot)
                else:
                    self._take_in(slot)

    def _say(self, node: Node, words: str) -> None:
        """Tell once why a machine runs no trial, or not all that it could."""
        if node.id not in self._said:
            self._said.add(node.id)
            self.note(f"{node.name}: {words}")

    def _fitting(self, node: Node) -> int:
        """Trials that a machine has cards for; a CPU has room for one."""
        return 1 if self.device == "cpu" else node.cards // self.processes

    def _placed(self, node: Node) -> Slot | None:
        """A slot on a machine; ``None`` where others hold its cards."""
        bundle = {"CPU": node.cpus} if self.device == "cpu" else {"CPU": 1.0, "GPU": float(self.processes)}
        stack = contextlib.ExitStack()
        group = stack.enter_context(self.cluster.group([node], [bundle]))
        if group is None:
            stack.close()
            self._say(node, f"others of the cluster hold its {'CPUs' if self.device == 'cpu' else 'cards'}")
            return None
        host = self.cluster.host(group, 0, bundle, self.device, self.modules)
        stack.callback(self._end, host)
        self._made += 1
        return Slot(number=self._made, node=node, host=host, held=stack)

    def _take_in(self, slot: Slot) -> None:
        """Give a slot the question; left out, and told, where it can't be used."""
        assert self._question is not None
        try:
            why = self.cluster.ray.get(slot.host.open.remote(*self._question))
        except self.cluster.ray.exceptions.RayError as error:
            why = last_line(error)
        if why:
            slot.alive = False
            slot.held.close()
            self._refused[slot.node.id] += 1
            self.note(f"a device of {slot.node.name} is left out: {why}")
            return
        self.slots.append(slot)
        self._free.put((slot.number, slot))

    def take(self) -> Slot:
        """A free slot, the one that was made first; waits for one.

        Raises:
            MachineError: No machine is left.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                slot = self._free.get(timeout=1.0)[1]
                if slot.alive:
                    return slot
            with self._lock:
                if not self._living():
                    self.extend()
                if not self._living():
                    raise self.cluster.none_left()

    def give_back(self, slot: Slot) -> None:
        """A trial has ended on a slot."""
        if slot.alive:
            self._free.put((slot.number, slot))

    def lose(self, slot: Slot, why: str) -> None:
        """A slot's host has died, with its machine or by itself."""
        with self._lock:
            slot.alive = False
            slot.held.close()
            self.note(f"a host on {slot.node.name} was lost: {why}")

    def stop(self) -> None:
        """Kill what runs; what comes of it says nothing of its plan."""
        self.closing = True
        for slot in self._living():
            with contextlib.suppress(Exception):  # it may be gone
                slot.host.stop.remote()

    def close(self) -> None:
        """End every host, and give the cards back."""
        self.closing = True
        with self._lock:
            for slot in self._living():
                slot.alive = False
                slot.held.close()

    def _end(self, host: Any) -> None:
        ray = self.cluster.ray
        with contextlib.suppress(Exception):  # it may be gone
            ray.get(host.close.remote(), timeout=_CLOSED_SECONDS)
        with contextlib.suppress(Exception):
            ray.kill(host)
