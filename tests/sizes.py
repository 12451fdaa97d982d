"""How long the tests take."""

import os
from collections.abc import Iterable, Sequence
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


def every_third(steps: Sequence[Any]) -> list[Any]:
    """`some` of many: those of a protocol, for instance, before each of which something is killed."""
    return some(steps, *steps[::3])


def _more(variant: Any) -> Any:
    values = variant if isinstance(variant, tuple) else (variant,)
    return pytest.param(*values, marks=pytest.mark.more)
