"""What tests need and not every machine has: a plugin of pytest that says at the end why tests were skipped."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

#: Of modules that were skipped whole. xdist reports only tests to the process that prints.
_modules: list[str] = []


def needs(what: str, there: object, way: str = "make programs") -> None:
    """Skip the test if something that it needs is not there; where nothing may be skipped, fail."""
    if there:
        return
    sentence = f"{what} is not installed: {way}"
    if os.environ.get("KVTIER_CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _modules.append(_reason(report))


def pytest_sessionfinish(session: pytest.Session) -> None:
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


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ")
