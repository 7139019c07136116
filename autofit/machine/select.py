"""Which device to tune on, told without importing torch and without touching the device."""

from __future__ import annotations

import contextlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.contract.facts import Device, Hardware
from autofit.system.errors import InputError, MachineError
from autofit.system.locks import device_lock

if TYPE_CHECKING:
    from collections.abc import Iterator


def choose_device(wanted: str) -> Device:
    """``cuda`` or ``cpu`` for ``--device auto|cuda|cpu``.

    Raises:
        InputError: No such word.
        MachineError: A CUDA device is wanted and can't be had, with the reason.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted not in {"auto", "cuda"}:
        raise InputError(f"--device {wanted!r} is not known", hint="auto, cuda or cpu")
    missing = missing_cuda()
    if missing is None:
        return "cuda"
    if wanted == "cuda":
        raise MachineError(f"--device cuda: {missing}", hint="see `autofit doctor`; --device cpu works everywhere")
    return "cpu"


def missing_cuda() -> str | None:
    """Why there is no CUDA device to use, or ``None`` where there is one."""
    version = torch_cuda()
    if version is None:
        other = _built_for("hip")
        return f"the installed torch is built {f'for ROCm {other}, not for' if other else 'without'} CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1"}:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return None if pynvml.nvmlDeviceGetCount() else "the Nvidia driver has no device"
    except pynvml.NVMLError as error:
        return f"the Nvidia driver does not answer ({error})"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def unusable(device: str, why: str) -> MachineError:
    """The error of a device that is there and that PyTorch can't use."""
    said = f"--device {device}: it is there and can't be used: {why}"
    if device != "cuda":
        return MachineError(said)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ask = "what does nvidia-smi say" if visible is None else f"does nvidia-smi list CUDA_VISIBLE_DEVICES={visible!r}"
    without = "A tune does without by --device cpu, an estimate by --gpu NAME"
    return MachineError(said, hint=f"{ask}, and does the driver fit the installed torch? {without}")


def left_unused() -> str | None:
    """Why an Nvidia card that is there is not used, in words; ``None`` where none is there, or it is hidden on purpose.

    The card is seen by what its driver makes in ``/dev``, on Windows' Linux by that of the host.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}
    if hidden or not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return None
    return missing_cuda()


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with, read from its files; ``None`` without CUDA.

    Raises:
        MachineError: torch is not installed.
    """
    return _built_for("cuda")


def _built_for(name: str) -> str | None:
    """What the installed torch says of one kind of device in its ``version.py``."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise MachineError("torch is not installed", hint="pip install torch")
    with contextlib.suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
        found = re.search(rf"^{name}\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
        return found[1] if found else None
    return None


@contextlib.contextmanager
def hardware_lock(hardware: Hardware) -> Iterator[None]:
    """The locks of all devices that facts describe."""
    first = hardware.uuid or hardware.visible_id if hardware.device == "cuda" else "cpu"
    with contextlib.ExitStack() as held:
        for device in sorted([first, *(uuid for uuid, _ in hardware.beside)]):  # in one order: none waits in a circle
            held.enter_context(device_lock(device))
        yield
