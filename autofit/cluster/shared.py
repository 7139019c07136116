"""What the machines of a cluster have to share, where a user's own script is run on them: its folder and its text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What each machine has to have at the same place, where a user's own script is run.

    Attributes:
        folder: In which it is run.
        path: Of the file that is run.
        text: The user's own file, which has to be the same.
        sha256: Of it on the machine that tunes.
    """

    folder: str
    path: str
    text: str
    sha256: str

    def lacks(self) -> str:
        """Why the script can't be run on this machine, in words; empty where it can."""
        if not Path(self.folder).is_dir():
            return f"it has no folder {self.folder}"
        if not Path(self.path).is_file():
            return f"it has no file {self.path}"
        try:
            same = hashlib.sha256(Path(self.text).read_bytes()).hexdigest() == self.sha256
        except OSError as error:
            return f"{self.text} can't be read there: {error.strerror}"
        return "" if same else f"its {self.text} is another text than that of here"
