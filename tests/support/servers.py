"""Fork servers for tests, that load modules of ``tests/support``."""

import contextlib

import pytest

from autofit.system.forking.server import ForkServer
from tests.support.tiny import SUPPORT


@contextlib.contextmanager
def running(folder, modules, device="cpu"):
    """A fork server that has been started, whose jobs find the modules of this folder; its log is in ``folder``."""
    started = ForkServer(folder / "log", device, modules)
    with contextlib.closing(started):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(SUPPORT))
            patch.setenv("OMP_NUM_THREADS", "1")
            started.start()
        yield started
