"""Everything here needs a CUDA device, and is skipped without one."""

from pathlib import Path

import pytest

from autofit.machine.select import missing_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    missing = missing_cuda()
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
