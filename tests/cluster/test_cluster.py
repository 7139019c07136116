"""A tune over a Ray cluster: several nodes on this machine, one of them killed in the middle, and what is refused."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

import autofit
from autofit.cluster import nodes
from autofit.cluster.nodes import Cluster, check_address
from autofit.cluster.shared import Shared
from autofit.cluster.together import answers
from autofit.commands.scripts.named import shared
from autofit.contract.outcome import Measured
from autofit.registry import techniques
from autofit.system.errors import InputError, MachineError
from tests.support.machines import Killer, local_cluster, nothing_is_left
from tests.support.scripted import SCRIPTS, tiny_bert

HELD = [f"{one.name}={one.baseline}" for one in techniques() if one.name not in {"micro_batch", "accumulation"}]


def with_ray(test):
    test = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")(test)
    return pytest.mark.slow(test)


@pytest.mark.parametrize("address", ["", "here", "ray://", "host", "host:port", "http://host:1", "a b:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InputError, match="is no address"):
        check_address(address)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="Ray is not installed"):
        check_address("auto")


def test_no_cluster_at_the_address():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(MachineError, match="no Ray cluster could be used there: Connection refused"):
            Cluster(f"127.0.0.1:{bound.getsockname()[1]}").connect()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize("told", ["variable", "file"])
def test_the_cluster_that_this_machine_belonged_to_is_gone(told, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", gone if told == "variable" else "")
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(gone)
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # of other people
        with pytest.raises(MachineError, match=r"auto: no Ray cluster could be used there: [\d.]+:\d+: Connection"):
            Cluster("auto").connect()


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2p1", b"HTTP/1.1 400 Bad Request", b""])
def test_what_listens_at_the_address_and_is_not_ray_is_told_at_once(says):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            with server.accept()[0] as there:
                there.recv(1024)
                there.sendall(says)

        listening = threading.Thread(target=answer)
        listening.start()
        with pytest.raises(MachineError, match=f"what listens on port {port} is not Ray"):
            Cluster(f"127.0.0.1:{port}").connect()
        listening.join()


def test_the_cluster_of_this_machine_alone_is_started_and_ended(monkeypatch):
    asked, ended = [], []
    played = types.SimpleNamespace(
        is_initialized=lambda: False, init=lambda **given: asked.append(given), shutdown=lambda: ended.append(True)
    )
    monkeypatch.setitem(sys.modules, "ray", played)
    cluster = Cluster("local")
    cluster.connect()
    assert (asked[0]["address"], asked[0]["include_dashboard"]) == ("local", False)
    cluster.close()
    assert ended == [True]


@pytest.mark.parametrize(
    ("address", "mode", "tokens"), [("local", None, 1), ("local", "disabled", 0), ("here:1", None, 0)]
)
def test_the_cluster_of_a_tune_has_a_token_of_its_own_and_none_is_left_in_the_home_folder(
    address, mode, tokens, monkeypatch
):
    """Every cluster that is started later would ask for it."""
    seen = []

    def init(**_given):
        seen.append(os.environ.get("RAY_AUTH_TOKEN"))
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(nodes, "_unreachable", lambda _: "")
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    Cluster(address).connect()
    assert len([one for one in seen if one]) == tokens
    assert "RAY_AUTH_TOKEN" not in os.environ
    if address == "local":
        assert os.environ.get("RAY_AUTH_MODE") == mode
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is put back as it was


def test_a_client_that_is_asked_for_a_token_is_told_how_to_give_it(monkeypatch):
    def init(**_given):
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setattr(nodes, "_unreachable", lambda _: "")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    for address, told in (("ray://here", True), ("here:1", False)):
        with pytest.raises(MachineError, match="ray client connection timeout") as error:
            Cluster(address).connect()
        assert ("RAY_AUTH_MODE=token" in error.value.hint) is told


def test_ray_does_not_take_sigterm_from_who_connects(monkeypatch):
    def init(**_given):
        signal.signal(signal.SIGTERM, lambda *_: None)

    played = types.SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", played)
    before = signal.getsignal(signal.SIGTERM)
    try:
        Cluster("local").connect()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_machines_with_other_versions_or_devices_are_told_apart():
    here = {"torch": "2.13.0", "trl": "1.16.0"}
    assert nodes._other_versions(here, {"versions": here}) == ""
    found = nodes._other_versions(here, {"versions": {"torch": "2.12.0", "peft": "0.21"}})
    assert found == "other versions: peft 0.21 (here missing), torch 2.12.0 (here 2.13.0), trl missing (here 1.16.0)"
    small, large = ("A100", 40 * 2**30), ("A100", 80 * 2**30)
    reference = nodes._most_numerous([[small], [large, large], [("A100", 80 * 2**30 + 2**20)]])
    assert reference == large
    assert nodes._other_devices(reference, [large, large]) == ""
    assert nodes._other_devices(reference, [small]) == "it has A100, 40 GiB; the tune is for A100, 80 GiB"
    assert nodes._other_devices(reference, []) == "its driver tells of no GPU"


@pytest.mark.parametrize(
    ("missing", "words"),
    [("folder", "it has no folder"), ("path", "it has no file"), ("text", "can't be read there: No such file")],
)
def test_a_machine_without_the_script_is_left_out(missing, words, tmp_path):
    (tmp_path / "train.py").write_text("one")
    path = str(tmp_path / "train.py")
    there = {"folder": str(tmp_path), "path": path, "text": path, "sha256": shared(path).sha256}

    def left_out(own):
        return nodes._otherwise(nodes.versions(), nodes.describe_node("cpu", own))

    assert left_out(Shared(**there)) == ""
    assert words in left_out(Shared(**(there | {missing: str(tmp_path / "gone")})))
    (tmp_path / "train.py").write_text("another")
    found = left_out(Shared(**there))
    assert found == f"its {path} is another text than that of here"


@pytest.fixture(scope="module")
def machines():
    """A cluster: a head without processors, and two machines with one each."""
    with local_cluster() as local:
        local.joins("first")
        local.joins("second")
        yield local


@with_ray
def test_a_tune_goes_on_where_a_machine_dies_and_leaves_nothing_behind(machines, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killer = Killer(machines, at=1, joins="third")  # each of the two machines runs a trial then
    found = autofit.tune(
        "demo", output=tmp_path / "out", on=machines.address, device="cpu", seq_len=32, global_batch=16, trials=2,
        memory_limit="2GiB", fix=HELD, among={"micro_batch": [1, 16]}, guard=False, events=killer,
    )  # fmt: skip
    killer.done.join()
    trials = found.document.trials
    assert {type(one.outcome) for one in trials} == {Measured}
    assert (found.plan["micro_batch"], found.plan["accumulation"]) == (16, 1), "the same answer as on one machine"
    assert sorted(one.number for one in trials) == list(range(len(trials)))
    assert (tmp_path / "out" / "trials" / f"{found.document.trials[0].number:05d}" / "stderr.log").exists()
    assert any(words.startswith("2 trials run at once") for words in killer.notes)
    assert re.search(r"trial [01] was lost with its host on", " ".join(killer.notes))
    nothing_is_left()


@with_ray
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.by_hand)])
def test_a_script_is_tuned_on_machines_that_have_it(count, machines, tmp_path, monkeypatch):
    """Ray was started in another folder; two machines share one training, and launch it together."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    while len(machines.worker_nodes) < 2:
        machines.joins("another")
    monkeypatch.chdir(tmp_path)
    tiny_bert(tmp_path / "tiny")
    shutil.copy(SCRIPTS / "classify.py", "train.py")
    there = {"on": machines.address, "device": "cpu", "memory_limit": "2GiB"}
    found = autofit.tune(
        "train.py", arguments=("--model", "tiny"), output="out", processes=count, nodes=count, trials=1, guard=False,
        fix=[*(one for one in HELD if not one.startswith("parallel")), "micro_batch=8"], **there,
    )  # fmt: skip
    assert (found.document.workload.nodes, found.document.workload.global_batch) == (count, 8 * count)
    assert {type(one.outcome) for one in found.document.trials} == {Measured}
    assert not (tmp_path / "classified").exists()
    launched = autofit.verify("out", on=machines.address, tolerance=1)  # how fast it is says nothing here
    assert isinstance(launched.outcome, Measured), launched.outcome
    nothing_is_left()


