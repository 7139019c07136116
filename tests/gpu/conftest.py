"""Everything here needs a CUDA device, and is skipped without one; an emulated one has no values and no speed."""

import gc
import os
from pathlib import Path

import pytest

from autofit.machine.select import missing_cuda
from tests.gpu.card import EMULATED, note

HERE = Path(__file__).parent
os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # read once; programs here are compared without workspaces


def pytest_collection_modifyitems(items):
    missing = missing_cuda()
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
            elif EMULATED and {"values", "speed"} & {mark.name for mark in item.iter_markers()}:
                item.add_marker(pytest.mark.skip(reason="the emulated device computes nothing"))


def pytest_collection_finish():
    """Tests here collect garbage to know what is alive; what the libraries have made need not be looked at again."""
    if not missing_cuda():
        gc.collect()
        gc.freeze()


def pytest_runtest_logreport(report):
    """A record keeps the reason of each failure when it comes, since a run may be cut off before it tells them."""
    if report.failed:
        note(report.nodeid, failed=report.longreprtext[-4000:])
