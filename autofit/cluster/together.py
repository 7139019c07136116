"""The machines of one slot at work together: each is asked at once, and the first that fails ends the others' part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autofit.cluster.nodes import Cluster
from autofit.training.ranks import Share

Answer = TypeVar("Answer")
_STOPPED_SECONDS = 1.0
"""Between two words to those who are to stop: one that comes before their job has begun is not heard."""
_LOOK_SECONDS = 10.0
"""Between two looks whether the cluster is still there."""


def shares(hosts: Sequence[Any], processes: int, address: str, ray: Any) -> list[dict[str, Any] | None]:
    """The ranks that each host runs, as JSON values; ``None`` for the only one.

    Args:
        hosts: Of the machines, the first one with rank 0.
        processes: Of the whole training.
        address: Of the first machine.
        ray: The module.
    """
    if len(hosts) == 1:
        return [None]
    port, here = ray.get(hosts[0].port.remote()), processes // len(hosts)
    return [
        dataclasses.asdict(
            Share(first=place * here, count=here, world=processes, machine=place, address=address, port=port)
        )
        for place in range(len(hosts))
    ]


def answers(
    asked: Sequence[Any], hosts: Sequence[Any], failed: Callable[[Answer], bool], cluster: Cluster
) -> tuple[list[Answer], int | None]:
    """What the hosts answer, in their order, and the place of the one that failed first.

    The others' answers mean nothing then: they were stopped, since their ranks would wait for those that are gone.

    Args:
        asked: What Ray has given for each host's part.
        hosts: The hosts.
        failed: Whether an answer says that its part failed.
        cluster: That they belong to.

    Raises:
        ConnectionError: The cluster is gone.
        ray.exceptions.RayError: A host died, or could not do it; the others were stopped.
    """
    ray, waiting, first = cluster.ray, list(asked), None
    died: BaseException | None = None
    while waiting:
        over = first is not None or died is not None
        done, waiting = ray.wait(waiting, num_returns=1, timeout=_STOPPED_SECONDS if over else _LOOK_SECONDS)
        if not done:
            cluster.check()
        for one in done:
            try:
                bad = failed(ray.get(one))
            except ray.exceptions.RayError as error:
                died, bad = died or error, True
            if bad and first is None:
                first = asked.index(one)
        if first is not None:
            for one in waiting:
                hosts[asked.index(one)].stop.remote()
    if died is not None:
        raise died
    return [ray.get(one) for one in asked], first
