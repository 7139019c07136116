"""The world of an estimate: how many cards of one kind train together, in how many machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autofit.commands.request import Request
from autofit.contract.facts import Facts
from autofit.system.errors import InputError

MOST_CARDS = 65536
_HARDLY = 1.1
"""Times as long: no more is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Cards of one kind.

    Attributes:
        gpus: Of each machine.
        nodes: Machines.
    """

    gpus: int = 1
    nodes: int = 1

    @property
    def processes(self) -> int:
        """One for each card."""
        return self.gpus * self.nodes

    def of(self, facts: Facts) -> Facts:
        """The question for a rank of this world."""
        workload = dataclasses.replace(facts.workload, processes=self.processes, nodes=self.nodes)
        hardware = dataclasses.replace(facts.hardware, count=self.gpus)
        return dataclasses.replace(facts, workload=workload, hardware=hardware)

    def asking(self, request: Request) -> Request:
        """What is asked of a script, which each of these cards runs."""
        return dataclasses.replace(request, processes=self.processes)

    def words(self) -> str:
        """What the estimate says of it; empty for one card."""
        if self.processes == 1:
            return ""
        machines = f", {self.gpus} in each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.processes} cards{machines}: what a card needs is shown, and what all of them do in a second"


def asked_world(gpus: int | None, nodes: int | None, *, elsewhere: bool) -> World:
    """The world that was asked for.

    Args:
        gpus: Cards of a machine; ``None`` for one.
        nodes: Machines; ``None`` for one.
        elsewhere: Whether the card was named, and need not be here.

    Raises:
        InputError: A number is out of range, or several cards of a kind that nobody named.
    """
    for name, number in (("--gpus", gpus), ("--nodes", nodes)):
        if number is not None and not (isinstance(number, int) and 1 <= number <= MOST_CARDS):
            raise InputError(f"{name} {number} is out of range", hint=f"give a whole number from 1 to {MOST_CARDS}")
    world = World(gpus=gpus or 1, nodes=nodes or 1)
    if world.processes > MOST_CARDS:
        raise InputError(f"--gpus {gpus} --nodes {nodes} are {world.processes} cards", hint=f"at most {MOST_CARDS}")
    if world.processes > 1 and not elsewhere:
        raise InputError(
            "--gpus and --nodes need the kind of card", hint='name it, like --gpu "RTX 3090" or --memory 24GiB'
        )
    return world


def range_words(spread: float, *, processes: int, on_host: bool, slow_host: float) -> str:
    """What the predicted speeds are worth, to follow "samples/s are".

    Args:
        spread: Four trainings of five on one card are at most so many times faster or slower.
        processes: That train together.
        on_host: Whether any of the plans steps on the host.
        slow_host: How many times as long the slowest of them takes beside a host that issues an operator in 20 µs and
            not, as is usual, in 8.
    """
    several, waits = processes > 1, slow_host > _HARDLY
    least = f"{1 / spread / slow_host:.2f}{' (slow host)' * waits}"
    return (
        f"predicted{', not measured' * (not waits)}: four trainings of five{' on one card' * several} lie within "
        f"{least} to {spread:.2f} times them{'; how far the link between cards is off is not known' * several}"
        f"{'; less is known of steps on the host' * on_host}"
    )
