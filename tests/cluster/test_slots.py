"""Slots and the runner on them, with a cluster that is played: machines that are lost, join or are left out."""

import contextlib
import dataclasses
import json
import types

import pytest

from autofit import space
from autofit.cluster.nodes import Node
from autofit.cluster.remote import ClusterRunner, ClusterServer, _one_curve
from autofit.cluster.slots import Slots
from autofit.contract.outcome import TRIAL, Crashed, Measured, OutOfMemory, Trial
from autofit.search.loop import FINAL
from autofit.system.errors import MachineError
from autofit.system.strict_json import dump_json
from autofit.training.guard.loss_curve import CURVE, Curve
from tests.support.synthetic import GIB, Landscape, cpu_facts

FACTS = cpu_facts(limit_bytes=16 * GIB)
SPACE = space.build(FACTS)
LAND = Landscape(facts=FACTS, row_bytes=0.05 * GIB)


class LostError(Exception):
    """As Ray's error of an actor whose machine died."""


class TaskError(LostError):
    """As Ray's error of a task that raised."""


class Task:
    """A call of a host; ready when the host has said what there is to say."""

    def __init__(self, call, ready):
        self.call, self.ready, self.found = call, ready, None

    def get(self):
        self.found = self.found or (self.call(),)  # asked twice, done once
        return self.found[0]


class PlayedHost:
    """A host.

    Args:
        dies: Its machine does while it runs a trial.
        outcome: Of a trial; by default what the landscape says.
        waits: Its ranks wait for others, until it is stopped.
    """

    def __init__(self, refuses="", *, dies=False, outcome=None, waits=False):
        self.refuses, self.dies, self.outcome, self.waits = refuses, dies, outcome, waits
        self.closed, self.stopped, self.shares = False, 0, []

    def __getattr__(self, name):
        def remote(*given, **named):
            task = Task(lambda: getattr(self, f"do_{name}")(*given, **named), lambda: not self.waits)
            if name == "stop":
                task.get()
            return task

        return types.SimpleNamespace(remote=remote)

    def do_open(self, facts, config):
        return self.refuses

    def do_close(self):
        self.closed = True

    def do_port(self):
        return 1234

    def do_stop(self):
        self.stopped += 1
        self.waits = self.stopped < 2  # its job has not begun when it is told the first time

    def do_trial(self, told, share):
        self.shares.append(share)
        if self.dies:
            raise LostError("the node died")
        plan = SPACE.plans[0].replaced(**told["plan"])
        outcome = Crashed(reason="killed by SIGKILL") if self.stopped else self.outcome or LAND.outcome(plan)
        trial = Trial(number=told["number"], plan=plan, outcome=outcome, wall_seconds=1.0)
        return dump_json(TRIAL, trial), {"stderr.log": b"a log"}, ["a word"]

    def do_job(self, files, config, share, *, seconds, early):
        self.shares.append(share)
        failed = "killed" if self.stopped else self.outcome
        written = {"curve.json": {"failed": failed}}
        if json.loads(files["job.json"])["kind"] == "trial":
            written = {"outcome.json": {"kind": "crashed" if failed else "measured", "reason": failed}}
        return 0, {name: json.dumps(one).encode() for name, one in written.items()} | {"by": self.refuses.encode()}


class PlayedCluster:
    gone, shared = False, None

    def __init__(self, *hosts):
        self.hosts, self.left = list(hosts), []
        errors = types.SimpleNamespace(RayError=LostError, RayTaskError=TaskError)
        self.ray = types.SimpleNamespace(
            get=lambda task, **_: task.get(), wait=self.wait, exceptions=errors, kill=lambda _: None
        )

    @staticmethod
    def wait(tasks, *, num_returns, timeout):
        done = [task for task in tasks if task.ready()][:num_returns]
        assert done or timeout is not None, "it would wait for ever"
        return done, [task for task in tasks if task not in done]

    def nodes(self, device, note):
        return [
            Node(id=str(place), name=f"node{place}", address=f"10.0.0.{place}", cards=1, cpus=1.0)
            for place, _ in enumerate(self.hosts)
        ]

    def bundle(self, node, device, processes):
        return {"CPU": 1.0}

    @contextlib.contextmanager
    def group(self, nodes, bundles):
        yield nodes
        self.left += [node.name for node in nodes]

    def host(self, kind, group, place, bundle, *given):
        return self.hosts[int(group[place].id)]

    def check(self):
        """It is there."""

    def none_left(self):
        return MachineError("none is left")


def slots_of(*hosts, machines=1):
    notes, cluster = [], PlayedCluster(*hosts)
    slots = Slots(cluster, "cpu", (), notes.append, processes=2 * machines, machines=machines)
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


