"""A pytest plugin: explains each law that fails, and runs the laws for a tier that a configuration file names.

Pytest loads it in every environment with the kit, so it imports nothing of the kit before it is used.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

pytest.register_assert_rewrite("kvtier_testing.laws")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvtier", "the laws of kvtier for a live tier; `kvtier conform` sets these")
    group.addoption("--kvtier-config", metavar="FILE", help="a configuration file of kvtier")
    group.addoption("--kvtier-tier", metavar="NAME", help="the tier of that file to try")
    group.addoption("--kvtier-excuse", metavar="LAW=WHY", action="append", default=[], help="a law not to try, and why")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the laws of a live tier are collected, say which tier."""
    options = session.config.option
    if options.kvtier_tier is None:
        return
    from kvtier_core.errors import KvtierError
    from kvtier_testing import live

    try:
        tier = live.find_tier(options.kvtier_config, options.kvtier_tier)
        for suite in live.suites_of(tier, dict(excuse.partition("=")[::2] for excuse in options.kvtier_excuse)):
            setattr(live, suite.__name__, suite)
    except (KvtierError, TypeError) as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report below the traceback what the law is, what an engine would have done, and where to look."""
    report = yield
    if report.failed and call.when == "call" and isinstance(item, pytest.Function) and item.cls is not None:
        from kvtier_testing.laws.base import Laws, explanation, laws_of

        add = getattr(report.longrepr, "addsection", None)
        if issubclass(item.cls, Laws) and item.originalname in laws_of(item.cls) and add is not None:
            add("the law", explanation(item.cls, item.originalname))
    return report
