"""A function over a list on every core: from several threads at once, and where no children may be had."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from autofit.system import parallel
from autofit.system.parallel import on_every_core


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
