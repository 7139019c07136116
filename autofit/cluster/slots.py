"""Slots of a cluster: each holds the cards of one trial, in a placement group, with a host on each of its machines."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.cluster.host import Files, Host
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
        nodes: The machines; one, where a trial is not spread.
        hosts: The actors on them.
    """

    number: int
    nodes: Sequence[Node]
    hosts: Sequence[Any]
    held: contextlib.ExitStack
    alive: bool = True

    @property
    def name(self) -> str:
        """Of its machines, for the words."""
        return " and ".join(node.name for node in self.nodes)


class Slots:
    """All slots of a tune: made where cards are, lost with their machines, made anew where machines join.

    Args:
        cluster: The connection.
        device: ``cuda`` or ``cpu``.
        modules: To be loaded by the fork servers beforehand.
        note: Told of machines that are left out, join or are lost.
        processes: Of a trial.
        machines: Over which each trial is spread evenly, one GPU for a process.

    Attributes:
        closing: Whether the tune ends: trials that run now are killed.
    """

    def __init__(
        self,
        cluster: Cluster,
        device: Device,
        modules: tuple[str, ...],
        note: Note,
        *,
        processes: int = 1,
        machines: int = 1,
    ) -> None:
        self.cluster = cluster
        self.processes = processes
        self.machines = machines
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
            names = Counter(slot.name for slot in self.slots)
            self.note(
                (
                    "one trial runs at a time, on "
                    if len(self.slots) == 1
                    else f"{len(self.slots)} trials run at once, on "
                )
                + ", ".join(f"{name}{f' ({count})' if count > 1 else ''}" for name, count in names.items())
                + "; finalists run alone"
            )

    def extend(self, most: int | None = None) -> None:
        """Make slots of the cards that have none."""
        self._looked = time.monotonic()
        used = Counter(node.id for slot in self._living() for node in slot.nodes)
        room = {}
        for node in self.cluster.nodes(self.device, self.note):
            if not self._fitting(node):
                each = self.processes // self.machines
                where = "on one machine" if self.machines == 1 else f"on each of {self.machines} machines"
                self._say(node, f"it has {node.cards} GPUs, and a trial is of {each} processes {where}")
            room[node] = self._fitting(node) - used[node.id] - self._refused[node.id]
        added = 0
        while most is None or added < most:
            nodes = [node for node, free in room.items() if free > 0][: self.machines]
            if len(nodes) < self.machines:
                return
            slot = self._placed(nodes)
            if slot is None:
                room[nodes[0]] = 0
                continue
            added += 1
            for node in nodes:
                room[node] -= 1
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
        """Trials, or parts of them, that a machine has cards for; a CPU has room for one."""
        return 1 if self.device == "cpu" else node.cards // (self.processes // self.machines)

    def _placed(self, nodes: Sequence[Node]) -> Slot | None:
        """A slot on some machines; ``None`` where others hold their cards."""
        bundles = [self.cluster.bundle(node, self.device, self.processes // self.machines) for node in nodes]
        stack = contextlib.ExitStack()
        group = stack.enter_context(self.cluster.group(nodes, bundles))
        if group is None:
            stack.close()
            self._say(nodes[0], f"others of the cluster hold its {'CPUs' if self.device == 'cpu' else 'cards'}")
            return None
        hosts = []
        for place, bundle in enumerate(bundles):
            hosts.append(self.cluster.host(Host, group, place, bundle, self.device, self.modules, self.cluster.shared))
            stack.callback(self._end, hosts[-1])
        self._made += 1
        return Slot(number=self._made, nodes=tuple(nodes), hosts=tuple(hosts), held=stack)

    def _take_in(self, slot: Slot) -> None:
        """Give a slot the question; left out, and told, where one of its machines can't be used."""
        assert self._question is not None
        opened = [host.open.remote(*self._question) for host in slot.hosts]
        for node, answer in zip(slot.nodes, opened, strict=True):
            try:
                why = self.cluster.ray.get(answer)
            except self.cluster.ray.exceptions.RayError as error:
                why = last_line(error)
            if why:
                slot.alive = False
                self._refused[node.id] += 1
                self.note(f"a device of {node.name} is left out: {why}")
        if not slot.alive:
            slot.held.close()
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
        """A slot's host has died, with its machine or by itself.

        Raises:
            ConnectionError: The whole cluster is gone.
        """
        with self._lock:
            slot.alive = False
            slot.held.close()
            self.cluster.check()
            self.note(f"a host on {slot.name} was lost: {why}")

    def stop(self) -> None:
        """Kill what runs; what comes of it says nothing of its plan."""
        self.closing = True
        for host in (host for slot in self._living() for host in slot.hosts):
            with contextlib.suppress(Exception):  # it may be gone
                host.stop.remote()

    def close(self) -> None:
        """End every host, and give the cards back."""
        self.closing = True
        with self._lock:
            for slot in self._living():
                slot.alive = False
                if not self.cluster.gone:
                    slot.held.close()

    def _end(self, host: Any) -> None:
        ray = self.cluster.ray
        with contextlib.suppress(Exception):  # it may be gone
            ray.get(host.close.remote(), timeout=_CLOSED_SECONDS)
        with contextlib.suppress(Exception):
            ray.kill(host)
