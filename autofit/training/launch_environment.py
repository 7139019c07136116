"""What ``accelerate launch`` would do with an Accelerate YAML, asked of Accelerate's own launcher.

A trial is not launched, it is forked; it gets the same environment this way, instead of a second idea of it.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from autofit.system.errors import InputError
from autofit.training.ranks import all_here, rank_environment


def check_environment() -> None:
    """Refuse an environment in which ``accelerate launch`` would fail, whatever it launches.

    Raises:
        InputError: ``OMP_NUM_THREADS`` is set to something else than one whole number, or Python drops docstrings.
    """
    if sys.flags.optimize > 1:
        raise InputError(
            "Python leaves out docstrings here, and transformers reads its own",
            hint="unset PYTHONOPTIMIZE, or set it to 1",
        )
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    try:
        int(threads)
    except ValueError:
        raise InputError(
            f"OMP_NUM_THREADS is {threads!r} here, and accelerate launch reads a whole number from it",
            hint="unset it, or set it to the threads that a process should have",
        ) from None


USE_CPU = {"ACCELERATE_USE_CPU": "true"}
"""Several processes on CPUs need it, and their launcher sets it not: each would be alone until a Trainer is made."""


def write_yaml(path: Path, settings: dict[str, Any]) -> None:
    """Write the Accelerate YAML: plain scalars and mappings only, no tags."""
    path.write_text(yaml.safe_dump(settings, sort_keys=True), encoding="utf-8")


@functools.cache
def launcher_parser() -> argparse.ArgumentParser:
    """What ``accelerate launch`` reads its options with, which is dear to make: a trace asks it, too."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    return parser


def launch_environment(config_file: Path, rank: int | None = None) -> dict[str, str]:
    """The environment of a process that ``accelerate launch --config_file`` starts on this machine.

    Reads Accelerate's own launcher (1.14 and 1.15 tried).

    Args:
        config_file: The YAML.
        rank: Of this process, whose environment tells already what torchrun would; ``None`` for the only process.

    Raises:
        InputError: Accelerate refuses the file.
    """
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args = launcher_parser().parse_args(["--config_file", str(config_file), "script.py"])
    try:
        args, defaults, mixed = _validate_launch_command(args)
    except ValueError as error:
        raise InputError(f"{config_file}: {error}", hint="the installed accelerate does not know this file") from error
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) + (["mixed_precision"] if mixed else [])
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environment = prepare_deepspeed_cmd_env(args)
    elif (args.use_fsdp or args.multi_gpu) and not args.cpu:
        environment = prepare_multi_gpu_env(args) | (USE_CPU if args.use_cpu else {})
    else:
        _, environment = prepare_simple_launcher_cmd_env(args)
        return dict(environment)
    return {"OMP_NUM_THREADS": "1", **environment, **(rank_environment(0, all_here(1)) if rank is None else {})}
