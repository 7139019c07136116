"""A Ray cluster: found, its machines compared with this one and with each other, its cards held in placement groups."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.cluster.host import describe_node, versions
from autofit.cluster.shared import Shared
from autofit.contract.facts import Device
from autofit.system.errors import InputError, MachineError
from autofit.system.files import added_environment

Note = Callable[[str], None]
_ADDRESS = re.compile(r"(ray://)?(?P<host>[^\s/:]+|\[[0-9a-fA-F:]+\])(:(?P<port>\d{1,5}))?")
AUTO, LOCAL = "auto", "local"
"""The cluster that this machine belongs to; one that is started for the tune, of this machine alone."""
_LOCAL_STORE_BYTES = 100 * 2**20
"""Of Ray's memory for what is sent: facts and logs."""
_CLIENT_PORT = 10001
_KNOCK_SECONDS = 10
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC, which Ray speaks, says first: HTTP/2's preface and empty settings."""
_FRAME_BYTES, _KIND, _SETTINGS = 9, 3, 4
"""Of a frame of HTTP/2: the length of its head, where its kind stands in it, and the kind that a server says first."""
_ANSWER_SECONDS, _PLACED_SECONDS, _REMOVED_SECONDS = 60.0, 20.0, 10.0
_SAME_MEMORY = 0.05
_ASKED_FOR_MORE = "; where the cluster asks for the token of ~/.ray/auth_token, set RAY_AUTH_MODE=token"
_NODE_LABEL = "ray.io/node-id"


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """What Ray's client raises where the cluster can't be reached any more, as an error that says what to do.

    Raises:
        MachineError: It can't be.
    """
    try:
        yield
    except ConnectionError as error:
        raise MachineError(
            f"the Ray cluster was lost: {last_line(error)}", hint="start it again; a tune goes on with --resume"
        ) from error


