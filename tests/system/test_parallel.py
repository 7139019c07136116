"""A function over a list on every core: from several threads at once, and where no children may be had."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from autofit.system import parallel
from autofit.system.errors import MachineError
from autofit.system.parallel import on_every_core
from tests.support.tiny import REPOSITORY, gone, offspring, wait_until


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: {0, 1})


def test_threads_do_not_take_the_work_of_one_another(monkeypatch):
    make = multiprocessing.get_context

    def slowly(method):
        time.sleep(0.1)  # between what a thread has said of its work and its forks another one begins
        return make(method)

    monkeypatch.setattr(parallel.multiprocessing, "get_context", slowly)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda factor: on_every_core(lambda value: value * factor, [1, 2, 3]), (1, 10, 100)))
    assert found == [[1, 2, 3], [10, 20, 30], [100, 200, 300]]


def _in_a_worker(told):
    told.put(on_every_core(lambda value: value + 1, [1, 2, 3]))


def test_a_worker_of_a_pool_does_it_alone():
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    worker = context.Process(target=_in_a_worker, args=(told,), daemon=True)
    worker.start()
    assert told.get(timeout=20) == [2, 3, 4]
    worker.join()


TOLD = """
from autofit.commands.shell.terminal import terminable
from autofit.system import parallel

def large(value):
    return bytes(1 << 20)  # mostly it is sending

parallel.os.sched_getaffinity = lambda _: {0, 1}
print("begun", flush=True)
with terminable():
    while True:
        parallel.on_every_core(large, range(100))
"""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
@pytest.mark.parametrize("everybody", [True, False], ids=["group", "parent"])
def test_a_signal_ends_every_process_at_once(number, everybody):
    ends = os.killpg if everybody else os.kill
    for wait in (0.11, 0.23, 0.37, 0.5):
        process = subprocess.Popen(
            [sys.executable, "-c", TOLD],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=REPOSITORY,
        )
        with process:
            process.stdout.readline()
            wait_until(lambda process=process: offspring(process.pid))
            time.sleep(wait)
            forks = offspring(process.pid)
            ends(process.pid, number)
            try:
                assert process.wait(10)
                assert gone(*forks)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def test_a_process_that_is_killed_is_told():
    with pytest.raises(MachineError, match="was killed"):
        on_every_core(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1, 2])


def test_an_error_of_the_function_is_its_callers():
    with pytest.raises(MachineError, match="a full disk") as caught:
        on_every_core(_refuse, [1, 2, 3])
    assert caught.value.hint == "make room"


def _refuse(_):
    raise MachineError("a full disk", hint="make room")
