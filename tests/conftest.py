import contextlib

import pytest

from autofit.forkserver import ForkServer

from .tiny import TESTS


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One fork server for all tests that want a process; it runs a job's ``fault.py`` where there is one."""
    started = ForkServer(tmp_path_factory.mktemp("server") / "log", "cpu", ("faulty",))
    with contextlib.closing(started):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(TESTS))
            patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another crawl where others compute too
            started.start()
        yield started
