"""python -m benchmarks.gpu [FOLDER]: is the CUDA code correct on this GPU, and how fast is it? For `make gpu-check`.

Uses this Python and installs nothing. Prints one report, and leaves it in the folder (``build``) as ``gpu-check.txt``
and ``gpu-check.json``. Exits with 0 only if everything was checked and is correct.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from benchmarks.gpu_report import ROOT, Section, as_json, as_text, failed, run
from benchmarks.measure import progress

_MODULES = {"torch": "torch", "attrs": "attrs", "pluggy": "pluggy", "yaml": "PyYAML", "pytest": "pytest"}
#: In which all is done.
SECONDS = 530.0


def sections() -> list[Section]:
    """What is checked: first whether it is right, then how fast it is."""
    python = sys.executable
    build = "cmake -S csrc/cuda -B build/cuda && cmake --build build/cuda && cmake --install build/cuda --prefix ."
    tests = (python, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_on_gpu.py")

    def measured(name: str, limit: float) -> Section:
        return Section(name, (python, "-m", "benchmarks.gpu_sections", name), limit)

    return [
        Section("build", ("sh", "-c", build), 120),
        measured("machine", 60),
        Section("tests", tests, 150),
        measured("engine", 180),
        measured("checksums", 45),
        measured("effects", 75),
        measured("copies", 180),
        measured("landing", 45),
        measured("planted", 60),
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
    outcomes = []
    folder.mkdir(parents=True, exist_ok=True)
    for outcome in run(sections(), SECONDS):
        progress(f"gpu-check: {outcome.section}: {'; '.join(outcome.problems) or 'ok'} ({outcome.seconds:.0f} s)")
        outcomes.append(outcome)
        # After each one, so that a report is there if this is ended early.
        (folder / "gpu-check.txt").write_text(as_text(outcomes))
        (folder / "gpu-check.json").write_text(as_json(outcomes))
    print(as_text(outcomes), end="")
    return f"gpu-check: failed: {', '.join(wrong)}" if (wrong := failed(outcomes)) else None


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