def test_where_the_whole_cluster_is_gone_nobody_is_asked_again(tmp_path):
    slots, cluster, notes = slots_of(PlayedHost(dies=True), PlayedHost())

    def gone():
        cluster.gone = True
        raise ConnectionError("here:1: Connection refused")

    cluster.check = gone
    with pytest.raises(MachineError, match="the Ray cluster was lost: here:1: Connection refused"):
        run(slots, tmp_path, notes)
    left = list(cluster.left)
    slots.close()
    assert cluster.left == left, "Ray would wait for it"


def test_a_trial_over_two_machines_is_as_slow_and_as_large_as_its_worst_part(tmp_path):
    fine = LAND.outcome(SPACE.plans[0])
    slow = dataclasses.replace(fine, step_seconds=2 * fine.step_seconds)
    large = dataclasses.replace(fine, peak_bytes=fine.peak_bytes + 1)
    first, second = PlayedHost(outcome=slow), PlayedHost(outcome=large)
    slots, _, notes = slots_of(first, second, PlayedHost(), machines=2)
    assert slots.count == 1, "the third machine has no other to train with"
    found = run(slots, tmp_path, notes)
    assert (found.outcome.step_seconds, found.outcome.peak_bytes) == (slow.step_seconds, large.peak_bytes)
    (one,), (other,) = first.shares, second.shares
    assert one == {"first": 0, "count": 2, "world": 4, "machine": 0, "address": "10.0.0.0", "port": 1234}
    assert other == {**one, "first": 2, "machine": 1}
    assert {"node0: a word", "node1: a word"} <= set(notes)


def test_a_part_that_fails_ends_the_others_and_is_the_outcome(tmp_path):
    out = OutOfMemory(where="device", phase="forward", limit_bytes=2, peak_bytes=3)
    waits = PlayedHost(waits=True)
    slots, _, notes = slots_of(waits, PlayedHost(outcome=out), machines=2)
    assert run(slots, tmp_path, notes).outcome == out
    assert waits.stopped == 2, "it was told until it ended"


def test_a_machine_that_dies_takes_the_slot_with_it_and_the_trial_goes_to_others(tmp_path):
    waits = PlayedHost(waits=True)
    slots, _, notes = slots_of(waits, PlayedHost(dies=True), PlayedHost(), PlayedHost(), machines=2)
    assert slots.count == 2
    assert isinstance(run(slots, tmp_path, notes).outcome, Measured)
    assert (slots.count, waits.stopped, waits.closed) == (1, 2, True)
    assert "trial 7 was lost with its host on node0 and node1: it is run again" in notes


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_curve_of_several_machines_is_the_first_one_s_or_says_what_failed(tmp_path, failing):
    hosts = [PlayedHost(outcome="no such thing" if place == failing else None) for place in range(2)]
    slots, _, _ = slots_of(*hosts, machines=2)
    (tmp_path / "job.json").write_text(json.dumps({"kind": "curve"}))
    assert ClusterServer(tmp_path / "log", slots).run(tmp_path, kill_after_seconds=1) == 0
    assert json.loads((tmp_path / "curve.json").read_text())["failed"] == (None if failing is None else "no such thing")
    assert [host.shares[0]["first"] for host in hosts] == [0, 2]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_run_beside_the_trials_takes_all_machines_and_ends_where_one_fails(tmp_path, failing):
    hosts = [PlayedHost(outcome="no such thing" if place == failing else None) for place in range(2)]
    slots, _, _ = slots_of(*hosts, machines=2)
    (tmp_path / "job.json").write_text(json.dumps({"kind": "trial"}))
    assert ClusterServer(tmp_path / "log", slots).run(tmp_path, kill_after_seconds=1) == 0
    found = json.loads((tmp_path / "outcome.json").read_text())
    assert found["kind"] == ("measured" if failing is None else "crashed")
    assert found["reason"] == (None if failing is None else "no such thing")
    assert [host.shares[0]["first"] for host in hosts] == [0, 2]


def test_other_jobs_run_on_the_first_machine_alone(tmp_path):
    hosts = [PlayedHost(), PlayedHost()]
    slots, _, _ = slots_of(*hosts, machines=2)
    (tmp_path / "job.json").write_text(json.dumps({"kind": "rates"}))
    ClusterServer(tmp_path / "log", slots).run(tmp_path, kill_after_seconds=1)
    assert [host.shares for host in hosts] == [[None], []]


def test_the_curve_of_several_machines_holds_what_ranks_of_the_others_trained_otherwise():
    alike, other = Curve(losses=(1.0,)), Curve(losses=(2.0,))
    machines = [{"curve.json": dump_json(CURVE, one).encode()} for one in (alike, alike, other)]
    assert CURVE.validate_json(_one_curve(machines)) == dataclasses.replace(alike, others=(other,))
