"""The ranks of a job: forked, watched, and ended together; here they sleep, write and die instead of training."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from autofit.training import ranks
from autofit.training.ranks import PROGRESS_FILE, all_here, free_port, phase_of, rank_folder, result_file, run_ranks
from tests.support.tiny import gone


def say(folder, rank, words):
    (rank_folder(folder, rank) / PROGRESS_FILE).write_text(words)


def run(folder, work, count=3, *, on_cuda=False):
    """Run ranks that leave their pid beside their work; also how long it took and whether all are gone."""

    def told(rank):
        aside = folder / f"aside-{rank}"  # a rank may be killed while it writes
        aside.write_text(str(os.getpid()))
        aside.rename(folder / f"pid-{rank}")
        work(rank)

    def failed(rank):
        return "bad" in result_file(folder, rank).read_text()

    began = time.monotonic()
    found = run_ranks(folder, all_here(count), told, failed, on_cuda=on_cuda)
    seconds = time.monotonic() - began
    assert gone(*(int(path.read_text()) for path in folder.glob("pid-*")), seconds=1)
    return found, seconds


def test_each_rank_is_told_its_place_and_ends_by_itself(tmp_path):
    def work(rank):
        world = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        result_file(tmp_path, rank).write_text(repr(sorted(world.items())))
        os.write(1, f"said {rank}".encode())

    assert run(tmp_path, work)[0] is None
    told = [dict(eval(result_file(tmp_path, rank).read_text())) for rank in range(3)]
    assert [one["RANK"] for one in told] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in told} == {"3"}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert (rank_folder(tmp_path, 2) / "stdout.log").read_text() == "said 2"
    assert ranks.RANK not in os.environ


@pytest.mark.parametrize("how", ["writes a failure", "is killed", "raises"])
def test_one_rank_that_fails_ends_the_others(tmp_path, how):
    def work(rank):
        if rank != 1:
            time.sleep(60)
        if how == "writes a failure":
            result_file(tmp_path, rank).write_text("bad")
        elif how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise RuntimeError("no such thing")

    found, seconds = run(tmp_path, work)
    assert seconds < 5
    assert (found.rank, found.wrote) == (1, how == "writes a failure")
    if how == "is killed":
        assert os.WTERMSIG(found.status) == signal.SIGKILL
    if how == "raises":
        assert os.WEXITSTATUS(found.status) == 1


def test_the_rank_that_was_killed_is_told_and_not_the_one_whose_connection_broke(tmp_path):
    def work(rank):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the other is gone, as a collective does
            time.sleep(0.01)
            if (tmp_path / "pid-2").exists():
                time.sleep(0.05)
                result_file(tmp_path, rank).write_text("bad")
                return

    found, _ = run(tmp_path, work)
    assert (found.rank, found.wrote) == (2, False)


def test_of_two_failures_the_first_one_counts(tmp_path):
    pids = {os.posix_spawn("/bin/true", ["true"], {}): rank for rank in range(3)}
    for pid, rank in pids.items():
        result_file(tmp_path, rank).write_text("bad")
        os.utime(result_file(tmp_path, rank), (100 - rank, 100 - rank))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has taken it away
    assert ranks._ended(tmp_path, {}, lambda _: True) is None
    found = ranks._ended(tmp_path, pids, lambda _: True)
    assert (found.rank, found.wrote) == (2, True)
    assert pids == {}


def test_every_rank_in_the_oldest_phase_is_named(tmp_path):
    for rank, phase in ((1, "load"), (0, "load"), (2, "step 3")):
        rank_folder(tmp_path, rank).mkdir()
        say(tmp_path, rank, phase)
    assert phase_of(tmp_path) == "load (ranks 0, 1)", "rank 1 may spin and rank 0 wait for it"
    assert phase_of(tmp_path / "none") == ""


@pytest.mark.slow
@pytest.mark.parametrize("on_cuda", [False, True])
def test_a_rank_that_stands_still_is_found(tmp_path, monkeypatch, on_cuda):
    monkeypatch.setattr(ranks, "_STILL_SECONDS", 0.6)
    monkeypatch.setattr(ranks, "_SETTLED", 2)

    def work(rank):
        for step in range(12):
            say(tmp_path, rank, f"step {step}")
            time.sleep(0.2)
            if rank == 0 and step == 8:
                break
        if on_cuda and rank:  # as one that waits for a GPU
            while True:
                pass
        time.sleep(20)

    found, seconds = run(tmp_path, work, count=2, on_cuda=on_cuda)
    assert seconds < 10
    assert (found.rank, found.status, found.wrote) == (0, None, False)
    assert phase_of(tmp_path) == "step 8 (rank 0)"


def test_ranks_that_compute_and_say_nothing_are_let_be(tmp_path, monkeypatch):
    """A long step says nothing for a while, and uses the processor."""
    monkeypatch.setattr(ranks, "_STILL_SECONDS", 0.3)

    def work(rank):
        began = time.process_time()
        while time.process_time() - began < 1.0:
            pass
        result_file(tmp_path, rank).write_text("good")

    assert run(tmp_path, work, count=2)[0] is None


@pytest.mark.parametrize(
    ("shares", "still"), [((0.008,) * 4, True), ((0.0, 0.0, 0.0, 0.03), False)], ids=["all wait", "one computes"]
)
def test_what_each_rank_uses_of_a_processor_counts(monkeypatch, shares, still):
    """The threads of several process groups look for work all the time, which adds up over the ranks."""
    now = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ranks, "_cpu_seconds", lambda pid: shares[pid] * now[0])
    monkeypatch.setattr(ranks, "_wants_to_run", lambda _: False)
    beats = ranks._Beats((), on_cuda=False, _then=0.0)
    for _ in range(50):
        now[0] += 0.2
        found = beats.still({pid: pid for pid in range(4)})
    assert found is still


def test_the_first_words_of_many_ranks_are_no_steps(tmp_path, monkeypatch):
    """Eight ranks that say one after the other that they begin have not said yet how long a step takes."""
    now = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    files = tuple(tmp_path / str(rank) for rank in range(8))
    beats = ranks._Beats(files, on_cuda=True, _then=0.0)

    def still(saying=()):
        now[0] += 0.2
        for file in saying:
            file.write_text(str(now[0]))
            os.utime(file, (now[0], now[0]))
        return beats.still({})

    assert not any(still([file]) for file in files)
    assert not any(still() for _ in range(50))
    assert not any(still(files) for _ in range(ranks._SETTLED))
    assert any(still() for _ in range(50))


def test_a_free_port_is_free():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))
