import os
import time

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait for one another crawl where other tests compute too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from autofit.system.locks import LOCKS
from tests.support.servers import running
from tests.support.tiny import hear_signals


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Traces and the locks of devices are kept away from the user's, and shared among the tests of a process."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr("tempfile.tempdir", None)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def locks(tmp_path_factory):
    """The locks of devices, which other tunes on this machine would hold: these tests time nothing."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("locks")
        patch.setenv(LOCKS, str(folder))
        yield folder


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One fork server for all tests that want a process; it runs a job's ``fault.py`` where there is one."""
    with running(tmp_path_factory.mktemp("server"), ("faulty",)) as started:
        yield started


def pytest_configure():
    hear_signals()


def pytest_addoption(parser):
    parser.addoption(
        "--all-faults", action="store_true", help="every fault, tune and combination of a table, not a part"
    )
    parser.addoption("--minutes", type=float, help="begin no test after so many, and say how many were not begun")


BEGAN = time.monotonic()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > minutes * 60:
        pytest.skip(f"not begun within {minutes:g} minutes: the machine is slow")


LONGEST = {"test_cli.py", "test_end_to_end.py", "test_runner.py"}


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("by_hand") and not config.getoption("--all-faults"):
            item.add_marker(pytest.mark.skip(reason="one more of its kind: --all-faults"))
    items.sort(key=lambda item: item.path.name not in LONGEST)  # or one worker would wait for them at the end


FAULT_TABLE = pytest.StashKey()


@pytest.fixture
def fault_table(request):
    """Rows of a table that is printed at the end."""
    return request.config.stash.setdefault(FAULT_TABLE, [])


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(FAULT_TABLE, [])
    if rows:
        terminalreporter.section("faults")
        for row in rows:
            terminalreporter.write_line(f"{row['survived']:<4} {row['fault']:<48} {row['sees'][:120]}")
