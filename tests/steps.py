"""Makes targets of the Makefile one after the other, also after one that failed, and ends with a table.

    python3 tests/steps.py [--from TARGET] [--without TARGET ...] TARGET ...

Only without `.venv` nothing can go on. The last lines are the names of the tests that failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

BUILD = Path("build")
NEEDED = "venv"


def make(target: str) -> tuple[str, list[str]]:
    """Whether it was made, and what `tests/suite.py` has written down of its tests."""
    reports = [BUILD / name for name in ("failed.txt", "unstable.txt")]
    for report in reports:
        report.unlink(missing_ok=True)
    done = subprocess.run(["make", target], stdin=subprocess.DEVNULL)
    failed, unstable = (report.read_text("utf-8").splitlines() if report.exists() else [] for report in reports)
    names = [f"FAILED {test}" for test in failed] + [f"UNSTABLE {test}" for test in unstable]
    return ("FAILED" if done.returncode else "unstable" if unstable else "passed"), names


def main() -> int:
    """Returns 1 if a target failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--from", dest="first", metavar="TARGET", help="begin with this one")
    parser.add_argument("--without", nargs="*", default=[], metavar="TARGET")
    asked = parser.parse_args()
    targets = [target for target in asked.targets if target not in asked.without]
    targets = targets[targets.index(asked.first) if asked.first else 0 :]
    table, tests = [], []
    for target in targets:
        print(f"== make {target}", flush=True)
        started = time.monotonic()
        result, names = make(target)
        table.append(f"{target:<20} {time.monotonic() - started:6.0f} s  {result}")
        tests += names
        print(f"== {table[-1]}", flush=True)
        if target == NEEDED and result == "FAILED":
            break
    print("", *table, *tests, sep="\n", flush=True)
    return any(line.endswith("FAILED") for line in table)


if __name__ == "__main__":
    sys.exit(main())
