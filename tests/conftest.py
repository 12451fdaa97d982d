from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest

from kvtier_core.engine import starvation


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


@pytest.fixture(autouse=True)
def _a_busy_machine_adds_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process do not say that other tests keep the cores from them."""
    monkeypatch.setattr(starvation, "_EVERY", math.inf)
