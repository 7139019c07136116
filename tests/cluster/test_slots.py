"""Slots and the runner on them, with a cluster that is played: machines that are lost, join or are left out."""

import contextlib
import types

import pytest

from autofit import space
from autofit.cluster.nodes import Node
from autofit.cluster.remote import ClusterRunner
from autofit.cluster.slots import Slots
from autofit.contract.outcome import TRIAL, Crashed, Measured, Trial
from autofit.search.loop import FINAL
from autofit.system.errors import MachineError
from autofit.system.strict_json import dump_json
from tests.support.synthetic import GIB, Landscape, cpu_facts

FACTS = cpu_facts(limit_bytes=16 * GIB)
SPACE = space.build(FACTS)
LAND = Landscape(facts=FACTS, row_bytes=0.05 * GIB)


class LostError(Exception):
    """As Ray's error of an actor whose machine died."""


class TaskError(LostError):
    """As Ray's error of a task that raised."""


class PlayedHost:
    """A host; ``dies`` says whether its machine does while it runs a trial."""

    def __init__(self, refuses="", dies=False):
        self.refuses, self.dies, self.closed = refuses, dies, False

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *given: lambda: getattr(self, f"do_{name}")(*given))

    def do_open(self, facts, config):
        return self.refuses

    def do_close(self):
        self.closed = True

    def do_trial(self, told):
        if self.dies:
            raise LostError("the node died")
        plan = SPACE.plans[0].replaced(**told["plan"])
        trial = Trial(number=told["number"], plan=plan, outcome=LAND.outcome(plan), wall_seconds=1.0)
        return dump_json(TRIAL, trial), {"stderr.log": b"a log"}, ["a word"]


class PlayedCluster:
    def __init__(self, *hosts):
        self.hosts, self.left = list(hosts), []
        errors = types.SimpleNamespace(RayError=LostError, RayTaskError=TaskError)
        self.ray = types.SimpleNamespace(get=lambda task, **_: task(), exceptions=errors, kill=lambda _: None)

    def nodes(self, device, note):
        return [Node(id=str(place), name=f"node{place}", cards=1, cpus=1.0) for place, _ in enumerate(self.hosts)]

    @contextlib.contextmanager
    def group(self, nodes, bundles):
        yield nodes[0]
        self.left.append(nodes[0].name)

    def host(self, group, place, bundle, device, modules):
        return self.hosts[int(group.id)]

    def none_left(self):
        return MachineError("none is left")


def slots_of(*hosts):
    notes, cluster = [], PlayedCluster(*hosts)
    slots = Slots(cluster, "cpu", (), notes.append)
    slots.open(FACTS, {})
    return slots, cluster, notes


def run(slots, folder, notes):
    runner = ClusterRunner(folder / "trials", FACTS, slots, {}, note=notes.append)
    return runner.run(7, SPACE.plans[0], FINAL, purpose="final", limit_seconds=60.0)


def test_a_machine_that_joins_is_used_and_one_that_refuses_is_told():
    slots, cluster, notes = slots_of(PlayedHost(), PlayedHost(refuses="another tune is measuring on this device"))
    assert slots.count == 1
    assert notes[0] == "a device of node1 is left out: another tune is measuring on this device"
    cluster.hosts.append(PlayedHost())
    slots._looked -= 1000
    assert slots.count == 2
    assert notes[-1] == "a machine has joined: 2 trials run at once"
    slots.close()
    assert all(host.closed for host in cluster.hosts)
    assert sorted(cluster.left) == ["node0", "node1", "node2"], "every placement group was given back"


def test_a_trial_that_is_lost_with_its_machine_is_run_on_another(tmp_path):
    slots, _, notes = slots_of(PlayedHost(dies=True), PlayedHost())
    found = run(slots, tmp_path, notes)
    assert isinstance(found.outcome, Measured)
    assert (found.number, slots.count) == (7, 1)
    assert "trial 7 was lost with its host on node0: it is run again" in notes
    assert notes[-1] == "node1: a word"
    assert (tmp_path / "trials" / "00007" / "stderr.log").read_text() == "a log"
    assert (tmp_path / "trials" / "00007" / "trial.json").exists()


def test_a_plan_that_takes_two_machines_down_has_crashed(tmp_path):
    slots, _, notes = slots_of(PlayedHost(dies=True), PlayedHost(dies=True), PlayedHost())
    found = run(slots, tmp_path, notes)
    assert isinstance(found.outcome, Crashed)
    assert found.outcome.reason == "killed with its host on node1"
    assert slots.count == 1


def test_where_no_machine_is_left_it_says_so(tmp_path):
    slots, cluster, notes = slots_of(PlayedHost(dies=True))
    cluster.nodes = lambda *_: []
    with pytest.raises(MachineError, match="none is left"):
        run(slots, tmp_path, notes)
