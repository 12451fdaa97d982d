"""How long the tests take: a plugin of pytest, and what the tests that can be made longer import."""

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import pytest

#: How many times as long as in `make test` campaigns, soaks, state machines and fuzzing are: 25 in `make test-long`.
LONG = int(os.environ.get("LONG", "1"))


def some(variants: Iterable[Any], *tried: Any) -> list[Any]:
    """Parameters of a test: `make test` has those in ``tried``, or the first one, and `make test-more` the others."""
    variants = list(variants)
    tried = tried or tuple(variants[:1])
    assert all(each in variants for each in tried), tried
    return [each if each in tried else _more(each) for each in variants]


def _more(variant: Any) -> Any:
    values = variant if isinstance(variant, tuple) else (variant,)
    return pytest.param(*values, marks=pytest.mark.more)


# Read when torch is imported, which tests/core does before tests/vllm/conftest.py. Threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # for `make gpu-check` it need not be installed
    from hypothesis import settings

    settings.register_profile("default", deadline=None)  # a busy machine is no failure
