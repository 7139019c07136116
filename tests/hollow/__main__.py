"""Runs a command on emulated GPUs: ``python -m tests.hollow --gpu "RTX 4090" --gpus 2 -- COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from autofit.system.errors import InputError
from autofit.system.units import parse_size
from tests.hollow.cards import describe
from tests.hollow.setup import default_folder, is_ready

MOST_GPUS = 16


def main() -> int:
    """Becomes COMMAND, with the environment's ``python`` and ``autofit`` first on its path; 2 where it can't."""
    parser = argparse.ArgumentParser(prog="python -m tests.hollow", description=__doc__)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="made by python -m tests.hollow.setup")
    parser.add_argument("--gpu", default="H100 SXM", help="a name of autofit's catalogue of cards")
    parser.add_argument("--gpus", type=int, default=1, choices=range(1, MOST_GPUS + 1), metavar="N")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="in place of the card's own, such as 9.5GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no COMMAND")
    if not is_ready(given.dir):
        parser.error(f"{given.dir} has no environment; make it: python -m tests.hollow.setup {given.dir}")
    try:
        environment = environment_of(given.dir.resolve(), describe(given.gpu, given.memory), given.gpus)
    except InputError as error:
        parser.error(str(error))
    try:
        os.execvpe(command[0], command, environment)  # exit code and signals are COMMAND's own
    except OSError as error:
        parser.error(f"{command[0]}: {error.strerror}")


def size(text: str) -> int:
    """Bytes of ``9.5GiB`` and the like."""
    try:
        return parse_size(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def environment_of(folder: Path, card: str, count: int) -> dict[str, str]:
    """What a process needs to see the cards; all that descend from this process share the cards' memory."""
    state = os.memfd_create("hollow", 0)  # open in this process, which becomes COMMAND, as long as it lives
    ours = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "CUDA_VISIBLE_DEVICES"}}
    libraries = [str(folder / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return ours | {
        "PATH": os.pathsep.join([str(folder / "venv/bin"), os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": str(folder / "venv"),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "HOLLOW_CARD": card,
        "HOLLOW_GPUS": str(count),
        "HOLLOW_LAWS": str(Path(__file__).with_name("clock.py")),
        "HOLLOW_STATE": f"/proc/{os.getpid()}/fd/{state}",
        "USE_PYTORCH_KERNEL_CACHE": "0",  # what is compiled at run time is none, and must not stay for a card
    }


if __name__ == "__main__":
    sys.exit(main())
