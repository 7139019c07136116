"""Several machines of a Ray cluster on this one: they join, they are killed, and nothing of them may be left."""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psutil

from autofit.search.events import Silent


@contextlib.contextmanager
def local_cluster():
    """A cluster: a head without processors; a machine with one joins it by ``joins(name)``."""
    from ray.cluster_utils import Cluster

    held, before = {"object_store_memory": 80 * 2**20}, dict(os.environ)
    os.environ["RAY_TMPDIR"] = place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the path of a socket is short
    os.environ |= {"RAY_health_check_period_ms": "1000"}  # five answers missed: a dead machine is found in 5 s, not 15
    local = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **held}
    )

    def joins(name, environment=None, **resources):
        locks = tempfile.mkdtemp(prefix="locks-")  # as of a machine of its own
        seen = {"AUTOFIT_LOCKS": locks, **(environment or {})}
        return local.add_node(node_name=name, env_vars=seen, **{"num_cpus": 1, **resources}, **held)

    local.joins = joins
    try:
        yield local
    finally:
        local.shutdown()
        shutil.rmtree(place, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)


def hosts():
    """Processes of hosts and of their fork servers in this test's cluster; other people's are left out."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words, held = " ".join(process.cmdline()), process.environ()
            ours = held.get("TMPDIR") == os.environ.get("TMPDIR") and any(name.startswith("RAY_") for name in held)
            if ours and (any(name in words for name in ("ray::Host", "ray::Launcher", "forking.process"))):
                found.add(process.pid)
    return found


def ports():
    """On which a process of these tests listens, but for this one's and Ray's own."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("TMPDIR") == os.environ.get("TMPDIR") and process.pid != os.getpid()
            if ours and not any("ray" in word for word in process.cmdline()[:3]):
                listening = process.net_connections()
                found |= {one.laddr.port for one in listening if one.status == psutil.CONN_LISTEN}
    return found


def folders():
    """The folders that hosts write into."""
    return list(Path(tempfile.gettempdir()).glob("autofit-node-*"))


def nothing_is_left():
    """Neither a process nor a file of a host, nor a port of a rank's."""
    deadline = time.monotonic() + 20
    while (folders() or hosts() or ports()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (folders(), hosts(), ports()) == ([], set(), set())


class Killer(Silent):
    """Kills a machine that has cards or processors while trial ``at`` runs, once; then another one may join."""

    def __init__(self, local, at, joins=None):
        self.local, self.at, self.joins, self.notes, self.done = local, at, joins, [], None

    def note(self, words):
        self.notes.append(words)

    def trial_begins(self, number, plan, purpose, seconds_left):
        if self.done is None and number == self.at:
            import ray

            first = next(one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU"))["NodeID"]
            node = next(one for one in self.local.worker_nodes if one.node_id == first)
            self.done = threading.Timer(0.3, self.local.remove_node, (node, False))
            self.done.start()
        elif self.joins and self.done is not None and not self.done.is_alive():
            self.local.joins(self.joins)
            self.joins = None
