from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _lines_reach_the_test_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that an earlier test started in this process has sent kvtier's lines to vLLM's handlers."""
    log = logging.getLogger("kvtier")
    level = log.level
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    log.setLevel(logging.NOTSET)
    yield
    log.setLevel(level)
