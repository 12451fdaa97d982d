"""python -m benchmarks.gpu_build: kvtier's CUDA library into this checkout, with nothing but nvcc, c++ and cmake.

CMake runs a script here and generates nothing, so neither make nor Ninja is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.measure import progress
from kvtier_core.native import stamp_of
from kvtier_core.transfer.cuda.library import FILE, Library

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc/cuda"


def build(target: Path, folder: Path) -> Library:
    """The library, in ``target``. The kernels are left in ``folder``. Raises CalledProcessError and BackendError."""
    folder.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    kernels = folder / "kernels.fatbin"
    _run("cmake", "-DNVCC=nvcc", f"-DOUT={kernels}", "-P", SOURCE / "kernels.cmake")
    built_for = Path(f"{kernels}.txt").read_text()
    defined = {"CUDA_STAMP": stamp_of(SOURCE), "KERNELS": kernels, "ARCHITECTURES": built_for}
    flags = ("-std=c++17", "-O3", "-DNDEBUG", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")
    defines = [f'-DKVTIER_{name}="{value}"' for name, value in defined.items()]
    _run("c++", *flags, *defines, *sorted(SOURCE.glob("*.cpp")), "-o", target, "-ldl")
    progress(f"built {target} for {built_for}")
    return Library(target)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    build(ROOT / "kvtier_core" / FILE, ROOT / "build/cuda")
