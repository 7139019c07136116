"""Arrays that a script writes where its weights are random: its training would take them for its own models'."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

_ARRAYS = {
    ".arrow", ".bin", ".feather", ".joblib", ".mmap", ".npy", ".npz", ".parquet", ".pickle", ".pkl", ".pt", ".pth",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR
_NAMED_BY_WEIGHTS = "cache-"
"""How ``datasets`` calls a table that it names by what has made it, weights included."""


class Written:
    """Notes the files that this process opens to write, from when it begins."""

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}
        self._notes = False

    def begin(self) -> None:
        """Note from now on."""
        if not self._notes:
            self._notes = True
            sys.addaudithook(self._opened)

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, os.PathLike)) or not (args[2] or 0) & _WRITES:
            return
        with contextlib.suppress(OSError, TypeError):  # what is raised in here, the script would be told of its file
            path = Path(args[0])
            if path.suffix.lower() in _ARRAYS:
                self._paths[path.absolute()] = None

    def arrays(self) -> tuple[str, ...]:
        """Those of arrays that are there and will be, by their paths."""
        return tuple(str(one) for one in self._paths if _stays(one))


def _stays(path: Path) -> bool:
    """Whether a later run of the script would find a file again."""
    if path.name.startswith(_NAMED_BY_WEIGHTS) or not path.is_file():
        return False
    datasets = sys.modules.get("datasets")  # whose tables have names of their own here
    return datasets is None or not path.is_relative_to(datasets.config.HF_DATASETS_CACHE)
