"""Makes an environment in which PyTorch's CUDA build runs without a card: ``python -m tests.hollow.setup``.

DIR gets ``venv``, with a CUDA build of torch, this project (editable) and its dependencies in the versions of
``constraints.txt``, and ``lib``, with the stand-ins of CUDA's libraries. NVIDIA's libraries are not installed: torch
would find them before the stand-ins. Only their headers are fetched, and only to build. What pip reads (indexes,
proxies, caps) is this machine's own setting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from tests.hollow.build import NATIVE, build

ROOT = Path(__file__).parents[2]
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "jsonschema", "liger-kernel")
HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvml-dev")


def default_folder() -> Path:
    """Where the environment lies unless DIR says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "autofit-hollow"


def is_ready(folder: Path) -> bool:
    """Whether a set-up of ``folder`` has finished."""
    return bool(_made(folder).get("libraries"))


def _made(folder: Path) -> dict[str, str]:
    """What is in ``folder`` whole: hashes of :func:`wanted`."""
    try:
        made: dict[str, str] = json.loads((folder / "made.json").read_text())
    except FileNotFoundError:
        return {}
    return made


def main() -> int:
    """Makes the environment unless it is there already; 1, with what a tool said, where that fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.hollow.setup", description=__doc__)
    parser.add_argument("dir", type=Path, nargs="?", default=default_folder(), metavar="DIR")
    parser.add_argument("--torch", default=pinned("torch"), metavar="VERSION", help="default: that of constraints.txt")
    given = parser.parse_args()
    try:
        make(given.dir.resolve(), given.torch)
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def make(folder: Path, torch: str) -> None:
    """Makes or completes the environment; what is there in the same versions is kept.

    Raises:
        RuntimeError: A tool failed, or the torch that pip found is no CUDA build.
    """
    packages, libraries = wanted(torch)
    had = _made(folder)
    if had == {"packages": packages, "libraries": libraries}:
        print(f"{folder} is up to date")
        return
    if had.get("packages") != packages:
        shutil.rmtree(folder, ignore_errors=True)
        install(folder, torch)
    (folder / "made.json").write_text(json.dumps({"packages": packages}))
    site = site_packages(folder)
    shutil.rmtree(folder / "lib", ignore_errors=True)
    count = build(site, headers(folder, cuda_version(site)), folder / "lib")
    (folder / "made.json").write_text(json.dumps({"packages": packages, "libraries": libraries}))
    print(f"{folder}: torch {torch}, {count} functions of CUDA's libraries")


def wanted(torch: str) -> tuple[str, str]:
    """What decides about the packages and about the libraries, as two hashes."""
    lists = [name.encode() for name in needs()] + [(ROOT / "constraints.txt").read_bytes()]
    sources = [path.read_bytes() for path in sorted((*NATIVE.glob("*.?pp"), NATIVE.parent / "build.py"))]
    return (
        hashlib.sha256(b"\0".join([torch.encode(), sys.version.encode(), str(ROOT).encode(), *lists])).hexdigest(),
        hashlib.sha256(b"\0".join(sources)).hexdigest(),
    )


def install(folder: Path, torch: str) -> None:
    """Puts torch, then all that needs it, into a new virtual environment."""
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    # === matches this very name: a build for the CPU, such as 2.13.0+cpu, goes by another
    pip(folder, "install", "--no-deps", f"torch==={torch}")
    site = site_packages(folder)
    if cuda_version(site) is None:
        raise RuntimeError(f"the torch {torch} that pip found is no CUDA build; --torch names another version")
    forget_nvidia(site)
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join([*(pin for pin in pins if not pin.startswith("torch==")), f"torch=={torch}", ""]))
    pip(folder, "install", "-c", str(constraints), *needs())
    pip(folder, "install", "--no-deps", "-e", str(ROOT))


def needs() -> list[str]:
    """What the project requires, and what its tests do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["all"], *TEST_TOOLS]


def forget_nvidia(site: Path) -> None:
    """Takes NVIDIA's libraries off what the installed torch requires, so that pip installs none of them."""
    metadata = next(site.glob("torch-*.dist-info")) / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not re.match(r"Requires-Dist: (nvidia|cuda)-", line)))


def headers(folder: Path, cuda: str | None) -> Path:
    """The folder of ``cuda.h``: headers of NVIDIA's wheels for this version of CUDA, kept in DIR."""
    kept = folder / "headers"
    if not kept.exists():
        wheels = folder / "wheels"
        pip(folder, "download", "--no-deps", "-d", str(wheels), *(f"{name}=={cuda}.*" for name in HEADERS))
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, folder / "headers.part", format="zip")
        shutil.rmtree(wheels)
        (folder / "headers.part").rename(kept)
    return next(kept.rglob("cuda.h")).parent


def cuda_version(site: Path) -> str | None:
    """The CUDA that the installed torch is built for, like ``13.0``; ``None`` for a CPU build."""
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", (site / "torch/version.py").read_text(), re.MULTILINE)
    return found and found[1]


def site_packages(folder: Path) -> Path:
    """Of the virtual environment in ``folder``."""
    base = str(folder / "venv")
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))


def pinned(name: str) -> str:
    """The version of a package in constraints.txt."""
    found = re.search(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt has no {name}"
    return found[1]


def pip(folder: Path, *words: str) -> None:
    """Runs the environment's pip; it says only what goes wrong.

    Raises:
        RuntimeError: It failed; what it said has been shown.
    """
    command = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", words[0], "-q", *words[1:]]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RuntimeError(f"pip {' '.join(words[:3])} ... exited with {code}")


if __name__ == "__main__":
    sys.exit(main())
