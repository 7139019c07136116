"""What ``autofit run`` starts: ``accelerate launch``, which ends as the script does where that is one process.

Accelerate's own ends with 1 whatever the script has ended with (1.15, ``simple_launcher``).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import NoReturn

from accelerate.commands import launch


def one_process(arguments: argparse.Namespace) -> NoReturn:
    """Run the script as Accelerate does; exit with its status, of a signal its number above 128."""
    command, environment = launch.prepare_simple_launcher_cmd_env(arguments)
    status = subprocess.run(command, env=environment, check=False).returncode
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    launch.simple_launcher = one_process
    launch.main()
