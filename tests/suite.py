"""Runs pytest; a few tests that failed beside others are run again, alone. Those that pass then are unstable, not red.

    python tests/suite.py [OPTION OF PYTEST ...]

A failure is a defect or it is nothing: `build/failed.txt` lists the tests that are red, and `build/unstable.txt` those
that failed once, with their first error. An unstable test is a bug of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

#: At most this many tests of a run may be unstable. More are a defect.
MOST = 3
BUILD = Path(__file__).parents[1] / "build"
FAILED, UNSTABLE = BUILD / "failed.txt", BUILD / "unstable.txt"


class Outcomes:
    """A plugin of pytest that remembers which tests passed, and the first error of the others."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.errors: dict[str, str] = {}
        #: Something other than a test went wrong: a module that cannot be imported, a process that died.
        self.broken = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = True
            self.errors[report.nodeid] = _first_line(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.errors.setdefault(report.nodeid, _first_line(report))
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        """Of xdist: a process ended, with an error if it was not told to."""
        self.broken |= error is not None


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0]


def run(options: list[str]) -> tuple[int, dict[str, str], dict[str, str]]:
    """The exit status, the tests that are red, and those that are unstable, each with its first error."""
    first, alone = Outcomes(), Outcomes()
    status = pytest.main(options, plugins=[first])
    if status != pytest.ExitCode.TESTS_FAILED or first.broken or len(first.errors) > MOST:
        return status, first.errors, {}
    print(f"== again, alone: {' '.join(first.errors)}", flush=True)
    # In a new process, and also if the markers of its test leave it to another target.
    again = pytest.main(["--numprocesses", "1", "-m", "", *first.errors], plugins=[alone])
    if again == pytest.ExitCode.OK and alone.passed == first.errors.keys():  # a test that is skipped proves nothing
        return again, {}, first.errors
    return status, first.errors, {}


def main(options: list[str]) -> int:
    BUILD.mkdir(exist_ok=True)
    status, failed, unstable = run(options)
    for file, tests in ((FAILED, failed), (UNSTABLE, unstable)):
        file.write_text("".join(f"{test}: {error}\n" for test, error in tests.items()), "utf-8")
    for test, error in unstable.items():
        print(f"UNSTABLE {test}: failed beside others ({error}), passed alone")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
