"""python -m benchmarks.gpu [FOLDER]: is the CUDA code correct on this GPU, and how fast is it?

Uses this Python and installs nothing: it needs torch, pytest, nvcc, c++ and cmake. Prints one report, and leaves it in
the folder (``build``) as ``gpu-check.txt`` and ``gpu-check.json``. Exits with 0 only if everything was checked and is
correct.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_report import Section

ROOT = Path(__file__).parents[1]
_MODULES = {"torch": "torch", "pluggy": "pluggy", "pytest": "pytest"}
#: What need not be installed, because it lies here. Nothing is imported before these are found.
_VENDORED = {"attrs": "attrs-26.1.0-py3-none-any.whl", "yaml": "pyyaml-6.0.3.zip"}
_FOLDERS = (ROOT, ROOT / "tests", *sorted((ROOT / "plugins").glob("kvtier_*")))
#: In which all is done.
SECONDS = 530.0


def find_modules() -> None:
    """Let this process and those that it starts import kvtier, its tests, and what is not installed here."""
    vendored = [file for module, file in _VENDORED.items() if importlib.util.find_spec(module) is None]
    paths = [str(folder) for folder in _FOLDERS] + [str(ROOT / "benchmarks/vendor" / file) for file in vendored]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def sections() -> list[Section]:
    """What is checked: first whether it is right, then how fast it is. The limits fit into `SECONDS`."""
    from benchmarks.gpu_report import Section

    python = sys.executable
    tests = (python, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_on_gpu.py")
    # The kernels alone, of which the tools find every wrong access and every race of threads.
    kernels = (*tests, "-k", "(words or odd) and (copies or checksums or packed) or zlib and 65552")

    def measured(name: str, limit: float) -> Section:
        return Section(name, (python, "-m", "benchmarks.gpu_sections", name), limit)

    tools = [
        Section(tool, ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *kernels), 30)
        for tool in ("memcheck", "racecheck")
        if shutil.which("compute-sanitizer")
    ]
    return [
        Section("build", (python, "-m", "benchmarks.gpu_build"), 60),
        measured("machine", 20),
        Section("tests", tests, 100),
        measured("engine", 90),
        measured("planted", 30),
        *tools,
        measured("checksums", 20),
        measured("packing", 20),
        measured("effects", 50),
        measured("direct reads", 20),
        measured("copies", 60),
    ]


def main(folder: Path = ROOT / "build") -> str | None:
    """Why nothing could be checked, or what is wrong; None if all is well."""
    if missing := [dist for module, dist in _MODULES.items() if importlib.util.find_spec(module) is None]:
        return f"gpu-check: this Python lacks {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}"
    if missing := [tool for tool in ("nvcc", "cmake", "c++") if shutil.which(tool) is None]:
        return f"gpu-check: there is no {', '.join(missing)} here to build with"
    import torch

    if not torch.cuda.is_available():
        return f"gpu-check: no GPU: torch {torch.__version__} finds none here. Nothing was checked."
    from benchmarks.gpu_report import leave_report

    return leave_report("gpu-check", sections(), SECONDS, folder)


if __name__ == "__main__":
    find_modules()
    sys.exit(main(*map(Path, sys.argv[1:2])))
