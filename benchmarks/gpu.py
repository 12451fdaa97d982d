"""python -m benchmarks.gpu: is the CUDA code correct on this GPU, and how fast is it? What `make gpu-check` runs.

Uses this Python and installs nothing. Exits with 0 only if everything was checked and is correct.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import mmap
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "build/gpu-check.json"  #: the tables again
_MODULES = {"torch": "torch", "attrs": "attrs", "pluggy": "pluggy", "yaml": "PyYAML", "pytest": "pytest"}


def main() -> str | None:
    """Why nothing could be checked, or what is wrong; None if all is well."""
    if missing := [dist for module, dist in _MODULES.items() if importlib.util.find_spec(module) is None]:
        return f"gpu-check: this Python lacks {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}"
    if missing := [tool for tool in ("nvcc", "cmake", "c++") if shutil.which(tool) is None]:
        return f"gpu-check: there is no {', '.join(missing)} here to build with"
    import torch

    if not torch.cuda.is_available():
        return f"gpu-check: no GPU: torch {torch.__version__} finds none here. Nothing was checked."
    try:
        _run("cmake", "-S", "csrc/cuda", "-B", "build/cuda")
        _run("cmake", "--build", "build/cuda")
        _run("cmake", "--install", "build/cuda", "--prefix", ".")
        _run(sys.executable, "-m", "pytest", "tests/gpu")
    except subprocess.CalledProcessError as error:
        return f"gpu-check: failed: {' '.join(map(str, error.cmd))}"
    from benchmarks import gpu_copies, gpu_effects

    report: dict[str, object] = {"conditions": _conditions()}
    print(report["conditions"], end="\n\n", flush=True)
    for table in itertools.chain(gpu_effects.tables(), gpu_copies.tables()):
        print(table, end="\n\n", flush=True)
        report[table.title] = {"header": table.header, "rows": [list(map(str, row)) for row in table.rows]}
        REPORT.write_text(json.dumps(report, indent=1))  # what was measured is kept if the next table fails
    return None


def _conditions() -> str:
    import torch

    from kvtier_core.transfer.cuda.library import load

    query = (
        "nvidia-smi",
        "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
        "--format=csv",
    )
    asked = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which("nvidia-smi") else ""
    told = [asked, f"torch {torch.__version__}, CUDA {torch.version.cuda}, Linux {platform.release()}"]
    return "\n".join([*told, f"pages of the system: {mmap.PAGESIZE} bytes", f"kvtier: {load().device(0).abilities}"])


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
