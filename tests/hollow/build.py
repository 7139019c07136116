"""Builds the stand-ins of CUDA's libraries for one installed PyTorch.

What PyTorch and its friends ask of CUDA's libraries is read from their symbol tables and from NVIDIA's headers. Each of
those libraries is made anew under its own name: a function that ``native/`` defines is called there, any other succeeds
and does nothing. Needs g++, nm and readelf.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
WITH_TORCH = ("values.cpp", "laws.cpp")
"""Built against PyTorch, into a library that is loaded once PyTorch is there."""
OWNERS = (  # a function belongs to the first of them whose pattern its name begins with
    (r"nccl", "libnccl"),
    (r"cusparseLt", "libcusparseLt"),
    (r"cuFile", "libcufile"),
    (r"nvshmem", "libnvshmem_host"),
    (r"nvml", "libnvidia-ml"),
    (r"cublasLt", "libcublasLt"),
    (r"cublas", "libcublas"),
    (r"cusparse", "libcusparse"),
    (r"cusolver", "libcusolver"),
    (r"cudnn", "libcudnn"),
    (r"cufft", "libcufft"),
    (r"curand", "libcurand"),
    (r"nvrtc", "libnvrtc"),
    (r"cupti", "libcupti"),
    (r"nvJitLink", "libnvJitLink"),
    (r"_*cuda", "libcudart"),
    (r"cu", "libcuda"),
)
WANTED = re.compile("^(" + "|".join(pattern for pattern, _ in OWNERS) + r")(?:x|id_|x_)?[A-Za-z_]\w*$")
CALLERS = ("torch/lib", "bitsandbytes", "torchao", "triton/backends/nvidia", "deepspeed")
"""Folders of a site-packages whose libraries call CUDA."""
FIXED = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
"""What the driver brings; no library of PyTorch needs to name them."""


def build(site: Path, include: Path, out: Path) -> int:
    """Writes the libraries for the PyTorch in ``site`` into ``out``; the number of functions they have."""
    out.mkdir(parents=True, exist_ok=True)
    core = out / "libhollow.so"
    sources = sorted(str(path) for path in NATIVE.glob("*.cpp") if path.name not in WITH_TORCH)
    _compile("-O1", "-std=c++17", "-fvisibility=hidden", f"-I{include}", "-Wl,-soname,libhollow.so", "-o", str(core),
             *sources, "-ldl", "-lpthread")  # fmt: skip
    _compile_values(site, include, out)
    bodies = {name.removeprefix("hollow_") for name, _ in _symbols(core, "--defined-only")}
    libraries = _libraries(site, include, bodies)
    for soname, functions in sorted(libraries.items()):
        _write_library(out, soname, functions, bodies)
    return sum(len(functions) for functions in libraries.values())


def _compile_values(site: Path, include: Path, out: Path) -> None:
    torch = site / "torch"
    _compile(
        "-O1", "-std=c++20", "-fvisibility=hidden", f"-I{torch}/include", f"-I{include}", f"-L{torch}/lib", f"-L{out}",
        "-Wl,-soname,libhollow_values.so", "-o", str(out / "libhollow_values.so"),
        *(str(NATIVE / name) for name in WITH_TORCH),
        "-ltorch_cpu", "-lc10", "-lc10_cuda", "-lhollow",
    )  # fmt: skip


def _libraries(site: Path, include: Path, bodies: set[str]) -> dict[str, dict[str, str]]:
    """Library -> function -> the version of its symbol, which is empty where it has none."""
    callers = [path for folder in CALLERS for path in (site / folder).rglob("*.so*")]
    needed = [name for path in (site / "torch/lib").glob("*.so*") for name in _needed(path)]
    sonames = {name.partition(".so")[0]: name for name in needed} | FIXED
    libraries: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def add(name: str, version: str = "") -> None:
        base = next(library for pattern, library in OWNERS if re.match(pattern, name))
        soname = version if version.startswith("lib") else sonames.get(base)
        if soname:
            libraries[soname][name] = version or libraries[soname].get(name, "")

    for path in callers:
        for name, version in _symbols(path, "--undefined-only"):
            if WANTED.match(name):
                add(name, version)
    for name in [*_declared(include), *(body for body in bodies if WANTED.match(body))]:
        add(name)
    return libraries


def _declared(include: Path) -> list[str]:
    """What the headers of runtime, driver and NVML declare, with the versioned names behind the plain ones."""
    names = []
    for header, pattern in (
        ("cuda.h", r"CUresult CUDAAPI (cu\w+)\("),
        ("cuda_runtime_api.h", r"CUDARTAPI (cuda\w+)\("),
        ("nvml.h", r"DECLDIR (nvml\w+)\("),
    ):
        text = (include / header).read_text(errors="replace")
        names += re.findall(pattern, text)
        for pair in re.findall(r"#\s*define\s+((?:cu|nvml)\w+)\s+((?:cu|nvml)\w+_v\d)\s", text):
            names += pair
    return names


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    body: str | None


def _resolved(soname: str, name: str, bodies: set[str]) -> _Function:
    """In driver and NVML, a name without a version is the newest of its kind."""
    if name in bodies:
        return _Function(name, name)
    if soname in FIXED.values():
        return _Function(name, next((name + v for v in ("_v3", "_v2") if name + v in bodies), None))
    return _Function(name, None)


def _write_library(out: Path, soname: str, functions: dict[str, str], bodies: set[str]) -> None:
    """One library whose functions jump to their body in libhollow.so, or to ``hollow_stub``, which is told the name."""
    lines = [".text"]
    for number, name in enumerate(sorted(functions)):
        lines += [f".globl {name}", f".type {name},@function", f"{name}:"]
        body = _resolved(soname, name, bodies).body
        if body:
            lines += [f"  jmp hollow_{body}@PLT"]
        else:
            text = f'.Ln{number}: .string "{name}"'
            lines += [f"  lea .Ln{number}(%rip), %rdi", "  jmp hollow_stub@PLT", ".section .rodata", text, ".text"]
    lines += ['.section .note.GNU-stack,"",@progbits', ""]
    source, script = out / f"{soname}.s", out / f"{soname}.map"
    source.write_text("\n".join(lines))
    version = next((version for version in functions.values() if version), "")
    script.write_text(f"{version or 'HOLLOW'} {{ global: *; }};\n")
    _compile(f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", *([f"-Wl,--version-script={script}"] if version else []),
             "-o", str(out / soname), str(source), str(out / "libhollow.so"))  # fmt: skip
    source.unlink()
    script.unlink()


def _needed(path: Path) -> list[str]:
    """The names of the libraries that this one is linked to."""
    return re.findall(r"NEEDED.*\[(.+)\]", _run("readelf", "-d", str(path)))


def _symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """The dynamic symbols of a library, each with its version."""
    names = [line.split()[-1] for line in _run("nm", "-D", which, str(path)).splitlines()]
    return [(name, version.lstrip("@")) for name, _, version in (name.partition("@") for name in names)]


def _compile(*words: str) -> None:
    _run("g++", "-shared", "-fPIC", "-w", *words)


def _run(*words: str) -> str:
    """The output of a tool; a failure raises with what the tool said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