def check_address(address: str) -> None:
    """Refuse what is no address of a cluster, or a machine without Ray.

    Raises:
        InputError: It is.
    """
    found = _ADDRESS.fullmatch(address)
    bare = found is not None and not address.startswith("ray://") and found["port"] is None
    if address not in {AUTO, LOCAL} and (found is None or bare):
        raise InputError(
            f"--on {address!r} is no address",
            hint="local (this machine alone), auto (the cluster it belongs to), HOST:PORT, or ray://HOST[:PORT]",
        )
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--on {address}: Ray is not installed", hint="pip install 'autofit-train[ray]'")
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise InputError(
            f"--on {address}: Ray's client is not installed",
            hint="pip install 'ray[client]', or run the tune on a machine of the cluster with --on auto",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster that trials may run on.

    Attributes:
        address: By which the others reach it.
        cards: Its GPUs; on the CPU the machine counts as one.
        cpus: That Ray has of it.
    """

    id: str
    name: str
    address: str
    cards: int
    cpus: float


@dataclass(slots=True)
class Cluster:
    """A connection to a Ray cluster.

    Args:
        address: ``local``, ``auto``, ``HOST:PORT`` or ``ray://HOST[:PORT]``.
        shared: Of a user's own script, which is run on its machines.
    """

    address: str
    shared: Shared | None = None
    ray: Any = None
    _own: bool = False
    _where: str = LOCAL
    gone: bool = False
    _refused: dict[str, str] = field(default_factory=dict)
    _told: dict[str, Any] = field(default_factory=dict)
    _reference: tuple[str, int] | None = None

    def connect(self) -> None:
        """Connect to it.

        Raises:
            MachineError: There is none, or its Ray or Python is another version.
        """
        self._reach(self.address)
        self.ray = _ray()
        if self.ray.is_initialized():
            return
        try:
            where = self.address
            if where == AUTO:
                where = _found_by_ray()
                self._reach(where)
            self._where = where
            own = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES}
            more = own if self.address == LOCAL else {}
            with _signals_kept(), _own_token(self.address):
                self.ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **more)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            untold = self.address.startswith("ray://") and "RAY_AUTH_MODE" not in os.environ
            raise self._none(first, _ASKED_FOR_MORE if untold else "") from error
        self._own = True

    def _reach(self, where: str) -> None:
        """Knock at an address: Ray itself waits for minutes."""
        if why := _unreachable(where):
            raise self._none(why if where == self.address else f"{where}: {why}")

    def check(self) -> None:
        """Hold the cluster to be where it was; Ray itself ends this process a minute after its head is gone.

        Raises:
            ConnectionError: Nobody answers there, twice.
        """
        if _unreachable(self._where) and (why := _unreachable(self._where)):
            self.gone = True
            raise ConnectionError(f"{self._where}: {why}")

    def _none(self, why: str, more: str = "") -> MachineError:
        start = "start one by `ray start --head` here and `ray start --address HOST:6379` on the others; `ray status`"
        return MachineError(f"--on {self.address}: no Ray cluster could be used there: {why}", hint=start + more)

    def device(self, wanted: str) -> Device:
        """``cuda`` or ``cpu`` for ``--device auto|cuda|cpu``.

        Raises:
            InputError: No such word.
            MachineError: A GPU is wanted, and no machine has one.
        """
        if wanted not in {"auto", "cuda", "cpu"}:
            raise InputError(f"--device {wanted!r} is not known", hint="auto, cuda or cpu")
        found = any(one["Resources"].get("GPU", 0) >= 1 for one in self._alive())
        if wanted == "cuda" and not found:
            raise MachineError(
                f"--on {self.address}: no machine of the cluster has a GPU that Ray knows of",
                hint="`ray status` lists them; --device cpu measures on the CPUs",
            )
        return "cuda" if found and wanted != "cpu" else "cpu"

    def _alive(self) -> list[dict[str, Any]]:
        return [one for one in self.ray.nodes() if one["Alive"]]

    def nodes(self, device: Device, note: Note) -> list[Node]:
        """The machines that can be used; whichever is left out is told once, with the reason."""
        fresh = []
        for one in self._alive():
            cards = int(one["Resources"].get("GPU", 0)) if device == "cuda" else 1
            cpus = one["Resources"].get("CPU", 0)
            if cards and cpus >= 1 and one["NodeID"] not in self._refused:
                name, address = one["NodeManagerHostname"], one["NodeManagerAddress"]
                fresh.append(Node(id=one["NodeID"], name=name, address=address, cards=cards, cpus=cpus))
        told = self._told
        told |= self._described([node for node in fresh if node.id not in told], device)
        here = versions()
        for node in fresh:
            if why := told[node.id] if isinstance(told[node.id], str) else _otherwise(here, told[node.id]):
                self._leave_out(node, why, note)
        equal = [node for node in fresh if node.id not in self._refused]
        if self._reference is None:
            self._reference = _most_numerous([told[node.id]["devices"] for node in equal])
        for node in equal:
            if why := _other_devices(self._reference, told[node.id]["devices"]):
                self._leave_out(node, why, note)
        return [node for node in equal if node.id not in self._refused]

    def _leave_out(self, node: Node, why: str, note: Note) -> None:
        self._refused[node.id] = why
        note(f"{node.name} is left out: {why}")

    def _described(self, nodes: Sequence[Node], device: Device) -> dict[str, Any]:
        """What each machine says of itself; in words why it says nothing."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        ask = self.ray.remote(num_cpus=0, max_retries=0)(describe_node)
        asked = {
            node.id: ask.options(scheduling_strategy=affinity(node.id, soft=False)).remote(device, self.shared)
            for node in nodes
        }
        return {one: self._answer(task) for one, task in asked.items()}

    def _answer(self, task: Any) -> Any:
        try:
            return self.ray.get(task, timeout=_ANSWER_SECONDS)
        except self.ray.exceptions.GetTimeoutError:
            return f"it gave no answer in {_ANSWER_SECONDS:g} s"
        except (self.ray.exceptions.TaskUnschedulableError, self.ray.exceptions.NodeDiedError):
            return "it left the cluster"
        except self.ray.exceptions.RayError as error:
            return f"autofit can't be run there: {last_line(error)}"

    def none_left(self) -> MachineError:
        """No machine can be used, with the reasons."""
        why = "; ".join(sorted(set(self._refused.values()))) or "none has a card that is free"
        return MachineError(
            f"--on {self.address}: no machine of the cluster can be used: {why}",
            hint="the same versions on every machine, and cards that nobody else holds; `ray status`",
        )

    @staticmethod
    def bundle(node: Node, device: Device, processes: int) -> dict[str, float]:
        """What some processes on a machine hold of it: a GPU each; of a CPU all."""
        return {"CPU": node.cpus} if device == "cpu" else {"CPU": 1.0, "GPU": float(processes)}

    @contextlib.contextmanager
    def group(self, nodes: Sequence[Node], bundles: Sequence[Mapping[str, float]]) -> Iterator[Any]:
        """A placement group on some machines, one bundle on each; gives ``None`` where others hold the cards."""
        util = importlib.import_module("ray.util")
        labels = [{_NODE_LABEL: node.id} for node in nodes]
        strategy = "STRICT_PACK" if len(nodes) == 1 else "STRICT_SPREAD"
        made = util.placement_group([dict(one) for one in bundles], strategy=strategy, bundle_label_selector=labels)
        try:
            yield made if made.wait(_PLACED_SECONDS) else None
        finally:
            removing = threading.Thread(target=_removed, args=(made,), daemon=True)
            removing.start()
            removing.join(_REMOVED_SECONDS)  # Ray waits for a head that is gone until it ends this process

    def host(self, kind: type, group: Any, place: int, bundle: Mapping[str, float], *given: Any) -> Any:
        """An actor in a bundle of a placement group, such as a :class:`~autofit.cluster.host.Host`; it has all of it.

        Args:
            kind: The actor's class, whose calls may run two at a time.
            group: The placement group.
            place: Of the bundle in it.
            bundle: What it holds.
            given: The actor's arguments.
        """
        inside = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = self.ray.remote(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0, max_concurrency=2
        )(kind)
        return actor.options(scheduling_strategy=inside(group, placement_group_bundle_index=place)).remote(*given)

    def close(self) -> None:
        """Leave the cluster."""
        if self._own:
            self.ray.shutdown()
            self._own = False


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """``ray.init`` has SIGTERM end the process: what stood there before, which writes the best so far, is put back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set it, and Ray leaves it alone there
            signal.signal(signal.SIGTERM, before)


def _removed(group: Any) -> None:
    """Remove a placement group; the connection may be what was lost."""
    with contextlib.suppress(Exception):
        importlib.import_module("ray.util").remove_placement_group(group)


def _ray() -> Any:
    """The module, which does not start a cluster of its own in the place of one that was lost."""
    with added_environment({"RAY_ENABLE_AUTO_CONNECT": "0"}):
        return importlib.import_module("ray")


@contextlib.contextmanager
def _own_token(address: str) -> Iterator[None]:
    """Give a cluster that is started for the tune a token of its own.

    Ray would write one into the home folder, which every cluster that is started there later asks for.
    """
    if address == LOCAL and "RAY_AUTH_MODE" not in os.environ:
        with added_environment({"RAY_AUTH_TOKEN": secrets.token_hex(32)}):
            yield
        os.environ.pop("RAY_AUTH_MODE", None)  # Ray has set it
    else:
        yield


def _found_by_ray() -> str:
    """The cluster that this machine belongs to: as its variable says, else the one that was joined last.

    Raises:
        ConnectionError: There is none.
    """
    if (told := os.environ.get("RAY_ADDRESS", AUTO)) not in {"", AUTO, LOCAL}:
        return told
    services = importlib.import_module("ray._private.services")
    return str(services.canonicalize_bootstrap_address(AUTO))


def _unreachable(where: str) -> str:
    """Why no Ray answers at an address; nothing where one does, or where none is told."""
    found = None if where in {AUTO, LOCAL} else _ADDRESS.fullmatch(where)
    if found is None:
        return ""
    port = int(found["port"] or _CLIENT_PORT)
    try:
        with socket.create_connection((found["host"].strip("[]"), port), timeout=_KNOCK_SECONDS) as there:
            if not _hidden_by_tls() and not _speaks_grpc(there):
                return f"what listens on port {port} is not Ray"
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _hidden_by_tls() -> bool:
    """Whether Ray's connections are encrypted, as Ray itself asks."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in {"1", "true"}


def _speaks_grpc(there: socket.socket) -> bool:
    """Whether the other end answers as a gRPC server does."""
    there.sendall(_GREETING)
    with there.makefile("rb") as answer:
        head = answer.read(_FRAME_BYTES)
    return len(head) == _FRAME_BYTES and head[_KIND] == _SETTINGS


def last_line(error: BaseException) -> str:
    """The last line of an error, which names what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _otherwise(here: Mapping[str, str], told: Mapping[str, Any]) -> str:
    """Why a machine can't stand for the one that tunes; nothing where it can."""
    return told["lacks"] or _other_versions(here, told)


def _other_versions(here: Mapping[str, str], told: Mapping[str, Any]) -> str:
    there = told["versions"]
    differ = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    pairs = [f"{name} {there.get(name, 'missing')} (here {here.get(name, 'missing')})" for name in differ]
    return f"other versions: {', '.join(pairs)}" if differ else ""


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return bool(one[0] == other[0] and abs(one[1] - other[1]) <= _SAME_MEMORY * other[1])


def _most_numerous(devices: Sequence[Sequence[Sequence[Any]]]) -> tuple[str, int] | None:
    """Of all devices the one that most others are like; ``None`` where there is none."""
    every = [one for some in devices for one in some]
    best = max(every, key=lambda one: sum(_alike(other, one) for other in every), default=None)
    return None if best is None else (best[0], best[1])


def _other_devices(reference: tuple[str, int] | None, devices: Sequence[Sequence[Any]]) -> str:
    others = sorted(
        {f"{one[0]}, {one[1] / 2**30:.3g} GiB" for one in devices if not reference or not _alike(one, reference)}
    )
    if not devices:
        return "its driver tells of no GPU"
    return (
        f"it has {' and '.join(others)}; the tune is for {reference[0]}, {reference[1] / 2**30:.3g} GiB"
        if others and reference
        else ""
    )
