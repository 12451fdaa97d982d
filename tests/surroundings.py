"""What tests do not take from the machine that they run on: a plugin of pytest."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
from collections.abc import Iterator

import pytest

# Read when torch is imported, perhaps before an engine's tests set it. Threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many tests make folders for tiers. Those that others may write to are refused.
os.umask(0o022)

with contextlib.suppress(ImportError):  # for `make gpu-check` it need not be installed
    from hypothesis import HealthCheck, Phase, settings

    # The same examples each time, and no example is too slow on a busy machine.
    settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("chance", settings.get_profile("same"), derandomize=False)
    # The first example that fails is enough.
    settings.register_profile("mutant", settings.get_profile("same"), phases=set(Phase) - {Phase.shrink, Phase.explain})
    settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Tests that look at what is left collect garbage, and need not look through all of torch and vLLM for it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _lines_reach_the_test_once() -> Iterator[None]:
    """An engine that an earlier test started in this process has sent kvtier's lines to vLLM's handlers."""
    log = logging.getLogger("kvtier")
    level = log.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "handlers", [])
        patch.setattr(log, "propagate", True)
        log.setLevel(logging.NOTSET)
        yield
        log.setLevel(level)


@pytest.fixture(autouse=True)
def _a_busy_machine_adds_no_lines() -> Iterator[None]:
    """Engines in this process do not say that other tests keep the cores from them."""
    from kvtier_core.engine import starvation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starvation, "_EVERY", math.inf)
        yield
