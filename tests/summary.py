"""The end of a run says why tests were skipped, and how many did not run: a plugin of pytest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

_collected = 0
_ran: set[str] = set()
#: Of modules that were skipped whole. xdist reports only tests to the process that prints.
_modules: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _modules.append(_reason(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _ran.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    global _collected
    _collected = session.testscollected
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped modules"] = _modules


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected the same."""
    _modules[:] = getattr(node, "workeroutput", {}).get("skipped modules", _modules)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each reason once, with the number of tests, or of whole modules: `-rs` has a line for each place in the code."""
    skipped = terminalreporter.getreports("skipped")
    reasons = [_reason(report) for report in skipped if isinstance(report, pytest.TestReport)] + _modules
    if reasons:
        terminalreporter.write_sep("=", "skipped")
    for reason, count in sorted(Counter(reasons).items()):
        terminalreporter.write_line(f"{count:5}  {reason}")
    if not terminalreporter.config.option.collectonly and (left := _collected - len(_ran)) > 0:
        terminalreporter.write_sep("=", f"{left} of {_collected} tests did not run", red=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ")