@with_ray
@pytest.mark.by_hand
@pytest.mark.parametrize(("processes", "guarded"), [(2, True), (4, False)])
def test_a_trial_over_two_machines_outlives_one_of_them(processes, guarded, machines, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    while len(machines.worker_nodes) < 3:
        machines.joins("another")
    killer, out = Killer(machines, at=0), tmp_path / "out"
    found = autofit.tune(
        "demo", output=out, on=machines.address, device="cpu", seq_len=32, global_batch=16, trials=1,
        processes=processes, nodes=2, memory_limit="2GiB", guard=guarded, among={"micro_batch": [16 // processes]},
        fix=[*(one for one in HELD if "parallel" not in one), "parallel=ddp"], events=killer,
    )  # fmt: skip
    killer.done.join()
    assert {type(one.outcome) for one in found.document.trials} == {Measured}
    assert (found.document.workload.processes, found.document.workload.nodes) == (processes, 2)
    assert (found.plan["parallel"], found.plan["micro_batch"]) == ("ddp", 16 // processes)
    assert re.search(r"trial 0 was lost with its host on \S+ and \S+: it is run again", " ".join(killer.notes))
    ranks = {f"rank-{rank}" for rank in range(processes)}
    assert {path.name for path in (out / "trials" / "00000").glob("rank-?")} == ranks
    if guarded:
        assert found.document.guard.verdict == "same"
        kept = autofit.verify(out, on=machines.address, tolerance=0.9)
        assert isinstance(kept.outcome, Measured)
        assert kept.broken == ()
    nothing_is_left()


@with_ray
@pytest.mark.by_hand
def test_a_tune_that_is_ended_by_sigterm_writes_the_best_so_far_and_leaves_nothing_behind(machines, tmp_path):
    out, held = tmp_path / "out", [word for one in HELD for word in ("--fix", one)]
    said = tmp_path / "said"
    with said.open("w") as stderr:
        tune = subprocess.Popen(
            [sys.executable, "-m", "autofit", "tune", "demo", "--device", "cpu", "--seq-len", "32",
             "--global-batch", "16", "--on", machines.address, "--no-guard", "--output", str(out), *held],
            stderr=stderr, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while tune.poll() is None and "best so far" not in said.read_text():
            time.sleep(0.2)
        tune.terminate()
        assert tune.wait(60) == 143, said.read_text()
    assert "error: stopped by SIGTERM" in said.read_text()
    assert autofit.load(out).plan["micro_batch"]
    nothing_is_left()


def refuses():
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_cluster_that_is_gone_is_told_where_a_machine_gives_no_answer():
    here = f"127.0.0.1:{refuses()}"
    gone = Cluster(here, _where=here)
    gone.ray = types.SimpleNamespace(wait=lambda waiting, **_: ([], waiting))  # as Ray waits for what is not there

    @nodes.connected()
    def run():
        answers(["a trial"], ["a host"], bool, gone)

    with pytest.raises(MachineError, match=rf"the Ray cluster was lost: {here}: Connection refused") as told:
        run()
    assert "--resume" in told.value.hint
    assert gone.gone


def test_cards_are_given_back_though_nobody_takes_them(monkeypatch):
    """Ray waits for a head that is gone until it ends the process."""
    monkeypatch.setattr(nodes, "_REMOVED_SECONDS", 0.1)
    ended = threading.Event()
    made = types.SimpleNamespace(wait=lambda _: True)
    util = types.SimpleNamespace(placement_group=lambda *_, **__: made, remove_placement_group=lambda _: ended.wait(60))
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", util)
    began = time.monotonic()
    with Cluster("here:1").group([types.SimpleNamespace(id="1")], [{"CPU": 1}]) as held:
        assert held is made
    assert time.monotonic() - began < 30
    ended.set()


def test_ray_starts_no_cluster_in_the_place_of_one_that_was_lost(monkeypatch):
    seen = []
    monkeypatch.setattr(nodes.importlib, "import_module", lambda _: seen.append(os.environ["RAY_ENABLE_AUTO_CONNECT"]))
    for before in (None, "1"):
        if before:
            monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", before)
        nodes._ray()
        assert os.environ.get("RAY_ENABLE_AUTO_CONNECT") == before
    assert seen == ["0", "0"]


@with_ray
@pytest.mark.by_hand
def test_a_tune_whose_head_is_gone_ends_in_a_line(tmp_path):
    """Ray by itself ends the process after a minute, with its own log on the screen."""
    out, held, said = tmp_path / "out", [word for one in HELD for word in ("--fix", one)], tmp_path / "said"
    with local_cluster() as local, said.open("w") as stderr:
        local.joins("only")
        address = local.address
        tune = subprocess.Popen(
            [sys.executable, "-m", "autofit", "tune", "demo", "--device", "cpu", "--seq-len", "32",
             "--global-batch", "16", "--on", address, "--no-guard", "--output", str(out), *held],
            stderr=stderr, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while tune.poll() is None and "best so far" not in said.read_text():
            time.sleep(0.2)
        for node in local.worker_nodes:
            node.kill_all_processes(check_alive=False)
        local.head_node.kill_all_processes(check_alive=False)
        assert tune.wait(90) == MachineError.exit_code, said.read_text()
        local.worker_nodes.clear()
    assert f"error: the Ray cluster was lost: {address}: Connection refused" in said.read_text()
    assert "--resume" in said.read_text()
    nothing_is_left()


@with_ray
def test_a_cluster_without_gpus_or_with_other_versions_is_refused_in_a_line(machines, tmp_path, monkeypatch):
    asked = {"output": tmp_path / "out", "on": machines.address, "seq_len": 32}
    with pytest.raises(MachineError, match="no machine of the cluster has a GPU"):
        autofit.tune("demo", device="cuda", **asked)
    with contextlib.suppress(ImportError):
        import ray

        ray.shutdown()
    monkeypatch.setattr(nodes, "versions", lambda: {"torch": "0.1"})
    with pytest.raises(MachineError, match=r"no machine of the cluster can be used: .*other versions: .*torch"):
        autofit.tune("demo", device="cpu", **asked)
