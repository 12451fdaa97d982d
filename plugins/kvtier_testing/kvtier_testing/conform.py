"""`kvtier conform TIER --config FILE`: does one of your tiers keep the laws, where it is and as it is configured?"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.errors import BackendError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "conform",
        help="test whether a tier, where it is deployed, keeps the laws of its interface",
        description="Run the laws of the plugin interface against a tier of a configuration file, in namespaces of "
        "their own, which are emptied afterwards. A tier that is not shared must not be in use. Exits with 0 if every "
        "law that was tried is kept, with 1 if one is broken, with 2 if the tier cannot be tried.",
    )
    parser.add_argument("tier", help="the name of a tier: its type, or disk#2 for the second of that type")
    parser.add_argument("--config", required=True, help="the configuration file that names the tier")
    parser.add_argument("--excuse", metavar="LAW=WHY", action="append", default=[], help="do not try this law, and why")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the outcome of each law as JUnit XML")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """Try, and print the report. Raises ConfigError, and BackendError if the tier cannot be tried."""
    from kvtier_testing.live import find_tier, throughput  # not before: it imports pytest

    tier = find_tier(options.config, options.tier)
    speed = throughput(tier) if isinstance(tier, StoreTierConfig) else {}
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-conform-") as folder:
            laws = _try(options, Path(folder))
    except OSError as error:
        raise BackendError(f"cannot try the laws here: {error}") from error
    report = {
        "tier": tier.name,
        "config": tier.source.where,
        "plugin": tier.source.plugin,
        "kvtier": metadata.version("kvtier"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "shared": bool(getattr(tier.config, "shared", False)),
        "throughput": speed,
        "laws": laws,
        "verdict": "broken" if any(law["outcome"] == "broken" for law in laws) else "kept",
    }
    output.value = report
    output.say(*_lines(report))
    return PROBLEMS if report["verdict"] == "broken" else FINE


def _try(options: argparse.Namespace, folder: Path) -> list[dict[str, str]]:
    """Run pytest, in a process and a folder that know nothing of any project's settings. Raises BackendError."""
    (folder / "pytest.ini").write_text("[pytest]\n", "ascii")
    junit = folder / "laws.xml"
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvtier_testing.live", "--quiet", "--tb=short"]
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--basetemp", str(folder / "temp")]
    command += ["-p", "no:cacheprovider", "-p", "kvtier", "--junitxml", str(junit)]
    command += ["--kvtier-config", str(Path(options.config).absolute()), "--kvtier-tier", options.tier]
    command += [f"--kvtier-excuse={excuse}" for excuse in options.excuse]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 1):
        raise BackendError((done.stderr or done.stdout).strip().removeprefix("ERROR: "))
    if options.junit is not None:
        shutil.copyfile(junit, options.junit)
    return [_law(case) for case in ElementTree.parse(junit).iter("testcase")]


def _law(case: ElementTree.Element) -> dict[str, str]:
    """A law's name and outcome, and why it is broken or was not tried."""
    outcome, why = "kept", ""
    for found in case:
        if found.tag in ("failure", "error"):
            outcome, why = "broken", (found.text or found.get("message") or "").strip()
        elif found.tag == "skipped":
            outcome, why = "not tried", found.get("message", "")
    return {"name": case.get("name", ""), "outcome": outcome, "why": why}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['tier']} of {report['config']}: plugin {report['plugin']}"
    yield f"kvtier {report['kvtier']}, Python {report['python']}, {report['platform']}"
    if speed := report["throughput"]:
        yield (
            f"writes {speed['write']:.2f} GB/s, reads back {speed['read']:.2f} GB/s, in frames of 1MiB; "
            f"knows of a key in {speed['contains']:.2f} ms"
        )
    outcomes = Counter(law["outcome"] for law in report["laws"])
    yield f"laws: {outcomes['kept']} kept, {outcomes['not tried']} not tried, {outcomes['broken']} broken"
    for law in report["laws"]:
        if law["outcome"] == "not tried":
            yield f"  not tried: {law['name']}: {law['why']}"
    for law in report["laws"]:
        if law["outcome"] == "broken":
            yield f"\nbroken: {law['name']}\n{law['why']}"
    yield f"\nverdict: {report['verdict']}"
