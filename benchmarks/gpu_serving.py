"""python -m benchmarks.gpu_serving [FOLDER]: real vLLM with kvtier on this GPU: is every answer right, and how fast?

Uses this Python and installs nothing: it needs vLLM and kvtier[cpu,disk]; `benchmarks.gpu_pieces` brings both to a
machine without a network. Prints one report, and leaves it in the folder (``build``) as ``gpu-serve.txt`` and
``gpu-serve.json``. Exits with 0 only if every section ran and no answer was wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds of each section. Those that answer most come first, in case the machine is had for less than all.
LIMITS = {
    "smoke": 100.0,
    "first token": 240.0,
    "disk": 90.0,
    "offloading": 120.0,
    "packing": 60.0,
    "defaults": 120.0,
    "eager": 60.0,
    "sleep": 60.0,
    "weights": 40.0,
    "trained": 60.0,
}


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Why nothing could be run, or what is wrong; None if all is well."""
    what = "Real vLLM with kvtier on this GPU: is every answer right, and how fast?"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_serving", description=what)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build", help="for the report; default: build")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure; default: the one of the report")
    parser.add_argument("--only", default=",".join(LIMITS), help=f"sections, with commas: {', '.join(LIMITS)}")
    parser.add_argument("--seconds", type=float, default=sum(LIMITS.values()), help="for all of it")
    parser.add_argument("--options", default="{}", help='of vLLM, as JSON: {"attention_backend": "TRITON_ATTN"}')
    parser.add_argument("--short", action="store_true", help="a small model, also without a GPU: measures nothing")
    told = parser.parse_args(arguments)
    needed = ("vllm", "kvtier_vllm", "kvtier_cpu", "kvtier_disk")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        return f"gpu-serve: this Python lacks {', '.join(missing)}. Nothing was run."
    import torch

    if not (told.short or torch.cuda.is_available()):
        return f"gpu-serve: no GPU: torch {torch.__version__} finds none here. Nothing was run."
    if unknown := set(told.only.split(",")) - set(LIMITS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")

    from benchmarks.gpu_report import Section, leave_report
    from benchmarks.gpu_serving_engines import OPTIONS
    from benchmarks.measure import SHORT_FORM, scratch

    os.environ[OPTIONS] = told.options
    if told.short:
        os.environ[SHORT_FORM] = "1"
    # The tests' copies of vLLM's offloading without a GPU, and the checkpoints of the examples.
    paths = [ROOT / "plugins/kvtier_vllm/tests", ROOT / "examples"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    told.folder.mkdir(parents=True, exist_ok=True)
    with scratch(told.disk or told.folder) as place:
        command = (sys.executable, "-m", "benchmarks.gpu_serving_sections")
        sections = [
            Section(name, (*command, name, str(place)), limit)
            for name, limit in LIMITS.items()
            if name in told.only.split(",")
        ]
        return leave_report("gpu-serve", sections, told.seconds, told.folder)


if __name__ == "__main__":
    sys.exit(main())
